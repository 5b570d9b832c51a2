//! The table at the end of the demonstration.

use std::collections::BTreeMap;

use super::one_run::{DemoMode, DemoRun};
use crate::table::Table;

/// The runs of one kind.
#[derive(Debug)]
pub struct Summary {
    mode: DemoMode,
    runs: Vec<DemoRun>,
}

impl Summary {
    /// A summary without runs.
    pub fn new(mode: DemoMode) -> Self {
        Self {
            mode,
            runs: Vec::new(),
        }
    }

    /// With or without SLIM, and how.
    pub fn mode(&self) -> DemoMode {
        self.mode
    }

    /// Adds a run.
    pub fn add(&mut self, run: DemoRun) {
        self.runs.push(run);
    }

    /// Did every run finish with all data right, with connections killed in each?
    pub fn is_perfect(&self) -> bool {
        self.runs
            .iter()
            .all(|run| run.is_perfect() && run.killed > 0)
    }

    fn cells(&self) -> [String; 7] {
        let last = || self.runs.iter().filter_map(|run| run.last);
        let stall = last().map(|p| p.max_stall).reduce(f64::max);
        let mut statuses: BTreeMap<String, usize> = BTreeMap::new();
        for run in &self.runs {
            let text = run.status.map_or("hung".to_owned(), |s| s.to_string());
            *statuses.entry(text).or_default() += 1;
        }
        let statuses: Vec<_> = statuses
            .iter()
            .map(|(status, n)| format!("{status} ({n}x)"))
            .collect();
        [
            self.mode.to_string(),
            self.runs.len().to_string(),
            self.runs
                .iter()
                .filter(|run| run.is_perfect())
                .count()
                .to_string(),
            last().map(|p| p.errors).sum::<u64>().to_string(),
            self.runs
                .iter()
                .map(|run| run.killed)
                .sum::<usize>()
                .to_string(),
            stall.map_or("-".to_owned(), |s| format!("{s:.3} s")),
            statuses.join(", "),
        ]
    }
}

/// One line for each kind of run.
pub fn table(summaries: &[Summary]) -> Table {
    let mut table = Table::new(&[
        "",
        ">runs",
        ">finished",
        ">wrong words",
        ">killed connections",
        ">longest stall",
        "exit status",
    ]);
    for summary in summaries {
        table.row(summary.cells());
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use slim_lab::mpi::{JobVerdict, Progress};

    fn run(verdict: JobVerdict, status: Option<i32>, killed: usize) -> DemoRun {
        let last = match &verdict {
            JobVerdict::Finished(p) | JobVerdict::Wrong(p) => Some(*p),
            _ => None,
        };
        DemoRun {
            verdict,
            last,
            status,
            killed,
        }
    }

    fn done(errors: u64, max_stall: f64) -> Progress {
        Progress {
            rounds: 9,
            errors,
            mib: 3,
            max_stall,
        }
    }

    #[test]
    fn only_finished_runs_with_kills_are_perfect() {
        let mut summary = Summary::new(DemoMode::Slim);
        summary.add(run(JobVerdict::Finished(done(0, 0.2)), Some(0), 21));
        assert!(summary.is_perfect());
        summary.add(run(JobVerdict::Finished(done(0, 0.2)), Some(0), 0));
        assert!(!summary.is_perfect(), "nothing was killed in the second");
        let mut summary = Summary::new(DemoMode::Slim);
        summary.add(run(JobVerdict::Hung, None, 3));
        assert!(!summary.is_perfect());
    }

    #[test]
    fn the_table_adds_up() {
        let mut bare = Summary::new(DemoMode::Bare);
        bare.add(run(JobVerdict::Finished(done(0, 0.25)), Some(0), 20));
        bare.add(run(JobVerdict::Wrong(done(4, 0.5)), Some(3), 1));
        bare.add(run(JobVerdict::Hung, None, 1));
        let text = table(&[bare, Summary::new(DemoMode::Slim)]).to_string();
        let lines: Vec<_> = text.lines().collect();
        // README.md shows such a table.
        assert_eq!(
            lines,
            [
                "        runs  finished  wrong words  killed connections  longest stall  exit status",
                " ----- ----- --------- ------------ ------------------- -------------- --------------------------",
                "  bare     3         1            4                  22        0.500 s  0 (1x), 3 (1x), hung (1x)",
                "  SLIM     0         0            0                   0              -",
            ]
        );
    }
}
