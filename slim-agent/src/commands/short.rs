//! What threads of the application do for short connections by themselves: OPEN and FIN are sent in the thread that
//! connects and closes, and a thread at the end of a stream looks into the mailboxes. `docs/PROTOCOL.md`, section
//! "Pairs".
//!
//! The sockets are the agent's, which does not poll the mailboxes: what comes to them wakes nobody. A program may have
//! closed their numbers, and have something else under them; so their marks are looked at before they are used.

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

/// Datagrams taken from a mailbox in a row.
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

/// What the agent's thread and those of the application share.
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

    /// By the agent's thread, once: what OPENs are made with.
    pub(crate) fn begin(&self, pairs: Arc<Pairs>) {
        // Nobody else sets it.
        let _ = self.pairs.set(pairs);
    }

    /// What OPENs are sent by from now on.
    pub(crate) fn set_outlets(&self, own: Vec<(Arc<OwnFd>, SocketAddr)>) {
        let outlets = own
            .into_iter()
            .map(|(fd, bound)| Known::new(fd, Mark::OUTLET, bound));
        *locked(&self.outlets) = outlets.collect();
    }

    /// A point in time for the endpoint.
    pub(crate) fn now(&self) -> Time {
        let micros = self.origin.elapsed().as_micros();
        Time(u64::try_from(micros).unwrap_or(u64::MAX))
    }

    /// Makes a mailbox at an address of ours; its port. Not one that a listener may get by chance, which would have no
    /// control socket then.
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

    /// Whether somebody may say OPEN to us.
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
        // From the connection's own address, or not at all: it is what OPEN is believed by.
        let own = outlets.iter().find(|known| known.bound.ip() == local.ip());
        let Some(outlet) = own.filter(|known| known.is_ours()) else {
            return false;
        };
        // The source need not be named: it is what the outlet is bound to.
        let send = || udp::send_datagram(outlet.fd.raw(), data, to, None);
        match send() {
            // An earlier datagram's refusal, which the agent finds in the error queue.
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => send().is_ok(),
            sent => sent.is_ok(),
        }
    }

    /// Takes what has come to the mailboxes, until it is `enough`.
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

/// Whoever calls this in a thread of the application's has its signals blocked.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
