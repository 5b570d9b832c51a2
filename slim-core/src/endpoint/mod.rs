//! All flows of one process: the session state machine.
//!
//! [`Endpoint`] decides; a *driver* does. The driver tells it what happened ([`open`],
//! [`fault`], `handle_*`) and carries out what it asks for ([`poll_action`]). The bytes of a flow
//! never pass through here: the *front end* has them, and tells how many there are.
//!
//! # Driving contract
//!
//! After every call of a command or a `handle_*` method, take actions from [`poll_action`] until
//! there are none and carry them out in order; then take events from [`poll_event`]; then arm one
//! timer for [`poll_timeout`] and call [`handle_timeout`] when it fires (early is harmless). An
//! action may be answered while others are still waiting to be taken.
//!
//! For each flow:
//!
//! * `Suspend` is answered by exactly one [`handle_suspended`], `Drain` by exactly one
//!   [`handle_drained`], also when a fault came in between. `Install` is answered by
//!   [`handle_installed`], unless a fault, a `Suspend` or a `Drain` came before the replay was
//!   written.
//! * Before [`fault`] with an error or an end of stream the front end has suspended the flow by
//!   itself: no data call begins, and nothing is trimmed. With a stall it has not. Data calls that are under way may still move
//!   bytes on the old transport; they have come out before `Drain` is answered. After an end of stream
//!   the front end may go on sending on the old transport, until `Drain`, `Suspend` or `Install`.
//! * A fault is reported for the transport in use only. While the replay after `Install` is being
//!   written, that is the new connection.
//! * From `Suspend` or `fault` until the flow is live again, the replay buffer is trimmed by
//!   `Install` alone, never because the kernel says that something was acknowledged.
//! * `Verify` is answered by [`handle_verified`], or not at all if it has come to nothing meanwhile.
//! * `Drain` reads the newest transport dry (the one `Install` brought, if its replay is not
//!   finished yet) and closes it. After a `Flush`, `Install` may be followed by `Drain` at once:
//!   then there is nothing to replay.
//!
//! Where both ends have agreed on a flow by means of their own, it is opened with [`open_agreed`], and is live at once.
//!
//! For short connections between processes that know each other ([`Pairs`]):
//!
//! * A connection that was [dialled](Pairs::dial) is opened with [`open_known`]; whoever dialled sends the OPEN before.
//! * What comes to a mailbox goes to [`Pairs::receive`], in any thread. Before an accepted flow's `fault`, `finish`,
//!   `demote` and `gone`, and now and then besides, the mailboxes are emptied and [`take_arrivals`] called; then
//!   [`tell_seen`].
//! * [`finish_told`] in place of `finish` says that FIN has been sent, or need not be.
//!
//! For each connection:
//!
//! * Read one whole message at a time and hand it in, and not more than two from any connection:
//!   stream bytes may follow. Stop reading at `Install`, `Close`, and the second message.
//! * Report a loss only after all that could be read was handed in.
//! * `Flush` is answered by exactly one [`handle_flushed`], after the message, if there is one,
//!   that is wholly there.
//! * After `Install` or `Close` the endpoint has forgotten the connection, and ignores whatever is
//!   reported about it.
//!
//! # Example
//!
//! Two processes find out about each other:
//!
//! ```
//! use slim_core::config::Config;
//! use slim_core::endpoint::{Action, Endpoint, State};
//! use slim_core::transport::Transports;
//! use slim_core::{EndpointId, FlowToken, Role, Time};
//!
//! let endpoint = |n: u8| {
//!     let id = EndpointId { host: [n; 16], pid: 1, incarnation: 7 };
//!     let own = Transports::tcp(vec![[10, 0, 0, n].into()], 700, 701);
//!     Endpoint::new(Config::default(), id, own, [n; 32])
//! };
//! let (mut a, mut b) = (endpoint(1), endpoint(2));
//! let (a_addr, b_addr) = ("10.0.0.1:5000".parse()?, "10.0.0.2:80".parse()?);
//! let a_control = "10.0.0.1:701".parse()?;
//!
//! // A connection was made, and accepted.
//! a.open(Time(0), FlowToken(1), Role::Connector, a_addr, b_addr);
//! b.open(Time(0), FlowToken(9), Role::Acceptor, b_addr, a_addr);
//!
//! // HELLO goes to the address that was connected, and its answer back.
//! let Some(Action::Datagram { to, data, .. }) = a.poll_action() else { panic!() };
//! assert_eq!(to, b_addr);
//! b.handle_datagram(Time(100), a_control, to, &data);
//! let Some(Action::Datagram { to, data, .. }) = b.poll_action() else { panic!() };
//! a.handle_datagram(Time(200), b_addr, to, &data);
//! assert_eq!(a.poll_action(), Some(Action::Live { token: FlowToken(1) }));
//!
//! // Then the acceptor is told that its answer has arrived, so it was not somebody else who asked.
//! let Some(Action::Datagram { to, data, .. }) = a.poll_action() else { panic!() };
//! b.handle_datagram(Time(300), a_control, to, &data);
//! assert_eq!(b.poll_action(), Some(Action::Live { token: FlowToken(9) }));
//! assert_eq!(a.state(FlowToken(1)), Some(State::Live));
//! # Ok::<(), std::net::AddrParseError>(())
//! ```
//!
//! [`open`]: Endpoint::open
//! [`open_agreed`]: Endpoint::open_agreed
//! [`open_known`]: Endpoint::open_known
//! [`finish_told`]: Endpoint::finish_told
//! [`take_arrivals`]: Endpoint::take_arrivals
//! [`tell_seen`]: Endpoint::tell_seen
//! [`fault`]: Endpoint::fault
//! [`poll_action`]: Endpoint::poll_action
//! [`poll_event`]: Endpoint::poll_event
//! [`poll_timeout`]: Endpoint::poll_timeout
//! [`handle_timeout`]: Endpoint::handle_timeout
//! [`handle_suspended`]: Endpoint::handle_suspended
//! [`handle_drained`]: Endpoint::handle_drained
//! [`handle_verified`]: Endpoint::handle_verified
//! [`handle_installed`]: Endpoint::handle_installed
//! [`handle_flushed`]: Endpoint::handle_flushed

