//! The processes at the other ends of our flows: each is kept once, however many flows lead to it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use crate::ids::EndpointId;
use crate::transport::OtherLocator;
use crate::wire::{HelloAck, feature};

/// Addresses of processes that have told about other kinds of transport.
const TOLD: usize = 4096;
/// Records kept at least before those that no flow has any more are looked for.
const LEAST: usize = 64;

/// What a process has told about itself in HELLO or HELLO_ACK.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PeerProcess {
    pub(super) id: EndpointId,
    pub(super) addrs: Box<[IpAddr]>,
    pub(super) resume_port: u16,
    pub(super) control_port: u16,
    /// Those that we know.
    pub(super) features: u64,
}

impl From<&HelloAck> for PeerProcess {
    fn from(ack: &HelloAck) -> Self {
        PeerProcess {
            id: ack.endpoint,
            addrs: ack.addrs[..].into(),
            resume_port: ack.resume_port,
            control_port: ack.control_port,
            features: ack.features & feature::ALL,
        }
    }
}

/// What a process has told about other kinds of transport than TCP.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ToldLocators {
    /// Number of what it has told.
    pub(super) serial: u64,
    /// Number of what we have told, and it has heard; 0 while that is not known.
    pub(super) heard: u64,
    /// How it is reached.
    pub(super) locators: Box<[OtherLocator]>,
}

/// All that flows have, and some that they had.
#[derive(Default)]
pub(super) struct Processes {
    known: BTreeSet<Arc<PeerProcess>>,
    /// By the address of it to which the flow goes under whose key it was told.
    told: BTreeMap<(EndpointId, IpAddr), ToldLocators>,
    /// How many there may be before they are looked through.
    room: usize,
    /// Those of them that have answered at a port of their own, which a firewall may close.
    reached: BTreeSet<EndpointId>,
    /// Those that were found to be out of reach there.
    shut: BTreeSet<EndpointId>,
}

impl Processes {
    /// The record of this process that other flows have, too. One that tells something new about itself has a new
    /// record, and older flows keep theirs.
    pub(super) fn share(&mut self, process: PeerProcess) -> Arc<PeerProcess> {
        if let Some(known) = self.known.get(&process) {
            return known.clone();
        }
        if self.known.len() >= self.room {
            self.forget_unused();
        }
        let process = Arc::new(process);
        self.known.insert(process.clone());
        process
    }

    /// A process with this address has told how it is reached. False if that is known to be out of date, or if too many have.
    pub(super) fn tell(&mut self, id: EndpointId, at: IpAddr, new: ToldLocators) -> bool {
        let full = self.told.len() >= TOLD;
        match self.told.get_mut(&(id, at)) {
            Some(told) if new.serial < told.serial => return false,
            Some(told) => {
                let heard = told.heard.max(new.heard);
                *told = ToldLocators { heard, ..new };
            }
            None if full => return false,
            None => drop(self.told.insert((id, at), new)),
        }
        true
    }

    /// How a process with this address is reached by other kinds of transport than TCP, as far as it has told.
    pub(super) fn locators(&self, id: EndpointId, at: IpAddr) -> &[OtherLocator] {
        self.told.get(&(id, at)).map_or(&[], |told| &told.locators)
    }

    /// Whether it has heard what we told under that number.
    pub(super) fn has_heard(&self, id: EndpointId, at: IpAddr, serial: u64) -> bool {
        let told = self.told.get(&(id, at));
        told.is_some_and(|told| told.heard == serial)
    }

    /// A process has answered at its control port or its resume port.
    pub(super) fn reached(&mut self, id: EndpointId) {
        self.reached.insert(id);
        self.shut.remove(&id);
    }

    /// A process has been asked at both of them, and has answered at neither.
    pub(super) fn shut(&mut self, id: EndpointId) {
        if !self.was_reached(id) {
            self.shut.insert(id);
        }
    }

    /// What is known of its being out of reach does not hold any more.
    pub(super) fn not_shut(&mut self, id: EndpointId) {
        self.shut.remove(&id);
    }

