//! The driver reports to the endpoint what happens, and carries out the endpoint's actions, one after the other.
//!
//! It knows nothing of the tasks that call it. Tasks that are to be started it leaves in [`Tasks`].

mod actions;
mod addresses;
mod conns;
mod ending;
mod executing;
mod flows;
mod glance;
mod held;
mod linger;
mod listeners;
mod watch;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::mem;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::RawFd;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use slim_core::config::{Config, WhenLost};
use slim_core::endpoint::{Acknowledged, Action, Earlier, Endpoint};
use slim_core::transport::{OtherLocator, Transports};
use slim_core::wire::{self, Kind};
use slim_core::{Cause, ConnId, Counted, FinHow, FlowToken, Role, Time};
use slim_stream::Drained;

use crate::FlowIo;
use crate::commands::command::{AgentSurvey, Command};
use crate::control::Control;
use crate::control::places::Ports;
use crate::events::{self, EventLog, Log};
use crate::exec::Identity;
use crate::failure::panic::Survivor;
use crate::host::addresses::{self as own_addresses, Addresses};
use crate::host::identity;
use crate::listeners::claims::Claims;
use crate::listeners::connection_at::connection_at;
use crate::listeners::listened;
use crate::listeners::listening::Together;
use crate::table::escalations;
use crate::tasks::mailbox;
use crate::tasks::order::Order;
use crate::tasks::{Task, Tasks};
use slim_sys::fds;
use watch::Watch;

/// Within this time after a connection has left its listener's queue, the agent knows of it.
const ACCEPTING: Duration = Duration::from_millis(50);
/// Most listeners with an empty queue that are remembered.
const QUEUES: usize = 64;
/// Most accepted resume connections, when descriptors are plentiful.
const MOST_INCOMING: usize = 4096;

/// A connection that has become a flow's transport, while its replay is not written yet.
pub(crate) struct FlowCarrier {
    pub(crate) conn: ConnId,
    /// The replay must not go on; the connection waits to be drained.
    pub(crate) stopped: bool,
    /// The action to carry out once the connection is drained.
    pub(crate) then: Option<Action>,
}

/// A report to the endpoint, delivered when no action is left: the answer to an action, or something found while
/// carrying one out.
pub(crate) enum Notice {
    Suspended(FlowToken),
    Drained(FlowToken, Drained),
    Verified(FlowToken, bool),
    Flushed(ConnId),
    Fault(FlowToken, Cause),
    ReplayStalled(FlowToken),
    Finish(FlowToken, u64, FinHow),
    Gone(FlowToken),
    /// The front end keeps too many bytes of a relayed flow.
    Full(FlowToken),
    /// The bytes of a held flow have moved on its old transport.
    Moves(FlowToken),
    Unlistened(SocketAddr),
}

/// The state of the agent thread.
pub(crate) struct Driver {
    pub(crate) endpoint: Endpoint,
    /// Flows whose replay is being written.
    pub(crate) carriers: BTreeMap<FlowToken, FlowCarrier>,
    /// Flows whose transport is drained, and which have no other yet.
    pub(crate) drained: BTreeMap<FlowToken, Drained>,
    pub(crate) watch: Watch,
    pub(crate) log: Log,
    pub(crate) notices: VecDeque<Notice>,
    pub(crate) control: Control,
    pub(crate) claims: Claims,
    conns: Counted<ConnId, mailbox::Sender<Order>>,
    /// Accepted connections on which no message has come yet, oldest first.
    silent: BTreeSet<ConnId>,
    accepted: u64,
    /// Number of accepted connections in `conns`.
    incoming: usize,
    most_incoming: usize,
    /// Flows to forget once their last events are written, with their addresses.
    ended: BTreeMap<FlowToken, Option<(SocketAddr, SocketAddr)>>,
    pub(crate) together: Together,
    /// Tasks to start when this turn is over.
    pub(crate) tasks: Tasks,
    /// Has all flows, among other things.
    pub(crate) survivor: Rc<Survivor>,
    /// Own addresses, and the networks that they are in.
    pub(crate) addresses: Addresses,
    /// What each listener of another kind than TCP announces.
    pub(crate) locators: Vec<Option<OtherLocator>>,
    /// A job key is set.
    pub(crate) keyed: bool,
    /// The thread is to end.
    pub(crate) retired: bool,
    when_lost: Option<WhenLost>,
    /// [`take_datagrams`](Self::take_datagrams) has been called in this turn.
    datagrams_taken: bool,
    /// Datagrams that it has taken, and that are handled after the commands of this turn: source, destination, data.
    put_off: Vec<(SocketAddr, SocketAddr, Box<[u8]>)>,
    events: EventLog,
    /// Listeners whose queue was empty at the last check, and since when.
    empty_queues: BTreeMap<SocketAddr, Time>,
}

