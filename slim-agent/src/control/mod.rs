//! All UDP control sockets: one per address that the application listens on, and the process's own, one per address in use.

pub(crate) mod places;
pub(crate) mod receive;
pub(crate) mod socket;
pub(crate) mod udp;

use std::collections::HashMap;
use std::io;
use std::mem;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::RawFd;
use std::rc::Rc;
use std::sync::Arc;

use slim_sys::OwnFd;

use crate::control::places::{Place, Ports, is_same_host, source_towards, without_port};
use crate::control::socket::{ControlSocket, answering, aside};
use crate::events::Log;
use crate::tasks::{RunningTask, Task, Tasks};
use crate::transport::tcp::{self, TcpListener};

/// Most addresses in use: each takes two descriptors.
const MOST_OWN: usize = 64;

/// All control sockets of the process.
pub(crate) struct Control {
    /// The process's own control sockets: one at each address in use, all on one port.
    own: Vec<Own>,
    /// `own` has changed since the last [`outlets`](Control::outlets).
    changed: bool,
    /// Not all of `own` are on loopback.
    networked: bool,
    /// See [`map_v4`](Control::map_v4).
    maps: bool,
    ports: Ports,
    /// The control sockets of listeners, each with its receiving task until it is stopped.
    listeners: HashMap<SocketAddr, (Rc<ControlSocket>, Option<RunningTask>)>,
    /// Sockets on ports that no peer knows, kept while answers may come there.
    asides: Vec<QuietSocket>,
    log: Log,
}

/// A socket on a port of its own, and its receiving task.
struct QuietSocket {
    socket: Rc<ControlSocket>,
    _receiving: RunningTask,
}

/// A control socket of the process's own, and the resume listener at the same address.
struct Own {
    socket: Rc<ControlSocket>,
    _receiving: RunningTask,
    listening: Option<Listening>,
}

/// A resume listener, and its accepting task.
struct Listening {
    listener: Rc<OwnFd>,
    _accepting: RunningTask,
}

impl Listening {
    fn begin(listener: OwnFd, tasks: &mut Tasks) -> io::Result<Self> {
        let listener = Rc::new(listener);
        let watched = TcpListener::new(listener.clone())?;
        Ok(Listening {
            listener,
            _accepting: tasks.start(Task::Accept {
                listener: Box::new(watched),
                announced: None,
            }),
        })
    }
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

    /// Serves peers at an address from now on.
    pub(crate) fn serve(&mut self, place: Place, tasks: &mut Tasks) -> io::Result<()> {
        let mut bound = place.at;
        bound.set_port(self.ports.control);
        let socket = Rc::new(ControlSocket::new(place.control, bound)?);
        let listening = place.resume.map(|fd| Listening::begin(fd, tasks));
        let listening = listening.transpose()?;
        let receiving = tasks.start(Task::Receive(socket.clone()));
        self.networked |= !place.at.ip().is_loopback();
        self.changed = true;
        self.own.push(Own {
            socket,
            _receiving: receiving,
            listening,
        });
        Ok(())
    }

    /// The sockets of the process's own, with the address that each is for.
    pub(crate) fn places(&self) -> impl Iterator<Item = (SocketAddr, RawFd, Option<RawFd>)> {
        self.own.iter().map(|own| {
            let resume = own.listening.as_ref().map(|it| it.listener.raw());
            let control = own.socket.fd.get_ref().raw();
            (without_port(own.socket.bound), control, resume)
        })
    }

    /// The ports that [`places`](Self::places) are on.
    pub(crate) fn ports(&self) -> Ports {
        self.ports
    }

    /// Whether resume connections over IPv4 are accepted as IPv6 sockets.
    pub(crate) fn maps(&self) -> bool {
        self.maps
    }

    /// The sockets that are to be served were made by an agent for which [`maps`](Self::maps) was this.
    pub(crate) fn set_maps(&mut self, maps: bool) {
        self.maps = maps;
    }

    /// There is a flow of an IPv6 socket over IPv4. From now on resume connections over IPv4 are accepted as IPv6
    /// sockets, too: such a socket can be converted to an IPv4 socket later, but not the other way round.
    pub(crate) fn map_v4(&mut self, tasks: &mut Tasks) {
        if mem::replace(&mut self.maps, true) {
            return;
        }
        for own in &mut self.own {
            let mut at = own.socket.bound;
            at.set_port(self.ports.resume);
            let Some(old) = own.listening.as_mut().filter(|_| at.is_ipv4()) else {
                continue;
            };
            let new = tcp::socket::listen_mapped_instead(&old.listener, at);
            if let Some(Ok(new)) = new.map(|new| Listening::begin(new, tasks)) {
                *old = new;
            }
        }
    }

