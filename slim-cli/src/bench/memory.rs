//! Measures costs outside the data path: memory, descriptors and wake-ups of flows and processes, start-up, short connections.

use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::flows::{Flows, Ground, Under, now};
use super::section::Section;
use super::stats::median;
use crate::failure::CliError;
use crate::table::Table;

/// Number of idle connections: so many that the granularity of pages does not matter.
const IDLE: usize = 1000;
/// Number of connections with full buffers.
const BUSY: usize = 50;
/// Time for a server to see the end of the last connection and to log it.
const LAST_ENDS: Duration = Duration::from_millis(100);
/// Time after which no timer of a connection that was just used is running.
const SETTLE: Duration = Duration::from_secs(2);
/// How long wake-ups are counted.
const WATCH: Duration = Duration::from_secs(3);

/// The extent of the measurement.
#[derive(Clone, Copy, Debug)]
pub struct MemoryPlan {
    /// Number of starts of a process.
    pub rounds: usize,
    /// Rounds of short connections.
    pub short_rounds: usize,
    /// Short connections in a round.
    pub short: usize,
}

/// All results.
#[derive(Debug, Serialize)]
pub struct MemoryFigures {
    /// Number of connections that were used and are idle.
    pub idle_flows: usize,
    /// Bytes that SLIM adds for each idle connection, at the connecting end.
    pub idle_client_bytes: f64,
    /// Bytes that SLIM adds for each idle connection, at the accepting end.
    pub idle_server_bytes: f64,
    /// Descriptors that SLIM adds for each idle connection.
    pub idle_descriptors: f64,
    /// How often per second SLIM wakes the process while all connections are idle.
    pub idle_wakeups: f64,
    /// Bytes that SLIM adds to a process with one connection, its agent included.
    pub process_bytes: f64,
    /// Descriptors that SLIM adds to a process with one connection.
    pub process_descriptors: f64,
    /// Bytes that SLIM adds for a connection with full buffers.
    pub busy_bytes: f64,
    /// Bytes in the kernel's buffers of such a connection.
    pub busy_in_kernel: f64,
    /// Milliseconds to run a program without sockets.
    pub start: Times,
    /// Milliseconds to run a program that makes one connection.
    pub connect: Times,
    /// Short connections.
    pub short: ShortConnections,
}

/// Values of the same rounds, without and with SLIM.
#[derive(Debug, Default, Serialize)]
pub struct Times {
    /// Without SLIM.
    pub bare: Vec<f64>,
    /// With SLIM.
    pub slim: Vec<f64>,
}

impl Times {
    fn of(&mut self, slim: bool) -> &mut Vec<f64> {
        if slim { &mut self.slim } else { &mut self.bare }
    }
}

/// Connections one after the other, with one byte there and back on each; bare and SLIM take turns. A third turn, which is
/// not timed, writes an event log, from which live and plain connections are counted.
#[derive(Debug, Default, Serialize)]
pub struct ShortConnections {
    /// Connections per second.
    pub rate: Times,
    /// Microseconds that `connect` takes: the medians of the turns.
    pub connect: Times,
    /// The fraction of the connections under SLIM that were live at both ends: they would have been resumed.
    pub live: f64,
    /// The fraction that became plain TCP at either end. The others ended in order, with all bytes delivered, before they were
    /// negotiated: if they had broken, the negotiation would have gone on, and they would have been resumed.
    pub plain: f64,
    count: usize,
}

/// Result of one turn of short connections.
struct MemoryTurn {
    count: usize,
    took: Took,
    live: usize,
    plain: usize,
}

impl ShortConnections {
    fn add(&mut self, turn: MemoryTurn, under: Under) {
        let slim = match under {
            Under::Logged => return self.count(&turn),
            under => under == Under::Slim,
        };
        let rate = turn.count as f64 / (turn.took.ns / 1e9);
        self.rate.of(slim).push(rate);
        self.connect.of(slim).push(turn.took.connect / 1e3);
    }

    fn count(&mut self, turn: &MemoryTurn) {
        let before = self.count as f64;
        // The log also has the connections before the clock starts.
        self.count += turn.count + turn.count / 8;
        let all = self.count as f64;
        self.live = (self.live * before + turn.live as f64) / all;
        self.plain = (self.plain * before + turn.plain as f64) / all;
    }

