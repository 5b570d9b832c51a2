//! Hosts that refuse HELLO, so that they are not asked about every connection.
//!
//! A host sends few ICMP messages (see `inquiry.rs`). A process that makes many short connections
//! to one without SLIM would soon have no answer to HELLO at all.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use crate::ids::Time;

/// What is remembered of hosts that refuse HELLO.
#[derive(Default)]
pub(super) struct Refusals {
    /// By address and port that was connected: first and latest refusal.
    known: BTreeMap<SocketAddr, (Time, Time)>,
}

/// A listener that gets SLIM later is noticed after this.
const REFUSAL_AGE: Duration = Duration::from_secs(5);
/// One refusal is remembered only as a beginning: whoever connects to a process that is starting
/// may find its listener a moment before its control socket.
const REFUSAL_GRACE: Duration = Duration::from_millis(50);
/// How long the first refusal counts as such.
const REFUSAL_MEMORY: Duration = Duration::from_secs(60);
/// Addresses remembered.
const REFUSALS: usize = 1024;

impl Refusals {
    pub(super) fn note(&mut self, now: Time, to: SocketAddr) {
        if let Some((first, last)) = self.known.get_mut(&to) {
            if now.since(*last) >= REFUSAL_MEMORY {
                *first = now;
            }
            *last = now;
            return;
        }
        if self.known.len() >= REFUSALS {
            self.known
                .retain(|_, (_, last)| now.since(*last) < REFUSAL_AGE);
        }
        if self.known.len() < REFUSALS {
            self.known.insert(to, (now, now));
        }
    }

    /// It need not be asked whether SLIM lives at `to`.
    pub(super) fn refuses(&self, now: Time, to: SocketAddr) -> bool {
        self.known.get(&to).is_some_and(|(first, last)| {
            last.since(*first) >= REFUSAL_GRACE && now.since(*last) < REFUSAL_AGE
        })
    }

    /// Forgets those that say nothing any more.
    pub(super) fn expire(&mut self, now: Time) {
        self.known
            .retain(|_, (_, last)| now.since(*last) < REFUSAL_MEMORY);
    }

    pub(super) fn len(&self) -> usize {
        self.known.len()
    }

    pub(super) fn forget(&mut self, to: SocketAddr) {
        self.known.remove(&to);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Time {
        Time(ms * 1000)
    }

    fn host(n: u16) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, 1], n))
    }

    #[test]
    fn what_has_refused_for_some_time_is_not_asked_for_a_while() {
        let mut refusals = Refusals::default();
        refusals.note(at(0), host(1));
        refusals.note(at(49), host(1));
        assert!(!refusals.refuses(at(49), host(1)), "it may be starting");
        refusals.note(at(50), host(1));
        assert!(refusals.refuses(at(5049), host(1)));
        assert!(!refusals.refuses(at(5050), host(1)), "it is asked again");
        assert!(!refusals.refuses(at(60), host(2)));
        // One more refusal is enough then, unless it is a long time ago.
        refusals.note(at(6000), host(1));
        assert!(refusals.refuses(at(6001), host(1)));
        refusals.note(at(100_000), host(1));
        assert!(!refusals.refuses(at(100_001), host(1)));
    }

    #[test]
    fn an_answer_ends_it() {
        let mut refusals = Refusals::default();
        refusals.note(at(0), host(1));
        refusals.note(at(100), host(1));
        refusals.forget(host(1));
        assert!(!refusals.refuses(at(101), host(1)));
    }

    #[test]
    fn the_table_is_bounded_and_what_is_old_makes_room() {
        let mut refusals = Refusals::default();
        for n in 0..REFUSALS as u16 + 10 {
            refusals.note(at(0), host(n));
        }
        assert_eq!(refusals.known.len(), REFUSALS);
        refusals.note(at(5000), host(9999));
        assert_eq!(refusals.known.len(), 1);
    }
}
