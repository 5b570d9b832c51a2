//! Jobs of two ranks of Open MPI on this host, each with an adapter for RDMA of its own. Adapters cannot be moved into the namespaces of a lab.

use std::{ffi::OsString, io, os::unix::process::CommandExt, path::Path, process::Command};

use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};

use super::{Mpi, component_arguments};
use crate::{Error, Netns, Result, faults::adapter};

/// The adapter of a rank, and the interface on the same line.
#[derive(Clone, Debug, PartialEq, Eq)]
struct RankAdapter {
    device: String,
    interface: String,
}

/// The adapters of rank 0 and rank 1.
#[derive(Clone, Debug)]
pub struct RankAdapters([RankAdapter; 2]);

/// Gives a rank its adapter. The arguments are both adapters with their interfaces, and then the program with its own.
const OWN_ADAPTER: &str = r#"
if [ "$OMPI_COMM_WORLD_RANK" = 0 ]; then adapter=$1 interface=$2; else adapter=$3 interface=$4; fi
shift 4
export OMPI_MCA_btl_tcp_if_include=$interface OMPI_MCA_btl_slim_if_include=$interface OMPI_MCA_btl_slim_verbs_ports=$adapter
exec "$@""#;

impl RankAdapters {
    /// The adapters of these names, if this host has them.
    pub fn find(names: &[String; 2]) -> Result<Self> {
        if names[0] == names[1] {
            return Err(Error::Invalid(format!(
                "both ranks would have the adapter {}: name two",
                names[0]
            )));
        }
        let host = Netns::current()?;
        let found = |device: &String| -> Result<RankAdapter> {
            Ok(RankAdapter {
                device: device.clone(),
                interface: adapter::interface_of(&host, device)?,
            })
        };
        Ok(Self([found(&names[0])?, found(&names[1])?]))
    }

    /// mpirun with its arguments, but for the program: the ranks communicate by `btl/tcp`, or by the component in this directory. It is asked to end when
    /// the thread that has started it is gone.
    pub fn mpirun(&self, mpi: &Mpi, component: Option<&Path>) -> Command {
        let mut command = Command::new(mpi.mpirun());
        if let Some(prefix) = &mpi.prefix {
            command.arg("--prefix").arg(prefix);
        }
        let list = match component {
            None => "tcp,self",
            Some(_) => "slim,self",
        };
        command
            .args(["--allow-run-as-root", "--oversubscribe", "-np", "2"])
            .args([
                "--bind-to",
                "none",
                "--mca",
                "pml",
                "ob1",
                "--mca",
                "btl",
                list,
            ])
            .args(
                component
                    .map(|dir| component_arguments(mpi, dir))
                    .unwrap_or_default(),
            )
            .env_remove("LD_PRELOAD");
        // Of a terminal's interrupt it hears by our end only: a second signal makes it end without its ranks.
        command.process_group(0);
        let parent = Some(getpid());
        // It ends its ranks then. Only it knows them.
        let end = move || {
            set_parent_process_death_signal(Some(Signal::TERM))?;
            match getppid() == parent {
                true => Ok(()),
                false => Err(io::ErrorKind::BrokenPipe.into()),
            }
        };
        // SAFETY: the closure runs between fork and exec and makes two system calls; it allocates nothing and takes no lock.
        unsafe { command.pre_exec(end) };
        command
    }

    /// What stands before the program on mpirun's command line, so that each rank uses its own adapter.
    pub fn before_program(&self) -> Vec<OsString> {
        let script = ["sh", "-c", OWN_ADAPTER, "sh"].map(str::to_owned);
        let ends = self.0.iter().flat_map(|end| [&end.device, &end.interface]);
        script.iter().chain(ends).map(OsString::from).collect()
    }
}

impl std::fmt::Display for RankAdapters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [first, second] = &self.0;
        write!(f, "{} to {} on this host", first.device, second.device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_gets_its_own_adapter() {
        let end = |device: &str, interface: &str| RankAdapter {
            device: device.into(),
            interface: interface.into(),
        };
        let adapters = RankAdapters([end("rx1", "v1"), end("rx2", "v2")]);
        for (rank, told) in [
            ("0", "rx1 v1 v1 an argument\n"),
            ("1", "rx2 v2 v2 an argument\n"),
        ] {
            let words = adapters.before_program();
            let print = "echo $OMPI_MCA_btl_slim_verbs_ports $OMPI_MCA_btl_slim_if_include $OMPI_MCA_btl_tcp_if_include \"$@\"";
            let output = Command::new(&words[0])
                .args(&words[1..])
                .args(["sh", "-c", print, "sh", "an argument"])
                .env("OMPI_COMM_WORLD_RANK", rank)
                .output();
            assert_eq!(String::from_utf8_lossy(&output.unwrap().stdout), told);
        }
    }
}
