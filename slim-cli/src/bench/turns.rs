//! Turns: the ranks of a job sleep until they are told what to do, do it, and say how long it took.
//!
//! Every rank of `slim_bench --turns SOCKET` connects to a Unix socket and waits there, outside of MPI. So the jobs
//! of several contenders can live side by side: one at a time works, the others use no processor. What
//! is said is in `programs/slim_bench.c`.

use std::fmt;
use std::fs;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use serde::Deserialize;

use super::messages::Test;

/// One turn of a job.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Turn {
    /// What is done.
    pub test: Test,
    /// Bytes in a message.
    pub bytes: u32,
    /// How often it is done before the clock starts.
    pub lead: u64,
    /// And after that.
    pub times: u64,
}

/// What a rank says of its turn.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct TurnAnswer {
    /// How long the measured part took.
    pub seconds: f64,
    /// The figure.
    pub value: f64,
    /// Its unit.
    pub unit: String,
}

/// Why a job cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum Lost {
    /// A rank has closed its end: the process is dead, or going to be.
    #[error("rank {0} has ended in the middle of it")]
    Gone(usize),
    /// A rank does not answer.
    #[error("rank {0} gave no answer in {limit} s", limit = .1.as_secs_f64())]
    Late(usize, Duration),
    /// A rank answers something else.
    #[error("rank {0} answered {1:?}")]
    Nonsense(usize, String),
    /// Not all ranks have come.
    #[error("{came} of {ranks} ranks have started")]
    NotStarted {
        /// Ranks that have connected.
        came: usize,
        /// Ranks of the job.
        ranks: usize,
    },
    /// The socket does not work.
    #[error("its socket: {0}")]
    Socket(io::Error),
}

impl fmt::Display for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Turn {
            test,
            bytes,
            lead,
            times,
        } = self;
        write!(f, "{test} {bytes} {lead} {times}")
    }
}

/// Where the ranks of one job connect to.
#[derive(Debug)]
pub struct JobAddress {
    listener: UnixListener,
    path: PathBuf,
}

impl JobAddress {
    /// A socket that is there until this is dropped.
    pub fn new(path: PathBuf) -> io::Result<Self> {
        let listener = UnixListener::bind(&path)?;
        // So that it can be seen meanwhile whether the job is still there.
        listener.set_nonblocking(true)?;
        Ok(Self { listener, path })
    }

    /// For the program's arguments.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Waits for all ranks of the job, while it is `alive`.
    pub fn ranks(
        &self,
        ranks: usize,
        limit: Duration,
        mut alive: impl FnMut() -> bool,
    ) -> Result<Ranks, Lost> {
        let start = Instant::now();
        let mut seats: Vec<Option<TurnStream>> = (0..ranks).map(|_| None).collect();
        let mut came = 0;
        while came < ranks {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    let (rank, stream) = introduced(stream, limit).map_err(Lost::Socket)?;
                    match seats.get_mut(rank) {
                        Some(seat @ None) => *seat = Some(stream),
                        _ => return Err(Lost::Nonsense(rank, "my number, a second time".into())),
                    }
                    came += 1;
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    if start.elapsed() > limit || !alive() {
                        return Err(Lost::NotStarted { came, ranks });
                    }
                    thread::sleep(Duration::from_millis(5));
                }
                Err(e) => return Err(Lost::Socket(e)),
            }
        }
        Ok(Ranks(seats.into_iter().flatten().collect()))
    }
}

impl Drop for JobAddress {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

type TurnStream = BufReader<UnixStream>;

/// A rank says which one it is.
fn introduced(stream: UnixStream, limit: Duration) -> io::Result<(usize, TurnStream)> {
    // Whether a new socket is non-blocking because the listener is depends on the system.
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(limit))?;
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    stream.read_line(&mut line)?;
    match line.trim().parse() {
        Ok(rank) => Ok((rank, stream)),
        Err(_) => Err(io::Error::other(format!("{line:?} is no rank"))),
    }
}

/// The ranks of a job, each asleep. Dropping this sends them home.
#[derive(Debug)]
pub struct Ranks(Vec<TurnStream>);

impl Ranks {
    /// The job has its turn. It is over when every rank sleeps again; the answer is that of rank 0.
    pub fn turn(&mut self, turn: &Turn, limit: Duration) -> Result<TurnAnswer, Lost> {
        let line = format!("{turn}\n");
        // Rank 0 last: the others are at the barrier when it comes there.
        for (rank, stream) in self.0.iter_mut().enumerate().rev() {
            let said = stream.get_mut().write_all(line.as_bytes());
            said.map_err(|_| Lost::Gone(rank))?;
        }
        let over = Instant::now() + limit;
        let mut first = None;
        for (rank, stream) in self.0.iter_mut().enumerate() {
            let answer = answer(rank, stream, limit, over)?;
            first.get_or_insert(answer);
        }
        first.ok_or(Lost::NotStarted { came: 0, ranks: 0 })
    }
}

