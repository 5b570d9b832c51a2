//! Measures how long interruptions last: killed connections, holes in the network, a dead peer.

use std::path::Path;
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use slim_lab::Error;
use slim_lab::faults::destroy::{self, Selector};
use slim_lab::faults::diag::{self, DestroyOutcome};
use slim_lab::faults::nft;

use super::flows::{Connected, Ground, now};
use super::section::Section;
use super::stats::{median, quantile};
use crate::failure::CliError;
use crate::table::Table;

/// Time between two faults, so that all effects of the first are over.
const PAUSE: Duration = Duration::from_millis(100);
/// Time before a process is killed. Its death is reported by ICMP messages, of which Linux sends six in a row to one host, and
/// then one a second (`icmp_ratelimit`). If processes died faster than that, the reports would be late.
const ICMP_AGAIN: Duration = Duration::from_secs(3);
/// Time from the beginning of a hole to the program's send.
const INTO_HOLE: Duration = Duration::from_millis(200);

/// The extent of the measurement.
#[derive(Clone, Debug)]
pub struct ResumePlan {
    /// Numbers of connections that are killed at once.
    pub flows: Vec<usize>,
    /// How often a single connection is killed.
    pub kills: usize,
    /// Lengths of the holes.
    pub holes: Vec<Duration>,
    /// Number of holes of each length, and of deaths of a peer.
    pub rounds: usize,
}

/// All results.
#[derive(Debug, Serialize)]
pub struct ResumeFigures {
    /// Kills, by number of connections.
    pub kills: Vec<Killed>,
    /// Numbers of connections that could not be measured, with the reason.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<String>,
    /// Kills of a connection with full buffers.
    pub full: Full,
    /// Holes, by length.
    pub holes: Vec<Hole>,
    /// Time from the death of the peer process to the error, bare and under SLIM.
    pub death: BareAndSlim,
}

/// Connections of one process killed at once, several times. Times are in milliseconds, from the beginning of the killing to
/// the byte that came back after it.
#[derive(Debug, Serialize)]
pub struct Killed {
    /// Number of connections.
    pub flows: usize,
    /// Number of repetitions.
    pub times: usize,
    /// Median duration of the killing.
    pub killing_ms: f64,
    /// Median over the connections: its median over the repetitions.
    pub p50_ms: f64,
    /// 99th percentile: over the connections, and its median over the repetitions; for one connection, over the repetitions.
    pub p99_ms: f64,
    /// The last connection: its median over the repetitions.
    pub last_ms: f64,
}

/// A connection that is killed while the program writes more than its peer reads, so that all buffers are
/// full. Under SLIM only, several times.
#[derive(Debug, Default, Serialize)]
pub struct Full {
    /// Bytes that the program had written and the peer had not read.
    pub written: Vec<f64>,
    /// Bytes that were replayed.
    pub replayed: Vec<f64>,
    /// Milliseconds from suspension to the end of the replay, rounded up.
    pub lost_ms: Vec<f64>,
}

/// A hole in the network.
#[derive(Debug, Serialize)]
pub struct Hole {
    /// Length of the hole.
    pub seconds: f64,
    /// Time from the end of the hole to the first byte.
    pub first_byte: BareAndSlim,
}

/// Milliseconds of the same rounds, without and with SLIM.
#[derive(Debug, Default, Serialize)]
pub struct BareAndSlim {
    /// Without SLIM.
    pub bare_ms: Vec<f64>,
    /// With SLIM.
    pub slim_ms: Vec<f64>,
}

/// Answer of `slim_flows` to `go`.
#[derive(Debug, Deserialize)]
struct Back {
    first: u64,
    median: u64,
    p99: u64,
    last: u64,
}

/// Answer of `slim_flows` to `fill`.
#[derive(Debug, Deserialize)]
struct FillAnswer {
    bytes: f64,
}

/// Answer of `slim_flows` when a connection has failed.
#[derive(Debug, Deserialize)]
struct Failed {
    at: u64,
}

fn failed(error: Error) -> CliError {
    CliError::failed(error.to_string())
}

fn ms(from: u64, to: u64) -> f64 {
    to.saturating_sub(from) as f64 / 1e6
}

