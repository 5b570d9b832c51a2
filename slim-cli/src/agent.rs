//! `slim-rsh-agent`: a wrapper that launchers call in place of ssh (or of the user's own agent).
//!
//! ssh carries no environment, so the remote daemon would run without SLIM. The
//! wrapper adds `LD_PRELOAD` and the `SLIM_` variables to the remote command, and
//! then executes the real agent, which itself runs without the library.

use std::env;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use crate::failure::{CliError, NOT_EXECUTABLE, NOT_FOUND};
use crate::run::{hosts, launcher, preload};
use crate::settings::Settings;
use crate::shell;

/// Name of the wrapper's program file, which is next to `slim`.
pub const PROGRAM: &str = "slim-rsh-agent";

/// Variable with the agent that the user chose, in Open MPI's syntax (alternatives
/// separated by colons, arguments by blanks), or [`ONE_WORD`] and the name of a program. Not a `SLIM_` name, because it is no setting.
pub const AGENT_VARIABLE: &str = "_SLIM_RSH_AGENT";

/// The rest is one program without arguments, whatever characters its name has.
pub const ONE_WORD: char = '=';

/// The agent if that variable is missing.
const DEFAULT_AGENT: &str = "ssh : rsh";

/// ssh options that take an argument and may precede the host name.
const OPTIONS_WITH_VALUE: [&str; 9] = ["-l", "-p", "-o", "-i", "-F", "-J", "-b", "-c", "-S"];

/// Replaces this process with the real agent. Returns only on failure.
pub fn exec(args: &[String]) -> CliError {
    match command(args) {
        Ok(mut command) => {
            let error = command.exec();
            CliError::new(
                NOT_EXECUTABLE,
                format!("{:?}: {error}", command.get_program()),
            )
        }
        Err(failure) => failure,
    }
}

fn command(args: &[String]) -> Result<Command, CliError> {
    let (front, remote) = split_at_command(args).ok_or_else(|| {
        CliError::input(format!(
            "{PROGRAM}: a launcher must call it as `{PROGRAM} [OPTIONS] HOST COMMAND`"
        ))
    })?;
    let chosen = env::var(AGENT_VARIABLE).unwrap_or_else(|_| DEFAULT_AGENT.into());
    let (program, agent_args) = first_present(&chosen)?;

    let loaded = env::var("LD_PRELOAD").unwrap_or_default();
    let mut settings = Settings::from_env()?;
    // `slim run` may not have known this host.
    let host = front.last().and_then(|host| host.rsplit('@').next());
    hosts::make_peers(&mut settings, host.map(ToOwned::to_owned));
    let mut carried: Vec<(&str, &str)> = settings.iter().collect();
    if !loaded.is_empty() {
        carried.insert(0, ("LD_PRELOAD", &loaded));
    }
    // A daemon may start further daemons, through this wrapper again.
    carried.push((AGENT_VARIABLE, &chosen));

    let mut command = Command::new(program);
    command
        .args(agent_args)
        .args(front)
        .arg(remote_command(&carried, remote));
    match preload::without(&loaded) {
        rest if rest.is_empty() => command.env_remove("LD_PRELOAD"),
        rest => command.env("LD_PRELOAD", rest),
    };
    Ok(command)
}

/// Splits `[OPTIONS] HOST COMMAND…` behind the host.
fn split_at_command(args: &[String]) -> Option<(&[String], &[String])> {
    let mut i = 0;
    while args.get(i)?.starts_with('-') {
        i += if OPTIONS_WITH_VALUE.contains(&args[i].as_str()) {
            2
        } else {
            1
        };
    }
    (args.len() > i + 1).then(|| args.split_at(i + 1))
}

/// One line for the remote login shell. Open MPI may begin the command with
/// assignments, so the whole command runs in a shell of its own, behind `env`.
fn remote_command(carried: &[(&str, &str)], words: &[String]) -> String {
    let line = words.join(" ");
    let is_csh = line.contains("setenv ") || line.contains("set path");
    let shell = if is_csh { "csh" } else { "sh" };
    format!(
        "env {}{shell} -c {}",
        shell::assignments(carried.iter().copied()),
        shell::quote(line.trim())
    )
}

/// The first alternative whose program exists, with its arguments.
fn first_present(chosen: &str) -> Result<(PathBuf, Vec<OsString>), CliError> {
    if let Some(name) = chosen.strip_prefix(ONE_WORD) {
        return Ok((launcher::resolve(name)?, Vec::new()));
    }
    for alternative in chosen.split(':') {
        let mut words = alternative.split_whitespace();
        let Some(name) = words.next() else { continue };
        if let Ok(program) = launcher::resolve(name) {
            return Ok((program, words.map(OsString::from).collect()));
        }
    }
    Err(CliError::new(
        NOT_FOUND,
        format!("{PROGRAM}: none of the agents `{chosen}` is installed"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &[&str]) -> Vec<String> {
        text.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn arguments_are_split_behind_the_host() {
        let args = words(&["-x", "-l", "me", "nodeB", "orted", "-mca", "ess"]);
        let (front, remote) = split_at_command(&args).unwrap();
        assert_eq!(front, words(&["-x", "-l", "me", "nodeB"]));
        assert_eq!(remote, words(&["orted", "-mca", "ess"]));
        assert!(split_at_command(&words(&["nodeB"])).is_none());
        assert!(split_at_command(&words(&["-l"])).is_none());
        assert!(split_at_command(&[]).is_none());
    }

    #[test]
    fn variables_reach_a_command_that_begins_with_assignments() {
        let line = remote_command(
            &[("SLIM_T", "a'b")],
            &words(&["X=1 ; export X ;", "echo", "\"$X\"-$SLIM_T"]),
        );
        let out = Command::new("sh").args(["-c", &line]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&out.stdout), "1-a'b\n", "{line}");
    }

    #[test]
    fn a_csh_command_is_given_to_csh() {
        let line = remote_command(&[], &words(&["setenv X 1 ;", "orted"]));
        assert!(line.starts_with("env csh -c "), "{line}");
    }

    #[test]
    fn the_first_installed_agent_is_taken() {
        let (program, args) = first_present("no-such-agent -q : sh -c x : true").unwrap();
        assert!(program.ends_with("sh"), "{}", program.display());
        assert_eq!(args, ["-c", "x"]);
        let dir = tempfile::tempdir().unwrap();
        let odd = dir.path().join("a b:c");
        std::os::unix::fs::symlink("/bin/sh", &odd).unwrap();
        let (program, args) = first_present(&format!("{ONE_WORD}{}", odd.display())).unwrap();
        assert_eq!((program, args.len()), (odd, 0));
        assert!(first_present("=sh -c").is_err());
        assert_eq!(
            first_present("no-such-agent").unwrap_err().status(),
            NOT_FOUND
        );
    }
}
