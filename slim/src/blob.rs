//! Flows opened by blob: the blob that an endpoint publishes, and the messages that two ends exchange on a new connection.
//!
//! ```text
//!  connector                                     acceptor, at the door of its endpoint
//!     │   (has the endpoint's blob: addresses, port of the door, secret)
//!     │  TCP connect ────────────────────────────► │
//!     │  INTRODUCTION: random, identity ─────────► │
//!     │ ◄─────────────── WELCOME: random, identity │
//!     │  PROOF ──────────────────────────────────► │  opens the flow as agreed
//!     │ ◄──────────────────────────────── ADMITTED │
//!     │  opens the flow as agreed                  │
//!     │ ◄═══════ bytes of the program ═══════════► │
//! ```
//!
//! Each message carries an HMAC ("code") under the *door key*, which is derived from the job key, the job's name and the blob's secret.
//! The flow's two secrets are derived from both random numbers and the door key. `slim-core` derives the flow's key from these secrets
//! and the job key. So an observer of the connection that lacks the blob has neither the secrets nor the key.
//! The code of each answer covers the message that it answers, so recorded messages cannot be replayed.
//! Once the connector has read ADMITTED, both ends know the flow, and either can resume it.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use hmac::{Hmac, KeyInit, Mac as _};
use sha2::Sha256;
use slim_core::auth::{JobKey, code_with_job};
use slim_core::endpoint::{Agreed, Announcement};
use slim_core::wire::MAX_ADDRS;
use slim_core::{EndpointId, FlowId};
use slim_sys::Errno;

const BLOB_MAGIC: [u8; 8] = *b"SLIMBLB1";
const INTRODUCTION_MAGIC: [u8; 8] = *b"SLIMINT1";
const WELCOME_MAGIC: [u8; 8] = *b"SLIMWEL1";

/// Bytes of the code at the end of a message.
const CODE: usize = 32;
/// Host, process, incarnation, features, two ports, the number of addresses, and the addresses.
const DESCRIPTION: usize = 16 + 4 + 8 + 8 + 2 + 2 + 1 + MAX_ADDRS * 16;
/// Bytes of an introduction.
pub(crate) const INTRODUCTION: usize = 8 + 32 + DESCRIPTION + CODE;
/// Bytes of a welcome.
pub(crate) const WELCOME: usize = INTRODUCTION;
/// Bytes of a proof.
pub(crate) const PROOF: usize = CODE;
/// Bytes of the last message, ADMITTED.
pub(crate) const ADMITTED: usize = CODE;

/// Why a blob cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlobError {
    /// It is not a blob, or has another version, or is damaged.
    Garbage,
    /// It was made with another job key or by another job; or its contents are damaged.
    OtherJob,
}

/// What an endpoint publishes.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Blob {
    /// Addresses of the door.
    pub(crate) doors: Vec<SocketAddr>,
    pub(crate) secret: [u8; 32],
}

/// The properties of a job that its blobs depend on.
pub(crate) struct JobOf<'a> {
    pub(crate) key: Option<&'a JobKey>,
    pub(crate) name: &'a str,
}

/// The key of the messages of all introductions with one blob.
#[derive(Clone)]
pub(crate) struct DoorKey([u8; 32]);

/// Random bytes for cryptographic use.
pub(crate) fn random() -> Result<[u8; 32], Errno> {
    let mut random = [0; 32];
    getrandom::fill(&mut random).map_err(|e| e.raw_os_error().unwrap_or(libc::EIO))?;
    Ok(random)
}

fn code(key: &[u8], label: &[u8], parts: &[&[u8]]) -> [u8; 32] {
    let mut code = Hmac::<Sha256>::new_from_slice(key).expect("a key of any length will do");
    code.update(label);
    parts.iter().for_each(|part| code.update(part));
    code.finalize().into_bytes().into()
}

/// Compares codes in constant time.
fn is_code(key: &[u8], label: &[u8], parts: &[&[u8]], said: &[u8]) -> bool {
    let mut code = Hmac::<Sha256>::new_from_slice(key).expect("a key of any length will do");
    code.update(label);
    parts.iter().for_each(|part| code.update(part));
    code.verify_slice(said).is_ok()
}