    /// Median ratio of SLIM's rate to that of the bare turn before it.
    pub fn ratio(&self) -> Option<f64> {
        let pairs = self.rate.bare.iter().zip(&self.rate.slim);
        median(&pairs.map(|(bare, slim)| slim / bare).collect::<Vec<_>>())
    }

    /// Median of the microseconds that SLIM adds to `connect`.
    pub fn connect_extra(&self) -> Option<f64> {
        let pairs = self.connect.bare.iter().zip(&self.connect.slim);
        median(&pairs.map(|(bare, slim)| slim - bare).collect::<Vec<_>>())
    }
}

/// The measured values of a client and its server.
#[derive(Clone, Copy, Debug)]
struct Cost {
    client: f64,
    server: f64,
    descriptors: f64,
    wakeups: f64,
}

#[derive(Debug, Deserialize)]
struct Filled {
    bytes: f64,
}

#[derive(Debug, Deserialize)]
struct Took {
    ns: f64,
    connect: f64,
}

impl MemoryPlan {
    /// Runs all measurements; `told` gets a line for each part.
    pub fn measure(&self, library: &Path, told: impl Fn(&str)) -> Result<MemoryFigures, CliError> {
        let ground = Ground::new(library)?;
        told("idle connections");
        let one = (idle(&ground, false, 1)?, idle(&ground, true, 1)?);
        let many = (idle(&ground, false, IDLE)?, idle(&ground, true, IDLE)?);
        let each = |f: fn(&Cost) -> f64| {
            let slim = f(&many.1) - f(&one.1);
            (slim - (f(&many.0) - f(&one.0))) / (IDLE - 1) as f64
        };
        told("busy connections");
        let (busy_bare, _) = busy(&ground, false)?;
        let (busy_slim, busy_in_kernel) = busy(&ground, true)?;
        let (mut start, mut connect) = (Times::default(), Times::default());
        for round in 1..=self.rounds {
            told(&format!("starts, round {round}/{}", self.rounds));
            for slim in [false, true] {
                start.of(slim).push(started(library, slim)?);
                connect.of(slim).push(first_connection(&ground, slim)?);
            }
        }
        told("short connections");
        let mut short = ShortConnections::default();
        for _ in 0..self.short_rounds {
            for under in [Under::Bare, Under::Slim, Under::Logged] {
                short.add(short_connections(&ground, under, self.short)?, under);
            }
        }
        Ok(MemoryFigures {
            idle_flows: IDLE,
            idle_client_bytes: each(|c| c.client),
            idle_server_bytes: each(|c| c.server),
            idle_descriptors: each(|c| c.descriptors),
            idle_wakeups: many.1.wakeups - many.0.wakeups,
            process_bytes: one.1.client - one.0.client,
            process_descriptors: one.1.descriptors - one.0.descriptors,
            busy_bytes: busy_slim - busy_bare,
            busy_in_kernel,
            start,
            connect,
            short,
        })
    }
}

impl MemoryPlan {
    /// The approximate duration.
    pub fn estimate(&self) -> Duration {
        (SETTLE + WATCH + Duration::from_secs(2)) * 4
            + Duration::from_millis(300) * self.rounds as u32
            + (Duration::from_secs(1) + Duration::from_micros(500) * self.short as u32)
                * self.short_rounds as u32
    }
}

/// Measures `count` connections that have been used once and are idle.
fn idle(ground: &Ground, slim: bool, count: usize) -> Result<Cost, CliError> {
    let mut connected = ground.connected(slim, "serve", count)?;
    connected.client.say("go")?;
    connected.client.answer::<serde_json::Value>()?;
    thread::sleep(SETTLE);
    let before = connected.client.wakeups();
    thread::sleep(WATCH);
    let woken = connected.client.wakeups() - before;
    Ok(Cost {
        client: connected.client.memory()? as f64,
        server: connected.server.memory()? as f64,
        descriptors: connected.client.descriptors() as f64,
        wakeups: woken as f64 / WATCH.as_secs_f64(),
    })
}

