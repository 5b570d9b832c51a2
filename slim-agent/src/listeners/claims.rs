//! Listeners shared by several processes: `docs/PROTOCOL.md`, section of that name.
//!
//! A server forks, and its workers accept from one listener. The control socket on the listener's address belongs to
//! one process, the *owner*, and only the owner receives HELLO. So the owner also has a local socket, named after the
//! address, to which the other processes connect. A process that has accepted a connection *claims* it there, and the
//! owner forwards the HELLOs for it.
//!
//! The owner believes processes of the same user, and processes that descend from one process by `fork`, which share a
//! secret: workers often give up the rights that the owner keeps.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant};

use slim_core::endpoint::PendingHello;
use slim_core::wire::{self, Message};
use slim_core::{FlowId, FlowToken, Time};
use socket2::{Domain, SockAddr, SockRef, Socket, Type};
use tokio::io::Interest;

use crate::control::socket::{answering, bind_alone};
use crate::kernel::readiness;
use crate::kernel::sys;
use crate::listeners::connection_at::connection_at;
use crate::listeners::neighbour::Neighbour;
use crate::listeners::notes::{Note, Which};
use crate::tasks::{RunningTask, Task, Tasks};
use slim_core::canonical;
use slim_sys::OwnFd;

/// Most claims of all other processes together.
const CLAIMS: usize = 4096;
/// How long a claim lasts: HELLO for the connection arrives within this time.
const CLAIM_AGE: Duration = Duration::from_secs(60);
/// How long after a claim a HELLO for the connection may be repeated, although the flow is over already.
const REPEATED: Duration = Duration::from_secs(1);
/// Most claims that are kept for that.
const WITHDRAWN: usize = 1024;
/// Backlog of the local socket.
const BACKLOG: i32 = 128;
/// How long to wait for an owner whose backlog is full. It accepts the connections that are in the way at once.
const ROOM: Duration = Duration::from_millis(50);

/// Prefix of the local socket's name, which the address follows. The name is in the network namespace, as the address
/// is.
pub(crate) const NAME: &str = "slim/";

fn name(addr: SocketAddr) -> io::Result<SockAddr> {
    SockAddr::unix(format!("\0{NAME}{}", canonical(addr)))
}

fn socket() -> io::Result<OwnFd> {
    let kind = Type::SEQPACKET.nonblocking().cloexec();
    OwnFd::make(|| Socket::new_raw(Domain::UNIX, kind, None))
}

/// The process that has the control socket of a listener.
pub(crate) enum Found {
    /// This process: the control socket, and the socket on which other processes claim connections.
    Ours(OwnFd, Option<OwnFd>),
    /// Another process, to which this is a connection.
    Elsewhere(OwnFd),
    /// No SLIM process, and the control socket could not be bound.
    Nobody(io::Error),
}

/// Becomes the owner of `addr`, with the control socket that `bind` makes, or finds the owner.
pub(crate) fn own_or_find(addr: SocketAddr, bind: impl FnOnce() -> io::Result<OwnFd>) -> Found {
    // The name comes first: of several processes that try at once, one gets it, and the others find that process.
    let claims = match listen(addr) {
        Ok(claims) => Some(claims),
        Err(_) => match reach_at(addr) {
            Some(owner) => return Found::Elsewhere(owner),
            None => None,
        },
    };
    match bind() {
        Ok(socket) => Found::Ours(socket, claims),
        Err(e) => {
            // Closed before the search, or this process would find itself.
            drop(claims);
            reach(addr).map_or(Found::Nobody(e), Found::Elsewhere)
        }
    }
}

/// Finds the owner for connections to `local`, or becomes it.
pub(crate) fn find_or_own(local: SocketAddr) -> Found {
    match reach(local) {
        Some(owner) => Found::Elsewhere(owner),
        None => own_or_find(local, || bind_alone(local)),
    }
}

/// Lets other processes claim connections to `addr`.
fn listen(addr: SocketAddr) -> io::Result<OwnFd> {
    let fd = socket()?;
    let socket = SockRef::from(&fd);
    socket.bind(&name(addr)?)?;
    socket.listen(BACKLOG)?;
    Ok(fd)
}