mod action;
mod again;
mod aged;
mod agreed;
mod asked;
mod attempts;
mod candidates;
mod close;
mod connecting;
mod ends;
mod errno;
mod flow;
mod initiate;
mod inquiry;
mod late;
mod leave;
mod locators;
mod negotiate;
mod out;
mod outage;
mod pace;
mod pairs;
mod paths;
mod pending;
mod probe;
mod processes;
mod reach;
mod record;
mod refusals;
mod respond;
mod resume;
mod rng;
mod shut_off;
mod tables;
#[cfg(test)]
mod tests;
mod timer;

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use crate::config::{Config, Net};
use crate::event::Event;
use crate::ids::{Cause, ConnId, Counted, EndpointId, FlowId, FlowToken, Role, Time};
use crate::transport::{Locator, Transports};
use crate::wire::{self, Kind, Message};

pub use action::Action;
pub use again::Earlier;
pub use agreed::{Agreed, Announcement};
pub use flow::State;
pub use pairs::{Heard, Opened, Pairs};
pub use pending::PendingHello;
pub use tables::Tables;

use asked::Askers;
use candidates::Candidates;
use close::{TOMB_AGE, Tombs};
use ends::Ends;
use inquiry::Inquiries;
use late::Late;
use locators::{Exchanges, features_of};
use negotiate::plain;
use out::Out;
use outage::Outage;
use pace::Pace;
use pairs::Offers;
use pending::Pending;
use probe::Probes;
use processes::Processes;
use reach::Reaches;
use record::{Bar, DrainState, FlowRecord, Leaving};
use refusals::Refusals;
use resume::Conn;
use rng::Rng;
use shut_off::ShutOff;
use timer::{Timer, TimerOwner, Timers};

