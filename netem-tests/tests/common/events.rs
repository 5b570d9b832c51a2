//! The event logs of the processes in a lab.

use std::{collections::BTreeMap, fmt, fs, mem, path::PathBuf};

use serde_json::Value;
use slim_lab::Lab;

/// Limit of the component's handshake, in seconds (docs/OPENMPI.md).
const HANDSHAKE: f64 = 1.0;
/// Time within which a flow that is closed while it has no transport is released, in seconds.
const RELEASED: f64 = 0.1;
/// Reasons of an escalation that mean that the peer has left, not that a resume failed.
const PEER_LEFT: [&str; 3] = ["peer_gone", "peer_closed", "peer_reset"];

/// The directory of a lab's event logs.
pub fn events_dir(lab: &Lab) -> PathBuf {
    let dir = lab.dir().join("events");
    fs::create_dir_all(&dir).expect("a directory for the event logs");
    dir
}

/// Name and text of each event log.
pub fn event_logs(lab: &Lab) -> Vec<(String, String)> {
    let files = fs::read_dir(events_dir(lab))
        .into_iter()
        .flatten()
        .flatten();
    let log = |f: fs::DirEntry| {
        let name = f.file_name().to_string_lossy().into_owned();
        (name, fs::read_to_string(f.path()).unwrap_or_default())
    };
    files.map(log).collect()
}

/// The events of all processes of a lab, in the order of time.
#[derive(Clone, Debug, Default)]
pub struct Events {
    pub lines: Vec<Value>,
}

impl Events {
    /// Reads all event logs of `lab`.
    pub fn read(lab: &Lab) -> Self {
        let mut lines: Vec<Value> = Vec::new();
        for (_, text) in event_logs(lab) {
            // A killed process may leave an incomplete line.
            lines.extend(
                text.lines()
                    .filter_map(|line| serde_json::from_str(line).ok()),
            );
        }
        lines.sort_by(|a, b| at(a).total_cmp(&at(b)));
        Events { lines }
    }

    /// Events of one kind.
    pub fn of_kind<'a>(&'a self, wanted: &'a str) -> impl Iterator<Item = &'a Value> {
        self.lines.iter().filter(move |e| kind(e) == wanted)
    }

    pub fn count(&self, wanted: &str) -> usize {
        self.of_kind(wanted).count()
    }

    /// Escalations that should not have happened. An escalation is right only if its reason is that the peer had left, and if
    /// either all work was done (`done`, seconds since 1970), or the application has met the end of the stream and no error, or the
    /// peer's own log says that its application had closed the connection. MPI libraries close one of two connections that were
    /// made at the same time.
    pub fn wrongly_given_up(&self, done: f64) -> Vec<&Value> {
        let left = |e: &Value| PEER_LEFT.contains(&word(e, "reason"));
        let ended = |e: &Value| word(e, "reason") == "peer_closed" && e["errno"] == 0;
        let rightly = |e: &&Value| left(e) && (at(e) >= done || ended(e) || self.closed_by_peer(e));
        self.of_kind("escalate").filter(|e| !rightly(e)).collect()
    }

    /// As [`wrongly_given_up`](Self::wrongly_given_up), for the native component. It makes a connection anew that breaks before both
    /// ends use it, and closes the first one: then each end says that the other has left.
    pub fn wrongly_given_up_by_component(&self, done: f64) -> Vec<&Value> {
        let mut wrong = self.wrongly_given_up(done);
        wrong.retain(|event| !self.broke_in_handshake(event));
        wrong
    }

    /// Whether both ends of this event's flow gave it up because the other had left, right after it had become live.
    fn broke_in_handshake(&self, event: &Value) -> bool {
        let same = |e: &&Value| word(e, "flow") == word(event, "flow");
        let left = |e: &Value| PEER_LEFT.contains(&word(e, "reason"));
        let ends: Vec<&Value> = self.of_kind("escalate").filter(same).collect();
        let live = self.of_kind("live").filter(same).map(at);
        let since = live.fold(f64::INFINITY, f64::min);
        let soon = |e: &Value| at(e) - since < HANDSHAKE;
        ends.len() == 2 && ends.iter().all(|e| left(e) && soon(e))
    }

