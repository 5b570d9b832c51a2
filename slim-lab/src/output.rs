//! Runs a command and collects its output line by line.

use std::{
    io::{BufRead, BufReader, pipe},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Condvar, Mutex, MutexGuard},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{self, Signal},
    unistd::Pid,
};

use crate::{Error, Result};

/// A line of output, with its time.
#[derive(Clone, Debug)]
pub struct Line {
    /// Time since the start of the program.
    pub at: Duration,
    /// The line without its end.
    pub text: String,
}

/// A running program. Dropping it kills the program, but not its descendants; the node kills those.
#[derive(Debug)]
pub struct Running {
    child: Child,
    start: Instant,
    shared: Arc<OutputShared>,
}

#[derive(Debug, Default)]
struct OutputShared {
    lines: Mutex<OutputSeen>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct OutputSeen {
    lines: Vec<Line>,
    closed: bool,
}

impl OutputShared {
    fn lock(&self) -> MutexGuard<'_, OutputSeen> {
        // A panic with the lock held leaves the list of lines intact.
        self.lines.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl Running {
    /// Starts `command` with standard output and standard error in one stream of lines.
    pub fn start(mut command: Command) -> Result<Self> {
        let (reader, writer) = pipe().map_err(Error::io("make a pipe"))?;
        let second = writer.try_clone().map_err(Error::io("make a pipe"))?;
        command.stdin(Stdio::null()).stdout(writer).stderr(second);
        let start = Instant::now();
        let child = command
            .spawn()
            .map_err(Error::io(format!("start {command:?}")))?;
        let shared = Arc::new(OutputShared::default());
        let sink = shared.clone();
        thread::spawn(move || {
            let mut reader = BufReader::new(reader);
            let mut raw = Vec::new();
            while reader.read_until(b'\n', &mut raw).is_ok_and(|n| n > 0) {
                let text = String::from_utf8_lossy(&raw).trim_end().to_owned();
                sink.lock().lines.push(Line {
                    at: start.elapsed(),
                    text,
                });
                sink.changed.notify_all();
                raw.clear();
            }
            sink.lock().closed = true;
            sink.changed.notify_all();
        });
        Ok(Running {
            child,
            start,
            shared,
        })
    }

    /// Process id of the program itself.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Time since the start of the program.
    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// The output so far.
    pub fn lines(&self) -> Vec<Line> {
        self.shared.lock().lines.clone()
    }

    /// Waits for a line that satisfies `wanted`; false if the output ended or `limit` passed first.
    pub fn wait_line(&self, limit: Duration, wanted: impl Fn(&str) -> bool) -> bool {
        let (start, mut from) = (Instant::now(), 0);
        let mut seen = self.shared.lock();
        loop {
            if seen.lines[from..].iter().any(|line| wanted(&line.text)) {
                return true;
            }
            from = seen.lines.len();
            let left = limit.saturating_sub(start.elapsed());
            if seen.closed || left.is_zero() {
                return false;
            }
            seen = self
                .shared
                .changed
                .wait_timeout(seen, left)
                .map_or_else(|e| e.into_inner().0, |r| r.0);
        }
    }

    /// Whether the program itself still runs.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits until the program ends and for its last lines, for `limit` at most. `None` if it still runs then.
    pub fn wait(&mut self, limit: Duration) -> Option<ExitStatus> {
        let status = self.wait_end(limit)?;
        self.wait_closed();
        Some(status)
    }

    /// Waits until the program ends, for `limit` at most, and returns at once: the last lines may be missing. For callers that
    /// measure the time of the end.
    pub fn wait_end(&mut self, limit: Duration) -> Option<ExitStatus> {
        let start = Instant::now();
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Some(status),
                _ if start.elapsed() > limit => return None,
                _ => thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    /// Kills the program.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Asks it to end, and to end what it has started, and waits up to `limit` for its end.
    pub fn terminate(&mut self, limit: Duration) {
        if self.is_running() {
            // It is not waited for yet, so the number is still its own.
            let _ = signal::kill(
                Pid::from_raw(self.child.id().cast_signed()),
                Signal::SIGTERM,
            );
            self.wait(limit);
        }
    }

    /// Waits for the end of the output, but not for long: a descendant may keep the pipe open.
    fn wait_closed(&self) {
        let seen = self.shared.lock();
        let limit = Duration::from_millis(500);
        let _ = self
            .shared
            .changed
            .wait_timeout_while(seen, limit, |s| !s.closed);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}