/// All flows of one process. The [module](self) says how to drive it.
pub struct Endpoint {
    config: Config,
    id: EndpointId,
    own: Transports,
    networks: Vec<Net>,
    rng: Rng,
    /// Makes `random_s` of each HELLO.
    secret: [u8; 32],
    /// In the order of their tokens, so that a run can be repeated.
    flows: BTreeMap<FlowToken, Box<FlowRecord>>,
    by_id: BTreeMap<(FlowId, Role), FlowToken>,
    /// Accepted flows.
    by_ends: BTreeMap<Ends, FlowToken>,
    /// Of each pair of addresses the flow that was connected last, while it negotiates. Entries may be stale.
    dialling: BTreeMap<Ends, FlowToken>,
    /// The kernel's numbers of the connections of accepted flows, while those negotiate.
    numbers: Counted<FlowToken, u64>,
    candidates: Candidates,
    pairs: Arc<Pairs>,
    offers: Offers,
    /// Optional parts of the protocol that we speak.
    features: u64,
    processes: Processes,
    pending: Pending,
    tombs: Tombs,
    late: Late,
    inquiries: Inquiries,
    refusals: Refusals,
    shut_off: ShutOff,
    /// By address: who asks for SLIM there, and who resumes there.
    hellos: Pace<SocketAddr>,
    connects: Pace<Locator>,
    probes: Probes,
    reaches: Reaches,
    exchanges: Exchanges,
    askers: Askers,
    conns: Counted<ConnId, Conn>,
    /// Connections that have not said for which flow they are, oldest first.
    fresh: VecDeque<ConnId>,
    /// `Flush`es under way.
    flushes: Counted<ConnId, FlowToken>,
    next_conn: u64,
    timers: Timers,
    out: Out,
    dropped: u64,
}

/// Getters.
impl Endpoint {
    /// An endpoint without flows, which has the transports `own`. Everything random comes out of `seed`, so that must be
    /// unpredictable.
    pub fn new(config: Config, id: EndpointId, own: Transports, seed: [u8; 32]) -> Self {
        let mut rng = Rng::new(seed);
        let pairs = Pairs::new(Rng::new(rng.block()));
        Endpoint {
            late: Late::new(&config),
            config,
            id,
            features: features_of(&own),
            own,
            networks: Vec::new(),
            secret: rng.block(),
            rng,
            flows: BTreeMap::new(),
            by_id: BTreeMap::new(),
            by_ends: BTreeMap::new(),
            dialling: BTreeMap::new(),
            numbers: Counted::default(),
            candidates: Candidates::default(),
            pairs: Arc::new(pairs),
            offers: Offers::default(),
            processes: Processes::default(),
            pending: Pending::default(),
            tombs: Tombs::new(TOMB_AGE),
            inquiries: Inquiries::default(),
            refusals: Refusals::default(),
            shut_off: ShutOff::default(),
            hellos: Pace::default(),
            connects: Pace::default(),
            probes: Probes::default(),
            reaches: Reaches::default(),
            exchanges: Exchanges::default(),
            askers: Askers::default(),
            conns: Counted::default(),
            fresh: VecDeque::new(),
            flushes: Counted::default(),
            next_conn: 0,
            timers: Timers::default(),
            out: Out::default(),
            dropped: 0,
        }
    }

    /// Where a flow stands; `None` if there is no flow of that token.
    pub fn state(&self, token: FlowToken) -> Option<State> {
        self.flows.get(&token).map(|flow| flow.state())
    }

    /// Whether the flow has lost its transport, and has no other yet.
    pub fn lacks_transport(&self, token: FlowToken) -> bool {
        self.flows
            .get(&token)
            .is_some_and(|flow| match flow.state() {
                State::Suspended | State::Resuming => true,
                State::Negotiating => flow.outage.is_some(),
                _ => false,
            })
    }

    /// Whether a peer with SLIM may be at the other end: HELLO was sent, or has come, or may be late.
    pub fn may_have_peer(&self, now: Time, token: FlowToken) -> bool {
        self.flows.get(&token).is_some_and(|flow| {
            let asking = flow.hello.is_some() || self.candidates.any(token);
            flow.peer.is_some() || asking || self.may_be_asked(now, flow)
        })
    }