/// Connects to the owner of a listener that accepts connections to `local`.
pub(crate) fn reach(local: SocketAddr) -> Option<OwnFd> {
    let local = canonical(local);
    let any = |ip: IpAddr| SocketAddr::new(ip, local.port());
    let v4 = local.is_ipv4().then(|| any(Ipv4Addr::UNSPECIFIED.into()));
    let candidates = [Some(local), v4, Some(any(Ipv6Addr::UNSPECIFIED.into()))];
    candidates.into_iter().flatten().find_map(reach_at)
}

/// Connects to the process that has the owner's name for `addr`, whichever user it belongs to.
pub(crate) fn reach_anybody(addr: SocketAddr) -> Option<OwnFd> {
    let (fd, name) = (socket().ok()?, name(addr).ok()?);
    let socket = SockRef::from(&fd);
    let until = Instant::now() + ROOM;
    let mut connected = socket.connect(&name);
    if matches!(&connected, Err(e) if e.kind() == io::ErrorKind::WouldBlock) {
        // There is an owner, but its backlog is full.
        socket.set_nonblocking(false).ok()?;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            socket.set_write_timeout(Some(left)).ok()?;
            connected = socket.connect(&name);
            if !matches!(&connected, Err(e) if e.kind() == io::ErrorKind::Interrupted) {
                break;
            }
        }
        socket.set_nonblocking(true).ok()?;
    }
    connected.ok()?;
    Some(fd)
}

/// Connects to the owner of exactly this `addr`, if it belongs to this user or to root.
fn reach_at(addr: SocketAddr) -> Option<OwnFd> {
    let fd = reach_anybody(addr)?;
    // The owner is told the secret, and any user may have taken the name.
    let owner = sys::peer_user(fd.raw())?;
    (owner == slim_sys::user() || owner == 0).then_some(fd)
}

type Tuple = (SocketAddr, SocketAddr);

/// A connection that another process has accepted.
struct Claim {
    since: Time,
    link: Rc<Neighbour>,
    /// The kernel's number of the connection (`SO_COOKIE`).
    connection: Option<u64>,
    /// The flow id of the first HELLO that was passed on.
    first: Option<FlowId>,
}

/// What this process shares with other processes.
#[derive(Default)]
pub(crate) struct Claims {
    /// Tasks that serve other processes, per address of ours.
    open: HashMap<SocketAddr, RunningTask>,
    /// Claims of other processes, by (our end, their end).
    claimed: HashMap<Tuple, Claim>,
    /// Oldest first; an entry whose time does not match was replaced.
    order: VecDeque<(Time, Tuple)>,
    /// Young claims that were withdrawn, as in `order`.
    withdrawn: VecDeque<(Time, Tuple)>,
    /// Owners of addresses at which this process accepts.
    owners: HashMap<SocketAddr, Rc<Neighbour>>,
    /// Connections that this process has claimed.
    mine: HashMap<FlowToken, Tuple>,
    /// Other processes that have connected, with the address of ours.
    guests: Vec<(SocketAddr, Weak<Neighbour>)>,
}

impl Claims {
    /// Serves other processes that accept at our address `addr`.
    pub(crate) fn open(&mut self, addr: SocketAddr, fd: OwnFd, tasks: &mut Tasks) {
        if let Ok(fd) = readiness::watch(fd, Interest::READABLE) {
            self.open.insert(addr, tasks.start(Task::Serve(addr, fd)));
        }
    }

    /// `fd` is a connection to the owner of `addr`.
    pub(crate) fn found(&mut self, addr: SocketAddr, fd: OwnFd, tasks: &mut Tasks) {
        if let Ok(link) = Neighbour::new(fd) {
            self.owners.insert(addr, link.clone());
            tasks.start_and_forget(Task::Hear(addr, link));
        }
    }

    /// This process does not own `addr` any more. Processes that have claimed connections there find the next owner, or
    /// become it, when the returned task has ended.
    pub(crate) fn close(&mut self, addr: SocketAddr) -> Option<RunningTask> {
        let serving = self.open.remove(&addr)?;
        self.claimed
            .retain(|(local, _), _| answering([addr].into_iter(), *local).is_none());
        Some(serving)
    }

    /// A connection to the owner of `addr` has ended; true if it was the one in use.
    pub(crate) fn owner_lost(&mut self, addr: SocketAddr, link: &Rc<Neighbour>) -> bool {
        let current = self.owners.get(&addr).is_some_and(|l| Rc::ptr_eq(l, link));
        if current {
            self.owners.remove(&addr);
        }
        current
    }