impl Driver {
    /// Must run inside the runtime. `transports` has the kinds other than TCP.
    pub(crate) fn new(
        config: Config,
        transports: Transports,
        (ports, before): (Ports, Option<(Identity, bool)>),
        together: Together,
        survivor: Rc<Survivor>,
        seed: &[u8; 40],
    ) -> Self {
        let log = Log::new(config.log);
        let (addresses, networks) = own_addresses::now(log);
        let (for_core, incarnation) = split(seed);
        let id = before.map_or_else(|| identity::endpoint(incarnation), |(known, _)| known.id);
        let events = EventLog::open(&config, log);
        let keyed = config.job_key.is_some();
        let when_lost = config.when_lost;
        let watch = Watch::new(&config);
        log.debug(|| format!("endpoint {id}: {ports:?}, addresses {addresses:?}"));
        let mut endpoint = Endpoint::new(
            config,
            id,
            Transports {
                addrs: addresses.clone(),
                resume_port: ports.resume,
                control_port: ports.control,
                ..transports
            },
            for_core,
        );
        endpoint.set_addrs(together.short.now(), addresses.clone(), networks.clone());
        let mut control = Control::new(ports, log);
        if let Some((known, maps)) = before {
            endpoint.continue_serial(known.serial);
            control.set_maps(maps);
        }
        together.short.begin(endpoint.pairs().clone());
        Driver {
            endpoint,
            carriers: BTreeMap::new(),
            drained: BTreeMap::new(),
            watch,
            log,
            notices: VecDeque::new(),
            control,
            claims: Claims::default(),
            conns: Counted::default(),
            silent: BTreeSet::new(),
            accepted: 0,
            incoming: 0,
            most_incoming: (fds::room() / 2).clamp(16, MOST_INCOMING),
            ended: BTreeMap::new(),
            together,
            tasks: Tasks::default(),
            survivor,
            addresses: (addresses, networks),
            locators: Vec::new(),
            keyed,
            retired: false,
            when_lost,
            datagrams_taken: false,
            put_off: Vec::new(),
            events,
            empty_queues: BTreeMap::new(),
        }
    }

