//! What `slim run` knows of each MPI: one entry of a table. docs/MPI.md says what was tested with each.
//!
//! A launcher starts daemons on other hosts through an agent (ssh, or what the user chose), which carries no environment. So it gets
//! the wrapper `slim-rsh-agent` as its agent (see [`crate::agent`]), and the wrapper calls the agent of the user.

/// A kind of launcher.
#[derive(Debug, PartialEq, Eq)]
pub struct MpiEntry {
    /// Its name in messages.
    pub name: &'static str,
    /// What `--version` prints before the version. One of these is enough.
    pub marks: &'static [&'static str],
    /// The first number of the versions that this entry is for; empty: all.
    pub majors: &'static [u32],
    /// Set for Open MPI, which has parameters (MCA), a native component and recovery.
    pub open_mpi: Option<OpenMpi>,
    /// How ranks get variables.
    pub export: Export,
    /// How remote daemons are started.
    pub agent: AgentChoice,
    /// Where the hosts of the job are named.
    pub hosts: HostOptions,
}

/// The Open MPI series that differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMpi {
    /// 4.x: `orted`.
    V4,
    /// 5.x: `prted`.
    V5,
}

/// How the launcher is told which variables the ranks get.
#[derive(Debug, PartialEq, Eq)]
pub enum Export {
    /// The option is followed by the name of a variable of the launcher, or by `NAME=VALUE`.
    Names(&'static [&'static str]),
    /// The option is followed by the name and by the value.
    Values(&'static [&'static str]),
}

/// How the user chooses the agent that starts daemons on other hosts.
#[derive(Debug, PartialEq, Eq)]
pub struct AgentChoice {
    /// Options with the agent as their value.
    pub options: &'static [&'static str],
    /// Options that set the parameter named next, and the parameters that name the agent.
    pub parameters: (&'static [&'static str], &'static [&'static str]),
    /// Variables; `slim run` sets the first.
    pub variables: &'static [&'static str],
    /// Files with parameters: below the user's home, and in the directories for the system's.
    pub files: Option<(&'static str, &'static str)>,
    /// The other ways to start daemons, if there are any.
    pub starters: Option<Starters>,
    /// The agent if none is chosen, in the syntax of [`crate::agent::AGENT_VARIABLE`].
    pub default: &'static str,
}

/// The ways in which a launcher can start daemons, if there are others than by an agent.
#[derive(Debug, PartialEq, Eq)]
pub struct Starters {
    /// Options with the way as their value.
    pub options: &'static [&'static str],
    /// Variables with it.
    pub variables: &'static [&'static str],
    /// Those that use an agent, which has the same name. All others carry the environment.
    pub by_agent: &'static [&'static str],
    /// Variables of batch systems, which start the daemons unless the user chooses something else.
    pub batch: &'static [&'static str],
}

/// Options of the command line, to find the hosts of the job in it. The word after an option that is not listed here is its value.
#[derive(Debug, PartialEq, Eq)]
pub struct HostOptions {
    /// Options with a list of hosts.
    pub lists: &'static [&'static str],
    /// Options with the name of a file with a list of hosts.
    pub files: &'static [&'static str],
    /// Variables with the name of such a file.
    pub variables: &'static [&'static str],
    /// Options with two values.
    pub pairs: &'static [&'static str],
    /// Common options without a value; the next word may be the program.
    pub flags: &'static [&'static str],
}

const OPEN_MPI_4: MpiEntry = MpiEntry {
    name: "Open MPI 4",
    // It calls itself OpenRTE unless it is started under the name mpirun.
    marks: &["(Open MPI)", "(OpenRTE)"],
    majors: &[4],
    open_mpi: Some(OpenMpi::V4),
    export: Export::Names(&["-x", "--x"]),
    agent: AgentChoice {
        options: &[],
        parameters: (
            &["--mca", "-mca", "--gmca", "-gmca"],
            &["plm_rsh_agent", "orte_rsh_agent", "pls_rsh_agent"],
        ),
        variables: &[
            "OMPI_MCA_plm_rsh_agent",
            "OMPI_MCA_orte_rsh_agent",
            "OMPI_MCA_pls_rsh_agent",
        ],
        files: Some((".openmpi/mca-params.conf", "openmpi-mca-params.conf")),
        starters: None,
        default: "ssh : rsh",
    },
    hosts: OPEN_MPI_HOSTS,
};

const OPEN_MPI_5: MpiEntry = MpiEntry {
    name: "Open MPI 5",
    marks: &["(Open MPI)", "(OpenRTE)"],
    majors: &[5],
    open_mpi: Some(OpenMpi::V5),
    export: Export::Names(&["-x", "--x"]),
    agent: AgentChoice {
        options: &[],
        parameters: (
            &["--mca", "-mca", "--gmca", "-gmca", "--prtemca", "-prtemca"],
            &["plm_ssh_agent", "plm_rsh_agent"],
        ),
        variables: &["PRTE_MCA_plm_ssh_agent"],
        files: Some((".prte/mca-params.conf", "prte-mca-params.conf")),
        starters: None,
        default: "ssh : rsh",
    },
    hosts: OPEN_MPI_HOSTS,
};