    /// Acceptor: whether HELLO has come for the flow, from its peer or from whoever says that it is.
    pub fn was_asked(&self, token: FlowToken) -> bool {
        let known = |flow: &FlowRecord| flow.peer.is_some() || self.candidates.any(token);
        self.flows.get(&token).is_some_and(|flow| known(flow))
    }

    /// The addresses that a flow was opened with, our end and their end; `None` if there is no flow of that token.
    pub fn addrs(&self, token: FlowToken) -> Option<(SocketAddr, SocketAddr)> {
        self.flows.get(&token).map(|flow| flow.ends.both())
    }

    /// Whether nobody knows yet if the peer of a flow has SLIM, at an address of ours for which `fits` holds.
    pub fn negotiates_at(&self, fits: impl Fn(SocketAddr) -> bool) -> bool {
        let mut flows = self.flows.values();
        flows.any(|flow| flow.state() == State::Negotiating && fits(flow.ends.local()))
    }

    /// Whether a flow is at an address of ours for which `fits` holds.
    pub fn has_flow_at(&self, fits: impl Fn(IpAddr) -> bool) -> bool {
        let mut flows = self.flows.values();
        flows.any(|flow| fits(flow.ends.local().ip()))
    }

    /// Messages and connections thrown away so far because they were garbage, not genuine, of no
    /// flow, or too many.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    fn flow(&mut self, token: FlowToken) -> &mut FlowRecord {
        self.flows
            .get_mut(&token)
            .expect("whoever calls this has looked the flow up")
    }

    fn drop_one(&mut self) {
        self.dropped += 1;
    }
}

/// Commands.
impl Endpoint {
    /// A connection of the application stands. `token` must not be in use. The peer is asked for
    /// SLIM, or asks; nothing has to wait for the outcome, which is `Live` or `Legacy`.
    pub fn open(
        &mut self,
        now: Time,
        token: FlowToken,
        role: Role,
        local: SocketAddr,
        remote: SocketAddr,
    ) {
        let ends = Ends::new(plain(local), plain(remote));
        if self.add(now, token, role, ends) {
            self.start_negotiation(now, token);
        }
    }

    /// A flow of which nothing is known yet but its connection. False if the token is in use.
    fn add(&mut self, now: Time, token: FlowToken, role: Role, ends: Ends) -> bool {
        if self.flows.contains_key(&token) {
            debug_assert!(false, "{token:?} is in use");
            return false;
        }
        if role == Role::Acceptor {
            self.met_again(&ends);
            self.by_ends.insert(ends.clone(), token);
            let flow = FlowRecord::new(now, token, role, ends);
            self.flows.insert(token, Box::new(flow));
        } else {
            self.pairs.note(ends.local().port());
            self.add_connector(now, token, ends);
        }
        true
    }

    /// The flow's transport has failed, has ended, or is suspected. See the driving contract for
    /// what must have been done before.
    pub fn fault(&mut self, now: Time, token: FlowToken, cause: Cause) {
        let Some(flow) = self.flows.get_mut(&token) else {
            return;
        };
        match flow.state() {
            State::Negotiating => self.fault_negotiating(now, token, cause),
            State::Legacy => match cause {
                Cause::Errno(errno) => self.escalate_quietly(now, token, errno),
                Cause::Eof { .. } => self.out.push(Action::Reinstate { token }),
                Cause::Stall | Cause::PeerAsked => {}
            },
            State::Live => self.fault_live(now, token, cause),
            State::Suspended | State::Resuming => self.fault_suspended(now, token, cause),
            State::Escalated | State::Closed => {}
        }
    }

    fn fault_live(&mut self, now: Time, token: FlowToken, cause: Cause) {
        let known = self.flow(token).outage.is_some();
        match (known, cause) {
            // Is being looked into.
            (true, Cause::Stall | Cause::PeerAsked) | (false, Cause::PeerAsked) => {}
            (true, Cause::Errno(_) | Cause::Eof { .. }) => {
                // The stall was the beginning of it. What was found out about paths meanwhile is
                // worth little: the flow has all its attempts now.
                self.drop_outgoing(now, token);
                self.drop_query(token);
                self.timers.clear_flow(token);
                self.begin_outage(now, token, Outage::new(now, cause));
            }
            (false, _) => self.begin_outage(now, token, Outage::new(now, cause)),
        }
    }

