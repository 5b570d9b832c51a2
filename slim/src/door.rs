//! The door of an endpoint: a listener for peers that have its blob.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use slim_core::endpoint::Agreed;
use slim_core::wire::MAX_ADDRS;
use slim_sys::OwnFd;

use crate::blob::{self, ADMITTED, Blob, DoorKey, INTRODUCTION, Introduction, PROOF, Welcome};
use crate::error::SessionError;
use crate::hub::Hub;
use crate::socket;

/// Limit of connections at the door that are not admitted yet. Beyond it a new connection replaces the oldest.
const GUESTS: usize = 128;
/// Time limit of such a connection.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time limit for the agent to describe this process (its announcement).
const LIMIT: Duration = Duration::from_secs(5);

/// The door of an endpoint. `None` until the endpoint publishes its blob.
#[derive(Default)]
pub(crate) struct EndpointDoor(Mutex<Option<OpenDoor>>);

struct OpenDoor {
    listener: OwnFd,
    blob: Vec<u8>,
    key: DoorKey,
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
enum GuestFate {
    Stays,
    Goes,
    IsIn,
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
        set: &OwnFd,
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
        let watched = socket::watch(set, &listener);
        watched.map_err(|errno| kernel(("epoll_ctl", errno)))?;
        *state = Some(OpenDoor {
            listener,
            blob: blob.clone(),
            key: hub.job().door_key(&secret),
            guests: VecDeque::new(),
        });
        Ok(blob)
    }

    /// Accepts connections and reads their messages. Returns one whose proof is valid: only ADMITTED is still to be sent.
    pub(crate) fn introduced(&self, hub: &Hub, set: &OwnFd) -> Option<Admitted> {
        self.state().as_mut()?.introduced(hub, set)
    }
}

impl OpenDoor {
    fn introduced(&mut self, hub: &Hub, set: &OwnFd) -> Option<Admitted> {
        while let Ok(fd) = socket::accept(&self.listener) {
            // An unwatched connection would never be read again, so it is closed.
            if socket::watch(set, &fd).is_err() {
                continue;
            }
            if self.guests.len() == GUESTS {
                self.guests.pop_front();
            }
            self.guests.push_back(DoorGuest {
                fd,
                since: Instant::now(),
                heard: Vec::new(),
                welcomed: None,
            });
        }
        let mut at = 0;
        while let Some(guest) = self.guests.get_mut(at) {
            match guest.go_on(hub, &self.key) {
                GuestFate::Stays => at += 1,
                GuestFate::Goes => drop(self.guests.remove(at)),
                GuestFate::IsIn => {
                    let guest = self.guests.remove(at)?;
                    socket::unwatch(set, &guest.fd);
                    let (_, agreed) = guest.welcomed?;
                    return Some(Admitted {
                        fd: guest.fd,
                        agreed,
                        last: blob::admitted(&guest.heard, &self.key),
                    });
                }
            }
        }
        None
    }
}

impl DoorGuest {
    fn go_on(&mut self, hub: &Hub, key: &DoorKey) -> GuestFate {
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
                Err(libc::EAGAIN) if self.since.elapsed() < PATIENCE => return GuestFate::Stays,
                _ => return GuestFate::Goes,
            }
            if self.heard.len() < wanted {
                continue;
            }
            if let Some((welcome, _)) = &self.welcomed {
                return match blob::is_proof(&self.heard, welcome, key) {
                    true => GuestFate::IsIn,
                    false => GuestFate::Goes,
                };
            }
            self.welcomed = self.welcome(hub, key);
            if self.welcomed.is_none() {
                return GuestFate::Goes;
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