/// `prterun`, the launcher of Open MPI 5 under its own name.
const PRRTE: MpiEntry = MpiEntry {
    name: "PRRTE",
    marks: &["(PRRTE)"],
    majors: &[],
    ..OPEN_MPI_5
};

const OPEN_MPI_HOSTS: HostOptions = HostOptions {
    lists: &["-H", "-host", "--host"],
    files: &[
        "-hostfile",
        "--hostfile",
        "-machinefile",
        "--machinefile",
        "--default-hostfile",
    ],
    variables: &[
        "OMPI_MCA_orte_default_hostfile",
        "PRTE_MCA_prte_default_hostfile",
    ],
    pairs: &[
        "-mca",
        "--mca",
        "-gmca",
        "--gmca",
        "-prtemca",
        "--prtemca",
        "-pmixmca",
        "--pmixmca",
    ],
    flags: &[
        "-q",
        "-v",
        "-d",
        "--quiet",
        "--verbose",
        "--oversubscribe",
        "-oversubscribe",
        "--nooversubscribe",
        "--allow-run-as-root",
        "--report-bindings",
        "-report-bindings",
        "--display-map",
        "--display-allocation",
        "--tag-output",
        "--timestamp-output",
        "--use-hwthread-cpus",
        "--bynode",
        "--byslot",
        "--nolocal",
        "-nolocal",
        "--enable-recovery",
        "--do-not-launch",
    ],
};

/// MPICH's launcher, hydra.
const MPICH: MpiEntry = MpiEntry {
    name: "MPICH",
    marks: &["HYDRA build details:"],
    majors: &[],
    open_mpi: None,
    export: Export::Values(&["-genv", "--genv", "-env", "--env"]),
    agent: AgentChoice {
        options: &[
            "-launcher-exec",
            "--launcher-exec",
            "-bootstrap-exec",
            "--bootstrap-exec",
        ],
        parameters: (&[], &[]),
        variables: &["HYDRA_LAUNCHER_EXEC", "HYDRA_BOOTSTRAP_EXEC"],
        files: None,
        starters: Some(Starters {
            options: &["-launcher", "--launcher", "-bootstrap", "--bootstrap"],
            variables: &["HYDRA_LAUNCHER", "HYDRA_BOOTSTRAP"],
            by_agent: &["ssh", "rsh"],
            batch: &[
                "SLURM_JOBID",
                "SLURM_JOB_ID",
                "LSB_MCPU_HOSTS",
                "PE_HOSTFILE",
                "LOADL_HOSTFILE",
            ],
        }),
        default: "ssh",
    },
    hosts: HostOptions {
        lists: &["-hosts", "--hosts", "-host", "--host"],
        files: &[
            "-f",
            "--f",
            "-hostfile",
            "--hostfile",
            "-machinefile",
            "--machinefile",
        ],
        variables: &["HYDRA_HOST_FILE"],
        pairs: &["-genv", "--genv", "-env", "--env"],
        flags: &[
            "-genvall",
            "-genvnone",
            "-envall",
            "-envnone",
            "-enable-x",
            "-disable-x",
            "-v",
            "-verbose",
            "-info",
            "-l",
            "-prepend-rank",
            "-print-all-exitcodes",
            "-profile",
            "-disable-auto-cleanup",
            "-disable-hostname-propagation",
            "-skip-launch-node",
            "-pmi-port",
        ],
    },
};

/// All of them. The first whose mark and version fit is taken.
pub const ALL: [&MpiEntry; 4] = [&OPEN_MPI_4, &OPEN_MPI_5, &PRRTE, &MPICH];

/// The MPI whose launcher prints this for `--version`.
pub fn of_version(text: &str) -> Option<&'static MpiEntry> {
    ALL.into_iter().find(|mpi| {
        let behind = mpi.marks.iter().find_map(|mark| text.split(mark).nth(1));
        let is_ours = |text: &str| {
            let major = text.trim_start().split('.').next();
            let major = major.and_then(|major| major.parse().ok());
            major.is_some_and(|major| mpi.majors.contains(&major))
        };
        behind.is_some_and(|text| mpi.majors.is_empty() || is_ours(text))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launchers_are_recognised_by_their_version_text() {
        let name = |text| of_version(text).map(|mpi| mpi.name);
        for (text, want) in [
            ("mpirun (Open MPI) 4.1.4\n\nReport bugs", Some("Open MPI 4")),
            ("mpirun.openmpi (OpenRTE) 4.1.4", Some("Open MPI 4")),
            ("prterun (PRRTE) 3.0.8", Some("PRRTE")),
            ("mpirun (Open MPI) 5.0.11\n", Some("Open MPI 5")),
            ("mpirun (Open MPI) 3.1.6", None),
            ("mpirun (Open MPI) 6.0.0a1", None),
            ("HYDRA build details:\n Version: 4.0.2", Some("MPICH")),
            ("Intel(R) MPI Library for Linux* OS, Version 2021.10", None),
            ("", None),
        ] {
            assert_eq!(name(text), want, "{text}");
        }
    }
}
