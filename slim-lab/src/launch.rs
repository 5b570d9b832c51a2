//! The launch agent: takes the place of `ssh` when mpirun starts its daemon on another node.
//!
//! mpirun runs `slim-lab-agent [options] HOST command...`. The agent finds the lab in its
//! environment, enters the node that HOST names, and runs the command there with a shell, in a
//! fresh environment, as `sshd` would. ssh carries no variables to the remote side. This agent
//! carries those that SLIM needs: `LD_PRELOAD`, `SLIM`, `SLIM_*`, and those that `SLIM_LAB_ENV` names.

use std::{
    collections::BTreeMap,
    env,
    ffi::{OsStr, OsString},
    fs::File,
    os::{fd::AsFd, unix::process::CommandExt},
    process::Command,
};

use nix::sched::{CloneFlags, setns};
use serde::{Deserialize, Serialize};

use crate::{Error, Lab, Result, node::SYSTEM_PATH};

/// Variable that describes the nodes of the lab to the agent.
pub const NODES_VAR: &str = "SLIM_LAB_NODES";
/// Variable with the names of further variables to carry to the remote side, separated by commas.
pub const CARRY_VAR: &str = "SLIM_LAB_ENV";
/// Variable with the names of variables not to carry, separated by commas: for runs with SLIM on one side only.
pub const DROP_VAR: &str = "SLIM_LAB_DROP";

/// Variables with this prefix are the lab's own and never carried.
const OWN_PREFIX: &str = "SLIM_LAB_";

/// One node as the agent knows it.
#[derive(Debug, Deserialize, Serialize)]
struct LaunchNode {
    name: String,
    holder: u32,
    tmp: String,
    addresses: Vec<String>,
}

/// Variables by which the agent finds `lab`, for the environment of a launcher.
pub fn environment(lab: &Lab) -> Vec<(&'static str, OsString)> {
    let nodes = lab.nodes().iter().map(|node| LaunchNode {
        name: node.name().to_owned(),
        holder: node.holder(),
        tmp: node.tmp().display().to_string(),
        addresses: node.addresses().iter().map(ToString::to_string).collect(),
    });
    let nodes = serde_json::to_string(&nodes.collect::<Vec<_>>());
    let nodes = nodes.expect("strings and numbers always become JSON");
    vec![(NODES_VAR, nodes.into())]
}

/// The main function of the agent: enters the node and executes the command. Returns only on failure.
pub fn agent(args: impl IntoIterator<Item = OsString>) -> Error {
    let args: Vec<OsString> = args.into_iter().collect();
    match become_remote(&args) {
        Ok(never) => match never {},
        Err(error) => error,
    }
}

enum Never {}

fn become_remote(args: &[OsString]) -> Result<Never> {
    let (host, command) = split(args)?;
    let nodes = env::var(NODES_VAR).map_err(|_| {
        Error::Invalid(format!(
            "{NODES_VAR} is not set: this program is started by a launcher inside a lab"
        ))
    })?;
    let entries: Vec<LaunchNode> = serde_json::from_str(&nodes)
        .map_err(|e| Error::Invalid(format!("{NODES_VAR}: {e}: {nodes}")))?;
    let entry = entries
        .into_iter()
        .find(|e| e.name == host || e.addresses.contains(&host))
        .ok_or_else(|| Error::Invalid(format!("no node named {host} in this lab ({nodes})")))?;
    let carried = carried(env::vars_os(), &list(CARRY_VAR), &list(DROP_VAR));
    for (kind, flag) in [
        ("uts", CloneFlags::CLONE_NEWUTS),
        ("ipc", CloneFlags::CLONE_NEWIPC),
        ("net", CloneFlags::CLONE_NEWNET),
        ("mnt", CloneFlags::CLONE_NEWNS),
    ] {
        let path = format!("/proc/{}/ns/{kind}", entry.holder);
        let file = File::open(&path).map_err(Error::io(path.clone()))?;
        setns(file.as_fd(), flag).map_err(|e| Error::Io {
            what: path,
            source: e.into(),
        })?;
    }
    let home = env::var_os("HOME").unwrap_or_else(|| "/root".into());
    let source = Command::new("/bin/sh")
        .arg("-c")
        .arg(&command)
        .env_clear()
        .envs([("USER", "root"), ("LOGNAME", "root"), ("TERM", "dumb")])
        .env("PATH", SYSTEM_PATH)
        .env("HOME", &home)
        .env("TMPDIR", &entry.tmp)
        .envs(carried)
        .current_dir(&home)
        .exec();
    Err(Error::Io {
        what: format!("run {} on {host}", command.to_string_lossy()),
        source,
    })
}

