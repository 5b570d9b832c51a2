//! What people and programs get to read: the event log, and messages on standard error.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::process;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::Value;
use slim_core::FlowId;
use slim_core::config::{Config, LogLevel};
use slim_core::event::{EscalateReason, Event};

use crate::fds::OwnFd;
use crate::sys;

/// A pipe that can be written to takes as much (`PIPE_BUF`) without blocking, the end of the line
/// included.
const LONGEST_LINE: usize = 4095;

/// Messages for people: one line each on standard error, `slim[pid]: ` in front.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Log {
    level: LogLevel,
}

impl Log {
    pub(crate) fn new(level: LogLevel) -> Self {
        Log { level }
    }

    pub(crate) fn error(self, text: impl FnOnce() -> String) {
        self.say(LogLevel::Error, text);
    }

    pub(crate) fn warn(self, text: impl FnOnce() -> String) {
        self.say(LogLevel::Warn, text);
    }

    pub(crate) fn info(self, text: impl FnOnce() -> String) {
        self.say(LogLevel::Info, text);
    }

    pub(crate) fn debug(self, text: impl FnOnce() -> String) {
        self.say(LogLevel::Debug, text);
    }

    /// One write per line, so that lines of several processes do not mix. What cannot be written is
    /// lost: the application's standard error is not ours to wait for.
    fn say(self, level: LogLevel, text: impl FnOnce() -> String) {
        if level <= self.level {
            let mut line = format!("slim[{}]: {}", process::id(), text()).into_bytes();
            line.truncate(LONGEST_LINE);
            line.push(b'\n');
            if sys::takes_a_line(libc::STDERR_FILENO) {
                let _ = sys::write_line(libc::STDERR_FILENO, &line);
            }
        }
    }
}

/// The event log: one JSON object per line, one write per line, so that processes can share a file.
pub(crate) struct EventLog {
    file: Option<OwnFd>,
    host: String,
    pid: u32,
    log: Log,
}

impl EventLog {
    /// Opens the file the configuration names, if any. If it cannot be opened, a message says so and
    /// nothing is logged.
    pub(crate) fn open(config: &Config, log: Log) -> Self {
        let (host, pid) = (sys::host_name(), process::id());
        let file = config.events_path(pid, &host).and_then(|path| {
            let mut options = OpenOptions::new();
            // A pipe that nobody reads must not stop the agent.
            let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOCTTY;
            options.append(true).create(true).custom_flags(flags);
            OwnFd::make(|| options.open(&path))
                .inspect_err(|e| log.warn(|| format!("no event log: {}: {e}", path.display())))
                .ok()
        });
        EventLog {
            file,
            host,
            pid,
            log,
        }
    }

    /// Writes down what happened to a flow.
    pub(crate) fn write(&mut self, event: Event, flow: FlowId, addrs: (SocketAddr, SocketAddr)) {
        self.tell(&event, flow, addrs.1);
        let Some(file) = &self.file else { return };
        let ts = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0.0, |d| d.as_secs_f64());
        let record = event.record(ts, (&self.host, self.pid), flow, addrs);
        let mut line = Vec::with_capacity(256);
        if serde_json::to_writer(&mut line, &record).is_ok() && line.write_all(b"\n").is_ok() {
            let written = sys::write_line(file.raw(), &line);
            if written.is_err_and(|e| e.kind() != io::ErrorKind::WouldBlock) {
                self.log
                    .warn(|| "the event log cannot be written any more".to_owned());
                self.file = None;
            }
        }
    }

    /// The same for people, by importance.
    fn tell(&self, event: &Event, flow: FlowId, peer: SocketAddr) {
        let text = || format!("flow {flow} to {peer}: {}", phrase(event));
        match event {
            // That a peer process ended is no news to whoever runs the job.
            Event::Escalate {
                reason:
                    EscalateReason::Attempts | EscalateReason::Deadline | EscalateReason::OutOfStep,
                ..
            } => self.log.warn(text),
            Event::Escalate { .. }
            | Event::Suspend { .. }
            | Event::Resume { .. }
            | Event::Reinstate
            | Event::Demoted => {
                self.log.info(text);
            }
            Event::Live
            | Event::Legacy { .. }
            | Event::Attempt { .. }
            | Event::AttemptFailed { .. }
            | Event::Closed { .. } => self.log.debug(text),
        }
    }
}

/// An event in words: its kind, then its particulars.
fn phrase(event: &Event) -> String {
    let Ok(Value::Object(fields)) = serde_json::to_value(event) else {
        return format!("{event:?}");
    };
    let mut phrase = fields.get("kind").map_or_else(String::new, plain);
    for (name, value) in fields.iter().filter(|(name, _)| *name != "kind") {
        phrase.push_str(&format!(" {name}={}", plain(value)));
    }
    phrase
}

fn plain(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use slim_core::event::Trouble;

    use super::*;

    #[test]
    fn people_get_the_words_of_the_event_log() {
        let escalate = Event::Escalate {
            cause: Trouble::Errno(libc::ECONNRESET),
            reason: EscalateReason::Attempts,
            errno: libc::ECONNRESET,
        };
        let text = phrase(&escalate);
        assert_eq!(text, "escalate cause=ECONNRESET errno=104 reason=attempts");
        assert_eq!(phrase(&Event::Live), "live");
    }
}
