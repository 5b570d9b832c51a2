//! Rails that stand still: found by their acknowledgements, compared with the rails on other lines.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::{Rail, Rails};

/// A rail without an acknowledgement for this time and two round trips is suspected, if another rail has gone on meanwhile. On a
/// working line the peer's kernel acknowledges every few packets.
const STANDSTILL: Duration = Duration::from_millis(15);

/// How many times longer a rail must stand still if the others have nothing to deliver, and so do not show that the peer is well.
const IDLE_OTHERS: u32 = 4;
/// The peer's kernel delays the acknowledgement of fewer packets in flight than this, by up to 0.2 s.
const IN_FLIGHT: u32 = 4;
/// The time instead of [`STANDSTILL`] for so few packets.
const DELAYED: Duration = Duration::from_millis(250);

/// The progress of acknowledgements on a rail.
#[derive(Debug, Default)]
pub(super) struct RailAcks {
    bytes: u64,
    /// When the number of bytes has last grown.
    grew: Option<Instant>,
    /// Since when it has not grown although packets are in flight, or should be.
    stands: Option<Instant>,
}

impl Rail {
    /// Looks at the acknowledged bytes. If their number does not grow although packets are in flight, or should be: returns since when, and the
    /// time after which that is suspicious.
    fn look(&mut self, now: Instant) -> Option<(Instant, Duration)> {
        // No system call for idle rails: a process may have thousands.
        if !self.owes {
            return None;
        }
        let delivery = self.flow.delivery()?;
        self.owes = !self.backlog.is_empty() || delivery.acknowledged < delivery.sent;
        let acks = &mut self.acks;
        if acks.bytes != delivery.acknowledged {
            acks.bytes = delivery.acknowledged;
            acks.grew = Some(now);
            acks.stands = None;
        }
        if delivery.in_flight == 0 && !delivery.cannot_send {
            acks.stands = None;
            return None;
        }
        let since = *acks.stands.get_or_insert(now);
        let few = delivery.in_flight < IN_FLIGHT && !delivery.cannot_send;
        let limit = match few {
            true => DELAYED,
            false => STANDSTILL,
        };
        Some((since, limit + 2 * delivery.round_trip))
    }
}

impl Rails {
    /// Whether there are rails to compare.
    pub(crate) fn are_watched(&self) -> bool {
        self.all.len() + self.leaving.len() > 1
    }

    /// Finds rails that stand still while another rail goes on, and has their flows replaced over other lines. Returns whether there
    /// is any.
    pub(crate) fn watch(&mut self, now: Instant) -> bool {
        self.leaving.retain(|rail| !rail.is_over());
        let watched = self.all.iter_mut().chain(&mut self.leaving);
        let stands: Vec<_> = watched.map(|rail| rail.look(now)).collect();
        let mut any = false;
        for (at, stand) in stands.into_iter().enumerate() {
            let Some((since, limit)) = stand else {
                continue;
            };
            let ip = self.rails().nth(at).and_then(Rail::remote_ip);
            let stood = now.saturating_duration_since(since);
            let alone = stood >= IDLE_OTHERS * limit && self.others_are_idle(ip);
            if stood >= limit && (alone || self.others_go_on(ip, since, limit)) {
                let mut watched = self.all.iter_mut().chain(&mut self.leaving);
                if let Some(rail) = watched.nth(at) {
                    rail.flow.suspect();
                    rail.acks = RailAcks::default();
                    any = true;
                }
            }
        }
        any
    }

    /// Whether a rail on another line than that of the peer's address `ip` has delivered bytes after `since`, and does not stand still
    /// like the one there.
    fn others_go_on(&self, ip: Option<IpAddr>, since: Instant, limit: Duration) -> bool {
        self.on_other_lines(ip).any(|rail| {
            let acks = &rail.acks;
            acks.grew.is_some_and(|last| last >= since)
                && acks.stands.is_none_or(|stands| stands >= since + limit / 2)
        })
    }

    /// Whether a rail on another line than this one has nothing in flight.
    fn others_are_idle(&self, ip: Option<IpAddr>) -> bool {
        let mut others = self.on_other_lines(ip);
        others.any(|rail| rail.acks.stands.is_none())
    }

    fn on_other_lines(&self, line: Option<IpAddr>) -> impl Iterator<Item = &Rail> {
        let elsewhere = move |rail: &&Rail| rail.remote_ip().is_some_and(|ip| Some(ip) != line);
        self.all.iter().filter(elsewhere)
    }
}
