//! Endpoints: the addresses at which a session accepts flows.

use std::fmt;
use std::mem;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use rustix::event::epoll::EventFlags;
use slim_sys::Errno;

use crate::accept_set::{AcceptSet, WatchedListener};
use crate::door::EndpointDoor;
use crate::error::{AcceptError, NotOpened, SessionError};
use crate::event::FlowStats;
use crate::flow::{SessionFlow, Until};
use crate::hub::{Hub, Member, Update, next_id};
use crate::socket;

/// An address at which a session accepts flows. Dropping it closes the endpoint; accepted flows stay open.
pub struct SessionEndpoint {
    core: Arc<EndpointCore>,
}

struct EndpointCore {
    hub: Arc<Hub>,
    id: u64,
    addr: SocketAddr,
    /// Shared with threads that wait in `accept`. `None` once the endpoint is closed.
    open: Mutex<Option<Arc<EndpointParts>>>,
    acceptable: AtomicBool,
}

/// The descriptors of an open endpoint.
struct EndpointParts {
    listener: WatchedListener,
    door: EndpointDoor,
    set: AcceptSet,
}

impl SessionEndpoint {
    pub(crate) fn listen(hub: &Arc<Hub>, addr: SocketAddr) -> Result<Self, SessionError> {
        if hub.is_closed() {
            return Err(SessionError::Closed);
        }
        let kernel = |(what, errno)| SessionError::Kernel(what, errno);
        let listener = socket::listen(addr).map_err(kernel)?;
        let addr = socket::local(&listener).ok_or(kernel(("getsockname", libc::EINVAL)))?;
        let watch = |errno| kernel(("epoll", errno));
        let set = AcceptSet::new().map_err(watch)?;
        let listener = WatchedListener::new(listener, &set).map_err(watch)?;
        let parts = Arc::new(EndpointParts {
            listener,
            door: EndpointDoor::default(),
            set,
        });
        let core = Arc::new(EndpointCore {
            hub: hub.clone(),
            id: next_id(),
            addr,
            open: Mutex::new(Some(parts.clone())),
            acceptable: AtomicBool::new(false),
        });
        let weak: Weak<EndpointCore> = Arc::downgrade(&core);
        hub.add(core.id, weak).map_err(|_| SessionError::Closed)?;
        // From here on dropping it closes it.
        let endpoint = Self { core };
        let core = &endpoint.core;
        hub.watch_set(parts.set.fd(), core.id).map_err(watch)?;
        // Held while the agent is told: a close tells it the contrary afterwards.
        let open = core.open();
        if open.is_none() {
            return Err(SessionError::Closed);
        }
        hub.agent.listen(parts.listener.fd().as_fd(), addr);
        drop(open);
        Ok(endpoint)
    }

    /// The endpoint's blob, a few hundred bytes. The program sends it to the other processes of the job by its own means. They pass
    /// it to [`Session::connect_blob`](crate::Session::connect_blob), which opens flows that are protected from the beginning,
    /// without negotiation. The blob holds a secret: any process that has the blob, and the job key if there is one, can open a flow.
    ///
    /// The first call opens one more listening port, the endpoint's *door*.
    ///
    /// # Errors
    /// [`SessionError::Kernel`]: a system call failed. [`SessionError::TimedOut`]: the agent did not tell the host's addresses in
    /// time. [`SessionError::Closed`].
    pub fn blob(&self) -> Result<Vec<u8>, SessionError> {
        let open = self.core.open().clone().ok_or(SessionError::Closed)?;
        open.door.blob(&self.core.hub, self.core.addr, &open.set)
    }

    /// The endpoint's number. Numbers of flows and endpoints are unique in the process and are never reused.
    pub fn id(&self) -> u64 {
        self.core.id
    }

