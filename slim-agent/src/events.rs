//! The event log for programs, and messages for people on standard error.

use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::io;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::process;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::Value;
use slim_core::FlowId;
use slim_core::config::{Config, LogLevel};
use slim_core::event::{EscalateReason, Event};

use crate::kernel::sys;
use slim_sys::OwnFd;

/// Longest line without its newline: a writable pipe takes `PIPE_BUF` (4096) bytes without blocking.
const LONGEST_LINE: usize = 4095;
/// Most bytes of the event log in one write: a pipe takes them whole, or not at all.
const ONE_WRITE: usize = LONGEST_LINE + 1;

/// Messages for people: one line each on standard error, prefixed with `slim[pid]: `.
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

    /// One write per line, so that lines of several processes do not mix. A line that cannot be written is lost: the
    /// agent must not wait for the application's standard error.
    fn say(self, level: LogLevel, text: impl FnOnce() -> String) {
        if level <= self.level {
            let mut line = format!("slim[{}]: {}", process::id(), text()).into_bytes();
            line.truncate(LONGEST_LINE);
            line.push(b'\n');
            if slim_sys::ready(libc::STDERR_FILENO, libc::POLLOUT) != 0 {
                let _ = sys::write_line(libc::STDERR_FILENO, &line);
            }
        }
    }
}

/// The event log: one JSON object per line, whole lines in each write, so that processes can share a file.
///
/// Thousands of flows may produce events at the same moment. So lines are buffered until the agent thread has nothing
/// else to do ([`write_out`]), a thread waits for its commands to be carried out, or they fill one write. A process
/// that ends waits for the agent's work, or else interrupts it and loses the buffered lines.
pub(crate) struct EventLog {
    file: Option<OwnFd>,
    host: String,
    pid: u32,
    log: Log,
}

impl EventLog {
    /// Opens the file that the configuration names, if any. If it cannot be opened, a message says so and nothing is
    /// logged.
    pub(crate) fn open(config: &Config, log: Log) -> Self {
        let (host, pid) = (sys::host_name(), process::id());
        let file = config.events_path(pid, &host).and_then(|path| {
            OwnFd::make(|| open_log(&path))
                .inspect_err(|e| log.warn(|| format!("no event log: {}: {e}", path.display())))
                .ok()
        });
        let events = EventLog {
            file,
            host,
            pid,
            log,
        };
        use_file(events.number());
        events
    }

    /// The number of the file's descriptor.
    pub(crate) fn number(&self) -> Option<RawFd> {
        self.file.as_ref().map(OwnFd::raw)
    }

