//! Notes between processes that share a listener: `docs/PROTOCOL.md`, section "Listeners shared by several processes".

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use slim_core::wire;

/// The secret that all processes which descend from one process by `fork` share, once that process has drawn it.
static LINEAGE: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// The secret of this process and the processes related to it by `fork`.
pub(crate) fn lineage() -> [u8; 16] {
    let mut secret = [0; 16];
    for (bytes, half) in secret.chunks_mut(8).zip(&LINEAGE) {
        bytes.copy_from_slice(&half.load(Ordering::Relaxed).to_ne_bytes());
    }
    secret
}

/// Draws the secret, unless this process has inherited one.
pub(crate) fn draw_lineage() -> io::Result<()> {
    for half in &LINEAGE {
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(io::Error::other)?;
        let random = u64::from_ne_bytes(random) | 1;
        // The first thread to store its value wins.
        let _ = half.compare_exchange(0, random, Ordering::Relaxed, Ordering::Relaxed);
    }
    Ok(())
}

/// Distinguishes connections with the same two ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Which {
    /// How long the connection has existed; the longest time if that is not known.
    pub(crate) age: Duration,
    /// The kernel's number of the connection (`SO_COOKIE`), if known.
    pub(crate) connection: Option<u64>,
}

impl Default for Which {
    fn default() -> Self {
        Which {
            age: Duration::MAX,
            connection: None,
        }
    }
}

impl Which {
    /// Encoded length: the age in milliseconds, and the number or 0.
    const LEN: usize = 4 + 8;

    fn encode(self) -> [u8; Self::LEN] {
        let millis = u32::try_from(self.age.as_millis()).unwrap_or(u32::MAX);
        let mut data = [0; Self::LEN];
        data[..4].copy_from_slice(&millis.to_be_bytes());
        data[4..].copy_from_slice(&self.connection.unwrap_or(0).to_be_bytes());
        data
    }

    fn decode(data: &[u8]) -> Option<Self> {
        let (millis, connection) = data.split_first_chunk()?;
        let age = match u32::from_be_bytes(*millis) {
            u32::MAX => Duration::MAX,
            millis => Duration::from_millis(millis.into()),
        };
        let connection = u64::from_be_bytes(connection.try_into().ok()?);
        Some(Which {
            age,
            connection: (connection != 0).then_some(connection),
        })
    }
}

/// A note between processes of one host.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Note {
    /// To the owner: the sender has accepted this connection (our end, their end).
    Claim(SocketAddr, SocketAddr, Which),
    /// To the owner: this connection is over.
    Drop(SocketAddr, SocketAddr),
    /// From the owner: a HELLO, with its source, its destination and its data.
    Hello(SocketAddr, SocketAddr, Vec<u8>),
    /// To the owner: the sender wants the UDP port of this listener for itself.
    Release(SocketAddr),
    /// From the owner: the UDP port of this listener was released to another process.
    Given(SocketAddr),
}

/// Length of kind, secret and two addresses.
const NOTE_HEAD: usize = 1 + 16 + 2 * ADDR;
const ADDR: usize = 18;
/// The longest note contains a protocol message.
pub(crate) const LONGEST: usize = NOTE_HEAD + wire::MAX_LEN;

impl Note {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let which;
        let (kind, a, b, data): (_, _, _, &[u8]) = match self {
            Note::Claim(a, b, it) => {
                which = it.encode();
                (1, a, b, &which)
            }
            Note::Drop(a, b) => (2, a, b, &[]),
            Note::Hello(a, b, data) => (3, a, b, data),
            Note::Release(a) => (4, a, a, &[]),
            Note::Given(a) => (5, a, a, &[]),
        };
        let mut note = vec![kind];
        // Any process may have taken an owner's name, so it is not told the secret.
        let secret = match self {
            Note::Release(_) => [0; 16],
            _ => lineage(),
        };
        note.extend(secret);
        for addr in [a, b] {
            let ip = match addr.ip() {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            };
            note.extend(ip.octets());
            note.extend(addr.port().to_be_bytes());
        }
        note.extend(data);
        note
    }

    /// The note, and the sender's secret.
    pub(crate) fn decode(note: &[u8]) -> Option<(Self, [u8; 16])> {
        let (head, data) = note.split_at_checked(NOTE_HEAD)?;
        let (kind, rest) = head.split_first()?;
        let (secret, addrs) = rest.split_first_chunk::<16>()?;
        let (a, b) = addrs.split_at_checked(ADDR)?;
        let (a, b) = (addr(a)?, addr(b)?);
        let note = match (kind, data) {
            (1, which) => Note::Claim(a, b, Which::decode(which)?),
            (2, []) => Note::Drop(a, b),
            (3, [_, ..]) => Note::Hello(a, b, data.to_vec()),
            (4, []) if a == b => Note::Release(a),
            (5, []) if a == b => Note::Given(a),
            _ => return None,
        };
        Some((note, *secret))
    }
}

fn addr(bytes: &[u8]) -> Option<SocketAddr> {
    let (ip, port) = bytes.split_first_chunk::<16>()?;
    let port = u16::from_be_bytes(port.try_into().ok()?);
    let ip = Ipv6Addr::from(*ip).to_canonical();
    Some(SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn notes_are_decoded_as_they_were_encoded() {
        let (a, b) = (at("10.0.0.1:80"), at("[fd00::1]:7"));
        let which = Which {
            age: Duration::from_millis(7),
            connection: Some(1 << 40),
        };
        for note in [
            Note::Claim(a, b, which),
            Note::Drop(b, a),
            Note::Hello(a, b, vec![1, 2, 3]),
            Note::Given(b),
        ] {
            let bytes = note.encode();
            assert_eq!(Note::decode(&bytes).unwrap(), (note, lineage()));
            assert_eq!(Note::decode(&bytes[..NOTE_HEAD - 1]), None);
        }
        let (release, secret) = Note::decode(&Note::Release(a).encode()).unwrap();
        assert_eq!((release, secret), (Note::Release(a), [0; 16]));
        assert_eq!(Note::decode(&[]), None);
        let any = Note::Claim(a, b, Which::default());
        let claim = any.encode();
        assert_eq!(Note::decode(&claim).unwrap().0, any);
        let mut longer = claim.clone();
        longer.push(0);
        assert_eq!(Note::decode(&longer), None);
        let mut unknown = claim;
        unknown[0] = 9;
        assert_eq!(Note::decode(&unknown), None);
    }

    #[test]
    fn the_secret_is_drawn_once() {
        draw_lineage().unwrap();
        let secret = lineage();
        assert!(secret.iter().any(|byte| *byte != 0));
        draw_lineage().unwrap();
        assert_eq!(lineage(), secret);
    }
}
