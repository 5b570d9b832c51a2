//! Own addresses, and word of their changes.

use std::net::IpAddr;
use std::rc::Rc;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task;

use crate::events::Log;
use crate::fds::{self, OwnFd};
use crate::shared::Shared;
use crate::sys;

/// The addresses others can reach this host under now; none if the kernel does not tell.
pub(crate) fn addresses(log: Log) -> Vec<IpAddr> {
    sys::own_addresses().unwrap_or_else(|e| {
        log.warn(|| format!("own addresses unknown: {e}"));
        Vec::new()
    })
}

/// Tells the endpoint of changes from now on. Without the netlink socket (a sandbox, say) the
/// addresses of the start stay.
pub(crate) fn watch(shared: &Rc<Shared>) {
    let opened = sys::rtnetlink_watch().and_then(|fd| fds::watch(fd, Interest::READABLE));
    match opened {
        Ok(fd) => {
            task::spawn_local(follow(fd, shared.clone()));
        }
        Err(e) => shared.with(|d, _| {
            d.log
                .info(|| format!("changes of addresses are not noticed: {e}"));
        }),
    }
}

async fn follow(fd: AsyncFd<OwnFd>, shared: Rc<Shared>) {
    let mut buf = vec![0; 8192];
    while let Ok(mut guard) = fd.readable().await {
        // What changed is not read: the whole list is asked for anew, once per burst. An overrun of
        // the socket (ENOBUFS) is then no loss either.
        loop {
            match sys::recv(fd.get_ref().raw(), &mut buf) {
                Ok(n) if n > 0 => {}
                Err(e) if e.raw_os_error() == Some(libc::ENOBUFS) => {}
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => break,
                _ => return,
            }
        }
        guard.clear_ready();
        drop(guard);
        shared.with(|d, _| {
            let now = addresses(d.log);
            d.set_addresses(now);
        });
        task::yield_now().await;
    }
}
