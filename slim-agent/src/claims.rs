//! Listeners shared by several processes: `docs/PROTOCOL.md`, section of that name.
//!
//! A server forks, and its workers accept from one listener. The control socket on the listener's
//! address belongs to one process, the *owner*; HELLO reaches nobody else. So the owner also has a
//! local socket, named after the address, to which the others connect. A process that has accepted
//! a connection *claims* it there, and is given the HELLOs for it.
//!
//! Believed are processes of the same user, and those that come from one process by `fork`, which
//! know a secret by that: workers often give up the rights that the owner keeps.

use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use slim_core::wire::{self, Message};
use slim_core::{FlowToken, Time};
use socket2::{Domain, SockAddr, SockRef, Socket, Type};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task::{self, AbortHandle, JoinHandle, JoinSet};

use crate::agent::canonical;
use crate::control::{answering, bind_alone};
use crate::fds::{self, OwnFd};
use crate::shared::Shared;
use crate::sys;

/// Claims of all other processes together.
const CLAIMS: usize = 4096;
/// How long a claim lasts: whoever is to say HELLO has done so by then.
const CLAIM_AGE: Duration = Duration::from_secs(60);
/// Other processes at a time.
const LINKS: usize = 256;
/// Connections that wait to be taken.
const BACKLOG: i32 = 128;
/// How long an owner that has no room for one more is waited for. Whoever is in its way, it takes at once.
const ROOM: Duration = Duration::from_millis(50);

/// Known to all processes that come from one by `fork`, once one of them has drawn it.
static LINEAGE: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// The secret of this process and its relatives.
fn lineage() -> [u8; 16] {
    let mut secret = [0; 16];
    for (bytes, half) in secret.chunks_mut(8).zip(&LINEAGE) {
        bytes.copy_from_slice(&half.load(Ordering::Relaxed).to_ne_bytes());
    }
    secret
}

/// Draws the secret, unless this process has inherited one.
pub(crate) fn draw_lineage() -> io::Result<()> {
    for half in &LINEAGE {
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(io::Error::other)?;
        let random = u64::from_ne_bytes(random) | 1;
        // Who was first decides.
        let _ = half.compare_exchange(0, random, Ordering::Relaxed, Ordering::Relaxed);
    }
    Ok(())
}

/// Where the owner of a listener's address can be found: a name in the network namespace, as the
/// address itself is.
pub(crate) const NAME: &str = "slim/";

fn name(addr: SocketAddr) -> io::Result<SockAddr> {
    SockAddr::unix(format!("\0{NAME}{}", canonical(addr)))
}

fn socket() -> io::Result<OwnFd> {
    let kind = Type::SEQPACKET.nonblocking().cloexec();
    OwnFd::make(|| Socket::new_raw(Domain::UNIX, kind, None))
}

/// Who has the control socket of a listener.
pub(crate) enum Found {
    /// We do: it, and where others can claim connections.
    Ours(OwnFd, Option<OwnFd>),
    /// Another process does, to which this connects.
    Elsewhere(OwnFd),
    /// Nobody, and it could not be bound.
    Nobody(io::Error),
}

/// Becomes the owner of `addr`, with the socket that `bind` makes, or finds out who is.
pub(crate) fn settle(addr: SocketAddr, bind: impl FnOnce() -> io::Result<OwnFd>) -> Found {
    // The name comes first: of several processes that try at once, one gets it, and the others
    // find that one.
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
            // Before somebody is looked for, lest we find ourselves.
            drop(claims);
            reach(addr).map_or(Found::Nobody(e), Found::Elsewhere)
        }
    }
}