/// Process memory for each connection with full buffers, and the bytes that the kernel has taken for each.
fn busy(ground: &Ground, slim: bool) -> Result<(f64, f64), CliError> {
    let mut connected = ground.connected(slim, "sink", BUSY)?;
    let before = connected.client.memory()? as f64;
    connected.client.say("fill")?;
    let filled: Filled = connected.client.answer()?;
    let after = connected.client.memory()? as f64;
    let each = BUSY as f64;
    Ok(((after - before) / each, filled.bytes / each))
}

/// Milliseconds from start to end of a program without sockets.
fn started(library: &Path, slim: bool) -> Result<f64, CliError> {
    let mut command = Command::new("true");
    command.env_remove("LD_PRELOAD");
    if slim {
        command.env("LD_PRELOAD", library);
    }
    let begun = Instant::now();
    let status = command.status();
    let took = begun.elapsed();
    match status {
        Ok(status) if status.success() => Ok(took.as_secs_f64() * 1e3),
        other => Err(CliError::failed(format!("run `true`: {other:?}"))),
    }
}

/// Milliseconds from start to end of a program that makes one connection and uses it.
fn first_connection(ground: &Ground, slim: bool) -> Result<f64, CliError> {
    let _server = ground.server(slim, "serve")?;
    let start = now();
    run_short(ground, slim.into(), 1)?;
    Ok((now() - start) as f64 / 1e6)
}

fn short_connections(ground: &Ground, under: Under, count: usize) -> Result<MemoryTurn, CliError> {
    let server = ground.server(under, "serve")?;
    let (took, client) = run_short(ground, under, count)?;
    thread::sleep(LAST_ENDS);
    let (here, there) = (client.live_and_plain(), server.live_and_plain());
    Ok(MemoryTurn {
        count,
        took,
        live: here.0.min(there.0),
        plain: here.1.max(there.1),
    })
}

fn run_short(ground: &Ground, under: Under, count: usize) -> Result<(Took, Flows), CliError> {
    let args = ground.client_arguments("short", count);
    let args = args.each_ref().map(String::as_str);
    let mut client = ground.start(ground.lab.node(0), under, &args)?;
    client.expect("READY")?;
    let took = client.answer()?;
    client.wait_end()?;
    Ok((took, client))
}

impl MemoryFigures {
    /// For the report.
    pub fn section(&self) -> Section {
        let mut table = Table::new(&["cost", ">bare", ">SLIM", ">extra"]);
        let mut extra = |what: &str, text: String| {
            table.row([what.to_owned(), String::new(), String::new(), text]);
        };
        extra(
            &format!("an idle flow of {}, connecting end", self.idle_flows),
            format!("{:.0} B", self.idle_client_bytes),
        );
        extra(
            "  accepting end",
            format!("{:.0} B", self.idle_server_bytes),
        );
        extra("  descriptors", format!("{:.2}", self.idle_descriptors));
        extra(
            "  wake-ups of the process in a second",
            format!("{:.2}", self.idle_wakeups),
        );
        extra(
            "a process with one flow",
            format!("{:.0} KiB", self.process_bytes / 1024.0),
        );
        extra("  descriptors", format!("{:.0}", self.process_descriptors));
        extra(
            &format!(
                "a busy flow ({:.0} KiB in the kernel)",
                self.busy_in_kernel / 1024.0
            ),
            format!("{:.0} KiB", self.busy_bytes / 1024.0),
        );
        for (what, times, unit) in [
            ("to run a program without sockets", &self.start, "ms"),
            ("to run one that connects once", &self.connect, "ms"),
            ("short connections", &self.short.rate, "/s"),
            ("  their connect", &self.short.connect, "us"),
        ] {
            let (bare, slim) = (median(&times.bare), median(&times.slim));
            let (bare, slim) = (bare.unwrap_or(f64::NAN), slim.unwrap_or(f64::NAN));
            table.row([
                what.to_owned(),
                format!("{bare:.2} {unit}"),
                format!("{slim:.2} {unit}"),
                format!("{:+.2} {unit}", slim - bare),
            ]);
        }
        Section {
            title: "What flows and processes cost".into(),
            table,
            notes: vec![
                "Anonymous memory, less that of the same program without SLIM.".into(),
                format!(
                    "Of the short connections, {:.2} % were live at both ends, {:.2} % plain TCP; the others ended in good order before they were negotiated.",
                    self.short.live * 100.0,
                    self.short.plain * 100.0
                ),
            ],
            plots: Vec::new(),
        }
    }
}
