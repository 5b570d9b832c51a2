//! Neighbours: several processes of one host that are asked at the same time. `docs/PROTOCOL.md`, section "Dead processes".
//!
//! If they have died together, their host sends too few ICMP messages to tell of each of them, and all processes of our host
//! share these messages. So one process is asked first. If its QUERY is refused, the kernel of that host answers us, and its
//! neighbours are asked in a way that needs no further ICMP message: by connections to their resume ports (*knocks*), which
//! kernels refuse without a limit. QUERYs follow only shortly before the verdict, because their refusals use up the messages that
//! other processes of our host need.
//!
//! If a fault of the network has broken the connections of living processes, the first one answers after one round trip, and its
//! neighbours are asked at once.

use std::net::IpAddr;
use std::time::Duration;

use super::errno::ECONNREFUSED;
use super::inquiries::{CONFIRM_DEATH, Inquiry, Knocks, REFUSAL_AGE};
use super::resume::Conn;
use super::timer::TimerOwner;
use super::{Action, Endpoint};
use crate::ids::{ConnId, EndpointId, Time};
use crate::transport::Path;

/// How long the first QUERY to a process waits for the answer of a neighbour.
const IN_TURN: Duration = Duration::from_millis(20);
/// Pause between the first refused knock and the first QUERY. Within it, the other processes of our host get the one ICMP message
/// that each of them needs.
const QUERY_AFTER: Duration = Duration::from_millis(100);
/// Number of QUERYs between two knocks.
const QUERIES: u32 = 2;
/// Time for the answer to a knock, or to a QUERY between knocks.
const ANSWER: Duration = Duration::from_millis(50);
/// Maximum number of knocks at a time, since each takes a descriptor.
const KNOCKS: usize = 64;
/// A knock for which there was no room is tried again after this.
const ROOM: Duration = Duration::from_millis(5);

impl Endpoint {
    /// The rule for a process whose host sends no ICMP message for it, because too many of its processes have died. It is gone if
    ///
    /// * its resume port has refused a knock, and refuses another one now, [`CONFIRM_DEATH`] later or more;
    /// * its host has refused a QUERY to a neighbour at the same address, at most [`REFUSAL_AGE`] before the first knock was refused;
    /// * between the knocks it has answered none of [`QUERIES`] QUERYs, each within [`ANSWER`] (an answer ends the inquiry); and
    /// * it was in reach before, so that no firewall keeps QUERYs from it.
    fn died_with_neighbour(&self, now: Time, peer: EndpointId) -> bool {
        if self.believed_after(peer).is_none() {
            return false;
        }
        let inquiry = self.inquiries.open.get(&peer);
        inquiry.is_some_and(|inquiry| match inquiry.knocks {
            Some(Knocks {
                refused: Some(first),
                queries,
                neighbour_refused,
                ..
            }) => {
                now.since(first) >= CONFIRM_DEATH
                    && first.since(neighbour_refused) <= REFUSAL_AGE
                    && queries >= QUERIES
                    && now.since(inquiry.last) >= ANSWER
                    && self.processes.was_reached(peer)
            }
            _ => false,
        })
    }

    /// Begins an inquiry: by knocks if a neighbour was refused, and otherwise by QUERY, when no neighbour is being asked.
    pub(super) fn ask_in_turn(&mut self, now: Time, peer: EndpointId) {
        for (at, refused) in self.inquiries.refusals(now, peer.host) {
            if self.begin_knocks(now, peer, at, refused) {
                return;
            }
        }
        match self.neighbour_asked(now, peer) {
            Some(until) => self.timers.set(TimerOwner::Peer(peer), until),
            None => self.inquire(now, peer),
        }
    }

    /// Whether a neighbour has just been asked by its first QUERY: until when its answer is waited for.
    fn neighbour_asked(&self, now: Time, peer: EndpointId) -> Option<Time> {
        let neighbours = self.inquiries.of_host(peer.host);
        let asked = neighbours.filter(|(id, inquiry)| {
            *id != peer && inquiry.sent == 1 && self.is_at(peer, inquiry.to.ip())
        });
        let until = asked.map(|(_, inquiry)| inquiry.last + IN_TURN).max();
        until.filter(|until| *until > now)
    }

    /// Whether the connection to the process led to `at`, an address of its host, so that both take the same path. Within a host
    /// there is no limit on ICMP messages.
    fn is_at(&self, peer: EndpointId, at: IpAddr) -> bool {
        let inquiry = self.inquiries.open.get(&peer);
        let flow = inquiry.and_then(|inquiry| self.flows.get(&inquiry.token));
        flow.is_some_and(|flow| flow.ends.remote().ip() == at) && peer.host != self.id.host
    }

    /// A process has answered: its neighbours are asked by QUERY at once.
    pub(super) fn ask_neighbours(&mut self, now: Time, host: [u8; 16]) {
        let all = self.inquiries.of_host(host);
        let waiting = all.filter(|(_, inquiry)| inquiry.sent == 0 && inquiry.knocks.is_none());
        for peer in waiting.map(|(id, _)| id).collect::<Vec<_>>() {
            self.inquire(now, peer);
        }
    }

