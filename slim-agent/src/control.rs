//! UDP control sockets: one per address that the application listens on, and the process's own, one per address in use.
//!
//! Two things make them more than a bound socket. Datagrams leave from the address that the
//! question was sent to (`IP_PKTINFO`), because the peer takes answers from nowhere else. And a
//! refusal by ICMP is read from the error queue (`IP_RECVERR`), which names the destination; without
//! it the error of one peer would hit the next send to another.

use std::collections::HashMap;
use std::io;
use std::iter;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::rc::Rc;
use std::sync::Arc;

use slim_core::wire;
use socket2::{Domain, SockRef, Socket, Type};
use tokio::io::unix::AsyncFd;
use tokio::io::{Interest, Ready};
use tokio::task::{self, JoinHandle};

use crate::agent::canonical;
use crate::events::Log;
use crate::fds::{self, OwnFd};
use crate::places::{Place, Ports, is_same_host, source_towards, without_port};
use crate::ports::quiet_ports;
use crate::resume_listener;
use crate::shared::Shared;
use crate::sys;
use crate::udp;

/// Receive buffer of a control socket, if we may have as much: thousands of flows may be opened, or
/// break, at once, and each asks. Memory is used only while datagrams wait.
pub(crate) const RECEIVE_BUFFER: i32 = 4 * 1024 * 1024;
/// Datagrams taken in a row before everybody else gets a turn.
const BATCH: usize = 32;
/// Datagrams taken from each socket before the endpoint is told that time is up.
const MOST_WAITING: usize = 8 * BATCH;
/// Datagrams taken from a socket that is about to be closed.
const MOST_LEFT: usize = 4096;

/// Addresses in use, at most: each takes two descriptors.
const MOST_OWN: usize = 64;

/// All control sockets of the process.
pub(crate) struct Control {
    /// One at each address in use, all on one port.
    own: Vec<Own>,
    /// There are others than before.
    changed: bool,
    /// Of which not all are on loopback.
    networked: bool,
    /// See [`map_v4`](Control::map_v4).
    maps: bool,
    ports: Ports,
    /// Each with the task that receives, until it is stopped.
    listeners: HashMap<SocketAddr, (Rc<ControlSocket>, Option<JoinHandle<()>>)>,
    /// On ports that no peer has heard of, while answers may come there.
    asides: Vec<Aside>,
    log: Log,
}

/// A socket on a port of its own, and the task that receives.
struct Aside {
    socket: Rc<ControlSocket>,
    task: JoinHandle<()>,
}

/// A control socket of the process's own, and the listener for resumes at the same address.
struct Own {
    socket: Rc<ControlSocket>,
    receiving: JoinHandle<()>,
    listening: Option<Listening>,
}

/// Who resumes comes here.
struct Listening {
    listener: Rc<OwnFd>,
    task: JoinHandle<()>,
}

impl Listening {
    fn begin(listener: OwnFd, shared: &Rc<Shared>) -> io::Result<Self> {
        let listener = Rc::new(listener);
        let task = resume_listener::serve(listener.clone(), shared)?;
        Ok(Listening { listener, task })
    }
}

/// One UDP socket.
pub(crate) struct ControlSocket {
    fd: AsyncFd<Arc<OwnFd>>,
    bound: SocketAddr,
}

/// The control socket that goes with the listener `fd` on `addr`.
pub(crate) fn bind_for_listener(fd: BorrowedFd<'_>, addr: SocketAddr) -> io::Result<OwnFd> {
    let only_v6 = addr.is_ipv4()
        || sys::option(fd.as_raw_fd(), libc::IPPROTO_IPV6, libc::IPV6_V6ONLY).unwrap_or(0) != 0;
    bind(addr, only_v6)
}

/// A control socket on the address of a connection whose listener is another's, or inherited.
pub(crate) fn bind_alone(addr: SocketAddr) -> io::Result<OwnFd> {
    bind(addr, true)
}

