//! Which processes are being asked whether they exist, and which are known to be gone.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::Endpoint;
use crate::ids::{ConnId, EndpointId, FlowToken, Time};
use crate::wire::feature;

/// A host that refused a QUERY is asked once more after this, because a firewall that is just
/// being changed may have refused it.
pub(super) const CONFIRM_DEATH: Duration = Duration::from_millis(150);
/// The same in a job that goes on without failed ranks: its runtime reports a dead rank within some milliseconds, and errors of
/// connections that come later would disturb the recovery.
const CONFIRM_DEATH_SOON: Duration = Duration::from_millis(5);
/// How long a process is remembered as gone, so that its flows that fail a little later need not ask again. A process that is
/// gone does not come back; the limit is there for a wrong verdict.
const GONE_AGE: Duration = Duration::from_secs(5);
/// Maximum number of processes remembered as gone.
const GONE: usize = 256;
/// How long the refusal of a QUERY counts for other processes of the host.
pub(super) const REFUSAL_AGE: Duration = Duration::from_millis(500);

/// The state of all inquiries.
pub(super) struct Inquiries {
    /// The job goes on without failed processes.
    pub(super) recovers: bool,
    /// Processes that have not answered yet.
    pub(super) open: BTreeMap<EndpointId, Inquiry>,
    /// Oldest first.
    gone: VecDeque<(Time, EndpointId)>,
    /// By host and its address: when it refused a QUERY last.
    refusals: BTreeMap<([u8; 16], IpAddr), Time>,
}

/// The inquiry whose outcome all flows of a process wait for.
pub(super) struct Inquiry {
    /// The flow that QUERY asks about.
    pub(super) token: FlowToken,
    pub(super) to: SocketAddr,
    pub(super) sent: u32,
    /// When QUERY was sent last.
    pub(super) last: Time,
    /// When the host first refused QUERY.
    pub(super) refused: Option<Time>,
    /// The process is asked by knocks (`neighbours.rs`).
    pub(super) knocks: Option<Knocks>,
    /// The knock under way.
    pub(super) knock: Option<ConnId>,
}

/// The state of an inquiry by knocks.
pub(super) struct Knocks {
    /// When the host refused a QUERY to another one of its processes.
    pub(super) neighbour_refused: Time,
    /// When the first knock was refused.
    pub(super) refused: Option<Time>,
    /// Number of QUERYs sent since then.
    pub(super) queries: u32,
}

impl Inquiry {
    pub(super) fn new(now: Time, token: FlowToken, to: SocketAddr) -> Inquiry {
        Inquiry {
            token,
            to,
            sent: 0,
            last: now,
            refused: None,
            knocks: None,
            knock: None,
        }
    }
}

impl Inquiries {
    /// `recovers`: the job goes on without failed processes.
    pub(super) fn new(recovers: bool) -> Self {
        Inquiries {
            recovers,
            open: BTreeMap::new(),
            gone: VecDeque::new(),
            refusals: BTreeMap::new(),
        }
    }

    /// The open inquiries about processes of this host.
    pub(super) fn of_host(&self, host: [u8; 16]) -> impl Iterator<Item = (EndpointId, &Inquiry)> {
        let first = EndpointId {
            host,
            pid: 0,
            incarnation: 0,
        };
        let all = self.open.range(first..).map(|(id, inquiry)| (*id, inquiry));
        all.take_while(move |(id, _)| id.host == host)
    }

    /// The host has refused a QUERY at this address.
    pub(super) fn note_refusal(&mut self, now: Time, host: [u8; 16], at: IpAddr) {
        self.expire(now);
        self.refusals.insert((host, at), now);
    }

    /// Where the host has refused a QUERY within the last [`REFUSAL_AGE`], and when.
    pub(super) fn refusals(&self, now: Time, host: [u8; 16]) -> Vec<(IpAddr, Time)> {
        let fresh = |at: &Time| now.since(*at) <= REFUSAL_AGE;
        let all = self.refusals.iter();
        let ours = all.filter(|((of, _), refused)| *of == host && fresh(refused));
        ours.map(|((_, at), refused)| (*at, *refused)).collect()
    }

    pub(super) fn mark_gone(&mut self, now: Time, peer: EndpointId) {
        if self.is_gone(now, peer) {
            return;
        }
        while self.gone.len() >= GONE {
            self.gone.pop_front();
        }
        self.gone.push_back((now, peer));
    }

    /// Forgets processes that have been gone for [`GONE_AGE`], and old refusals.
    pub(super) fn expire(&mut self, now: Time) {
        self.refusals
            .retain(|_, refused| now.since(*refused) <= REFUSAL_AGE);
        while self
            .gone
            .front()
            .is_some_and(|(at, _)| now.since(*at) >= GONE_AGE)
        {
            self.gone.pop_front();
        }
    }

    /// Number of open inquiries, and of processes and refusals remembered.
    pub(super) fn len(&self) -> (usize, usize) {
        (self.open.len(), self.gone.len() + self.refusals.len())
    }

    /// The process has just sent a message, so it is not gone.
    pub(super) fn mark_alive(&mut self, peer: EndpointId) {
        self.gone.retain(|(_, gone)| *gone != peer);
    }

    pub(super) fn is_gone(&mut self, now: Time, peer: EndpointId) -> bool {
        self.expire(now);
        self.gone.iter().any(|(_, gone)| *gone == peer)
    }

    /// How long ago the host first refused QUERY.
    pub(super) fn refused_for(&self, now: Time, peer: EndpointId) -> Option<Duration> {
        let first = self.open.get(&peer).and_then(|inquiry| inquiry.refused);
        first.map(|first| now.since(first))
    }
}

impl Endpoint {
    /// How long after the first refusal of a QUERY a second one proves that the process is gone; `None` if refusals prove nothing. The kernel of
    /// a process that dies also ends its connections. If none was ended, a firewall may have refused, and a witness decides.
    pub(super) fn believed_after(&self, peer: EndpointId) -> Option<Duration> {
        let mut flows = self.flows.values();
        let ended = flows.any(|flow| {
            let ended = flow
                .outage
                .as_ref()
                .is_some_and(|outage| outage.ended_by_peer());
            ended && flow.peer_id() == Some(peer)
        });
        match (self.inquiries.recovers, ended) {
            (true, true) => Some(CONFIRM_DEATH_SOON),
            (true, false) if self.features & feature::WITNESS != 0 => None,
            _ => Some(CONFIRM_DEATH),
        }
    }

    /// Whether the host first refused QUERY so long ago that another refusal is believed.
    pub(super) fn refused_long_ago(&self, now: Time, peer: EndpointId) -> bool {
        let wait = self.believed_after(peer);
        let refused = self.inquiries.refused_for(now, peer);
        wait.zip(refused)
            .is_some_and(|(wait, refused)| refused >= wait)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_remembered_as_gone_for_a_limited_time() {
        let peer = EndpointId {
            host: [1; 16],
            pid: 1,
            incarnation: 1,
        };
        let at = |secs: u64| Time(secs * 1_000_000);
        let mut inquiries = Inquiries::new(false);
        // Marking the process again before it expires does not extend the time: there is no new evidence.
        for secs in [0, 2, 4] {
            inquiries.mark_gone(at(secs), peer);
            assert!(inquiries.is_gone(at(secs), peer));
        }
        assert_eq!(inquiries.gone.len(), 1);
        assert!(!inquiries.is_gone(at(5), peer));
        inquiries.mark_gone(at(6), peer);
        inquiries.mark_alive(peer);
        assert!(!inquiries.is_gone(at(6), peer));
    }
}
