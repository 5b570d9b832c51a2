//! All flows of one process: the session state machine.
//!
//! [`Endpoint`] decides; a *driver* acts. The driver reports what happened ([`open`],
//! [`fault`], `handle_*`) and carries out the actions that the endpoint asks for ([`poll_action`]).
//! The bytes of a flow never pass through the endpoint: the *front end* holds them, and reports only counts.
//!
//! # Driving contract
//!
//! After every call of a command or a `handle_*` method, take actions from [`poll_action`] until
//! there are none and carry them out in order; then take events from [`poll_event`]; then arm one
//! timer for [`poll_timeout`] and call [`handle_timeout`] when it fires (early is harmless). An
//! action may be answered while other actions are still queued.
//!
//! For each flow:
//!
//! * The front end answers `Suspend` by exactly one [`handle_suspended`], and `Drain` by exactly one
//!   [`handle_drained`], even if a fault came in between. It answers `Install` by
//!   [`handle_installed`], unless a fault, a `Suspend` or a `Drain` came before the replay was
//!   written.
//! * Before [`fault`] with an error or an end of stream, the front end suspends the flow by
//!   itself: no data call begins, and nothing is trimmed. Before [`fault`] with a stall it does not. Data calls that are under
//!   way may still move bytes on the old transport; they must return before `Drain` is answered. After an end of stream
//!   the front end may go on sending on the old transport, until `Drain`, `Suspend` or `Install`.
//! * The front end reports a fault for the transport in use only. While the replay after `Install` is being
//!   written, that is the new connection.
//! * From `Suspend` or `fault` until the flow is live again, only `Install` trims the replay buffer;
//!   an acknowledgement that the kernel reports never does.
//! * The driver answers `Verify` by [`handle_verified`]. No answer is needed if the flow was reinstated, resumed or given up
//!   before.
//! * `Drain` reads the newest transport dry and closes it. That is the transport of the last `Install`, even if its replay is
//!   not finished. After a `Flush`, `Drain` may follow `Install` at once: then there is nothing to replay.
//!
//! A flow that both ends have agreed on by other means is opened with [`open_agreed`], and is live at once.
//!
//! A process that executes another program may hand its flows over to that program's endpoint, which has the same id and the same
//! ports ([`hand_over`]); that one opens them with [`open_handed`]. Nothing may happen to the flows in between.
//!
//! For short connections between processes that know each other ([`Pairs`]):
//!
//! * A connection that was [dialled](Pairs::dial) is opened with [`open_known`]; the caller of `dial` sends the OPEN before.
//! * A datagram that comes to a mailbox goes to [`Pairs::receive`], in any thread. Before an accepted flow's `fault`, `finish`,
//!   `demote` and `gone`, and from time to time otherwise, the driver empties the mailboxes and calls [`take_arrivals`], then
//!   [`send_seen`].
//! * [`finish_announced`] replaces `finish` where FIN has been sent already, or is not needed.
//!
//! For each connection:
//!
//! * Read one whole message at a time and hand it in. Read at most two messages from a connection:
//!   stream bytes may follow. Stop reading at `Install`, at `Close`, and after the second message.
//! * Report a loss only after everything readable was handed in.
//! * Answer `Flush` by exactly one [`handle_flushed`]. If a complete message waits in the receive queue, hand it in first.
//! * After `Install` or `Close` the endpoint has forgotten the connection, and ignores reports
//!   about it.
//!
//! # Example
//!
//! Two processes negotiate a flow:
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
//! // The application at a has connected, and the one at b has accepted.
//! a.open(Time(0), FlowToken(1), Role::Connector, a_addr, b_addr);
//! b.open(Time(0), FlowToken(9), Role::Acceptor, b_addr, a_addr);
//!
//! // a sends HELLO to the address that it connected to, and b answers.
//! let Some(Action::Datagram { to, data, .. }) = a.poll_action() else { panic!() };
//! assert_eq!(to, b_addr);
//! b.handle_datagram(Time(100), a_control, to, &data);
//! let Some(Action::Datagram { to, data, .. }) = b.poll_action() else { panic!() };
//! a.handle_datagram(Time(200), b_addr, to, &data);
//! assert_eq!(a.poll_action(), Some(Action::Live { token: FlowToken(1) }));
//!
//! // HELLO_DONE shows b that the answer has arrived, so the source of HELLO was not forged.
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
//! [`finish_announced`]: Endpoint::finish_announced
//! [`hand_over`]: Endpoint::hand_over
//! [`open_handed`]: Endpoint::open_handed
//! [`take_arrivals`]: Endpoint::take_arrivals
//! [`send_seen`]: Endpoint::send_seen
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