fn bind(addr: SocketAddr, only_v6: bool) -> io::Result<OwnFd> {
    let kind = Type::DGRAM.nonblocking().cloexec();
    let own = OwnFd::make(|| Socket::new_raw(Domain::for_address(addr), kind, None))?;
    let (fd, socket) = (own.raw(), SockRef::from(&own));
    if addr.is_ipv6() {
        socket.set_only_v6(only_v6)?;
        sys::set_option(fd, libc::IPPROTO_IPV6, libc::IPV6_RECVERR, 1)?;
        sys::set_option(fd, libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, 1)?;
    } else {
        sys::set_option(fd, libc::IPPROTO_IP, libc::IP_PKTINFO, 1)?;
    }
    if addr.is_ipv4() || !only_v6 {
        sys::set_option(fd, libc::IPPROTO_IP, libc::IP_RECVERR, 1)?;
    }
    // With the privilege for it beyond the limit of the system, else up to that.
    if sys::set_option(fd, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, RECEIVE_BUFFER).is_err() {
        sys::set_option(fd, libc::SOL_SOCKET, libc::SO_RCVBUF, RECEIVE_BUFFER)?;
    }
    socket.bind(&addr.into())?;
    Ok(own)
}

impl Control {
    pub(crate) fn new(ports: Ports, log: Log) -> Self {
        Control {
            own: Vec::new(),
            changed: false,
            networked: false,
            maps: false,
            ports,
            listeners: HashMap::new(),
            asides: Vec::new(),
            log,
        }
    }

    /// Peers may come to an address from now on.
    pub(crate) fn serve(&mut self, place: Place, shared: &Rc<Shared>) -> io::Result<()> {
        let mut bound = place.at;
        bound.set_port(self.ports.control);
        let socket = Rc::new(ControlSocket::new(place.control, bound)?);
        let listening = place.resume.map(|fd| Listening::begin(fd, shared));
        let listening = listening.transpose()?;
        let receiving = task::spawn_local(serve(socket.clone(), shared.clone()));
        self.networked |= !place.at.ip().is_loopback();
        self.changed = true;
        self.own.push(Own {
            socket,
            receiving,
            listening,
        });
        Ok(())
    }

    /// There are flows of IPv6 sockets over IPv4. From now on who resumes over IPv4 gets such a socket, too: it can be made
    /// an IPv4 one afterwards, and not the other way round.
    pub(crate) fn map_v4(&mut self, shared: &Rc<Shared>) {
        if std::mem::replace(&mut self.maps, true) {
            return;
        }
        for own in &mut self.own {
            let mut at = own.socket.bound;
            at.set_port(self.ports.resume);
            let Some(old) = own.listening.as_mut().filter(|_| at.is_ipv4()) else {
                continue;
            };
            let new = resume_listener::listen_mapped_instead(&old.listener, at);
            if let Some(Ok(new)) = new.map(|new| Listening::begin(new, shared)) {
                std::mem::replace(old, new).task.abort();
            }
        }
    }

    /// The same, unless they may already. Whether they can.
    pub(crate) fn serve_at(&mut self, addr: SocketAddr, shared: &Rc<Shared>) -> bool {
        let at = without_port(addr);
        if self
            .own
            .iter()
            .any(|own| is_same_host(own.socket.bound, at))
        {
            return true;
        }
        let served = match self.own.len() < MOST_OWN {
            true => {
                Place::open(at, self.ports, self.maps).and_then(|place| self.serve(place, shared))
            }
            false => Err(io::Error::other("there are too many addresses")),
        };
        if let Err(e) = &served {
            self.log
                .info(|| format!("peers cannot come to {}: {e}", at.ip()));
        }
        served.is_ok()
    }

    /// Whether there is a way to us from other hosts.
    pub(crate) fn is_networked(&self) -> bool {
        self.networked
    }

    /// Nobody comes to an address any more, but to those on loopback and those for which `keep` holds.
    pub(crate) fn leave(&mut self, keep: impl Fn(IpAddr) -> bool) {
        self.changed = true;
        self.own.retain(|own| {
            let ip = own.socket.bound.ip();
            let stays = ip.is_loopback() || keep(ip);
            if !stays {
                own.receiving.abort();
                if let Some(listening) = &own.listening {
                    listening.task.abort();
                }
            }
            stays
        });
        let mut own = self.own.iter();
        self.networked = own.any(|own| !own.socket.bound.ip().is_loopback());
    }

    /// Our own and those of listeners.
    pub(crate) fn all(&self) -> Vec<Rc<ControlSocket>> {
        let own = self.own.iter().map(|own| &own.socket);
        let listeners = self.listeners.values().map(|(socket, _)| socket);
        own.chain(listeners).cloned().collect()
    }