    /// The address on which the endpoint listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.core.addr
    }

    /// Accepts a flow if one is waiting. For a connection at the door it asks the agent thread, which takes a few microseconds.
    ///
    /// # Errors
    /// [`AcceptError::WouldBlock`] if no flow is waiting; [`Update::acceptable`] tells when one may be. [`AcceptError::Closed`].
    /// [`AcceptError::Kernel`]: a connection is waiting and cannot be accepted, for lack of descriptors (`EMFILE`) for example. It goes on
    /// waiting, and `acceptable` is reported again a tenth of a second later.
    pub fn try_accept(&self) -> Result<SessionFlow, AcceptError> {
        let open = self.core.open().clone().ok_or(AcceptError::Closed)?;
        open.look_at_alarm();
        loop {
            match open.listener.accept(&open.set) {
                Ok((fd, Some(peer))) => {
                    return Ok(SessionFlow::accepted(&self.core.hub, fd, peer)?);
                }
                // No TCP connection.
                Ok((_, None)) => {}
                Err(libc::EAGAIN) => break,
                Err(errno) => return Err(self.refused(errno)),
            }
        }
        loop {
            let introduced = open.door.introduced(&self.core.hub, &open.set);
            let Some(admitted) = introduced.map_err(|errno| self.refused(errno))? else {
                return Err(AcceptError::WouldBlock);
            };
            match SessionFlow::introduced(&self.core.hub, admitted) {
                Err(NotOpened::Kernel(libc::ECONNABORTED)) => {}
                flow => return Ok(flow?),
            }
        }
    }

    /// The error of an endpoint whose listener refuses a call. Another thread may have closed it meanwhile.
    fn refused(&self, errno: Errno) -> AcceptError {
        match self.core.open().is_some() {
            true => AcceptError::Kernel(errno),
            false => AcceptError::Closed,
        }
    }

    /// Accepts a flow; waits at most `limit`.
    ///
    /// # Errors
    /// [`AcceptError::TimedOut`], [`AcceptError::Closed`], and errors of the kernel.
    pub fn accept(&self, limit: Option<Duration>) -> Result<SessionFlow, AcceptError> {
        let until = Until::new(limit);
        loop {
            match self.try_accept() {
                Err(AcceptError::WouldBlock) => {}
                accepted => return accepted,
            }
            let open = self.core.open().clone().ok_or(AcceptError::Closed)?;
            let slice = until.slice().ok_or(AcceptError::TimedOut)?;
            let set = open.set.fd().raw();
            self.core.hub.agent.wait_for(set, libc::POLLIN, slice);
        }
    }
}

impl EndpointParts {
    /// Does what has become due at a certain time: the end of a pause, and the end of guests' patience.
    fn look_at_alarm(&self) {
        if self.set.take_expired() {
            self.listener.end_pause(&self.set);
            self.door.expired(&self.set);
        }
    }
}

impl EndpointCore {
    fn open(&self) -> MutexGuard<'_, Option<Arc<EndpointParts>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Member for EndpointCore {
    fn ready(self: Arc<Self>, _: EventFlags) {
        let open = self.open().clone();
        if let Some(open) = open {
            open.look_at_alarm();
        }
        if !self.acceptable.swap(true, Ordering::AcqRel) {
            self.hub.change(self.id, false);
        }
    }

    fn take_update(&self) -> Update {
        Update {
            id: self.id,
            acceptable: self.acceptable.swap(false, Ordering::AcqRel),
            ..Update::default()
        }
    }

    fn close(&self, _reset: bool) {
        let Some(open) = self.open().take() else {
            return;
        };
        self.hub.unwatch(open.set.fd());
        // Wakes threads that wait in `accept`.
        slim_sys::shutdown(open.listener.fd().raw(), libc::SHUT_RDWR);
        drop(open);
        self.hub.agent.unlisten(self.addr);
        self.hub.remove(self.id, None);
    }

    fn id(&self) -> u64 {
        self.id
    }

    fn stats(&self) -> Option<FlowStats> {
        None
    }
}

impl Drop for SessionEndpoint {
    fn drop(&mut self) {
        if self.core.hub.is_parents() {
            return mem::forget(self.core.clone());
        }
        self.core.close(false);
    }
}

impl fmt::Debug for SessionEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("id", &self.core.id)
            .field("addr", &self.core.addr)
            .finish_non_exhaustive()
    }
}
