//! The contenders: bare sockets, and what is measured against them.

use std::fs;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use slim_core::event::Event;
use slim_lab::artifacts;
use slim_lab::mpi::{Flavor, Mpi};
use strum::Display;

use super::site::Site;
use crate::events;
use crate::failure::CliError;
use crate::run::preload;

/// A way of carrying a job's connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum, Display)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Contender {
    /// The kernel's TCP and nothing else.
    Bare,
    /// SLIM.
    #[strum(to_string = "SLIM")]
    Slim,
    /// The native component of Open MPI instead of btl/tcp; nothing is preloaded.
    #[strum(to_string = "btl/slim")]
    Component,
    /// The native component with queue pairs of verbs. It needs --adapters.
    #[strum(to_string = "btl/slim over verbs")]
    Verbs,
    /// The kernel's MPTCP, enabled by `mptcpize`.
    #[strum(to_string = "MPTCP")]
    Mptcp,
    /// Frames, sequence numbers and acknowledgements in user space, as in Eternal Terminal: what SLIM avoids
    /// (`programs/slim_framed.c`, written for this comparison only).
    Framed,
}

impl Contender {
    /// The name, for files.
    pub fn word(self) -> String {
        self.to_string().replace(['/', ' '], "-")
    }

    /// Whether nothing is preloaded: such a contender can use the adapters of this host.
    pub fn is_of_open_mpi(self) -> bool {
        matches!(self, Self::Bare | Self::Component | Self::Verbs)
    }
}

/// A contender that can run here, with the file that it needs, if any.
#[derive(Clone, Debug)]
pub struct Ready {
    /// The contender.
    pub contender: Contender,
    /// The value for `LD_PRELOAD`.
    pub library: Option<PathBuf>,
    /// The directory of the native component.
    pub component: Option<PathBuf>,
}

impl Contender {
    /// Finds the library, or the component for this MPI, which is built unless it is in `component`; the error names what is missing.
    pub fn ready(self, flavor: Flavor, component: Option<&Path>) -> Result<Ready, CliError> {
        let input = |e: slim_lab::Error| CliError::input(e.to_string());
        let component = match self {
            Self::Component | Self::Verbs => {
                let mpi = Mpi::find(flavor).map_err(input)?;
                Some(match component {
                    Some(dir) => given_component(&mpi, dir)?,
                    None => mpi.component().map_err(input)?,
                })
            }
            _ => None,
        };
        let library = match self {
            Self::Bare | Self::Component | Self::Verbs => None,
            Self::Slim => Some(preload::find(None)?),
            Self::Mptcp => Some(mptcp_library()?),
            Self::Framed => Some(framed_library()?),
        };
        Ok(Ready {
            contender: self,
            library,
            component,
        })
    }

    /// Checks that connections of a job that has just ended used the contender: a benchmark of a
    /// fallback would be worthless. `events` is the directory of the job's event logs.
    pub fn was_used(self, site: &Site, events: &Path) -> Result<(), CliError> {
        let used = match self {
            Self::Bare => true,
            // Those of queue pairs are looked at while the job runs.
            Self::Slim | Self::Component | Self::Verbs => events::records(events)
                .iter()
                .any(|record| record.event == Event::Live),
            Self::Mptcp => mptcp_handshakes(site)? > 0,
            Self::Framed => frames(events) > 0,
        };
        if used {
            return Ok(());
        }
        Err(CliError::failed(format!(
            "no connection of the job used {self}: there is nothing to compare"
        )))
    }
}

/// Checks that the component is there, and that this MPI loads components.
fn given_component(mpi: &Mpi, dir: &Path) -> Result<PathBuf, CliError> {
    mpi.built_component()
        .map_err(|e| CliError::input(e.to_string()))?;
    match dir.join("mca_btl_slim.so").is_file() {
        true => Ok(dir.to_owned()),
        false => Err(CliError::input(format!(
            "--component {}: no mca_btl_slim.so is there",
            dir.display()
        ))),
    }
}

fn framed_library() -> Result<PathBuf, CliError> {
    artifacts::source("slim_framed.c")
        .and_then(|source| artifacts::compile_library("cc", &source))
        .map_err(|e| CliError::input(e.to_string()))
}

/// The file in which the processes of a job report how many frames they sent and received.
pub fn frames_log(dir: &Path) -> PathBuf {
    dir.join("frames.%p.json")
}

/// Report of one process.
#[derive(Debug, Deserialize)]
struct Frames {
    sent: u64,
    received: u64,
}

/// Frames received by the processes of a job that has ended.
pub fn frames(dir: &Path) -> u64 {
    let files = fs::read_dir(dir).into_iter().flatten().flatten();
    let logs = files.filter(|f| f.file_name().to_string_lossy().starts_with("frames."));
    let counts = logs.filter_map(|log| {
        let text = fs::read_to_string(log.path()).ok()?;
        let frames: Frames = serde_json::from_str(&text).ok()?;
        Some(frames.received.min(frames.sent))
    });
    counts.sum()
}

fn mptcp_library() -> Result<PathBuf, CliError> {
    let missing = |what: &str| CliError::input(format!("MPTCP is left out: {what}"));
    let enabled = fs::read_to_string("/proc/sys/net/mptcp/enabled")
        .map_err(|_| missing("this kernel has none"))?;
    if enabled.trim() != "1" {
        return Err(missing("net.mptcp.enabled is 0"));
    }
    let dirs = fs::read_dir("/usr/lib").into_iter().flatten().flatten();
    dirs.map(|dir| dir.path().join("mptcpize/libmptcpwrap.so.0"))
        .chain(["/usr/lib/mptcpize/libmptcpwrap.so.0".into()])
        .find(|path| path.is_file())
        .ok_or_else(|| missing("mptcpize is not installed"))
}

/// Number of MPTCP handshakes that the first node has answered since the lab was made.
fn mptcp_handshakes(site: &Site) -> Result<u64, CliError> {
    let Site::Lab(lab) = site else {
        return Ok(0);
    };
    let text = lab
        .node(0)
        .exec("cat", &["/proc/net/netstat"])
        .map_err(|e| CliError::failed(e.to_string()))?;
    Ok(counter(&text, "MPTcpExt:", "MPCapableSYNRX").unwrap_or(0))
}

/// A counter of `/proc/net/netstat`. The file has a line of names and a line of values, both beginning with `group`.
fn counter(text: &str, group: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().filter(|line| line.starts_with(group));
    let (names, values) = (lines.next()?, lines.next()?);
    let at = names.split_whitespace().position(|n| n == name)?;
    values.split_whitespace().nth(at)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_counter_is_found_by_group_and_name() {
        let text = "TcpExt: A B\nTcpExt: 1 2\nMPTcpExt: MPCapableSYNRX Other\nMPTcpExt: 7 9\n";
        assert_eq!(counter(text, "MPTcpExt:", "MPCapableSYNRX"), Some(7));
        assert_eq!(counter(text, "MPTcpExt:", "None"), None);
        assert_eq!(counter(text, "NoExt:", "A"), None);
    }
}