    /// The host has refused a QUERY to one of its processes at this address: its neighbours are asked by knocks.
    pub(super) fn knock_at_neighbours(&mut self, now: Time, host: [u8; 16], at: IpAddr) {
        let all = self.inquiries.of_host(host).map(|(id, _)| id);
        for peer in all.collect::<Vec<_>>() {
            self.begin_knocks(now, peer, at, now);
        }
    }

    /// False if the process must be asked by QUERY.
    fn begin_knocks(&mut self, now: Time, peer: EndpointId, at: IpAddr, refused: Time) -> bool {
        if !self.is_at(peer, at) || !self.processes.was_reached(peer) {
            return false;
        }
        let inquiry = self.inquiries.open.get_mut(&peer);
        let new = |inquiry: &&mut Inquiry| inquiry.refused.is_none() && inquiry.knocks.is_none();
        let Some(inquiry) = inquiry.filter(new) else {
            return false;
        };
        inquiry.to = self.flows[&inquiry.token].peer_at(at, inquiry.to.port());
        inquiry.knocks = Some(Knocks {
            neighbour_refused: refused,
            refused: None,
            queries: 0,
        });
        self.on_knocks_timer(now, peer);
        true
    }

    /// The next step of an inquiry by knocks.
    pub(super) fn on_knocks_timer(&mut self, now: Time, peer: EndpointId) {
        let Some(inquiry) = self.inquiries.open.get_mut(&peer) else {
            return;
        };
        let Some(knocks) = &mut inquiry.knocks else {
            return;
        };
        if inquiry.knock.is_some() {
            return self.end_knocks(now, peer);
        }
        let wait = if knocks.refused.is_some() && knocks.queries < QUERIES {
            knocks.queries += 1;
            self.inquire(now, peer);
            ANSWER
        } else if self.knock(peer) {
            ANSWER
        } else {
            ROOM
        };
        if self.inquiries.open.contains_key(&peer) {
            self.timers.set(TimerOwner::Peer(peer), now + wait);
        }
    }

    /// Connects to the resume port, at the address that QUERY is sent to. False if there are too many such connections.
    pub(super) fn knock(&mut self, peer: EndpointId) -> bool {
        let open = self.inquiries.open.values();
        if open.filter(|inquiry| inquiry.knock.is_some()).count() >= KNOCKS {
            return false;
        }
        let Some(token) = self.inquirer(peer) else {
            return true;
        };
        self.next_conn += 1;
        let conn = ConnId(self.next_conn);
        let Some(inquiry) = self.inquiries.open.get_mut(&peer) else {
            return true;
        };
        let before = inquiry.knock.replace(conn);
        let (ip, flow) = (inquiry.to.ip(), &self.flows[&token]);
        let Some(port) = flow.peer.as_ref().map(|peer| peer.process.resume_port) else {
            return true;
        };
        let to = flow.peer_at(ip, port);
        let own = self.own_end(token, to).map(|own| own.ip());
        let path = Path {
            local: own.filter(|own| self.own.addrs.contains(own)),
            to: to.into(),
        };
        if let Some(before) = before {
            self.close_conn(before);
        }
        self.conns.insert(conn, Conn::Knock { peer });
        self.out.push(Action::Connect {
            conn,
            token,
            path,
            small_segments: false,
        });
        true
    }

    /// The resume port has accepted a knock: the process seems to live, and is asked by QUERY.
    pub(super) fn knock_accepted(&mut self, now: Time, conn: ConnId, peer: EndpointId) {
        self.close_conn(conn);
        if self.is_knock(peer, conn) {
            self.end_knocks(now, peer);
        }
    }

    /// A knock has failed. The driver has closed it, or was told to.
    pub(super) fn knock_lost(&mut self, now: Time, conn: ConnId, peer: EndpointId, errno: i32) {
        if !self.is_knock(peer, conn) {
            return;
        }
        if errno != ECONNREFUSED {
            return self.end_knocks(now, peer);
        }
        if self.refused_long_ago(now, peer) || self.died_with_neighbour(now, peer) {
            return self.process_gone(now, peer);
        }
        let inquiry = self.inquiries.open.get_mut(&peer);
        match inquiry.and_then(|inquiry| inquiry.knocks.as_mut()) {
            Some(knocks) if knocks.refused.is_none() => {
                knocks.refused = Some(now);
                self.timers.set(TimerOwner::Peer(peer), now + QUERY_AFTER);
            }
            _ => self.end_knocks(now, peer),
        }
    }

    /// Whether this is the knock under way; it is not from now on.
    fn is_knock(&mut self, peer: EndpointId, conn: ConnId) -> bool {
        let inquiry = self.inquiries.open.get_mut(&peer);
        inquiry.is_some_and(|inquiry| inquiry.knock.take_if(|knock| *knock == conn).is_some())
    }

    /// The knocks have not shown that the process is gone: the inquiry goes on by QUERY.
    fn end_knocks(&mut self, now: Time, peer: EndpointId) {
        let Some(inquiry) = self.inquiries.open.get_mut(&peer) else {
            return;
        };
        let (knock, knocks) = (inquiry.knock.take(), inquiry.knocks.take());
        if let Some(conn) = knock {
            self.close_conn(conn);
        }
        if knocks.is_some() {
            self.on_peer_timer(now, peer);
        }
    }
}
