//! Addresses that refuse HELLO, so that HELLO is not sent for every connection to them.
//!
//! A host sends few ICMP messages (see `inquiry.rs`). A process that makes many short connections
//! to a process without SLIM would soon get no answer to HELLO at all.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use crate::ids::Time;

/// The refusals of HELLO.
#[derive(Default)]
pub(super) struct Refusals {
    /// First and latest refusal, by the address and port that the application connected to.
    known: BTreeMap<SocketAddr, (Time, Time)>,
}

/// After this long since the last refusal, HELLO is sent again: a process with SLIM may have the address by then.
const REFUSAL_AGE: Duration = Duration::from_secs(5);
/// A first refusal has no effect before another one comes this much later: a process that is starting
/// may have its listener a moment before its control socket.
const REFUSAL_GRACE: Duration = Duration::from_millis(50);
/// How long a refusal is remembered as an earlier one.
const REFUSAL_MEMORY: Duration = Duration::from_secs(60);
/// Maximum number of addresses remembered.
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

    /// Whether `to` refuses HELLO, so that none need be sent.
    pub(super) fn refuses(&self, now: Time, to: SocketAddr) -> bool {
        self.known.get(&to).is_some_and(|(first, last)| {
            last.since(*first) >= REFUSAL_GRACE && now.since(*last) < REFUSAL_AGE
        })
    }

    /// Forgets addresses without a refusal in the last [`REFUSAL_MEMORY`].
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
    fn an_address_that_has_refused_twice_is_not_asked_for_five_seconds() {
        let mut refusals = Refusals::default();
        refusals.note(at(0), host(1));
        refusals.note(at(49), host(1));
        assert!(!refusals.refuses(at(49), host(1)), "it may be starting");
        refusals.note(at(50), host(1));
        assert!(refusals.refuses(at(5049), host(1)));
        assert!(!refusals.refuses(at(5050), host(1)), "it is asked again");
        assert!(!refusals.refuses(at(60), host(2)));
        // After that, one more refusal is enough, unless the last one is a minute old.
        refusals.note(at(6000), host(1));
        assert!(refusals.refuses(at(6001), host(1)));
        refusals.note(at(100_000), host(1));
        assert!(!refusals.refuses(at(100_001), host(1)));
    }

    #[test]
    fn an_answer_clears_the_refusals() {
        let mut refusals = Refusals::default();
        refusals.note(at(0), host(1));
        refusals.note(at(100), host(1));
        refusals.forget(host(1));
        assert!(!refusals.refuses(at(101), host(1)));
    }

    #[test]
    fn the_table_is_bounded_and_old_entries_make_room() {
        let mut refusals = Refusals::default();
        for n in 0..REFUSALS as u16 + 10 {
            refusals.note(at(0), host(n));
        }
        assert_eq!(refusals.known.len(), REFUSALS);
        refusals.note(at(5000), host(9999));
        assert_eq!(refusals.known.len(), 1);
    }
}
