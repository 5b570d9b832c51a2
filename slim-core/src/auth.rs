//! Authentication: `docs/PROTOCOL.md`, section "Keys and authentication codes".
//!
//! There are two keys. The *job key* is a secret that all processes of a job were started with, if
//! the user gave one. The *flow key* belongs to one flow; both ends derive it from the job key and
//! from the contents of HELLO and HELLO_ACK. Messages about a flow that both ends know are
//! authenticated with its key; messages from before that with the job key, or not at all if there
//! is none.
//!
//! A code with a flow key covers the role of the sender and the kind of the message, so that a message
//! cannot be reflected to its sender. In a resume it also covers the fresh nonces of both sides, so that
//! a message recorded on another connection does not verify on this one.

use std::fmt;
use std::sync::Arc;

use hmac::{Hmac, KeyInit, Mac as _};
use sha2::Sha256;

use crate::ids::{EndpointId, FlowId, Nonce, Role};
use crate::saved::Saved;
use crate::wire::{self, Hello, MAC_LEN, Mac, Message, Open, PairId, Parsed, layout::header};

const FLOW_KEY_LABEL: &[u8] = b"slim flow key v1";
const PAIR_KEY_LABEL: &[u8] = b"slim pair key v1";
const PAIR_FLOW_LABEL: &[u8] = b"slim pair flow v1";
const HOST_LABEL: &[u8] = b"slim host id v1";
const ANSWER_LABEL: &[u8] = b"slim answer v1";
const FLOW_MAC_LABEL: &[u8] = b"slim flow mac v1";
const JOB_MAC_LABEL: &[u8] = b"slim job mac v1";

/// The authentication code of a message for which there is no key.
const NO_MAC: Mac = [0; MAC_LEN];

/// A secret shared by all processes of a job. Never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct JobKey(Arc<[u8]>);

impl JobKey {
    /// A key of these bytes. `None` if there are no bytes: an empty key is no secret.
    pub fn new(secret: &[u8]) -> Option<JobKey> {
        (!secret.is_empty()).then(|| JobKey(secret.into()))
    }
}

impl fmt::Debug for JobKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobKey(..)")
    }
}

/// The inputs of a flow key, the same at both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyInputs {
    /// Name of the flow.
    pub flow: FlowId,
    /// Random bytes from HELLO.
    pub random_c: [u8; 32],
    /// Random bytes from HELLO_ACK.
    pub random_s: [u8; 32],
    /// The endpoint in HELLO.
    pub connector: EndpointId,
    /// The endpoint in HELLO_ACK.
    pub acceptor: EndpointId,
}

/// The nonces that bind a code to one resume connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fresh {
    /// Control channel: a message that has to be fresh has a nonce among its fields.
    None,
    /// RESUME: the initiator answers the CHALLENGE of the responder.
    Responder(Nonce),
    /// RESUME_OK, CONFIRM, REFUSE: both sides have sent their nonces.
    Both {
        /// From CHALLENGE.
        nonce_r: Nonce,
        /// From RESUME.
        nonce_i: Nonce,
    },
}

/// The secret of one flow. Never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct FlowKey([u8; 32]);

impl FlowKey {
    /// Derives the key; both ends get the same from the same inputs.
    pub fn derive(job: Option<&JobKey>, inputs: &KeyInputs) -> FlowKey {
        let mut hmac = keyed(job.map_or(&[], |key| &key.0));
        hmac.update(FLOW_KEY_LABEL);
        hmac.update(&inputs.flow.0);
        hmac.update(&inputs.random_c);
        hmac.update(&inputs.random_s);
        for endpoint in [&inputs.connector, &inputs.acceptor] {
            hmac.update(&endpoint.host);
            hmac.update(&endpoint.pid.to_be_bytes());
            hmac.update(&endpoint.incarnation.to_be_bytes());
        }
        FlowKey(hmac.finalize().into_bytes().into())
    }

