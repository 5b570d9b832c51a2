//! The replay: a connection becomes a flow's transport.
//!
//! Both sides send the bytes that the other lacks, at the same time. Each must read meanwhile, or both would wait for
//! ever with full buffers. Each may read only as many bytes as the other has announced for its replay, because the
//! application takes the bytes after them at its own pace. A side whose own replay is written leaves the rest of the peer's to the application,
//! unless the connection is narrow ([`Connection::is_narrow`]).
//!
//! ```text
//!            ┌──────────────────────── Stop, failure ──────────────┐
//!  Install ──┤                                                     ▼
//!            └─► write and read ──► all written ──► live        stopped ──► Drain: read to the end, close
//! ```

use std::cell::RefCell;
use std::io;
use std::time::{Duration, Instant};

use tokio::select;
use tokio::{task, time};

use crate::FlowIo;
use crate::resume::link::Link;
use crate::tasks::mailbox::Ended;
use crate::tasks::order::{Install, Order};
use crate::transport::{Connection, errno_of, readable, ready};

const SCRATCH: usize = 64 * 1024;
/// Bytes read before other tasks get a turn.
const TURN: usize = 1024 * 1024;
/// Most bytes read from a connection that is drained. This is more than any kernel buffers; a peer that keeps sending
/// has to send the rest again.
const MOST_DRAINED: usize = 64 * 1024 * 1024;

/// A replay that waits is looked at so often, and given up if nothing of it is acknowledged for [`SILENT`] and two round trips.
const LOOK: Duration = Duration::from_millis(50);
const SILENT: Duration = Duration::from_millis(300);

/// Read buffer; one for all connections.
type ScratchBuffer = RefCell<Vec<u8>>;

/// How far the replay has come.
struct ReplayProgress {
    /// Position of the next byte to be written.
    next: u64,
    /// Bytes of the peer's replay still to come.
    left: u64,
}

impl ReplayProgress {
    /// Whether the flow may go on.
    fn is_over(&self, connection: &dyn Connection, install: &Install) -> bool {
        self.next == install.sent && (self.left == 0 || !connection.is_narrow())
    }

    /// Waits until bytes can be moved.
    async fn may_go_on(&self, connection: &dyn Connection, install: &Install) -> io::Result<()> {
        match self.next == install.sent {
            true => readable(connection).await,
            false => ready(connection, self.left > 0).await,
        }
    }
}

enum PumpEnd {
    /// The replay is written, and that of the peer is read as far as necessary.
    Done,
    /// The replay was stopped, or has failed.
    Stopped,
    /// The connection is to be drained.
    Drain,
    /// The connection is not wanted any more.
    Dropped,
}

/// Replays and makes the connection the flow's transport. If that fails or is stopped, keeps the connection until it is
/// drained.
pub(crate) async fn carry(mut link: Link, install: Install) {
    install.io.trim(install.peer_received);
    let mut progress = ReplayProgress {
        next: install.peer_received,
        left: install.expected,
    };
    let end = match link.connection.prepare(&*install.io) {
        Ok(()) => run(&mut link, &install, &mut progress).await,
        Err(e) => failed(&link, &install, &e),
    };
    let (mut link, end) = match end {
        PumpEnd::Done => match finish(link, &install, progress.next) {
            None => return,
            Some(link) => (link, PumpEnd::Stopped),
        },
        other => (link, other),
    };
    let end = match end {
        PumpEnd::Stopped => stopped(&mut link).await,
        other => other,
    };
    if let PumpEnd::Drain = end {
        let Link {
            connection, shared, ..
        } = link;
        drain(&*connection, &shared.scratch, &*install.io);
        drop(connection);
        shared.with(|d, _| d.carrier_drained(install.token));
    }
}

