//! The lab's error type. Variants tell whose fault an error is.

use std::{fmt, io, path::PathBuf, process::Output, time::Duration};

/// Result type of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Why the lab could not do something.
#[derive(Debug)]
pub enum Error {
    /// The caller lacks the privilege to make namespaces and change their networks.
    NeedsRoot,
    /// A file or program was not found.
    Missing {
        /// The name of the file or program.
        what: String,
        /// The places that were searched.
        tried: Vec<PathBuf>,
        /// How to get it.
        hint: String,
    },
    /// An outside command (`ip`, `nft`, `tc`, `mpicc`) failed.
    Command {
        /// The command line.
        command: String,
        /// Its exit status in words, and its standard error.
        outcome: String,
    },
    /// A system call failed.
    Io {
        /// The operation that failed.
        what: String,
        /// The error of the kernel.
        source: io::Error,
    },
    /// An expected event did not happen in time.
    Timeout {
        /// The expected event.
        what: String,
        /// The time limit.
        after: Duration,
    },
    /// The request is invalid (a lab without nodes, a path that does not exist).
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

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::NeedsRoot => {
                f.write_str("the lab needs root (CAP_NET_ADMIN, CAP_SYS_ADMIN): run as root")
            }
            Error::Missing { what, tried, hint } => {
                write!(f, "{what} not found")?;
                for (n, path) in tried.iter().enumerate() {
                    f.write_str(if n == 0 { " (tried " } else { ", " })?;
                    write!(f, "{}", path.display())?;
                }
                if !tried.is_empty() {
                    f.write_str(")")?;
                }
                write!(f, ": {hint}")
            }
            Error::Command { command, outcome } => write!(f, "`{command}` failed: {outcome}"),
            Error::Io { what, source } => write!(f, "{what}: {source}"),
            Error::Timeout { what, after } => {
                write!(f, "{what}: not within {:.1} s", after.as_secs_f64())
            }
            Error::Invalid(what) => f.write_str(what),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Io { source, .. } => Some(source),
            _ => None,
        }
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
