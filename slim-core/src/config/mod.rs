//! The user's settings, checked once.
//!
//! Every setting is an environment variable, so that one `slim run` can set it for all processes
//! of a job. [`Config::from_vars`] turns them into plain values; from there on nothing has to be
//! checked again. A value that cannot be used is reported in one line, and the default is used.

mod peers;
mod problem;
mod sharing;
mod value;
mod variables;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::auth::JobKey;
use crate::wire;

pub use peers::{Net, Peers};
pub use problem::Problem;
pub use variables::{VARIABLES, Variable};

use value::{Bad, addresses, duration, durations, number};

/// Variables of the `slim` program. A process that it starts finds them in its environment, and
/// ignores them.
pub const TOOL_VARIABLES: [&str; 2] = ["SLIM_CACHE", "SLIM_PRELOAD"];

/// Variables with this prefix belong to the test lab. Launchers inside the lab have them.
pub const LAB_PREFIX: &str = "SLIM_LAB_";

/// Fewest bytes of a job key. An attacker who has recorded a HELLO can try guesses of a short key.
pub const MIN_JOB_KEY: usize = 16;

/// Most attempts, and most attempt timeouts, that can be asked for.
pub const MAX_ATTEMPTS: u32 = 16;

/// Longest time, in seconds, for which a flow can be held.
pub const MAX_HOLD: f64 = 30.0 * 86_400.0;

/// Whether flows get a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// Never: the process runs as if SLIM were not there.
    Off,
    /// Where the peer has SLIM too; plain TCP elsewhere.
    #[default]
    Preferred,
    /// Always: a connection to a peer without SLIM fails.
    Required,
}

/// What a process does that is lost: the job goes on without it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhenLost {
    /// All its flows end with an error.
    #[default]
    Error,
    /// It ends itself.
    Exit,
}

/// The priority of the agent thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Priority {
    /// That of the thread that starts it.
    Normal,
    /// A lower nice value, where the process may set it.
    #[default]
    Raised,
    /// A real-time policy.
    RealTime,
}

/// How much is logged on standard error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the usual ones, each including those above it")]
pub enum LogLevel {
    Off,
    Error,
    #[default]
    Warn,
    Info,
    Debug,
    Trace,
}

/// All settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Whether flows get a session.
    pub policy: Policy,
    /// How many attempts a resume has, at least 1.
    pub attempts: u32,
    /// How long each attempt may take, at least one entry; use
    /// [`attempt_timeout`](Config::attempt_timeout).
    pub attempt_timeouts: Vec<Duration>,
    /// How long all attempts of a resume may take together.
    pub deadline: Option<Duration>,
    /// How long a flow is held after its attempts have failed.
    pub hold: Option<Duration>,
    /// How long negotiation waits for the peer.
    pub hello_timeout: Duration,
    /// How long data may stay unacknowledged before the flow counts as stalled; zero: for ever.
    pub stall: Duration,
    /// How long a closed flow is kept while its peer takes nothing.
    pub linger: Duration,
    /// How many bytes may be kept for all closed flows.
    pub linger_memory: usize,
    /// Secret of the job.
    pub job_key: Option<JobKey>,
    /// File with the secret of the job. Code that does I/O reads it and calls
    /// [`set_job_key`](Config::set_job_key) before this configuration is used.
    pub job_key_file: Option<PathBuf>,
    /// Which hosts are asked for SLIM, and answered.
    pub peers: Peers,
    /// Where the witness is. Only with a job key: who can forge its messages can end processes.
    pub witness: Vec<SocketAddr>,
    /// Where processes whose addresses have changed find each other. Only with a job key: who can forge its messages can lead connections
    /// astray.
    pub meet: Vec<SocketAddr>,
    /// Whether the witness passes on the bytes of two processes that cannot reach each other.
    pub relay: bool,
    /// The variable that a process has in its environment if it can be lost. [`from_vars`](Config::from_vars) has looked.
    pub lost_if: Option<String>,
    /// What this process does when it is lost. With a witness, the default is to end all connections with an error. Without one, it is lost
    /// only if this is set.
    pub when_lost: Option<WhenLost>,
    /// The priority of the agent thread.
    pub priority: Priority,
    /// Where events go, with `%p` and `%h` in it; use [`events_path`](Config::events_path).
    pub events: Option<PathBuf>,
    /// How much is logged on standard error.
    pub log: LogLevel,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            policy: Policy::default(),
            attempts: 3,
            attempt_timeouts: [3, 12, 45].map(Duration::from_secs).to_vec(),
            deadline: None,
            hold: None,
            hello_timeout: Duration::from_secs(3),
            stall: Duration::from_secs(1),
            linger: Duration::from_secs(120),
            linger_memory: 64 << 20,
            job_key: None,
            job_key_file: None,
            peers: Peers::default(),
            witness: Vec::new(),
            meet: Vec::new(),
            relay: true,
            lost_if: None,
            when_lost: None,
            priority: Priority::default(),
            events: None,
            log: LogLevel::default(),
        }
    }
}

