//! What `slim run` knows of each MPI: one entry of a table. docs/MPI.md says what was tested with each.
//!
//! A launcher starts daemons on other hosts through an agent (ssh, or what the user chose), which carries no environment. So it gets
//! the wrapper `slim-rsh-agent` as its agent (see [`crate::agent`]), and the wrapper calls the agent of the user.

use super::hydra::MPICH;
use super::line::{OptionRole, Syntax};
use super::openmpi::{OPEN_MPI_4, OPEN_MPI_5, PRRTE, PRRTE_DVM, PRRTE_RUN};
use super::srun::SLURM;

/// A kind of launcher.
#[derive(Debug, PartialEq, Eq)]
pub struct MpiEntry {
    /// Its name in messages.
    pub name: &'static str,
    /// The names of its programs, if it has names of its own.
    pub programs: &'static [&'static str],
    /// What `--version` prints before the version. One of these is enough. Empty: the name of the program says all.
    pub marks: &'static [&'static str],
    /// The first number of the versions that this entry is for; empty: all.
    pub majors: &'static [u32],
    /// Set for Open MPI, which has parameters (MCA), a native component and recovery.
    pub open_mpi: Option<OpenMpi>,
    /// Its options.
    pub syntax: Syntax,
    /// How ranks get variables.
    pub variables: RankVariables,
    /// How remote daemons are started, if it starts any.
    pub agent: Option<AgentChoice>,
    /// Variables with the name of a file with a list of hosts.
    pub host_files: &'static [&'static str],
    /// The file with options that it reads after the command line.
    pub option_file: Option<OptionFile>,
}

/// How ranks get the variables of SLIM.
#[derive(Debug, PartialEq, Eq)]
pub enum RankVariables {
    /// By an option for each, which is followed by the variable: [`OptionRole::Export`] or [`OptionRole::Assign`].
    ByOption(&'static str, OptionRole),
    /// They get the environment of the launcher, or what a list says.
    FromEnvironment,
}

impl RankVariables {
    /// The option, if there is one.
    pub fn option(&self) -> &'static str {
        match self {
            Self::ByOption(option, _) => option,
            Self::FromEnvironment => "",
        }
    }
}

/// The Open MPI series that differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMpi {
    /// 4.x: `orted`.
    V4,
    /// 5.x: `prted`.
    V5,
}

/// How the user chooses the agent that starts daemons on other hosts.
#[derive(Debug, PartialEq, Eq)]
pub struct AgentChoice {
    /// The parameters that name the agent.
    pub parameters: &'static [&'static str],
    /// Variables; `slim run` sets the first.
    pub variables: &'static [&'static str],
    /// Files with parameters: below the user's home, and in the directories for the system's.
    pub files: Option<(&'static str, &'static str)>,
    /// The other ways to start daemons, if there are any.
    pub starters: Option<Starters>,
    /// The agent is one program, whose name may have blanks and colons. Otherwise it is as in
    /// [`crate::agent::AGENT_VARIABLE`]: programs with arguments.
    pub is_one_word: bool,
    /// The agent if none is chosen.
    pub default: &'static str,
}

/// The ways in which a launcher can start daemons, if there are others than by an agent.
#[derive(Debug, PartialEq, Eq)]
pub struct Starters {
    /// Variables with the way.
    pub variables: &'static [&'static str],
    /// Those that use an agent, which has the same name. All others carry the environment.
    pub by_agent: &'static [&'static str],
    /// The variable with the name of the resource manager.
    pub manager: &'static str,
    /// The resource managers that start the daemons unless the user chooses something else.
    pub batch: &'static [BatchSystem],
}

/// A batch system, which is the resource manager if the user chooses none.
#[derive(Debug, PartialEq, Eq)]
pub struct BatchSystem {
    /// Its name as a resource manager.
    pub name: &'static str,
    /// It is recognised if of each of these a variable is set.
    pub needs: &'static [&'static [&'static str]],
}

/// A file with options. The first that can be opened is read.
#[derive(Debug, PartialEq, Eq)]
pub struct OptionFile {
    /// The variable that names it.
    pub variable: &'static str,
    /// Its path below the user's home.
    pub user: &'static str,
    /// The end of the path that the launcher has in its program file.
    pub system: &'static str,
    /// The option with the agent, which the file may have as well.
    pub agent: &'static str,
}

/// All of them. The first whose program, mark and version fit is taken.
pub const ALL: [&MpiEntry; 7] = [
    &OPEN_MPI_4,
    &OPEN_MPI_5,
    &PRRTE_DVM,
    &PRRTE_RUN,
    &PRRTE,
    &MPICH,
    &SLURM,
];

/// The entry that is known by the name of its program alone.
pub fn of_program(name: &str) -> Option<&'static MpiEntry> {
    let known = |mpi: &&MpiEntry| mpi.marks.is_empty() && mpi.programs.contains(&name);
    ALL.into_iter().find(known)
}

/// The MPI whose launcher has this name and prints this for `--version`.
pub fn of_version(program: &str, text: &str) -> Option<&'static MpiEntry> {
    let named = |mpi: &&MpiEntry| mpi.programs.is_empty() || mpi.programs.contains(&program);
    ALL.into_iter().filter(named).find(|mpi| {
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
        let name = |text| of_version("mpirun", text).map(|mpi| mpi.name);
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

    #[test]
    fn launchers_with_names_of_their_own_are_recognised_by_them() {
        let name = |program| of_version(program, "x (PRRTE) 3.0.8").map(|mpi| mpi.name);
        assert_eq!(name("prterun"), Some("PRRTE"));
        assert_eq!(name("prte"), Some("PRRTE's prte"));
        assert_eq!(name("prun"), Some("PRRTE's prun"));
        assert_eq!(of_version("prun", "another prun"), None);
        assert_eq!(of_program("srun").map(|mpi| mpi.name), Some("Slurm"));
        assert_eq!(of_program("prun"), None);
    }
}
