//! What an endpoint waits for: its listeners, the guests of its door, and an alarm, in one poll set.

use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use slim_sys::{Errno, OwnFd};

use crate::socket;

/// How long a listener is not watched when there is no descriptor, or no memory, for its next connection.
const PAUSE: Duration = Duration::from_millis(100);

/// Poll set of one endpoint: readable when a flow may be acceptable, or when the alarm has expired.
pub(crate) struct AcceptSet {
    set: OwnFd,
    alarm: OwnFd,
    /// When the alarm expires, if it is set.
    armed: Mutex<Option<Instant>>,
}

/// A listener in the set. While connections cannot be accepted for lack of descriptors or memory, the set does not watch it: it would be
/// readable all the time.
pub(crate) struct WatchedListener {
    fd: OwnFd,
    /// When the set watches the listener again, if it does not now.
    paused: Mutex<Option<Instant>>,
}

impl AcceptSet {
    pub(crate) fn new() -> Result<Self, Errno> {
        let set = socket::poll_set()?;
        let alarm = slim_sys::timerfd().map_err(|e| e.raw_os_error().unwrap_or(libc::EMFILE))?;
        socket::watch(&set, &alarm)?;
        Ok(Self {
            set,
            alarm,
            armed: Mutex::new(None),
        })
    }

    /// The poll set's descriptor.
    pub(crate) fn fd(&self) -> &OwnFd {
        &self.set
    }

    /// Watches a connection for input.
    pub(crate) fn watch(&self, fd: &OwnFd) -> Result<(), Errno> {
        socket::watch(&self.set, fd)
    }

    /// Stops watching a connection.
    pub(crate) fn unwatch(&self, fd: &OwnFd) {
        socket::unwatch(&self.set, fd);
    }

    fn armed(&self) -> MutexGuard<'_, Option<Instant>> {
        self.armed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the alarm to `at`, unless it expires before.
    pub(crate) fn wake_at(&self, at: Instant) {
        let mut armed = self.armed();
        if armed.is_none_or(|earlier| at < earlier) {
            *armed = Some(at);
            let delay = at.saturating_duration_since(Instant::now());
            slim_sys::set_timerfd(self.alarm.raw(), Some(delay));
        }
    }

    /// Whether the alarm has expired. Clears it if so; the caller sets it again if it waits for a later time.
    pub(crate) fn take_expired(&self) -> bool {
        let mut armed = self.armed();
        let expired = armed.is_some_and(|at| at <= Instant::now());
        if expired {
            *armed = None;
            slim_sys::reset_eventfd(self.alarm.raw());
        }
        expired
    }
}

impl WatchedListener {
    /// Puts a listener into the set.
    pub(crate) fn new(fd: OwnFd, set: &AcceptSet) -> Result<Self, Errno> {
        set.watch(&fd)?;
        Ok(Self {
            fd,
            paused: Mutex::new(None),
        })
    }

    /// The listener's descriptor.
    pub(crate) fn fd(&self) -> &OwnFd {
        &self.fd
    }

    fn paused(&self) -> MutexGuard<'_, Option<Instant>> {
        self.paused.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Accepts a connection; also returns the peer's address. If there is no descriptor or no memory for it, the connection stays in the kernel's queue, and the set
    /// watches the listener again after a pause.
    ///
    /// # Errors
    /// The kernel's; `EAGAIN` if no connection waits.
    pub(crate) fn accept(&self, set: &AcceptSet) -> Result<(OwnFd, Option<SocketAddr>), Errno> {
        loop {
            match socket::accept(&self.fd) {
                Ok(accepted) => {
                    if self.paused().take().is_some() {
                        self.watch_again(set);
                    }
                    return Ok(accepted);
                }
                // The connection ended before it was accepted: try the next one.
                Err(libc::ECONNABORTED | libc::EINTR) => {}
                Err(errno @ (libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM)) => {
                    // The kernel reserves a descriptor before it looks for a connection.
                    if slim_sys::ready(self.fd.raw(), libc::POLLIN) == 0 {
                        return Err(libc::EAGAIN);
                    }
                    let at = Instant::now() + PAUSE;
                    *self.paused() = Some(at);
                    socket::rewatch(&set.set, &self.fd, EventFlags::empty());
                    set.wake_at(at);
                    return Err(errno);
                }
                Err(errno) => return Err(errno),
            }
        }
    }

    /// Watches the listener again if its pause is over.
    pub(crate) fn end_pause(&self, set: &AcceptSet) {
        let mut paused = self.paused();
        match *paused {
            Some(at) if at <= Instant::now() => {
                *paused = None;
                self.watch_again(set);
            }
            Some(at) => set.wake_at(at),
            None => {}
        }
    }

    fn watch_again(&self, set: &AcceptSet) {
        socket::rewatch(&set.set, &self.fd, EventFlags::IN);
    }
}
