//! Open MPI's `mpirun`: passes variables to the ranks, and the library to remote daemons.
//!
//! Ranks get the variables that `-x NAME` names. Remote daemons (`orted`, `prted`) are
//! started through an agent, ssh or another, which carries no environment. So `mpirun`
//! gets the wrapper `slim-rsh-agent` as its agent (see [`crate::agent`]), and the wrapper
//! calls the agent that the user chose.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use super::launcher::OpenMpi;
use crate::agent::AGENT_VARIABLE;

/// Options of `mpirun` that set a parameter of Open MPI itself.
const MCA: [&str; 5] = ["--mca", "-mca", "--gmca", "-gmca", "--omca"];

/// Open MPI's default agent.
pub const DEFAULT_AGENT: &str = "ssh : rsh";

/// An `mpirun` command line that carries SLIM, and changes to its environment.
#[derive(Debug, PartialEq, Eq)]
pub struct PreparedCommand {
    /// Arguments of `mpirun`.
    pub args: Vec<OsString>,
    /// Variables to set in the environment of `mpirun`.
    pub set: Vec<(String, OsString)>,
    /// Variables to remove from the environment of `mpirun`.
    pub unset: Vec<String>,
}

impl OpenMpi {
    /// MCA parameters by which the agent can be chosen on the command line.
    fn agent_parameters(self) -> &'static [&'static str] {
        match self {
            Self::V4 => &["plm_rsh_agent", "orte_rsh_agent", "pls_rsh_agent"],
            Self::V5 => &["plm_ssh_agent", "plm_rsh_agent"],
        }
    }

    /// Variables by which the agent can be chosen; we set the first.
    fn agent_variables(self) -> &'static [&'static str] {
        match self {
            Self::V4 => &[
                "OMPI_MCA_plm_rsh_agent",
                "OMPI_MCA_orte_rsh_agent",
                "OMPI_MCA_pls_rsh_agent",
            ],
            Self::V5 => &["PRTE_MCA_plm_ssh_agent"],
        }
    }

    /// Files in which the agent can be chosen, highest priority first.
    fn parameter_files(self, mpirun: &Path) -> Vec<PathBuf> {
        let (user, system) = match self {
            Self::V4 => (".openmpi/mca-params.conf", "openmpi-mca-params.conf"),
            Self::V5 => (".prte/mca-params.conf", "prte-mca-params.conf"),
        };
        let mut files = Vec::new();
        if let Some(home) = env::var_os("HOME") {
            files.push(Path::new(&home).join(user));
        }
        let real = mpirun.canonicalize();
        let program = real.as_deref().unwrap_or(mpirun);
        if let Some(prefix) = program.parent().and_then(Path::parent) {
            files.push(prefix.join("etc").join(system));
        }
        files.push(Path::new("/etc/openmpi").join(system));
        files
    }
}

/// The value of a parameter of Open MPI itself, if the user sets it on the command line of `mpirun` or in the environment.
pub fn parameter(args: &[OsString], name: &str) -> Option<String> {
    let in_env = || env::var_os(format!("OMPI_MCA_{name}"));
    on_line(args, name).or_else(|| Some(in_env()?.to_string_lossy().into_owned()))
}

/// The last value on the command line.
pub(super) fn on_line(args: &[OsString], name: &str) -> Option<String> {
    let mut set = args.windows(3).filter(|three| {
        let option = three[0].to_str().is_some_and(|word| MCA.contains(&word));
        option && three[1] == name
    });
    let last = set.next_back()?;
    Some(last[2].to_string_lossy().into_owned())
}

/// Builds the command line. `exported` are the names for `-x`; `library` is the path of
/// the preload library; `wrapper` is the path of `slim-rsh-agent`.
pub fn prepare(
    version: OpenMpi,
    mpirun: &Path,
    args: &[OsString],
    exported: &[&str],
    library: &Path,
    wrapper: &Path,
) -> PreparedCommand {
    let mut rewritten = Rewritten::of(version, args, library, wrapper);
    let mut front = Vec::new();
    for name in exported {
        if !(*name == "LD_PRELOAD" && rewritten.ranks_have_preload) {
            front.extend(["-x".into(), OsString::from(name)]);
        }
    }
    front.append(&mut rewritten.args);

    let chosen = rewritten
        .agent
        .or_else(|| agent_from_env(version))
        .or_else(|| agent_from_files(&version.parameter_files(mpirun), version))
        .unwrap_or_else(|| DEFAULT_AGENT.into());
    let variables = version.agent_variables();
    PreparedCommand {
        args: front,
        set: vec![
            (variables[0].into(), wrapper.into()),
            (AGENT_VARIABLE.into(), chosen.into()),
        ],
        unset: variables[1..].iter().map(|v| (*v).into()).collect(),
    }
}

/// The user's arguments, with the agent and `LD_PRELOAD` replaced in place.
struct Rewritten {
    args: Vec<OsString>,
    agent: Option<String>,
    ranks_have_preload: bool,
}