    /// Serves peers at this address, unless it is served already. Returns whether it is served.
    pub(crate) fn serve_at(&mut self, addr: SocketAddr, tasks: &mut Tasks) -> bool {
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
                Place::open(at, self.ports, self.maps).and_then(|place| self.serve(place, tasks))
            }
            false => Err(io::Error::other("there are too many addresses")),
        };
        if let Err(e) = &served {
            self.log
                .info(|| format!("peers cannot come to {}: {e}", at.ip()));
        }
        served.is_ok()
    }

    /// Whether other hosts can reach this process.
    pub(crate) fn is_networked(&self) -> bool {
        self.networked
    }

    /// Stops serving all addresses except those on loopback and those for which `keep` holds.
    pub(crate) fn leave(&mut self, keep: impl Fn(IpAddr) -> bool) {
        self.changed = true;
        self.own.retain(|own| {
            let ip = own.socket.bound.ip();
            ip.is_loopback() || keep(ip)
        });
        let mut own = self.own.iter();
        self.networked = own.any(|own| !own.socket.bound.ip().is_loopback());
    }

    /// All control sockets: the process's own and those of listeners.
    pub(crate) fn all(&self) -> Vec<Rc<ControlSocket>> {
        let own = self.own.iter().map(|own| &own.socket);
        let listeners = self.listeners.values().map(|(socket, _)| socket);
        own.chain(listeners).cloned().collect()
    }

    /// The own socket from which messages from `from` to `to` are sent. If `from` does not say, the kernel's routes
    /// decide. If these do not say, any socket will do that has the family of `to`, and is on loopback exactly if `to` is.
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

    /// The process's own sockets, from which application threads send, if they have changed since the last call.
    pub(crate) fn outlets(&mut self) -> Option<Vec<(Arc<OwnFd>, SocketAddr)>> {
        let sockets = self.own.iter().map(|own| &own.socket);
        let all = || sockets.map(|s| (s.fd.get_ref().clone(), s.bound)).collect();
        mem::take(&mut self.changed).then(all)
    }

    /// Takes over the control socket of a listener.
    pub(crate) fn add(&mut self, addr: SocketAddr, fd: OwnFd, tasks: &mut Tasks) {
        match ControlSocket::new(fd, addr) {
            Ok(socket) => {
                let socket = Rc::new(socket);
                let task = tasks.start(Task::Receive(socket.clone()));
                self.listeners.insert(addr, (socket, Some(task)));
            }
            Err(e) => self.log.warn(|| format!("control socket on {addr}: {e}")),
        }
    }

    /// Stops serving a listener's address, once the returned task has ended. The returned socket may still send; it is
    /// closed when it is [forgotten](Self::forget).
    pub(crate) fn stop(&mut self, addr: SocketAddr) -> Option<(Rc<ControlSocket>, RunningTask)> {
        let (socket, task) = self.listeners.get_mut(&addr)?;
        Some((socket.clone(), task.take()?))
    }

    /// Drops a listener's socket: nothing is sent from it any more.
    pub(crate) fn forget(&mut self, socket: &Rc<ControlSocket>) {
        self.listeners
            .retain(|_, (other, _)| !Rc::ptr_eq(other, socket));
    }

    /// Sends a message, from the address and port `from` if given. A message that cannot be sent now is lost, as any
    /// datagram may be.
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

    /// Sends a message from a port of the address `from` that the peer does not know.
    pub(crate) fn send_aside(
        &mut self,
        to: SocketAddr,
        from: SocketAddr,
        data: &[u8],
        tasks: &mut Tasks,
    ) {
        let is_there = |aside: &&QuietSocket| is_same_host(aside.socket.bound, from);
        if !self.asides.iter().any(|aside| is_there(&aside)) {
            match aside(from) {
                Ok(socket) => {
                    let receiving = tasks.start(Task::Receive(socket.clone()));
                    self.asides.push(QuietSocket {
                        socket,
                        _receiving: receiving,
                    });
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

    /// Closes these sockets: no answer is expected any more.
    pub(crate) fn end_asides(&mut self) {
        self.asides.clear();
    }

    /// Whether datagrams to `local` arrive at a listener's control socket of this process.
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