    /// A connection was accepted in this process, at an address that it may or may not own.
    pub(crate) fn accepted(&mut self, token: FlowToken, tuple: Tuple, which: Which, owned: bool) {
        if owned {
            self.claimed.remove(&tuple);
            return;
        }
        let owner = answering(self.owners.keys().copied(), tuple.0);
        if let Some(link) = owner.and_then(|owner| self.owners.get(&owner)) {
            link.tell(&Note::Claim(tuple.0, tuple.1, which));
            self.mine.insert(token, tuple);
        }
    }

    /// Whether another process forwards HELLO for connections to `local`.
    pub(crate) fn knows_owner(&self, local: SocketAddr) -> bool {
        answering(self.owners.keys().copied(), local).is_some()
    }

    /// Connections of this process for which no process forwards HELLO.
    pub(crate) fn orphans(&self) -> Vec<(FlowToken, Tuple)> {
        let orphan = |tuple: &Tuple| answering(self.owners.keys().copied(), tuple.0).is_none();
        let all = self.mine.iter().filter(|(_, tuple)| orphan(tuple));
        all.map(|(token, tuple)| (*token, *tuple)).collect()
    }

    /// A flow of this process is over. With `late` its claim stays: a HELLO for it is still to come, and is refused or
    /// told how the flow ended.
    pub(crate) fn gone(&mut self, token: FlowToken, late: bool) {
        if let Some(tuple) = self.mine.remove(&token).filter(|_| !late) {
            let owner = answering(self.owners.keys().copied(), tuple.0);
            if let Some(link) = owner.and_then(|owner| self.owners.get(&owner)) {
                link.tell(&Note::Drop(tuple.0, tuple.1));
            }
        }
    }

    /// Forwards a datagram if it is HELLO for a connection that another process has accepted. False if this process
    /// must handle it, possibly as well: it may be for a later connection with the same addresses, which has not been
    /// claimed yet.
    pub(crate) fn forward(
        &mut self,
        now: Time,
        from: SocketAddr,
        local: SocketAddr,
        data: &[u8],
    ) -> bool {
        self.expire(now);
        if self.claimed.is_empty() {
            return false;
        }
        let Ok(Message::Hello(hello)) = wire::parse(data).map(|parsed| parsed.message) else {
            return false;
        };
        let tuple = (hello.acceptor, hello.connector);
        let Some(claim) = self.claimed.get_mut(&tuple) else {
            return false;
        };
        let there = connection_at(tuple.0, tuple.1);
        let same = there.zip(claim.connection).map(|(there, own)| there == own);
        if same == Some(false) {
            // The claimed connection is over, so no HELLO for it comes any more, and the later one has not been claimed
            // yet.
            self.claimed.remove(&tuple);
            return false;
        }
        claim.link.tell(&Note::Hello(from, local, data.to_vec()));
        let is_first = *claim.first.get_or_insert(hello.flow) == hello.flow;
        same.is_some() || (is_first && !hello.flow.is_again())
    }

    /// Passes on a HELLO that has come before the connection was claimed.
    pub(crate) fn hand_over(&mut self, tuple: Tuple, hello: PendingHello) {
        if let Some(claim) = self.claimed.get_mut(&tuple) {
            claim.first.get_or_insert(hello.flow);
            let note = Note::Hello(hello.from, hello.local, hello.data);
            claim.link.tell(&note);
        }
    }

    /// Sends a note to the other processes at our address `addr`.
    pub(crate) fn tell_guests(&self, addr: SocketAddr, note: &Note) {
        let there = self.guests.iter().filter(|(at, _)| *at == addr);
        for link in there.filter_map(|(_, link)| link.upgrade()) {
            link.tell(note);
        }
    }

    /// Another process has connected, for our address `addr`.
    pub(crate) fn arrived(&mut self, addr: SocketAddr, link: &Rc<Neighbour>) {
        self.guests.retain(|(_, link)| link.strong_count() > 0);
        self.guests.push((addr, Rc::downgrade(link)));
    }