impl Config {
    /// The settings in the environment `vars`, and all problems with them.
    ///
    /// Of names other than `SLIM` and `SLIM_...`, only the one that `SLIM_LOST_IF` gives matters. An empty value counts as not set, except
    /// for the job key, where that would give less safety than was asked for. If a name occurs twice
    /// the first value counts, as for `getenv`. A value that is not UTF-8 is never allowed.
    pub fn from_vars<V: Into<OsString>>(
        vars: impl IntoIterator<Item = (String, V)>,
    ) -> (Config, Vec<Problem>) {
        let mut config = Config::default();
        let mut problems = Vec::new();
        let mut seen: Vec<String> = Vec::new();
        let mut others: Vec<String> = Vec::new();
        for (name, value) in vars {
            if name != "SLIM" && !name.starts_with("SLIM_") {
                others.push(name);
                continue;
            }
            if name.starts_with(LAB_PREFIX)
                || TOOL_VARIABLES.contains(&&*name)
                || seen.contains(&name)
            {
                continue;
            }
            let known = VARIABLES.iter().find(|known| known.name == name);
            let outcome = match (known, value.into().into_string()) {
                (None, _) => Err(Problem::unknown(&name)),
                (Some(known), Ok(value)) if value.is_empty() && !known.is_key() => Ok(()),
                (Some(known), Ok(value)) => config.set(known, &value),
                (Some(known), Err(_)) if known.is_key() => {
                    Err(config.without_key(known.name, "it is not UTF-8"))
                }
                (Some(known), Err(value)) => {
                    Err(Problem::bad_value(known, &value.to_string_lossy()))
                }
            };
            problems.extend(outcome.err());
            seen.push(name);
        }
        if config.job_key.is_some() && config.job_key_file.take().is_some() {
            problems.push(Problem::two_keys());
        }
        if config.meet.is_empty() {
            // Also where nobody can be lost.
            config.meet.clone_from(&config.witness);
        }
        if let Some(condition) = &config.lost_if
            && !others.contains(condition)
        {
            config.witness.clear();
            config.when_lost = None;
        }
        let keyed = config.job_key.is_some() || config.job_key_file.is_some();
        if !keyed && !config.witness.is_empty() {
            config.witness.clear();
            config.meet.clear();
            problems.push(Problem::witness_without_key());
        }
        if !keyed && !config.meet.is_empty() {
            config.meet.clear();
            problems.push(Problem::meet_without_key());
        }
        (config, problems)
    }

    fn set(&mut self, variable: &Variable, value: &str) -> Result<(), Problem> {
        self.try_set(variable.name, value).map_err(|bad| match bad {
            Bad::Value => Problem::bad_value(variable, value),
            Bad::Key(why) => self.without_key(variable.name, why),
        })
    }

    fn try_set(&mut self, name: &str, value: &str) -> Result<(), Bad> {
        match name {
            "SLIM" => self.policy = policy(value)?,
            "SLIM_ATTEMPTS" => self.attempts = number(value, 1..=MAX_ATTEMPTS)?,
            "SLIM_ATTEMPT_TIMEOUTS" => {
                self.attempt_timeouts = durations(value, 0.05..=600.0, MAX_ATTEMPTS as usize)?;
            }
            "SLIM_DEADLINE" => {
                let deadline = zero_or(value, 86_400.0)?;
                self.deadline = (!deadline.is_zero()).then_some(deadline);
            }
            "SLIM_HOLD" => {
                let hold = zero_or(value, MAX_HOLD)?;
                self.hold = (!hold.is_zero()).then_some(hold);
            }
            "SLIM_HELLO_TIMEOUT" => self.hello_timeout = duration(value, 0.05..=60.0)?,
            "SLIM_STALL" => self.stall = zero_or(value, 3600.0)?,
            "SLIM_LINGER" => self.linger = duration(value, 1.0..=3600.0)?,
            "SLIM_LINGER_MEMORY" => {
                self.linger_memory = (number(value, 1..=65_536)? as usize) << 20
            }
            "SLIM_JOB_KEY" => {
                self.job_key = Some(job_key(value.as_bytes()).map_err(Bad::Key)?);
            }
            "SLIM_JOB_KEY_FILE" if value.is_empty() => return Err(Bad::Key("it is empty")),
            "SLIM_JOB_KEY_FILE" => self.job_key_file = Some(value.into()),
            "SLIM_PEERS" => self.peers = Peers::parse(value)?,
            "SLIM_WITNESS" => self.witness = addresses(value, wire::MAX_ADDRS)?,
            "SLIM_MEET" => self.meet = addresses(value, wire::MAX_ADDRS)?,
            "SLIM_RELAY" => self.relay = on_or_off(value)?,
            "SLIM_LOST_IF" => self.lost_if = Some(variable_name(value)?),
            "SLIM_WHEN_LOST" => self.when_lost = Some(when_lost(value)?),
            "SLIM_PRIORITY" => self.priority = priority(value)?,
            "SLIM_EVENTS" => self.events = Some(value.into()),
            "SLIM_LOG" => self.log = log_level(value)?,
            _ => unreachable!("{name} is in VARIABLES"),
        }
        Ok(())
    }

