//! Identifiers of endpoints, flows and connections, and the small enums that all modules share.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Add;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// One process.
///
/// Two processes that get the same pid one after the other differ in `incarnation`, so that a
/// restarted peer is never taken for the process that held our flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EndpointId {
    /// Identifies the host; opaque.
    pub host: [u8; 16],
    /// Process id on that host.
    pub pid: u32,
    /// Random number drawn when the process started.
    pub incarnation: u64,
}

impl fmt::Display for EndpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        hex(f, &self.host[..4])?;
        write!(f, "/{}/{:016x}", self.pid, self.incarnation)
    }
}

/// The front end's own handle of a flow. Local to the process, never on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FlowToken(pub u64);

/// A map whose keys are numbers that this process assigns itself ([`FlowToken`], [`ConnId`]). A peer cannot choose keys that
/// collide, so a cheap hash is enough.
pub type Counted<K, V> = HashMap<K, V, BuildHasherDefault<CountedHasher>>;

/// An empty map keeps the memory for at most this many entries.
const KEPT_ENTRIES: usize = 64;

/// Takes the entry of a flow out of a map of negotiating flows. An application may open a thousand connections at once, and
/// then none for a long time, so a map that becomes empty gives its memory back.
pub(crate) fn take<V>(map: &mut Counted<FlowToken, V>, token: FlowToken) -> Option<V> {
    let taken = map.remove(&token);
    if map.is_empty() && map.capacity() > KEPT_ENTRIES {
        *map = Counted::default();
    }
    taken
}

/// See [`Counted`].
#[derive(Clone, Copy, Debug, Default)]
pub struct CountedHasher(u64);

impl Hasher for CountedHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, n: u64) {
        // 2^64 divided by the golden ratio: neighbouring numbers come to lie far apart, also in the high bits.
        self.0 = (self.0 ^ n)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(32);
    }
}

/// The name of a flow on the wire: random, chosen by the connector. Its lowest bit is set if the connector had an earlier
/// connection with the same addresses and ports that may still be unknown to the acceptor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FlowId(pub [u8; 16]);

impl FlowId {
    /// A name made of random bytes.
    pub(crate) fn new(mut random: [u8; 16], again: bool) -> Self {
        random[15] = random[15] & !1 | u8::from(again);
        FlowId(random)
    }

    /// Whether an earlier connection may have had the addresses and ports of this one.
    pub fn is_again(&self) -> bool {
        self.0[15] & 1 == 1
    }
}

impl fmt::Display for FlowId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for FlowId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FlowId({self})")
    }
}

/// A number used once, so that a replayed message does not verify.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Nonce(pub [u8; 16]);

impl Nonce {
    /// The nonce `n` after this one.
    pub(crate) fn plus(self, n: u32) -> Self {
        let sum = u128::from_be_bytes(self.0).wrapping_add(n.into());
        Self(sum.to_be_bytes())
    }

    /// How far this nonce comes after `base`, if it does not come further than that can be counted.
    pub(crate) fn after(self, base: Self) -> Option<u32> {
        let [nonce, base] = [self, base].map(|nonce| u128::from_be_bytes(nonce.0));
        u32::try_from(nonce.wrapping_sub(base)).ok()
    }
}

impl fmt::Debug for Nonce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Nonce(")?;
        hex(f, &self.0)?;
        f.write_str(")")
    }
}

/// A connection made for a resume.
///
/// The endpoint numbers the ones it asks for; the driver numbers the ones it accepted, with the
/// top bit set, so that the two never collide.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnId(pub u64);

impl ConnId {
    const INCOMING: u64 = 1 << 63;

    /// The `n`th connection that the driver accepted.
    pub fn incoming(n: u64) -> Self {
        ConnId(n | Self::INCOMING)
    }

    /// Whether the driver accepted this connection, as opposed to having made it.
    pub fn is_incoming(self) -> bool {
        self.0 & Self::INCOMING != 0
    }
}

/// Our side of a flow: whether this process connected or accepted its first transport. Fixed for life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// This side called `connect`.
    Connector,
    /// This side called `accept`.
    Acceptor,
}

impl Role {
    /// The role of the other side.
    pub fn other(self) -> Self {
        match self {
            Role::Connector => Role::Acceptor,
            Role::Acceptor => Role::Connector,
        }
    }
}

/// Why a flow lost its transport, or is suspected to have lost it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// A data call failed with this error number.
    Errno(i32),
    /// The transport ended although the peer had announced no end.
    Eof {
        /// Bytes of the flow read up to that end.
        received: u64,
    },
    /// No error, but acknowledgements do not advance. The old transport stays in use until a new one
    /// is established.
    Stall,
    /// The peer asked to resume.
    PeerAsked,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cause::Errno(n) => write!(f, "errno {n}"),
            Cause::Eof { received } => {
                write!(f, "unannounced end of stream at {received}")
            }
            Cause::Stall => f.write_str("stall"),
            Cause::PeerAsked => f.write_str("peer asked"),
        }
    }
}

/// What the application sees after the escalation of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// The stashed bytes, then this error.
    Errno(i32),
    /// The stashed bytes, then an orderly end of stream.
    Eof,
}

/// How the application ended its direction of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinHow {
    /// It will send no more, and still reads (`shutdown(SHUT_WR)`).
    HalfClose,
    /// It closed the flow, or shut both directions.
    Close,
    /// It closed the flow, and undelivered bytes are discarded (linger 0, or unread data).
    Reset,
}

/// A point in time: microseconds on the driver's monotonic clock, from an origin of its choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Time(pub u64);

impl Time {
    /// Time since `earlier`; zero if `earlier` lies ahead.
    pub fn since(self, earlier: Time) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Time {
    type Output = Time;

    /// Saturates: a deadline beyond the range never comes.
    fn add(self, after: Duration) -> Time {
        let micros = u64::try_from(after.as_micros()).unwrap_or(u64::MAX);
        Time(self.0.saturating_add(micros))
    }
}

fn hex(f: &mut fmt::Formatter<'_>, bytes: &[u8]) -> fmt::Result {
    bytes.iter().try_for_each(|b| write!(f, "{b:02x}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_saturates_at_both_ends() {
        assert_eq!(Time(5) + Duration::from_millis(2), Time(2005));
        assert_eq!(Time(5) + Duration::MAX, Time(u64::MAX));
        assert_eq!(Time(2005).since(Time(5)), Duration::from_millis(2));
        assert_eq!(Time(5).since(Time(2005)), Duration::ZERO);
    }

    #[test]
    fn numbers_of_accepted_and_requested_connections_never_collide() {
        assert!(ConnId::incoming(0).is_incoming());
        assert!(!ConnId(0).is_incoming());
        assert_ne!(ConnId::incoming(3), ConnId(3));
    }

    #[test]
    fn names_print_as_hex() {
        let flow = FlowId([0xab; 16]);
        assert_eq!(flow.to_string(), "ab".repeat(16));
        let endpoint = EndpointId {
            host: [1; 16],
            pid: 42,
            incarnation: 0xf,
        };
        assert_eq!(endpoint.to_string(), "01010101/42/000000000000000f");
    }
}
