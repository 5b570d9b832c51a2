//! Data calls, which never wait, and the faults that they meet on the transport.

use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use slim_agent::MailboxState;
use slim_core::replay::Replay;
use slim_core::{Cause, Role, Verdict};
use slim_stream::Inside;
use slim_sys::SignalsBlocked;

use super::core::FlowCore;
use super::transport::DataPath;
use crate::error::TransferError;
use crate::hub::bits;
use crate::socket;

impl FlowCore {
    /// Sends the bytes that the kernel takes. If it does not take all, new room is reported from now on.
    pub(super) fn send(self: &Arc<Self>, data: &[IoSlice<'_>]) -> Result<usize, TransferError> {
        let sent = self.try_send(data);
        match sent {
            Err(TransferError::WouldBlock) => {
                self.blocked.store(true, Ordering::SeqCst);
                // Finds room that has appeared before.
                self.try_send(data)
            }
            Ok(n) if n < data.iter().map(|piece| piece.len()).sum() => {
                self.blocked.store(true, Ordering::SeqCst);
                self.report_room();
                sent
            }
            _ => sent,
        }
    }

    /// Reports room that has appeared since a send found too little, and before that was noted.
    fn report_room(self: &Arc<Self>) {
        // Otherwise it is reported when the posts are sent, or when the flow has a transport again.
        if self.queued.load(Ordering::SeqCst) || !matches!(self.enter(), Ok(true)) {
            return;
        }
        let room = self.way().has_room();
        self.leave();
        if room && self.blocked.swap(false, Ordering::SeqCst) {
            self.note_and(bits::WRITABLE, true);
        }
    }

    /// As [`send`](Self::send), but new room is not reported.
    pub(super) fn try_send(self: &Arc<Self>, data: &[IoSlice<'_>]) -> Result<usize, TransferError> {
        if self.queued.load(Ordering::SeqCst) {
            return Err(self.refuses_posts().unwrap_or(TransferError::WouldBlock));
        }
        loop {
            if !self.enter()? {
                return self.outside(|verdict| match verdict {
                    Verdict::Errno(errno) => Err(TransferError::Lost(errno)),
                    Verdict::Eof => Err(TransferError::ShutDown),
                });
            }
            let sent = self.send_inside(&self.way(), data);
            let again = match sent {
                Err(TransferError::Lost(errno)) => self.fault(Cause::Errno(errno)),
                _ => false,
            };
            self.leave();
            if !again {
                return sent;
            }
        }
    }

    fn send_inside(&self, way: &DataPath, data: &[IoSlice<'_>]) -> Result<usize, TransferError> {
        let sent = self.with_half(|half| {
            // Checked while holding the half, so that no send follows the end of the stream.
            if self.stream.local_final().is_some() {
                return Err(TransferError::ShutDown);
            }
            let n = way.send(data)?;
            if !self.plain.load(Ordering::Acquire) {
                let copy = |from, replay: &mut Replay| push_from(data, from, n, replay);
                half.account(n, copy, || way.unacked(&self.stream));
            }
            // Updated while holding the half, in the order of the stream: posts derive their positions from it.
            self.sent.fetch_add(n as u64, Ordering::Relaxed);
            Ok(n)
        })?;
        if !self.plain.load(Ordering::Relaxed) {
            self.stream.mark_dirty(|| self.agent().dirty(self.token));
        }
        Ok(sent)
    }

    /// Receives the bytes that are available.
    pub(super) fn recv(
        self: &Arc<Self>,
        into: &mut [IoSliceMut<'_>],
    ) -> Result<usize, TransferError> {
        let room = into.iter().any(|piece| !piece.is_empty());
        let received = match self.try_recv(into, room) {
            // There is nothing to wait for.
            Err(TransferError::WouldBlock) if !room => Ok(0),
            received => received,
        };
        if let Ok(n) = received {
            self.received.fetch_add(n as u64, Ordering::Relaxed);
        }
        received
    }

    fn try_recv(
        self: &Arc<Self>,
        into: &mut [IoSliceMut<'_>],
        room: bool,
    ) -> Result<usize, TransferError> {
        loop {
            let inside = self.enter()?;
            if self.stashed.load(Ordering::Acquire) {
                let n = self.take_stashed(into);
                if inside {
                    self.leave();
                }
                if n > 0 || !room {
                    return Ok(n);
                }
                continue;
            }
            if !inside {
                return self.outside(|verdict| match verdict {
                    Verdict::Errno(errno) => Err(TransferError::Lost(errno)),
                    Verdict::Eof => Ok(0),
                });
            }
            let got = self.way().recv(into);
            let again = match got {
                Ok(0) if room => self.end_of_stream(true),
                Ok(n) => {
                    self.stream.count(&Inside::Counted, n);
                    false
                }
                Err(TransferError::Lost(errno)) => self.fault(Cause::Errno(errno)),
                Err(_) => false,
            };
            self.leave();
            if !again {
                return got;
            }
        }
    }

    /// The result of a call that could not enter the stream.
    fn outside<T>(
        &self,
        of: impl FnOnce(Verdict) -> Result<T, TransferError>,
    ) -> Result<T, TransferError> {
        match self.ctl().verdict {
            Some(verdict) => of(verdict),
            None => Err(TransferError::WouldBlock),
        }
    }

    fn take_stashed(&self, into: &mut [IoSliceMut<'_>]) -> usize {
        let mut ctl = self.ctl();
        let stash = &mut ctl.receiving.stash;
        let n = into.iter_mut().map(|piece| stash.read(piece)).sum();
        self.stashed.store(!stash.is_empty(), Ordering::Release);
        n
    }

    /// A call inside the stream has met an end of the transport, which the program will be `shown` unless the end is a fault. Returns true
    /// if the call must try again, false if the end is the end of the stream.
    fn end_of_stream(&self, shown: bool) -> bool {
        let received = self.stream.received();
        if self.plain.load(Ordering::Acquire) || self.stream.ends_at(received) {
            return false;
        }
        if !self.live.load(Ordering::Acquire) && !self.hear() {
            // The peer is not known to have SLIM, so it cannot be asked.
            self.ctl().end_shown |= shown;
            return false;
        }
        self.fault(Cause::Eof { received })
    }

    /// Whether the peer of an accepted flow has announced that it has SLIM. Reads the mailboxes, because an OPEN there wakes no thread.
    fn hear(&self) -> bool {
        let ctl = self.ctl();
        let local = ctl.local.filter(|_| !ctl.receiving.has_moved());
        let (Some(local), Role::Acceptor) = (local, self.role) else {
            return false;
        };
        drop(ctl);
        let _signals = SignalsBlocked::new();
        self.agent().read_mailboxes(local, self.remote()) != MailboxState::Nothing
    }

    /// A call inside the stream has found the transport dead, or at an end that the peer has not announced. Returns true if the call
    /// must try again, false if the program gets the error.
    pub(super) fn fault(&self, cause: Cause) -> bool {
        let mut ctl = self.ctl();
        if self.plain.load(Ordering::Acquire) {
            if let (Cause::Errno(errno), None) = (cause, ctl.given_up) {
                // The kernel reports an error once, so keep it.
                self.stream.bar();
                ctl.given_up = Some(Verdict::Errno(errno));
            }
            return false;
        }
        if !self.stream.is_barred() {
            self.stream.bar();
            ctl.fault = Some((cause, false));
            let errno = match cause {
                Cause::Errno(errno) => Some(errno),
                _ => None,
            };
            // The program is not told of a suspension for an end: most ends are announced a moment later.
            self.suspended(&mut ctl, errno, errno.is_some());
        } else if let (Cause::Errno(errno), Some((Cause::Eof { .. }, _))) = (cause, ctl.fault) {
            ctl.taken.get_or_insert(errno);
        }
        true
    }

    /// Checks the transport after epoll reported an error or an end that no data call may have met yet.
    pub(super) fn look_at_end(self: &Arc<Self>) {
        if !matches!(self.enter(), Ok(true)) {
            return;
        }
        let DataPath::Socket(fd) = self.way() else {
            return self.leave();
        };
        let look = libc::MSG_PEEK | libc::MSG_DONTWAIT;
        // A connection that both ends have finished is closed in an orderly way. On plain TCP the bytes before an error are received first.
        let failed = !self.plain.load(Ordering::Acquire)
            && slim_sys::is_over(fd)
            && (self.stream.local_final().is_none() || slim_sys::has_error(fd));
        if failed {
            self.fault(Cause::Errno(socket::error(fd).unwrap_or(libc::ECONNRESET)));
            return self.leave();
        }
        match slim_sys::recv(fd, &mut [0], look) {
            Ok(0) => drop(self.end_of_stream(false)),
            Err(errno) if socket::is_end(errno) => drop(self.fault(Cause::Errno(errno))),
            _ => {}
        }
        self.leave();
    }
}

/// Appends the bytes `from..to` of the concatenated pieces to the replay buffer.
fn push_from(data: &[IoSlice<'_>], from: usize, to: usize, replay: &mut Replay) {
    let mut at = 0;
    for piece in data {
        let (first, last) = (from.max(at) - at, to.min(at + piece.len()).max(at) - at);
        if first < last {
            replay.push(&piece[first..last]);
        }
        at += piece.len();
    }
}
