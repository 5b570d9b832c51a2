//! Kinds of transport, and how a peer is reached by each: `docs/PROTOCOL.md`, section "Kinds of transport".
//!
//! This crate knows kinds by number and name only. The bytes of a [locator](Locator) of a kind other than TCP mean something
//! only to the code that makes connections of that kind, but for an address at the beginning ([`OtherLocator`]).

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Most bytes of a locator of a kind other than TCP.
pub const MAX_LOCATOR: usize = 64;

/// What a transport is: a TCP connection, or something else that carries bytes in both directions, in order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransportKind(u8);

impl TransportKind {
    /// TCP, which every endpoint has.
    pub const TCP: TransportKind = TransportKind(0);
    /// Reliable connected queue pairs of verbs.
    pub const VERBS: TransportKind = TransportKind(1);
    /// A TCP connection through the witness of the job. It comes last, and the kernel's acknowledgements on it say nothing about the peer.
    pub const RELAY: TransportKind = TransportKind(2);
    /// The first of the kinds that are reserved for tests.
    pub const TEST: TransportKind = TransportKind(240);

    /// The kind with this number.
    pub const fn new(number: u8) -> Self {
        TransportKind(number)
    }

    /// Its number in messages.
    pub const fn number(self) -> u8 {
        self.0
    }
}

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            TransportKind::TCP => f.write_str("tcp"),
            TransportKind::VERBS => f.write_str("verbs"),
            TransportKind::RELAY => f.write_str("relay"),
            TransportKind(number) => write!(f, "kind{number}"),
        }
    }
}

impl fmt::Debug for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// How an endpoint is reached by a transport of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Locator {
    /// An address, and the port of the resume listener there.
    Tcp(SocketAddr),
    /// Another kind.
    Other(OtherLocator),
}

impl Locator {
    /// The kind of transport.
    pub fn kind(&self) -> TransportKind {
        match self {
            Locator::Tcp(_) => TransportKind::TCP,
            Locator::Other(other) => other.kind,
        }
    }

    /// The address, if the kind is TCP.
    pub fn tcp(&self) -> Option<SocketAddr> {
        match self {
            Locator::Tcp(addr) => Some(*addr),
            Locator::Other(_) => None,
        }
    }
}

impl From<SocketAddr> for Locator {
    fn from(addr: SocketAddr) -> Self {
        Locator::Tcp(addr)
    }
}

impl From<OtherLocator> for Locator {
    fn from(other: OtherLocator) -> Self {
        Locator::Other(other)
    }
}

/// A locator of a kind other than TCP: bytes that mean something to transports of that kind. If the kind has IP addresses, the locator begins with one, of 16 bytes (IPv4
/// addresses mapped to IPv6). Flows begin with the locator whose address is nearest to that of their peer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OtherLocator {
    kind: TransportKind,
    len: u8,
    /// Zeros beyond `len`, so that the derived comparisons are right.
    bytes: [u8; MAX_LOCATOR],
}

impl OtherLocator {
    /// A locator of these bytes: at least one, and at most [`MAX_LOCATOR`]. `None` if there are too few or too many, or
    /// if the kind is TCP, which has addresses.
    pub fn new(kind: TransportKind, bytes: &[u8]) -> Option<Self> {
        let fits = (1..=MAX_LOCATOR).contains(&bytes.len()) && kind != TransportKind::TCP;
        fits.then(|| {
            let mut all = [0; MAX_LOCATOR];
            all[..bytes.len()].copy_from_slice(bytes);
            OtherLocator {
                kind,
                // At most MAX_LOCATOR, which fits.
                len: bytes.len() as u8,
                bytes: all,
            }
        })
    }

    /// The kind of transport.
    pub fn kind(&self) -> TransportKind {
        self.kind
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

impl fmt::Debug for OtherLocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/", self.kind)?;
        self.bytes().iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

/// `10.0.0.1:80`, or `verbs/0a0b`: the kind and the bytes.
impl fmt::Display for Locator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Locator::Tcp(addr) => addr.fmt(f),
            Locator::Other(other) => fmt::Debug::fmt(other, f),
        }
    }
}

/// The text is not a locator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoLocator;

impl fmt::Display for NoLocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("neither an address and a port nor a kind and its bytes")
    }
}

impl std::error::Error for NoLocator {}

impl FromStr for TransportKind {
    type Err = NoLocator;

    fn from_str(text: &str) -> Result<Self, NoLocator> {
        match text {
            "tcp" => Ok(TransportKind::TCP),
            "verbs" => Ok(TransportKind::VERBS),
            "relay" => Ok(TransportKind::RELAY),
            _ => {
                let number = text.strip_prefix("kind").ok_or(NoLocator)?;
                number.parse().map(TransportKind).map_err(|_| NoLocator)
            }
        }
    }
}

impl FromStr for Locator {
    type Err = NoLocator;

