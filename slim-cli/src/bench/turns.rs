//! Turns: the ranks of a job sleep until they get a command, run it, and report how long it took.
//!
//! Every rank of `slim_bench --turns SOCKET` connects to a Unix socket and waits there, outside of MPI. So the jobs
//! of several contenders can exist side by side: one works at a time, and the others use no processor. The
//! format is described in `programs/slim_bench.c`.

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
    /// The test.
    pub test: Test,
    /// Bytes in a message.
    pub bytes: u32,
    /// Number of repetitions before the clock starts.
    pub lead: u64,
    /// Number of measured repetitions.
    pub times: u64,
}

/// A rank's answer to a turn.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct TurnAnswer {
    /// Duration of the measured part.
    pub seconds: f64,
    /// The result of the test.
    pub value: f64,
    /// The unit of the result.
    pub unit: String,
}

/// Why a job cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum LostRank {
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
    /// Makes the socket. Dropping this removes it.
    pub fn new(path: PathBuf) -> io::Result<Self> {
        let listener = UnixListener::bind(&path)?;
        // Non-blocking, to check between two attempts whether the job still runs.
        listener.set_nonblocking(true)?;
        Ok(Self { listener, path })
    }

    /// The path of the socket, for the program's arguments.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Waits until all ranks of the job have connected, while the job is `alive`.
    pub fn ranks(
        &self,
        ranks: usize,
        limit: Duration,
        mut alive: impl FnMut() -> bool,
    ) -> Result<Ranks, LostRank> {
        let start = Instant::now();
        let mut seats: Vec<Option<TurnStream>> = (0..ranks).map(|_| None).collect();
        let mut came = 0;
        while came < ranks {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    let (rank, stream) = introduced(stream, limit).map_err(LostRank::Socket)?;
                    match seats.get_mut(rank) {
                        Some(seat @ None) => *seat = Some(stream),
                        _ => {
                            return Err(LostRank::Nonsense(
                                rank,
                                "its number, a second time".into(),
                            ));
                        }
                    }
                    came += 1;
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    if start.elapsed() > limit || !alive() {
                        return Err(LostRank::NotStarted { came, ranks });
                    }
                    thread::sleep(Duration::from_millis(5));
                }
                Err(e) => return Err(LostRank::Socket(e)),
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

/// Reads the number of the rank that has connected.
fn introduced(stream: UnixStream, limit: Duration) -> io::Result<(usize, TurnStream)> {
    // Whether a new socket is non-blocking because the listener is depends on the system.
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(limit))?;
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    stream.read_line(&mut line)?;
    match line.trim().parse() {
        Ok(rank) => Ok((rank, stream)),
        Err(_) => Err(io::Error::other(format!("{line:?} is not a rank"))),
    }
}

/// The sleeping ranks of a job. Dropping this makes them end.
#[derive(Debug)]
pub struct Ranks(Vec<TurnStream>);

impl Ranks {
    /// Runs the job's turn. It is over when every rank has answered; returns the answer of rank 0.
    pub fn turn(&mut self, turn: &Turn, limit: Duration) -> Result<TurnAnswer, LostRank> {
        let line = format!("{turn}\n");
        // Rank 0 last, so that the others are at the barrier when it gets there.
        for (rank, stream) in self.0.iter_mut().enumerate().rev() {
            let said = stream.get_mut().write_all(line.as_bytes());
            said.map_err(|_| LostRank::Gone(rank))?;
        }
        let over = Instant::now() + limit;
        let mut first = None;
        for (rank, stream) in self.0.iter_mut().enumerate() {
            let answer = answer(rank, stream, limit, over)?;
            first.get_or_insert(answer);
        }
        first.ok_or(LostRank::NotStarted { came: 0, ranks: 0 })
    }
}