impl ResumePlan {
    /// Runs all measurements; `told` gets a line for each part.
    pub fn measure(&self, library: &Path, told: impl Fn(&str)) -> Result<ResumeFigures, CliError> {
        let ground = Ground::new(library)?;
        let (mut kills, mut missing) = (Vec::new(), Vec::new());
        for flows in &self.flows {
            let times = self.times(*flows);
            told(&format!("{times} times {flows} connections killed"));
            // A failure with many connections must not discard the results of few.
            match killed(&ground, *flows, times) {
                Ok(figures) => kills.push(figures),
                Err(why) => missing.push(format!("{flows} connections: {why}")),
            }
        }
        let mut full = Full::default();
        let (mut holes, mut death) = (Vec::new(), BareAndSlim::default());
        for round in 1..=self.rounds {
            told(&format!(
                "full pipes and death, round {round}/{}",
                self.rounds
            ));
            full_killed(&ground, &mut full)?;
            death.bare_ms.push(death_of_peer(&ground, false)?);
            death.slim_ms.push(death_of_peer(&ground, true)?);
        }
        for length in &self.holes {
            let mut first_byte = BareAndSlim::default();
            for round in 1..=self.rounds {
                told(&format!(
                    "hole of {length:?}, round {round}/{}",
                    self.rounds
                ));
                first_byte.bare_ms.push(hole_in(&ground, false, *length)?);
                first_byte.slim_ms.push(hole_in(&ground, true, *length)?);
            }
            holes.push(Hole {
                seconds: length.as_secs_f64(),
                first_byte,
            });
        }
        Ok(ResumeFigures {
            kills,
            missing,
            full,
            holes,
            death,
        })
    }

    fn times(&self, flows: usize) -> usize {
        (self.kills / flows).clamp(3.min(self.kills), self.kills)
    }

    /// The approximate duration.
    pub fn estimate(&self) -> Duration {
        let kill = |flows: &usize| {
            let once =
                PAUSE + Duration::from_millis(50) + Duration::from_micros(300) * *flows as u32;
            Duration::from_secs(2) + once * self.times(*flows) as u32
        };
        let kills: Duration = self.flows.iter().map(kill).sum();
        // Bare TCP may wait as long again before its next retransmission.
        let holes: Duration = self.holes.iter().map(|length| *length * 3).sum();
        kills + (holes + ICMP_AGAIN + Duration::from_secs(3)) * self.rounds as u32
    }
}

/// Sends a byte on every connection and waits until all have come back.
fn round_trip(connected: &mut Connected) -> Result<Back, CliError> {
    connected.client.say("go")?;
    connected.client.answer()
}

fn killed(ground: &Ground, flows: usize, times: usize) -> Result<Killed, CliError> {
    let mut connected = ground.connected(true, "serve", flows)?;
    let (mut killing, mut middle, mut late, mut last) = (vec![], vec![], vec![], vec![]);
    for n in 0..times {
        round_trip(&mut connected)?;
        thread::sleep(PAUSE);
        // Kill from either end in turn.
        let net = ground.lab.node(n % 2).net();
        let chosen = destroy::list(net, &Selector::between_hosts()).map_err(failed)?;
        let start = now();
        let fates = diag::destroy(net, &chosen).map_err(failed)?;
        killing.push(ms(start, now()));
        let back = round_trip(&mut connected)?;
        let hit = fates
            .iter()
            .filter(|f| **f == DestroyOutcome::Destroyed)
            .count();
        if hit < flows || back.first < start {
            return Err(CliError::failed(format!(
                "{hit} of {flows} connections could be killed"
            )));
        }
        middle.push(ms(start, back.median));
        late.push(ms(start, back.p99));
        last.push(ms(start, back.last));
    }
    let of = |values: &[f64], part| quantile(values, part).unwrap_or(f64::NAN);
    Ok(Killed {
        flows,
        times,
        killing_ms: of(&killing, 0.5),
        p50_ms: of(&middle, 0.5),
        // With one connection the sample is the repetitions, with many it is the connections.
        p99_ms: of(&late, if flows == 1 { 0.99 } else { 0.5 }),
        last_ms: of(&last, 0.5),
    })
}

