//! What application threads do for short connections without the agent thread: the thread that connects sends OPEN, the
//! thread that closes sends FIN, and a thread at the end of a stream reads the mailboxes. See `docs/PROTOCOL.md`,
//! section "Pairs".
//!
//! The sockets belong to the agent, which does not poll the mailboxes: a datagram in a mailbox wakes no thread. The
//! program may have closed a socket's number and opened something else under it, so the socket's mark is checked before
//! each use.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use slim_core::endpoint::{Opened, Pairs};
use slim_core::{Time, canonical, wire};
use socket2::{Domain, SockRef, Socket, Type};

use crate::control::udp::{self, RECEIVE_BUFFER};
use crate::host::ports::on_quiet_port;
use crate::kernel::sys;
use slim_sys::OwnFd;
use slim_sys::fds::Mark;

/// Most datagrams taken from a mailbox in a row.
const MOST: usize = 256;

/// A socket, with its mark.
struct Known {
    fd: Arc<OwnFd>,
    mark: Mark,
    bound: SocketAddr,
}

impl Known {
    fn new(fd: Arc<OwnFd>, mark: Mark, bound: SocketAddr) -> Self {
        mark.set(fd.raw());
        Known { fd, mark, bound }
    }

    fn is_ours(&self) -> bool {
        self.mark.is_on(self.fd.raw())
    }
}

/// State that the agent thread and application threads share.
pub(crate) struct Short {
    origin: Instant,
    pairs: OnceLock<Arc<Pairs>>,
    outlets: Mutex<Vec<Known>>,
    mailboxes: Mutex<Vec<Known>>,
    in_use: AtomicBool,
}

impl Default for Short {
    fn default() -> Self {
        Self::new()
    }
}

impl Short {
    fn new() -> Self {
        Short {
            origin: Instant::now(),
            pairs: OnceLock::new(),
            outlets: Mutex::default(),
            mailboxes: Mutex::default(),
            in_use: AtomicBool::new(false),
        }
    }

    /// Called once, by the agent thread: sets the pairs that OPENs are made from.
    pub(crate) fn begin(&self, pairs: Arc<Pairs>) {
        // It is set only here.
        let _ = self.pairs.set(pairs);
    }

    /// Sets the sockets from which OPENs are sent from now on.
    pub(crate) fn set_outlets(&self, own: Vec<(Arc<OwnFd>, SocketAddr)>) {
        let outlets = own
            .into_iter()
            .map(|(fd, bound)| Known::new(fd, Mark::OUTLET, bound));
        *locked(&self.outlets) = outlets.collect();
    }

    /// The current time, for the endpoint.
    pub(crate) fn now(&self) -> Time {
        let micros = self.origin.elapsed().as_micros();
        Time(u64::try_from(micros).unwrap_or(u64::MAX))
    }

    /// Opens a mailbox at an own address, and returns its port. The port is not one that a listener may get by chance:
    /// that listener would have no control socket then.
    pub(crate) fn open_mailbox(&self, ip: IpAddr) -> io::Result<u16> {
        let kind = Type::DGRAM.nonblocking().cloexec();
        let domain = Domain::for_address(SocketAddr::new(ip, 0));
        let fd = OwnFd::make(|| Socket::new_raw(domain, kind, None))?;
        let (level, forced) = (libc::SOL_SOCKET, libc::SO_RCVBUFFORCE);
        if sys::set_option(fd.raw(), level, forced, RECEIVE_BUFFER).is_err() {
            sys::set_option(fd.raw(), level, libc::SO_RCVBUF, RECEIVE_BUFFER)?;
        }
        on_quiet_port(ip, |addr| SockRef::from(&fd).bind(&addr.into()))?;
        let bound = sys::local_addr(fd.raw())?;
        locked(&self.mailboxes).push(Known::new(Arc::new(fd), Mark::MAILBOX, bound));
        self.in_use.store(true, Ordering::Release);
        Ok(bound.port())
    }

    /// Whether there is a mailbox, so that peers may send OPEN.
    pub(crate) fn in_use(&self) -> bool {
        self.in_use.load(Ordering::Acquire)
    }

    /// Sends OPEN for a new connection, if the process at `remote` is known, and it can be sent.
    pub(crate) fn dial(&self, local: SocketAddr, remote: SocketAddr) -> Option<Arc<Opened>> {
        let mut opened = self.pairs.get()?.dial(self.now(), local, remote)?;
        let data = std::mem::take(&mut opened.data);
        self.send(&opened, local, &data).then(|| Arc::new(opened))
    }

    /// Sends a message about a flow for which OPEN was sent; false if it cannot be.
    pub(crate) fn send(&self, opened: &Opened, local: SocketAddr, data: &[u8]) -> bool {
        let to = opened.mailbox;
        let outlets = locked(&self.outlets);
        // Sent from the connection's own address or not at all: the peer believes OPEN by its source address.
        let own = outlets.iter().find(|known| known.bound.ip() == local.ip());
        let Some(outlet) = own.filter(|known| known.is_ours()) else {
            return false;
        };
        // No source is given: the outlet is bound to it.
        let send = || udp::send_datagram(outlet.fd.raw(), data, to, None);
        match send() {
            // The refusal of an earlier datagram, which the agent finds in the error queue.
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => send().is_ok(),
            sent => sent.is_ok(),
        }
    }

    /// Takes the datagrams in the mailboxes until `enough` returns true.
    pub(crate) fn drain(&self, mut enough: impl FnMut(&Pairs) -> bool) {
        let Some(pairs) = self.pairs.get() else {
            return;
        };
        let mut buf = [0; wire::MAX_LEN + 1];
        for mailbox in locked(&self.mailboxes)
            .iter()
            .filter(|known| known.is_ours())
        {
            for _ in 0..MOST {
                let Ok((len, from)) = udp::recv_from(mailbox.fd.raw(), &mut buf) else {
                    break;
                };
                let data = buf.get(..len).unwrap_or_default();
                pairs.receive(self.now(), canonical(from), mailbox.bound, data);
                if enough(pairs) {
                    return;
                }
            }
        }
    }

    pub(crate) fn pairs(&self) -> Option<&Arc<Pairs>> {
        self.pairs.get()
    }
}

/// Application threads call this with signals blocked.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
