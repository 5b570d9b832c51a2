//! The driver: whatever happens is told to the endpoint, and what follows from it is done, one
//! thing after the other.
//!
//! It knows nothing of the tasks that call it. Those that it wants it leaves in [`Tasks`].

mod addresses;
mod conns;
mod flows;
mod linger;
mod listeners;
mod watch;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::mem;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use slim_core::config::Config;
use slim_core::endpoint::{Action, Earlier, Endpoint, State};
use slim_core::transport::Transports;
use slim_core::wire::{self, Kind};
use slim_core::{Cause, ConnId, Counted, FinHow, FlowToken, Role, Time};
use slim_stream::Drained;

use crate::FlowIo;
use crate::commands::command::Command;
use crate::control::Control;
use crate::control::places::Ports;
use crate::events::{self, EventLog, Log};
use crate::failure::panic::Survivor;
use crate::host::addresses::{self as own_addresses, Addresses};
use crate::host::identity;
use crate::listeners::claims::Claims;
use crate::listeners::connection_at::connection_at;
use crate::listeners::listened;
use crate::listeners::listening::Together;
use crate::tasks::mailbox;
use crate::tasks::order::Order;
use crate::tasks::{Task, Tasks};
use slim_sys::fds;
use watch::Watch;

/// A connection that has left its listener's queue is known to us after this time at the latest.
const ACCEPTING: Duration = Duration::from_millis(50);
/// Listeners with an empty queue that are remembered.
const QUEUES: usize = 64;
/// Resume connections at most, of those that we accepted, when descriptors are plenty.
const MOST_INCOMING: usize = 4096;

/// The connection that has become a flow's transport and whose replay is not written yet.
pub(crate) struct Carrier {
    pub(crate) conn: ConnId,
    /// The replay is not to go on: it waits to be drained.
    pub(crate) stopped: bool,
    /// What is to be done once it is drained.
    pub(crate) then: Option<Action>,
}

/// Something to tell the endpoint when it has no action left to be taken: an answer to one, or what
/// was found out on the way.
pub(crate) enum Notice {
    Suspended(FlowToken),
    Drained(FlowToken, Drained),
    Verified(FlowToken, bool),
    Flushed(ConnId),
    Fault(FlowToken, Cause),
    Finish(FlowToken, u64, FinHow),
    Gone(FlowToken),
    Unlistened(SocketAddr),
}

/// All that the agent thread knows.
pub(crate) struct Driver {
    pub(crate) endpoint: Endpoint,
    /// Of flows whose replay is being written.
    pub(crate) carriers: BTreeMap<FlowToken, Carrier>,
    /// Of flows whose transport is drained and which have no other yet.
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
    /// Those of `conns` that were accepted.
    incoming: usize,
    most_incoming: usize,
    /// Flows to forget when their last events are written, and their addresses.
    departed: BTreeMap<FlowToken, Option<(SocketAddr, SocketAddr)>>,
    pub(crate) together: Together,
    /// To be started when this turn is over.
    pub(crate) tasks: Tasks,
    /// All flows, among other things.
    pub(crate) survivor: Rc<Survivor>,
    /// Our own, and the networks that they are in.
    pub(crate) addresses: Addresses,
    /// There is a job key.
    pub(crate) keyed: bool,
    /// The thread is to end.
    pub(crate) retired: bool,
    /// The control sockets have been looked at in this turn.
    datagrams_taken: bool,
    /// What has come with them and is done after the commands of this turn: from where, to where, and the data.
    put_off: Vec<(SocketAddr, SocketAddr, Box<[u8]>)>,
    events: EventLog,
    /// Listeners whose queue was empty at the last look, and since when.
    empty_queues: BTreeMap<SocketAddr, Time>,
}

