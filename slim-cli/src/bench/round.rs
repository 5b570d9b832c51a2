//! One round: a job of every contender, all of them alive at the same time, each working in its turn only.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use slim_lab::Lab;
use slim_lab::mpi::{Job, Started};

use super::contender::{Contender, Ready};
use super::messages::Test;
use super::turns::{JobAddress, Lost, Ranks, Turn, TurnAnswer};
use crate::failure::CliError;

/// How long a job may take to start, to have a turn, and to end. Only what hangs takes so long.
const LIMIT: Duration = Duration::from_secs(60);
/// How long a job that has lost a rank has for its last words: mpirun says what happened.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// How turns are to be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TurnPace {
    /// About how long one is.
    pub turn: Duration,
    /// About how long all turns of a contender are together.
    pub each: Duration,
    /// How many they are at least, even if one takes long. An even number.
    pub least: usize,
}

/// The turns of all contenders with one test and size.
#[derive(Debug)]
pub struct Turns {
    /// Unit of the figures.
    pub unit: String,
    /// By contender, a figure for each cycle.
    pub values: Vec<Vec<f64>>,
}

/// A job of each contender. Dropping it kills them all.
#[derive(Debug)]
pub struct Round<'a> {
    lab: &'a Lab,
    players: Vec<Player<'a>>,
    /// Which way round the first cycle of a point goes.
    backwards: bool,
}

/// A contender's job.
#[derive(Debug)]
struct Player<'a> {
    contender: Contender,
    /// Its socket and its logs, apart from those of the others.
    dir: PathBuf,
    started: Started<'a>,
    ranks: Ranks,
}

impl TurnPace {
    /// The same number of turns in both directions, so that what drifts does not favour anybody.
    fn cycles(self, turn: Duration) -> usize {
        let fit = self.each.as_secs_f64() / turn.as_secs_f64().max(1e-9);
        (fit.round() as usize).next_multiple_of(2).max(self.least)
    }

    /// Is a repetition so long that one more to warm up would cost more than it brings?
    fn is_long(self, once: Duration) -> bool {
        once > self.turn * 10
    }

    /// Repetitions before the clock starts: an eighth, and one at least.
    fn lead(self, times: u64, length: Duration) -> u64 {
        match times {
            1 if self.is_long(length) => 0,
            times => times.div_ceil(8),
        }
    }

    /// How often to repeat what took so long for so many times; none if that is a turn already.
    fn more(self, times: u64, took: Duration) -> Option<u64> {
        if took >= self.turn / 2 {
            return None;
        }
        let factor = self.turn.as_secs_f64() / took.as_secs_f64().max(1e-9);
        // What is very short says little of what many take.
        Some((times as f64 * factor.min(8.0)).ceil() as u64)
    }
}

impl<'a> Round<'a> {
    /// Starts the jobs, one after the other: starting, a job does not sleep. `job` makes one, given the directory
    /// for its logs and the path of its socket.
    pub fn start(
        lab: &'a Lab,
        number: usize,
        ranks: usize,
        contenders: &[Ready],
        job: impl Fn(&Ready, &Path, &Path) -> Job<'a>,
    ) -> Result<Self, CliError> {
        let mut round = Self {
            lab,
            players: Vec::new(),
            backwards: number.is_multiple_of(2),
        };
        for ready in contenders {
            let name = format!("{number}-{ranks}-{}", ready.contender);
            let dir = lab.dir().join(name);
            let io = |e: std::io::Error| CliError::failed(format!("{}: {e}", dir.display()));
            fs::create_dir(&dir).map_err(io)?;
            let door = JobAddress::new(dir.join("turns")).map_err(io)?;
            let job = job(ready, &dir, door.path());
            let mut started = job.start().map_err(|e| CliError::failed(e.to_string()))?;
            let alive = || started.running().is_running();
            match door.ranks(ranks, LIMIT, alive) {
                Ok(ranks) => round.players.push(Player {
                    contender: ready.contender,
                    dir,
                    started,
                    ranks,
                }),
                Err(lost) => return Err(last_words(ready.contender, started, "its start", &lost)),
            }
        }
        Ok(round)
    }

    /// Measures one point: finds out how often to repeat it, then gives each contender turns, in one order and in
    /// the other.
    pub fn measure(&mut self, test: Test, bytes: u32, pace: TurnPace) -> Result<Turns, CliError> {
        let mut turn = Turn {
            test,
            bytes,
            lead: 0,
            times: 1,
        };
        // The first repetition makes connections, and any may be disturbed: the shortest run is believed.
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
        // The first one is warm by now.
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

    /// Sends all jobs home and looks whether each was what it is called.
    pub fn end(self) -> Result<(), CliError> {
        let mut left: Vec<_> = self.players.into_iter().map(Player::leave).collect();
        // Dropping one that has ended kills whatever is left on the nodes: not before all have.
        for (_, _, started) in &mut left {
            started.running().wait(LIMIT);
        }
        for (contender, dir, started) in left {
            let outcome = started.wait(Duration::ZERO);
            if !outcome.status.is_some_and(|status| status.success()) {
                return Err(CliError::failed(format!(
                    "the job of {contender} did its work and did not end well ({}); it said:\n{}",
                    outcome
                        .status
                        .map_or("not in time".into(), |s| s.to_string()),
                    outcome.tail(20)
                )));
            }
            contender.was_used(self.lab, &dir)?;
            // Some rounds' logs would be many.
            let _ = fs::remove_dir_all(&dir);
        }
        Ok(())
    }

    /// One job's turn; if it fails all jobs are over.
    fn turn(&mut self, at: usize, turn: &Turn) -> Result<TurnAnswer, CliError> {
        let player = &mut self.players[at];
        player.ranks.turn(turn, LIMIT).map_err(|lost| {
            let player = self.players.remove(at);
            let what = format!("{} of {} bytes", turn.test, turn.bytes);
            let failure = last_words(player.contender, player.started, &what, &lost);
            self.players.clear();
            failure
        })
    }
}

impl<'a> Player<'a> {
    /// Its ranks end when nobody tells them anything any more.
    fn leave(self) -> (Contender, PathBuf, Started<'a>) {
        (self.contender, self.dir, self.started)
    }
}

/// Why a job is over, with what it said itself.
fn last_words(contender: Contender, started: Started<'_>, what: &str, lost: &Lost) -> CliError {
    let outcome = started.wait(LAST_WORDS);
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
    fn turns_are_as_long_as_they_should_be_and_as_many_as_fit() {
        assert_eq!(PACE.more(100, Duration::from_millis(5)), Some(400));
        assert_eq!(PACE.more(1, Duration::from_micros(20)), Some(8));
        assert_eq!(PACE.more(1, Duration::ZERO), Some(8));
        assert_eq!(PACE.more(500, Duration::from_millis(11)), None);
        assert_eq!(PACE.cycles(Duration::from_millis(20)), 16);
        assert_eq!(PACE.cycles(Duration::from_millis(25)), 12);
    }

    #[test]
    fn what_takes_longer_than_a_turn_is_done_once_and_a_few_times() {
        assert_eq!(PACE.more(1, Duration::from_secs(2)), None);
        assert_eq!(PACE.cycles(Duration::from_secs(2)), PACE.least);
    }

    #[test]
    fn the_clock_starts_when_the_line_is_busy() {
        let lead = |times| PACE.lead(times, PACE.turn);
        assert_eq!([1, 2, 8, 9, 1000].map(lead), [1, 1, 1, 2, 125]);
        assert_eq!(PACE.lead(1, Duration::from_secs(2)), 0);
    }
}