impl Rewritten {
    fn of(version: OpenMpi, args: &[OsString], library: &Path, wrapper: &Path) -> Self {
        let mut out = Self {
            args: Vec::with_capacity(args.len()),
            agent: None,
            ranks_have_preload: false,
        };
        let mut rest = args.iter();
        while let Some(arg) = rest.next() {
            out.args.push(arg.clone());
            match arg.to_str() {
                Some("--mca" | "-mca" | "--gmca" | "-gmca" | "--prtemca" | "-prtemca") => {
                    let (Some(name), Some(value)) = (rest.next(), rest.next()) else {
                        continue;
                    };
                    out.args.push(name.clone());
                    let ours = name
                        .to_str()
                        .is_some_and(|n| version.agent_parameters().contains(&n));
                    if ours {
                        out.agent = Some(value.to_string_lossy().into_owned());
                        out.args.push(wrapper.into());
                    } else {
                        out.args.push(value.clone());
                    }
                }
                Some("-x" | "--x") => {
                    let Some(pair) = rest.next() else { continue };
                    out.args.push(
                        match pair.to_str().and_then(|p| p.strip_prefix("LD_PRELOAD=")) {
                            Some(theirs) => {
                                out.ranks_have_preload = true;
                                let both = super::preload::joined(library, Some(theirs.as_ref()));
                                format!("LD_PRELOAD={both}").into()
                            }
                            None => pair.clone(),
                        },
                    );
                }
                _ => {}
            }
        }
        out
    }
}

fn agent_from_env(version: OpenMpi) -> Option<String> {
    version
        .agent_variables()
        .iter()
        .find_map(|name| env::var(name).ok())
        .filter(|v| !v.is_empty())
}

fn agent_from_files(files: &[PathBuf], version: OpenMpi) -> Option<String> {
    files
        .iter()
        .filter_map(|file| fs::read_to_string(file).ok())
        .find_map(|text| agent_in(&text, version.agent_parameters()))
}

fn agent_in(text: &str, names: &[&str]) -> Option<String> {
    text.lines()
        .filter(|line| !line.trim_start().starts_with('#'))
        .filter_map(|line| line.split_once('='))
        .filter(|(name, value)| names.contains(&name.trim()) && !value.trim().is_empty())
        .map(|(_, value)| value.trim().trim_matches('"').to_owned())
        .next_back()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIB: &str = "/s/libslim_preload.so";
    const WRAPPER: &str = "/s/slim-rsh-agent";

    fn rewrite(version: OpenMpi, args: &[&str]) -> (Vec<String>, Option<String>, bool) {
        let args: Vec<OsString> = args.iter().map(OsString::from).collect();
        let r = Rewritten::of(version, &args, Path::new(LIB), Path::new(WRAPPER));
        let text = r
            .args
            .into_iter()
            .map(|a| a.into_string().unwrap())
            .collect();
        (text, r.agent, r.ranks_have_preload)
    }

    #[test]
    fn a_chosen_agent_is_replaced_by_the_wrapper_in_place() {
        let (args, agent, _) = rewrite(
            OpenMpi::V4,
            &["--mca", "plm_rsh_agent", "ssh -p 22", "-n", "2", "prog"],
        );
        assert_eq!(args, ["--mca", "plm_rsh_agent", WRAPPER, "-n", "2", "prog"]);
        assert_eq!(agent.as_deref(), Some("ssh -p 22"));
        let (args, agent, _) = rewrite(OpenMpi::V5, &["--prtemca", "plm_ssh_agent", "/a", "prog"]);
        assert_eq!(args, ["--prtemca", "plm_ssh_agent", WRAPPER, "prog"]);
        assert_eq!(agent.as_deref(), Some("/a"));
    }

    #[test]
    fn other_parameters_stay_as_they_are() {
        let given = ["--mca", "btl", "tcp,self", "-np", "4", "prog", "-x"];
        let (args, agent, preload) = rewrite(OpenMpi::V4, &given);
        assert_eq!(args, given);
        assert_eq!((agent, preload), (None, false));
    }

    #[test]
    fn a_users_preload_for_the_ranks_is_joined_to_ours() {
        let (args, _, preload) =
            rewrite(OpenMpi::V4, &["-x", "LD_PRELOAD=/t.so", "-x", "A=1", "p"]);
        assert_eq!(
            args,
            ["-x", &format!("LD_PRELOAD={LIB}:/t.so"), "-x", "A=1", "p"]
        );
        assert!(preload);
    }

    #[test]
    fn names_are_exported_in_front_of_the_users_arguments() {
        let args = ["-n".into(), "2".into(), "prog".into()];
        let names = ["LD_PRELOAD", "SLIM_EVENTS"];
        let p = prepare(
            OpenMpi::V5,
            Path::new("/usr/bin/mpirun"),
            &args,
            &names,
            Path::new(LIB),
            Path::new(WRAPPER),
        );
        assert_eq!(
            p.args,
            ["-x", "LD_PRELOAD", "-x", "SLIM_EVENTS", "-n", "2", "prog"]
        );
        assert_eq!(p.set[0], ("PRTE_MCA_plm_ssh_agent".into(), WRAPPER.into()));
        assert_eq!(p.set[1].0, AGENT_VARIABLE);
    }

    #[test]
    fn parameter_files_are_read_as_open_mpi_does() {
        let text = "# plm_rsh_agent = no\nbtl = tcp\n plm_rsh_agent = ssh -q \n";
        assert_eq!(
            agent_in(text, &["plm_rsh_agent"]).as_deref(),
            Some("ssh -q")
        );
        assert_eq!(agent_in("plm_rsh_agent =\n", &["plm_rsh_agent"]), None);
    }
}
