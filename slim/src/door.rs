//! The door of an endpoint: a listener for peers that have its blob.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use slim_core::endpoint::Agreed;
use slim_core::wire::MAX_ADDRS;
use slim_sys::{Errno, OwnFd};

use crate::accept_set::{AcceptSet, WatchedListener};
use crate::blob::{self, ADMITTED, Blob, DoorKey, INTRODUCTION, Introduction, PROOF, Welcome};
use crate::error::SessionError;
use crate::hub::Hub;
use crate::socket;

/// Limit of connections at the door that are not admitted yet. Beyond it a new connection replaces the oldest of those that have not
/// introduced themselves, or else the oldest.
const GUESTS: usize = 128;
/// Connections that one call accepts at most, so that it ends although peers connect all the time.
const ACCEPTS: usize = 2 * GUESTS;
/// Time limit of such a connection.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time limit for the agent to describe this process (its announcement).
const LIMIT: Duration = Duration::from_secs(5);

/// The door of an endpoint. `None` until the endpoint publishes its blob.
#[derive(Default)]
pub(crate) struct EndpointDoor(Mutex<Option<OpenDoor>>);

struct OpenDoor {
    listener: WatchedListener,
    blob: Vec<u8>,
    key: DoorKey,
    /// Oldest first.
    guests: VecDeque<DoorGuest>,
}

/// A connection at the door that is not admitted yet.
struct DoorGuest {
    fd: OwnFd,
    since: Instant,
    heard: Vec<u8>,
    /// The WELCOME that was sent, and the agreement that holds if the connector proves that it has read WELCOME.
    welcomed: Option<(Vec<u8>, Agreed)>,
}

/// A connection whose peer has proved that it belongs to the job.
pub(crate) struct Admitted {
    pub(crate) fd: OwnFd,
    pub(crate) agreed: Agreed,
    /// The ADMITTED message, to be sent once the flow is open here.
    pub(crate) last: [u8; ADMITTED],
}

/// The state of a guest after its input was read.
enum GuestState {
    /// Its message is not complete yet.
    Pending,
    /// Its message is wrong, or its connection has ended, or its time is over.
    Refused,
    /// It has proved that it belongs to the job.
    Proved,
}

impl EndpointDoor {
    fn state(&self) -> MutexGuard<'_, Option<OpenDoor>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the blob of the endpoint that listens on `addr`. The first call opens the door.
    pub(crate) fn blob(
        &self,
        hub: &Hub,
        addr: SocketAddr,
        set: &AcceptSet,
    ) -> Result<Vec<u8>, SessionError> {
        let mut state = self.state();
        if let Some(open) = &*state {
            return Ok(open.blob.clone());
        }
        let kernel = |(what, errno)| SessionError::Kernel(what, errno);
        let secret = blob::random().map_err(|errno| kernel(("getrandom", errno)))?;
        let listener = socket::listen(SocketAddr::new(addr.ip(), 0)).map_err(kernel)?;
        let port = socket::local(&listener).map(|addr| addr.port());
        let port = port.ok_or(kernel(("getsockname", libc::EINVAL)))?;
        let ips = match addr.ip().is_unspecified() {
            true => own_addresses(hub, addr.is_ipv4()).ok_or(SessionError::TimedOut)?,
            false => vec![addr.ip()],
        };
        let doors = ips
            .into_iter()
            .map(|ip| SocketAddr::new(ip, port))
            .collect();
        let blob = Blob { doors, secret }.encode(&hub.job());
        let listener = WatchedListener::new(listener, set);
        let listener = listener.map_err(|errno| kernel(("epoll_ctl", errno)))?;
        *state = Some(OpenDoor {
            listener,
            blob: blob.clone(),
            key: hub.job().door_key(&secret),
            guests: VecDeque::new(),
        });
        Ok(blob)
    }

    /// Accepts connections and reads their messages. Returns one whose proof is valid: only ADMITTED is still to be sent.
    ///
    /// # Errors
    /// The kernel's, if a connection waits and cannot be accepted.
    pub(crate) fn introduced(&self, hub: &Hub, set: &AcceptSet) -> Result<Option<Admitted>, Errno> {
        match self.state().as_mut() {
            Some(open) => open.introduced(hub, set),
            None => Ok(None),
        }
    }

    /// The set's alarm has expired: closes guests whose time is over, and watches the listener again after a pause.
    pub(crate) fn expired(&self, set: &AcceptSet) {
        if let Some(open) = self.state().as_mut() {
            open.listener.end_pause(set);
            open.guests.retain(|guest| guest.expires() > Instant::now());
            open.set_alarm(set);
        }
    }
}

