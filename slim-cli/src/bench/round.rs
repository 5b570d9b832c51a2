//! One round: one job of every contender. All jobs exist at the same time, but only one works at a time.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use slim_lab::mpi::{Mpi, Started};

use super::contender::{Contender, Ready};
use super::messages::Test;
use super::pairs::FlowsOnPairs;
use super::site::{BenchJob, Site};
use super::turns::{JobAddress, LostRank, Ranks, Turn, TurnAnswer};
use crate::failure::CliError;

/// Time limit for the start, for one turn, and for the end of a job. Only a job that hangs takes longer.
const LIMIT: Duration = Duration::from_secs(60);
/// How long to wait for the end of a job that has lost a rank: mpirun reports what happened.
const LAST_OUTPUT: Duration = Duration::from_secs(5);

/// How long the first flows may take to get to queue pairs, and how often to look.
const PAIRS: Duration = Duration::from_secs(20);
const LOOK: Duration = Duration::from_millis(20);

/// Length and number of turns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TurnPace {
    /// Approximate length of one turn.
    pub turn: Duration,
    /// Approximate total length of all turns of a contender.
    pub each: Duration,
    /// Least number of turns, even if one takes long. An even number.
    pub least: usize,
}

/// The turns of all contenders with one test and size.
#[derive(Debug)]
pub struct Turns {
    /// Unit of the values.
    pub unit: String,
    /// By contender, a value for each cycle.
    pub values: Vec<Vec<f64>>,
}

/// A job of each contender. Dropping it kills them all.
#[derive(Debug)]
pub struct Round<'a> {
    site: &'a Site,
    players: Vec<Player<'a>>,
    /// Whether the first cycle of a point goes through the contenders in reverse order.
    backwards: bool,
}

/// A contender's job.
#[derive(Debug)]
struct Player<'a> {
    contender: Contender,
    /// Directory of its socket and its logs.
    dir: PathBuf,
    // Its ranks end when this is dropped, and before the job is ended.
    ranks: Ranks,
    started: Started<'a>,
    /// Of a job over verbs: its flows when they had all moved.
    pairs: Option<FlowsOnPairs>,
}

impl TurnPace {
    /// Number of cycles. It is even, for as many in either order, so that a drift favours no contender.
    fn cycles(self, turn: Duration) -> usize {
        let fit = self.each.as_secs_f64() / turn.as_secs_f64().max(1e-9);
        (fit.round() as usize).next_multiple_of(2).max(self.least)
    }

    /// Whether one repetition is so long that another one to warm up is not worth its time.
    fn is_long(self, once: Duration) -> bool {
        once > self.turn * 10
    }

    /// Number of repetitions before the clock starts: an eighth of `times`, at least one, none if one is long.
    fn lead(self, times: u64, length: Duration) -> u64 {
        match times {
            1 if self.is_long(length) => 0,
            times => times.div_ceil(8),
        }
    }

    /// `times` repetitions took `took`: the number of repetitions to try next, or `None` if this is long enough for a turn.
    fn more(self, times: u64, took: Duration) -> Option<u64> {
        if took >= self.turn / 2 {
            return None;
        }
        let factor = self.turn.as_secs_f64() / took.as_secs_f64().max(1e-9);
        // A very short time predicts little, so grow by a factor of 8 at most.
        Some((times as f64 * factor.min(8.0)).ceil() as u64)
    }
}

impl<'a> Round<'a> {
    /// Starts the jobs of `program` one after the other, because a job that starts uses the processor.
    pub fn start(
        site: &'a Site,
        mpi: &'a Mpi,
        program: &Path,
        number: usize,
        ranks: usize,
        contenders: &[Ready],
    ) -> Result<Self, CliError> {
        let mut round = Self {
            site,
            players: Vec::new(),
            backwards: number.is_multiple_of(2),
        };
        for ready in contenders {
            let name = format!("{number}-{ranks}-{}", ready.contender.word());
            let dir = site.dir().join(name);
            let io = |e: std::io::Error| CliError::failed(format!("{}: {e}", dir.display()));
            fs::create_dir(&dir).map_err(io)?;
            let address = JobAddress::new(dir.join("turns")).map_err(io)?;
            let started = site.start(BenchJob {
                mpi,
                program,
                ready,
                ranks,
                logs: &dir,
                socket: address.path(),
            });
            let mut started = started.map_err(|e| CliError::failed(e.to_string()))?;
            let alive = || started.running().is_running();
            match address.ranks(ranks, LIMIT, alive) {
                Ok(ranks) => round.players.push(Player {
                    contender: ready.contender,
                    dir,
                    started,
                    ranks,
                    pairs: None,
                }),
                Err(lost) => return Err(job_failure(ready.contender, started, "its start", &lost)),
            }
            if ready.contender == Contender::Verbs {
                round.wait_for_pairs()?;
            }
        }
        Ok(round)
    }

    /// Exchanges messages until the flows of the last job are on queue pairs: they begin on TCP.
    fn wait_for_pairs(&mut self) -> Result<(), CliError> {
        let last = self.players.len() - 1;
        let some = Turn {
            test: Test::Latency,
            bytes: 8,
            lead: 0,
            times: 10,
        };
        let begin = Instant::now();
        loop {
            self.turn(last, &some)?;
            let player = &mut self.players[last];
            player.pairs = FlowsOnPairs::find(&player.dir)?;
            if player.pairs.is_some() {
                return Ok(());
            }
            if begin.elapsed() > PAIRS {
                return Err(CliError::failed(format!(
                    "the job of {} does not get to queue pairs: `ibv_devinfo` says whether its adapters work",
                    player.contender
                )));
            }
            thread::sleep(LOOK);
        }
    }

