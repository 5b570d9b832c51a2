//! Whether the flows of a job are on queue pairs. They begin on TCP, move to queue pairs, and may fall back to TCP.

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

    /// Each end of a flow that is live has a queue pair of its process, and no connection is plain TCP.
    fn of(records: &[Record], pairs: &[RocePair]) -> Option<Self> {
        let count = |wanted: fn(&Event) -> bool| {
            let all = records.iter().filter(move |record| wanted(&record.event));
            all.map(|record| record.pid)
        };
        let live: Vec<u32> = count(|event| *event == Event::Live).collect();
        let plain = count(|event| matches!(event, Event::Legacy { .. })).count();
        let has_pairs = |pid: &u32| {
            let flows = live.iter().filter(|of| *of == pid).count();
            flows <= pairs.iter().filter(|pair| pair.pid == Some(*pid)).count()
        };
        let all = !live.is_empty() && plain == 0 && live.iter().all(has_pairs);
        all.then(|| Self {
            suspensions: count(|event| matches!(event, Event::Suspend { .. })).count(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(pid: u32, event: &str) -> Record {
        let place = r#""ts":1,"host":"a","flow":"aa","sock":"10.1.0.1:1","peer":"10.1.0.2:2""#;
        serde_json::from_str(&format!("{{{place},\"pid\":{pid},{event}}}")).unwrap()
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

    #[test]
    fn flows_that_have_left_their_queue_pairs_are_noticed() {
        let live = r#""kind":"live""#;
        let moves = r#""kind":"suspend","cause":"move""#;
        let broken = r#""kind":"suspend","cause":"ECONNRESET""#;
        let mut records = vec![record(1, live), record(2, live)];
        let pairs = [pair(1), pair(2), pair(3)];
        let both = |records: &[Record]| FlowsOnPairs::of(records, &pairs);
        assert_eq!(FlowsOnPairs::of(&[], &pairs), None);
        assert_eq!(FlowsOnPairs::of(&records, &pairs[1..]), None);
        records.push(record(1, moves));
        let then = both(&records);
        assert!(then.is_some());
        assert_eq!(both(&records), then);
        // It may be on another queue pair.
        records.push(record(2, broken));
        assert_ne!(both(&records), then);
        records.push(record(2, live));
        assert_eq!(both(&records), None, "two flows, and one queue pair");
        records.pop();
        records.push(record(1, r#""kind":"legacy","reason":"policy""#));
        assert_eq!(both(&records), None);
    }
}
