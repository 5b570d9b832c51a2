//! Faults in force.

use std::cell::RefCell;
use std::net::Ipv4Addr;

use slim_lab::Error;
use slim_lab::faults::{adapter, lines, link, nft};

use super::shared::{FaultShare, SharedFaults};
use super::stopped::{StopCounts, StoppedProcesses};

/// What faults of one run have in common: faults may overlap, and each one ends alone.
#[derive(Debug, Default)]
pub struct Ongoing {
    /// Processes that are stopped.
    pub stops: StopCounts,
    /// Lines with netem.
    pub lines: lines::NetemLines,
    /// The addresses that nodes have got, each with its node and path.
    pub new_addresses: RefCell<Vec<(Ipv4Addr, String, usize)>>,
    /// Links that are down.
    pub links: SharedFaults<link::Down>,
    /// Interfaces without addresses.
    pub addresses: SharedFaults<link::Removed>,
    /// Adapters for RDMA whose ports are down.
    pub ports: SharedFaults<adapter::PortDown>,
    /// Soft adapters that are deleted.
    pub adapters: SharedFaults<adapter::DeletedAdapter>,
}

/// The end of a fault of which the kernel waits for processes.
const STAYS: &str =
    "in use still: the kernel deletes it when its processes have ended, and it is added again then";

/// A fault in force; it ends when this is lifted or dropped.
#[derive(Debug)]
pub enum ActiveFault {
    /// A soft adapter that is deleted.
    Adapter(FaultShare<adapter::DeletedAdapter>),
    /// The port of an adapter that is down.
    Port(FaultShare<adapter::PortDown>),
    /// Firewall rules.
    Firewall(Vec<nft::RuleGuard>),
    /// A link that is down.
    Link(FaultShare<link::Down>),
    /// Addresses that are removed.
    Address(FaultShare<link::Removed>),
    /// Lines with netem.
    Netem(Vec<lines::LineGuard>),
    /// Processes that are stopped.
    Stopped(StoppedProcesses),
}

/// What is known of a fault at its end.
#[derive(Debug, Default)]
pub struct LiftedFault {
    /// What it did, if that is known.
    pub detail: Option<String>,
    /// Set if it is known to have met something.
    pub effect: bool,
}

impl ActiveFault {
    /// Ends the fault.
    pub fn lift(self) -> Result<LiftedFault, Error> {
        match self {
            Self::Firewall(guards) => {
                // All end, also if one fails.
                let ends: Vec<_> = guards.into_iter().map(nft::RuleGuard::lift).collect();
                let mut packets = 0;
                for end in ends {
                    packets += end?.packets;
                }
                return Ok(LiftedFault {
                    detail: Some(format!("{packets} packets stopped")),
                    effect: packets > 0,
                });
            }
            Self::Adapter(deleted) => {
                let back = deleted.last().map_or(Ok(true), |deleted| deleted.lift())?;
                return Ok(LiftedFault {
                    detail: (!back).then(|| STAYS.into()),
                    effect: false,
                });
            }
            Self::Port(down) => down.last().map_or(Ok(()), adapter::PortDown::lift)?,
            Self::Link(down) => down.last().map_or(Ok(()), link::Down::lift)?,
            Self::Address(removed) => removed.last().map_or(Ok(()), link::Removed::lift)?,
            Self::Netem(guards) => {
                let ends: Vec<_> = guards.into_iter().map(lines::LineGuard::lift).collect();
                ends.into_iter().collect::<Result<(), _>>()?;
            }
            Self::Stopped(stopped) => drop(stopped),
        }
        Ok(LiftedFault::default())
    }
}
