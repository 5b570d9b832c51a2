//! Summary of a demonstration's event logs, in one line.

use std::collections::HashSet;
use std::fmt;
use std::path::Path;

use slim_core::event::{Event, Record};

use crate::events;

/// Totals of all event logs of a directory.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct EventTotals {
    /// Resumes. Both ends log each, but it counts once.
    resumes: HashSet<(String, u64)>,
    /// Bytes replayed, by both ends.
    replayed: u64,
    /// Longest time from a suspension to the flow being live again, in milliseconds.
    longest_ms: u64,
    /// Number of flows that were escalated.
    escalations: usize,
}

impl EventTotals {
    /// Adds up all event logs in `dir`.
    pub fn read(dir: &Path) -> Self {
        let mut totals = Self::default();
        events::records(dir).into_iter().for_each(|r| totals.add(r));
        totals
    }

    fn add(&mut self, record: Record) {
        match record.event {
            Event::Resume {
                epoch,
                replayed,
                lost_ms,
                ..
            } => {
                self.resumes.insert((record.flow, epoch));
                self.replayed += replayed;
                self.longest_ms = self.longest_ms.max(lost_ms);
            }
            Event::Escalate { .. } => self.escalations += 1,
            _ => {}
        }
    }
}

impl fmt::Display for EventTotals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} resumes, {:.1} MiB sent again, longest interruption {} ms, {} given up",
            self.resumes.len(),
            self.replayed as f64 / f64::from(1 << 20),
            self.longest_ms,
            self.escalations
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use slim_core::FlowId;
    use std::fs;

    #[test]
    fn a_resume_told_by_both_ends_counts_once() {
        let scratch = tempfile::tempdir().unwrap();
        let dir = scratch.path();
        let addr = "10.0.0.1:5".parse().unwrap();
        let resume = |host: &str, epoch, replayed, lost_ms| {
            let event = Event::Resume {
                epoch,
                replayed,
                received: 0,
                lost_ms,
                attempts: 1,
            };
            let record = event.record(1.0, (host, 7), FlowId([3; 16]), (addr, addr));
            serde_json::to_string(&record).unwrap() + "\n"
        };
        fs::write(dir.join("a.jsonl"), resume("a", 1, 1 << 20, 4) + "{\"ts\":").unwrap();
        fs::write(
            dir.join("b.jsonl"),
            resume("b", 1, 0, 9) + &resume("b", 2, 1 << 19, 3),
        )
        .unwrap();
        fs::write(dir.join("b.out"), resume("x", 9, 5, 99)).unwrap();
        let totals = EventTotals::read(dir).to_string();
        assert_eq!(
            totals,
            "2 resumes, 1.5 MiB sent again, longest interruption 9 ms, 0 given up"
        );
    }
}