    /// Whether the application at the other end of this event's flow had closed it. That end logs it when it has released the flow, a
    /// moment after it has told its peer. It logs nothing if the flow was not live there yet; here it has just become live then.
    fn closed_by_peer(&self, event: &Value) -> bool {
        let same = |e: &&Value| word(e, "flow") == word(event, "flow");
        let at_end = |end: &'static str| {
            let here = move |e: &&Value| word(e, "sock") == word(event, end);
            self.lines.iter().filter(same).filter(here)
        };
        let is_new = || {
            let mut lives = at_end("sock").filter(|e| kind(e) == "live");
            lives.any(|e| at(event) <= at(e) + RELEASED)
        };
        let mut there = at_end("peer").peekable();
        match there.peek() {
            None => is_new(),
            Some(_) => there.any(|e| kind(e) == "closed" && at(e) <= at(event) + RELEASED),
        }
    }

    /// The outages of all flows that were resumed, in the order of their beginnings.
    pub fn outages(&self) -> Vec<Outage> {
        let mut ends: BTreeMap<&str, Vec<Outage>> = BTreeMap::new();
        for history in self.by_flow() {
            let mut suspended = f64::INFINITY;
            for event in history {
                match kind(event) {
                    "suspend" => suspended = at(event),
                    "resume" => {
                        let since = mem::replace(&mut suspended, f64::INFINITY);
                        let outages = ends.entry(word(event, "flow")).or_default();
                        outages.push(Outage::of_end(since, event));
                    }
                    _ => {}
                }
            }
        }
        let mut outages: Vec<Outage> = Vec::new();
        for mut of_flow in ends.into_values() {
            of_flow.sort_by(|a, b| a.begin.total_cmp(&b.begin));
            // An outage of a flow is that of both of its ends, one inside the other or overlapping.
            let mut joined: Vec<Outage> = Vec::new();
            for outage in of_flow {
                match joined.last_mut().filter(|last| outage.begin <= last.end) {
                    Some(last) => {
                        last.met = last.met.max(outage.begin);
                        last.end = last.end.max(outage.end);
                        last.told |= outage.told;
                    }
                    None => joined.push(outage),
                }
            }
            outages.extend(joined);
        }
        outages.sort_by(|a, b| a.begin.total_cmp(&b.begin));
        outages
    }

    /// What the log says about an outage: a line for each event, with its time in milliseconds since the outage began.
    pub fn during(&self, outage: &Outage) -> String {
        let inside = |e: &&Value| at(e) >= outage.begin && at(e) <= outage.end;
        let lines = self.lines.iter().filter(inside).map(|e| {
            let own = if word(e, "flow") == outage.flow {
                ""
            } else {
                " (another)"
            };
            let mut fields = e.clone();
            for known in ["ts", "host", "pid", "flow", "kind"] {
                fields.as_object_mut().map(|fields| fields.remove(known));
            }
            let ms = (at(e) - outage.begin) * 1e3;
            format!(
                "{ms:8.2} {} {} {}{own} {fields}\n",
                word(e, "host"),
                e["pid"],
                kind(e)
            )
        });
        lines.collect()
    }

    /// The events of every flow, separately for each of its ends: grouped by process and flow name.
    pub fn by_flow(&self) -> Vec<Vec<&Value>> {
        let mut flows: Vec<(_, Vec<&Value>)> = Vec::new();
        for event in &self.lines {
            let name = (
                word(event, "host"),
                event["pid"].as_u64(),
                word(event, "flow"),
            );
            match flows.iter_mut().find(|(known, _)| *known == name) {
                Some((_, history)) => history.push(event),
                None => flows.push((name, vec![event])),
            }
        }
        flows.into_iter().map(|(_, history)| history).collect()
    }
}

/// The time of an event, in seconds since 1970.
pub fn at(event: &Value) -> f64 {
    event["ts"].as_f64().unwrap_or(0.0)
}

/// The kind of an event.
pub fn kind(event: &Value) -> &str {
    word(event, "kind")
}

/// A text field of an event.
pub fn word<'a>(event: &'a Value, field: &str) -> &'a str {
    event[field].as_str().unwrap_or_default()
}

/// From the moment when the agent of either end has heard that a flow's connection is dead, until both ends have another one; in
/// seconds since 1970.
#[derive(Clone, Debug, PartialEq)]
pub struct Outage {
    pub flow: String,
    pub begin: f64,
    /// When the later end heard of it, by a call of its program or from the first end. Until then its program did not use the connection.
    pub met: f64,
    pub end: f64,
    /// One end made no attempt: it was told by the other one.
    pub told: bool,
}

impl Outage {
    /// The outage at one end, by its events `suspend` (logged at this time) and `resume`. `suspend` is logged late where the end first
    /// waits for its peer. `lost_ms` has the whole time, rounded up to milliseconds.
    fn of_end(suspended: f64, resume: &Value) -> Self {
        let end = at(resume);
        let earliest = end - resume["lost_ms"].as_f64().unwrap_or(0.0) / 1e3;
        let begin = if suspended <= earliest + 1e-3 {
            suspended
        } else {
            earliest
        };
        Outage {
            flow: word(resume, "flow").to_owned(),
            begin,
            met: begin,
            end,
            told: resume["attempts"] == 0,
        }
    }

    /// Its length in seconds.
    pub fn length(&self) -> f64 {
        self.end - self.begin
    }

    /// How long both programs could have waited for the connection, in seconds.
    pub fn pause(&self) -> f64 {
        self.end - self.met
    }
}

impl fmt::Display for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [suspended, resumed, given_up] =
            ["suspend", "resume", "escalate"].map(|kind| self.count(kind));
        write!(
            f,
            "{suspended} suspended, {resumed} resumed, {given_up} escalated"
        )
    }
}
