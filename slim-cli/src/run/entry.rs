//! What `slim run` knows of a launcher.
//!
//! A launcher starts daemons on other hosts through an agent (ssh, or what the user chose), which carries no environment. So it gets
//! the wrapper `slim-rsh-agent` as its agent (see [`crate::agent`]), and the wrapper calls the agent of the user.

use super::line::{OptionRole, Syntax};

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