    /// The key of a pair, from that of the flow under which it was agreed on.
    pub fn of_pair(&self, pair: PairId) -> FlowKey {
        let mut hmac = keyed(&self.0);
        hmac.update(PAIR_KEY_LABEL);
        hmac.update(&pair.0);
        FlowKey(hmac.finalize().into_bytes().into())
    }

    /// See [`Prepared::seal`].
    pub fn seal(&self, from: Role, fresh: Fresh, message: &Message) -> Vec<u8> {
        self.prepare().seal(from, fresh, message)
    }

    /// See [`Prepared::verify`].
    #[must_use]
    pub fn verify(&self, from: Role, fresh: Fresh, parsed: &Parsed<'_>) -> bool {
        self.prepare().verify(from, fresh, parsed)
    }

    /// The key, prepared for several messages.
    pub fn prepare(&self) -> Prepared {
        Prepared(keyed(&self.0))
    }
}

impl Saved for FlowKey {
    fn save(&self, out: &mut Vec<u8>) {
        self.0.save(out);
    }

    fn load(from: &mut &[u8]) -> Option<Self> {
        Saved::load(from).map(FlowKey)
    }
}

/// A [`FlowKey`] after the part of the work that is the same for all messages, two fifths of the whole. Never printed.
#[derive(Clone)]
pub struct Prepared(Hmac<Sha256>);

impl Prepared {
    /// Encodes `message`, with the authentication code of the side whose role is `from`.
    pub fn seal(&self, from: Role, fresh: Fresh, message: &Message) -> Vec<u8> {
        wire::encode(message, |covered| {
            truncated(self.over(from, fresh, covered))
        })
    }

    /// Whether the authentication code is that of the side whose role is `from`. The check takes the
    /// same time for every wrong code.
    #[must_use]
    pub fn verify(&self, from: Role, fresh: Fresh, parsed: &Parsed<'_>) -> bool {
        let hmac = self.over(from, fresh, parsed.covered);
        hmac.verify_truncated_left(&parsed.mac).is_ok()
    }

    /// For the key of a pair: derives the key of the flow that `open`, an OPEN of this pair, is about.
    pub fn of_flow(&self, open: &Open) -> FlowKey {
        let encoded = wire::encode(&Message::Open(*open), |_| NO_MAC);
        let mut hmac = self.0.clone();
        hmac.update(PAIR_FLOW_LABEL);
        hmac.update(&encoded);
        FlowKey(hmac.finalize().into_bytes().into())
    }

    fn over(&self, from: Role, fresh: Fresh, covered: &[u8]) -> Hmac<Sha256> {
        let mut hmac = self.0.clone();
        hmac.update(FLOW_MAC_LABEL);
        let direction = match from {
            Role::Connector => b'c',
            Role::Acceptor => b'a',
        };
        hmac.update(&[direction, covered[header::KIND]]);
        // The kind determines how many nonces follow, so different inputs never give the same bytes.
        match fresh {
            Fresh::None => {}
            Fresh::Responder(nonce_r) => hmac.update(&nonce_r.0),
            Fresh::Both { nonce_r, nonce_i } => {
                hmac.update(&nonce_r.0);
                hmac.update(&nonce_i.0);
            }
        }
        hmac.update(covered);
        hmac
    }
}

impl fmt::Debug for Prepared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Prepared(..)")
    }
}

impl fmt::Debug for FlowKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FlowKey(..)")
    }
}

/// Derives a host's name from its `boot` id, which changes with every start of the kernel. All processes that know the boot
/// id derive the same name; the boot id cannot be computed from the name. `place` tells parts of one host apart: each place
/// gives another name.
pub fn host_id(boot: &[u8], place: &[&[u8]]) -> [u8; 16] {
    let mut hmac = keyed(boot);
    hmac.update(HOST_LABEL);
    for part in place {
        hmac.update(&(part.len() as u64).to_be_bytes());
        hmac.update(part);
    }
    truncated(hmac)
}