impl JobOf<'_> {
    fn code(&self, label: &[u8], parts: &[&[u8]]) -> [u8; 32] {
        code_with_job(self.key, label, parts)
    }

    /// The key for an endpoint with this secret.
    pub(crate) fn door_key(&self, secret: &[u8; 32]) -> DoorKey {
        let name = self.name.as_bytes();
        DoorKey(self.code(b"slim door key v1", &[secret, name]))
    }
}

impl Blob {
    /// Magic, number of addresses, addresses, secret, code.
    pub(crate) fn encode(&self, job: &JobOf<'_>) -> Vec<u8> {
        let mut bytes = BLOB_MAGIC.to_vec();
        bytes.push(self.doors.len() as u8);
        for door in &self.doors {
            bytes.extend(octets(door.ip()));
            bytes.extend(door.port().to_be_bytes());
        }
        bytes.extend(self.secret);
        let code = job.code(b"slim blob v1", &[job.name.as_bytes(), &bytes]);
        bytes.extend(code);
        bytes
    }

    pub(crate) fn decode(bytes: &[u8], job: &JobOf<'_>) -> Result<Self, BlobError> {
        let (said, code) = bytes.split_last_chunk::<CODE>().ok_or(BlobError::Garbage)?;
        let mut reader = BlobReader(said);
        let blob = (|| {
            (reader.take()? == BLOB_MAGIC).then_some(())?;
            let [count] = reader.take()?;
            let doors = (0..count)
                .map(|_| Some((address(reader.take()?), reader.number()?).into()))
                .collect::<Option<Vec<SocketAddr>>>()?;
            let secret = reader.take()?;
            (reader.0.is_empty() && !doors.is_empty()).then_some(Self { doors, secret })
        })();
        let blob = blob.ok_or(BlobError::Garbage)?;
        let right = job.code(b"slim blob v1", &[job.name.as_bytes(), said]);
        let differ = right.iter().zip(code).fold(0, |all, (a, b)| all | a ^ b);
        // A wrong code can mean damage or another key. In well-formed bytes another job is the likelier cause.
        match differ {
            0 => Ok(blob),
            _ => Err(BlobError::OtherJob),
        }
    }
}

/// The connector's first message.
pub(crate) struct Introduction {
    pub(crate) random: [u8; 32],
    pub(crate) who: Announcement,
}

impl Introduction {
    pub(crate) fn encode(&self, key: &DoorKey) -> Vec<u8> {
        let mut bytes = INTRODUCTION_MAGIC.to_vec();
        bytes.extend(self.random);
        describe(&self.who, &mut bytes);
        let code = code(&key.0, b"slim introduction v1", &[&bytes]);
        bytes.extend(code);
        bytes
    }

    pub(crate) fn decode(bytes: &[u8], key: &DoorKey) -> Option<Self> {
        let (said, code) = bytes.split_last_chunk::<CODE>()?;
        is_code(&key.0, b"slim introduction v1", &[said], code).then_some(())?;
        let mut reader = BlobReader(said);
        (reader.take()? == INTRODUCTION_MAGIC).then_some(())?;
        Some(Self {
            random: reader.take()?,
            who: described(&mut reader)?,
        })
    }
}

/// The acceptor's answer to an introduction; its code covers the introduction (`asked`).
pub(crate) struct Welcome {
    pub(crate) random: [u8; 32],
    pub(crate) who: Announcement,
}

impl Welcome {
    pub(crate) fn encode(&self, asked: &[u8], key: &DoorKey) -> Vec<u8> {
        let mut bytes = WELCOME_MAGIC.to_vec();
        bytes.extend(self.random);
        describe(&self.who, &mut bytes);
        let code = code(&key.0, b"slim welcome v1", &[asked, &bytes]);
        bytes.extend(code);
        bytes
    }