/// Splits the arguments as ssh does: options, host, and the rest joined by spaces.
fn split(args: &[OsString]) -> Result<(String, OsString)> {
    let usage = || Error::Invalid("usage: slim-lab-agent [ssh options] HOST COMMAND...".into());
    let mut rest = args;
    while let Some(first) = rest
        .first()
        .and_then(|a| a.to_str())
        .filter(|a| a.starts_with('-'))
    {
        let skip = match first {
            "-l" | "-p" | "-o" | "-i" | "-F" => 2,
            _ => 1,
        };
        rest = rest.get(skip..).ok_or_else(usage)?;
        if first == "--" {
            break;
        }
    }
    let (host, words) = rest.split_first().ok_or_else(usage)?;
    if words.is_empty() {
        return Err(usage());
    }
    Ok((
        host.to_string_lossy().into_owned(),
        words.join(OsStr::new(" ")),
    ))
}

fn list(var: &str) -> Vec<String> {
    let value = env::var(var).unwrap_or_default();
    value
        .split(',')
        .map(str::trim)
        .filter(|s| !s.is_empty())
        .map(str::to_owned)
        .collect()
}

fn carried(
    vars: impl Iterator<Item = (OsString, OsString)>,
    more: &[String],
    less: &[String],
) -> BTreeMap<OsString, OsString> {
    let wanted = |name: &OsStr| {
        let name = name.to_string_lossy();
        let named = |names: &[String]| names.iter().any(|n| *n == name);
        let usual = name == "LD_PRELOAD" || name == "SLIM";
        let ours = name.starts_with("SLIM_") && !name.starts_with(OWN_PREFIX);
        (usual || ours || named(more)) && !named(less)
    };
    vars.filter(|(name, _)| wanted(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn os(words: &[&str]) -> Vec<OsString> {
        words.iter().map(OsString::from).collect()
    }

    #[test]
    fn ssh_options_are_skipped() {
        let (host, command) = split(&os(&[
            "-x", "-o", "A=b", "-l", "me", "nodeB", "orted", "-mca", "x",
        ]))
        .unwrap();
        assert_eq!(
            (host.as_str(), command.to_str().unwrap()),
            ("nodeB", "orted -mca x")
        );
        let (host, _) = split(&os(&["--", "nodeA", "true"])).unwrap();
        assert_eq!(host, "nodeA");
        assert!(split(&os(&["-o"])).is_err());
        assert!(split(&os(&["nodeA"])).is_err());
    }

    #[test]
    fn only_what_slim_needs_is_carried() {
        let vars = [
            "LD_PRELOAD",
            "SLIM",
            "SLIM_LOG",
            "SLIM_LAB_NODES",
            "PATH",
            "EXTRA",
            "SLIM_EVENTS",
        ];
        let vars = vars.map(|v| (OsString::from(v), OsString::from("1")));
        let carried = carried(vars.into_iter(), &["EXTRA".into()], &["SLIM_EVENTS".into()]);
        let names: Vec<_> = carried.keys().map(|k| k.to_str().unwrap()).collect();
        assert_eq!(names, ["EXTRA", "LD_PRELOAD", "SLIM", "SLIM_LOG"]);
    }
}