fn answer(
    rank: usize,
    stream: &mut TurnStream,
    limit: Duration,
    over: Instant,
) -> Result<TurnAnswer, LostRank> {
    let left = over.saturating_duration_since(Instant::now());
    // A zero timeout is an error for the socket.
    let left = left.max(Duration::from_millis(1));
    let socket = stream.get_mut();
    socket
        .set_read_timeout(Some(left))
        .map_err(LostRank::Socket)?;
    let mut line = String::new();
    match stream.read_line(&mut line) {
        Ok(0) => Err(LostRank::Gone(rank)),
        Ok(_) => serde_json::from_str(&line)
            .ok()
            .filter(|a: &TurnAnswer| a.seconds > 0.0 && a.value > 0.0)
            .ok_or(LostRank::Nonsense(rank, line)),
        Err(e) => Err(match e.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => LostRank::Late(rank, limit),
            io::ErrorKind::ConnectionReset => LostRank::Gone(rank),
            _ => LostRank::Socket(e),
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

    /// A socket of its own for each test.
    fn address(name: &str) -> JobAddress {
        let file = format!("slim-turns-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(file);
        let _ = fs::remove_file(&path);
        JobAddress::new(path).unwrap()
    }

    /// A thread that acts as a rank and gives this answer to each turn; with `None` it ends in its first turn.
    fn rank(
        address: &JobAddress,
        rank: usize,
        answer: Option<&'static str>,
    ) -> thread::JoinHandle<String> {
        let path = address.path().to_owned();
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
    fn all_ranks_get_the_turn_and_the_answer_of_rank_0_is_returned() {
        let address = address("told");
        let other = "{\"seconds\":0.25,\"value\":9.5,\"unit\":\"us\"}\n";
        let others = rank(&address, 1, Some(other));
        let first = rank(&address, 0, Some(GOOD));
        let mut ranks = address.ranks(2, LONG, || true).unwrap();
        for _ in 0..2 {
            assert_eq!(ranks.turn(&TURN, LONG).unwrap().value, 5.25);
        }
        // The end of the stream ends the job.
        drop(ranks);
        for rank in [first, others] {
            assert_eq!(rank.join().unwrap(), "latency 8 2 16\n".repeat(2));
        }
        let path = address.path().to_owned();
        drop(address);
        assert!(!path.exists());
    }

    #[test]
    fn a_rank_that_dies_in_its_turn_is_noticed_at_once() {
        let address = address("dies");
        let ranks = [rank(&address, 0, Some(GOOD)), rank(&address, 1, None)];
        let mut job = address.ranks(2, LONG, || true).unwrap();
        let lost = job.turn(&TURN, LONG).unwrap_err();
        assert!(matches!(lost, LostRank::Gone(1)), "{lost}");
        // Also if it is dead before the turn begins.
        let again = job.turn(&TURN, LONG).unwrap_err();
        assert!(matches!(again, LostRank::Gone(1)), "{again}");
        drop(job);
        for rank in ranks {
            rank.join().unwrap();
        }
    }

    #[test]
    fn a_rank_that_hangs_is_not_waited_for_longer_than_the_limit() {
        let address = address("hangs");
        let ranks = [rank(&address, 0, Some(GOOD)), rank(&address, 1, Some(""))];
        let mut job = address.ranks(2, LONG, || true).unwrap();
        let lost = job.turn(&TURN, SOON).unwrap_err();
        assert!(matches!(lost, LostRank::Late(1, SOON)), "{lost}");
        assert_eq!(lost.to_string(), "rank 1 gave no answer in 0.05 s");
        drop(job);
        for rank in ranks {
            rank.join().unwrap();
        }
    }

    #[test]
    fn an_invalid_answer_is_refused() {
        for (name, wrong) in [
            ("text", "hello\n"),
            ("nan", "{\"seconds\":1,\"value\":0,\"unit\":\"us\"}\n"),
        ] {
            let address = address(name);
            let only = rank(&address, 0, Some(wrong));
            let mut job = address.ranks(1, LONG, || true).unwrap();
            let lost = job.turn(&TURN, LONG).unwrap_err();
            assert!(matches!(&lost, LostRank::Nonsense(0, line) if line == wrong));
            drop(job);
            only.join().unwrap();
        }
    }

    #[test]
    fn a_job_that_ends_before_its_ranks_connect_is_not_waited_for() {
        let address = address("none");
        let lost = address.ranks(2, LONG, || false).unwrap_err();
        assert_eq!(lost.to_string(), "0 of 2 ranks have started");
        let only = rank(&address, 1, Some(GOOD));
        let lost = address.ranks(2, SOON, || true).unwrap_err();
        assert!(matches!(lost, LostRank::NotStarted { came: 1, ranks: 2 }));
        only.join().unwrap();
    }
}