/// The acceptor's part of a flow key. It is derived from `secret`, which never leaves the acceptor, and
/// from the whole HELLO. So a HELLO that was forgotten gets the same answer when it comes again, and an
/// answer for one connection is useless for another.
pub(crate) fn answer_random(secret: &[u8; 32], hello: &Hello) -> [u8; 32] {
    let encoded = wire::encode(&Message::Hello(*hello), |_| NO_MAC);
    let mut hmac = keyed(secret);
    hmac.update(ANSWER_LABEL);
    hmac.update(&encoded);
    hmac.finalize().into_bytes().into()
}

/// A code under the job key, or under the empty key, for messages that are none of the protocol's: front ends have them. `label` says
/// what for, and begins none of the labels here.
pub fn code_with_job(job: Option<&JobKey>, label: &[u8], parts: &[&[u8]]) -> [u8; 32] {
    let mut hmac = keyed(job.map_or(&[], |key| &key.0));
    hmac.update(label);
    parts.iter().for_each(|part| hmac.update(part));
    hmac.finalize().into_bytes().into()
}

/// Encodes a `message` for which no flow key exists. The job key authenticates it; without a job
/// key the code is zeros.
pub fn seal_with_job(job: Option<&JobKey>, message: &Message) -> Vec<u8> {
    wire::encode(message, |covered| match job {
        Some(key) => truncated(over_job(key, covered)),
        None => NO_MAC,
    })
}

/// Whether the sender has our job key. Without a job key only zeros verify, so that a peer that has
/// one is noticed.
#[must_use]
pub fn verify_with_job(job: Option<&JobKey>, parsed: &Parsed<'_>) -> bool {
    match job {
        Some(key) => over_job(key, parsed.covered)
            .verify_truncated_left(&parsed.mac)
            .is_ok(),
        None => parsed.mac == NO_MAC,
    }
}

fn over_job(key: &JobKey, covered: &[u8]) -> Hmac<Sha256> {
    let mut hmac = keyed(&key.0);
    hmac.update(JOB_MAC_LABEL);
    hmac.update(covered);
    hmac
}

fn keyed(key: &[u8]) -> Hmac<Sha256> {
    Hmac::new_from_slice(key).expect("HMAC takes keys of any length")
}

