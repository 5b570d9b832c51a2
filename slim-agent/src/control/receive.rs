//! Taking what comes to the control sockets.

use std::io;
use std::rc::Rc;

use slim_core::canonical;
use tokio::io::{Interest, Ready};
use tokio::task;

use crate::control::socket::{BUFFER, ControlSocket, MOST_WAITING};
use crate::shared::Shared;

/// Datagrams taken in a row before everybody else gets a turn.
const BATCH: usize = 32;
/// Datagrams taken from a socket that is about to be closed.
const MOST_LEFT: usize = 4096;

/// Takes the next datagram, and does what follows from it.
fn receive(socket: &ControlSocket, buf: &mut [u8], shared: &Rc<Shared>) -> io::Result<()> {
    let (from, to, data) = socket.take(buf)?;
    shared.with(|d, now| d.datagram(now, from, to, data));
    Ok(())
}

/// Takes the next refusal; an error when there is none.
fn receive_refusal(socket: &ControlSocket, buf: &mut [u8], shared: &Rc<Shared>) -> io::Result<()> {
    if let Some((to, len)) = socket.take_refusal(buf)? {
        let quoted = buf.get(..len).unwrap_or_default();
        shared.with(|d, now| d.endpoint.handle_refused(now, canonical(to), quoted));
    }
    Ok(())
}

/// Takes what waits, refusals first, but not all of a flood.
pub(crate) fn receive_waiting(socket: &ControlSocket, shared: &Rc<Shared>) {
    let mut buf = BUFFER;
    for _ in 0..MOST_WAITING {
        if receive_refusal(socket, &mut buf, shared).is_err() {
            break;
        }
    }
    receive_up_to(socket, MOST_WAITING, &mut buf, shared);
}

/// Takes what has come before the socket is closed: who is not answered asks again, and that would come to whoever
/// has the port then.
pub(crate) fn receive_rest(socket: &ControlSocket, shared: &Rc<Shared>) {
    receive_up_to(socket, MOST_LEFT, &mut { BUFFER }, shared);
}

fn receive_up_to(socket: &ControlSocket, most: usize, buf: &mut [u8], shared: &Rc<Shared>) {
    for _ in 0..most {
        match receive(socket, buf, shared) {
            // A refusal reported once more is no end.
            Err(e) if e.kind() != io::ErrorKind::ConnectionRefused => break,
            _ => {}
        }
    }
}

/// Receives until it is ended.
pub(crate) async fn serve(socket: Rc<ControlSocket>, shared: Rc<Shared>) {
    let mut buf = BUFFER;
    loop {
        let Ok(mut guard) = socket.fd.ready(Interest::READABLE | Interest::ERROR).await else {
            return;
        };
        let mut more = false;
        if guard.ready().is_error() {
            more = true;
            for _ in 0..BATCH {
                if receive_refusal(&socket, &mut buf, &shared).is_err() {
                    guard.clear_ready_matching(Ready::ERROR);
                    more = false;
                    break;
                }
            }
        }
        for n in 0..BATCH {
            match receive(&socket, &mut buf, &shared) {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    guard.clear_ready_matching(Ready::READABLE);
                    break;
                }
                // Somebody has closed it.
                Err(e) if matches!(e.raw_os_error(), Some(libc::EBADF | libc::ENOTSOCK)) => return,
                // A refusal reported once more; the error queue has it.
                Err(_) => {}
            }
            more |= n + 1 == BATCH;
        }
        drop(guard);
        if more {
            task::yield_now().await;
        }
    }
}