mod accusations;
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
mod explain;
mod failback;
mod flow;
mod handed;
mod handle;
mod hold;
mod initiate;
mod inquiries;
mod inquiry;
mod late;
mod leave;
mod locators;
mod meet;
mod negotiate;
mod neighbours;
mod others;
mod out;
mod outage;
mod outlooks;
mod pace;
mod pairs;
mod paths;
mod pending;
mod probe;
mod processes;
mod reach;
mod record;
mod refusals;
mod relayed;
mod respond;
mod resume;
mod rng;
mod shut_off;
mod silence;
mod survey;
mod tables;
#[cfg(test)]
mod tests;
mod tie_break;
mod timer;

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use crate::config::{Config, Net};
use crate::event::{Event, LegacyReason};
use crate::ids::{Cause, ConnId, Counted, EndpointId, FlowId, FlowToken, Role, Time};
use crate::transport::{Locator, Transports};
use crate::wire::{self, Message};

pub use action::Action;
pub use again::{Acknowledged, Earlier};
pub use agreed::{Agreed, Announcement};
pub use flow::State;
pub use handed::{HandOver, HandedFlow};
pub use hold::HOLD_ROUNDS;
pub use pairs::{MailboxState, Opened, Pairs};
pub use pending::PendingHello;
pub use survey::{PeerStanding, Standing, SurveyedEscalation, SurveyedFlow, SurveyedPeer};
pub use tables::Tables;

use accusations::Accusations;
use asked::Askers;
use candidates::Candidates;
use close::{TOMB_AGE, Tombs};
use ends::Ends;
use failback::Failbacks;
use hold::Holds;
use inquiries::Inquiries;
use late::Late;
use locators::{Exchanges, features_of};
use negotiate::plain;
use out::Out;
use outage::{HoldState, Outage};
use outlooks::Outlooks;
use pace::Pace;
use pairs::Offers;
use pending::Pending;
use probe::Probes;
use processes::Processes;
use reach::Reaches;
use record::{Bar, DrainState, FlowRecord, Leaving};
use refusals::Refusals;
use relayed::Relayed;
use resume::Conn;
use rng::Rng;
use shut_off::ShutOff;
use silence::Silences;
use survey::Surveyed;
use timer::Timers;

/// All flows of one process. The [module](self) says how to drive it.
pub struct Endpoint {
    config: Config,
    id: EndpointId,
    own: Transports,
    networks: Vec<Net>,
    rng: Rng,
    /// `random_s` of each HELLO_ACK is derived from it.
    secret: [u8; 32],
    /// Ordered by token, so that a run with the same seed repeats exactly.
    flows: BTreeMap<FlowToken, Box<FlowRecord>>,
    by_id: BTreeMap<(FlowId, Role), FlowToken>,
    /// Accepted flows.
    by_ends: BTreeMap<Ends, FlowToken>,
    /// For each pair of addresses, the flow that connected last, while it negotiates. Entries may be stale.
    dialling: BTreeMap<Ends, FlowToken>,
    /// The kernel's connection numbers (`SO_COOKIE`) of accepted flows, while those negotiate.
    numbers: Counted<FlowToken, u64>,
    candidates: Candidates,
    pairs: Arc<Pairs>,
    offers: Offers,
    /// The feature bits that we announce.
    features: u64,
    processes: Processes,
    pending: Pending,
    tombs: Tombs,
    late: Late,
    inquiries: Inquiries,
    refusals: Refusals,
    shut_off: ShutOff,
    /// By address: the flows that send HELLO there.
    hellos: Pace<SocketAddr>,
    /// By address: the flows that connect there to resume.
    connects: Pace<Locator>,
    /// By locator: the flows that try a preferred kind there.
    trials: Pace<Locator>,
    probes: Probes,
    silences: Silences,
    holds: Holds,
    reaches: Reaches,
    exchanges: Exchanges,
    accusations: Accusations,
    /// Flows whose present transport, or the last one, goes through the witness.
    relayed: BTreeMap<FlowToken, Relayed>,
    /// Connectors' flows that have, or had, another kind than TCP to choose.
    failbacks: Failbacks,
    outlooks: Outlooks,
    askers: Askers,
    conns: Counted<ConnId, Conn>,
    /// Accepted connections on which no RESUME has come yet, oldest first.
    fresh: VecDeque<ConnId>,
    /// `Flush`es under way.
    flushes: Counted<ConnId, FlowToken>,
    next_conn: u64,
    timers: Timers,
    out: Out,
    surveyed: Surveyed,
    dropped: u64,
}