    /// The one of ours that messages from `from` to `to` leave from: if `from` does not say, where the kernel's routes do.
    fn own(&self, to: SocketAddr, from: Option<SocketAddr>) -> Option<&Rc<ControlSocket>> {
        let at = |addr: SocketAddr| {
            let is_there = |own: &&Own| is_same_host(own.socket.bound, addr);
            self.own.iter().find(is_there)
        };
        let fits = |own: &&Own| {
            let bound = own.socket.bound;
            bound.is_ipv4() == to.is_ipv4() && bound.ip().is_loopback() == to.ip().is_loopback()
        };
        let given = from.and_then(at);
        let routed = || source_towards(to).ok().and_then(at);
        let found = given.or_else(routed);
        let found = found.or_else(|| self.own.iter().find(fits));
        found.map(|own| &own.socket)
    }

    /// The process's own sockets, for threads of the application to send by, if they are others than before.
    pub(crate) fn outlets(&mut self) -> Option<Vec<(Arc<OwnFd>, SocketAddr)>> {
        let sockets = self.own.iter().map(|own| &own.socket);
        let all = || sockets.map(|s| (s.fd.get_ref().clone(), s.bound)).collect();
        std::mem::take(&mut self.changed).then(all)
    }

    /// Takes over the control socket of a listener.
    pub(crate) fn add(&mut self, addr: SocketAddr, fd: OwnFd, shared: &Rc<Shared>) {
        match ControlSocket::new(fd, addr) {
            Ok(socket) => {
                let socket = Rc::new(socket);
                let task = task::spawn_local(serve(socket.clone(), shared.clone()));
                self.listeners.insert(addr, (socket, Some(task)));
            }
            Err(e) => self.log.warn(|| format!("control socket on {addr}: {e}")),
        }
    }

    /// Stops serving a listener's address, which is still answered from. The socket is closed when it is
    /// [forgotten](Self::forget), and what is returned with it has ended.
    pub(crate) fn stop(&mut self, addr: SocketAddr) -> Option<(Rc<ControlSocket>, JoinHandle<()>)> {
        let (socket, task) = self.listeners.get_mut(&addr)?;
        let task = task.take()?;
        task.abort();
        Some((socket.clone(), task))
    }

    /// Nothing is sent by this socket any more.
    pub(crate) fn forget(&mut self, socket: &Rc<ControlSocket>) {
        self.listeners
            .retain(|_, (other, _)| !Rc::ptr_eq(other, socket));
    }

    /// Sends a message, from the address and port `from` if given. What cannot be sent now is lost,
    /// as any datagram may be.
    pub(crate) fn send(&self, to: SocketAddr, from: Option<SocketAddr>, data: &[u8]) {
        let listener = from.and_then(|from| self.listener(from));
        let Some(socket) = listener.or_else(|| self.own(to, from)) else {
            self.log
                .debug(|| format!("no control socket that reaches {to}"));
            return;
        };
        let source = from.filter(|from| !from.ip().is_unspecified());
        if let Err(e) = socket.send(to, source, data) {
            self.log.debug(|| format!("control message to {to}: {e}"));
        }
    }

    /// Sends a message from a port of the address `from` that the peer has not heard of.
    pub(crate) fn send_aside(
        &mut self,
        to: SocketAddr,
        from: SocketAddr,
        data: &[u8],
        shared: &Rc<Shared>,
    ) {
        let is_there = |aside: &&Aside| is_same_host(aside.socket.bound, from);
        if !self.asides.iter().any(|aside| is_there(&aside)) {
            match aside(from) {
                Ok(socket) => {
                    let task = task::spawn_local(serve(socket.clone(), shared.clone()));
                    self.asides.push(Aside { socket, task });
                }
                Err(e) => return self.log.debug(|| format!("no socket on {from}: {e}")),
            }
        }
        if let Some(aside) = self.asides.iter().find(is_there)
            && let Err(e) = aside.socket.send(to, None, data)
        {
            self.log.debug(|| format!("control message to {to}: {e}"));
        }
    }

    pub(crate) fn has_asides(&self) -> bool {
        !self.asides.is_empty()
    }

