//! The event log: what happened to each flow, for people and programs.
//!
//! The endpoint hands out [`Event`]s. The writer of the log adds time and place, which makes a
//! [`Record`]: one JSON object on a line, the same for every front end.
//!
//! ```json
//! {"ts":1763694000.25,"host":"n1","pid":4711,"flow":"0f…","kind":"suspend","cause":"ECONNRESET"}
//! ```

mod errno;

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::ids::{Cause, FinHow, FlowId};
use crate::transport::Path;

/// One line of the event log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Time of the event: seconds since 1970, UTC, with a fraction.
    pub ts: f64,
    /// Name of the host.
    pub host: String,
    /// Process id on that host.
    pub pid: u32,
    /// Name of the flow: 32 hexadecimal digits, the same at both ends.
    pub flow: String,
    /// Our end of the connection that the application made, as `getsockname` has it.
    pub sock: SocketAddr,
    /// The peer's end of it, as `getpeername` has it.
    pub peer: SocketAddr,
    /// What happened; its name is in the field `kind`.
    #[serde(flatten)]
    pub event: Event,
}

/// What happened to a flow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Event {
    /// The peer has SLIM: the flow is protected from here on.
    Live,
    /// The flow is plain TCP, from the start or from here on.
    Legacy {
        /// Why.
        reason: LegacyReason,
    },
    /// The transport is out of use, or suspected. Not reported if the peer says within a moment that it has ended the flow.
    Suspend {
        /// Why.
        #[serde(with = "errno::trouble")]
        cause: Trouble,
    },
    /// An attempt to resume begins.
    Attempt {
        /// Number of the attempt, counted from 1.
        n: u32,
        /// From the address `local`, or one that the transport chooses, to the resume listener `remote`.
        #[serde(flatten)]
        path: Path,
    },
    /// An attempt to resume ended without success.
    AttemptFailed {
        /// Number of the attempt, counted from 1.
        n: u32,
        /// Why.
        #[serde(with = "errno::failure")]
        reason: Failure,
    },
    /// The flow is live on a new transport.
    Resume {
        /// Number of the transport; 0 was the application's own.
        epoch: u64,
        /// Bytes that we sent again.
        replayed: u64,
        /// Bytes that the peer had to send again.
        received: u64,
        /// Time from suspension to live, in milliseconds, rounded up.
        lost_ms: u64,
        /// Number of our attempts; 0 if the peer resumed the flow.
        attempts: u32,
    },
    /// The end of stream was genuine after all: the old transport is back in use.
    Reinstate,
    /// The flow is escalated: the application gets the error.
    Escalate {
        /// Why it was suspended.
        #[serde(with = "errno::trouble")]
        cause: Trouble,
        /// Why it could not be resumed.
        reason: EscalateReason,
        /// The error that the application gets; 0 for an end of stream.
        errno: i32,
        /// What is known of the peer; nothing if the peer itself has ended the flow, or the flow was not given up because of the network.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        evidence: Option<Evidence>,
    },
    /// All attempts have failed, and the flow is held: it waits for the network (`SLIM_HOLD`).
    Hold,
    /// All attempts have failed: this process accuses the peer process at the witness.
    Accuse,
    /// This process made the flow plain TCP, because something outside the session uses the descriptor from here on.
    Demoted,
    /// The application had closed the flow, and SLIM drops it before all bytes are delivered. If the flow has a connection,
    /// the kernel goes on with it alone; otherwise the bytes are lost.
    Orphaned {
        /// Bytes in the replay buffer: the peer is not known to have them.
        owed: u64,
        /// Why.
        limit: LingerLimit,
    },
    /// The flow has ended as both applications wanted.
    Closed {
        /// How our application ended it.
        how: FinHow,
        /// Bytes that our application sent in all.
        sent: u64,
    },
}

/// Why a flow is plain TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LegacyReason {
    /// No answer came in time.
    NoAnswer,
    /// The settings do not name the host as one to be asked for SLIM.
    NotAPeer,
    /// No socket is bound to the peer's control port.
    NoControlSocket,
    /// The peer speaks another version.
    Version,
    /// The peer's policy forbids sessions.
    Policy,
    /// The job keys differ.
    Unauthorized,
    /// The peer made it plain TCP.
    PeerDemoted,
    /// The peer does not know the flow, or gave it up as plain TCP.
    PeerForgot,
    /// Too many flows, or no memory.
    NoRoom,
    /// This process is lost, so it has no connections any more.
    Fenced,
}