    pub(super) fn is_shut(&self, id: EndpointId) -> bool {
        self.shut.contains(&id)
    }

    /// Whether it ever has.
    pub(super) fn was_reached(&self, id: EndpointId) -> bool {
        self.reached.contains(&id)
    }

    /// Forgets those that no flow has any more.
    pub(super) fn forget_unused(&mut self) {
        self.known.retain(|known| Arc::strong_count(known) > 1);
        self.room = LEAST.max(2 * self.known.len());
        let alive: BTreeSet<EndpointId> = self.known.iter().map(|known| known.id).collect();
        self.reached.retain(|id| alive.contains(id));
        self.shut.retain(|id| alive.contains(id));
        self.told.retain(|(id, _), _| alive.contains(id));
    }

    pub(super) fn len(&self) -> usize {
        self.known.len() + self.told.len()
    }
}

impl Processes {
    /// Whether one of them has this address.
    pub(super) fn have(&self, ip: IpAddr) -> bool {
        self.known.iter().any(|known| known.addrs.contains(&ip))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::TransportKind;

    fn process(pid: u32, addrs: &[[u8; 4]]) -> PeerProcess {
        PeerProcess {
            id: EndpointId {
                host: [1; 16],
                pid,
                incarnation: 7,
            },
            addrs: addrs.iter().map(|ip| (*ip).into()).collect(),
            resume_port: 700,
            control_port: 701,
            features: 0,
        }
    }

    #[test]
    fn what_is_alike_is_kept_once() {
        let mut processes = Processes::default();
        let first = processes.share(process(1, &[[10, 0, 0, 1]]));
        let again = processes.share(process(1, &[[10, 0, 0, 1]]));
        let moved = processes.share(process(1, &[[10, 0, 0, 2]]));
        let other = processes.share(process(2, &[[10, 0, 0, 1]]));
        assert!(Arc::ptr_eq(&first, &again));
        assert_eq!(first.addrs[..], [IpAddr::from([10, 0, 0, 1])]);
        assert_eq!(moved.addrs[..], [IpAddr::from([10, 0, 0, 2])]);
        assert_eq!(other.id.pid, 2);
    }

    #[test]
    fn only_what_is_newer_replaces_what_was_told() {
        let told = |serial, heard, n: u8| ToldLocators {
            serial,
            heard,
            locators: OtherLocator::new(TransportKind::TEST, &[n])
                .into_iter()
                .collect(),
        };
        let mut processes = Processes::default();
        let id = processes.share(process(1, &[])).id;
        let [here, there] = [[10, 0, 0, 1], [10, 0, 0, 2]].map(IpAddr::from);
        assert!(processes.tell(id, here, told(2, 0, 2)));
        assert!(processes.tell(id, here, told(2, 7, 2)));
        assert!(processes.has_heard(id, here, 7));
        assert!(!processes.tell(id, here, told(1, 9, 1)));
        assert_eq!(processes.locators(id, here)[0].bytes(), [2]);
        assert!(processes.tell(id, here, told(3, 0, 3)));
        assert!(processes.has_heard(id, here, 7));
        assert_eq!(processes.locators(id, here)[0].bytes(), [3]);
        assert!(processes.locators(id, there).is_empty());
        for n in 1..TOLD as u32 {
            assert!(processes.tell(id, IpAddr::from(n.to_be_bytes()), told(1, 0, 1)));
        }
        assert!(!processes.tell(id, there, told(1, 0, 1)), "too many");
        assert!(processes.tell(id, here, told(4, 0, 4)));
        processes.forget_unused();
        assert_eq!(processes.len(), 0);
    }

    #[test]
    fn what_no_flow_has_is_forgotten_and_the_rest_is_not() {
        let mut processes = Processes::default();
        let kept = processes.share(process(0, &[]));
        for pid in 1..10 * LEAST as u32 {
            processes.share(process(pid, &[]));
        }
        assert!(processes.known.len() <= LEAST);
        assert!(Arc::ptr_eq(&kept, &processes.share(process(0, &[]))));
    }
}
