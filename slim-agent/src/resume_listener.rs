//! Listeners for resumes, and what they accept.

use std::io;
use std::net::SocketAddr;
use std::rc::Rc;

use socket2::SockRef;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task::{self, JoinHandle};

use crate::agent::canonical;
use crate::fds::{self, OwnFd};
use crate::resume_io::{Link, mapped, mapping_stream, set_nodelay, stream, watch};
use crate::shared::Shared;
use crate::sys;

/// As many as the kernel allows: all connections of a process may break at once.
const BACKLOG: i32 = 4096;
/// Connections accepted in a row before everybody else gets a turn.
const BATCH: usize = 16;

/// Listens for resumes at one address; with `mapped`, at an IPv4 address by an IPv6 socket.
pub(crate) fn listen(addr: SocketAddr, mapped: bool) -> io::Result<OwnFd> {
    let fd = if mapped {
        bind_mapped(addr)
    } else {
        bind(addr)
    }?;
    let socket = SockRef::from(&fd);
    socket.listen(BACKLOG)?;
    if mapped {
        // It is not for the connections that come.
        socket.set_reuse_address(false)?;
    }
    Ok(fd)
}

/// What is to become a listener.
pub(crate) fn bind(addr: SocketAddr) -> io::Result<OwnFd> {
    let fd = stream(addr)?;
    // What it accepts has it from the listener.
    set_nodelay(&fd)?;
    let socket = SockRef::from(&fd);
    if addr.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&addr.into())?;
    Ok(fd)
}

fn bind_mapped(addr: SocketAddr) -> io::Result<OwnFd> {
    let fd = mapping_stream()?;
    set_nodelay(&fd)?;
    let socket = SockRef::from(&fd);
    // Beside the listener whose place it takes.
    socket.set_reuse_address(true)?;
    socket.bind(&mapped(addr).into())?;
    Ok(fd)
}

/// A listener at the same place whose connections are IPv6 sockets; `None` if there can be none, and the old one goes on.
pub(crate) fn listen_mapped_instead(old: &OwnFd, addr: SocketAddr) -> Option<OwnFd> {
    let socket = SockRef::from(old);
    // It stays bound, and can listen again.
    sys::shut(old.raw());
    let made = socket
        .set_reuse_address(true)
        .and_then(|()| listen(addr, true));
    if made.is_err() {
        let _ = socket.set_reuse_address(false);
        let _ = socket.listen(BACKLOG);
    }
    made.ok()
}

/// Accepts on a listener from now on, until the task is aborted.
pub(crate) fn serve(listener: Rc<OwnFd>, shared: &Rc<Shared>) -> io::Result<JoinHandle<()>> {
    let listener = fds::watch(listener, Interest::READABLE)?;
    Ok(task::spawn_local(accept_all(listener, shared.clone())))
}

/// Why a listener stops accepting for now.
enum Pause {
    Empty,
    OthersTurn,
    /// No descriptor. The listener's queue keeps who waits.
    Shortage,
    /// For good.
    Broken(io::Error),
}

async fn accept_all(listener: AsyncFd<Rc<OwnFd>>, shared: Rc<Shared>) {
    loop {
        match accept_some(&listener, &shared) {
            Pause::Empty => {
                if listener.readable().await.is_err() {
                    return;
                }
            }
            Pause::OthersTurn => task::yield_now().await,
            Pause::Shortage => shared.starve(listener.readable()).await,
            Pause::Broken(e) => {
                return shared.with(|d, _| d.log.error(|| format!("nobody can resume here: {e}")));
            }
        }
    }
}

fn accept_some(listener: &AsyncFd<Rc<OwnFd>>, shared: &Rc<Shared>) -> Pause {
    for _ in 0..BATCH {
        let pause = match sys::accept(listener.get_ref().raw()) {
            Ok((fd, from)) => {
                incoming(fd, from, shared);
                continue;
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Pause::Empty,
            Err(e) if e.raw_os_error() == Some(libc::EMFILE) => {
                match sys::accept_in_need(listener.get_ref().raw()) {
                    Ok((fd, from)) => {
                        incoming(fd, from, shared);
                        continue;
                    }
                    Err(_) => Pause::Shortage,
                }
            }
            Err(e) if is_shortage(&e) => Pause::Shortage,
            Err(e) if is_of_one_connection(&e) => continue,
            Err(e) => Pause::Broken(e),
        };
        fds::forget_ready(listener, Interest::READABLE);
        return pause;
    }
    Pause::OthersTurn
}

fn is_shortage(e: &io::Error) -> bool {
    matches!(
        e.raw_os_error(),
        Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM)
    )
}

/// A connection that broke while it waited: accept(2), section "Error handling".
fn is_of_one_connection(e: &io::Error) -> bool {
    !matches!(
        e.raw_os_error(),
        // Somebody has closed the listener, or made it something else.
        Some(libc::EBADF | libc::EINVAL | libc::ENOTSOCK | libc::EOPNOTSUPP) | None
    )
}

fn incoming(fd: OwnFd, from: SocketAddr, shared: &Rc<Shared>) {
    let Ok(fd) = watch(fd) else { return };
    let unmaps = canonical(from) != from;
    let from = canonical(from);
    let accepted = shared.with_self(|d, now, shared| {
        let (conn, orders) = d.accept(now, from)?;
        let mut task = Link::new(conn, fd, orders, shared.clone());
        task.unmaps = unmaps;
        Some(task::spawn_local(task.converse()))
    });
    if accepted.is_none() {
        shared.with(|d, _| {
            d.log
                .debug(|| format!("too many connections: refused {from}"))
        });
    }
}
