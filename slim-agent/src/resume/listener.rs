//! Resume listeners, and the connections that they accept.

use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::task::Poll;

use slim_core::transport::Locator;
use tokio::task::yield_now;

use crate::kernel::task;
use crate::resume::link::Link;
use crate::shared::Shared;
use crate::transport::{Connection, Listener};

/// Connections accepted in a row before other tasks get a turn.
const BATCH: usize = 16;

/// Why a listener stops accepting for now.
enum Pause {
    Empty,
    OthersTurn,
    /// No descriptor or memory. Waiting connections stay in the listener's queue.
    Shortage,
    /// The listener has failed.
    Broken(io::Error),
}

/// Accepts on a listener until the task is ended, and has its locator announced when that changes. `announced`: the place of that
/// locator.
pub(crate) async fn serve(
    listener: Box<dyn Listener>,
    announced: Option<usize>,
    shared: Rc<Shared>,
) {
    let acceptable = || poll_fn(|context| listener.poll_acceptable(context));
    let announce = |locator| {
        if let Some(nth) = announced {
            shared.with(|d, now| d.set_locator(now, nth, locator));
        }
    };
    loop {
        match accept_some(&*listener, &shared) {
            Pause::Empty => match acceptable_or_changed(&*listener).await {
                Ok(false) => {}
                Ok(true) => announce(listener.locator()),
                Err(_) => break,
            },
            Pause::OthersTurn => yield_now().await,
            Pause::Shortage => shared.starve(acceptable()).await,
            Pause::Broken(e) => {
                shared.with(|d, _| d.log.error(|| format!("cannot accept resumes: {e}")));
                break;
            }
        }
    }
    // Nobody can connect here any more.
    announce(None);
}

/// Waits until there is something to accept, or the locator has changed (true).
async fn acceptable_or_changed(listener: &dyn Listener) -> io::Result<bool> {
    poll_fn(|context| match listener.poll_changed(context) {
        Poll::Ready(()) => Poll::Ready(Ok(true)),
        Poll::Pending => listener.poll_acceptable(context).map_ok(|()| false),
    })
    .await
}

fn accept_some(listener: &dyn Listener, shared: &Rc<Shared>) -> Pause {
    for _ in 0..BATCH {
        match listener.accept() {
            Ok((connection, from)) => incoming(connection, from, shared),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Pause::Empty,
            Err(e) if is_shortage(&e) => return Pause::Shortage,
            Err(e) if is_of_one_connection(&e) => {}
            Err(e) => return Pause::Broken(e),
        }
    }
    Pause::OthersTurn
}

fn is_shortage(e: &io::Error) -> bool {
    matches!(
        e.raw_os_error(),
        Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM)
    )
}

/// Whether one connection broke while it waited, and the listener is intact: accept(2), section "Error handling".
fn is_of_one_connection(e: &io::Error) -> bool {
    !matches!(
        e.raw_os_error(),
        // The program has closed the listener, or has opened something else under its number.
        Some(libc::EBADF | libc::EINVAL | libc::ENOTSOCK | libc::EOPNOTSUPP) | None
    )
}

fn incoming(connection: Box<dyn Connection>, from: Locator, shared: &Rc<Shared>) {
    let Some((conn, orders)) = shared.with(|d, now| d.accept(now, from)) else {
        return shared.with(|d, _| {
            d.log
                .debug(|| format!("too many connections: refused {from}"));
        });
    };
    let link = Link::new(conn, connection, orders, shared.clone());
    task::spawn(link.converse());
}
