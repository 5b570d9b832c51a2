//! Runs `programs/slim_flows.c` on the nodes of a lab, with and without SLIM.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use procfs::ProcResult;
use procfs::process::Process;
use rustix::time::{ClockId, clock_gettime};
use serde::de::DeserializeOwned;
use slim_core::event::{Event, Record};
use slim_lab::{Error, Lab, Node, artifacts};

use crate::failure::CliError;

/// The port of all servers.
const PORT: &str = "7000";
/// Anything that takes longer is a failure.
const PATIENCE: Duration = Duration::from_secs(120);

/// The lab, the program, and the library that it runs under.
#[derive(Debug)]
pub struct Ground {
    /// Two nodes; servers run on the second, clients on the first.
    pub lab: Lab,
    program: PathBuf,
    library: PathBuf,
}

/// How a program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Under {
    /// Without SLIM.
    Bare,
    /// SLIM with its default settings.
    Slim,
    /// Under SLIM with an event log, which takes time.
    Logged,
}

impl From<bool> for Under {
    fn from(slim: bool) -> Self {
        if slim { Under::Logged } else { Under::Bare }
    }
}

/// A running `slim_flows`. Dropping it kills it.
#[derive(Debug)]
pub struct Flows {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
    events: PathBuf,
}

/// A server, and a client with its connections.
#[derive(Debug)]
pub struct Connected {
    /// The client.
    pub client: Flows,
    /// The server.
    pub server: Flows,
}

/// Nanoseconds of the clock that `slim_flows` uses.
pub fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

impl Ground {
    /// Makes the lab and builds the program.
    pub fn new(library: &Path) -> Result<Self, CliError> {
        let input = |e: Error| CliError::input(e.to_string());
        let source = artifacts::source("slim_flows.c").map_err(input)?;
        let program = artifacts::compile(Path::new("cc"), "cc", &source).map_err(input)?;
        let lab = Lab::builder().nodes(2).name("flows").build();
        let lab = lab.map_err(input)?;
        // A port in TIME_WAIT cannot connect to the same server again. With ten thousand of them, the measurement would
        // be of the kernel's search for a free port, until none is left.
        for (setting, value) in [
            ("tcp_max_tw_buckets", "512"),
            ("ip_local_port_range", "1024 65535"),
        ] {
            let set = format!("echo {value} > /proc/sys/net/ipv4/{setting}");
            lab.node(0).exec("sh", &["-c", &set]).map_err(input)?;
        }
        Ok(Self {
            lab,
            program,
            library: library.to_owned(),
        })
    }

    /// Starts the program on `node`.
    pub fn start(
        &self,
        node: &Node,
        under: impl Into<Under>,
        args: &[&str],
    ) -> Result<Flows, CliError> {
        let under = under.into();
        let mut command = node.command(&self.program);
        command.args(args).env_remove("LD_PRELOAD");
        let events = self.lab.dir().join("flows-%p.jsonl");
        if under != Under::Bare {
            command.env("LD_PRELOAD", &self.library);
        }
        if under == Under::Logged {
            command.env("SLIM_EVENTS", &events);
        }
        Flows::start(command, self.lab.dir())
    }

    /// Starts a server of this kind (`serve` or `sink`), and a client that holds `count` connections with it. Under
    /// SLIM, waits until all of them are live.
    pub fn connected(&self, slim: bool, kind: &str, count: usize) -> Result<Connected, CliError> {
        let server = self.server(slim, kind)?;
        let address = self.lab.node(1).address(0).to_string();
        let args = ["hold", &address, PORT, &count.to_string()];
        let client = self.start(self.lab.node(0), slim, &args)?;
        client.expect("READY")?;
        if slim {
            client.wait_live(count)?;
            server.wait_live(count)?;
        }
        Ok(Connected { client, server })
    }

    /// Starts a server and waits until it listens.
    pub fn server(&self, under: impl Into<Under>, kind: &str) -> Result<Flows, CliError> {
        let node = self.lab.node(1);
        let address = node.address(0).to_string();
        let server = self.start(node, under, &[kind, &address, PORT])?;
        server.expect("READY")?;
        Ok(server)
    }

    /// Arguments of a client that does `what` `count` times with the server.
    pub fn client_arguments(&self, what: &str, count: usize) -> [String; 4] {
        let address = self.lab.node(1).address(0).to_string();
        [what.into(), address, PORT.into(), count.to_string()]
    }
}

