//! Finds out which launcher a command is.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::entry::MpiEntry;
use super::mpis;
use crate::failure::{CliError, NOT_EXECUTABLE, NOT_FOUND};

/// The kind of command that `slim run` starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// A launcher of parallel jobs.
    Of(&'static MpiEntry),
    /// A launcher of parallel jobs that is not supported yet.
    NotYet(Foreign),
    /// A program that starts no remote processes. It runs unchanged.
    Plain,
}

/// Launchers that are recognised and refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Foreign {
    /// `mpiexec` of another Intel MPI than 2021.
    Intel,
    /// An Open MPI of an untested series.
    OtherOpenMpi,
    /// Some other `mpirun`, or a launcher of a batch system.
    Unknown,
}

const MPI_NAMES: [&str; 7] = [
    "mpirun", "mpiexec", "orterun", "prterun", "oshrun", "prte", "prun",
];
const BATCH_NAMES: [&str; 5] = ["aprun", "flux", "ibrun", "jsrun", "lrun"];

/// Finds `command` as the shell would, so that a wrong name is an error before anything runs.
pub fn resolve(command: &str) -> Result<PathBuf, CliError> {
    if command.contains('/') {
        let path = PathBuf::from(command);
        return if is_executable(&path) {
            Ok(path)
        } else if path.exists() {
            Err(CliError::new(
                NOT_EXECUTABLE,
                format!("{command}: not executable"),
            ))
        } else {
            Err(CliError::new(NOT_FOUND, format!("{command}: no such file")))
        };
    }
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .map(|dir| dir.join(command))
        .find(|p| is_executable(p))
        .ok_or_else(|| CliError::new(NOT_FOUND, format!("{command}: command not found")))
}

fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    path.metadata()
        .is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
}

/// Classifies `program` by its name, and by its `--version` if several MPIs share
/// the name.
pub fn classify(program: &Path) -> Launcher {
    let name = program
        .file_name()
        .and_then(|n| n.to_str())
        .unwrap_or_default();
    let stem = name.split('.').next().unwrap_or_default();
    if let Some(mpi) = mpis::of_program(name) {
        return Launcher::Of(mpi);
    }
    if BATCH_NAMES.contains(&name) {
        return Launcher::NotYet(Foreign::Unknown);
    }
    if !MPI_NAMES.contains(&stem) {
        return Launcher::Plain;
    }
    let output = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        // No preload library may take part in the answer.
        .env_remove("LD_PRELOAD")
        .output();
    match output {
        Ok(out) => {
            let mut text = String::from_utf8_lossy(&out.stdout).into_owned();
            text.push_str(&String::from_utf8_lossy(&out.stderr));
            by_version(stem, &text)
        }
        Err(_) => Launcher::NotYet(Foreign::Unknown),
    }
}

fn by_version(program: &str, text: &str) -> Launcher {
    match mpis::of_version(program, text) {
        Some(mpi) => Launcher::Of(mpi),
        None if text.contains("(Open MPI)") || text.contains("(OpenRTE)") => {
            Launcher::NotYet(Foreign::OtherOpenMpi)
        }
        None if text.contains("Intel(R) MPI") => Launcher::NotYet(Foreign::Intel),
        None => Launcher::NotYet(Foreign::Unknown),
    }
}

/// The message that names the unsupported launcher and says how to set SLIM up by hand.
pub fn not_yet(what: Foreign, command: &str, preload: &str) -> String {
    let (name, by_hand) = match what {
        Foreign::Intel => (
            "this Intel MPI (only 2021 is)",
            format!("{command} -genv LD_PRELOAD {preload} … (and any SLIM_ variable by -genv)"),
        ),
        Foreign::OtherOpenMpi => (
            "this Open MPI (only 4.x and 5.x are)",
            format!("LD_PRELOAD={preload} {command} -x LD_PRELOAD …"),
        ),
        Foreign::Unknown => (
            "this launcher",
            format!("LD_PRELOAD={preload} in the environment of every process it starts"),
        ),
    };
    format!(
        "{name} is not supported by `slim run` yet: its remote daemons would run without SLIM; by hand for the ranks: {by_hand}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launchers_without_an_entry_are_not_supported() {
        for (text, what) in [
            ("mpirun (Open MPI) 3.1.6", Foreign::OtherOpenMpi),
            ("mpirun (Open MPI) 6.0.0a1", Foreign::OtherOpenMpi),
            (
                "Intel(R) MPI Library for Linux* OS, Version 2019 Update 9",
                Foreign::Intel,
            ),
            ("", Foreign::Unknown),
        ] {
            assert_eq!(by_version("mpirun", text), Launcher::NotYet(what), "{text}");
        }
    }

    #[test]
    fn programs_that_launch_nothing_are_plain() {
        assert_eq!(classify(Path::new("/usr/bin/env")), Launcher::Plain);
        assert_eq!(classify(Path::new("/opt/mpirunner")), Launcher::Plain);
        assert_eq!(
            classify(Path::new("/usr/bin/srun")),
            Launcher::Of(&super::super::srun::SLURM)
        );
    }

    #[test]
    fn a_missing_command_is_127_and_a_plain_file_126() {
        assert_eq!(
            resolve("surely-no-such-command").unwrap_err().status(),
            NOT_FOUND
        );
        let file = tempfile::NamedTempFile::new().unwrap();
        let failure = resolve(file.path().to_str().unwrap()).unwrap_err();
        assert_eq!(failure.status(), NOT_EXECUTABLE);
        assert!(resolve("sh").unwrap().is_absolute());
    }

    #[test]
    fn the_refusal_says_what_to_do_by_hand() {
        let line = not_yet(Foreign::Intel, "mpiexec", "/x/libslim_preload.so");
        assert!(
            line.contains("-genv LD_PRELOAD /x/libslim_preload.so"),
            "{line}"
        );
        assert!(line.contains("not supported by `slim run` yet"), "{line}");
    }
}
