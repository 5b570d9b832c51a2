//! Why `slim` stops, and with which exit status.

use std::fmt;

/// Status for bad input: wrong options, bad `SLIM_` values, an unusable plan.
pub const BAD_INPUT: u8 = 2;
/// Status for work that was started and did not succeed.
pub const FAILED: u8 = 1;
/// The command exists but cannot be executed (as the shells do it).
pub const NOT_EXECUTABLE: u8 = 126;
/// The command was not found (as the shells do it).
pub const NOT_FOUND: u8 = 127;

/// An error that ends the program: what to print and the exit status.
#[derive(Debug)]
pub struct CliError {
    status: u8,
    lines: Vec<String>,
}

impl CliError {
    /// The user asked for something that cannot be done; nothing was started.
    pub fn input(line: impl Into<String>) -> Self {
        Self::new(BAD_INPUT, line)
    }

    /// Several problems with the input, one line each.
    pub fn inputs(lines: Vec<String>) -> Self {
        Self {
            status: BAD_INPUT,
            lines,
        }
    }

    /// Something failed while working.
    pub fn failed(line: impl Into<String>) -> Self {
        Self::new(FAILED, line)
    }

    /// An error with a status of its own.
    pub fn new(status: u8, line: impl Into<String>) -> Self {
        Self {
            status,
            lines: vec![line.into()],
        }
    }

    /// The exit status of the program.
    pub fn status(&self) -> u8 {
        self.status
    }

    /// What is printed, without the `slim: ` in front.
    pub fn lines(&self) -> &[String] {
        &self.lines
    }
}

impl fmt::Display for CliError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.lines.join("\n"))
    }
}

impl std::error::Error for CliError {}
