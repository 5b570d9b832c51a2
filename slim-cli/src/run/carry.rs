//! Rewrites the command line of a launcher, so that it carries SLIM: variables to the ranks, and the library to remote daemons.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};

use super::mpis::{AgentChoice, Export, MpiEntry, Starters};
use super::preload;
use crate::agent::AGENT_VARIABLE;

const PRELOAD: &str = "LD_PRELOAD";

/// A command line of a launcher that carries SLIM, and changes to its environment.
#[derive(Debug, PartialEq, Eq)]
pub struct PreparedCommand {
    /// Arguments of the launcher.
    pub args: Vec<OsString>,
    /// Variables to set in the environment of the launcher.
    pub set: Vec<(String, OsString)>,
    /// Variables to remove from the environment of the launcher.
    pub unset: Vec<String>,
}

/// Builds the command line. `exported` are the variables for the ranks; `library` is the path of the preload library; `wrapper` is
/// the path of `slim-rsh-agent`.
pub fn prepare(
    mpi: &MpiEntry,
    launcher: &Path,
    args: &[OsString],
    exported: &[(&str, &str)],
    library: &Path,
    wrapper: &Path,
) -> PreparedCommand {
    let mut rewritten = Rewritten::of(mpi, args, library, wrapper);
    let mut front = Vec::new();
    for (name, value) in exported {
        if *name == PRELOAD && rewritten.ranks_have_preload {
            continue;
        }
        match &mpi.export {
            Export::Names(options) => front.extend([options[0], name].map(OsString::from)),
            Export::Values(options) => front.extend([options[0], name, value].map(OsString::from)),
        }
    }
    front.append(&mut rewritten.args);

    let mut prepared = PreparedCommand {
        args: front,
        set: Vec::new(),
        unset: Vec::new(),
    };
    let agent = &mpi.agent;
    let starter = agent.starters.as_ref().map(|all| all.chosen(args));
    let default = match starter {
        // The launcher starts the daemons by other means, which carry the environment.
        Some(None) => return prepared,
        Some(Some(name)) => name,
        None => agent.default.to_owned(),
    };
    let chosen = rewritten
        .agent
        .or_else(|| agent.in_environment())
        .or_else(|| agent.in_files(launcher))
        .unwrap_or(default);
    prepared.set = vec![
        (agent.variables[0].into(), wrapper.into()),
        (AGENT_VARIABLE.into(), chosen.into()),
    ];
    prepared.unset = agent.variables[1..].iter().map(|v| (*v).into()).collect();
    prepared
}

/// The user's arguments, with the agent and `LD_PRELOAD` replaced in place.
struct Rewritten {
    args: Vec<OsString>,
    agent: Option<String>,
    ranks_have_preload: bool,
}

impl Rewritten {
    fn of(mpi: &MpiEntry, args: &[OsString], library: &Path, wrapper: &Path) -> Self {
        let mut out = Self {
            args: Vec::with_capacity(args.len()),
            agent: None,
            ranks_have_preload: false,
        };
        let (setters, parameters) = mpi.agent.parameters;
        let mut rest = args.iter();
        while let Some(arg) = rest.next() {
            out.args.push(arg.clone());
            let word = arg.to_str().unwrap_or_default();
            if setters.contains(&word) {
                let Some(name) = rest.next() else { continue };
                out.args.push(name.clone());
                let ours = name.to_str().is_some_and(|n| parameters.contains(&n));
                out.value(ours, rest.next(), wrapper);
            } else if mpi.agent.options.contains(&word) {
                out.value(true, rest.next(), wrapper);
            } else {
                match &mpi.export {
                    Export::Names(options) if options.contains(&word) => {
                        let Some(pair) = rest.next() else { continue };
                        let theirs = pair.to_str().and_then(|p| p.strip_prefix("LD_PRELOAD="));
                        let joined = theirs.map(|theirs| out.joined(library, theirs.as_ref()));
                        let joined = joined.map(|all| format!("{PRELOAD}={all}").into());
                        out.args.push(joined.unwrap_or_else(|| pair.clone()));
                    }
                    Export::Values(options) if options.contains(&word) => {
                        let (Some(name), Some(value)) = (rest.next(), rest.next()) else {
                            continue;
                        };
                        out.args.push(name.clone());
                        let joined = (name == PRELOAD).then(|| out.joined(library, value).into());
                        out.args.push(joined.unwrap_or_else(|| value.clone()));
                    }
                    _ => {}
                }
            }
        }
        out
    }

