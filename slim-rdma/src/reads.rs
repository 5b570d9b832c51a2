//! RDMA READs of one queue pair: those on their way, and those that are over.
//!
//! A read copies bytes of the peer's memory into memory of this process. It is no part of the stream: the peer's software does not notice it, and
//! nothing of it is counted or sent again. Who has asked for it learns whether the bytes are there.

use std::collections::VecDeque;

/// Most reads of a queue pair on their way. They take places in the send queue, which messages need, too.
const MOST_READS: usize = 8;

/// A read that is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadOver {
    /// The number that the caller has given it.
    pub number: u64,
    /// The bytes are there. If not, some of them may be, and no more will come.
    pub done: bool,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct ReadQueue {
    /// Number of the work, and the caller's number, in order.
    posted: VecDeque<(u64, u64)>,
    over: VecDeque<ReadOver>,
    /// Work has failed. What an adapter reports afterwards as done tells nothing of the reads before it.
    doubtful: bool,
}

impl ReadQueue {
    /// Whether one more read can be posted.
    pub(crate) fn has_place(&self) -> bool {
        self.posted.len() < MOST_READS
    }

    pub(crate) fn post(&mut self, work: u64, number: u64) {
        self.posted.push_back((work, number));
    }

    /// The work `id` has completed, and with it all work before it. Whether a read has its bytes is known when work after it has completed
    /// ([`Completed::Read`](crate::verbs::Completed)).
    pub(crate) fn complete(&mut self, id: u64) {
        while let Some((work, number)) = self.posted.front().copied()
            && work < id
            && !self.doubtful
        {
            self.posted.pop_front();
            self.over.push_back(ReadOver { number, done: true });
        }
    }

    /// Work of the queue pair has failed, or its completions are wrong: no read completes any more.
    pub(crate) fn doubt(&mut self) {
        self.doubtful = true;
    }

    /// Nothing more can complete.
    pub(crate) fn fail(&mut self) {
        let failed = self.posted.drain(..).map(|(_, number)| ReadOver {
            number,
            done: false,
        });
        self.over.extend(failed);
    }

    /// The next read that is over, in the order in which they were posted.
    pub(crate) fn next_over(&mut self) -> Option<ReadOver> {
        self.over.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_read_is_done_by_work_that_completes_after_a_failure() {
        let mut reads = ReadQueue::default();
        reads.post(3, 30);
        reads.post(5, 50);
        reads.complete(4);
        reads.doubt();
        reads.complete(6);
        let over = |number, done| Some(ReadOver { number, done });
        assert_eq!(reads.next_over(), over(30, true));
        assert_eq!(reads.next_over(), None);
        reads.fail();
        assert_eq!(reads.next_over(), over(50, false));
    }
}
