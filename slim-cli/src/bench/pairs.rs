//! Whether the flows of a job are on queue pairs. They begin on TCP, move to queue pairs, and may fall back to TCP.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use slim_core::event::{Event, Record};
use slim_lab::Netns;
use slim_lab::faults::roce::{self, RocePair};

use crate::events;
use crate::failure::CliError;

/// The flows of a job, as they were when all were on queue pairs. It notices whether one has left its queue pair since, also if it is on another one now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowsOnPairs {
    /// How often an end was suspended: the moves from TCP.
    suspensions: usize,
}

impl FlowsOnPairs {
    /// The flows of the job with these event logs; none if not all of them are on queue pairs, or there are none.
    pub fn find(logs: &Path) -> Result<Option<Self>, CliError> {
        let host = Netns::current().and_then(|net| roce::working_pairs(&net));
        let pairs = host.map_err(|e| CliError::failed(e.to_string()))?;
        Ok(Self::of(&events::records(logs), &pairs))
    }

    /// Both ranks have flows. Each of them has moved, and its process has a queue pair for it. Flows that have ended do not count: of two connections
    /// that cross, one is closed.
    fn of(records: &[Record], pairs: &[RocePair]) -> Option<Self> {
        // Whether the flow has its new transport, and how often it was suspended, by process and flow.
        let mut ends: BTreeMap<(u32, &str), (bool, usize)> = BTreeMap::new();
        for Record {
            pid, flow, event, ..
        } in records
        {
            let end = (*pid, flow.as_str());
            match event {
                Event::Live => {
                    ends.insert(end, (false, 0));
                }
                Event::Closed { .. }
                | Event::Demoted
                | Event::Escalate { .. }
                | Event::Legacy { .. }
                | Event::Orphaned { .. } => {
                    ends.remove(&end);
                }
                Event::Suspend { .. } => {
                    ends.entry(end)
                        .and_modify(|(moved, n)| (*moved, *n) = (false, *n + 1));
                }
                Event::Reinstate => {
                    ends.entry(end).and_modify(|(moved, _)| *moved = false);
                }
                Event::Resume { .. } => {
                    ends.entry(end).and_modify(|(moved, _)| *moved = true);
                }
                Event::Accuse
                | Event::Attempt { .. }
                | Event::AttemptFailed { .. }
                | Event::Hold => {}
            }
        }
        let ranks: BTreeSet<u32> = ends.keys().map(|(pid, _)| *pid).collect();
        let has_pairs = |rank: &u32| {
            let flows = ends.keys().filter(|(pid, _)| pid == rank).count();
            flows <= pairs.iter().filter(|pair| pair.pid == Some(*rank)).count()
        };
        let all = ranks.len() == 2
            && ends.values().all(|(moved, _)| *moved)
            && ranks.iter().all(has_pairs);
        all.then(|| Self {
            suspensions: ends.values().map(|(_, n)| n).sum(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(pid: u32, flow: &str, event: &str) -> Record {
        let place = r#""ts":1,"host":"a","sock":"10.1.0.1:1","peer":"10.1.0.2:2""#;
        serde_json::from_str(&format!(
            "{{{place},\"flow\":\"{flow}\",\"pid\":{pid},{event}}}"
        ))
        .unwrap()
    }

    fn pair(pid: u32) -> RocePair {
        RocePair {
            device: "rx1".into(),
            number: 17,
            peer: 18,
            service: "RC".into(),
            state: "RTS".into(),
            pid: Some(pid),
            comm: "slim_bench".into(),
        }
    }

    const LIVE: &str = r#""kind":"live""#;
    const MOVES: &str = r#""kind":"suspend","cause":"move""#;
    const RESUME: &str =
        r#""kind":"resume","epoch":1,"replayed":0,"received":0,"lost_ms":1,"attempts":1"#;

    /// A flow between two ranks has moved.
    fn moved() -> Vec<Record> {
        let events = [LIVE, MOVES, RESUME];
        let both = [1, 2].map(|rank| events.map(|event| record(rank, "aa", event)));
        both.into_iter().flatten().collect()
    }

    #[test]
    fn flows_that_have_left_their_queue_pairs_are_noticed() {
        let pairs = [pair(1), pair(2), pair(3)];
        let mut records = moved();
        assert_eq!(FlowsOnPairs::of(&[], &pairs), None);
        assert_eq!(FlowsOnPairs::of(&records, &pairs[1..]), None);
        assert_eq!(FlowsOnPairs::of(&records[..3], &pairs), None, "one rank");
        assert_eq!(FlowsOnPairs::of(&records[..5], &pairs), None, "moving");
        let then = FlowsOnPairs::of(&records, &pairs);
        assert!(then.is_some());
        let broken = r#""kind":"suspend","cause":"ECONNRESET""#;
        records.push(record(2, "aa", broken));
        assert_eq!(FlowsOnPairs::of(&records, &pairs), None);
        // It may be on another queue pair.
        records.push(record(2, "aa", RESUME));
        let later = FlowsOnPairs::of(&records, &pairs);
        assert!(later.is_some() && later != then);
    }

    #[test]
    fn a_connection_that_crossed_another_one_and_was_closed_does_not_count() {
        let pairs = [pair(1), pair(2)];
        let mut records = moved();
        let then = FlowsOnPairs::of(&records, &pairs);
        records.extend([1, 2].map(|rank| record(rank, "bb", LIVE)));
        assert_eq!(FlowsOnPairs::of(&records, &pairs), None);
        let closed = r#""kind":"closed","how":"close","sent":0"#;
        records.extend([1, 2].map(|rank| record(rank, "bb", closed)));
        records.push(record(1, "cc", r#""kind":"legacy","reason":"policy""#));
        assert_eq!(FlowsOnPairs::of(&records, &pairs), then);
    }
}
