//! The writes that are posted and not completed.
//!
//! Most writes ask for no completion: one that asks completes all writes before it. A completion says that the adapter does not read the
//! bytes of these writes any more, and nothing else.

use std::collections::VecDeque;

/// The send queue of one pair, and the staging ring from which the adapter reads.
#[derive(Clone, Debug)]
pub(crate) struct SendQueue {
    depth: u64,
    staging: u64,
    posted: u64,
    completed: u64,
    /// Position in the stream before which the adapter reads no bytes any more.
    freed: u64,
    /// Writes that will report: number, and end of their bytes in the stream.
    reporting: VecDeque<(u64, u64)>,
    /// Writes posted since the last one that reports.
    quiet: u64,
    /// Position in the stream up to which a posted write reports.
    reported_to: u64,
}

impl SendQueue {
    pub(crate) fn new(depth: u32, staging: u64) -> Self {
        SendQueue {
            depth: depth.into(),
            staging,
            posted: 0,
            completed: 0,
            freed: 0,
            reporting: VecDeque::new(),
            quiet: 0,
            reported_to: 0,
        }
    }

    /// Whether one more write can be posted.
    pub(crate) fn has_place(&self) -> bool {
        self.has_places(1)
    }

    /// Whether so many more can be posted.
    pub(crate) fn has_places(&self, count: u64) -> bool {
        self.posted - self.completed + count <= self.depth
    }

    /// Bytes that can be staged behind position `sent`.
    pub(crate) fn room(&self, sent: u64) -> u64 {
        self.staging - (sent - self.freed)
    }

    /// Place of a position of the stream in the staging ring.
    pub(crate) fn place(&self, at: u64) -> u64 {
        at % self.staging
    }

    /// Number of the next write, whose bytes end at `end`, and whether it is to report.
    pub(crate) fn next(&self, end: u64) -> (u64, bool) {
        // So often that the queue and the staging ring never fill up with writes that do not report.
        let often = (self.quiet + 1) * 4 >= self.depth;
        (
            self.posted,
            often || (end - self.reported_to) * 4 >= self.staging,
        )
    }

    /// The write of this number is posted.
    pub(crate) fn post(&mut self, end: u64, reports: bool) {
        if reports {
            self.reporting.push_back((self.posted, end));
            self.reported_to = end;
            self.quiet = 0;
        } else {
            self.quiet += 1;
        }
        self.posted += 1;
    }

    /// The write `id` has completed, and all before it. Returns false if no write of this number can complete.
    pub(crate) fn complete(&mut self, id: u64) -> bool {
        if !self.reporting.iter().any(|(posted, _)| *posted == id) {
            return false;
        }
        while let Some((posted, end)) = self.reporting.pop_front() {
            (self.completed, self.freed) = (posted + 1, end);
            if posted == id {
                break;
            }
        }
        true
    }

    /// Whether a write is posted that has not completed and will report.
    pub(crate) fn will_report(&self) -> bool {
        !self.reporting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_queue_never_fills_up_with_writes_that_do_not_report() {
        for depth in [1, 2, 3, 4, 16] {
            let mut queue = SendQueue::new(depth, 1 << 20);
            while queue.has_place() {
                let (_, reports) = queue.next(0);
                queue.post(0, reports);
            }
            assert!(!queue.reporting.is_empty(), "{depth}");
            let mut staging = SendQueue::new(1000, 64);
            let mut sent = 0;
            while staging.room(sent) > 0 {
                sent += 1;
                let (_, reports) = staging.next(sent);
                staging.post(sent, reports);
            }
            assert!(!staging.reporting.is_empty());
        }
    }

    #[test]
    fn a_completion_completes_all_writes_before_it_even_if_theirs_are_lost() {
        let mut queue = SendQueue::new(8, 64);
        for end in 1..=8 {
            let (id, reports) = queue.next(end);
            assert_eq!((id, reports), (end - 1, end % 2 == 0));
            queue.post(end, reports);
        }
        assert!(!queue.has_place() && queue.room(8) == 56);
        assert!(!queue.complete(0) && !queue.complete(8), "no such report");
        assert!(queue.complete(5));
        assert_eq!(queue.room(8), 62);
        assert!(queue.has_place() && queue.will_report());
        assert!(!queue.complete(3), "completed before");
        assert!(queue.complete(7));
        assert!(!queue.will_report() && queue.room(8) == 64);
    }
}