async fn run(link: &mut Link, install: &Install, progress: &mut ReplayProgress) -> PumpEnd {
    let mut silence = ReplaySilence::default();
    loop {
        loop {
            match link.orders.try_recv() {
                Ok(Some(Order::Stop)) => return PumpEnd::Stopped,
                Ok(Some(Order::Drain)) => return PumpEnd::Drain,
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(Ended) => return PumpEnd::Dropped,
            }
        }
        let moved = match step(&*link.connection, &link.shared.scratch, install, progress) {
            Ok(_) if progress.is_over(&*link.connection, install) => return PumpEnd::Done,
            Ok(moved) => moved,
            Err(e) => return failed(link, install, &e),
        };
        if moved {
            task::yield_now().await;
            continue;
        }
        select! {
            biased;
            order = link.orders.recv() => match order {
                Some(Order::Stop) => return PumpEnd::Stopped,
                Some(Order::Drain) => return PumpEnd::Drain,
                Some(_) => {}
                None => return PumpEnd::Dropped,
            },
            ready = progress.may_go_on(&*link.connection, install) => if ready.is_err() {
                return PumpEnd::Dropped;
            },
            () = time::sleep(LOOK) => if silence.is_found(&*link.connection) {
                link.shared.with(|d, _| d.carrier_stalled(install.token));
                return PumpEnd::Stopped;
            },
        }
    }
}

/// Since when the peer's kernel has acknowledged no further byte of the replay, and how many it has acknowledged.
#[derive(Default)]
struct ReplaySilence(Option<(Instant, u64)>);

impl ReplaySilence {
    /// Whether that is too long: the path drops everything, or long packets. The peer's kernel acknowledges bytes although its process is busy.
    fn is_found(&mut self, connection: &dyn Connection) -> bool {
        let Some(wait) = connection.ack_wait() else {
            self.0 = None;
            return false;
        };
        match self.0 {
            Some((since, acked)) if acked == wait.acked => {
                since.elapsed() >= SILENT + wait.round_trip * 2
            }
            _ => {
                self.0 = Some((Instant::now(), wait.acked));
                false
            }
        }
    }
}

/// Reports that the connection cannot be the flow's transport.
fn failed(link: &Link, install: &Install, e: &io::Error) -> PumpEnd {
    let errno = errno_of(e, libc::ECONNRESET);
    link.shared
        .with(|d, _| d.carrier_failed(install.token, errno));
    PumpEnd::Stopped
}

/// Reads and writes as much as is possible now, but reads little more than [`TURN`]. Returns whether any byte was
/// moved.
fn step(
    connection: &dyn Connection,
    scratch: &ScratchBuffer,
    install: &Install,
    progress: &mut ReplayProgress,
) -> io::Result<bool> {
    let read = read_some(connection, scratch, install, progress)?;
    let written = write_some(connection, install, progress)?;
    Ok(read || written)
}

fn write_some(
    connection: &dyn Connection,
    install: &Install,
    progress: &mut ReplayProgress,
) -> io::Result<bool> {
    let before = progress.next;
    if before == install.sent {
        return Ok(false);
    }
    let mut outcome = Ok(());
    let reached = install.io.replay(before, &mut |piece| {
        if outcome.is_err() {
            return 0;
        }
        connection.send(piece).unwrap_or_else(|e| {
            outcome = Err(e);
            0
        })
    });
    progress.next = reached.ok_or(io::ErrorKind::ConnectionAborted)?;
    match outcome {
        Err(e) if !is_passing(&e) => Err(e),
        _ => Ok(progress.next != before),
    }
}

