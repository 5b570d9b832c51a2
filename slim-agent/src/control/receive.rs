//! Receives datagrams on the control sockets.

use std::io;
use std::rc::Rc;

use slim_core::canonical;
use tokio::io::{Interest, Ready};
use tokio::task;

use crate::control::socket::{BUFFER, ControlSocket, MOST_WAITING};
use crate::shared::Shared;

/// Datagrams taken in a row before other tasks get a turn.
const BATCH: usize = 32;
/// Most datagrams taken from a socket that is about to be closed.
const MOST_LEFT: usize = 4096;

/// Takes the next datagram, and handles it.
fn receive(socket: &ControlSocket, buf: &mut [u8], shared: &Rc<Shared>) -> io::Result<()> {
    let (from, to, data) = socket.take(buf)?;
    shared.with(|d, now| d.datagram(now, from, to, data));
    Ok(())
}

/// Takes the next refusal, and handles it; an error when there is none.
fn receive_refusal(socket: &ControlSocket, buf: &mut [u8], shared: &Rc<Shared>) -> io::Result<()> {
    if let Some((to, len)) = socket.take_refusal(buf)? {
        let quoted = buf.get(..len).unwrap_or_default();
        shared.with(|d, now| d.endpoint.handle_refused(now, canonical(to), quoted));
    }
    Ok(())
}

/// Handles the refusals that wait, then the datagrams, but not all of a flood.
pub(crate) fn receive_waiting(socket: &ControlSocket, shared: &Rc<Shared>) {
    let mut buf = BUFFER;
    for _ in 0..MOST_WAITING {
        if receive_refusal(socket, &mut buf, shared).is_err() {
            break;
        }
    }
    receive_up_to(socket, MOST_WAITING, &mut buf, shared);
}

/// Drains queued datagrams before the socket is closed, or retries would reach the port's next owner.
pub(crate) fn receive_rest(socket: &ControlSocket, shared: &Rc<Shared>) {
    receive_up_to(socket, MOST_LEFT, &mut { BUFFER }, shared);
}

fn receive_up_to(socket: &ControlSocket, most: usize, buf: &mut [u8], shared: &Rc<Shared>) {
    for _ in 0..most {
        match receive(socket, buf, shared) {
            // A refusal that is reported here, too, does not end the loop.
            Err(e) if e.kind() != io::ErrorKind::ConnectionRefused => break,
            _ => {}
        }
    }
}

/// Receives until the task is ended.
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
                // The program has closed the socket.
                Err(e) if matches!(e.raw_os_error(), Some(libc::EBADF | libc::ENOTSOCK)) => return,
                // A refusal that is reported here, too; the error queue has it.
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
