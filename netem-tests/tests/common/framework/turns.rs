//! A bare job and one under SLIM side by side, of which one works at a time: the speed of the one against that of the other.
//!
//! The programs' loops wait for turns (`programs/frameworks/turns.py`). Turns are short, and neighbours are compared, as in `slim bench`.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    os::unix::net::{UnixListener, UnixStream},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::time::TimeSpec,
    time::{clock_getcpuclockid, clock_gettime},
    unistd::Pid,
};
use slim_cli::bench::stats::Comparison;
use slim_lab::{Lab, output::Running};

use super::{
    super::{events::Events, lab},
    jobs::{Extent, Job},
};

/// The variable with the path of the socket from which a loop gets its turns.
pub const SOCKET: &str = "TURNS_SOCKET";
/// Time limit for the start of a job, and for a turn.
const LIMIT: Duration = Duration::from_secs(40);
/// The first turns are not counted: connections are made, code is compiled.
const WARM_UP: Duration = Duration::from_millis(1500);

/// How much is measured.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    /// Processes on each node.
    pub per_node: usize,
    /// Pairs of fresh jobs.
    pub rounds: usize,
    /// Pairs of turns in each round. An even number, for as many in either order.
    pub pairs: usize,
    /// Length of a turn.
    pub turn: Duration,
    /// Another library than SLIM's is measured.
    pub another: bool,
}

/// SLIM's figures against those of bare.
#[derive(Debug)]
pub struct Figures {
    /// Median time of a bare step.
    pub step: Duration,
    /// Steps per second.
    pub speed: Comparison,
    /// Processor time of all processes for a step.
    pub processor: Comparison,
}

/// The result of one turn.
#[derive(Clone, Copy)]
struct Turn {
    /// Of rank 0.
    took: Duration,
    /// Of all processes.
    processor: Duration,
}

/// A job whose loops wait for turns. Dropping it ends it.
struct Player {
    ranks: Vec<BufReader<UnixStream>>,
    pids: Vec<Pid>,
    lab: Lab,
    _running: Vec<Running>,
}

impl Player {
    fn start(job: &Job, slim: bool, per_node: usize) -> Option<Self> {
        let name = job.framework.name;
        let lab = lab(
            &format!("{name}-{}", if slim { "slim" } else { "bare" }),
            2,
            1,
        )?;
        let path = lab.dir().join("turns");
        let listener = UnixListener::bind(&path).expect("a socket for the turns");
        listener.set_nonblocking(true).expect("no waiting");
        let extent = Extent {
            per_node,
            steps: 0,
            in_turns: true,
        };
        let parts = (job.parts)(&lab, &job.framework.python(), extent);
        let variables = [(SOCKET, path.as_os_str())];
        let (servers, mut running) = job.framework.start(&lab, parts, slim, &variables);
        let wanted = if job.loop_everywhere { 2 * per_node } else { 1 };
        let mut ranks: Vec<_> = (0..wanted).map(|_| None).collect();
        let start = Instant::now();
        while ranks.iter().any(Option::is_none) {
            let Ok((stream, _)) = listener.accept() else {
                let said = || running.iter().map(Running::lines).collect::<Vec<_>>();
                assert!(
                    start.elapsed() < LIMIT,
                    "{name} does not start: {:#?}",
                    said()
                );
                thread::sleep(Duration::from_millis(5));
                continue;
            };
            stream.set_nonblocking(false).expect("waiting");
            stream.set_read_timeout(Some(LIMIT)).expect("a time limit");
            let mut stream = BufReader::new(stream);
            let rank: usize = line(&mut stream).trim().parse().expect("a rank");
            ranks[rank] = Some(stream);
        }
        running.extend(servers);
        Some(Player {
            ranks: ranks.into_iter().flatten().collect(),
            pids: Vec::new(),
            lab,
            _running: running,
        })
    }

    /// Processor time of all processes so far.
    fn processor(&self) -> Duration {
        let used = |pid: &Pid| clock_gettime(clock_getcpuclockid(*pid).ok()?).ok();
        let times = self.pids.iter().filter_map(used);
        times.map(|t: TimeSpec| Duration::from(t)).sum()
    }

    fn turn(&mut self, steps: u32) -> Turn {
        let before = self.processor();
        // Rank 0 last: it measures, and the others must not keep it waiting.
        for rank in self.ranks.iter_mut().rev() {
            let told = rank.get_mut().write_all(format!("{steps}\n").as_bytes());
            told.expect("a rank that lives");
        }
        let answers: Vec<f64> = self
            .ranks
            .iter_mut()
            .map(|rank| {
                let line = line(rank);
                let answer: serde_json::Value = serde_json::from_str(&line).expect("an answer");
                answer["seconds"].as_f64().expect("seconds")
            })
            .collect();
        Turn {
            took: Duration::from_secs_f64(answers[0]),
            processor: self.processor() - before,
        }
    }

    /// Makes the first turns, and finds the number of steps of one of this length.
    fn warm_up(&mut self, turn: Duration) -> u32 {
        let (begin, mut steps, mut shortest) = (Instant::now(), 1, Duration::MAX);
        while begin.elapsed() < WARM_UP {
            let took = self.turn(steps).took;
            shortest = shortest.min(took / steps);
            let fit = turn.as_secs_f64() / shortest.as_secs_f64();
            steps = (fit.round() as u32).clamp(1, 8 * steps);
        }
        for node in self.lab.nodes() {
            let pids = node.processes();
            self.pids
                .extend(pids.iter().map(|p| Pid::from_raw(p.pid as i32)));
        }
        steps
    }
}

fn line(stream: &mut BufReader<UnixStream>) -> String {
    let mut line = String::new();
    stream.read_line(&mut line).expect("an answer in time");
    assert!(!line.is_empty(), "a rank has ended");
    line
}

/// Compares jobs under SLIM with bare ones. `None` if there can be no lab.
pub fn compare(job: &Job, how: Measured) -> Option<Figures> {
    let (mut speed, mut processor) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    let mut bare_steps = Vec::new();
    for round in 0..how.rounds {
        let first = round % 2 == 1;
        let mut one = Player::start(job, first, how.per_node)?;
        let mut other = Player::start(job, !first, how.per_node)?;
        if first {
            std::mem::swap(&mut one, &mut other);
        }
        let mut players = [one, other];
        let steps = players[0].warm_up(how.turn);
        players[1].warm_up(how.turn);
        let mut taken = [Vec::new(), Vec::new()];
        for pair in 0..how.pairs {
            let order = match (pair + round).is_multiple_of(2) {
                true => [0, 1],
                false => [1, 0],
            };
            for at in order {
                taken[at].push(players[at].turn(steps));
            }
        }
        for (at, turns) in taken.iter().enumerate() {
            let steps = f64::from(steps);
            speed[at].push(turns.iter().map(|t| steps / t.took.as_secs_f64()).collect());
            let used = |t: &Turn| t.processor.as_secs_f64() / steps;
            processor[at].push(turns.iter().map(used).collect());
        }
        bare_steps.extend(taken[0].iter().map(|t| t.took / steps));
        if !how.another {
            let live = Events::read(&players[1].lab).count("live");
            assert!(live > 0, "{}: SLIM has no flow", job.framework.name);
        }
    }
    bare_steps.sort();
    let [bare, slim] = &speed;
    let speed = Comparison::new(bare, slim, false)?;
    let [bare, slim] = &processor;
    Some(Figures {
        step: bare_steps[bare_steps.len() / 2],
        speed,
        processor: Comparison::new(bare, slim, true)?,
    })
}