impl Driver {
    /// Must run inside the runtime. `transports`: those of other kinds than TCP.
    pub(crate) fn new(
        config: Config,
        transports: Transports,
        ports: Ports,
        together: Together,
        survivor: Rc<Survivor>,
        seed: &[u8; 40],
    ) -> Self {
        let log = Log::new(config.log);
        let (addresses, networks) = own_addresses::now(log);
        let (for_core, incarnation) = split(seed);
        let id = identity::endpoint(incarnation);
        let events = EventLog::open(&config, log);
        let keyed = config.job_key.is_some();
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
        endpoint.set_addrs(addresses.clone(), networks.clone());
        together.short.begin(endpoint.pairs().clone());
        Driver {
            endpoint,
            carriers: BTreeMap::new(),
            drained: BTreeMap::new(),
            watch,
            log,
            notices: VecDeque::new(),
            control: Control::new(ports, log),
            claims: Claims::default(),
            conns: Counted::default(),
            silent: BTreeSet::new(),
            accepted: 0,
            incoming: 0,
            most_incoming: (fds::room() / 2).clamp(16, MOST_INCOMING),
            departed: BTreeMap::new(),
            together,
            tasks: Tasks::default(),
            survivor,
            addresses: (addresses, networks),
            keyed,
            retired: false,
            datagrams_taken: false,
            put_off: Vec::new(),
            events,
            empty_queues: BTreeMap::new(),
        }
    }

