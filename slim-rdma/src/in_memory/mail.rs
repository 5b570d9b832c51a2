//! Datagrams of all hosts.

use std::collections::{BTreeMap, VecDeque};

use super::Cuts;
use super::Fabric;
use super::ports::{PARTITION, gid};
use crate::address::QpNumber;
use crate::datagrams::{DatagramSource, Datagrams, MAX_DATAGRAM, ReceivedDatagram};
use crate::locator::PortLocator;
use crate::verbs::VerbsError;

/// Numbers of these queues: far from those of queue pairs.
const FIRST_NUMBER: u32 = 1000;
/// Receives of a queue; a datagram that finds none is lost.
const RECEIVES: usize = 32;
/// EINVAL: a queue that is broken, or bytes that do not fit.
const INVALID: VerbsError = VerbsError {
    call: "datagrams in memory",
    errno: 22,
};

#[derive(Debug)]
struct MailQueue {
    host: usize,
    queue_key: u32,
    inbox: VecDeque<ReceivedDatagram>,
    armed: bool,
    broken: bool,
}

/// A datagram on its way.
#[derive(Clone, Debug)]
struct Flight {
    from: DatagramSource,
    to: PortLocator,
    bytes: Vec<u8>,
}

#[derive(Debug, Default)]
pub(super) struct Mail {
    queues: BTreeMap<QpNumber, MailQueue>,
    flights: Vec<Flight>,
    is_lost: Option<fn(&[u8]) -> bool>,
    count: u32,
}

/// What has become of a datagram.
pub(super) enum MailDelivery {
    /// There is none.
    None,
    /// It is in its queue, which has asked for a report, or has not.
    Taken(Option<(usize, QpNumber)>),
    Dropped,
}

impl Mail {
    pub(super) fn is_empty(&self) -> bool {
        self.queues.is_empty()
    }

    pub(super) fn on_way(&self) -> usize {
        self.flights.len()
    }

    pub(super) fn lose(&mut self, at: usize) {
        if at < self.flights.len() {
            self.flights.remove(at);
        }
    }

    pub(super) fn deliver(&mut self, at: usize, again: bool, cuts: &Cuts) -> MailDelivery {
        if at >= self.flights.len() {
            return MailDelivery::None;
        }
        let Flight { from, to, bytes } = match again {
            true => self.flights[at].clone(),
            false => self.flights.remove(at),
        };
        let sender = self.queues.get(&from.number);
        let is_lost = self.is_lost.is_some_and(|is_lost| is_lost(&bytes))
            || sender.is_some_and(|queue| cuts.has(queue.host));
        let queue = self.queues.get_mut(&to.number).filter(|queue| {
            let there = (gid(queue.host), queue.queue_key) == (to.gid, to.queue_key);
            there
                && !is_lost
                && !cuts.has(queue.host)
                && !queue.broken
                && queue.inbox.len() < RECEIVES
        });
        let Some(queue) = queue else {
            return MailDelivery::Dropped;
        };
        queue.inbox.push_back(ReceivedDatagram { from, bytes });
        let armed = std::mem::take(&mut queue.armed);
        MailDelivery::Taken(armed.then_some((queue.host, to.number)))
    }
}

impl Fabric {
    /// Datagrams on their way.
    pub fn datagrams_on_way(&self) -> usize {
        self.state().mail.on_way()
    }

    /// Sends a datagram that looks as if it came from there.
    pub fn forge(&self, from: DatagramSource, to: &PortLocator, bytes: &[u8]) {
        let mut state = self.state();
        state.mail.flights.push(Flight {
            from,
            to: *to,
            bytes: bytes.to_vec(),
        });
        state.ring_for_work();
    }

    /// From now on datagrams of which this is true are lost when they arrive.
    pub fn lose_datagrams_if(&self, is_lost: fn(&[u8]) -> bool) {
        self.state().mail.is_lost = Some(is_lost);
    }
}

/// A queue for datagrams of an adapter in memory.
#[derive(Debug)]
pub struct MemoryDatagrams {
    fabric: Fabric,
    locator: PortLocator,
    refuses: Option<i32>,
    refused: u64,
}

impl MemoryDatagrams {
    pub(super) fn open(fabric: Fabric, host: usize) -> Self {
        let mut state = fabric.state();
        let number = QpNumber(FIRST_NUMBER + state.mail.count);
        state.mail.count += 1;
        // The keys of two queues differ.
        let queue_key = number.0.wrapping_mul(0x9e37_79b1) >> 1;
        let queue = MailQueue {
            host,
            queue_key,
            inbox: VecDeque::new(),
            armed: false,
            broken: false,
        };
        state.mail.queues.insert(number, queue);
        drop(state);
        let locator = PortLocator {
            gid: gid(host),
            lid: 0,
            partition: PARTITION,
            number,
            queue_key,
        };
        MemoryDatagrams {
            fabric,
            locator,
            refuses: None,
            refused: 0,
        }
    }

