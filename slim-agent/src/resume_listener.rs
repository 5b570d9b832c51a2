//! Listeners for resumes, and what they accept.

use slim_core::canonical;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task;

use crate::link::Link;
use crate::readiness;
use crate::resume_socket::watch;
use crate::shared::Shared;
use crate::sys;
use slim_sys::OwnFd;

/// Connections accepted in a row before everybody else gets a turn.
const BATCH: usize = 16;

/// Why a listener stops accepting for now.
enum Pause {
    Empty,
    OthersTurn,
    /// No descriptor. The listener's queue keeps who waits.
    Shortage,
    /// For good.
    Broken(io::Error),
}

/// Accepts on a listener until it is ended.
pub(crate) async fn serve(listener: AsyncFd<Rc<OwnFd>>, shared: Rc<Shared>) {
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
        readiness::forget_ready(listener, Interest::READABLE);
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
    let Some((conn, orders)) = shared.with(|d, now| d.accept(now, from)) else {
        return shared.with(|d, _| {
            d.log
                .debug(|| format!("too many connections: refused {from}"));
        });
    };
    let mut link = Link::new(conn, fd, orders, shared.clone());
    link.unmaps = unmaps;
    task::spawn_local(link.converse());
}
