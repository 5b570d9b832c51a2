//! Who has the sending half.

use super::Stream;
use super::entry::{MARKS, me};
use crate::send_half::SendHalf;
use slim_sys::keep_errno;
use slim_sys::lock::undisturbed;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// For longer nobody holds the half for a system call that does not wait, and a copy.
const SENDING: Duration = Duration::from_millis(500);
/// How often it is looked whether somebody still does.
const MOMENT: Duration = Duration::from_micros(20);

impl Stream {
    /// Takes the sending half for a call that is inside, and counted, if nobody has it.
    #[inline]
    pub fn try_take_half(&self) -> bool {
        if !self.send.try_lock() {
            return false;
        }
        // Before anything takes time: a handler that comes now has to find out that its thread holds the lock.
        self.sender.store(me(), Ordering::Relaxed);
        if self.gate.is_shared() || self.settle() {
            return true;
        }
        self.unlock_half();
        false
    }

    /// The sending half, of a call that is inside and has it, or of who has locked it.
    ///
    /// # Safety
    /// The caller has it, and lets go of the reference before it gives it back.
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

    /// Takes the sending half if nobody has it.
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

    /// Gives the sending half back.
    #[inline]
    pub fn unlock_half(&self) {
        self.sender.store(0, Ordering::Relaxed);
        self.send.unlock();
    }

    /// The holder of the lock is about to wait in a call that may be its last, or has come back. It does not use the half
    /// meanwhile.
    pub fn holder_may_die(&self, may: bool) {
        self.send.may_die(may);
    }

    /// Whether the calling thread is in a signal's handler, in the middle of a call of its own that waits with the half.
    pub fn waits_with_half(&self) -> bool {
        self.send.is_mortal_here()
    }

    /// Runs `f` with the sending half.
    pub fn with_half<R>(&self, f: impl FnOnce(&mut SendHalf) -> R) -> R {
        let _signals = undisturbed();
        if self.waits_with_half() {
            // SAFETY: the thread has it, and does not use it while it waits; nothing else runs in the thread before the end.
            return f(unsafe { self.half() });
        }
        self.lock_half();
        // SAFETY: taken one line above, given back after `f` has given its reference back.
        let r = f(unsafe { self.half() });
        self.unlock_half();
        r
    }

    /// Runs `f` with the sending half, if nobody has it.
    pub fn try_with_half<R>(&self, f: impl FnOnce(&mut SendHalf) -> R) -> Option<R> {
        let _signals = undisturbed();
        if !self.try_lock_half() {
            return None;
        }
        // SAFETY: taken just now, given back after `f` has given its reference back.
        let r = f(unsafe { self.half() });
        self.unlock_half();
        Some(r)
    }

    /// Bytes sent since the flow began.
    pub fn sent(&self) -> u64 {
        self.with_half(|half| half.sent())
    }

    /// Likewise, if nobody is sending just now.
    pub fn try_sent(&self) -> Option<u64> {
        self.try_with_half(|half| half.sent())
    }

    /// Bytes sent since the flow began. `None` where that cannot be told, in a signal's handler that has interrupted a send of its
    /// own thread: it goes on when the handler is over. The kernel may have taken bytes for it by then that are not counted,
    /// also if it waits for room.
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

    /// Whether this is a signal's handler that has interrupted a send of its own thread, as far as that can be told.
    pub fn is_sending_here(&self) -> bool {
        let me = me();
        let by_pass = || self.gate.is_owner(&MARKS, me) && self.gate.is_owner_sending(&MARKS);
        let by_lock = || !self.send.is_free() && self.sender.load(Ordering::Relaxed) == me;
        me != 0 && (self.gate.has_owner() && by_pass() || by_lock())
    }

    /// Bytes of the stream that the kernel of the peer may not have, by what ours knows of the transport `fd`; all that there
    /// could be when that cannot be told. The number may have got a placeholder since our bytes were sent, of which the kernel
    /// would say that nothing is unacknowledged; but the stream is barred before that.
    pub fn unacked(&self, fd: libc::c_int) -> u64 {
        let answer = keep_errno(|| slim_sys::unacked(fd)).ok();
        answer
            .filter(|_| !self.gate.is_suspended())
            .unwrap_or(u64::MAX)
    }

    /// Settles what becomes of the pass, now that the calling thread is about to send without it and has the lock. False
    /// when this is a signal's handler, and the thread has the half already.
    #[cold]
    #[inline(never)]
    fn settle(&self) -> bool {
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

    /// With the lock taken: until the owner of the pass has not the half either.
    fn wait_for_owner(&self) {
        if self.owner_has_half() {
            self.wait_while_owner_sends();
        }
    }

    /// With the lock taken: whether the owner of the pass has the half just now. It takes it no more.
    fn owner_has_half(&self) -> bool {
        if !self.gate.has_owner() || self.gate.is_shared() {
            return false;
        }
        self.fence_others();
        self.gate.is_owner_sending(&MARKS)
    }

    /// It holds the half for a system call that does not wait, and a copy.
    fn wait_while_owner_sends(&self) {
        while self.gate.is_owner_sending(&MARKS) {
            std::thread::sleep(MOMENT);
        }
    }
}
