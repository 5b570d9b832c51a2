//! Which ranks really use the native component: each that does reports to a process that `slim run --btl` leaves beside `mpirun`. That
//! process says in one line if some do not, and ends.
//!
//! The ranks connect to it as the daemons connect to `mpirun`: by TCP, to a port that the kernel has chosen. A report is one line:
//! token, job, rank, number of ranks, host. Without the token, from the job's environment, it is not believed.

use std::collections::BTreeMap;
use std::env;
use std::io::{self, Read};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::beside;
use crate::failure::CliError;

/// Variable by which ranks find the watcher: token, then addresses, with blanks between. Not a `SLIM_` name, because it is no
/// setting.
pub const WATCH_VARIABLE: &str = "_SLIM_BTL_WATCH";
/// The watcher's own variable: the token.
const TOKEN_VARIABLE: &str = "_SLIM_BTL_WATCH_TOKEN";

/// For how long after a report the next one is waited for. The ranks of a job start together.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often the watcher looks whether `mpirun` has ended.
const LOOK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 200_000_000,
};
/// How long one report may take.
const REPORT: Duration = Duration::from_millis(500);
/// The longest report.
const LONGEST: u64 = 512;
/// Names in the line.
const NAMED: usize = 4;

/// Watch the ranks of a job (started by `slim run --btl`, with the listener as standard input).
#[derive(Args, Debug)]
pub struct WatchOptions {
    /// Process id of mpirun.
    pub launcher: u32,
}

/// Starts the watcher as a child of this process, which becomes `mpirun`; the value of [`WATCH_VARIABLE`].
pub fn start() -> io::Result<String> {
    let listener = TcpListener::bind(&beside::any_port()[..])?;
    let port = listener.local_addr()?.port();
    let token = format!("{:032x}", u128::from_ne_bytes(beside::random()?));
    let mut value = token.clone();
    for ip in beside::addresses() {
        value += &format!(" {}", SocketAddr::new(ip, port));
    }
    beside::command("watch-component", listener.into())?
        .env(TOKEN_VARIABLE, token)
        .spawn()?;
    Ok(value)
}

/// The watcher: waits for the reports, and says what is wrong.
pub fn main(options: &WatchOptions) -> Result<ExitCode, CliError> {
    let failed = |e: io::Error| CliError::failed(format!("--btl: the ranks are not watched: {e}"));
    let listener = io::stdin().as_fd().try_clone_to_owned().map_err(failed)?;
    let listener = TcpListener::from(listener);
    listener.set_nonblocking(true).map_err(failed)?;
    let token = env::var(TOKEN_VARIABLE).unwrap_or_default();
    let mut reports = Reports::default();
    let mut last = Instant::now();
    while !reports.are_complete() {
        let is_over = beside::is_over(options.launcher);
        while let Ok((stream, _)) = listener.accept() {
            if read(stream).is_some_and(|line| reports.add(&line, &token)) {
                last = Instant::now();
            }
        }
        if is_over || reports.total > 0 && last.elapsed() > PATIENCE {
            break;
        }
        let mut fds = [PollFd::new(&listener, PollFlags::IN)];
        // An interrupted wait is as good as a short one.
        let _ = poll(&mut fds, Some(&LOOK));
    }
    if let Some(line) = reports.complaint() {
        eprintln!("slim: {line}");
    }
    Ok(ExitCode::SUCCESS)
}

fn read(stream: TcpStream) -> Option<String> {
    stream.set_nonblocking(false).ok()?;
    stream.set_read_timeout(Some(REPORT)).ok()?;
    let mut line = String::new();
    stream.take(LONGEST).read_to_string(&mut line).ok()?;
    Some(line)
}

/// The ranks that use the component, of the job that reported first. (Ranks that it spawns are not counted.)
#[derive(Debug, Default)]
struct Reports {
    job: u32,
    total: u32,
    hosts: BTreeMap<u32, String>,
}

impl Reports {
    /// Adds a report; whether it is one.
    fn add(&mut self, line: &str, token: &str) -> bool {
        let mut words = line.split_whitespace();
        if token.is_empty() || words.next() != Some(token) {
            return false;
        }
        let mut number = || words.next()?.parse::<u32>().ok();
        let (Some(job), Some(rank), Some(total)) = (number(), number(), number()) else {
            return false;
        };
        if self.total == 0 {
            (self.job, self.total) = (job, total);
        }
        if job == self.job && rank < self.total {
            let host = words.next().unwrap_or("a host unknown");
            self.hosts.insert(rank, host.to_owned());
        }
        true
    }

    fn are_complete(&self) -> bool {
        self.total > 0 && self.hosts.len() == self.total as usize
    }

    /// What is wrong, in one line.
    fn complaint(&self) -> Option<String> {
        if self.are_complete() {
            return None;
        }
        if self.hosts.is_empty() {
            return Some("--btl: no rank has reported that it uses the native component".into());
        }
        let missing: Vec<_> = (0..self.total)
            .filter(|rank| !self.hosts.contains_key(rank))
            .collect();
        let mut names: Vec<String> = missing.iter().take(NAMED).map(u32::to_string).collect();
        if missing.len() > NAMED {
            names.push("...".into());
        }
        Some(format!(
            "--btl: the native component is used by {} of {} ranks, not by {}: others talk with these by btl/tcp",
            self.hosts.len(),
            self.total,
            names.join(", ")
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_do_not_report_are_named() {
        let mut reports = Reports::default();
        assert!(reports.complaint().unwrap().contains("no rank"));
        assert!(!reports.add("other 7 0 4 nodeA", "secret"));
        assert!(!reports.add("secret 7 0", "secret"));
        assert!(!reports.add(" 7 0 4 nodeA", ""));
        assert!(reports.add("secret 7 0 4 nodeA", "secret"));
        assert!(reports.add("secret 7 3 4 nodeB\n", "secret"));
        // Another job, and a rank that there is not.
        assert!(reports.add("secret 8 1 2 nodeA", "secret"));
        assert!(reports.add("secret 7 9 4 nodeA", "secret"));
        let line = reports.complaint().unwrap();
        assert!(line.contains("2 of 4 ranks, not by 1, 2:"), "{line}");
        reports.add("secret 7 1 4 nodeA", "secret");
        reports.add("secret 7 2 4 nodeB", "secret");
        assert_eq!(reports.complaint(), None);
    }

    #[test]
    fn many_ranks_are_not_all_named() {
        let mut reports = Reports::default();
        reports.add("s 1 0 100 nodeA", "s");
        let line = reports.complaint().unwrap();
        assert!(line.contains("not by 1, 2, 3, 4, ...:"), "{line}");
    }
}