/// Getters.
impl Endpoint {
    /// Makes an endpoint without flows, which has the transports `own`. All random numbers come from `seed`, so `seed` must be
    /// unpredictable.
    pub fn new(config: Config, id: EndpointId, own: Transports, seed: [u8; 32]) -> Self {
        let mut rng = Rng::new(seed);
        let pairs = Pairs::new(Rng::new(rng.block()));
        // A peer that has missed the end of a flow asks when the network is back.
        let tomb_age = TOMB_AGE.max(config.hold.unwrap_or_default());
        let inquiries = Inquiries::new(config.when_lost.is_some() || !config.witness.is_empty());
        Endpoint {
            late: Late::new(&config),
            features: features_of(&own, &config),
            config,
            id,
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
            tombs: Tombs::new(tomb_age),
            inquiries,
            refusals: Refusals::default(),
            shut_off: ShutOff::default(),
            hellos: Pace::default(),
            connects: Pace::default(),
            trials: Pace::default(),
            probes: Probes::default(),
            silences: Silences::default(),
            holds: Holds::default(),
            reaches: Reaches::default(),
            exchanges: Exchanges::default(),
            accusations: Accusations::default(),
            relayed: BTreeMap::new(),
            failbacks: Failbacks::new(),
            outlooks: Outlooks::default(),
            askers: Askers::default(),
            conns: Counted::default(),
            fresh: VecDeque::new(),
            flushes: Counted::default(),
            next_conn: 0,
            timers: Timers::default(),
            out: Out::default(),
            surveyed: Surveyed::default(),
            dropped: 0,
        }
    }

    /// The state of a flow; `None` if there is no flow with that token.
    pub fn state(&self, token: FlowToken) -> Option<State> {
        self.flows.get(&token).map(|flow| flow.state())
    }

    /// Whether the flow has lost its transport and has no new one yet.
    pub fn lacks_transport(&self, token: FlowToken) -> bool {
        self.flows
            .get(&token)
            .is_some_and(|flow| match flow.state() {
                State::Suspended | State::Resuming => true,
                State::Negotiating => flow.outage.is_some(),
                _ => false,
            })
    }

    /// Whether the peer of the flow may have SLIM: HELLO was sent, or has arrived, or may be late.
    pub fn may_have_peer(&self, now: Time, token: FlowToken) -> bool {
        self.flows.get(&token).is_some_and(|flow| {
            let asking = flow.hello.is_some() || self.candidates.any(token);
            flow.peer.is_some() || asking || self.may_be_asked(now, flow)
        })
    }

    /// Acceptor: whether a HELLO for the flow has arrived, from its peer or from any other sender.
    pub fn has_hello(&self, token: FlowToken) -> bool {
        let known = |flow: &FlowRecord| flow.peer.is_some() || self.candidates.any(token);
        self.flows.get(&token).is_some_and(|flow| known(flow))
    }

    /// The addresses that a flow was opened with, local and remote; `None` if there is no flow with that token.
    pub fn addrs(&self, token: FlowToken) -> Option<(SocketAddr, SocketAddr)> {
        self.flows.get(&token).map(|flow| flow.ends.both())
    }

    /// Whether a flow negotiates at a local address for which `fits` holds.
    pub fn negotiates_at(&self, fits: impl Fn(SocketAddr) -> bool) -> bool {
        let mut flows = self.flows.values();
        flows.any(|flow| flow.state() == State::Negotiating && fits(flow.ends.local()))
    }

