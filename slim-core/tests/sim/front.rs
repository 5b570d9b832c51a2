//! One flow of one process: the state of a front end, and the application behind it.

use slim_core::endpoint::Opened;
use slim_core::replay::Replay;
use slim_core::stash::Stash;
use slim_core::{FinHow, Verdict};

use crate::dice::mix;

/// The byte that the application of `side` writes at `at`.
pub fn pattern(seed: u64, side: usize, at: u64) -> u8 {
    (mix(seed ^ ((side as u64) << 63) ^ at.wrapping_mul(0x9e37)) >> 24) as u8
}

/// How the application ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// Half-closes when all is written, closes at the peer's end of stream.
    Orderly,
    /// Closes when all is written, even if the peer still sends.
    Rude,
    /// Never ends.
    Idle,
}

/// A replay under way, in both directions.
pub struct Pump {
    /// Next byte to be sent again.
    pub at: u64,
    /// Bytes that the peer sends again and that have not been received yet.
    pub missing: u64,
}

pub struct Front {
    /// The transport: a connection, and our side of it.
    pub tcp: Option<(usize, usize)>,
    /// Network of the transport, or of the last one.
    pub network: usize,
    /// Where this transport begins: position in the stream, and in the bytes that were written to
    /// the connection.
    pub base: (u64, u64),
    pub replay: Replay,
    pub stash: Stash,
    pub received: u64,
    pub sent: u64,
    pub barred: bool,
    pub live: bool,
    pub legacy: bool,
    /// The flow became plain TCP before either stream ended.
    pub made_plain: bool,
    pub verdict: Option<Verdict>,
    pub peer_final: Option<u64>,
    pub pump: Option<Pump>,
    pub fin: Option<FinHow>,
    /// Attempts are under way, or about to begin.
    pub trying: bool,
    /// Bytes acknowledged when the driver looked at the held flow.
    pub looked: Option<usize>,
    /// The OPEN by which the peer learned of the flow, if there was one.
    pub opened: Option<Opened>,

    // The application.
    pub plan: Plan,
    pub to_write: u64,
    pub delivered: u64,
    pub end_seen: bool,
    /// The application has closed the flow, or has seen an error.
    pub over: bool,
    /// The next resume tells the peer that the application has closed the flow.
    pub told: bool,
    /// The driver holds nothing of the flow any more.
    pub gone: bool,
}

impl Front {
    pub fn new(tcp: (usize, usize), network: usize, plan: Plan, to_write: u64) -> Self {
        Front {
            tcp: Some(tcp),
            network,
            base: (0, 0),
            replay: Replay::new(),
            stash: Stash::new(),
            received: 0,
            sent: 0,
            barred: false,
            live: false,
            legacy: false,
            made_plain: false,
            verdict: None,
            peer_final: None,
            pump: None,
            fin: None,
            trying: false,
            looked: None,
            opened: None,
            plan,
            to_write,
            delivered: 0,
            end_seen: false,
            told: false,
            over: false,
            gone: false,
        }
    }

    /// Bytes of the stream that the peer's kernel is known to hold, if it holds `acked` bytes of
    /// this transport.
    pub fn acked(&self, acked: usize) -> u64 {
        self.base.0 + (acked as u64).saturating_sub(self.base.1)
    }

    /// The application reads `data`, and checks each byte.
    pub fn deliver(&mut self, seed: u64, side: usize, data: &[u8]) -> Result<(), String> {
        for byte in data {
            let right = pattern(seed, 1 - side, self.delivered);
            if *byte != right {
                return Err(format!(
                    "side {side}: byte {} is {byte:#x}, not {right:#x}",
                    self.delivered
                ));
            }
            self.delivered += 1;
        }
        Ok(())
    }
}

impl Front {
    pub fn tell(&self) -> String {
        format!(
            "{:?}, sent {} of {} more, received {}, delivered {}, stash {}, barred {}, fin {:?}, \
             verdict {:?}, over {}, end seen {}",
            self.plan,
            self.sent,
            self.to_write,
            self.received,
            self.delivered,
            self.stash.len(),
            self.barred,
            self.fin,
            self.verdict,
            self.over,
            self.end_seen
        )
    }
}