    /// Another process has claimed a connection.
    pub(crate) fn claim(
        &mut self,
        since: Time,
        tuple: Tuple,
        connection: Option<u64>,
        link: Rc<Neighbour>,
    ) {
        self.expire(since);
        while self.claimed.len() >= CLAIMS {
            let withdrawn = self.withdrawn.pop_front();
            let Some(oldest) = withdrawn.or_else(|| self.order.pop_front()) else {
                break;
            };
            self.discard(oldest);
        }
        let claim = Claim {
            since,
            link,
            connection,
            first: None,
        };
        self.claimed.insert(tuple, claim);
        self.order.push_back((since, tuple));
        // Dropped or replaced entries would pile up behind one that lasts.
        if self.order.len() > 2 * CLAIMS {
            let claimed = &self.claimed;
            self.order
                .retain(|(at, tuple)| claimed.get(tuple).is_some_and(|claim| claim.since == *at));
        }
    }

    /// Another process has withdrawn its claim. A HELLO that is repeated must still reach that process: otherwise this one would keep
    /// it, and take it for the HELLO of the next connection with the same addresses. So a young claim is kept for a moment.
    pub(crate) fn unclaim(&mut self, now: Time, tuple: Tuple, link: &Rc<Neighbour>) {
        let claim = self.claimed.get(&tuple);
        let Some(claim) = claim.filter(|claim| Rc::ptr_eq(&claim.link, link)) else {
            return;
        };
        let since = claim.since;
        if now.since(since) >= REPEATED {
            self.claimed.remove(&tuple);
            return;
        }
        if self.withdrawn.len() >= WITHDRAWN
            && let Some(oldest) = self.withdrawn.pop_front()
        {
            self.discard(oldest);
        }
        self.withdrawn.push_back((since, tuple));
    }

    /// Whether there is a claim that was made at this time, and no later one has replaced it.
    fn stands(&self, (since, tuple): &(Time, Tuple)) -> bool {
        let claim = self.claimed.get(tuple);
        claim.is_some_and(|claim| claim.since == *since)
    }

    /// Discards the claim that was made at this time.
    fn discard(&mut self, entry: (Time, Tuple)) {
        if self.stands(&entry) {
            self.claimed.remove(&entry.1);
        }
    }

    /// Another process is gone, and its claims with it.
    pub(crate) fn left(&mut self, link: &Rc<Neighbour>) {
        self.claimed
            .retain(|_, claim| !Rc::ptr_eq(&claim.link, link));
    }

    /// Discards claims that are too old; returns whether there are others.
    pub(crate) fn tidy(&mut self, now: Time) -> bool {
        self.expire(now);
        if self.claimed.is_empty() {
            self.claimed.shrink_to_fit();
            self.order.shrink_to_fit();
            self.withdrawn.shrink_to_fit();
        }
        !self.claimed.is_empty()
    }

    fn expire(&mut self, now: Time) {
        while let Some(oldest) = self.withdrawn.front().copied()
            && now.since(oldest.0) >= REPEATED
        {
            self.withdrawn.pop_front();
            self.discard(oldest);
        }
        while let Some(oldest) = self.order.front().copied() {
            if self.stands(&oldest) && now.since(oldest.0) < CLAIM_AGE {
                break;
            }
            self.order.pop_front();
            self.discard(oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    /// Checks an owner that is slow, and one that accepts no connection.
    #[test]
    fn connecting_waits_for_an_owner_whose_backlog_is_full() {
        for takes in [true, false] {
            let addr = at(if takes {
                "127.0.0.1:54322"
            } else {
                "127.0.0.1:54323"
            });
            let owner = listen(addr).unwrap();
            let waiting: Vec<_> = std::iter::from_fn(|| {
                let fd = socket().unwrap();
                SockRef::from(&fd).connect(&name(addr).unwrap()).ok()?;
                Some(fd)
            })
            .collect();
            assert!(waiting.len() >= BACKLOG as usize);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(5));
                    takes.then(|| sys::accept_local(owner.raw()))
                });
                let begun = Instant::now();
                assert_eq!(reach_anybody(addr).is_some(), takes);
                // The kernel's timeouts are counted in ticks.
                assert!(takes || begun.elapsed() > ROOM / 2);
            });
        }
    }

    #[test]
    fn the_owner_of_a_wildcard_address_is_found() {
        let owner = listen(at("0.0.0.0:54321")).unwrap();
        assert!(reach(at("127.0.0.1:54321")).is_some());
        assert!(reach(at("127.0.0.1:54320")).is_none());
        assert!(listen(at("0.0.0.0:54321")).is_err(), "there is one owner");
        drop(owner);
        assert!(reach(at("127.0.0.1:54321")).is_none());
    }
}