/// Finds the owner for connections to `local`, or becomes it.
pub(crate) fn reach_or_settle(local: SocketAddr) -> Found {
    match reach(local) {
        Some(owner) => Found::Elsewhere(owner),
        None => settle(local, || bind_alone(local)),
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

/// Connects to whoever has the name of the owner of `addr`.
pub(crate) fn reach_anybody(addr: SocketAddr) -> Option<OwnFd> {
    let (fd, name) = (socket().ok()?, name(addr).ok()?);
    let socket = SockRef::from(&fd);
    let until = Instant::now() + ROOM;
    let mut connected = socket.connect(&name);
    if matches!(&connected, Err(e) if e.kind() == io::ErrorKind::WouldBlock) {
        // There is an owner, and too many who want something of it at once.
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

/// Connects to the owner of `addr` itself.
fn reach_at(addr: SocketAddr) -> Option<OwnFd> {
    let fd = reach_anybody(addr)?;
    // It is told the secret. The name may have been taken by anybody.
    let owner = sys::peer_user(fd.raw())?;
    (owner == sys::user() || owner == 0).then_some(fd)
}

/// What processes of one host tell each other.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Note {
    /// To the owner: I have accepted this connection (our end, their end).
    Claim(SocketAddr, SocketAddr),
    /// To the owner: it is over.
    Drop(SocketAddr, SocketAddr),
    /// From the owner: this came, from there, to here.
    Hello(SocketAddr, SocketAddr, Vec<u8>),
    /// To the owner: I want the UDP port of this listener for myself.
    Release(SocketAddr),
    /// From the owner: it was given to somebody else.
    Given(SocketAddr),
}

/// Kind, secret, two addresses.
const NOTE_HEAD: usize = 1 + 16 + 2 * ADDR;
const ADDR: usize = 18;

impl Note {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let (kind, a, b, data): (_, _, _, &[u8]) = match self {
            Note::Claim(a, b) => (1, a, b, &[]),
            Note::Drop(a, b) => (2, a, b, &[]),
            Note::Hello(a, b, data) => (3, a, b, data),
            Note::Release(a) => (4, a, a, &[]),
            Note::Given(a) => (5, a, a, &[]),
        };
        let mut note = vec![kind];
        // Who has the name of an owner may be anybody, and is not told more than what is wanted.
        let secret = match self {
            Note::Release(_) => [0; 16],
            _ => lineage(),
        };
        note.extend(secret);
        for addr in [a, b] {
            let ip = match addr.ip() {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            };
            note.extend(ip.octets());
            note.extend(addr.port().to_be_bytes());
        }
        note.extend(data);
        note
    }

    /// With the sender's secret.
    fn decode(note: &[u8]) -> Option<(Self, [u8; 16])> {
        let (head, data) = note.split_at_checked(NOTE_HEAD)?;
        let (kind, rest) = head.split_first()?;
        let (secret, addrs) = rest.split_first_chunk::<16>()?;
        let (a, b) = addrs.split_at_checked(ADDR)?;
        let (a, b) = (addr(a)?, addr(b)?);
        let note = match (kind, data) {
            (1, []) => Note::Claim(a, b),
            (2, []) => Note::Drop(a, b),
            (3, [_, ..]) => Note::Hello(a, b, data.to_vec()),
            (4, []) if a == b => Note::Release(a),
            (5, []) if a == b => Note::Given(a),
            _ => return None,
        };
        Some((note, *secret))
    }
}

fn addr(bytes: &[u8]) -> Option<SocketAddr> {
    let (ip, port) = bytes.split_first_chunk::<16>()?;
    let port = u16::from_be_bytes(port.try_into().ok()?);
    let ip = Ipv6Addr::from(*ip).to_canonical();
    Some(SocketAddr::new(ip, port))
}

/// A connection between two processes of this host.
pub(crate) struct Link {
    fd: AsyncFd<OwnFd>,
}

impl Link {
    fn new(fd: OwnFd) -> io::Result<Rc<Self>> {
        let fd = fds::watch(fd, Interest::READABLE)?;
        Ok(Rc::new(Link { fd }))
    }

    /// What cannot be sent now is lost, as HELLO may be anyway.
    fn tell(&self, note: &Note) {
        let _ = sys::send(self.fd.get_ref().raw(), &note.encode());
    }

    /// The next note and its secret; `None` at the end.
    async fn next(&self) -> Option<(Note, [u8; 16])> {
        let mut buf = [0; NOTE_HEAD + wire::MAX_LEN + 1];
        loop {
            let mut guard = self.fd.readable().await.ok()?;
            match sys::recv(self.fd.get_ref().raw(), &mut buf) {
                Ok(0) => return None,
                Ok(n) => {
                    if let Some(note) = Note::decode(buf.get(..n).unwrap_or_default()) {
                        return Some(note);
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => guard.clear_ready(),
                Err(_) => return None,
            }
        }
    }
}

type Tuple = (SocketAddr, SocketAddr);

/// All that is shared with other processes.
#[derive(Default)]
pub(crate) struct Claims {
    /// Tasks that wait for other processes, per address of ours.
    open: HashMap<SocketAddr, JoinHandle<()>>,
    /// What others have claimed of us, by (our end, their end).
    claimed: HashMap<Tuple, (Time, Rc<Link>)>,
    /// Oldest first; an entry whose time does not match was replaced.
    order: VecDeque<(Time, Tuple)>,
    /// Owners of addresses at which we accept.
    owners: HashMap<SocketAddr, Rc<Link>>,
    /// What we have claimed.
    mine: HashMap<FlowToken, Tuple>,
    /// Other processes at addresses of ours.
    guests: Vec<(SocketAddr, Weak<Link>)>,
}

impl Claims {
    /// Serves other processes that accept at our address `addr`.
    pub(crate) fn open(&mut self, addr: SocketAddr, fd: OwnFd, shared: &Rc<Shared>) {
        if let Ok(fd) = fds::watch(fd, Interest::READABLE) {
            let task = take_links(addr, fd, shared.clone());
            self.open.insert(addr, task::spawn_local(task));
        }
    }

    /// The owner of `addr` can be asked.
    pub(crate) fn found(&mut self, addr: SocketAddr, fd: OwnFd, shared: &Rc<Shared>) {
        if let Ok(link) = Link::new(fd) {
            self.owners.insert(addr, link.clone());
            task::spawn_local(hear_owner(addr, link, shared.clone()));
        }
    }

    /// We do not own `addr` any more. Who had claimed connections there finds the next owner, or
    /// becomes it.
    pub(crate) fn close(&mut self, addr: SocketAddr) {
        if let Some(task) = self.open.remove(&addr) {
            task.abort();
            self.claimed
                .retain(|(local, _), _| answering([addr].into_iter(), *local).is_none());
        }
    }

    /// A connection to the owner of `addr` has ended; true if it was the one in use.
    pub(crate) fn owner_lost(&mut self, addr: SocketAddr, link: &Rc<Link>) -> bool {
        let current = self.owners.get(&addr).is_some_and(|l| Rc::ptr_eq(l, link));
        if current {
            self.owners.remove(&addr);
        }
        current
    }

    /// A connection was accepted in this process, at an address that it may or may not own.
    pub(crate) fn accepted(&mut self, token: FlowToken, tuple: Tuple, owned: bool) {
        if owned {
            self.claimed.remove(&tuple);
            return;
        }
        let owner = answering(self.owners.keys().copied(), tuple.0);
        if let Some(link) = owner.and_then(|owner| self.owners.get(&owner)) {
            link.tell(&Note::Claim(tuple.0, tuple.1));
            self.mine.insert(token, tuple);
        }
    }

    /// Whether another process passes HELLO on for connections to `local`.
    pub(crate) fn knows_owner(&self, local: SocketAddr) -> bool {
        answering(self.owners.keys().copied(), local).is_some()
    }

    /// Connections of ours that nobody passes HELLO on for.
    pub(crate) fn orphans(&self) -> Vec<(FlowToken, Tuple)> {
        let orphan = |tuple: &Tuple| answering(self.owners.keys().copied(), tuple.0).is_none();
        let all = self.mine.iter().filter(|(_, tuple)| orphan(tuple));
        all.map(|(token, tuple)| (*token, *tuple)).collect()
    }

    /// A flow of this process is over. With `late` a HELLO for it is still to come here, and be refused or told how it ended.
    pub(crate) fn gone(&mut self, token: FlowToken, late: bool) {
        if let Some(tuple) = self.mine.remove(&token).filter(|_| !late) {
            let owner = answering(self.owners.keys().copied(), tuple.0);
            if let Some(link) = owner.and_then(|owner| self.owners.get(&owner)) {
                link.tell(&Note::Drop(tuple.0, tuple.1));
            }
        }
    }

    /// Passes a datagram on if it is HELLO for a connection that another process has accepted. False if it may be for us, too:
    /// for a later connection with the same addresses.
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
        let Some((_, link)) = self.claimed.get(&(hello.acceptor, hello.connector)) else {
            return false;
        };
        link.tell(&Note::Hello(from, local, data.to_vec()));
        !hello.flow.is_again()
    }

    /// Tells the other processes at our address `addr`.
    pub(crate) fn tell_guests(&self, addr: SocketAddr, note: &Note) {
        let there = self.guests.iter().filter(|(at, _)| *at == addr);
        for link in there.filter_map(|(_, link)| link.upgrade()) {
            link.tell(note);
        }
    }

    fn claim(&mut self, now: Time, tuple: Tuple, link: Rc<Link>) {
        self.expire(now);
        while self.claimed.len() >= CLAIMS {
            let Some((at, oldest)) = self.order.pop_front() else {
                break;
            };
            self.claimed
                .retain(|tuple, (since, _)| (*since, *tuple) != (at, oldest));
        }
        self.claimed.insert(tuple, (now, link));
        self.order.push_back((now, tuple));
        // Behind one that lasts, those that were dropped or replaced would pile up.
        if self.order.len() > 2 * CLAIMS {
            let claimed = &self.claimed;
            self.order
                .retain(|(at, tuple)| claimed.get(tuple).is_some_and(|(since, _)| since == at));
        }
    }

    /// Forgets claims that are too old; whether there are others.
    pub(crate) fn tidy(&mut self, now: Time) -> bool {
        self.expire(now);
        if self.claimed.is_empty() {
            self.claimed.shrink_to_fit();
            self.order.shrink_to_fit();
        }
        !self.claimed.is_empty()
    }

    fn expire(&mut self, now: Time) {
        while let Some((at, tuple)) = self.order.front().copied() {
            let current = self
                .claimed
                .get(&tuple)
                .is_some_and(|(since, _)| *since == at);
            if current && now.since(at) < CLAIM_AGE {
                break;
            }
            self.order.pop_front();
            if current {
                self.claimed.remove(&tuple);
            }
        }
    }
}

/// Another process's connection to the owner.
struct Guest {
    task: AbortHandle,
    /// Anybody on this host can connect; this one is of our user, or knows the secret.
    believed: Rc<Cell<bool>>,
}

/// Owner: takes other processes' connections. They all end with this task.
async fn take_links(addr: SocketAddr, listener: AsyncFd<OwnFd>, shared: Rc<Shared>) {
    let mut links = JoinSet::new();
    let mut guests: Vec<Guest> = Vec::new();
    while let Ok(mut guard) = listener.readable().await {
        match sys::accept_local(listener.get_ref().raw()) {
            Ok(fd) => {
                while links.try_join_next().is_some() {}
                guests.retain(|guest| !guest.task.is_finished());
                if guests.len() >= LINKS
                    && let Some(stranger) = guests.iter().position(|g| !g.believed.get())
                {
                    guests.remove(stranger).task.abort();
                }
                if guests.len() < LINKS
                    && let Ok(link) = Link::new(fd)
                {
                    let believed = Rc::new(Cell::new(false));
                    let task = hear_claims(addr, link, believed.clone(), shared.clone());
                    let task = links.spawn_local(task);
                    guests.push(Guest { task, believed });
                }
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => guard.clear_ready(),
            // No descriptor, most likely. They wait, and so do we, for the next one.
            Err(_) => guard.clear_ready(),
        }
        drop(guard);
        task::yield_now().await;
    }
}

/// Owner: does what another process asks for.
async fn hear_claims(
    addr: SocketAddr,
    link: Rc<Link>,
    believed: Rc<Cell<bool>>,
    shared: Rc<Shared>,
) {
    shared.with(|d, _| {
        let guests = &mut d.claims.guests;
        guests.retain(|(_, link)| link.strong_count() > 0);
        guests.push((addr, Rc::downgrade(&link)));
    });
    let relative = sys::peer_user(link.fd.get_ref().raw()) == Some(sys::user());
    while let Some((note, secret)) = link.next().await {
        if let Note::Release(_) = note {
            let user = sys::peer_user(link.fd.get_ref().raw());
            let gave =
                shared.with_self(|d, _, shared| d.may_have(user) && d.give_way(addr, shared));
            // The link ends when the control socket is closed; at once, where there is nothing to be waited for.
            match gave {
                true => continue,
                false => break,
            }
        }
        if !relative && secret != lineage() {
            break;
        }
        believed.set(true);
        shared.with(|d, now| match note {
            Note::Claim(local, remote) => {
                d.endpoint.share_listeners();
                d.claims.claim(now, (local, remote), link.clone());
                while let Some(hello) = d.endpoint.take_pending(now, local, remote) {
                    link.tell(&Note::Hello(hello.from, hello.local, hello.data));
                }
            }
            Note::Drop(local, remote) => {
                let tuple = (local, remote);
                if d.claims
                    .claimed
                    .get(&tuple)
                    .is_some_and(|(_, l)| Rc::ptr_eq(l, &link))
                {
                    d.claims.claimed.remove(&tuple);
                }
            }
            Note::Hello(..) | Note::Release(_) | Note::Given(_) => {}
        });
    }
    shared.with(|d, _| d.claims.claimed.retain(|_, (_, l)| !Rc::ptr_eq(l, &link)));
}

/// Others: takes what the owner of `addr` has received for us.
async fn hear_owner(addr: SocketAddr, link: Rc<Link>, shared: Rc<Shared>) {
    while let Some((note, _)) = link.next().await {
        shared.with(|d, now| match note {
            Note::Hello(from, local, data) => d.take(now, from, local, &data),
            Note::Given(addr) => d.never_again(addr),
            Note::Claim(..) | Note::Drop(..) | Note::Release(_) => {}
        });
    }
    shared.with_self(|d, _, shared| d.owner_lost(addr, &link, shared));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn notes_come_back_as_they_were() {
        let (a, b) = (at("10.0.0.1:80"), at("[fd00::1]:7"));
        for note in [
            Note::Claim(a, b),
            Note::Drop(b, a),
            Note::Hello(a, b, vec![1, 2, 3]),
            Note::Given(b),
        ] {
            let bytes = note.encode();
            assert_eq!(Note::decode(&bytes).unwrap(), (note, lineage()));
            assert_eq!(Note::decode(&bytes[..NOTE_HEAD - 1]), None);
        }
        let (release, secret) = Note::decode(&Note::Release(a).encode()).unwrap();
        assert_eq!((release, secret), (Note::Release(a), [0; 16]));
        assert_eq!(Note::decode(&[]), None);
        let mut longer = Note::Claim(a, b).encode();
        longer.push(0);
        assert_eq!(Note::decode(&longer), None);
        let mut unknown = Note::Claim(a, b).encode();
        unknown[0] = 9;
        assert_eq!(Note::decode(&unknown), None);
    }

    #[test]
    fn the_secret_is_drawn_once() {
        draw_lineage().unwrap();
        let secret = lineage();
        assert!(secret.iter().any(|byte| *byte != 0));
        draw_lineage().unwrap();
        assert_eq!(lineage(), secret);
    }

    /// Of an owner that is slow, and of one that does not take anybody.
    #[test]
    fn an_owner_without_room_is_waited_for() {
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
                // The kernel counts in ticks.
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