fn read_some(
    connection: &dyn Connection,
    scratch: &ScratchBuffer,
    install: &Install,
    progress: &mut ReplayProgress,
) -> io::Result<bool> {
    let mut taken = 0;
    while progress.left > 0 && taken < TURN {
        match read_piece(connection, scratch, progress.left, &*install.io) {
            // The peer has announced more bytes.
            Ok(0) => return Err(io::ErrorKind::ConnectionReset.into()),
            Ok(n) => {
                taken += n;
                progress.left -= n as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
            Err(e) if is_passing(&e) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(taken > 0)
}

/// One `recv` of at most `limit` bytes into the stash.
fn read_piece(
    connection: &dyn Connection,
    scratch: &ScratchBuffer,
    limit: u64,
    io: &dyn FlowIo,
) -> io::Result<usize> {
    // Borrowed for this call only; `stash` does not call back here.
    let mut scratch = scratch.borrow_mut();
    scratch.resize(SCRATCH, 0);
    let limit = usize::try_from(limit).unwrap_or(SCRATCH).min(SCRATCH);
    let space = scratch.get_mut(..limit).unwrap_or_default();
    let n = connection.recv(space)?;
    io.stash(space.get(..n).unwrap_or_default());
    Ok(n)
}

/// The connection is intact after this error.
fn is_passing(e: &io::Error) -> bool {
    matches!(
        e.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}

/// Waits for the order to drain.
async fn stopped(link: &mut Link) -> PumpEnd {
    loop {
        match link.orders.recv().await {
            Some(Order::Drain) => return PumpEnd::Drain,
            Some(_) => {}
            None => return PumpEnd::Dropped,
        }
    }
}

/// Stashes every byte that has arrived: the connection is about to be closed, and the peer sends no more on it.
fn drain(connection: &dyn Connection, scratch: &ScratchBuffer, io: &dyn FlowIo) {
    let mut taken = 0;
    while taken < MOST_DRAINED {
        match read_piece(connection, scratch, u64::MAX, io) {
            Ok(0) => break,
            Ok(n) => taken += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
}

/// Hands the connection to the front end. Returns it if the flow must not use it any more.
fn finish(link: Link, install: &Install, position: u64) -> Option<Link> {
    let shared = link.shared.clone();
    // In one turn: nothing can end the flow's use of the connection in between. What is left of the link is dropped in it, which does not use the
    // driver.
    shared.with(|d, now| {
        if !d.may_go_live(install.token, link.conn) {
            return Some(link);
        }
        let connection = link.connection;
        if install.io.local_final().is_some() {
            connection.shut_write();
        }
        connection.flush();
        let transport = connection.into_transport();
        let replayed = position.saturating_sub(install.peer_received);
        d.go_live(now, install.token, transport, replayed);
        None
    })
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use slim_core::replay::Replay;
    use slim_core::{FlowToken, Verdict};
    use slim_stream::{Drained, Probe, Stream, Undelivered};

    use super::*;
    use crate::handover::{Transport, TransportRef};
    use crate::transport::kinds::{next, over_each_kind, send_all};

    /// A front end with bytes to replay, and the bytes that were stashed.
    struct Replayer(Stream, Mutex<Vec<u8>>);

    impl Replayer {
        /// A front end that has sent these bytes, none of which are acknowledged.
        fn with(sent: &[u8]) -> Arc<Self> {
            let stream = Stream::new();
            let copy = |from: usize, replay: &mut Replay| replay.push(&sent[from..]);
            stream.with_half(|half| half.account(sent.len(), copy, || u64::MAX));
            Arc::new(Replayer(stream, Mutex::default()))
        }

        fn given(&self) -> Vec<u8> {
            self.1.lock().unwrap().clone()
        }
    }

    impl FlowIo for Replayer {
        fn sent(&self) -> u64 {
            self.0.sent()
        }
        fn trim(&self, peer_received: u64) {
            self.0.trim(peer_received);
        }
        fn local_final(&self) -> Option<u64> {
            self.0.local_final()
        }
        fn live(&self) {}
        fn legacy(&self, _: bool) {}
        fn suspend(&self) -> bool {
            true
        }
        fn idle(&self) -> bool {
            true
        }
        fn drain(&self) -> Drained {
            self.0.drained()
        }
        fn stash(&self, data: &[u8]) {
            self.1.lock().unwrap().extend(data);
        }
        fn replay(&self, from: u64, f: &mut dyn FnMut(&[u8]) -> usize) -> Option<u64> {
            self.0.replay(from, f).ok()
        }
        fn before_connect(&self, _: TransportRef<'_>) -> io::Result<()> {
            Ok(())
        }
        fn prepare(&self, _: TransportRef<'_>) -> io::Result<()> {
            Ok(())
        }
        fn install(&self, _: Transport) {}
        fn reinstate(&self, _: bool) {}
        fn peer_final(&self, _: u64) {}
        fn escalate(&self, _: Verdict) {}
        fn probe(&self) -> Probe {
            Probe::BUSY
        }
        fn undelivered(&self) -> Option<Undelivered> {
            None
        }
    }

    /// The bytes that one end of a replay has sent: more than any connection holds.
    fn bytes(seed: usize) -> Vec<u8> {
        let piece = (0..251).map(|n| (n * seed) as u8);
        piece.cycle().take((16 << 20) + seed).collect()
    }

    /// One end of a replay: the peer lacks everything from `peer_received` on, and replays `expected` bytes.
    struct OneEnd {
        connection: Box<dyn Connection>,
        install: Install,
        progress: ReplayProgress,
        scratch: ScratchBuffer,
    }

    impl OneEnd {
        fn new(
            connection: Box<dyn Connection>,
            front: &Arc<Replayer>,
            peer_received: u64,
            expected: u64,
        ) -> Self {
            OneEnd {
                connection,
                install: Install {
                    token: FlowToken(1),
                    sent: front.0.sent(),
                    io: front.clone(),
                    peer_received,
                    expected,
                },
                progress: ReplayProgress {
                    next: peer_received,
                    left: expected,
                },
                scratch: ScratchBuffer::default(),
            }
        }

        fn step(&mut self) -> io::Result<bool> {
            step(
                &*self.connection,
                &self.scratch,
                &self.install,
                &mut self.progress,
            )
        }

        fn is_done(&self) -> bool {
            self.progress.next == self.install.sent && self.progress.left == 0
        }
    }

    #[test]
    fn both_ends_replay_at_once_and_read_nothing_after_the_replay() {
        over_each_kind(async |ends| {
            let (near, far) = ends();
            let (ours, theirs) = (bytes(3), bytes(5));
            let (ours_len, theirs_len) = (ours.len() as u64, theirs.len() as u64);
            let fronts = [Replayer::with(&ours), Replayer::with(&theirs)];
            let mut near = OneEnd::new(near, &fronts[0], 1000, theirs_len - 7);
            let mut far = OneEnd::new(far, &fronts[1], 7, ours_len - 1000);
            let mut waited = 0;
            while !(near.is_done() && far.is_done()) {
                let moved = [near.step().unwrap(), far.step().unwrap()];
                if moved == [false, false] {
                    waited += 1;
                    select! {
                        biased;
                        _ = ready(&*near.connection, near.progress.left > 0) => {}
                        _ = ready(&*far.connection, far.progress.left > 0) => {}
                    }
                }
                task::yield_now().await;
                assert!(waited < 100_000);
            }
            assert!(fronts[1].given() == ours[1000..]);
            assert!(fronts[0].given() == theirs[7..]);
            // The bytes after the replay are left to the application.
            send_all(&*near.connection, b"next");
            assert!(!far.step().unwrap());
            assert_eq!(next(&*far.connection, 9).await, b"next");
        });
    }

    #[test]
    fn bytes_that_arrived_before_a_replay_broke_are_kept() {
        over_each_kind(async |ends| {
            let (near, far) = ends();
            let ours = bytes(3);
            let fronts = [Replayer::with(&ours), Replayer::with(b"")];
            let mut near = OneEnd::new(near, &fronts[0], 0, 0);
            let mut far = OneEnd::new(far, &fronts[1], 0, ours.len() as u64);
            while fronts[1].given().is_empty() {
                near.step().unwrap();
                far.step().unwrap();
                task::yield_now().await;
            }
            near.step().unwrap();
            let sent = near.progress.next as usize;
            assert!(sent < ours.len());
            drop(near);
            drain(&*far.connection, &far.scratch, &*fronts[1]);
            let given = fronts[1].given();
            assert!(given == ours[..sent], "{} of {sent} bytes", given.len());
            // The rest of the announced bytes never comes.
            let error = loop {
                match far.step() {
                    Ok(_) => task::yield_now().await,
                    Err(e) => break e,
                }
            };
            assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
        });
    }
}
