//! How long interruptions last: killed connections, a hole in the network, a dead peer.

use std::path::Path;
use std::thread;
use std::time::Duration;

use netem_tests::Error;
use netem_tests::faults::destroy::{self, Pick};
use netem_tests::faults::diag::{self, Fate};
use netem_tests::faults::nft;
use serde::{Deserialize, Serialize};

use super::flows::{Connected, Ground, now};
use super::report::Section;
use super::stats::{median, quantile};
use crate::failure::Failure;
use crate::table::Table;

/// Time between two faults, for everything of the first to be over.
const PAUSE: Duration = Duration::from_millis(100);
/// How long after the beginning of a hole the program sends.
const INTO_HOLE: Duration = Duration::from_millis(200);

/// What to do.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Numbers of connections that are killed at once.
    pub flows: Vec<usize>,
    /// How often a single one is killed.
    pub kills: usize,
    /// How long the hole lasts.
    pub hole: Duration,
    /// How often there is one, and how often a peer dies.
    pub rounds: usize,
}

/// All that was measured.
#[derive(Debug, Serialize)]
pub struct Measured {
    /// By number of connections.
    pub kills: Vec<Killed>,
    /// Numbers of connections that could not be measured, and why.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<String>,
    /// From the end of a hole to the first byte, bare and under SLIM.
    pub hole: BareAndSlim,
    /// How long the hole was, in seconds.
    pub hole_seconds: f64,
    /// From the death of the peer process to the error, bare and under SLIM.
    pub death: BareAndSlim,
}

/// Connections of one process killed at once, several times. Times from the beginning of the killing to
/// the byte that came back after it, in milliseconds.
#[derive(Debug, Serialize)]
pub struct Killed {
    /// How many connections.
    pub flows: usize,
    /// How often.
    pub times: usize,
    /// How long the killing took, in the middle.
    pub killing_ms: f64,
    /// In the middle of all connections and times.
    pub p50_ms: f64,
    /// Of a hundred, all but one were faster.
    pub p99_ms: f64,
    /// The last connection, in the middle of the times.
    pub last_ms: f64,
}

/// Milliseconds of the same rounds.
#[derive(Debug, Default, Serialize)]
pub struct BareAndSlim {
    /// Without SLIM.
    pub bare_ms: Vec<f64>,
    /// With it.
    pub slim_ms: Vec<f64>,
}

/// What `slim_flows` answers to `go`.
#[derive(Debug, Deserialize)]
struct Back {
    first: u64,
    median: u64,
    p99: u64,
    last: u64,
}

/// What it answers when a connection has failed.
#[derive(Debug, Deserialize)]
struct Failed {
    at: u64,
}

fn failed(error: Error) -> Failure {
    Failure::failed(error.to_string())
}

fn ms(from: u64, to: u64) -> f64 {
    to.saturating_sub(from) as f64 / 1e6
}

impl Plan {
    /// Does all of it; `told` gets a line for each part.
    pub fn measure(&self, library: &Path, told: impl Fn(&str)) -> Result<Measured, Failure> {
        let ground = Ground::new(library)?;
        let (mut kills, mut missing) = (Vec::new(), Vec::new());
        for flows in &self.flows {
            let times = (self.kills / flows).clamp(3.min(self.kills), self.kills);
            told(&format!("{times} times {flows} connections killed"));
            // What many connections cannot do must not take the figures of few away.
            match killed(&ground, *flows, times) {
                Ok(figures) => kills.push(figures),
                Err(why) => missing.push(format!("{flows} connections: {why}")),
            }
        }
        let (mut hole, mut death) = (BareAndSlim::default(), BareAndSlim::default());
        for round in 1..=self.rounds {
            told(&format!("hole and death, round {round}/{}", self.rounds));
            hole.bare_ms.push(hole_in(&ground, false, self.hole)?);
            hole.slim_ms.push(hole_in(&ground, true, self.hole)?);
            death.bare_ms.push(death_of_peer(&ground, false)?);
            death.slim_ms.push(death_of_peer(&ground, true)?);
        }
        Ok(Measured {
            kills,
            missing,
            hole,
            hole_seconds: self.hole.as_secs_f64(),
            death,
        })
    }
}

/// A byte on every connection and back.
fn round_trip(connected: &mut Connected) -> Result<Back, Failure> {
    connected.client.say("go")?;
    connected.client.answer()
}

fn killed(ground: &Ground, flows: usize, times: usize) -> Result<Killed, Failure> {
    let mut connected = ground.connected(true, "serve", flows)?;
    let (mut killing, mut middle, mut late, mut last) = (vec![], vec![], vec![], vec![]);
    for n in 0..times {
        round_trip(&mut connected)?;
        thread::sleep(PAUSE);
        // From either end in turn.
        let net = ground.lab.node(n % 2).net();
        let chosen = destroy::list(net, &Pick::between_hosts()).map_err(failed)?;
        let start = now();
        let fates = diag::destroy(net, &chosen).map_err(failed)?;
        killing.push(ms(start, now()));
        let back = round_trip(&mut connected)?;
        let hit = fates.iter().filter(|f| **f == Fate::Destroyed).count();
        if hit < flows || back.first < start {
            return Err(Failure::failed(format!(
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
        // Of one connection the times are the sample, of many the connections.
        p99_ms: of(&late, if flows == 1 { 0.99 } else { 0.5 }),
        last_ms: of(&last, 0.5),
    })
}

/// From the lift of a hole to the byte that was sent into it and came back.
fn hole_in(ground: &Ground, slim: bool, length: Duration) -> Result<f64, Failure> {
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

/// From the death of the server to the error that the client gets.
fn death_of_peer(ground: &Ground, slim: bool) -> Result<f64, Failure> {
    let mut connected = ground.connected(slim, "serve", 1)?;
    round_trip(&mut connected)?;
    connected.client.say("watch")?;
    thread::sleep(PAUSE);
    let start = now();
    connected.server.kill();
    let told: Failed = connected.client.answer()?;
    Ok(ms(start, told.at))
}

impl Measured {
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
        let hole = format!("lift of a hole of {:.0} s to first byte", self.hole_seconds);
        for (what, both) in [
            (hole.as_str(), &self.hole),
            ("death of the peer to the error", &self.death),
        ] {
            let of = |v: &[f64], part| quantile(v, part).map_or("-".into(), |v| format!("{v:.2}"));
            table.row([
                what.to_owned(),
                both.slim_ms.len().to_string(),
                of(&both.slim_ms, 0.5),
                "-".into(),
                of(&both.slim_ms, 1.0),
                median(&both.bare_ms).map_or("-".into(), |v| format!("{v:.2}")),
            ]);
        }
        let mut notes = vec![
                "From the beginning of the killing (or the lift) until the byte that the program sends then has come back from its peer.".into(),
                "Of several connections: p50 and p99 over the connections, the median of the times.".into(),
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
