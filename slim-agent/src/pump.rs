//! The replay: a connection becomes a flow's transport.
//!
//! Both sides write what the other lacks, at the same time. Each must read meanwhile, or two full
//! pipes would wait for each other for ever; and each may read only what was announced as the
//! other's replay, because what comes after it is for the application to take at its own pace.
//!
//! ```text
//!            ┌──────────────────────── Stop, failure ──────────────┐
//!  Install ──┤                                                     ▼
//!            └─► write and read ──► all written ──► live        stopped ──► Drain: read dry, close
//! ```

use std::io;
use std::os::fd::AsFd;

use tokio::io::Interest;
use tokio::select;
use tokio::task;

use crate::FlowIo;
use crate::link::Link;
use crate::mailbox::Ended;
use crate::order::{Install, Order};
use crate::readiness;
use crate::shared::Shared;
use crate::sys;

const SCRATCH: usize = 64 * 1024;
/// Bytes written or read before everybody else gets a turn.
const TURN: usize = 1024 * 1024;
/// Most that is read from a connection being drained. More than any kernel buffers; a peer that
/// keeps sending is not heard out, and has to send the rest again.
const MOST_DRAINED: usize = 64 * 1024 * 1024;

/// How far the replay has come.
struct Progress {
    /// Position of the next byte to be written.
    next: u64,
    /// Bytes of the peer's replay still to come.
    left: u64,
}

enum End {
    /// All is written.
    Done,
    /// Not to go on, or not possible.
    Stopped,
    /// Read it dry.
    Drain,
    /// Nobody wants the connection any more.
    Dropped,
}

/// Replays, makes the connection the flow's transport, and ends; or keeps it until it is drained.
pub(crate) async fn carry(mut link: Link, install: Install) {
    install.io.trim(install.peer_received);
    if link.unmaps && !install.io.maps_v4() {
        sys::unmap(link.fd.get_ref().raw());
    }
    let mut progress = Progress {
        next: install.peer_received,
        left: install.expected,
    };
    let end = match install.io.prepare(link.fd.get_ref().as_fd()) {
        Ok(()) => run(&mut link, &install, &mut progress).await,
        Err(e) => failed(&link, &install, &e),
    };
    let end = match end {
        End::Done => {
            let (token, conn) = (install.token, link.conn);
            if link.shared.with(|d, _| d.may_go_live(token, conn)) {
                return finish(link, &install, progress.next);
            }
            End::Stopped
        }
        other => other,
    };
    let end = match end {
        End::Stopped => stopped(&mut link).await,
        other => other,
    };
    if let End::Drain = end {
        read_dry(&link, &*install.io);
        let Link { fd, shared, .. } = link;
        drop(fd);
        shared.with(|d, _| d.carrier_drained(install.token));
    }
}

async fn run(link: &mut Link, install: &Install, progress: &mut Progress) -> End {
    loop {
        loop {
            match link.orders.try_recv() {
                Ok(Some(Order::Stop)) => return End::Stopped,
                Ok(Some(Order::Drain)) => return End::Drain,
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(Ended) => return End::Dropped,
            }
        }
        let moved = match step(link, install, progress) {
            Ok(_) if progress.next == install.sent => return End::Done,
            Ok(moved) => moved,
            Err(e) => return failed(link, install, &e),
        };
        if moved {
            task::yield_now().await;
            continue;
        }
        let interest = match progress.left {
            0 => Interest::WRITABLE,
            _ => Interest::WRITABLE | Interest::READABLE,
        };
        select! {
            biased;
            order = link.orders.recv() => match order {
                Some(Order::Stop) => return End::Stopped,
                Some(Order::Drain) => return End::Drain,
                Some(_) => {}
                None => return End::Dropped,
            },
            ready = link.fd.ready(interest) => if ready.is_err() {
                return End::Dropped;
            },
        }
    }
}

