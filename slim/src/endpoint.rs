//! Endpoints: where a session accepts flows.

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use rustix::event::epoll::EventFlags;
use slim_sys::OwnFd;

use crate::error::{AcceptError, SessionError};
use crate::event::FlowStats;
use crate::flow::{SessionFlow, Until};
use crate::hub::{Hub, Member, Update, next_id};
use crate::socket;

/// An address at which a session accepts flows. Closed when it is dropped; flows that were accepted stay.
pub struct SessionEndpoint {
    core: Arc<EndpointCore>,
}

struct EndpointCore {
    hub: Arc<Hub>,
    id: u64,
    addr: SocketAddr,
    /// Shared with threads that wait for it. `None` once it is closed.
    listener: Mutex<Option<Arc<OwnFd>>>,
    acceptable: AtomicBool,
}

impl SessionEndpoint {
    pub(crate) fn listen(hub: &Arc<Hub>, addr: SocketAddr) -> Result<Self, SessionError> {
        if hub.is_closed() {
            return Err(SessionError::Closed);
        }
        let kernel = |(what, errno)| SessionError::Kernel(what, errno);
        let fd = socket::listen(addr).map_err(kernel)?;
        let addr = socket::local(&fd).ok_or(kernel(("getsockname", libc::EINVAL)))?;
        let core = Arc::new(EndpointCore {
            hub: hub.clone(),
            id: next_id(),
            addr,
            listener: Mutex::new(None),
            acceptable: AtomicBool::new(false),
        });
        let weak: Weak<EndpointCore> = Arc::downgrade(&core);
        hub.add(core.id, weak, false);
        let watched = hub.watch_listener(&fd, core.id);
        watched.map_err(|errno| kernel(("epoll_ctl", errno)))?;
        hub.agent.listen(fd.as_fd(), addr);
        *core.listener() = Some(Arc::new(fd));
        Ok(Self { core })
    }

    /// The endpoint's number: no other flow or endpoint of the process has, or has had it.
    pub fn id(&self) -> u64 {
        self.core.id
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.core.addr
    }

    /// Takes a flow that waits.
    ///
    /// # Errors
    /// [`AcceptError::WouldBlock`] if none does; [`Update::acceptable`] tells when one may.
    pub fn try_accept(&self) -> Result<SessionFlow, AcceptError> {
        let listener = self.core.listener().clone().ok_or(AcceptError::Closed)?;
        loop {
            match socket::accept(&listener) {
                Ok(fd) => match SessionFlow::accepted(&self.core.hub, fd) {
                    // It was over before it was accepted.
                    Err(libc::ECONNABORTED) => {}
                    flow => return flow.map_err(AcceptError::Kernel),
                },
                Err(libc::ECONNABORTED | libc::EINTR) => {}
                Err(libc::EAGAIN) => return Err(AcceptError::WouldBlock),
                Err(errno) => return Err(AcceptError::Kernel(errno)),
            }
        }
    }

    /// Waits for a flow, at most `limit`.
    ///
    /// # Errors
    /// [`AcceptError::TimedOut`], and those of the kernel.
    pub fn accept(&self, limit: Option<Duration>) -> Result<SessionFlow, AcceptError> {
        let until = Until::new(limit);
        loop {
            match self.try_accept() {
                Err(AcceptError::WouldBlock) => {}
                accepted => return accepted,
            }
            let listener = self.core.listener().clone().ok_or(AcceptError::Closed)?;
            let slice = until.slice().ok_or(AcceptError::TimedOut)?;
            slim_sys::poll(listener.raw(), libc::POLLIN, Some(slice));
        }
    }
}

impl EndpointCore {
    fn listener(&self) -> MutexGuard<'_, Option<Arc<OwnFd>>> {
        self.listener.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Member for EndpointCore {
    fn ready(self: Arc<Self>, _: EventFlags) {
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

    fn close(&self) {
        let Some(fd) = self.listener().take() else {
            return;
        };
        self.hub.unwatch(&fd);
        // Who waits for it comes out.
        slim_sys::shutdown(fd.raw(), libc::SHUT_RDWR);
        drop(fd);
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
        self.core.close();
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
