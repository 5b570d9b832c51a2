//! Names for the things a session is made of, and the small enums everybody shares.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Add;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A participant: one process, in one of its lives.
///
/// Two processes that get the same pid one after the other differ in `incarnation`, so that a
/// restarted peer is never taken for the one that held our flows.
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

/// A map by numbers that this process counts itself ([`FlowToken`], [`ConnId`]), so that nobody can choose those that
/// meet in one place.
pub type Counted<K, V> = HashMap<K, V, BuildHasherDefault<CountedHasher>>;

/// An empty map keeps the memory for as many entries.
const KEPT_ENTRIES: usize = 64;

/// Takes the entry of a flow out of a map of flows that negotiate. A thousand connections may be opened at once, and then
/// none for long: an empty map gives the memory back.
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
        // 2^64 divided by the golden ratio: neighbours come to lie far apart, in the high bits, too.
        self.0 = (self.0 ^ n)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(32);
    }
}

/// The name of a flow on the wire: random, chosen by the side that connected. Its lowest bit says whether the
/// acceptor may still have an earlier connection with the same addresses and ports of which it knows nothing.
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

/// A number used once, against replayed messages.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Nonce(pub [u8; 16]);

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
/// top bit set, so that the two never meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnId(pub u64);

impl ConnId {
    const INCOMING: u64 = 1 << 63;

    /// The `n`th connection that the driver accepted.
    pub fn incoming(n: u64) -> Self {
        ConnId(n | Self::INCOMING)
    }

    /// Whether the driver accepted this connection, as opposed to having connected it.
    pub fn is_incoming(self) -> bool {
        self.0 & Self::INCOMING != 0
    }
}

/// Which side of a flow we are, by who called `connect` on its first transport. Fixed for life.
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

/// Why a flow lost its transport, or is suspected to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// A data call failed with this error number.
    Errno(i32),
    /// The transport ended although the peer had announced no end.
    Eof {
        /// Bytes of the flow read up to that end.
        received: u64,
    },
    /// No error, but acknowledgements do not move. The old transport stays in use until a new one
    /// stands.
    Stall,
    /// The peer asked to resume.
    PeerAsked,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cause::Errno(n) => write!(f, "errno {n}"),
            Cause::Eof { received } => {
                write!(f, "end of stream at {received} that nobody announced")
            }
            Cause::Stall => f.write_str("stall"),
            Cause::PeerAsked => f.write_str("peer asked"),
        }
    }
}

/// What the application is to see once a flow is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// What is stashed, then this error.
    Errno(i32),
    /// What is stashed, then an orderly end of stream.
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
    /// It closed the flow, or shut both directions.and threw away what was not delivered (linger 0, or unread data).
    Reset,
}

/// A point in time: microseconds on the driver's monotonic clock, from an origin of its choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Time(pub u64);

impl Time {
    /// How long ago `earlier` was; zero if it lies ahead.
    pub fn since(self, earlier: Time) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Time {
    type Output = Time;

    /// Saturates: a deadline too far away to be counted never comes.
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
    fn connection_numbers_of_the_two_givers_never_meet() {
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