impl OpenDoor {
    fn introduced(&mut self, hub: &Hub, set: &AcceptSet) -> Result<Option<Admitted>, Errno> {
        let mut at = 0;
        while let Some(guest) = self.guests.get_mut(at) {
            match guest.go_on(hub, &self.key) {
                GuestState::Pending => at += 1,
                GuestState::Refused => drop(self.guests.remove(at)),
                GuestState::Proved => {
                    let Some(guest) = self.guests.remove(at) else {
                        return Ok(None);
                    };
                    set.unwatch(&guest.fd);
                    return Ok(self.admit(guest));
                }
            }
        }
        for _ in 0..ACCEPTS {
            match self.listener.accept(set) {
                Ok((fd, _)) => {
                    let admitted = self.receive(fd, hub, set);
                    if admitted.is_some() {
                        return Ok(admitted);
                    }
                }
                Err(libc::EAGAIN) => break,
                Err(errno) => return Err(errno),
            }
        }
        self.set_alarm(set);
        Ok(None)
    }

    /// Makes a guest of a new connection. It is read at once: the guests that are replaced first are those that have said nothing. A peer
    /// that answers quickly may have proved by then that it belongs to the job.
    fn receive(&mut self, fd: OwnFd, hub: &Hub, set: &AcceptSet) -> Option<Admitted> {
        let mut guest = DoorGuest {
            fd,
            since: Instant::now(),
            heard: Vec::new(),
            welcomed: None,
        };
        match guest.go_on(hub, &self.key) {
            GuestState::Pending => {}
            GuestState::Refused => return None,
            GuestState::Proved => return self.admit(guest),
        }
        // An unwatched connection would never be read again, so it is closed.
        set.watch(&guest.fd).ok()?;
        if self.guests.len() == GUESTS {
            let silent = self.guests.iter().position(|g| g.welcomed.is_none());
            self.guests.remove(silent.unwrap_or(0));
        }
        self.guests.push_back(guest);
        None
    }

    fn admit(&self, guest: DoorGuest) -> Option<Admitted> {
        let (_, agreed) = guest.welcomed?;
        Some(Admitted {
            fd: guest.fd,
            agreed,
            last: blob::admitted(&guest.heard, &self.key),
        })
    }

    /// Sets the alarm for the guest whose time is over first.
    fn set_alarm(&self, set: &AcceptSet) {
        if let Some(oldest) = self.guests.front() {
            set.wake_at(oldest.expires());
        }
    }
}

impl DoorGuest {
    fn expires(&self) -> Instant {
        self.since + PATIENCE
    }

    fn go_on(&mut self, hub: &Hub, key: &DoorKey) -> GuestState {
        loop {
            let wanted = match self.welcomed {
                None => INTRODUCTION,
                Some(_) => PROOF,
            };
            // Read no byte beyond the message.
            let mut buf = [0; INTRODUCTION];
            let room = buf.get_mut(..wanted - self.heard.len()).unwrap_or_default();
            match socket::recv(self.fd.raw(), &mut [IoSliceMut::new(room)]) {
                Ok(n @ 1..) => self.heard.extend_from_slice(&room[..n]),
                Err(libc::EAGAIN) if Instant::now() < self.expires() => return GuestState::Pending,
                _ => return GuestState::Refused,
            }
            if self.heard.len() < wanted {
                continue;
            }
            if let Some((welcome, _)) = &self.welcomed {
                return match blob::is_proof(&self.heard, welcome, key) {
                    true => GuestState::Proved,
                    false => GuestState::Refused,
                };
            }
            self.welcomed = self.welcome(hub, key);
            if self.welcomed.is_none() {
                return GuestState::Refused;
            }
            self.heard.clear();
        }
    }

    /// Answers INTRODUCTION with WELCOME.
    fn welcome(&self, hub: &Hub, key: &DoorKey) -> Option<(Vec<u8>, Agreed)> {
        let introduction = Introduction::decode(&self.heard, key)?;
        let random = blob::random().ok()?;
        let who = hub.agent.announcement(LIMIT)?;
        let welcome = Welcome { random, who }.encode(&self.heard, key);
        // The send buffer of a new connection has room for it.
        let sent = socket::send(self.fd.raw(), &[IoSlice::new(&welcome)]);
        if sent != Ok(welcome.len()) {
            return None;
        }
        let randoms = [&introduction.random, &random];
        let agreed = blob::agreed(key, randoms, introduction.who);
        Some((welcome, agreed))
    }
}

/// Addresses at which a listener on the wildcard address can be reached; loopback if the host has no other address.
fn own_addresses(hub: &Hub, v4_only: bool) -> Option<Vec<IpAddr>> {
    let mut ips = hub.agent.announcement(LIMIT)?.addrs;
    let of_use = |ip: &IpAddr| match ip {
        IpAddr::V4(_) => true,
        // A link-local address needs a scope, which has a meaning on this host only.
        IpAddr::V6(ip) => !v4_only && !ip.is_unicast_link_local(),
    };
    ips.retain(of_use);
    ips.truncate(MAX_ADDRS);
    if ips.is_empty() {
        ips.push(Ipv4Addr::LOCALHOST.into());
    }
    Some(ips)
}