    fn fault_suspended(&mut self, now: Time, token: FlowToken, cause: Cause) {
        let flow = self.flow(token);
        if let (Cause::Errno(errno), Some(outage)) = (cause, &mut flow.outage) {
            outage.errno.get_or_insert(errno);
        }
        if flow.change.pump.is_none() || cause == Cause::Stall {
            return;
        }
        // The new transport has failed before it was of any use. The peer may already be using it.
        flow.change.pump = None;
        flow.bar = Bar::Shut;
        flow.change.drained = DrainState::No;
        self.settle(token);
        self.start_attempts(now, token);
    }

    /// The front end cannot keep its side of a session any longer, because another process uses
    /// the descriptor from here on. The peer is told. A flow without a transport is left as soon
    /// as it has one.
    pub fn demote(&mut self, now: Time, token: FlowToken) {
        if self.flows.contains_key(&token) {
            self.leave(now, token, Leaving::Ours);
        }
    }

    /// The same, as soon as the peer has heard it: until then the flow is what it was here. At once if the peer cannot be
    /// asked.
    pub fn demote_heard(&mut self, now: Time, token: FlowToken) {
        let live = self.state(token) == Some(State::Live);
        if !(live && self.ask_for_plain(now, token)) {
            self.demote(now, token);
        }
    }

    /// The flows (both ends may be here) that a message asks about, or asks to resume, whoever wrote it. The answer is
    /// what they are when the message is handled: whoever drives the endpoint may look at them before.
    pub fn asked_about(&self, data: &[u8]) -> [Option<FlowToken>; 2] {
        let id = match wire::parse(data).map(|parsed| parsed.message) {
            Ok(Message::Query(query)) => query.flow,
            Ok(Message::Resume(resume)) => resume.flow,
            _ => return [None; 2],
        };
        [Role::Connector, Role::Acceptor].map(|role| self.by_id.get(&(id, role)).copied())
    }

    /// This host's addresses have changed, or the networks that it has them in. Peers learn of it with new flows.
    pub fn set_addrs(&mut self, addrs: Vec<IpAddr>, networks: Vec<Net>) {
        self.own.addrs = addrs;
        self.networks = networks;
        let pairs = self.pairs.clone();
        pairs.keep(|ip| self.may_know(ip));
    }

    /// Whether the host with this address may know of us: by the settings, or because a peer has named it.
    pub fn may_know(&self, ip: IpAddr) -> bool {
        self.config.peers.contains(ip, &self.networks) || self.processes.have(ip.to_canonical())
    }
}

/// What happened.
impl Endpoint {
    /// A datagram came from `from` to the socket bound to `local`.
    pub fn handle_datagram(&mut self, now: Time, from: SocketAddr, local: SocketAddr, data: &[u8]) {
        // A stranger does not even learn that somebody is here.
        if !self.may_know(from.ip()) {
            return self.drop_one();
        }
        let Ok(parsed) = wire::parse(data) else {
            return self.drop_one();
        };
        match &parsed.message {
            Message::Hello(hello) => self.on_hello(now, from, local, &parsed, hello),
            Message::HelloWait(wait) => self.on_hello_wait(now, &parsed, wait),
            Message::HelloAck(ack) => self.on_hello_ack(now, &parsed, ack),
            Message::HelloNak(nak) => self.on_hello_nak(now, nak),
            Message::Fin(fin) => self.on_fin(now, &parsed, fin),
            Message::Query(query) => self.on_query(now, from, local, &parsed, query),
            Message::Status(status) => self.on_status(now, &parsed, status),
            Message::Unknown(unknown) => self.on_unknown(now, &parsed, unknown),
            Message::Demote(demote) => self.on_demote(now, &parsed, demote),
            Message::Pair(pair) => self.on_pair(now, &parsed, pair),
            Message::Open(_) => self.on_open(now, from, local, data),
            Message::Seen(seen) => self.on_seen(now, &parsed, seen),
            Message::Offer(offer) => self.on_offer(now, from, local, &parsed, offer),
            Message::HelloDone(done) => self.on_hello_done(now, from, &parsed, done),
            Message::Challenge(_)
            | Message::Resume(_)
            | Message::ResumeOk(_)
            | Message::Confirm(_)
            | Message::Refuse(_) => self.drop_one(),
        }
    }