    /// Carries out a command of an application thread.
    pub(crate) fn command(&mut self, now: Time, command: Command) {
        self.watch.tidy_later(now);
        match &command {
            // Messages of the peer that have arrived before take effect first.
            Command::Fault { .. }
            | Command::OutOfStep { .. }
            | Command::Demote { .. }
            | Command::DemoteConfirmed { .. }
            | Command::Shut { .. }
            | Command::Finish { told: false, .. } => {
                self.take_mail(now);
            }
            // The application thread has read the mailbox itself.
            Command::Finish { .. } if self.together.short.in_use() => {
                self.endpoint.take_arrivals(now)
            }
            _ => {}
        }
        match command {
            Command::Open {
                token,
                io,
                role,
                local,
                remote,
            } => {
                if role == Role::Acceptor && self.endpoint.is_awaited(local, remote) {
                    let age = io.age().unwrap_or(Duration::MAX);
                    self.endpoint.note_connection_age(now, (local, remote), age);
                }
                let connection = io.connection();
                let stands = role == Role::Connector
                    || !self.endpoint.is_awaited_again(local, remote)
                    || io.connection_exists()
                    || (connection.is_some() && connection_at(local, remote) == connection);
                self.add_flow(now, token, io);
                if !stands {
                    let ends = (local, remote);
                    return self.endpoint.open_ended(now, token, ends, connection);
                }
                // First, so that HELLO names only addresses where peers can reach this process.
                let served = !self.endpoint.may_know(remote.ip()) || self.serve_at(local);
                self.endpoint.open(now, token, role, local, remote);
                if let Some(connection) = connection {
                    self.endpoint.set_connection_number(token, connection);
                }
                if !served {
                    self.endpoint.demote(now, token);
                }
                if role == Role::Acceptor {
                    self.claim(token, (local, remote));
                }
            }
            Command::OpenKnown {
                token,
                io,
                local,
                opened,
            } => {
                self.add_flow(now, token, io);
                self.endpoint.open_known(now, token, local, &opened);
            }
            Command::OpenAgreed {
                token,
                io,
                role,
                local,
                remote,
                agreed,
            } => {
                self.add_flow(now, token, io);
                // Where nobody can come to us it is plain TCP, as a flow that asks.
                let served = self.serve_at(local);
                self.endpoint
                    .open_agreed(now, token, role, (local, remote), &agreed);
                if !served {
                    self.endpoint.demote(now, token);
                }
            }
            Command::OpenHanded { token, io, flow } => self.open_handed(now, token, io, *flow),
            Command::HandOver {
                tokens,
                answer,
                pause,
                done,
            } => self.hand_over(&tokens, &answer, &pause, &done),
            Command::Describe { answer, done } => {
                let mut answer = answer.lock().unwrap_or_else(PoisonError::into_inner);
                *answer = Some(self.endpoint.announcement());
                drop(answer);
                done.tell();
            }
            Command::Survey { answer, done } => {
                *answer.lock().unwrap_or_else(PoisonError::into_inner) = AgentSurvey {
                    flows: self.endpoint.surveyed_flows().collect(),
                    peers: self.endpoint.surveyed_peers(),
                };
                done.tell();
            }
            Command::AboutToConnect { local, remote } => {
                self.endpoint.about_to_connect(now, local, remote);
            }
            Command::Fault { token, cause } => {
                self.survivor.set_away(token, true);
                self.endpoint.fault(now, token, cause);
                self.take_datagrams(now);
            }
            Command::Suspect { token } => self.endpoint.suspect(now, token),
            Command::Finish {
                token,
                final_seq,
                how,
                told,
            } => {
                if how == FinHow::Close && !told && !self.endpoint.may_have_peer(now, token) {
                    // Probably no peer will ask for bytes that are lost, or how the flow ended.
                    self.endpoint.finish_announced(token, final_seq, how);
                    return self.endpoint.demote(now, token);
                }
                match told {
                    true => self.endpoint.finish_announced(token, final_seq, how),
                    false => self.endpoint.finish(now, token, final_seq, how),
                }
                if how == FinHow::Close {
                    self.linger(now, token);
                }
            }
            Command::Shut {
                token,
                final_seq,
                how,
            } => self.endpoint.finish(now, token, final_seq, how),
            Command::Announce {
                token,
                final_seq,
                how,
            } => self.endpoint.announce(token, final_seq, how),
            Command::Dirty { token } => self.watch.dirty(now, token),
            Command::OutOfStep { token } => self.endpoint.out_of_step(now, token),
            Command::Demote { token } => self.endpoint.demote(now, token),
            Command::DemoteConfirmed { token } => self.endpoint.demote_confirmed(now, token),
            Command::Gone { token } => self.gone(now, token),
            Command::Listen {
                addr,
                socket,
                claims,
            } => {
                self.control.add(addr, socket, &mut self.tasks);
                if let Some(claims) = claims {
                    self.claims.open(addr, claims, &mut self.tasks);
                }
            }
            Command::Elsewhere { addr, owner } => {
                self.endpoint.share_listeners();
                self.claims.found(addr, owner, &mut self.tasks);
            }
            Command::Unlisten { addr, done: None } => self.unlistened(now, addr),
            Command::Unlisten { addr, done } => self.close_listener(addr, done),
            Command::Inform(text) => self.log.info(|| text),
            Command::Flush { done } => {
                events::write_out();
                // The thread may have stopped waiting, which does no harm.
                done.tell();
            }
            Command::DrainExit { limit, done } => {
                self.look_at_lingering(now);
                self.log
                    .debug(|| format!("at exit: {:?}", self.endpoint.tables()));
                self.survivor.add_exiting(now + limit, done);
            }
            Command::EndFlows {
                tokens,
                how,
                answer,
                done,
            } => {
                answer.store(self.end_flows(now, tokens, how), Ordering::Release);
                self.carry_out();
                done.tell();
            }
            Command::ProcessEnds => self.watch.linger.process_ends(now),
            Command::FirstThreadEnds(mask) => {
                self.tasks.start_and_forget(Task::ExitWhenAlone(mask));
            }
            Command::Retire => self.retired = true,
        }
    }

    fn add_flow(&mut self, now: Time, token: FlowToken, io: Arc<dyn FlowIo>) {
        if io.maps_v4() {
            self.control.map_v4(&mut self.tasks);
        }
        self.survivor.add(token, io);
        self.watch.dirty(now, token);
    }

    /// The file of the event log.
    pub(crate) fn events_file(&self) -> Option<RawFd> {
        self.events.number()
    }

    /// The current time, for the endpoint.
    pub(crate) fn now(&self) -> Time {
        self.together.short.now()
    }

