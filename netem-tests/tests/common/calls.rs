//! The times of the calls of `slim_coll`, and what a fault did to them.

use std::{
    fs,
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use super::events::{Events, at, kind, word};

/// One call of a collective at one rank; times in seconds, the start since 1970.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    pub start: f64,
    pub took: f64,
}

/// The calls of each rank, in order.
#[derive(Clone, Debug)]
pub struct Calls {
    ranks: Vec<Vec<Call>>,
    median: f64,
}

/// What happened to the calls in the time after a fault. All times in milliseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct CallsAfter {
    /// The longest call of any rank that was under way then or began later, less the median of all calls.
    pub pause: f64,
    /// When the last rank had done the call that was under way, or its next one; from the fault on.
    pub done: f64,
    /// Calls that rank 0 finished.
    pub finished: usize,
    /// The sum of what the slow calls took beyond the median, at the rank where it is most. If one outage stops several calls in
    /// turn, this is more than the pause.
    pub total: f64,
    /// Ranks with a slow call, and the most slow calls at one rank.
    pub ranks: usize,
    pub calls: usize,
}

/// What the event logs say about an outage: the flows that were replaced. All times in milliseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct FlowsAfter {
    pub flows: usize,
    /// From the fault until the first flow was live again at both ends, and the last one.
    pub first: f64,
    pub last: f64,
    /// From the first flow that was suspended to the last one (exact to a millisecond).
    pub spread: f64,
    /// How much sooner the last flow would be live if all flows were suspended when the first one was, and each took as long as it
    /// did from then on (exact to a millisecond).
    pub saving: f64,
}

/// The time in seconds since 1970.
pub fn now() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.expect("a clock after 1970").as_secs_f64()
}

pub fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(f64::NAN)
}

impl Calls {
    /// Reads what `ranks` ranks have written in `dir`.
    pub fn read(dir: &Path, ranks: usize) -> Self {
        let call = |line: &str| {
            let (start, took) = line.split_once(' ').expect("two numbers");
            let number = |text: &str| text.parse().expect("a number");
            let (start, took) = (number(start), number(took));
            Call { start, took }
        };
        let rank = |rank| {
            let path = dir.join(format!("calls.{rank}"));
            let text = fs::read_to_string(&path).expect("the calls of a rank");
            text.lines().map(call).collect()
        };
        let ranks: Vec<Vec<Call>> = (0..ranks).map(rank).collect();
        let median = median(ranks.iter().flatten().map(|c| c.took).collect());
        Calls { ranks, median }
    }

    /// Median of the calls of all ranks, in milliseconds.
    pub fn median_ms(&self) -> f64 {
        self.median * 1e3
    }

    /// The calls that were under way in some moment between `from` and `to`. A call is slow if it takes
    /// `least` seconds more than the median.
    pub fn between(&self, from: f64, to: f64, least: f64) -> CallsAfter {
        let mut after = CallsAfter::default();
        for (number, rank) in self.ranks.iter().enumerate() {
            let (mut total, mut slow) = (0.0, 0);
            let mut hit = None;
            for call in rank {
                let (end, beyond) = (call.start + call.took, call.took - self.median);
                if call.start > to || end < from {
                    continue;
                }
                hit.get_or_insert(end);
                after.finished += usize::from(number == 0 && end <= to);
                after.pause = after.pause.max(beyond * 1e3);
                if beyond > least {
                    (total, slow) = (total + beyond * 1e3, slow + 1);
                }
            }
            after.done = after.done.max((hit.unwrap_or(from) - from) * 1e3);
            after.total = after.total.max(total);
            after.ranks += usize::from(slow > 0);
            after.calls = after.calls.max(slow);
        }
        after
    }
}

impl FlowsAfter {
    /// The flows that were replaced between `from` and `to`.
    pub fn between(events: &Events, from: f64, to: f64) -> Option<Self> {
        // Name; when an end suspended it first; when both were live.
        let mut flows: Vec<(&str, f64, f64)> = Vec::new();
        for event in &events.lines {
            let (name, ts) = (word(event, "flow"), at(event));
            if ts < from || ts > to {
                continue;
            }
            let (suspended, live) = match kind(event) {
                // The suspension of a broken flow is logged late, so its time is taken from the resume.
                "suspend" if word(event, "cause") == "stall" => (ts, f64::NEG_INFINITY),
                "resume" => (ts - event["lost_ms"].as_f64().unwrap_or(0.0) / 1e3, ts),
                _ => continue,
            };
            match flows.iter_mut().find(|f| f.0 == name) {
                None => flows.push((name, suspended, live)),
                Some(flow) => (flow.1, flow.2) = (flow.1.min(suspended), flow.2.max(live)),
            }
        }
        flows.retain(|f| f.2.is_finite());
        type Of = fn(&(&str, f64, f64)) -> f64;
        let least = |of: Of| flows.iter().map(of).min_by(f64::total_cmp);
        let most = |of: Of| flows.iter().map(of).max_by(f64::total_cmp);
        let (noticed, last) = (least(|f| f.1)?, most(|f| f.2)?);
        Some(FlowsAfter {
            flows: flows.len(),
            first: (least(|f| f.2)? - from) * 1e3,
            last: (last - from) * 1e3,
            spread: (most(|f| f.1)? - noticed) * 1e3,
            saving: (last - noticed - most(|f| f.2 - f.1)?) * 1e3,
        })
    }
}