    /// The host at `to` refused a datagram: no socket has that port (ICMP port unreachable). `quoted` is what has come
    /// back of the datagram: all of it, its beginning, or nothing. Anybody can send such a message, so it is believed
    /// only if it quotes a flow that `to` was told of.
    pub fn handle_refused(&mut self, now: Time, to: SocketAddr, quoted: &[u8]) {
        let to = plain(to);
        match wire::quoted(quoted) {
            Some((Kind::Hello, id)) => self.hello_refused(now, to, id),
            Some((Kind::Open, id)) => self.open_refused(now, to, id),
            Some((_, id)) if self.was_told(to, id) => {
                self.query_refused(now, to);
                self.probe_refused(now, to);
            }
            Some((_, id)) => self.candidate_refused(now, to, id),
            None => self.drop_one(),
        }
    }

    /// Whether `to` is an address of the peer of a flow of this name.
    fn was_told(&self, to: SocketAddr, id: FlowId) -> bool {
        let is_peer = |token: &FlowToken| {
            let flow = &self.flows[token];
            flow.peer.as_ref().is_some_and(|peer| {
                let ip =
                    flow.ends.remote().ip() == to.ip() || peer.process.addrs.contains(&to.ip());
                ip && peer.process.control_port == to.port()
            })
        };
        let roles = [Role::Connector, Role::Acceptor];
        let tokens = roles.iter().filter_map(|role| self.by_id.get(&(id, *role)));
        tokens.into_iter().any(is_peer)
    }

    /// The time that [`poll_timeout`](Endpoint::poll_timeout) told has come.
    pub fn handle_timeout(&mut self, now: Time) {
        while let Some(owner) = self.timers.pop(now) {
            match owner {
                TimerOwner::Conn(conn) => self.on_conn_timer(conn),
                TimerOwner::Peer(peer) => self.on_peer_timer(now, peer),
                TimerOwner::Probe(peer) => self.on_probe_timer(now, peer),
                TimerOwner::Reach(peer) => self.on_reach_timer(now, peer),
                TimerOwner::Offer(peer) => self.on_offer_timer(now, peer),
                TimerOwner::Flow(token, timer) => self.on_timer(now, token, timer),
            }
        }
    }

    fn on_timer(&mut self, now: Time, token: FlowToken, timer: Timer) {
        if !self.flows.contains_key(&token) {
            return;
        }
        match timer {
            Timer::Hello if self.candidates.any(token) => {
                let hello = self.flows[&token].hello.is_some();
                self.ask_candidates(now, token);
                if hello {
                    self.hello_again(now, token);
                }
            }
            Timer::Hello => self.hello_again(now, token),
            Timer::HelloDeadline => self.on_hello_deadline(now, token),
            Timer::Window => self.on_window(now, token),
            Timer::Hung => self.on_hung(now, token),
            Timer::Stuck => self.on_stuck(now, token),
            Timer::Backoff => self.on_backoff(now, token),
            Timer::PeerSilent => self.on_peer_silent(now, token),
            Timer::Query => self.on_query_timer(now, token),
            Timer::Explanation => self.on_unexplained(now, token),
            Timer::Deadline => self.on_deadline(now, token),
        }
    }
}

/// What to do now.
impl Endpoint {
    /// The next thing to be done.
    pub fn poll_action(&mut self) -> Option<Action> {
        out::pop(&mut self.out.actions)
    }

    /// The next thing worth telling people. A flow without a name yet has one of zeros.
    pub fn poll_event(&mut self) -> Option<(FlowToken, FlowId, Event)> {
        out::pop(&mut self.out.events)
    }

    /// When to call [`handle_timeout`](Endpoint::handle_timeout), unless something happens before.
    pub fn poll_timeout(&self) -> Option<Time> {
        self.timers.next()
    }
}