    /// Whether a flow has a local address for which `fits` holds.
    pub fn has_flow_at(&self, fits: impl Fn(IpAddr) -> bool) -> bool {
        let mut flows = self.flows.values();
        flows.any(|flow| fits(flow.ends.local().ip()))
    }

    /// Number of messages and connections dropped so far: malformed, not authentic, for no known flow, or too many.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    fn flow(&mut self, token: FlowToken) -> &mut FlowRecord {
        self.flows
            .get_mut(&token)
            .expect("the caller has looked the flow up")
    }

    fn drop_one(&mut self) {
        self.dropped += 1;
    }
}

/// Commands.
impl Endpoint {
    /// A connection of the application is established. `token` must not be in use. The endpoint negotiates: a connector sends
    /// HELLO, an acceptor waits for it. The outcome is `Live` or `Legacy`; the application does not wait for it.
    pub fn open(
        &mut self,
        now: Time,
        token: FlowToken,
        role: Role,
        local: SocketAddr,
        remote: SocketAddr,
    ) {
        let ends = Ends::new(plain(local), plain(remote));
        if !self.add(now, token, role, ends) {
            return;
        }
        if self.is_fenced() {
            return self.become_legacy(now, token, LegacyReason::Fenced);
        }
        self.start_negotiation(now, token);
    }

    /// Adds a flow whose connection is all that is known of it. False if the token is in use.
    fn add(&mut self, now: Time, token: FlowToken, role: Role, ends: Ends) -> bool {
        if self.flows.contains_key(&token) {
            debug_assert!(false, "{token:?} is in use");
            return false;
        }
        if role == Role::Acceptor {
            self.forget_unasked(&ends);
            self.by_ends.insert(ends.clone(), token);
            let flow = FlowRecord::new(now, token, role, ends);
            self.flows.insert(token, Box::new(flow));
        } else {
            self.pairs.note(ends.local().port());
            self.add_connector(now, token, ends);
        }
        true
    }

    /// The flow's transport has failed, has ended, or is suspected to have failed. The driving contract says
    /// what the front end must do before.
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

    /// The front end suspects the path of a flow's connection, because flows on other paths go on. As a stall, but the attempts begin with
    /// another path.
    pub fn suspect(&mut self, now: Time, token: FlowToken) {
        self.suspect_path(now, token, false);
    }

    /// As [`suspect`](Self::suspect); the path may drop only long packets.
    fn suspect_path(&mut self, now: Time, token: FlowToken, small_segments: bool) {
        let flow = self.flows.get(&token);
        if flow.is_some_and(|flow| flow.state() == State::Live && flow.outage.is_none()) {
            let mut outage = Outage::new(now, Cause::Stall);
            outage.elsewhere = true;
            outage.small_segments = small_segments;
            self.begin_outage(now, token, outage);
        }
    }

    fn fault_live(&mut self, now: Time, token: FlowToken, cause: Cause) {
        let known = self.flow(token).outage.is_some();
        if known && self.stays_held(now, token, cause) {
            return;
        }
        match (known, cause) {
            // Attempts are under way already, or there is no fault.
            (true, Cause::Stall | Cause::PeerAsked) | (false, Cause::PeerAsked) => {}
            // Nobody reads what is unacknowledged.
            (false, Cause::Stall) if self.has_peer_closed(token) => {}
            (true, Cause::Errno(_) | Cause::Eof { .. }) => {
                // The stall has become a failure. The attempts made during the stall do not count:
                // the flow gets all its attempts now.
                self.drop_outgoing(now, token);
                self.drop_query(token);
                self.timers.clear_flow(token);
                let mut outage = Outage::new(now, cause);
                let before = self.flow(token).outage.as_ref();
                outage.suspected = before.map_or(now, |before| before.suspected);
                outage.hold = before.and_then(|before| before.hold.map(HoldState::awake));
                self.begin_outage(now, token, outage);
            }
            (false, _) => self.begin_outage(now, token, Outage::new(now, cause)),
        }
    }