impl Flows {
    fn start(mut command: Command, dir: &Path) -> Result<Self, CliError> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| CliError::failed(format!("{command:?}: {e}")))?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(CliError::failed("a program without its pipes"));
        };
        let events = dir.join(format!("flows-{}.jsonl", child.id()));
        Ok(Self {
            child,
            stdin,
            lines: reader(stdout),
            events,
        })
    }

    /// Process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a command to it.
    pub fn say(&mut self, word: &str) -> Result<(), CliError> {
        writeln!(self.stdin, "{word}")
            .map_err(|e| CliError::failed(format!("tell slim_flows to {word}: {e}")))
    }

    /// The program's next line, parsed as JSON.
    pub fn answer<T: DeserializeOwned>(&self) -> Result<T, CliError> {
        let line = self.line()?;
        serde_json::from_str(&line)
            .map_err(|_| CliError::failed(format!("slim_flows said: {line}")))
    }

    /// Waits for the next line, which must be `wanted`.
    pub fn expect(&self, wanted: &str) -> Result<(), CliError> {
        match self.line()? {
            line if line == wanted => Ok(()),
            line => Err(CliError::failed(format!("slim_flows said: {line}"))),
        }
    }

    fn line(&self) -> Result<String, CliError> {
        self.lines
            .recv_timeout(PATIENCE)
            .map_err(|_| CliError::failed("slim_flows ended, or wrote nothing for two minutes"))
    }

    /// How many of the program's connections have become live, and how many plain TCP.
    pub fn live_and_plain(&self) -> (usize, usize) {
        let log = fs::read_to_string(&self.events).unwrap_or_default();
        let count = |kind| log.matches(&format!("\"kind\":\"{kind}\"")).count();
        (count("live"), count("legacy"))
    }

    /// Waits until `count` connections are live or plain TCP; plain ones are an error.
    fn wait_live(&self, count: usize) -> Result<(), CliError> {
        let begun = Instant::now();
        loop {
            let (live, plain) = self.live_and_plain();
            if live >= count {
                return Ok(());
            }
            if live + plain >= count || begun.elapsed() > PATIENCE {
                return Err(CliError::failed(format!(
                    "of {count} connections only {live} have become live"
                )));
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until one of its connections is resumed. Returns the bytes replayed, and the milliseconds of the
    /// interruption.
    pub fn wait_resume(&self) -> Result<(u64, u64), CliError> {
        let begun = Instant::now();
        loop {
            let log = fs::read_to_string(&self.events).unwrap_or_default();
            let records = log.lines().filter_map(|l| serde_json::from_str(l).ok());
            let resumed = records
                .map(|r: Record| r.event)
                .find_map(|event| match event {
                    Event::Resume {
                        replayed, lost_ms, ..
                    } => Some((replayed, lost_ms)),
                    _ => None,
                });
            if let Some(resumed) = resumed {
                return Ok(resumed);
            }
            if begun.elapsed() > PATIENCE {
                return Err(CliError::failed("a killed connection was not resumed"));
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until it has ended with status 0.
    pub fn wait_end(&mut self) -> Result<(), CliError> {
        match self.child.wait() {
            Ok(status) if status.success() => Ok(()),
            other => Err(CliError::failed(format!("slim_flows: {other:?}"))),
        }
    }

    /// Kills the program at once, as a crash would.
    pub fn kill(&mut self) {
        // The program may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Anonymous memory in bytes: heap, stacks, data, and written pages of libraries.
    pub fn memory(&self) -> Result<u64, CliError> {
        let process = self.process().and_then(|process| process.smaps_rollup());
        let rollup = process.map_err(|e| CliError::failed(format!("smaps_rollup: {e}")))?;
        let mut maps = rollup.memory_map_rollup.iter();
        maps.find_map(|map| map.extension.map.get("Anonymous").copied())
            .ok_or_else(|| CliError::failed("smaps_rollup has no line Anonymous"))
    }

    /// Number of open descriptors.
    pub fn descriptors(&self) -> usize {
        let count = self.process().and_then(|process| process.fd_count());
        count.unwrap_or(0)
    }

    /// Voluntary context switches of its threads.
    pub fn wakeups(&self) -> u64 {
        let tasks = self.process().and_then(|process| process.tasks());
        tasks
            .into_iter()
            .flatten()
            .filter_map(|task| task.ok()?.status().ok()?.voluntary_ctxt_switches)
            .sum()
    }

    fn process(&self) -> ProcResult<Process> {
        Process::new(self.id() as i32)
    }
}

impl Drop for Flows {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Forwards lines until the program ends or the receiver is dropped.
fn reader(stdout: ChildStdout) -> Receiver<String> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    receiver
}