/// The limit that closed flows exceeded when SLIM dropped one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LingerLimit {
    /// Number of closed flows.
    Flows,
    /// Number of bytes kept for closed flows.
    Memory,
    /// Time in which the peer has taken nothing.
    Time,
}

/// Why a flow lost its transport: a [`Cause`] without the details that only the endpoint needs. In
/// the log it is one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Trouble {
    /// A data call failed with this error number.
    Errno(i32),
    /// The transport ended although the peer had announced no end.
    Eof,
    /// No error, but acknowledgements do not advance.
    Stall,
    /// No fault: the flow moves to a kind of transport that it prefers.
    Move,
    /// The peer asked to resume.
    PeerAsked,
}

impl From<Cause> for Trouble {
    fn from(cause: Cause) -> Self {
        match cause {
            Cause::Errno(errno) => Trouble::Errno(errno),
            Cause::Eof { .. } => Trouble::Eof,
            Cause::Stall => Trouble::Stall,
            Cause::PeerAsked => Trouble::PeerAsked,
        }
    }
}

/// Why an attempt failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Failure {
    /// The attempt was not finished in its time.
    TimedOut,
    /// The connection could not be made, or broke, with this error number.
    Errno(i32),
    /// The peer ended the connection.
    Eof,
    /// The peer is resuming the flow itself.
    Busy,
    /// The peer has already answered a later attempt.
    OldEpoch,
    /// One side's proof did not verify at the other.
    BadProof,
    /// The bytes that came were no SLIM message, or the message came out of turn.
    Garbage,
}

/// Why a flow was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EscalateReason {
    /// All attempts failed.
    Attempts,
    /// The deadline for all attempts has passed.
    Deadline,
    /// The peer process does not exist any more.
    PeerGone,
    /// The peer does not know the flow any more.
    PeerForgot,
    /// The peer's application reset the flow.
    PeerReset,
    /// The peer had closed the flow, so what we sent has no reader.
    PeerClosed,
    /// The two sides do not agree on how much was sent, or bytes are missing, for which there was no memory. Going on would corrupt the
    /// stream.
    OutOfStep,
    /// Our application had closed the flow, and a [`LingerLimit`] was exceeded while it had no transport.
    Orphaned,
    /// The witness says that the peer process is lost, and it is fenced.
    PeerLost,
    /// The witness says that this process is lost.
    Fenced,
    /// Neither the peer nor the witness could be reached.
    NoWitness,
}

/// What the end of a flow tells about the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Evidence {
    /// The peer's host says that the process does not exist, or another process of the host answers for it.
    ProcessGone,
    /// Nothing at the peer's host has answered during the outage. The host, or all paths to it, may be down.
    HostSilent,
    /// The peer's host has answered, but no connection could be kept.
    PathLost,
    /// The user's limit for a resume has passed.
    Deadline,
}

impl EscalateReason {
    /// The evidence that goes with this reason. `tried`: all attempts were made. `heard`: something at the peer's host has answered one.
    pub fn evidence(self, tried: bool, heard: bool) -> Option<Evidence> {
        match self {
            EscalateReason::PeerGone | EscalateReason::PeerForgot => Some(Evidence::ProcessGone),
            EscalateReason::Deadline => Some(Evidence::Deadline),
            EscalateReason::PeerLost | EscalateReason::Fenced | EscalateReason::NoWitness
                if !tried =>
            {
                None
            }
            EscalateReason::Attempts
            | EscalateReason::PeerLost
            | EscalateReason::Fenced
            | EscalateReason::NoWitness => Some(match heard {
                true => Evidence::PathLost,
                false => Evidence::HostSilent,
            }),
            EscalateReason::PeerReset
            | EscalateReason::PeerClosed
            | EscalateReason::OutOfStep
            | EscalateReason::Orphaned => None,
        }
    }
}