    /// Takes over the value of an option, or puts the wrapper in its place if it is the agent.
    fn value(&mut self, is_agent: bool, value: Option<&OsString>, wrapper: &Path) {
        let Some(value) = value else { return };
        if is_agent {
            self.agent = Some(value.to_string_lossy().into_owned());
            self.args.push(wrapper.into());
        } else {
            self.args.push(value.clone());
        }
    }

    /// Both libraries.
    fn joined(&mut self, library: &Path, theirs: &OsStr) -> String {
        self.ranks_have_preload = true;
        preload::joined(library, Some(theirs))
    }
}

impl Starters {
    /// The way in which the launcher will start daemons, if that is by an agent.
    fn chosen(&self, args: &[OsString]) -> Option<String> {
        let after = |two: &[OsString]| {
            let ours = two[0].to_str().is_some_and(|w| self.options.contains(&w));
            ours.then(|| two[1].to_string_lossy().into_owned())
        };
        let set = |name: &&str| env::var(name).ok().filter(|value| !value.is_empty());
        let named = args.windows(2).find_map(after);
        let named = named.or_else(|| self.variables.iter().find_map(set));
        match named {
            Some(name) => self.by_agent.contains(&name.as_str()).then_some(name),
            None if self.batch.iter().any(|name| set(name).is_some()) => None,
            None => Some(self.by_agent[0].to_owned()),
        }
    }
}

impl AgentChoice {
    fn in_environment(&self) -> Option<String> {
        let mut set = self.variables.iter().filter_map(|name| env::var(name).ok());
        set.find(|value| !value.is_empty())
    }

    fn in_files(&self, launcher: &Path) -> Option<String> {
        let (_, parameters) = self.parameters;
        self.parameter_files(launcher)
            .iter()
            .filter_map(|file| fs::read_to_string(file).ok())
            .find_map(|text| agent_in(&text, parameters))
    }

    /// Files in which the agent can be chosen, highest priority first.
    fn parameter_files(&self, launcher: &Path) -> Vec<PathBuf> {
        let Some((user, system)) = self.files else {
            return Vec::new();
        };
        let mut files = Vec::new();
        if let Some(home) = env::var_os("HOME") {
            files.push(Path::new(&home).join(user));
        }
        let real = launcher.canonicalize();
        let program = real.as_deref().unwrap_or(launcher);
        if let Some(prefix) = program.parent().and_then(Path::parent) {
            files.push(prefix.join("etc").join(system));
        }
        files.push(Path::new("/etc/openmpi").join(system));
        files
    }
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
    use super::super::mpis;
    use super::*;

    const LIB: &str = "/s/libslim_preload.so";
    const WRAPPER: &str = "/s/slim-rsh-agent";
    const OMPI4: &str = "(Open MPI) 4.1.4";
    const OMPI5: &str = "(Open MPI) 5.0.11";
    const HYDRA: &str = "HYDRA build details:";