/// The connection cannot be the flow's transport, or not for long.
fn failed(link: &Link, install: &Install, e: &io::Error) -> End {
    let errno = e.raw_os_error().unwrap_or(libc::ECONNRESET);
    link.shared
        .with(|d, _| d.carrier_failed(install.token, errno));
    End::Stopped
}

/// Writes and reads as much as goes now, up to one turn. Whether anything moved.
fn step(link: &Link, install: &Install, progress: &mut Progress) -> io::Result<bool> {
    let read = read_some(link, install, progress)?;
    let written = write_some(link, install, progress)?;
    Ok(read || written)
}

fn write_some(link: &Link, install: &Install, progress: &mut Progress) -> io::Result<bool> {
    let fd = link.fd.get_ref().raw();
    let before = progress.next;
    if before == install.sent {
        return Ok(false);
    }
    let mut outcome = Ok(());
    progress.next = install.io.replay(before, &mut |piece| {
        if outcome.is_err() {
            return 0;
        }
        sys::send(fd, piece).unwrap_or_else(|e| {
            outcome = Err(e);
            0
        })
    });
    match outcome {
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
            readiness::forget_ready(&link.fd, Interest::WRITABLE);
        }
        Err(e) if e.kind() != io::ErrorKind::Interrupted => return Err(e),
        _ => {}
    }
    Ok(progress.next != before)
}

fn read_some(link: &Link, install: &Install, progress: &mut Progress) -> io::Result<bool> {
    let fd = link.fd.get_ref().raw();
    let mut taken = 0;
    while progress.left > 0 && taken < TURN {
        match read_piece(&link.shared, fd, progress.left, &*install.io) {
            // The peer has promised more.
            Ok(0) => return Err(io::ErrorKind::ConnectionReset.into()),
            Ok(n) => {
                taken += n;
                progress.left -= n as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                readiness::forget_ready(&link.fd, Interest::READABLE);
                break;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(taken > 0)
}

/// One `recv` of at most `limit` bytes into the stash.
fn read_piece(shared: &Shared, fd: i32, limit: u64, io: &dyn FlowIo) -> io::Result<usize> {
    // Borrowed for one call; `stash` does not come back here.
    let mut scratch = shared.scratch.borrow_mut();
    scratch.resize(SCRATCH, 0);
    let limit = usize::try_from(limit).unwrap_or(SCRATCH).min(SCRATCH);
    let space = scratch.get_mut(..limit).unwrap_or_default();
    let n = sys::recv(fd, space)?;
    io.stash(space.get(..n).unwrap_or_default());
    Ok(n)
}

/// Waits for the order to drain.
async fn stopped(link: &mut Link) -> End {
    loop {
        match link.orders.recv().await {
            Some(Order::Drain) => return End::Drain,
            Some(_) => {}
            None => return End::Dropped,
        }
    }
}

/// The connection is about to be closed, and the peer sends no more: every byte that has arrived is
/// the flow's.
fn read_dry(link: &Link, io: &dyn FlowIo) {
    let fd = link.fd.get_ref().raw();
    let mut taken = 0;
    while taken < MOST_DRAINED {
        match read_piece(&link.shared, fd, u64::MAX, io) {
            Ok(0) => break,
            Ok(n) => taken += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
}

/// Hands the connection to the front end.
fn finish(link: Link, install: &Install, position: u64) {
    let Link { fd, shared, .. } = link;
    if install.io.local_final().is_some() {
        sys::shutdown_write(fd.get_ref().raw());
    }
    // The peer's last message, or the end of its replay, would be acknowledged 40 ms later, and as long its kernel would
    // keep back what its application sends next (Nagle's algorithm).
    sys::acknowledge(fd.get_ref().raw());
    // Out of the runtime's hands before it is in the application's.
    let fd = fd.into_inner();
    let replayed = position.saturating_sub(install.peer_received);
    shared.with(|d, now| d.go_live(now, install.token, fd, replayed));
}