impl Event {
    /// The line for this event, of the flow with this name and these addresses.
    pub fn record(
        self,
        ts: f64,
        (host, pid): (&str, u32),
        flow: FlowId,
        (sock, peer): (SocketAddr, SocketAddr),
    ) -> Record {
        let (host, flow) = (host.to_owned(), flow.to_string());
        Record {
            ts,
            host,
            pid,
            flow,
            sock,
            peer,
            event: self,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::{OtherLocator, TransportKind};

    fn record(event: Event) -> Record {
        let sock = "10.0.0.1:1000".parse().unwrap();
        let peer = "[fe80::2]:2000".parse().unwrap();
        event.record(
            1_763_694_000.123456,
            ("n1", 42),
            FlowId([0xab; 16]),
            (sock, peer),
        )
    }

    #[test]
    fn a_record_is_one_flat_line() {
        let line = serde_json::to_string(&record(Event::AttemptFailed {
            n: 2,
            reason: Failure::Errno(111),
        }))
        .unwrap();
        assert_eq!(
            line,
            format!(
                "{{\"ts\":1763694000.123456,\"host\":\"n1\",\"pid\":42,\"flow\":\"{}\",\
                 \"sock\":\"10.0.0.1:1000\",\"peer\":\"[fe80::2]:2000\",\
                 \"kind\":\"attempt_failed\",\"n\":2,\"reason\":\"ECONNREFUSED\"}}",
                "ab".repeat(16)
            )
        );
    }

    #[test]
    fn the_path_of_an_attempt_is_written_as_local_and_remote() {
        let written = |path| {
            let line = serde_json::to_string(&record(Event::Attempt { n: 1, path })).unwrap();
            let at = line.find("\"kind\"").unwrap();
            line[at..].to_owned()
        };
        let remote: SocketAddr = "10.0.0.2:7".parse().unwrap();
        assert_eq!(
            written(Path {
                local: Some(remote.ip()),
                ..Path::to(remote)
            }),
            r#""kind":"attempt","n":1,"local":"10.0.0.2","remote":"10.0.0.2:7"}"#
        );
        let other = OtherLocator::new(TransportKind::TEST, b"at").unwrap();
        assert_eq!(
            written(Path::to(other)),
            r#""kind":"attempt","n":1,"local":null,"remote":"kind240/6174"}"#
        );
    }

    #[test]
    fn every_event_is_read_back_as_it_was_written() {
        let remote: SocketAddr = "10.0.0.2:7".parse().unwrap();
        let other = OtherLocator::new(TransportKind::TEST, b"at").unwrap();
        let mut events = vec![
            Event::Live,
            Event::Legacy {
                reason: LegacyReason::NoControlSocket,
            },
            Event::Attempt {
                n: 1,
                path: Path::to(remote),
            },
            Event::Attempt {
                n: 1,
                path: Path {
                    local: Some(remote.ip()),
                    ..Path::to(remote)
                },
            },
            Event::Attempt {
                n: 1,
                path: Path::to(other),
            },
            Event::Resume {
                epoch: 1,
                replayed: 2,
                received: u64::MAX,
                lost_ms: 4,
                attempts: 5,
            },
            Event::Reinstate,
            Event::Escalate {
                cause: Trouble::Errno(110),
                reason: EscalateReason::PeerGone,
                errno: 0,
                evidence: Some(Evidence::ProcessGone),
            },
            Event::Escalate {
                cause: Trouble::Eof,
                reason: EscalateReason::PeerReset,
                errno: 104,
                evidence: None,
            },
            Event::Hold,
            Event::Accuse,
            Event::Demoted,
            Event::Orphaned {
                owed: 7,
                limit: LingerLimit::Memory,
            },
            Event::Closed {
                how: FinHow::HalfClose,
                sent: 9,
            },
        ];
        let causes = [
            Trouble::Errno(104),
            Trouble::Errno(-7),
            Trouble::Eof,
            Trouble::Stall,
            Trouble::PeerAsked,
        ];
        events.extend(causes.map(|cause| Event::Suspend { cause }));
        let failures = [
            Failure::TimedOut,
            Failure::Errno(113),
            Failure::Errno(4096),
            Failure::Eof,
            Failure::Busy,
            Failure::OldEpoch,
            Failure::BadProof,
            Failure::Garbage,
        ];
        events.extend(failures.map(|reason| Event::AttemptFailed { n: 3, reason }));
        for event in events {
            let before = record(event);
            let line = serde_json::to_string(&before).unwrap();
            assert!(!line.contains('\n'));
            assert_eq!(
                serde_json::from_str::<Record>(&line).unwrap(),
                before,
                "{line}"
            );
        }
    }

    #[test]
    fn an_unknown_cause_is_refused() {
        let line = serde_json::to_string(&record(Event::Suspend {
            cause: Trouble::Eof,
        }))
        .unwrap();
        for wrong in ["", "EWHATEVER", "errno", "errno x", "busy"] {
            let line = line.replace("\"eof\"", &format!("\"{wrong}\""));
            assert!(serde_json::from_str::<Record>(&line).is_err(), "{line}");
        }
    }
}
