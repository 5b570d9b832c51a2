//! The peer processes. Each is kept once, however many flows lead to it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use crate::ids::EndpointId;
use crate::transport::OtherLocator;
use crate::wire::{HelloAck, feature};

/// Maximum number of entries for locators of other kinds of transport.
const TOLD: usize = 4096;
/// Number of records below which unused ones are not searched for.
const LEAST: usize = 64;

/// The description of a process in its HELLO or HELLO_ACK.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PeerProcess {
    pub(super) id: EndpointId,
    pub(super) addrs: Box<[IpAddr]>,
    pub(super) resume_port: u16,
    pub(super) control_port: u16,
    /// The feature bits that we know.
    pub(super) features: u64,
    /// The process has told the meeting point that it is elsewhere than when the flow began.
    pub(super) moved: bool,
}

impl From<&HelloAck> for PeerProcess {
    fn from(ack: &HelloAck) -> Self {
        PeerProcess {
            id: ack.endpoint,
            addrs: ack.addrs[..].into(),
            resume_port: ack.resume_port,
            control_port: ack.control_port,
            features: ack.features & feature::ALL,
            moved: false,
        }
    }
}

/// The locators of other kinds of transport than TCP that a process has told.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ToldLocators {
    /// Serial number of these locators.
    pub(super) serial: u64,
    /// Serial number of our locators that the process has confirmed; 0 while there is none.
    pub(super) heard: u64,
    /// The locators.
    pub(super) locators: Box<[OtherLocator]>,
}

/// The peer processes of all flows, and some that no flow has any more.
#[derive(Default)]
pub(super) struct Processes {
    known: BTreeSet<Arc<PeerProcess>>,
    /// By process, and the address of the flow under whose key the locators were told.
    told: BTreeMap<(EndpointId, IpAddr), ToldLocators>,
    /// Number of records from which on unused ones are removed.
    room: usize,
    /// Processes that have answered at their control port or resume port, which a firewall may close.
    reached: BTreeSet<EndpointId>,
    /// Processes that were found to be out of reach at these ports.
    shut: BTreeSet<EndpointId>,
}

impl Processes {
    /// The shared record of this process. If the process has changed its description, it gets a new
    /// record, and older flows keep the old one.
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

    /// Stores the locators that a process at this address has told. False if they are out of date, or if the table is full.
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

    /// The locators of other kinds of transport than TCP that a process at this address has told.
    pub(super) fn locators(&self, id: EndpointId, at: IpAddr) -> &[OtherLocator] {
        self.told.get(&(id, at)).map_or(&[], |told| &told.locators)
    }

    /// Whether the process has confirmed our locators with this serial number.
    pub(super) fn has_heard(&self, id: EndpointId, at: IpAddr, serial: u64) -> bool {
        let told = self.told.get(&(id, at));
        told.is_some_and(|told| told.heard == serial)
    }

    /// A process has answered at its control port or its resume port.
    pub(super) fn reached(&mut self, id: EndpointId) {
        self.reached.insert(id);
        self.shut.remove(&id);
    }

    /// A process was tested at both ports, and has answered at neither. No effect if it has ever answered.
    pub(super) fn shut(&mut self, id: EndpointId) {
        if !self.was_reached(id) {
            self.shut.insert(id);
        }
    }

    /// The verdict that the process is out of reach does not hold any more.
    pub(super) fn not_shut(&mut self, id: EndpointId) {
        self.shut.remove(&id);
    }

    pub(super) fn is_shut(&self, id: EndpointId) -> bool {
        self.shut.contains(&id)
    }

    /// Whether the process has ever answered at its control port or resume port.
    pub(super) fn was_reached(&self, id: EndpointId) -> bool {
        self.reached.contains(&id)
    }

    /// Forgets processes that neither a flow nor any other table refers to.
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
    /// Whether a process has announced this address.
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
            moved: false,
        }
    }

    #[test]
    fn equal_records_are_kept_once() {
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
    fn only_newer_locators_replace_older_ones() {
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
    fn only_records_that_no_flow_uses_are_forgotten() {
        let mut processes = Processes::default();
        let kept = processes.share(process(0, &[]));
        for pid in 1..10 * LEAST as u32 {
            processes.share(process(pid, &[]));
        }
        assert!(processes.known.len() <= LEAST);
        assert!(Arc::ptr_eq(&kept, &processes.share(process(0, &[]))));
    }
}