    fn rewrite(version: &str, args: &[&str]) -> (Vec<String>, Option<String>, bool) {
        let args: Vec<OsString> = args.iter().map(OsString::from).collect();
        let mpi = mpis::of_version(version).unwrap();
        let r = Rewritten::of(mpi, &args, Path::new(LIB), Path::new(WRAPPER));
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
            OMPI4,
            &["--mca", "plm_rsh_agent", "ssh -p 22", "-n", "2", "prog"],
        );
        assert_eq!(args, ["--mca", "plm_rsh_agent", WRAPPER, "-n", "2", "prog"]);
        assert_eq!(agent.as_deref(), Some("ssh -p 22"));
        let (args, agent, _) = rewrite(OMPI5, &["--prtemca", "plm_ssh_agent", "/a", "prog"]);
        assert_eq!(args, ["--prtemca", "plm_ssh_agent", WRAPPER, "prog"]);
        assert_eq!(agent.as_deref(), Some("/a"));
        let (args, agent, _) = rewrite(HYDRA, &["-bootstrap-exec", "/a", "-n", "2", "prog"]);
        assert_eq!(args, ["-bootstrap-exec", WRAPPER, "-n", "2", "prog"]);
        assert_eq!(agent.as_deref(), Some("/a"));
    }

    #[test]
    fn other_parameters_stay_as_they_are() {
        let given = ["--mca", "btl", "tcp,self", "-np", "4", "prog", "-x"];
        let (args, agent, preload) = rewrite(OMPI4, &given);
        assert_eq!(args, given);
        assert_eq!((agent, preload), (None, false));
        let given = ["-genv", "A", "1", "-np", "4", "prog", "-genv"];
        let (args, agent, preload) = rewrite(HYDRA, &given);
        assert_eq!(args, given);
        assert_eq!((agent, preload), (None, false));
    }

    #[test]
    fn a_users_preload_for_the_ranks_is_joined_to_ours() {
        let both = format!("{LIB}:/t.so");
        let (args, _, preload) = rewrite(OMPI4, &["-x", "LD_PRELOAD=/t.so", "-x", "A=1", "p"]);
        assert_eq!(
            args,
            ["-x", &format!("LD_PRELOAD={both}"), "-x", "A=1", "p"]
        );
        assert!(preload);
        let (args, _, preload) = rewrite(HYDRA, &["-genv", "LD_PRELOAD", "/t.so", "p"]);
        assert_eq!(args, ["-genv", "LD_PRELOAD", &both, "p"]);
        assert!(preload);
    }

    fn prepared(version: &str, args: &[&str]) -> PreparedCommand {
        let args: Vec<OsString> = args.iter().map(OsString::from).collect();
        prepare(
            mpis::of_version(version).unwrap(),
            Path::new("/usr/bin/mpirun"),
            &args,
            &[("LD_PRELOAD", LIB), ("SLIM_EVENTS", "/e v")],
            Path::new(LIB),
            Path::new(WRAPPER),
        )
    }

    #[test]
    fn variables_are_exported_in_front_of_the_users_arguments() {
        let p = prepared(OMPI5, &["-n", "2", "prog"]);
        assert_eq!(
            p.args,
            ["-x", "LD_PRELOAD", "-x", "SLIM_EVENTS", "-n", "2", "prog"]
        );
        assert_eq!(p.set[0], ("PRTE_MCA_plm_ssh_agent".into(), WRAPPER.into()));
        assert_eq!(p.set[1].0, AGENT_VARIABLE);
        let p = prepared(HYDRA, &["-n", "2", "prog"]);
        let front = ["-genv", "LD_PRELOAD", LIB, "-genv", "SLIM_EVENTS", "/e v"];
        assert_eq!(p.args[..6], front);
        assert_eq!(p.args[6..], ["-n", "2", "prog"]);
        assert_eq!(p.set[0], ("HYDRA_LAUNCHER_EXEC".into(), WRAPPER.into()));
        assert_eq!(p.set[1], (AGENT_VARIABLE.into(), "ssh".into()));
    }

    #[test]
    fn only_starters_that_use_an_agent_get_the_wrapper() {
        let p = prepared(HYDRA, &["-launcher", "rsh", "prog"]);
        assert_eq!(p.set[1].1, "rsh");
        for other in ["fork", "slurm"] {
            let p = prepared(HYDRA, &["-bootstrap", other, "prog"]);
            assert_eq!(p.set, [], "{other}");
        }
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