    pub(crate) fn decode(bytes: &[u8], asked: &[u8], key: &DoorKey) -> Option<Self> {
        let (said, code) = bytes.split_last_chunk::<CODE>()?;
        is_code(&key.0, b"slim welcome v1", &[asked, said], code).then_some(())?;
        let mut reader = BlobReader(said);
        (reader.take()? == WELCOME_MAGIC).then_some(())?;
        Some(Self {
            random: reader.take()?,
            who: described(&mut reader)?,
        })
    }
}

/// PROOF, the connector's last message.
pub(crate) fn proof(welcome: &[u8], key: &DoorKey) -> [u8; PROOF] {
    code(&key.0, b"slim proof v1", &[welcome])
}

/// Whether `said` is the proof for that welcome.
pub(crate) fn is_proof(said: &[u8], welcome: &[u8], key: &DoorKey) -> bool {
    is_code(&key.0, b"slim proof v1", &[welcome], said)
}

/// ADMITTED, the acceptor's last message.
pub(crate) fn admitted(proof: &[u8], key: &DoorKey) -> [u8; ADMITTED] {
    code(&key.0, b"slim admitted v1", &[proof])
}

/// Whether `said` is ADMITTED for that proof.
pub(crate) fn is_admitted(said: &[u8], proof: &[u8], key: &DoorKey) -> bool {
    is_code(&key.0, b"slim admitted v1", &[proof], said)
}

/// The agreement with which both ends open the flow. `randoms`: the connector's random number, then the acceptor's.
pub(crate) fn agreed(key: &DoorKey, randoms: [&[u8; 32]; 2], peer: Announcement) -> Agreed {
    let made = |label: &[u8]| code(&key.0, label, &[randoms[0], randoms[1]]);
    // The name is half of the code. Both random numbers enter it, so neither end alone can repeat an earlier flow's name.
    let name = made(b"slim flow name v1");
    let mut flow = [0; 16];
    flow.copy_from_slice(&name[..16]);
    // The lowest bit is cleared: no earlier connection with the same addresses is to be considered (see `FlowId`).
    flow[15] &= !1;
    Agreed {
        flow: FlowId(flow),
        secrets: [
            made(b"slim connector's secret v1"),
            made(b"slim acceptor's secret v1"),
        ],
        peer,
    }
}

fn octets(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

fn address(octets: [u8; 16]) -> IpAddr {
    Ipv6Addr::from(octets).to_canonical()
}

/// Encodes an announcement. Locators of transports other than TCP are left out: the library's flows do not accept such transports.
fn describe(who: &Announcement, bytes: &mut Vec<u8>) {
    bytes.extend(who.id.host);
    bytes.extend(who.id.pid.to_be_bytes());
    bytes.extend(who.id.incarnation.to_be_bytes());
    bytes.extend(who.features.to_be_bytes());
    bytes.extend(who.resume_port.to_be_bytes());
    bytes.extend(who.control_port.to_be_bytes());
    let count = who.addrs.len().min(MAX_ADDRS);
    bytes.push(count as u8);
    for n in 0..MAX_ADDRS {
        let ip = who.addrs.get(n).filter(|_| n < count);
        bytes.extend(ip.map_or([0; 16], |ip| octets(*ip)));
    }
}

fn described(reader: &mut BlobReader<'_>) -> Option<Announcement> {
    let id = EndpointId {
        host: reader.take()?,
        pid: u32::from_be_bytes(reader.take()?),
        incarnation: u64::from_be_bytes(reader.take()?),
    };
    let features = u64::from_be_bytes(reader.take()?);
    let (resume_port, control_port) = (reader.number()?, reader.number()?);
    let [count] = reader.take()?;
    let addrs: Vec<[u8; 16]> = (0..MAX_ADDRS)
        .map(|_| reader.take())
        .collect::<Option<_>>()?;
    let addrs = addrs.get(..count.into())?;
    reader.0.is_empty().then(|| Announcement {
        id,
        features,
        addrs: addrs.iter().map(|octets| address(*octets)).collect(),
        resume_port,
        control_port,
        serial: 1,
        locators: Vec::new(),
    })
}

/// Takes values from the front of a byte slice.
struct BlobReader<'a>(&'a [u8]);