    /// Carries out what follows from reports to the endpoint: first all actions, then the notices one by one, each
    /// followed by its own actions, and last the events.
    pub(crate) fn carry_out(&mut self) {
        loop {
            while let Some(action) = self.endpoint.poll_action() {
                self.act(action);
            }
            let Some(notice) = self.notices.pop_front() else {
                break;
            };
            let now = self.now();
            match notice {
                Notice::Suspended(token) => self.endpoint.handle_suspended(now, token),
                Notice::Drained(token, d) => {
                    self.endpoint.handle_drained(now, token, d.received, d.sent);
                }
                Notice::Verified(token, ended) => {
                    self.endpoint.handle_verified(now, token, ended);
                }
                Notice::Flushed(conn) => self.endpoint.handle_flushed(now, conn),
                Notice::Fault(token, cause) => self.endpoint.fault(now, token, cause),
                Notice::ReplayStalled(token) => self.endpoint.replay_stalled(now, token),
                Notice::Finish(token, seq, how) => self.endpoint.finish(now, token, seq, how),
                Notice::Gone(token) => self.gone(now, token),
                Notice::Moves(token) => self.endpoint.moves_on(now, token),
                Notice::Full(token) => self.endpoint.handle_full(now, token),
                Notice::Unlistened(addr) => self.close_listener(addr, None),
            }
        }
        if self.control.has_asides() && !self.endpoint.is_reaching() {
            self.control.end_asides();
        }
        self.write_events();
        for token in mem::take(&mut self.ended).into_keys() {
            self.survivor.remove(token);
        }
        self.release_exiting();
    }

    /// Records escalations where layers above ask for them.
    fn note_escalations(&mut self) {
        let now = self.now();
        while let Some(escalation) = self.endpoint.poll_escalation() {
            escalations::note(now, &escalation);
        }
    }

    fn write_events(&mut self) {
        self.note_escalations();
        while let Some((token, id, event)) = self.endpoint.poll_event() {
            let addrs = self.endpoint.addrs(token);
            if let Some(addrs) = addrs.or_else(|| *self.ended.get(&token)?) {
                self.events.write(event, id, addrs);
            }
        }
    }

    /// Takes what has arrived in the mailboxes; no thread is woken for that.
    pub(crate) fn take_mail(&mut self, now: Time) {
        if let Some(outlets) = self.control.outlets() {
            self.together.short.set_outlets(outlets);
        }
        if self.together.short.in_use() {
            self.together.short.drain(|_| false);
            self.endpoint.take_arrivals(now);
        }
    }

    /// Whether the kernel has given up the earlier connection, so that a HELLO for its addresses belongs to a later
    /// one.
    fn is_replaced(&self, earlier: &Earlier) -> bool {
        let flow = earlier.flow.map(|token| self.survivor.io(token));
        if flow
            .as_ref()
            .is_some_and(|io| io.as_ref().is_none_or(|io| io.connection_exists()))
        {
            return false;
        }
        let (local, remote) = earlier.ends;
        match earlier.connection {
            Some(own) => match connection_at(local, remote) {
                Some(there) => there != own,
                // Neither connection is left. If the earlier one was thrown away, nothing is to be told of its end, so
                // it does not matter to which one the HELLO belongs.
                None => earlier.reused_addresses && !earlier.not_closed,
            },
            None => earlier.reused_addresses && flow.is_some(),
        }
    }

    /// Whether the kernel has a later connection with the addresses of the one that a HELLO_ACK is for. A connection that is gone, and
    /// has no successor, may have been the one.
    fn is_superseded(&self, acknowledged: &Acknowledged) -> bool {
        let io = acknowledged.flow.and_then(|token| self.survivor.io(token));
        if io.is_some_and(|io| io.connection_exists()) {
            return false;
        }
        let (local, remote) = acknowledged.ends;
        connection_at(local, remote).is_some_and(|there| there != acknowledged.connection)
    }

    /// Handles a datagram for this process, whichever process has received it.
    pub(crate) fn take(&mut self, now: Time, from: SocketAddr, local: SocketAddr, data: &[u8]) {
        if let Some(earlier) = self.endpoint.may_be_of_later(now, from, data)
            && self.is_replaced(&earlier)
        {
            self.endpoint.release_addresses(&earlier);
        }
        if let Some(acknowledged) = self.endpoint.acknowledged(now, data)
            && self.is_superseded(&acknowledged)
        {
            self.endpoint.superseded(now, &acknowledged);
        }
        self.demote_closed(now, data);
        if let Some(at) = self.endpoint.is_waiting(now, from, data)
            && self.is_queue_empty(now, at)
        {
            self.endpoint.is_not_queued(now, from, data);
        }
        self.endpoint.handle_datagram(now, from, local, data);
    }

