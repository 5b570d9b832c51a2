//! The error type of `slim`, and its exit statuses.

use std::fmt;
use std::io::{self, Write};

/// Status for bad input: wrong options, bad `SLIM_` values, an unusable plan.
pub const BAD_INPUT: u8 = 2;
/// Status for work that was started and did not succeed.
pub const FAILED: u8 = 1;
/// The command exists but cannot be executed (the shells' status for that).
pub const NOT_EXECUTABLE: u8 = 126;
/// The command was not found (the shells' status for that).
pub const NOT_FOUND: u8 = 127;

/// An error that ends the program: the lines to print, and the exit status.
#[derive(Debug)]
pub struct CliError {
    status: u8,
    lines: Vec<String>,
}

impl CliError {
    /// Bad input; nothing was started.
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

    /// Work that was started has failed.
    pub fn failed(line: impl Into<String>) -> Self {
        Self::new(FAILED, line)
    }

    /// An error with any status.
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

    /// The lines to print, without the `slim: ` in front.
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

/// Says what is going on, on standard error. A terminal that is gone must not end the work.
pub fn say(text: &str) {
    for line in text.split('\n') {
        let _ = writeln!(io::stderr(), "{}", visible(line));
    }
}

/// Prints a result on standard output.
pub fn print(text: &str) -> Result<(), CliError> {
    let printed = io::stdout()
        .write_all(text.as_bytes())
        .and_then(|()| io::stdout().flush());
    printed.map_err(|e| CliError::failed(format!("standard output: {e}")))
}

/// The text with its control characters written out: a terminal obeys them.
pub fn visible(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match c.is_control() {
            true => shown.extend(c.escape_unicode()),
            false => shown.push(c),
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_written_out() {
        assert_eq!(visible("a\u{1b}[31m\tb"), "a\\u{1b}[31m\\u{9}b");
    }
}