impl BlobReader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*taken)
    }

    fn number(&mut self) -> Option<u16> {
        self.take().map(u16::from_be_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn who() -> Announcement {
        Announcement {
            id: EndpointId {
                host: [7; 16],
                pid: 42,
                incarnation: 1 << 40,
            },
            features: 1,
            addrs: vec!["127.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()],
            resume_port: 1000,
            control_port: 2000,
            serial: 1,
            locators: Vec::new(),
        }
    }

    fn job<'a>(key: Option<&'a JobKey>, name: &'a str) -> JobOf<'a> {
        JobOf { key, name }
    }

    #[test]
    fn a_blob_decodes_only_unchanged_and_for_its_job() {
        let key = JobKey::new(b"a key of the job's");
        let (key, other) = (key.as_ref(), JobKey::new(b"a key of another job"));
        let blob = Blob {
            doors: vec![
                "10.0.0.1:7".parse().unwrap(),
                "[fd00::1]:8".parse().unwrap(),
            ],
            secret: [9; 32],
        };
        let bytes = blob.encode(&job(key, "job"));
        assert!(Blob::decode(&bytes, &job(key, "job")).unwrap() == blob);
        for wrong in [
            job(None, "job"),
            job(other.as_ref(), "job"),
            job(key, "other"),
        ] {
            assert_eq!(
                Blob::decode(&bytes, &wrong).err(),
                Some(BlobError::OtherJob)
            );
        }
        for n in 0..bytes.len() {
            assert!(Blob::decode(&bytes[..n], &job(key, "job")).is_err());
            let mut changed = bytes.clone();
            changed[n] ^= 1;
            assert!(Blob::decode(&changed, &job(key, "job")).is_err(), "{n}");
        }
        let mut longer = bytes;
        longer.push(0);
        assert!(Blob::decode(&longer, &job(key, "job")).is_err());
    }

    #[test]
    fn introduction_messages_round_trip_and_changed_or_foreign_ones_are_refused() {
        let key = job(None, "job").door_key(&[3; 32]);
        let said = Introduction {
            random: [1; 32],
            who: who(),
        };
        let asked = said.encode(&key);
        assert_eq!(asked.len(), INTRODUCTION);
        let heard = Introduction::decode(&asked, &key).unwrap();
        assert_eq!((heard.random, heard.who), ([1; 32], who()));
        let answer = Welcome {
            random: [2; 32],
            who: who(),
        };
        let told = answer.encode(&asked, &key);
        assert_eq!(told.len(), WELCOME);
        let answer = Welcome::decode(&told, &asked, &key).unwrap();
        assert_eq!((answer.random, answer.who), ([2; 32], who()));
        // Refused: a welcome for another introduction, and an introduction under another secret.
        assert!(Welcome::decode(&told, &told, &key).is_none());
        let other = job(None, "job").door_key(&[4; 32]);
        assert!(Introduction::decode(&asked, &other).is_none());
        for n in 0..asked.len() {
            let mut changed = asked.clone();
            changed[n] ^= 0x10;
            assert!(Introduction::decode(&changed, &key).is_none(), "{n}");
        }
        let proof = super::proof(&told, &key);
        assert!(is_proof(&proof, &told, &key));
        assert!(!is_proof(&proof, &asked, &key) && !is_proof(&proof, &told, &other));
        let admitted = super::admitted(&proof, &key);
        assert!(is_admitted(&admitted, &proof, &key));
        assert!(!is_admitted(&proof, &proof, &key) && !is_admitted(&admitted, &told, &key));
        // The random numbers alone do not give the secrets: another door key gives other ones.
        let randoms = [&[1; 32], &[2; 32]];
        let ours = agreed(&key, randoms, who()).secrets;
        assert_ne!(ours, agreed(&other, randoms, who()).secrets);
        assert_ne!(ours[0], ours[1]);
        assert_ne!(ours[0], [1; 32]);
    }
}
