//! Taking and returning the sending half.

use super::Stream;
use super::entry::{MARKS, me};
use crate::send_half::SendHalf;
use slim_sys::keep_errno;
use slim_sys::lock::block_signals;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Bound on holding the half for a non-blocking system call and a copy.
const SENDING: Duration = Duration::from_millis(500);
/// How often it is checked whether the half is still held.
const MOMENT: Duration = Duration::from_micros(20);

impl Stream {
    /// Takes the sending half, if it is free, for a call that is inside and counted.
    #[inline]
    pub fn try_take_half(&self) -> bool {
        if !self.send.try_lock() {
            return false;
        }
        // At once, because a signal handler that interrupts here must see that its own thread holds the lock.
        self.sender.store(me(), Ordering::Relaxed);
        if self.gate.is_shared() || self.decide_pass() {
            return true;
        }
        self.unlock_half();
        false
    }

    /// The sending half. The caller has taken it by its pass or by the lock.
    ///
    /// # Safety
    /// The caller has the half, and does not use the reference after it returns the half.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn half(&self) -> &mut SendHalf {
        // SAFETY: the caller's contract.
        unsafe { self.send.get() }
    }

    /// Takes the sending half, for control or for a call that is inside.
    pub fn lock_half(&self) {
        self.send.lock();
        self.sender.store(me(), Ordering::Relaxed);
        self.wait_for_owner();
    }

    /// Takes the sending half if it is free.
    pub fn try_lock_half(&self) -> bool {
        if !self.send.try_lock() {
            return false;
        }
        let alone = !self.owner_has_half();
        if !alone {
            self.send.unlock();
        }
        alone
    }

    /// Takes the sending half if it is free within `limit`.
    pub fn lock_half_within(&self, limit: Duration) -> bool {
        let begun = Instant::now();
        loop {
            if self.try_lock_half() {
                return true;
            }
            if begun.elapsed() > limit {
                return false;
            }
            slim_sys::nap(MOMENT);
        }
    }

    /// Returns the sending half.
    #[inline]
    pub fn unlock_half(&self) {
        self.sender.store(0, Ordering::Relaxed);
        self.send.unlock();
    }

    /// The holder of the lock declares that it enters a call in which it may be cancelled (`true`), or that it has returned
    /// (`false`). It does not use the half meanwhile.
    pub fn holder_may_be_cancelled(&self, may: bool) {
        self.send.may_be_cancelled(may);
    }

    /// Whether the calling thread is in a signal handler that has interrupted a call of the same thread which waits and holds the
    /// half.
    pub fn waits_with_half(&self) -> bool {
        self.send.is_interrupted_here()
    }

    /// Runs `f` with the sending half.
    pub fn with_half<R>(&self, f: impl FnOnce(&mut SendHalf) -> R) -> R {
        let _signals = block_signals();
        if self.waits_with_half() {
            // SAFETY: the thread has the half and does not use it while it waits; the interrupted call continues only after this
            // function has returned.
            return f(unsafe { self.half() });
        }
        self.lock_half();
        // SAFETY: taken one line above, returned after `f` has returned its reference.
        let r = f(unsafe { self.half() });
        self.unlock_half();
        r
    }

    /// Runs `f` with the sending half, if it is free.
    pub fn try_with_half<R>(&self, f: impl FnOnce(&mut SendHalf) -> R) -> Option<R> {
        let _signals = block_signals();
        if !self.try_lock_half() {
            return None;
        }
        // SAFETY: taken just above, returned after `f` has returned its reference.
        let r = f(unsafe { self.half() });
        self.unlock_half();
        Some(r)
    }

    /// Bytes sent since the flow began.
    pub fn sent(&self) -> u64 {
        self.with_half(|half| half.sent())
    }

    /// Bytes sent since the flow began; `None` if a send is in progress.
    pub fn try_sent(&self) -> Option<u64> {
        self.try_with_half(|half| half.sent())
    }

    /// Bytes sent since the flow began; waits a limited time for a send in progress. `None` if the number cannot be known: in a
    /// signal handler that has interrupted a send of the same thread. That send continues after the handler, and the kernel may
    /// already have taken bytes for it that are not counted, also if it waits for room.
    pub fn sent_in_time(&self) -> Option<u64> {
        let begun = Instant::now();
        loop {
            let sent = self.try_sent();
            let unknown = || self.waits_with_half() || self.is_sending_here();
            if sent.is_some() || unknown() || begun.elapsed() > SENDING {
                return sent;
            }
            slim_sys::nap(MOMENT);
        }
    }

    /// Whether the caller is a signal handler that has interrupted a send of the same thread, as far as that can be detected.
    pub fn is_sending_here(&self) -> bool {
        let me = me();
        let by_pass = || self.gate.is_owner(&MARKS, me) && self.gate.is_owner_sending(&MARKS);
        let by_lock = || !self.send.is_free() && self.sender.load(Ordering::Relaxed) == me;
        me != 0 && (self.gate.has_owner() && by_pass() || by_lock())
    }

    /// Bytes of the stream that the peer's kernel may not have, as our kernel reports for the transport `fd`; `u64::MAX` if that
    /// cannot be known. The number `fd` may have got a placeholder since the bytes were sent, and the kernel reports no
    /// unacknowledged bytes for a placeholder. But the stream is barred before that happens, so the gate is checked afterwards.
    pub fn unacked(&self, fd: libc::c_int) -> u64 {
        let answer = keep_errno(|| slim_sys::unacked(fd)).ok();
        answer
            .filter(|_| !self.gate.is_suspended() && !self.is_relayed())
            .unwrap_or(u64::MAX)
    }

    /// As [`unacked`](Self::unacked), for control, which does not have the half and keeps the transport under its number.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn undelivered_on(&self, fd: libc::c_int) -> Result<u64, slim_sys::Errno> {
        match self.is_relayed() {
            true => Ok(self
                .try_with_half(|half| half.replay.len() as u64)
                .unwrap_or(1)),
            false => slim_sys::unacked(fd),
        }
    }

    /// Decides what becomes of the pass. The calling thread is about to send without it, and has the lock. False if the caller is
    /// a signal handler and its thread has the half already, by the pass.
    #[cold]
    #[inline(never)]
    fn decide_pass(&self) -> bool {
        let me = me();
        if !self.gate.has_owner() {
            match MARKS.of(me).filter(|_| me != 0 && slim_sys::can_fence()) {
                Some(mark) => self.gate.give_pass(mark),
                None => self.gate.share(),
            }
        } else if self.gate.is_owner(&MARKS, me) {
            return !self.gate.is_owner_sending(&MARKS);
        } else {
            self.gate.share();
            keep_errno(|| {
                slim_sys::fence();
                self.wait_while_owner_sends();
            });
        }
        true
    }

    /// With the lock taken: waits until the owner of the pass does not have the half either.
    fn wait_for_owner(&self) {
        if self.owner_has_half() {
            self.wait_while_owner_sends();
        }
    }

    /// With the lock taken: whether the owner of the pass has the half at the moment. The owner cannot take it again before the
    /// lock is released.
    fn owner_has_half(&self) -> bool {
        if !self.gate.has_owner() || self.gate.is_shared() {
            return false;
        }
        self.fence_others();
        self.gate.is_owner_sending(&MARKS)
    }

    /// The owner holds the half only for a non-blocking system call and a copy.
    fn wait_while_owner_sends(&self) {
        while self.gate.is_owner_sending(&MARKS) {
            std::thread::sleep(MOMENT);
        }
    }
}