    /// No answer is waited for any more.
    pub(crate) fn end_asides(&mut self) {
        for aside in self.asides.drain(..) {
            aside.task.abort();
        }
    }

    /// Whether datagrams to `local` come to a listener's socket of ours.
    pub(crate) fn owns(&self, local: SocketAddr) -> bool {
        self.listener(local).is_some()
    }

    /// The listener's socket that answers from `from`.
    fn listener(&self, from: SocketAddr) -> Option<&Rc<ControlSocket>> {
        let exact = self.listeners.get(&from);
        let other = || {
            let bound = answering(self.listeners.keys().copied(), from)?;
            self.listeners.get(&bound)
        };
        exact.or_else(other).map(|(socket, _)| socket)
    }
}

/// A socket for [`Control::send_aside`]. Not on a port that a listener may get.
fn aside(from: SocketAddr) -> io::Result<Rc<ControlSocket>> {
    let mut last = io::ErrorKind::AddrInUse.into();
    for port in quiet_ports().chain(iter::once(0)) {
        let mut addr = from;
        addr.set_port(port);
        match bind(addr, true) {
            Ok(fd) => return ControlSocket::new(fd, addr).map(Rc::new),
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => last = e,
            Err(e) => return Err(e),
        }
    }
    Err(last)
}

/// Which of the addresses `bound` can answer from `from`. A program may listen on the same port of
/// IPv4 and of IPv6 only; so IPv6 speaks for an IPv4 address when there is nothing better.
pub(crate) fn answering(
    bound: impl Iterator<Item = SocketAddr>,
    from: SocketAddr,
) -> Option<SocketAddr> {
    let fitting = bound.filter(|bound| {
        let family = bound.is_ipv6() || from.is_ipv4();
        let ip = bound.ip().is_unspecified() || canonical(*bound) == from;
        bound.port() == from.port() && ip && family
    });
    fitting.min_by_key(|bound| bound.is_ipv4() != from.is_ipv4())
}

impl ControlSocket {
    fn new(fd: OwnFd, bound: SocketAddr) -> io::Result<Self> {
        let fd = fds::watch(Arc::new(fd), Interest::READABLE | Interest::ERROR)?;
        Ok(ControlSocket { fd, bound })
    }

    /// Takes the next datagram, and does what follows from it.
    fn receive(&self, buf: &mut [u8], shared: &Rc<Shared>) -> io::Result<()> {
        let (from, to, data) = self.take(buf)?;
        shared.with(|d, now| d.datagram(now, from, to, data));
        Ok(())
    }

    /// Takes the next datagram: where it came from, where it was sent, and what it says.
    fn take<'a>(&self, buf: &'a mut [u8]) -> io::Result<(SocketAddr, SocketAddr, &'a [u8])> {
        let datagram = udp::recv_datagram(self.fd.get_ref().raw(), buf)?;
        let from = canonical(datagram.from);
        let mut to = datagram.to.unwrap_or(self.bound);
        to.set_port(self.bound.port());
        let data = buf.get(..datagram.len).unwrap_or_default();
        Ok((from, canonical(to), data))
    }

    /// Hands over the datagrams that have come, but not all of a flood.
    pub(crate) fn take_waiting(&self, mut each: impl FnMut(SocketAddr, SocketAddr, &[u8])) {
        let mut buf = BUFFER;
        for _ in 0..MOST_WAITING {
            match self.take(&mut buf) {
                Ok((from, to, data)) => each(from, to, data),
                // A refusal reported once more is no end.
                Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {}
                Err(_) => break,
            }
        }
    }

    /// Takes the next refusal; an error when there is none.
    fn receive_refusal(&self, buf: &mut [u8], shared: &Rc<Shared>) -> io::Result<()> {
        if let Some((to, len)) = udp::recv_refusal(self.fd.get_ref().raw(), buf)? {
            let quoted = buf.get(..len).unwrap_or_default();
            shared.with(|d, now| d.endpoint.handle_refused(now, canonical(to), quoted));
        }
        Ok(())
    }

    /// Takes what waits, refusals first, but not all of a flood.
    pub(crate) fn receive_waiting(&self, shared: &Rc<Shared>) {
        let mut buf = BUFFER;
        for _ in 0..MOST_WAITING {
            if self.receive_refusal(&mut buf, shared).is_err() {
                break;
            }
        }
        self.receive_up_to(MOST_WAITING, &mut buf, shared);
    }

    /// Takes what has come before the socket is closed: who is not answered asks again, and that would come to whoever
    /// has the port then.
    pub(crate) fn receive_rest(&self, shared: &Rc<Shared>) {
        self.receive_up_to(MOST_LEFT, &mut { BUFFER }, shared);
    }

    fn receive_up_to(&self, most: usize, buf: &mut [u8], shared: &Rc<Shared>) {
        for _ in 0..most {
            match self.receive(buf, shared) {
                // A refusal reported once more is no end.
                Err(e) if e.kind() != io::ErrorKind::ConnectionRefused => break,
                _ => {}
            }
        }
    }

    fn send(&self, to: SocketAddr, source: Option<SocketAddr>, data: &[u8]) -> io::Result<()> {
        let of_family = |addr: SocketAddr| match addr {
            SocketAddr::V4(v4) if self.bound.is_ipv6() => {
                SocketAddr::new(v4.ip().to_ipv6_mapped().into(), v4.port())
            }
            addr => addr,
        };
        let (to, source) = (of_family(to), source.map(of_family));
        let fd = self.fd.get_ref().raw();
        let send = |source| match udp::send_datagram(fd, data, to, source) {
            // An earlier datagram's refusal, reported here though it stays in the error queue.
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
                udp::send_datagram(fd, data, to, source)
            }
            other => other,
        };
        match (send(source), source) {
            // This host has lost the address: from another one it may be of use all the same.
            (Err(e), Some(_)) if e.kind() != io::ErrorKind::WouldBlock => send(None),
            (sent, _) => sent,
        }
    }
}

