//! Values of the survey as the table's structures have them.

use std::ffi::c_char;
use std::fmt::Display;

use serde_json::Value;
use slim_core::EndpointId;
use slim_core::endpoint::{PeerStanding, Standing, SurveyedFlow, SurveyedPeer};
use slim_core::event::{EscalateReason, Event, Evidence, LegacyReason};

use crate::table::types::*;

/// A text with a zero byte at its end. What does not fit is left out.
pub(crate) fn text<const N: usize>(value: impl Display) -> [c_char; N] {
    let text = value.to_string();
    let mut all = [0; N];
    let room = &mut all[..N - 1];
    for (to, byte) in room.iter_mut().zip(text.bytes()) {
        *to = byte as c_char;
    }
    all
}

/// The name of a process; empty if there is none.
pub(crate) fn name<const N: usize>(process: Option<EndpointId>) -> [c_char; N] {
    process.map_or([0; N], text)
}

/// A field of an event, as the event log has it.
pub(crate) fn field<const N: usize>(event: &Event, name: &str) -> [c_char; N] {
    let value = serde_json::to_value(event).unwrap_or_default();
    text(value.get(name).and_then(Value::as_str).unwrap_or_default())
}

/// The reason of an escalation, as the event log has it.
pub(crate) fn word<const N: usize>(reason: EscalateReason) -> [c_char; N] {
    let value = serde_json::to_value(reason).unwrap_or_default();
    text(value.as_str().unwrap_or_default())
}

pub(crate) fn evidence(evidence: Option<Evidence>) -> u32 {
    match evidence {
        None => SLIM_TABLE_EVIDENCE_NONE,
        Some(Evidence::ProcessGone) => SLIM_TABLE_EVIDENCE_PROCESS_GONE,
        Some(Evidence::HostSilent) => SLIM_TABLE_EVIDENCE_HOST_SILENT,
        Some(Evidence::PathLost) => SLIM_TABLE_EVIDENCE_PATH_LOST,
        Some(Evidence::Deadline) => SLIM_TABLE_EVIDENCE_DEADLINE,
    }
}

fn legacy<const N: usize>(reason: Option<LegacyReason>) -> [c_char; N] {
    match reason {
        Some(reason) => field(&Event::Legacy { reason }, "reason"),
        None => text("demoted"),
    }
}

impl From<SurveyedFlow> for TableFlow {
    fn from(flow: SurveyedFlow) -> Self {
        let (state, reason) = match flow.standing {
            Standing::Negotiating => (SLIM_TABLE_FLOW_NEGOTIATING, [0; 24]),
            Standing::Active => (SLIM_TABLE_FLOW_ACTIVE, [0; 24]),
            Standing::Suspended => (SLIM_TABLE_FLOW_SUSPENDED, [0; 24]),
            Standing::Resuming => (SLIM_TABLE_FLOW_RESUMING, [0; 24]),
            Standing::Ended(reason, _) => (SLIM_TABLE_FLOW_ENDED, word(reason)),
            Standing::Legacy(reason) => (SLIM_TABLE_FLOW_LEGACY, legacy(reason)),
        };
        TableFlow {
            flow: text(flow.flow),
            sock: text(flow.sock),
            peer: text(flow.peer),
            process: name(flow.process),
            reason,
            state,
            closed: flow.closed.into(),
            epoch: flow.epoch,
            resumes: flow.resumes.into(),
        }
    }
}

impl From<SurveyedPeer> for TablePeer {
    fn from(peer: SurveyedPeer) -> Self {
        let mut locators = [[0; 144]; 8];
        for (to, locator) in locators.iter_mut().zip(&peer.locators) {
            *to = text(locator);
        }
        let host = u128::from_be_bytes(peer.process.host);
        TablePeer {
            process: text(peer.process),
            host: text(format_args!("{host:032x}")),
            locators,
            locator_count: peer.locators.len().min(locators.len()) as u32,
            pid: peer.process.pid,
            state: match peer.standing {
                PeerStanding::Reachable => SLIM_TABLE_PEER_REACHABLE,
                PeerStanding::Suspended => SLIM_TABLE_PEER_SUSPENDED,
                PeerStanding::Lost => SLIM_TABLE_PEER_LOST,
            },
            evidence: evidence(peer.evidence),
            flows: peer.flows,
            suspended: peer.suspended,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use slim_core::event::Trouble;
    use slim_core::{FlowId, FlowToken, Role};

    use super::*;

    fn read(text: &[c_char]) -> &str {
        // SAFETY: `text` puts a zero byte at the end.
        unsafe { CStr::from_ptr(text.as_ptr()) }.to_str().unwrap()
    }

    #[test]
    fn the_words_are_those_of_the_event_log_and_fit() {
        let longest = LegacyReason::NoControlSocket;
        assert_eq!(read(&legacy::<24>(Some(longest))), "no_control_socket");
        assert_eq!(read(&legacy::<24>(None)), "demoted");
        assert_eq!(read(&word::<24>(EscalateReason::PeerGone)), "peer_gone");
        let cause = Trouble::Errno(104);
        let suspend = Event::Suspend { cause };
        assert_eq!(read(&field::<24>(&suspend, "cause")), "ECONNRESET");
        assert_eq!(read(&text::<4>("longer")), "lon");
    }

    #[test]
    fn the_longest_address_fits() {
        let longest = "[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff%4294967295]:65535";
        let flow = TableFlow::from(SurveyedFlow {
            token: FlowToken(1),
            flow: FlowId([0xab; 16]),
            role: Role::Connector,
            sock: longest.parse().unwrap(),
            peer: "10.0.0.1:80".parse().unwrap(),
            process: Some(EndpointId {
                host: [1; 16],
                pid: u32::MAX,
                incarnation: u64::MAX,
            }),
            standing: Standing::Active,
            epoch: 2,
            resumes: 1,
            closed: false,
        });
        assert_eq!(read(&flow.sock), longest);
        assert_eq!(read(&flow.peer), "10.0.0.1:80");
        assert_eq!(read(&flow.flow), "ab".repeat(16));
        assert_eq!(read(&flow.process), "01010101/4294967295/ffffffffffffffff");
        assert_eq!(read(&flow.reason), "");
    }
}