    /// Measures one point: finds the number of repetitions, then gives turns to the contenders, alternating between
    /// one order and its reverse.
    pub fn measure(&mut self, test: Test, bytes: u32, pace: TurnPace) -> Result<Turns, CliError> {
        let mut turn = Turn {
            test,
            bytes,
            lead: 0,
            times: 1,
        };
        // The first repetition makes connections, and any may be disturbed, so take the shortest of three.
        let mut unit = String::new();
        let length = loop {
            let mut length = Duration::MAX;
            for _ in 0..3 {
                let answer = self.turn(0, &turn)?;
                length = length.min(Duration::from_secs_f64(answer.seconds));
                unit = answer.unit;
                if pace.more(turn.times, length).is_some() {
                    break;
                }
            }
            match pace.more(turn.times, length) {
                Some(times) => turn.times = times,
                None => break length,
            }
        };
        turn.lead = pace.lead(turn.times, length);
        // Warm up the other jobs; the first one is warm by now.
        for at in 1..self.players.len() {
            self.turn(at, &turn)?;
        }
        let mut values = vec![Vec::new(); self.players.len()];
        for cycle in 0..pace.cycles(length) {
            let forwards = cycle.is_multiple_of(2) != self.backwards;
            for n in 0..self.players.len() {
                let at = match forwards {
                    true => n,
                    false => self.players.len() - 1 - n,
                };
                values[at].push(self.turn(at, &turn)?.value);
            }
        }
        Ok(Turns { unit, values })
    }

    /// Ends all jobs, and checks that each really used its contender.
    pub fn end(self) -> Result<(), CliError> {
        for player in &self.players {
            if player.pairs.is_some() && FlowsOnPairs::find(&player.dir)? != player.pairs {
                return Err(CliError::failed(format!(
                    "a flow of the job of {} has left its queue pair: there is nothing to compare",
                    player.contender
                )));
            }
        }
        let mut left: Vec<_> = self.players.into_iter().map(Player::leave).collect();
        // Dropping a job kills all processes on the nodes, so first wait until all jobs have ended.
        for (_, _, started) in &mut left {
            started.running().wait(LIMIT);
        }
        for (contender, dir, started) in left {
            let outcome = started.wait(Duration::ZERO);
            if !outcome.status.is_some_and(|status| status.success()) {
                return Err(CliError::failed(format!(
                    "the job of {contender} did its work, but failed at its end ({}); it said:\n{}",
                    outcome
                        .status
                        .map_or("not in time".into(), |s| s.to_string()),
                    outcome.tail(20)
                )));
            }
            contender.was_used(self.site, &dir)?;
            // The logs of many rounds would take much space.
            let _ = fs::remove_dir_all(&dir);
        }
        Ok(())
    }

    /// Runs one job's turn. If it fails, all jobs are ended.
    fn turn(&mut self, at: usize, turn: &Turn) -> Result<TurnAnswer, CliError> {
        let player = &mut self.players[at];
        player.ranks.turn(turn, LIMIT).map_err(|lost| {
            let player = self.players.remove(at);
            let what = format!("{} of {} bytes", turn.test, turn.bytes);
            let failure = job_failure(player.contender, player.started, &what, &lost);
            self.players.clear();
            failure
        })
    }
}

impl<'a> Player<'a> {
    /// Closes the streams to the ranks, which makes them end.
    fn leave(self) -> (Contender, PathBuf, Started<'a>) {
        (self.contender, self.dir, self.started)
    }
}

/// Waits for the end of a failed job; the error has the reason and the job's last output.
fn job_failure(
    contender: Contender,
    started: Started<'_>,
    what: &str,
    lost: &LostRank,
) -> CliError {
    let outcome = started.wait(LAST_OUTPUT);
    CliError::failed(format!(
        "the job of {contender} failed in {what}: {lost}; it said:\n{}",
        outcome.tail(20)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACE: TurnPace = TurnPace {
        turn: Duration::from_millis(20),
        each: Duration::from_millis(300),
        least: 4,
    };

    #[test]
    fn repetitions_fill_a_turn_and_turns_fill_the_time() {
        assert_eq!(PACE.more(100, Duration::from_millis(5)), Some(400));
        assert_eq!(PACE.more(1, Duration::from_micros(20)), Some(8));
        assert_eq!(PACE.more(1, Duration::ZERO), Some(8));
        assert_eq!(PACE.more(500, Duration::from_millis(11)), None);
        assert_eq!(PACE.cycles(Duration::from_millis(20)), 16);
        assert_eq!(PACE.cycles(Duration::from_millis(25)), 12);
    }

    #[test]
    fn a_test_longer_than_a_turn_runs_once_a_turn_and_for_the_least_number_of_turns() {
        assert_eq!(PACE.more(1, Duration::from_secs(2)), None);
        assert_eq!(PACE.cycles(Duration::from_secs(2)), PACE.least);
    }

    #[test]
    fn an_eighth_of_the_repetitions_runs_before_the_clock_starts() {
        let lead = |times| PACE.lead(times, PACE.turn);
        assert_eq!([1, 2, 8, 9, 1000].map(lead), [1, 1, 1, 2, 125]);
        assert_eq!(PACE.lead(1, Duration::from_secs(2)), 0);
    }
}