/// Kills a connection whose peer does not read.
fn full_killed(ground: &Ground, full: &mut Full) -> Result<(), CliError> {
    let mut connected = ground.connected(true, "sink", 1)?;
    let mut written = 0.0;
    // The kernel's buffers grow while they are used, so repeat until nothing more fits.
    for _ in 0..100 {
        connected.client.say("fill")?;
        let filled: FillAnswer = connected.client.answer()?;
        if filled.bytes == 0.0 {
            break;
        }
        written += filled.bytes;
        thread::sleep(PAUSE / 10);
    }
    let net = ground.lab.node(0).net();
    let chosen = destroy::list(net, &Selector::between_hosts()).map_err(failed)?;
    diag::destroy(net, &chosen).map_err(failed)?;
    // The program notices the loss only when it uses the connection.
    connected.client.say("fill")?;
    let (replayed, lost_ms) = connected.client.wait_resume()?;
    full.written.push(written);
    full.replayed.push(replayed as f64);
    full.lost_ms.push(lost_ms as f64);
    Ok(())
}

/// Time from the end of a hole until the byte that was sent during the hole has come back.
fn hole_in(ground: &Ground, slim: bool, length: Duration) -> Result<f64, CliError> {
    let mut connected = ground.connected(slim, "serve", 1)?;
    round_trip(&mut connected)?;
    let hole = nft::Rule::drop()
        .path(0)
        .apply_to(ground.lab.nodes())
        .map_err(failed)?;
    thread::sleep(INTO_HOLE);
    connected.client.say("go")?;
    thread::sleep(length.saturating_sub(INTO_HOLE));
    let lift = now();
    hole.lift().map_err(failed)?;
    let back: Back = connected.client.answer()?;
    Ok(ms(lift, back.first))
}

/// Time from the death of the server to the error that the client gets.
fn death_of_peer(ground: &Ground, slim: bool) -> Result<f64, CliError> {
    let mut connected = ground.connected(slim, "serve", 1)?;
    round_trip(&mut connected)?;
    connected.client.say("watch")?;
    thread::sleep(if slim { ICMP_AGAIN } else { PAUSE });
    let start = now();
    connected.server.kill();
    let told: Failed = connected.client.answer()?;
    Ok(ms(start, told.at))
}

impl ResumeFigures {
    /// For the report.
    pub fn section(&self) -> Section {
        let mut table = Table::new(&["milliseconds", ">times", ">p50", ">p99", ">last", ">bare"]);
        for killed in &self.kills {
            table.row([
                format!(
                    "kill of {} connection(s) (killing took {:.1}) to first byte",
                    killed.flows, killed.killing_ms
                ),
                killed.times.to_string(),
                format!("{:.2}", killed.p50_ms),
                format!("{:.2}", killed.p99_ms),
                format!("{:.2}", killed.last_ms),
                "never".into(),
            ]);
        }
        let of = |v: &[f64], part| quantile(v, part).map_or("-".into(), |v| format!("{v:.2}"));
        let kib = |v: &[f64]| median(v).unwrap_or(0.0) / 1024.0;
        table.row([
            format!(
                "kill of a connection with full pipes ({:.0} KiB, {:.0} of them sent again) to resumed",
                kib(&self.full.written),
                kib(&self.full.replayed)
            ),
            self.full.lost_ms.len().to_string(),
            of(&self.full.lost_ms, 0.5),
            "-".into(),
            of(&self.full.lost_ms, 1.0),
            "never".into(),
        ]);
        let holes = self.holes.iter().map(|hole| {
            let what = format!("lift of a hole of {} s to first byte", hole.seconds);
            (what, &hole.first_byte)
        });
        let death = ("death of the peer to the error".to_owned(), &self.death);
        for (what, both) in holes.chain([death]) {
            table.row([
                what,
                both.slim_ms.len().to_string(),
                of(&both.slim_ms, 0.5),
                "-".into(),
                of(&both.slim_ms, 1.0),
                median(&both.bare_ms).map_or("-".into(), |v| format!("{v:.2}")),
            ]);
        }
        let mut notes = vec![
                "Times are from the beginning of the killing (or from the lift) until a byte that the program sends has come back from its peer.".into(),
                "With several connections, p50 and p99 are over the connections, and last is the last connection; each is the median over the repetitions. Elsewhere last is the slowest repetition.".into(),
            ];
        let missing = self.missing.iter();
        notes.extend(missing.map(|why| format!("NOT measured: {why}")));
        Section {
            title: "Interruptions under SLIM".into(),
            table,
            notes,
            plots: Vec::new(),
        }
    }
}