    /// Carries out what an application thread asked for.
    pub(crate) fn command(&mut self, now: Time, command: Command) {
        self.watch.tidy_later(now);
        match &command {
            // What the peer has said before counts.
            Command::Fault { .. }
            | Command::Demote { .. }
            | Command::DemoteHeard { .. }
            | Command::Shut { .. }
            | Command::Finish { told: false, .. } => {
                self.take_mail(now);
            }
            // The thread has looked into the mailbox itself.
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
                    self.endpoint.has_stood(now, (local, remote), age);
                }
                let connection = io.connection();
                let stands = role == Role::Connector
                    || !self.endpoint.is_awaited_again(local, remote)
                    || io.stands()
                    || (connection.is_some() && connection_at(local, remote) == connection);
                self.add_flow(now, token, io);
                if !stands {
                    return self.endpoint.open_over(now, token, local, remote);
                }
                // First, so that HELLO names only addresses that peers can come to.
                let served = !self.endpoint.may_know(remote.ip()) || self.serve_at(local);
                self.endpoint.open(now, token, role, local, remote);
                if let Some(connection) = connection {
                    self.endpoint.numbered(token, connection);
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
            Command::Describe { answer, done } => {
                let mut answer = answer.lock().unwrap_or_else(PoisonError::into_inner);
                *answer = Some(self.endpoint.announcement());
                drop(answer);
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
            Command::Finish {
                token,
                final_seq,
                how,
                told,
            } => {
                if how == FinHow::Close && !told && !self.endpoint.may_have_peer(now, token) {
                    // Nobody would ask for what is lost of it, or how it ended.
                    return self.endpoint.demote(now, token);
                }
                match told {
                    true => self.endpoint.finish_told(token, final_seq, how),
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
            Command::Demote { token } => self.endpoint.demote(now, token),
            Command::DemoteHeard { token } => self.endpoint.demote_heard(now, token),
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
                // The waiting thread may have given up; nobody else wants to know.
                done.tell();
            }
            Command::DrainExit { limit, done } => {
                self.look_at_lingering(now);
                self.log
                    .debug(|| format!("at exit: {:?}", self.endpoint.tables()));
                self.watch.exiting(now + limit, done);
            }
            Command::FirstLeaves => self.tasks.start_and_forget(Task::RetireWhenAlone),
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

    /// A point in time for the endpoint.
    pub(crate) fn now(&self) -> Time {
        self.together.short.now()
    }

    /// What follows from whatever the endpoint was told: first all actions, then the notices
    /// one by one, each followed by its own actions; last the events.
    pub(crate) fn settle(&mut self) {
        loop {
            while let Some(action) = self.endpoint.poll_action() {
                self.act(action);
            }
            let now = self.now();
            match self.notices.pop_front() {
                Some(Notice::Suspended(token)) => self.endpoint.handle_suspended(now, token),
                Some(Notice::Drained(token, d)) => {
                    self.endpoint.handle_drained(now, token, d.received, d.sent);
                }
                Some(Notice::Verified(token, ended)) => {
                    self.endpoint.handle_verified(now, token, ended);
                }
                Some(Notice::Flushed(conn)) => self.endpoint.handle_flushed(now, conn),
                Some(Notice::Fault(token, cause)) => self.endpoint.fault(now, token, cause),
                Some(Notice::Finish(token, seq, how)) => {
                    self.endpoint.finish(now, token, seq, how);
                }
                Some(Notice::Gone(token)) => self.gone(now, token),
                Some(Notice::Unlistened(addr)) => self.close_listener(addr, None),
                None => break,
            }
        }
        if self.control.has_asides() && !self.endpoint.is_reaching() {
            self.control.end_asides();
        }
        while let Some((token, id, event)) = self.endpoint.poll_event() {
            let addrs = self.endpoint.addrs(token);
            if let Some(addrs) = addrs.or_else(|| *self.departed.get(&token)?) {
                self.events.write(event, id, addrs);
            }
        }
        for token in mem::take(&mut self.departed).into_keys() {
            self.survivor.remove(token);
        }
        self.release_exiting();
    }

    /// What has come to the mailboxes, which nobody is woken for.
    pub(crate) fn take_mail(&mut self, now: Time) {
        if let Some(outlets) = self.control.outlets() {
            self.together.short.set_outlets(outlets);
        }
        if self.together.short.in_use() {
            self.together.short.drain(|_| false);
            self.endpoint.take_arrivals(now);
        }
    }

    /// Whether the kernel has given a connection up, and HELLO for its addresses is of a later one.
    fn is_replaced(&self, earlier: &Earlier) -> bool {
        let flow = earlier.flow.map(|token| self.survivor.io(token));
        if flow
            .as_ref()
            .is_some_and(|io| io.as_ref().is_none_or(|io| io.stands()))
        {
            return false;
        }
        let (local, remote) = earlier.ends;
        match earlier.connection {
            Some(own) => match connection_at(local, remote) {
                Some(there) => there != own,
                // Neither is left. Whose the HELLO is does not matter where there is nothing to be told.
                None => earlier.named_again && !earlier.thrown_away,
            },
            None => earlier.named_again && flow.is_some(),
        }
    }

    /// A datagram for this process, whoever has received it.
    pub(crate) fn take(&mut self, now: Time, from: SocketAddr, local: SocketAddr, data: &[u8]) {
        if let Some(earlier) = self.endpoint.may_be_of_later(now, from, data)
            && self.is_replaced(&earlier)
        {
            self.endpoint.leave_addresses(&earlier);
        }
        self.let_go_of_closed(now, data);
        if let Some(at) = self.endpoint.is_waiting(now, from, data)
            && self.is_queue_empty(now, at)
        {
            self.endpoint.is_not_queued(now, from, data);
        }
        self.endpoint.handle_datagram(now, from, local, data);
    }

    /// Whether no connection waits to be accepted at this address, nor did a moment ago: of one that is being accepted just now
    /// we hear in a moment.
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

    fn act(&mut self, action: Action) {
        match action {
            Action::Mailbox { ip } => self.open_mailbox(ip),
            Action::Datagram {
                to,
                from: Some(from),
                data,
            } if from.port() == 0 => self.control.send_aside(to, from, &data, &mut self.tasks),
            Action::Datagram { to, from, data } => self.control.send(to, from, &data),
            Action::Connect { conn, token, path } => {
                let (orders, io) = (self.add_conn(conn), self.survivor.io(token));
                self.tasks.start_and_forget(Task::Connect {
                    conn,
                    io,
                    path,
                    orders,
                });
            }
            Action::Send { conn, data } => drop(self.order(conn, Order::Send(data))),
            Action::Flush { conn } => {
                if !self.order(conn, Order::Flush) {
                    self.notices.push_back(Notice::Flushed(conn));
                }
            }
            // Its task ends when the orders that came before are carried out.
            Action::Close { conn } => self.remove_conn(conn),
            other => self.act_on_flow(other),
        }
    }

    /// The actions that concern a flow; see `flows.rs`.
    fn act_on_flow(&mut self, action: Action) {
        match action {
            Action::Live { token } => self.with_io(token, |io| io.live()),
            Action::Legacy {
                token,
                required_refused,
            } => {
                self.drop_carrier(token);
                self.with_io(token, |io| io.legacy(required_refused));
                self.survivor.set_away(token, false);
                self.let_go(token);
            }
            Action::Suspend { token } => self.suspend(token),
            Action::Verify { token } => self.verify(token),
            Action::Drain { token } => self.drain(token, action),
            Action::Install {
                token,
                conn,
                peer_received,
                peer_sent,
                peer_final,
            } => {
                if let Some(seq) = peer_final {
                    self.with_io(token, |io| io.peer_final(seq));
                }
                self.install(token, conn, peer_received, peer_sent);
            }
            Action::Reinstate { token } => {
                let legacy = self.endpoint.state(token) == Some(State::Legacy);
                self.with_io(token, |io| io.reinstate(legacy));
                self.survivor.set_away(token, false);
                if legacy {
                    self.let_go(token);
                }
            }
            Action::PeerFinal { token, seq } => self.with_io(token, |io| io.peer_final(seq)),
            Action::Escalate { token, .. } => self.escalate(token, action),
            // Those that concern no flow, which `act` has taken.
            Action::Mailbox { .. }
            | Action::Datagram { .. }
            | Action::Connect { .. }
            | Action::Send { .. }
            | Action::Flush { .. }
            | Action::Close { .. } => {}
        }
    }

    /// Before a message is answered: flows that it asks about may have been closed where the front end did not see it.
    fn let_go_of_closed(&mut self, now: Time, data: &[u8]) {
        for token in self.endpoint.asked_about(data).into_iter().flatten() {
            if self.survivor.io(token).is_some_and(|io| !io.is_held()) {
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

    /// Takes the datagrams that have come, once in a turn. Word that the peer has closed a flow is often there as soon as the
    /// error, and before the answer to a connection that was asked for in between: then no transport is to be looked for. All
    /// else waits for the commands that are still to be carried out: the answer to a HELLO may have been caused by a later
    /// connection with the same addresses, of which one of them tells.
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

    /// All commands are carried out that were there when a datagram came: what has been put off is done.
    pub(crate) fn after_commands(&mut self, now: Time) {
        for (from, to, data) in mem::take(&mut self.put_off) {
            self.datagram(now, from, to, &data);
        }
    }

    /// Another turn begins.
    pub(crate) fn begin_turn(&mut self) {
        self.datagrams_taken = false;
    }

    /// Forgets a flow, once what is to be said about its end is said.
    pub(crate) fn gone(&mut self, now: Time, token: FlowToken) {
        let addrs = self.endpoint.addrs(token);
        let late = !self.endpoint.was_asked(token);
        self.endpoint.gone(now, token);
        self.drop_carrier(token);
        self.drained.remove(&token);
        self.claims.gone(token, late);
        self.watch.forget(token);
        self.departed.entry(token).or_insert(addrs);
    }

    /// The flow has no session any more, and its front end goes on by itself: there is nothing left to be done for it,
    /// once all actions are carried out.
    pub(crate) fn let_go(&mut self, token: FlowToken) {
        self.notices.push_back(Notice::Gone(token));
    }

    /// Forgets what is too old.
    pub(crate) fn tidy(&mut self, now: Time) -> bool {
        let claims = self.claims.tidy(now);
        let past = self.endpoint.tidy(now);
        if !past {
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

/// Random bytes for the endpoint, and a number for this life of the process.
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