/// For one datagram: longer than any message, so that one that is too long does not look right after
/// truncation.
const BUFFER: [u8; wire::MAX_LEN + 1] = [0; wire::MAX_LEN + 1];

/// Receives until aborted.
async fn serve(socket: Rc<ControlSocket>, shared: Rc<Shared>) {
    let mut buf = BUFFER;
    loop {
        let Ok(mut guard) = socket.fd.ready(Interest::READABLE | Interest::ERROR).await else {
            return;
        };
        let mut more = false;
        if guard.ready().is_error() {
            more = true;
            for _ in 0..BATCH {
                if socket.receive_refusal(&mut buf, &shared).is_err() {
                    guard.clear_ready_matching(Ready::ERROR);
                    more = false;
                    break;
                }
            }
        }
        for n in 0..BATCH {
            match socket.receive(&mut buf, &shared) {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    guard.clear_ready_matching(Ready::READABLE);
                    break;
                }
                // Somebody has closed it.
                Err(e) if matches!(e.raw_os_error(), Some(libc::EBADF | libc::ENOTSOCK)) => return,
                // A refusal reported once more; the error queue has it.
                Err(_) => {}
            }
            more |= n + 1 == BATCH;
        }
        drop(guard);
        if more {
            task::yield_now().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_control_socket_keeps_more_than_the_usual_burst() {
        let room = |fd| sys::option(fd, libc::SOL_SOCKET, libc::SO_RCVBUF).unwrap();
        let ours = bind("127.0.0.1:0".parse().unwrap(), true).unwrap();
        let usual = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        assert!(room(ours.raw()) > room(usual.as_raw_fd()));
    }

    #[test]
    fn each_family_answers_from_its_own_socket() {
        let addr = |text: &str| text.parse::<SocketAddr>().unwrap();
        let (v4, v6, one) = (addr("0.0.0.0:7"), addr("[::]:7"), addr("10.0.0.1:7"));
        let choose = |bound: &[SocketAddr], from| answering(bound.iter().copied(), addr(from));
        // In whichever order the sockets come.
        for both in [[v4, v6], [v6, v4]] {
            assert_eq!(choose(&both, "10.0.0.1:7"), Some(v4));
            assert_eq!(choose(&both, "[fd00::1]:7"), Some(v6));
        }
        assert_eq!(choose(&[v6], "10.0.0.1:7"), Some(v6));
        assert_eq!(choose(&[v4], "[fd00::1]:7"), None);
        assert_eq!(choose(&[one], "10.0.0.2:7"), None);
        assert_eq!(choose(&[v4], "10.0.0.1:8"), None);
    }
}
