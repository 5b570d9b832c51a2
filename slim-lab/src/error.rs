//! Errors of the lab, by cause.

use std::{io, path::PathBuf, process::Output, time::Duration};

/// Result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of the lab.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The caller lacks the privilege to make namespaces and change their networks.
    #[error("the lab needs root (CAP_NET_ADMIN, CAP_SYS_ADMIN): run as root")]
    NeedsRoot,
    /// A file or program is missing. `hint` says how to get it.
    #[error("{what} not found{}: {hint}", places(.tried))]
    Missing {
        /// The name of the file or program.
        what: String,
        /// The places that were searched.
        tried: Vec<PathBuf>,
        /// How to get it.
        hint: String,
    },
    /// An outside command (`ip`, `nft`, `tc`, `mpicc`) failed.
    #[error("`{command}` failed: {outcome}")]
    Command {
        /// The command line.
        command: String,
        /// Its exit status in words, and its standard error.
        outcome: String,
    },
    /// A system call failed.
    #[error("{what}: {source}")]
    Io {
        /// The operation that failed.
        what: String,
        /// The error of the kernel.
        source: io::Error,
    },
    /// Something did not happen in time.
    #[error("{what}: not within {:.1} s", .after.as_secs_f64())]
    Timeout {
        /// The expected event.
        what: String,
        /// The time limit.
        after: Duration,
    },
    /// The request makes no sense (a lab of no nodes, a path that does not exist).
    #[error("{0}")]
    Invalid(String),
}

impl Error {
    /// Makes a closure for `map_err` that adds the name of the operation.
    pub fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
        let what = what.into();
        move |source| Error::Io { what, source }
    }

    /// The failure of a finished command.
    pub fn command(command: impl Into<String>, output: &Output) -> Error {
        let mut outcome = output.status.to_string();
        let text = String::from_utf8_lossy(&output.stderr);
        if !text.trim().is_empty() {
            outcome.push_str(": ");
            outcome.push_str(text.trim());
        }
        Error::Command {
            command: command.into(),
            outcome,
        }
    }
}

/// Where a missing file was looked for, in parentheses; nothing if that is not known.
fn places(tried: &[PathBuf]) -> String {
    let tried: Vec<_> = tried
        .iter()
        .map(|path| path.display().to_string())
        .collect();
    match tried.is_empty() {
        true => String::new(),
        false => format!(" (tried {})", tried.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_file_is_reported_with_the_places_searched_and_a_hint() {
        let error = Error::Missing {
            what: "libx.so".into(),
            tried: vec!["/a/libx.so".into(), "/b/libx.so".into()],
            hint: "build it".into(),
        };
        assert_eq!(
            error.to_string(),
            "libx.so not found (tried /a/libx.so, /b/libx.so): build it"
        );
    }

    #[test]
    fn missing_privilege_is_reported_with_the_capabilities_needed() {
        let text = Error::NeedsRoot.to_string();
        assert!(
            text.contains("CAP_NET_ADMIN") && text.contains("run as root"),
            "{text}"
        );
    }
}