fn answer(
    rank: usize,
    stream: &mut TurnStream,
    limit: Duration,
    over: Instant,
) -> Result<TurnAnswer, Lost> {
    let left = over.saturating_duration_since(Instant::now());
    // No time at all would mean to wait for ever.
    let left = left.max(Duration::from_millis(1));
    let socket = stream.get_mut();
    socket.set_read_timeout(Some(left)).map_err(Lost::Socket)?;
    let mut line = String::new();
    match stream.read_line(&mut line) {
        Ok(0) => Err(Lost::Gone(rank)),
        Ok(_) => serde_json::from_str(&line)
            .ok()
            .filter(|a: &TurnAnswer| a.seconds > 0.0 && a.value > 0.0)
            .ok_or(Lost::Nonsense(rank, line)),
        Err(e) => Err(match e.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Lost::Late(rank, limit),
            io::ErrorKind::ConnectionReset => Lost::Gone(rank),
            _ => Lost::Socket(e),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TURN: Turn = Turn {
        test: Test::Latency,
        bytes: 8,
        lead: 2,
        times: 16,
    };
    const GOOD: &str = "{\"seconds\":0.5,\"value\":5.25,\"unit\":\"us\"}\n";
    const SOON: Duration = Duration::from_millis(50);
    const LONG: Duration = Duration::from_secs(20);

    /// A door of its own for each test.
    fn door(name: &str) -> JobAddress {
        let file = format!("slim-turns-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(file);
        let _ = fs::remove_file(&path);
        JobAddress::new(path).unwrap()
    }

    /// A rank that comes, and gives this answer to each turn; none: it dies in its first.
    fn rank(
        door: &JobAddress,
        rank: usize,
        answer: Option<&'static str>,
    ) -> thread::JoinHandle<String> {
        let path = door.path().to_owned();
        thread::spawn(move || {
            let mut stream = UnixStream::connect(path).unwrap();
            writeln!(stream, "{rank}").unwrap();
            let mut told = String::new();
            let mut lines = BufReader::new(stream.try_clone().unwrap());
            while lines.read_line(&mut told).unwrap() > 0 {
                match answer {
                    Some(answer) => stream.write_all(answer.as_bytes()).unwrap(),
                    None => break,
                }
            }
            told
        })
    }

    #[test]
    fn all_ranks_are_told_and_the_first_one_counts() {
        let door = door("told");
        let other = "{\"seconds\":0.25,\"value\":9.5,\"unit\":\"us\"}\n";
        let others = rank(&door, 1, Some(other));
        let first = rank(&door, 0, Some(GOOD));
        let mut ranks = door.ranks(2, LONG, || true).unwrap();
        for _ in 0..2 {
            assert_eq!(ranks.turn(&TURN, LONG).unwrap().value, 5.25);
        }
        // The end of the stream is the end of the job.
        drop(ranks);
        for rank in [first, others] {
            assert_eq!(rank.join().unwrap(), "latency 8 2 16\n".repeat(2));
        }
        let path = door.path().to_owned();
        drop(door);
        assert!(!path.exists());
    }

    #[test]
    fn a_rank_that_dies_in_its_turn_is_missed_at_once() {
        let door = door("dies");
        let ranks = [rank(&door, 0, Some(GOOD)), rank(&door, 1, None)];
        let mut job = door.ranks(2, LONG, || true).unwrap();
        let lost = job.turn(&TURN, LONG).unwrap_err();
        assert!(matches!(lost, Lost::Gone(1)), "{lost}");
        // Also if it is dead before it is told.
        let again = job.turn(&TURN, LONG).unwrap_err();
        assert!(matches!(again, Lost::Gone(1)), "{again}");
        drop(job);
        for rank in ranks {
            rank.join().unwrap();
        }
    }

    #[test]
    fn a_rank_that_hangs_is_not_waited_for_longer_than_the_limit() {
        let door = door("hangs");
        let ranks = [rank(&door, 0, Some(GOOD)), rank(&door, 1, Some(""))];
        let mut job = door.ranks(2, LONG, || true).unwrap();
        let lost = job.turn(&TURN, SOON).unwrap_err();
        assert!(matches!(lost, Lost::Late(1, SOON)), "{lost}");
        assert_eq!(lost.to_string(), "rank 1 gave no answer in 0.05 s");
        drop(job);
        for rank in ranks {
            rank.join().unwrap();
        }
    }

    #[test]
    fn an_answer_that_is_no_figure_is_refused() {
        for (name, wrong) in [
            ("text", "hello\n"),
            ("nan", "{\"seconds\":1,\"value\":0,\"unit\":\"us\"}\n"),
        ] {
            let door = door(name);
            let only = rank(&door, 0, Some(wrong));
            let mut job = door.ranks(1, LONG, || true).unwrap();
            let lost = job.turn(&TURN, LONG).unwrap_err();
            assert!(matches!(&lost, Lost::Nonsense(0, line) if line == wrong));
            drop(job);
            only.join().unwrap();
        }
    }

    #[test]
    fn a_job_that_ends_before_its_ranks_come_is_not_waited_for() {
        let door = door("none");
        let lost = door.ranks(2, LONG, || false).unwrap_err();
        assert_eq!(lost.to_string(), "0 of 2 ranks have started");
        let only = rank(&door, 1, Some(GOOD));
        let lost = door.ranks(2, SOON, || true).unwrap_err();
        assert!(matches!(lost, Lost::NotStarted { came: 1, ranks: 2 }));
        only.join().unwrap();
    }
}
