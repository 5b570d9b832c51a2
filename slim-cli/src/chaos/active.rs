//! Faults in force.

use slim_lab::Error;
use slim_lab::faults::{lines, link, nft};

use super::stopped::{StopCounts, StoppedProcesses};

/// What faults of one run have in common: faults may overlap, and each one ends alone.
#[derive(Debug, Default)]
pub struct Ongoing {
    /// Processes that are stopped.
    pub stops: StopCounts,
    /// Lines with netem.
    pub lines: lines::NetemLines,
}

/// A fault in force; it ends when this is lifted or dropped.
#[derive(Debug)]
pub enum ActiveFault {
    /// Firewall rules.
    Firewall(Vec<nft::RuleGuard>),
    /// A link that is down.
    Link(link::Down),
    /// Addresses that are removed.
    Address(link::Removed),
    /// Lines with netem.
    Netem(Vec<lines::LineGuard>),
    /// Processes that are stopped.
    Stopped(StoppedProcesses),
}

impl ActiveFault {
    /// Ends the fault. Returns what it did, if that is known.
    pub fn lift(self) -> Result<Option<String>, Error> {
        match self {
            Self::Firewall(guards) => {
                let mut packets = 0;
                for guard in guards {
                    packets += guard.lift()?.packets;
                }
                Ok(Some(format!("{packets} packets stopped")))
            }
            Self::Link(down) => down.lift().map(|()| None),
            Self::Address(removed) => removed.lift().map(|()| None),
            Self::Netem(guards) => {
                // All end, also if one fails.
                let ends: Vec<_> = guards.into_iter().map(lines::LineGuard::lift).collect();
                ends.into_iter().collect::<Result<_, _>>().map(|()| None)
            }
            Self::Stopped(stopped) => {
                drop(stopped);
                Ok(None)
            }
        }
    }
}
