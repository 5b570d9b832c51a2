//! Blocking calls.

use std::io::IoSlice;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::SessionFlow;
use super::introducing::Introducing;
use super::transport::FlowTransport;
use crate::error::{ConnectError, TransferError};
use crate::event::StreamState;

/// Longest sleep of a waiting thread. It limits the delay of a wait whose flow or endpoint another thread closes.
const SLICE: Duration = Duration::from_secs(1);

/// How long a blocking call looks for completions of a carrier before it sleeps. A message that comes in this time wakes nobody, neither this thread nor the port's
/// task before it. It is as long as such a message takes between threads that sleep, so that they need not go on sleeping because they have once begun.
const LOOKS_FOR: Duration = Duration::from_micros(50);

/// After so many calls of a flow that have looked in vain, only each 16th looks.
const VAIN: u32 = 8;
const RARELY: u32 = 16;

/// The looks of a blocking call before it sleeps for the first time.
enum Looks<'a> {
    /// None yet. How many calls have looked in vain, or have not looked, since one has not.
    Before(&'a AtomicU32),
    /// One, for which the clock was not read.
    First(&'a AtomicU32),
    /// Until this time.
    Until(Instant, &'a AtomicU32),
    /// The last look.
    Last(&'a AtomicU32),
    Over,
}

impl Looks<'_> {
    /// Lets other threads run. Returns whether the caller is to look once more. What others have done meanwhile is found even if they have taken all the time.
    fn once_more(&mut self) -> bool {
        match *self {
            Self::Last(_) | Self::Over => {
                *self = Self::Over;
                return false;
            }
            Self::Before(vain) => {
                let before = vain.fetch_add(1, Ordering::Relaxed);
                if before >= VAIN && !before.is_multiple_of(RARELY) {
                    *self = Self::Over;
                    return false;
                }
                *self = Self::First(vain);
            }
            Self::First(vain) => *self = Self::Until(Instant::now() + LOOKS_FOR, vain),
            Self::Until(end, vain) if Instant::now() >= end => *self = Self::Last(vain),
            Self::Until(..) => {}
        }
        thread::yield_now();
        true
    }

    /// The caller need not wait any more.
    fn end(self) {
        if let Self::First(vain) | Self::Until(_, vain) | Self::Last(vain) = self {
            vain.store(0, Ordering::Relaxed);
        }
    }
}

/// Deadline of a blocking call.
#[derive(Clone, Copy)]
pub(crate) struct Until(Option<Instant>);

impl Until {
    pub(crate) fn new(limit: Option<Duration>) -> Self {
        Self(limit.and_then(|limit| Instant::now().checked_add(limit)))
    }

    /// Length of the next sleep; `None` after the deadline.
    pub(crate) fn slice(self) -> Option<Duration> {
        match self.0 {
            None => Some(SLICE),
            Some(at) => {
                let left = at.saturating_duration_since(Instant::now());
                (!left.is_zero()).then_some(left.min(SLICE))
            }
        }
    }
}

impl SessionFlow {
    /// Waits until the first connection is established, at most `limit`. A connection that was established, and has ended in order since,
    /// is no error: the peer may have sent bytes before.
    ///
    /// # Errors
    /// [`ConnectError::TimedOut`]: the connection is still being made. [`ConnectError::Closed`]: this end has closed the flow. Other
    /// errors: the flow has failed with this error.
    pub fn wait_connected(&self, limit: Option<Duration>) -> Result<(), ConnectError> {
        let until = Until::new(limit);
        loop {
            let seen = self.core.stream.signal();
            match self.state() {
                StreamState::Connecting => {}
                StreamState::Failed(Some(errno)) => return Err(ConnectError::Kernel(errno)),
                StreamState::Closed => return Err(ConnectError::Closed),
                _ => return Ok(()),
            }
            let introducing = self
                .core
                .ctl()
                .introducing
                .as_deref()
                .map(Introducing::waits);
            let answer = introducing.unwrap_or(false);
            let events = if answer { libc::POLLIN } else { libc::POLLOUT };
            let slept = self.sleep(events, until, seen);
            slept.ok_or(ConnectError::TimedOut)?;
        }
    }

    /// Waits until the negotiation has ended, at most `limit`. Returns the flow's state then.
    pub fn wait_negotiated(&self, limit: Option<Duration>) -> StreamState {
        let until = Until::new(limit);
        loop {
            let seen = self.core.stream.signal();
            let state = self.state();
            let open = matches!(state, StreamState::Connecting | StreamState::Negotiating);
            let Some(slice) = until.slice().filter(|_| open) else {
                return state;
            };
            self.await_signal(seen, slice);
        }
    }

    /// Sends at least one byte, unless `data` is empty. Waits at most `limit`. Returns the number of bytes.
    ///
    /// # Errors
    /// [`TransferError::TimedOut`], or the reason why nothing can be sent.
    pub fn send(&self, data: &[u8], limit: Option<Duration>) -> Result<usize, TransferError> {
        let until = Until::new(limit);
        self.again(libc::POLLOUT, until, || self.send_unreported(data))
    }

    /// Sends all of `data`; waits at most `limit`.
    ///
    /// # Errors
    /// [`TransferError::TimedOut`], or the reason why nothing more can be sent. [`stats`](Self::stats) tells how much was sent.
    pub fn send_all(&self, mut data: &[u8], limit: Option<Duration>) -> Result<(), TransferError> {
        let until = Until::new(limit);
        while !data.is_empty() {
            let n = self.again(libc::POLLOUT, until, || self.send_unreported(data))?;
            data = data.get(n..).unwrap_or_default();
        }
        Ok(())
    }

    /// Receives at least one byte; waits at most `limit`. Returns the number of bytes: 0 at the end of the peer's stream,
    /// or if `into` is empty.
    ///
    /// # Errors
    /// [`TransferError::TimedOut`], or the reason why nothing can be received.
    pub fn recv(&self, into: &mut [u8], limit: Option<Duration>) -> Result<usize, TransferError> {
        let until = Until::new(limit);
        self.again(libc::POLLIN, until, || self.try_recv(into))
    }

    /// Fills `into`; waits at most `limit`.
    ///
    /// # Errors
    /// [`TransferError::Ended`] if the peer's stream ends before, [`TransferError::TimedOut`], or the reason why nothing more can be
    /// received. The error does not tell how many bytes `into` has received; these are not received again.
    pub fn recv_exact(
        &self,
        mut into: &mut [u8],
        limit: Option<Duration>,
    ) -> Result<(), TransferError> {
        let until = Until::new(limit);
        while !into.is_empty() {
            match self.again(libc::POLLIN, until, || self.try_recv(into))? {
                0 => return Err(TransferError::Ended),
                n => into = into.get_mut(n..).unwrap_or_default(),
            }
        }
        Ok(())
    }

    /// Waits until all posts are completed, at most `limit`.
    ///
    /// # Errors
    /// [`TransferError::TimedOut`], or the reason why the remaining posts will never be completed.
    pub fn wait_completed(&self, limit: Option<Duration>) -> Result<(), TransferError> {
        let until = Until::new(limit);
        let mut pause = Duration::from_micros(20);
        loop {
            let seen = self.core.stream.signal();
            self.core.pump_posts(true);
            let (posted, completed) = self.core.posted();
            if completed == posted {
                return Ok(());
            }
            if let Some(error) = self.core.refuses_posts() {
                return Err(error);
            }
            let slice = until.slice().ok_or(TransferError::TimedOut)?;
            if self.core.queued.load(Ordering::SeqCst) {
                self.sleep(libc::POLLOUT, until, seen);
            } else {
                // The kernel does not report acknowledgements, so poll for them.
                self.core.hub.nap(pause.min(slice));
                pause = (pause * 2).min(Duration::from_millis(5));
            }
        }
    }

    /// Sends what the kernel takes. The caller waits for room itself, so that none need be reported.
    fn send_unreported(&self, data: &[u8]) -> Result<usize, TransferError> {
        self.core.try_send(&[IoSlice::new(data)])
    }

    /// Repeats `ask` until it returns anything but `WouldBlock`.
    fn again(
        &self,
        events: i16,
        until: Until,
        mut ask: impl FnMut() -> Result<usize, TransferError>,
    ) -> Result<usize, TransferError> {
        self.core.agent().attend();
        let mut looks = Looks::Before(&self.core.vain_looks);
        loop {
            let seen = self.core.stream.signal();
            match ask() {
                Err(TransferError::WouldBlock) => {}
                answer => {
                    looks.end();
                    return answer;
                }
            }
            if events == libc::POLLOUT && self.core.queued.load(Ordering::SeqCst) {
                // Posts are sent first.
                self.core.pump_posts(true);
                if !self.core.queued.load(Ordering::SeqCst) {
                    continue;
                }
            }
            if self.core.is_carried() && looks.once_more() {
                continue;
            }
            let slept = self.sleep(events, until, seen);
            slept.ok_or(TransferError::TimedOut)?;
        }
    }

    /// Sleeps until the flow may be ready for `events`; `None` after the deadline. `seen` is the stream's signal from before the caller
    /// found no reason to go on: if it has changed since, the call returns at once.
    fn sleep(&self, events: i16, until: Until, seen: u32) -> Option<()> {
        let slice = until.slice()?;
        let core = &self.core;
        let transport = {
            let ctl = core.ctl();
            if ctl.verdict.is_some() || ctl.closed {
                return Some(());
            }
            // Held during the sleep, so that the descriptor number is not reused.
            let transport = ctl.transport.clone();
            transport.filter(|_| !core.stream.is_barred())
        };
        match transport {
            // The flow may have got this transport since the caller looked, and bytes in the stash with it.
            Some(_) if core.stream.signal() != seen => {}
            // If the transport is drained from here on, it is shut down first, which ends the poll.
            Some(FlowTransport::Socket(sock)) => core.agent().wait_for(sock.raw(), events, slice),
            Some(FlowTransport::Carrier(carried)) => {
                if !core.sleep_on(&carried, seen, slice) {
                    self.await_signal(seen, slice);
                }
            }
            None => self.await_signal(seen, slice),
        }
        Some(())
    }

    /// Waits until the stream is woken, at most `limit`. The caller checks again after every result of the wait. `seen` is
    /// `Stream::signal` from before its last check.
    fn await_signal(&self, seen: u32, limit: Duration) {
        let core = &self.core;
        if core.agent().is_driven() {
            let woken = || core.stream.signal() != seen;
            core.agent().drive_until(limit, woken);
        } else {
            let _ = core.stream.wait(seen, Some(limit));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A call that waits: how often it looks, if it finds something at the first look or never.
    fn looks(vain: &AtomicU32, finds: bool) -> u32 {
        let mut looks = Looks::Before(vain);
        let mut n = 0;
        while looks.once_more() {
            n += 1;
            if finds {
                looks.end();
                break;
            }
        }
        n
    }

    #[test]
    fn calls_that_look_in_vain_look_rarely_until_one_finds_something() {
        let vain = AtomicU32::new(0);
        let looked: Vec<_> = (0..80).filter(|_| looks(&vain, false) > 0).collect();
        assert_eq!(looked, [0, 1, 2, 3, 4, 5, 6, 7, 16, 32, 48, 64]);
        assert_eq!(looks(&vain, true), 1);
        assert!(looks(&vain, false) >= 3);
    }
}