    /// Sets the job key to the contents of [`job_key_file`](Config::job_key_file), without white
    /// space at the end. `file` has the contents and the file's permission bits (0 if it is not a
    /// regular file), or the reason why the file could not be read.
    ///
    /// # Errors
    /// The problem to be reported if the file gives no key. SLIM is off then: going on without the
    /// key that was asked for would be less safe than a plain connection.
    pub fn set_job_key(&mut self, file: Result<(&[u8], u32), &str>) -> Result<(), Problem> {
        self.job_key_file = None;
        let key = match file {
            Ok((_, mode)) if mode & 0o077 != 0 => {
                Err("users other than its owner can use the file (chmod 600)")
            }
            Ok((bytes, _)) => job_key(bytes.trim_ascii_end()),
            Err(why) => Err(why),
        };
        match key {
            Ok(key) => self.job_key = Some(key),
            Err(why) => return Err(self.without_key("SLIM_JOB_KEY_FILE", why)),
        }
        Ok(())
    }

    fn without_key(&mut self, name: &'static str, why: &str) -> Problem {
        self.policy = Policy::Off;
        Problem::no_key(name, why)
    }

    /// How long attempt `n` may take, counted from 0.
    pub fn attempt_timeout(&self, n: u32) -> Duration {
        let last = self.attempt_timeouts.len().saturating_sub(1);
        let n = last.min(n as usize);
        self.attempt_timeouts
            .get(n)
            .copied()
            .unwrap_or(Duration::from_secs(3))
    }

    /// The longest time that a resume may take with all its attempts.
    pub fn resumable_for(&self) -> Duration {
        let all = (0..self.attempts).map(|n| self.attempt_timeout(n)).sum();
        self.deadline.map_or(all, |deadline| deadline.min(all))
    }

    /// Path of the event log of the process `pid` on the host with this name.
    pub fn events_path(&self, pid: u32, host: &str) -> Option<PathBuf> {
        let template = self.events.as_ref()?;
        // It came from a `String`, so nothing is lost here.
        let template = template.to_string_lossy();
        let mut path = String::with_capacity(template.len());
        let mut chars = template.chars().peekable();
        while let Some(c) = chars.next() {
            match (c, chars.peek()) {
                ('%', Some('p')) => path.push_str(&pid.to_string()),
                ('%', Some('h')) => path.push_str(host),
                ('%', Some('%')) => path.push('%'),
                _ => {
                    path.push(c);
                    continue;
                }
            }
            chars.next();
        }
        Some(path.into())
    }
}

fn job_key(bytes: &[u8]) -> Result<JobKey, &'static str> {
    let long_enough = bytes.len() >= MIN_JOB_KEY;
    let key = JobKey::new(bytes).filter(|_| long_enough);
    key.ok_or("it has fewer than 16 bytes")
}

fn policy(value: &str) -> Result<Policy, Bad> {
    match &*value.to_ascii_lowercase() {
        "off" | "0" => Ok(Policy::Off),
        "preferred" | "on" | "1" => Ok(Policy::Preferred),
        "required" => Ok(Policy::Required),
        _ => Err(Bad::Value),
    }
}

/// The name of a variable of another program.
fn variable_name(value: &str) -> Result<String, Bad> {
    let named = value.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    match named && !value.starts_with("SLIM") {
        true => Ok(value.to_owned()),
        false => Err(Bad::Value),
    }
}

fn when_lost(value: &str) -> Result<WhenLost, Bad> {
    match &*value.to_ascii_lowercase() {
        "error" => Ok(WhenLost::Error),
        "exit" => Ok(WhenLost::Exit),
        _ => Err(Bad::Value),
    }
}

fn priority(value: &str) -> Result<Priority, Bad> {
    match &*value.to_ascii_lowercase() {
        "normal" => Ok(Priority::Normal),
        "raised" => Ok(Priority::Raised),
        "realtime" => Ok(Priority::RealTime),
        _ => Err(Bad::Value),
    }
}

fn on_or_off(value: &str) -> Result<bool, Bad> {
    match &*value.to_ascii_lowercase() {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(Bad::Value),
    }
}

fn log_level(value: &str) -> Result<LogLevel, Bad> {
    match &*value.to_ascii_lowercase() {
        "off" => Ok(LogLevel::Off),
        "error" => Ok(LogLevel::Error),
        "warn" => Ok(LogLevel::Warn),
        "info" => Ok(LogLevel::Info),
        "debug" => Ok(LogLevel::Debug),
        "trace" => Ok(LogLevel::Trace),
        _ => Err(Bad::Value),
    }
}

/// Seconds from 0.05 to `most`, or 0.
fn zero_or(value: &str, most: f64) -> Result<Duration, Bad> {
    duration(value, 0.0..=0.0).or_else(|_| duration(value, 0.05..=most))
}

#[cfg(test)]
mod tests;