    /// From now on each send fails with this error, as if there were no way to any port.
    pub fn refuse_sends(&mut self, errno: i32) {
        self.refuses = Some(errno);
    }

    /// Number of sends that were refused in this way.
    pub fn refused(&self) -> u64 {
        self.refused
    }

    /// The queue fails.
    pub fn fail(&mut self) {
        self.with(|queue| {
            queue.broken = true;
            queue.inbox.clear();
        });
    }

    /// Runs `f` with the queue, which is there as long as `self`.
    fn with<R>(&self, f: impl FnOnce(&mut MailQueue) -> R) -> Option<R> {
        let mut state = self.fabric.state();
        state.mail.queues.get_mut(&self.locator.number).map(f)
    }
}

impl Datagrams for MemoryDatagrams {
    fn locator(&self) -> PortLocator {
        self.locator
    }

    fn send(&mut self, to: &PortLocator, bytes: &[u8]) -> Result<(), VerbsError> {
        if bytes.len() > MAX_DATAGRAM || self.is_broken() {
            return Err(INVALID);
        }
        if let Some(errno) = self.refuses {
            self.refused += 1;
            return Err(VerbsError::new("send", errno));
        }
        let from = DatagramSource {
            number: self.locator.number,
            lid: 0,
            gid: Some(self.locator.gid),
        };
        self.fabric.forge(from, to, bytes);
        Ok(())
    }

    fn receive(&mut self) -> Option<ReceivedDatagram> {
        self.with(|queue| queue.inbox.pop_front())?
    }

    fn arm(&mut self) -> Result<(), VerbsError> {
        match self.with(|queue| queue.armed = !queue.broken) {
            Some(()) if !self.is_broken() => Ok(()),
            _ => Err(INVALID),
        }
    }

    fn is_broken(&self) -> bool {
        self.with(|queue| queue.broken).unwrap_or(true)
    }
}

impl Drop for MemoryDatagrams {
    fn drop(&mut self) {
        self.fabric.state().mail.queues.remove(&self.locator.number);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Step;
    use super::*;
    use crate::verbs::Verbs;

    #[test]
    fn datagrams_come_as_the_test_wants() {
        let fabric = Fabric::new(1);
        let mut adapter = fabric.adapter(1);
        let (mut near, mut far) = (fabric.adapter(0).datagrams(), adapter.datagrams());
        let (a, b) = (near.locator(), far.locator());
        assert!(a.is_possible() && b.is_possible() && a != b);
        far.arm().unwrap();
        for n in 0..4 {
            near.send(&b, &[n]).unwrap();
        }
        assert_eq!((far.receive(), adapter.reported()), (None, None));
        // The second twice, the first not at all, the fourth before the third.
        for step in [
            Step::DeliverTwice(1),
            Step::LoseDatagram(0),
            Step::Deliver(2),
            Step::Deliver(0),
            Step::Deliver(0),
            Step::Deliver(0),
        ] {
            fabric.take(step);
        }
        assert_eq!(
            (adapter.reported(), adapter.reported()),
            (Some(b.number), None)
        );
        let got: Vec<_> = std::iter::from_fn(|| far.receive()).collect();
        let numbers: Vec<_> = got.iter().map(|d| d.bytes[0]).collect();
        assert_eq!(numbers, [1, 3, 1, 2]);
        assert!(got.iter().all(|d| d.from.may_be(&a) && !d.from.may_be(&b)));
        // Another key, another port, too long, too many, and one that has failed.
        let wrong = PortLocator {
            queue_key: b.queue_key ^ 1,
            ..b
        };
        near.send(&wrong, &[5]).unwrap();
        near.send(&PortLocator { gid: a.gid, ..b }, &[5]).unwrap();
        fabric.run();
        assert_eq!((far.receive(), fabric.tallies().undelivered), (None, 2));
        assert!(near.send(&b, &[0; MAX_DATAGRAM + 1]).is_err());
        for _ in 0..=RECEIVES {
            near.send(&b, &[0; MAX_DATAGRAM]).unwrap();
        }
        fabric.run();
        assert_eq!(std::iter::from_fn(|| far.receive()).count(), RECEIVES);
        far.fail();
        assert!(far.is_broken() && far.arm().is_err() && far.send(&a, &[1]).is_err());
        near.send(&b, &[1]).unwrap();
        fabric.run();
        assert_eq!(far.receive(), None);
        drop((near, far));
        assert!(fabric.is_empty());
    }
}