fn truncated(hmac: Hmac<Sha256>) -> Mac {
    let full: [u8; 32] = hmac.finalize().into_bytes().into();
    *full.first_chunk().expect("32 bytes have a first half")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Demote, Resume};

    fn endpoint(n: u8) -> EndpointId {
        EndpointId {
            host: [n; 16],
            pid: u32::from(n),
            incarnation: u64::from(n),
        }
    }

    fn inputs() -> KeyInputs {
        KeyInputs {
            flow: FlowId([1; 16]),
            random_c: [2; 32],
            random_s: [3; 32],
            connector: endpoint(4),
            acceptor: endpoint(5),
        }
    }

    fn demote() -> Message {
        Message::Demote(Demote {
            flow: FlowId([1; 16]),
        })
    }

    #[test]
    fn hmac_matches_the_test_vector_of_rfc_4231() {
        // RFC 4231, test case 2, the first 16 bytes.
        let mut hmac = keyed(b"Jefe");
        hmac.update(b"what do ya want for nothing?");
        assert_eq!(
            truncated(hmac),
            0x5bdcc146bf60754e6a042426089575c7_u128.to_be_bytes()
        );
    }

    #[test]
    fn every_input_changes_the_flow_key() {
        let base = inputs();
        let job = JobKey::new(b"secret").unwrap();
        let keys = [
            FlowKey::derive(None, &base),
            FlowKey::derive(Some(&job), &base),
            FlowKey::derive(
                None,
                &KeyInputs {
                    flow: FlowId([9; 16]),
                    ..base
                },
            ),
            FlowKey::derive(
                None,
                &KeyInputs {
                    random_c: [9; 32],
                    ..base
                },
            ),
            FlowKey::derive(
                None,
                &KeyInputs {
                    random_s: [9; 32],
                    ..base
                },
            ),
            FlowKey::derive(
                None,
                &KeyInputs {
                    connector: endpoint(9),
                    ..base
                },
            ),
            FlowKey::derive(
                None,
                &KeyInputs {
                    acceptor: endpoint(9),
                    ..base
                },
            ),
            FlowKey::derive(
                None,
                &KeyInputs {
                    connector: base.acceptor,
                    acceptor: base.connector,
                    ..base
                },
            ),
        ];
        for (i, a) in keys.iter().enumerate() {
            assert!(
                keys[i + 1..].iter().all(|b| a != b),
                "key {i} is not unique"
            );
        }
        assert!(keys[0] == FlowKey::derive(None, &base));
    }

    #[test]
    fn a_code_verifies_only_for_its_role_nonces_key_and_bytes() {
        let key = FlowKey::derive(None, &inputs());
        let (r, i) = (Nonce([7; 16]), Nonce([8; 16]));
        let fresh = Fresh::Responder(r);
        let message = Message::Resume(Resume {
            flow: FlowId([1; 16]),
            epoch: 3,
            nonce_i: i,
        });
        let mut bytes = key.seal(Role::Connector, fresh, &message);

        let parsed = wire::parse(&bytes).unwrap();
        assert!(key.verify(Role::Connector, fresh, &parsed));
        assert!(!key.verify(Role::Acceptor, fresh, &parsed));
        assert!(!key.verify(Role::Connector, Fresh::None, &parsed));
        assert!(!key.verify(Role::Connector, Fresh::Responder(i), &parsed));
        assert!(!key.verify(
            Role::Connector,
            Fresh::Both {
                nonce_r: r,
                nonce_i: i
            },
            &parsed
        ));
        let other = FlowKey::derive(JobKey::new(b"x").as_ref(), &inputs());
        assert!(!other.verify(Role::Connector, fresh, &parsed));

        for at in wire::HEADER_LEN..bytes.len() {
            bytes[at] ^= 1;
            let parsed = wire::parse(&bytes).unwrap();
            assert!(
                !key.verify(Role::Connector, fresh, &parsed),
                "byte {at} does not matter"
            );
            bytes[at] ^= 1;
        }
    }

    #[test]
    fn swapped_nonces_do_not_verify() {
        let key = FlowKey::derive(None, &inputs());
        let (a, b) = (Nonce([7; 16]), Nonce([8; 16]));
        let bytes = key.seal(
            Role::Acceptor,
            Fresh::Both {
                nonce_r: a,
                nonce_i: b,
            },
            &demote(),
        );
        let parsed = wire::parse(&bytes).unwrap();
        assert!(key.verify(
            Role::Acceptor,
            Fresh::Both {
                nonce_r: a,
                nonce_i: b
            },
            &parsed
        ));
        assert!(!key.verify(
            Role::Acceptor,
            Fresh::Both {
                nonce_r: b,
                nonce_i: a
            },
            &parsed
        ));
        assert!(!key.verify(Role::Acceptor, Fresh::Responder(a), &parsed));
    }

    #[test]
    fn a_message_verifies_only_with_the_job_key_of_its_sender() {
        let (ours, theirs) = (JobKey::new(b"ours"), JobKey::new(b"theirs"));
        for sender in [&None, &ours, &theirs] {
            let bytes = seal_with_job(sender.as_ref(), &demote());
            let parsed = wire::parse(&bytes).unwrap();
            for receiver in [&None, &ours, &theirs] {
                assert_eq!(
                    verify_with_job(receiver.as_ref(), &parsed),
                    sender == receiver
                );
            }
        }
    }

    #[test]
    fn an_empty_job_key_is_refused_and_no_key_is_printed() {
        assert_eq!(JobKey::new(b""), None);
        assert_eq!(format!("{:?}", JobKey::new(b"hush")), "Some(JobKey(..))");
        assert_eq!(
            format!("{:?}", FlowKey::derive(None, &inputs())),
            "FlowKey(..)"
        );
    }
}
