//! Kills connections while a job runs, and keeps a tally of many such runs.

use std::{
    fmt, fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use slim_lab::{
    Lab, SeededRng,
    faults::destroy::{self, Amount, Selector},
    lab::KEEP_VAR,
    mpi::{Outcome, Started},
};

use super::{jobs::PROGRAM, soak};

/// How long the work goes on after the last kill.
const AFTER: Duration = Duration::from_millis(500);

/// How connections are killed during a run.
#[derive(Clone, Debug)]
pub struct Kills {
    /// Which connections.
    pub pick: Selector,
    /// Whether a kill takes one of them or all.
    pub amount: Amount,
    /// The number of kills. A try that finds no connection does not count.
    pub times: usize,
    /// Shortest and longest time between two kills.
    pub gap: (Duration, Duration),
    /// Time limit for all kills.
    pub window: Duration,
    /// Number of further kills in quick succession after each kill, which hit resumes under way.
    pub again: usize,
}

/// What was killed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Killed {
    /// The number of kills that took at least one connection.
    pub times: usize,
    /// The number of killed connections.
    pub connections: usize,
}

impl Kills {
    /// Kills of the ranks' connections with the other node, one at a time.
    pub fn one_by_one() -> Self {
        let ms = Duration::from_millis;
        Kills {
            pick: Selector::between_hosts().process(PROGRAM),
            amount: Amount::One,
            times: 20,
            gap: (ms(60), ms(200)),
            window: Duration::from_secs(40),
            again: 0,
        }
    }

    /// Kills connections on `lab` while `job` runs, from a random end each time.
    pub fn carry_out(&self, lab: &Lab, job: &mut Started<'_>, rng: &mut SeededRng) -> Killed {
        let (mut killed, start) = (Killed::default(), Instant::now());
        while killed.times < self.times
            && start.elapsed() < self.window
            && job.running().is_running()
        {
            thread::sleep(rng.between(self.gap.0, self.gap.1));
            for round in 0..=self.again {
                if round > 0 {
                    // The pause ends anywhere from the first moments of a resume to well after it.
                    thread::sleep(
                        rng.between(Duration::from_micros(200), Duration::from_millis(30)),
                    );
                }
                let end = lab.node(rng.below(lab.nodes().len()));
                let report = destroy::destroy(end.net(), &self.pick, self.amount, rng)
                    .expect("destroy connections");
                killed.times += usize::from(!report.connections.is_empty());
                killed.connections += report.connections.len();
            }
        }
        killed
    }

    /// The same for a job that works as long as the file `go_on` exists. Then the job may end.
    pub fn while_working(
        &self,
        lab: &Lab,
        job: &mut Started<'_>,
        go_on: &Path,
        seed: u64,
    ) -> Killed {
        let killed = self.carry_out(lab, job, &mut SeededRng::new(seed));
        thread::sleep(AFTER);
        fs::remove_file(go_on).expect("remove a file");
        killed
    }
}

impl fmt::Display for Killed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} kills of {} connections",
            self.times, self.connections
        )
    }
}

/// Counts runs of one kind. A failed run does not end the others, so that the long version says how many of fifty are right.
#[derive(Debug)]
pub struct Tally {
    name: String,
    runs: usize,
    killed: Killed,
    wrong: Vec<String>,
}

impl Tally {
    pub fn new(name: &str) -> Self {
        Tally {
            name: name.into(),
            runs: 0,
            killed: Killed::default(),
            wrong: Vec::new(),
        }
    }

    /// Adds a run. The files of a failed run are kept in the long version, and if asked for.
    pub fn add(
        &mut self,
        mut lab: Lab,
        outcome: &Outcome,
        killed: Killed,
        result: Result<(), String>,
    ) {
        self.runs += 1;
        self.killed.times += killed.times;
        self.killed.connections += killed.connections;
        let Err(what) = result else { return };
        println!(
            "{}, run {}: {what}\n{}",
            self.name,
            self.runs,
            outcome.tail(40)
        );
        if soak() || std::env::var_os(KEEP_VAR).is_some() {
            let dir = lab.keep_dir();
            fs::write(dir.join("output"), outcome.tail(usize::MAX)).expect("keep the output");
            println!("{}, run {}: kept {}", self.name, self.runs, dir.display());
        }
        self.wrong.push(format!("run {}: {what}", self.runs));
    }

    /// Prints how many runs were right, and asserts that all were.
    pub fn assert_all_right(self) {
        let right = self.runs - self.wrong.len();
        let kills = match self.killed {
            Killed { times: 0, .. } => String::new(),
            killed => format!(", {killed}"),
        };
        // `scripts/soak` makes a table of these lines.
        println!(
            "tally: {}: {right} of {} runs right{kills}",
            self.name, self.runs
        );
        assert!(self.wrong.is_empty(), "{}: {:#?}", self.name, self.wrong);
    }
}
