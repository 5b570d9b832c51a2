//! The outcome of a job: its output and its end.
//!
//! mpirun's exit status alone is not reliable: some versions return 0 for a job that has failed.
//! So [`Outcome::verdict`] also requires the program's own closing line.

use std::{fmt, process::ExitStatus, time::Duration};

use crate::output::Line;

/// The outcome of a job.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// mpirun's exit status; `None` if the job hung and was killed.
    pub status: Option<ExitStatus>,
    /// How long the job ran.
    pub took: Duration,
    /// The whole output.
    pub lines: Vec<Line>,
    /// Names of processes that still ran afterwards, and were killed.
    pub left: Vec<String>,
}

/// A progress line: `t=3 it=120 errs=0 MB=512 maxstall=0.012`, or the closing line `DONE ...`, which
/// also has [the time](Outcome::done_at).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// Rounds done.
    pub rounds: u64,
    /// Wrong words seen.
    pub errors: u64,
    /// MiB moved by rank 0.
    pub mib: u64,
    /// Longest time in seconds that one step took at rank 0.
    pub max_stall: f64,
}

impl Progress {
    /// Parses a progress line or the closing line.
    pub fn parse(line: &str) -> Option<Self> {
        Some(Progress {
            rounds: field(line, "it")?.parse().ok()?,
            errors: field(line, "errs")?.parse().ok()?,
            mib: field(line, "MB")?.parse().ok()?,
            max_stall: field(line, "maxstall")?.parse().ok()?,
        })
    }
}

/// The value in the word `name=value` of a line.
fn field<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    line.split_whitespace()
        .find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq)]
pub enum JobVerdict {
    /// The exit status is 0, the closing line was printed, and all data was right.
    Finished(Progress),
    /// Data was wrong.
    Wrong(Progress),
    /// The job failed; the text has mpirun's exit status.
    Failed(String),
    /// The job neither finished nor failed in time.
    Hung,
}

impl Outcome {
    /// The closing line, if the program has printed it.
    pub fn done(&self) -> Option<Progress> {
        Progress::parse(self.closing()?)
    }

    /// When all ranks had all their data, by the program's own clock, in seconds since 1970. After that the ranks only
    /// leave MPI.
    pub fn done_at(&self) -> Option<f64> {
        field(self.closing()?, "at")?.parse().ok()
    }

    fn closing(&self) -> Option<&str> {
        let lines = self.lines.iter().rev();
        lines.map(|l| &*l.text).find(|l| l.contains("DONE "))
    }

    /// How the job ended.
    pub fn verdict(&self) -> JobVerdict {
        let seen = self
            .lines
            .iter()
            .rev()
            .find_map(|l| Progress::parse(&l.text));
        match (self.status, self.done(), seen) {
            (_, _, Some(last)) if last.errors > 0 => JobVerdict::Wrong(last),
            (None, _, _) => JobVerdict::Hung,
            (Some(status), Some(done), _) if status.success() => JobVerdict::Finished(done),
            (Some(status), Some(_), _) => {
                JobVerdict::Failed(format!("finished its work, then {status}"))
            }
            (Some(status), None, _) => JobVerdict::Failed(status.to_string()),
        }
    }

    /// The last lines of the output, for messages.
    pub fn tail(&self, lines: usize) -> String {
        let from = self.lines.len().saturating_sub(lines);
        let text = self.lines[from..]
            .iter()
            .map(|l| format!("  {:7.2} {}\n", l.at.as_secs_f64(), l.text));
        text.collect()
    }
}

impl fmt::Display for JobVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            JobVerdict::Finished(p) => {
                write!(
                    f,
                    "finished: {} rounds, {} MiB, longest stall {:.3} s",
                    p.rounds, p.mib, p.max_stall
                )
            }
            JobVerdict::Wrong(p) => write!(f, "WRONG DATA: {} words", p.errors),
            JobVerdict::Failed(how) => write!(f, "failed: {how}"),
            JobVerdict::Hung => f.write_str("hung"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;

    fn outcome(status: Option<i32>, lines: &[&str]) -> Outcome {
        let line = |text: &&str| Line {
            at: Duration::ZERO,
            text: (*text).to_owned(),
        };
        let status = status.map(|code| ExitStatus::from_raw(code << 8));
        Outcome {
            status,
            took: Duration::ZERO,
            lines: lines.iter().map(line).collect(),
            left: Vec::new(),
        }
    }

    const DONE: &str = "DONE it=12 errs=0 MB=34 maxstall=0.500 at=1763694000.125";

    #[test]
    fn exit_zero_without_the_closing_line_is_a_failure() {
        assert!(matches!(
            outcome(Some(0), &["t=1 it=2 errs=0 MB=1 maxstall=0.1"]).verdict(),
            JobVerdict::Failed(_)
        ));
        let JobVerdict::Finished(progress) = outcome(Some(0), &[DONE]).verdict() else {
            panic!()
        };
        assert_eq!(
            progress,
            Progress {
                rounds: 12,
                errors: 0,
                mib: 34,
                max_stall: 0.5
            }
        );
    }

    #[test]
    fn the_time_is_read_from_the_closing_line_only() {
        assert_eq!(outcome(Some(0), &[DONE]).done_at(), Some(1_763_694_000.125));
        assert_eq!(outcome(Some(0), &["t=1 at=7"]).done_at(), None);
    }

    #[test]
    fn wrong_data_takes_precedence_over_every_other_verdict() {
        let wrong = outcome(None, &["t=1 it=2 errs=3 MB=1 maxstall=0.1"]);
        assert!(matches!(wrong.verdict(), JobVerdict::Wrong(p) if p.errors == 3));
        assert_eq!(outcome(None, &[DONE]).verdict(), JobVerdict::Hung);
        assert!(matches!(
            outcome(Some(1), &[DONE]).verdict(),
            JobVerdict::Failed(_)
        ));
    }
}
