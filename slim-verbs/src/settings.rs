//! Settings of a provider.

use std::time::Duration;

use slim_rdma::{PairSizes, RingShape};

/// How queue pairs are made and kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VerbsSettings {
    /// Sizes of each queue pair. A ring must hold a message of a resume, 512 bytes. By default ring and staging ring have 256 KiB each, and
    /// both are locked in memory.
    pub sizes: PairSizes,
    /// After this time the peer is told how many bytes were recorded, if no message has told it; 5 ms by default. The peer keeps copies until then, and a
    /// flow that is closed there stays. After a time in which calls have polled the queue pair, and their messages have told the counts, it takes up to 16
    /// times as long, once.
    pub tell_after: Duration,
    /// How often each queue pair checks its path; 1 s by default. A silent path is noticed after this time and the adapter's own attempts.
    pub ping_every: Duration,
    /// Most queue pairs of a port that peers have asked for, and on which they have not resumed a flow yet; 64 by default.
    pub most_unproved: usize,
    /// How long a peer may take until it uses a queue pair that it has asked for; 5 s by default. A peer that gets the answer
    /// later than that, which it may for [`ASK_LIMIT`](slim_rdma::agreement::ASK_LIMIT), finds no queue pair.
    pub proof_within: Duration,
}

impl Default for VerbsSettings {
    fn default() -> Self {
        VerbsSettings {
            sizes: PairSizes {
                shape: RingShape::new(256 << 10, 256).expect("two powers of two"),
                depth: 64,
                staging: 256 << 10,
                inline: 128,
                message: 64 << 10,
            },
            tell_after: Duration::from_millis(5),
            ping_every: Duration::from_secs(1),
            most_unproved: 64,
            proof_within: Duration::from_secs(5),
        }
    }
}