    /// Whether no connection waits to be accepted at this address, and none has for [`ACCEPTING`]: within that time the
    /// agent learns of a connection that has just been accepted.
    fn is_queue_empty(&mut self, now: Time, at: SocketAddr) -> bool {
        if !listened::is_queue_empty(at) {
            self.empty_queues.remove(&at);
            return false;
        }
        if self.empty_queues.len() >= QUEUES {
            self.empty_queues.clear();
        }
        let since = *self.empty_queues.entry(at).or_insert(now);
        now.since(since) >= ACCEPTING
    }

    fn open_mailbox(&mut self, ip: IpAddr) {
        match self.together.short.open_mailbox(ip) {
            Ok(port) => self.endpoint.set_mailbox(ip, port),
            Err(e) => self.log.debug(|| format!("mailbox at {ip}: {e}")),
        }
    }

    /// Called before a message is answered. Demotes the flows that it asks about if the application has closed them
    /// where the front end did not see that.
    fn demote_closed(&mut self, now: Time, data: &[u8]) {
        for token in self.endpoint.asked_about(data).into_iter().flatten() {
            if self.survivor.io(token).is_some_and(|io| !io.is_exclusive()) {
                self.endpoint.demote(now, token);
            }
        }
    }

    /// A datagram came from `from` to our control socket at `local`.
    pub(crate) fn datagram(&mut self, now: Time, from: SocketAddr, local: SocketAddr, data: &[u8]) {
        self.watch.tidy_later(now);
        if self.claims.forward(now, from, local, data) {
            return;
        }
        self.take(now, from, local, data);
    }

    /// Takes the datagrams that have arrived, once per turn. FIN is handled at once: it often arrives together with the
    /// error, and before the answer on a resume connection, and then no new transport is needed. All other datagrams
    /// wait for the commands that are still to be carried out: the answer to a HELLO may have been caused by a later
    /// connection with the same addresses, which one of these commands reports.
    fn take_datagrams(&mut self, now: Time) {
        if mem::replace(&mut self.datagrams_taken, true) {
            return;
        }
        for socket in self.control.all() {
            socket.take_waiting(|from, to, data| match wire::kind_of(data) {
                Some(Kind::Fin) => self.datagram(now, from, to, data),
                _ => self.put_off.push((from, to, data.into())),
            });
        }
    }

    /// Handles the datagrams that were put off: all commands that were queued when they arrived are carried out.
    pub(crate) fn after_commands(&mut self, now: Time) {
        for (from, to, data) in mem::take(&mut self.put_off) {
            self.datagram(now, from, to, &data);
        }
    }

    /// A new turn begins.
    pub(crate) fn begin_turn(&mut self) {
        self.datagrams_taken = false;
    }

    /// Forgets a flow, once its last events are written.
    pub(crate) fn gone(&mut self, now: Time, token: FlowToken) {
        let addrs = self.endpoint.addrs(token);
        let late = !self.endpoint.has_hello(token);
        self.endpoint.gone(now, token);
        self.drop_carrier(token);
        self.drained.remove(&token);
        self.claims.gone(token, late);
        self.watch.forget(token);
        self.ended.entry(token).or_insert(addrs);
    }

    /// The flow has no session any more, and its front end goes on by itself. The agent forgets the flow once all
    /// actions are carried out.
    pub(crate) fn release(&mut self, token: FlowToken) {
        self.notices.push_back(Notice::Gone(token));
    }

    /// Discards what is too old. Returns whether this must be called again.
    pub(crate) fn tidy(&mut self, now: Time) -> bool {
        let claims = self.claims.tidy(now);
        let past = self.endpoint.tidy(now);
        if !past && !self.endpoint.remembers_flows() {
            self.leave_unused();
        }
        past || claims
    }

    fn with_io(&mut self, token: FlowToken, f: impl FnOnce(&dyn FlowIo)) {
        if let Some(io) = self.survivor.io(token) {
            f(&*io);
        }
    }
}

/// Splits the seed into random bytes for the endpoint and the incarnation of this process.
fn split(seed: &[u8; 40]) -> ([u8; 32], u64) {
    let mut for_core = [0; 32];
    let mut incarnation = [0; 8];
    for_core
        .iter_mut()
        .zip(seed)
        .for_each(|(to, from)| *to = *from);
    incarnation
        .iter_mut()
        .zip(seed.iter().skip(32))
        .for_each(|(to, from)| *to = *from);
    (for_core, u64::from_be_bytes(incarnation))
}