    fn fault_suspended(&mut self, now: Time, token: FlowToken, cause: Cause) {
        let flow = self.flow(token);
        if let (Cause::Errno(errno), Some(outage)) = (cause, &mut flow.outage) {
            outage.errno.get_or_insert(errno);
        }
        if flow.change.pump.is_some() && cause != Cause::Stall {
            self.give_up_transport(now, token);
        }
    }

    /// The replay on a new transport makes no progress: its path drops everything, or long packets. The kernel has reported no fault, and will
    /// not for a long time.
    pub fn replay_stalled(&mut self, now: Time, token: FlowToken) {
        let flow = self.flows.get(&token);
        if flow.is_none_or(|flow| flow.change.pump.is_none()) {
            return;
        }
        let was_deaf = self.silences.was_deaf(now, token);
        if let Some(outage) = &mut self.flow(token).outage {
            // The messages of the resume have passed.
            outage.small_segments |= was_deaf || outage.replay_stalled;
            outage.replay_stalled = true;
        }
        self.give_up_transport(now, token);
    }

    /// The new transport is of no use, and its replay is not written. The peer may already be using it.
    fn give_up_transport(&mut self, now: Time, token: FlowToken) {
        let flow = self.flow(token);
        flow.change.pump = None;
        flow.bar = Bar::Shut;
        flow.change.drained = DrainState::No;
        self.update_state(token);
        self.start_attempts(now, token);
    }

    /// The front end cannot keep its side of the session any longer, because another process uses
    /// the descriptor from here on. The peer is told by DEMOTE. A flow without a transport becomes plain TCP as soon
    /// as it has one.
    pub fn demote(&mut self, now: Time, token: FlowToken) {
        if self.flows.contains_key(&token) {
            self.leave(now, token, Leaving::Ours);
        }
    }

    /// As [`demote`](Endpoint::demote), but the flow keeps its session until the peer has confirmed that it knows. If the peer
    /// cannot be asked, the flow is demoted at once.
    pub fn demote_confirmed(&mut self, now: Time, token: FlowToken) {
        let live = self.state(token) == Some(State::Live);
        if !(live && self.ask_for_plain(now, token)) {
            self.demote(now, token);
        }
    }

    /// The flows that a QUERY asks about, or a RESUME asks to resume; the message is not authenticated. There are two if both
    /// ends of the flow are in this process. The endpoint answers with the state of the flow at the time it handles the
    /// message, so the driver may bring these flows up to date before.
    pub fn asked_about(&self, data: &[u8]) -> [Option<FlowToken>; 2] {
        let id = match wire::parse(data).map(|parsed| parsed.message) {
            Ok(Message::Query(query)) => query.flow,
            Ok(Message::Resume(resume)) => resume.flow,
            _ => return [None; 2],
        };
        [Role::Connector, Role::Acceptor].map(|role| self.by_id.get(&(id, role)).copied())
    }

    /// The addresses of this host, or the networks they are in, have changed. Peers learn of it with new flows, and those of held flows as
    /// soon as they can be reached.
    pub fn set_addrs(&mut self, now: Time, addrs: Vec<IpAddr>, networks: Vec<Net>) {
        let moved = self.own.addrs != addrs;
        self.own.addrs = addrs;
        self.networks = networks;
        let pairs = self.pairs.clone();
        pairs.keep(|ip| self.may_know(ip));
        if moved {
            self.addresses_moved(now);
        }
    }

    /// Whether the host with this address may talk to us: the settings name it, or a peer has announced the address.
    pub fn may_know(&self, ip: IpAddr) -> bool {
        self.config.peers.contains(ip, &self.networks) || self.processes.have(ip.to_canonical())
    }
}

/// Actions, events and the timer for the driver.
impl Endpoint {
    /// The next action to carry out.
    pub fn poll_action(&mut self) -> Option<Action> {
        out::pop(&mut self.out.actions)
    }

    /// The next event to log. A flow that has no id yet is named by zeros.
    pub fn poll_event(&mut self) -> Option<(FlowToken, FlowId, Event)> {
        out::pop(&mut self.out.events)
    }

    /// When to call [`handle_timeout`](Endpoint::handle_timeout), unless something happens before.
    pub fn poll_timeout(&self) -> Option<Time> {
        self.timers.next()
    }
}