    fn from_str(text: &str) -> Result<Self, NoLocator> {
        let Some((kind, digits)) = text.split_once('/') else {
            return text.parse().map(Locator::Tcp).map_err(|_| NoLocator);
        };
        let pairs = digits.as_bytes().chunks(2);
        let byte = |pair: &[u8]| {
            let digit = |b: &u8| char::from(*b).to_digit(16);
            match pair {
                [high, low] => u8::try_from(digit(high)? << 4 | digit(low)?).ok(),
                _ => None,
            }
        };
        let bytes: Option<Vec<u8>> = pairs.map(byte).collect();
        let other = OtherLocator::new(kind.parse()?, &bytes.ok_or(NoLocator)?);
        other.map(Locator::Other).ok_or(NoLocator)
    }
}

impl Serialize for Locator {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Locator {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(de::Error::custom)
    }
}

/// The two ends of a connection to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Path {
    /// For TCP: the local address to bind to. If it is `None` the kernel chooses.
    pub local: Option<IpAddr>,
    /// How the peer is reached.
    #[serde(rename = "remote")]
    pub to: Locator,
}

impl Path {
    /// The kind of transport.
    pub fn kind(&self) -> TransportKind {
        self.to.kind()
    }

    /// A path whose local end the transport chooses.
    pub fn to(to: impl Into<Locator>) -> Self {
        Path {
            local: None,
            to: to.into(),
        }
    }
}

/// The transports of an endpoint: how peers reach it, and which kinds it uses itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Transports {
    /// The endpoint's addresses. Both ports can be reached at each of them.
    pub addrs: Vec<IpAddr>,
    /// TCP port of the resume listener.
    pub resume_port: u16,
    /// UDP port of the control socket.
    pub control_port: u16,
    /// How it is reached by other kinds. The first [`MAX_LOCATORS`](crate::wire::MAX_LOCATORS) are announced.
    pub locators: Vec<OtherLocator>,
    /// The kinds of which it can make connections, the preferred one first. TCP is always one of them: it is the last
    /// if the list does not name it.
    pub kinds: Vec<TransportKind>,
}

impl Transports {
    /// TCP only.
    pub fn tcp(addrs: Vec<IpAddr>, resume_port: u16, control_port: u16) -> Self {
        Transports {
            addrs,
            resume_port,
            control_port,
            ..Transports::default()
        }
    }

    /// The kinds in order of preference: each once, TCP included.
    pub(crate) fn order(&self) -> impl Iterator<Item = TransportKind> {
        let named = self.kinds.iter().enumerate();
        let once = named.filter(|(i, kind)| !self.kinds[..*i].contains(kind));
        let tcp = (!self.kinds.contains(&TransportKind::TCP)).then_some(TransportKind::TCP);
        once.map(|(_, kind)| *kind).chain(tcp)
    }

    /// Whether it has a kind other than TCP.
    pub(crate) fn has_others(&self) -> bool {
        self.kinds.iter().any(|kind| *kind != TransportKind::TCP)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OTHER: TransportKind = TransportKind::TEST;

    #[test]
    fn a_locator_of_another_kind_has_between_1_and_64_bytes() {
        let of = |n: usize| OtherLocator::new(OTHER, &vec![7; n]);
        assert_eq!(of(0), None);
        assert_eq!(of(MAX_LOCATOR + 1), None);
        assert_eq!(OtherLocator::new(TransportKind::TCP, &[1]), None);
        for n in [1, MAX_LOCATOR] {
            let locator = of(n).unwrap();
            assert_eq!((locator.kind(), locator.bytes()), (OTHER, &vec![7; n][..]));
        }
        assert_ne!(
            OtherLocator::new(OTHER, &[7, 0]),
            OtherLocator::new(OTHER, &[7])
        );
    }

    #[test]
    fn a_printed_locator_is_read_back() {
        let others = [(OTHER, &[0, 0xab][..]), (TransportKind::VERBS, &[1; 64])];
        let others = others.map(|(kind, bytes)| OtherLocator::new(kind, bytes).unwrap().into());
        let tcp = ["10.0.0.1:80", "[fe80::1%3]:7"].map(|a| Locator::Tcp(a.parse().unwrap()));
        for locator in others.into_iter().chain(tcp) {
            assert_eq!(locator.to_string().parse(), Ok(locator), "{locator}");
        }
        assert_eq!(others[0].to_string(), "kind240/00ab");
        for wrong in [
            "",
            "80",
            "tcp/01",
            "verbs/",
            "verbs/1",
            "verbs/xy",
            "kind/01",
            "kind256/01",
            "verbs/+1",
        ] {
            assert!(wrong.parse::<Locator>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn tcp_is_always_among_the_kinds() {
        let order = |kinds: &[TransportKind]| {
            let kinds = kinds.to_vec();
            let transports = Transports {
                kinds,
                ..Transports::default()
            };
            transports.order().collect::<Vec<_>>()
        };
        let (tcp, verbs) = (TransportKind::TCP, TransportKind::VERBS);
        assert_eq!(order(&[]), [tcp]);
        assert_eq!(order(&[OTHER, verbs]), [OTHER, verbs, tcp]);
        assert_eq!(order(&[tcp, OTHER, tcp, OTHER]), [tcp, OTHER]);
    }
}
