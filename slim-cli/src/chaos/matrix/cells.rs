//! The cells of the matrix: many runs of one MPI under one fault.

use serde::Serialize;
use strum::Display;

/// How one run ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "end", content = "detail")]
pub enum RunEnd {
    /// It did not finish with success.
    Failed(String),
    /// It did not end in time.
    Hung,
    /// It finished, but a fault of the plan has met no connection, process or packet, so the run says nothing.
    NoEffect(String),
    /// It finished, but a fault could not be made.
    NotMade(String),
    /// It finished with all data right.
    Survived,
    /// It finished or not, with wrong data.
    WrongData,
}

/// One run.
#[derive(Clone, Debug, Serialize)]
pub struct MatrixRun {
    /// Seed of its faults.
    pub seed: u64,
    /// How it ended.
    #[serde(flatten)]
    pub end: RunEnd,
    /// How long it took, in seconds.
    pub seconds: f64,
    /// Longest time that one step of the program took, in seconds.
    pub longest_stall: Option<f64>,
    /// The number of faults that were made.
    pub faults: usize,
    /// The number of connections killed.
    pub killed: usize,
}

/// With or without SLIM.
#[derive(Clone, Copy, Debug, Display, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum MatrixMode {
    /// Without SLIM.
    #[strum(to_string = "bare")]
    Bare,
    /// With SLIM.
    #[strum(to_string = "SLIM")]
    Slim,
}

/// The runs of one MPI under one fault.
#[derive(Clone, Debug, Serialize)]
pub struct MatrixCell {
    /// The fault.
    pub fault: String,
    /// The MPI, or the user's command.
    pub job: String,
    /// With or without SLIM.
    pub mode: MatrixMode,
    /// All runs.
    pub runs: Vec<MatrixRun>,
    /// Command that repeats the first run that did not survive.
    pub repeat: Option<String>,
}

impl MatrixCell {
    /// Whether all runs survived.
    pub fn is_good(&self) -> bool {
        self.survived() == self.runs.len()
    }

    /// Whether no run says anything.
    pub fn is_empty(&self) -> bool {
        let says = |run: &MatrixRun| !matches!(run.end, RunEnd::NoEffect(_) | RunEnd::NotMade(_));
        !self.runs.iter().any(says)
    }

    fn survived(&self) -> usize {
        let good = |run: &&MatrixRun| run.end == RunEnd::Survived;
        self.runs.iter().filter(good).count()
    }

    /// Longest step of all runs that survived, in seconds.
    pub fn longest_stall(&self) -> Option<f64> {
        let survivors = self.runs.iter().filter(|run| run.end == RunEnd::Survived);
        survivors
            .filter_map(|run| run.longest_stall)
            .reduce(f64::max)
    }

    /// Such as `1 of 3 (1 hung, 1 without effect)`.
    pub fn text(&self) -> String {
        let count = |what: fn(&RunEnd) -> bool, words: &str| {
            let n = self.runs.iter().filter(|run| what(&run.end)).count();
            (n > 0).then(|| format!("{n} {words}"))
        };
        let rest = [
            count(|end| *end == RunEnd::WrongData, "WRONG DATA"),
            count(|end| matches!(end, RunEnd::Failed(_)), "failed"),
            count(|end| *end == RunEnd::Hung, "hung"),
            count(|end| matches!(end, RunEnd::NoEffect(_)), "without effect"),
            count(|end| matches!(end, RunEnd::NotMade(_)), "not made"),
        ];
        let rest: Vec<_> = rest.into_iter().flatten().collect();
        let all = format!("{} of {}", self.survived(), self.runs.len());
        match rest.is_empty() {
            true => all,
            false => format!("{all} ({})", rest.join(", ")),
        }
    }

    /// The first run that did not survive.
    pub fn first_bad(&self) -> Option<&MatrixRun> {
        self.runs.iter().find(|run| run.end != RunEnd::Survived)
    }
}

impl std::fmt::Display for RunEnd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Failed(how) => write!(f, "failed: {how}"),
            Self::Hung => f.write_str("hung"),
            Self::NoEffect(which) => write!(f, "finished, but {which} met nothing"),
            Self::NotMade(why) => write!(f, "finished, but a fault was not made: {why}"),
            Self::Survived => f.write_str("survived"),
            Self::WrongData => f.write_str("WRONG DATA"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(ends: &[RunEnd]) -> MatrixCell {
        let run = |end: &RunEnd| MatrixRun {
            seed: 1,
            end: end.clone(),
            seconds: 2.0,
            longest_stall: Some(0.5),
            faults: 1,
            killed: 1,
        };
        MatrixCell {
            fault: "kill".into(),
            job: "openmpi4".into(),
            mode: MatrixMode::Slim,
            runs: ends.iter().map(run).collect(),
            repeat: None,
        }
    }

    #[test]
    fn a_fault_without_effect_does_not_count_as_survived() {
        let none = cell(&[RunEnd::NoEffect("x".into()), RunEnd::NotMade("x".into())]);
        assert!(!none.is_good() && none.is_empty());
        assert_eq!(none.text(), "0 of 2 (1 without effect, 1 not made)");
        let some = cell(&[RunEnd::Survived, RunEnd::NoEffect("x".into())]);
        assert!(!some.is_good() && !some.is_empty());
        assert_eq!(some.text(), "1 of 2 (1 without effect)");
    }

    #[test]
    fn a_cell_counts_its_runs() {
        let good = cell(&[RunEnd::Survived, RunEnd::Survived]);
        assert!(good.is_good() && good.first_bad().is_none());
        assert_eq!(good.text(), "2 of 2");
        let bad = cell(&[RunEnd::Survived, RunEnd::Hung, RunEnd::Failed("x".into())]);
        assert_eq!(bad.text(), "1 of 3 (1 failed, 1 hung)");
        assert_eq!(bad.first_bad().unwrap().end, RunEnd::Hung);
    }

    #[test]
    fn a_run_is_one_flat_object_in_json() {
        let json = serde_json::to_value(cell(&[RunEnd::Failed("exit 1".into())])).unwrap();
        assert_eq!(json["mode"], "slim");
        assert_eq!(json["runs"][0]["end"], "failed");
        assert_eq!(json["runs"][0]["detail"], "exit 1");
    }
}