    /// Records an event of a flow.
    pub(crate) fn write(&mut self, event: Event, flow: FlowId, addrs: (SocketAddr, SocketAddr)) {
        self.tell(&event, flow, addrs.1);
        if self.file.is_none() {
            return;
        }
        let ts = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0.0, |d| d.as_secs_f64());
        let record = event.record(ts, (&self.host, self.pid), flow, addrs);
        let line = |to: &mut Vec<u8>| serde_json::to_writer(to, &record).is_ok();
        if !LINES.with_borrow_mut(|lines| lines.add(line)) {
            self.log
                .warn(|| "the event log cannot be written any more".to_owned());
            self.file = None;
        }
    }

    /// Logs the event for people, at a level that depends on its importance.
    fn tell(&self, event: &Event, flow: FlowId, peer: SocketAddr) {
        let text = || format!("flow {flow} to {peer}: {}", phrase(event));
        match event {
            // Not a warning when a peer process has ended: the user who runs the job knows that.
            Event::Escalate {
                reason:
                    EscalateReason::Attempts
                    | EscalateReason::Deadline
                    | EscalateReason::OutOfStep
                    | EscalateReason::PeerLost
                    | EscalateReason::Fenced
                    | EscalateReason::NoWitness,
                ..
            }
            | Event::Hold
            | Event::Accuse => self.log.warn(text),
            Event::Escalate { .. }
            | Event::Suspend { .. }
            | Event::Resume { .. }
            | Event::Reinstate
            | Event::Orphaned { .. }
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

thread_local! {
    /// Buffer of the thread that drives the agent.
    static LINES: RefCell<Lines> = const { RefCell::new(Lines { file: None, text: Vec::new() }) };
}

/// Lines that are not written yet.
struct Lines {
    file: Option<RawFd>,
    text: Vec<u8>,
}

/// Whether this thread still has the buffer for lines. A thread that ends destroys it.
pub(crate) fn is_usable() -> bool {
    LINES.try_with(|_| ()).is_ok()
}

/// From now on this thread writes lines to this file. Its buffer must be empty.
pub(crate) fn use_file(file: Option<RawFd>) {
    LINES.with_borrow_mut(|lines| lines.file = file);
}

/// Writes the buffered lines. To be called by the agent thread before it sleeps, and before it answers a waiting
/// thread.
pub(crate) fn write_out() {
    // The buffer is gone while the thread ends, and borrowed if the thread has panicked in this call.
    let _ = LINES.try_with(|lines| lines.try_borrow_mut().map(|mut lines| lines.write_out()));
}

impl Lines {
    /// Adds the line that `put` appends; false if the file cannot be written.
    fn add(&mut self, put: impl FnOnce(&mut Vec<u8>) -> bool) -> bool {
        let before = self.text.len();
        let whole = put(&mut self.text);
        self.text.push(b'\n');
        if !whole {
            self.text.truncate(before);
        } else if self.text.len() > ONE_WRITE {
            // Write the lines before this one, if there are any.
            let line = self.text.split_off(before);
            self.write_out();
            self.text = line;
        }
        self.file.is_some()
    }

    fn write_out(&mut self) {
        if self.text.is_empty() {
            return;
        }
        let written = self.file.map(|file| sys::write_line(file, &self.text));
        if let Some(Err(e)) = written
            && e.kind() != io::ErrorKind::WouldBlock
        {
            self.file = None;
        }
        self.text.clear();
    }
}

/// Opens an event log for appending. A new file is accessible to its owner only. A symbolic link that another user has
/// made, in a directory that all can write to, must not lead to a file of this user.
fn open_log(path: &Path) -> io::Result<File> {
    let open = |more| {
        // A pipe without a reader must not stop the agent.
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOCTTY;
        let mut options = OpenOptions::new();
        options.append(true).create(true).mode(0o600);
        options.custom_flags(flags | more).open(path)
    };
    match open(libc::O_NOFOLLOW) {
        // `/dev/stderr` is a symbolic link.
        Err(e) if e.raw_os_error() == Some(libc::ELOOP) => {
            let owner = std::fs::symlink_metadata(path)?.uid();
            if owner == 0 || owner == slim_sys::user() {
                open(0)
            } else {
                Err(io::Error::other("it is a link that another user has made"))
            }
        }
        other => other,
    }
}

/// An event as text: its kind, then its fields.
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
    use std::io::Read;
    use std::os::fd::AsRawFd;

    use slim_core::event::Trouble;

    use super::*;

    /// Reads what has been written since the last call.
    fn written(file: &mut File) -> Vec<u8> {
        let mut all = Vec::new();
        file.read_to_end(&mut all).unwrap();
        all
    }

    #[test]
    fn lines_are_written_before_the_thread_sleeps_and_when_they_fill_a_write() {
        let path = std::env::temp_dir().join(format!("slim-lines-{}", process::id()));
        let to = File::create(&path).unwrap();
        let mut from = File::open(&path).unwrap();
        let mut lines = Lines {
            file: Some(to.as_raw_fd()),
            text: Vec::new(),
        };
        let mut add = |line: &str| {
            assert!(lines.add(|to| {
                to.extend(line.as_bytes());
                true
            }));
            written(&mut from)
        };
        let long = "x".repeat(ONE_WRITE / 2);
        let endless = "y".repeat(2 * ONE_WRITE);
        assert_eq!(add("one"), b"");
        assert_eq!(add(&long), b"");
        assert_eq!(add(&long), format!("one\n{long}\n").as_bytes());
        assert_eq!(add(&endless), format!("{long}\n").as_bytes());
        assert_eq!(add("last"), format!("{endless}\n").as_bytes());
        lines.write_out();
        assert_eq!(written(&mut from), b"last\n");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn the_log_is_its_owners_and_no_link_of_another_user_is_followed() {
        let dir = std::env::temp_dir().join(format!("slim-log-{}", process::id()));
        std::fs::create_dir(&dir).unwrap();
        let (file, link) = (dir.join("file"), dir.join("link"));
        open_log(&file).unwrap();
        let mode = std::fs::metadata(&file).unwrap().mode();
        assert_eq!(mode & 0o777, 0o600);
        std::os::unix::fs::symlink(&file, &link).unwrap();
        open_log(&link).unwrap();
        if std::os::unix::fs::lchown(&link, Some(65534), None).is_ok() {
            let refused = open_log(&link).unwrap_err().to_string();
            assert!(refused.contains("another user"), "{refused}");
        } else {
            println!("skip: only root can make a link another user's");
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn messages_for_people_use_the_names_of_the_event_log() {
        let escalate = Event::Escalate {
            cause: Trouble::Errno(libc::ECONNRESET),
            reason: EscalateReason::Attempts,
            errno: libc::ECONNRESET,
            evidence: None,
        };
        let text = phrase(&escalate);
        assert_eq!(text, "escalate cause=ECONNRESET errno=104 reason=attempts");
        assert_eq!(phrase(&Event::Live), "live");
    }
}
