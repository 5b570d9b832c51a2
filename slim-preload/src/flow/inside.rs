//! How calls get inside of a flow and out again, and who has its sending half.
//!
//! The thread that first sends on a flow gets its pass ([`slim_core::gate::pass`]): it gets in and out, and has
//! the sending half meanwhile, without an atomic read-modify-write. All others are counted in the gate and take
//! the lock of the half. Who has the lock has the half only when the owner of the pass is not in the middle of
//! something: an owner that finds the lock taken turns back, and for one that may have looked too early there is
//! `membarrier(2)`. When another thread sends as well, the pass ends.

use super::{Flow, SendHalf};
use crate::{sys, table};
use libc::c_int;
use slim_core::gate::Left;
use slim_core::gate::pass::{Marks, Passed, Purpose};
use slim_sys::lock::undisturbed;
use std::sync::atomic::Ordering;
use std::time::Duration;

static MARKS: Marks = Marks::new();

/// How a call got inside.
pub enum Inside {
    /// By its thread's pass.
    Passed(Passed<'static>),
    /// Counted.
    Counted,
}

/// In a forked child: its other threads are not there.
pub fn forget_marks() {
    MARKS.forget_all();
}

/// The calling thread, by the address of its control block, which no other living thread has; 0 where that
/// cannot be told at once.
#[inline(always)]
fn me() -> usize {
    #[cfg(target_arch = "x86_64")]
    {
        let me;
        // SAFETY: on this processor the ABI has the control block's own address at the start of the thread's segment.
        unsafe {
            std::arch::asm!("mov {}, fs:0", out(reg) me, options(readonly, nostack, preserves_flags));
        }
        me
    }
    #[cfg(not(target_arch = "x86_64"))]
    0
}

impl Flow {
    /// Enters the flow, which was found behind `fd`, by the calling thread's pass, and not counted. [`Flow::leave`]
    /// afterwards; if it cannot be, [`Flow::left`] afterwards.
    #[inline(always)]
    pub fn pass_to_receive(&'static self, fd: c_int) -> Result<Inside, Left> {
        self.pass(fd, Purpose::Receive).map(Inside::Passed)
    }

    /// Likewise, with the sending half. [`Flow::leave_sending`] afterwards.
    #[inline(always)]
    pub fn pass_to_send(&'static self, fd: c_int) -> Result<Inside, Left> {
        let passed = self.pass(fd, Purpose::Send)?;
        if self.send.is_free() {
            return Ok(Inside::Passed(passed));
        }
        Err(self.gate.leave_by_pass(me(), passed))
    }

    #[inline(always)]
    fn pass(&'static self, fd: c_int, purpose: Purpose) -> Result<Passed<'static>, Left> {
        let passed = self.gate.pass(&MARKS, me(), purpose)?;
        // The number may have changed hands between the load and the entry.
        if table::is_still(fd, self) {
            return Ok(passed);
        }
        Err(self.gate.leave_by_pass(me(), passed))
    }

    /// Enters the flow, which was found behind `fd`, as one of many, if that is so at once. [`Flow::leave`] afterwards.
    #[inline]
    pub fn enter_to_receive(&'static self, fd: c_int) -> Option<Inside> {
        if !self.gate.enter() {
            return None;
        }
        // As with a pass.
        if table::is_still(fd, self) {
            return Some(Inside::Counted);
        }
        self.leave(Inside::Counted);
        None
    }

    /// Likewise, with the sending half. [`Flow::leave_sending`] afterwards.
    #[inline]
    pub fn enter_to_send(&'static self, fd: c_int) -> Option<Inside> {
        let inside = self.enter_to_receive(fd)?;
        if self.try_take_half() {
            return Some(inside);
        }
        self.leave(inside);
        None
    }

    /// Takes the sending half for a call that is inside, and counted, if nobody has it.
    #[inline]
    pub fn try_take_half(&self) -> bool {
        if !self.send.try_lock() {
            return false;
        }
        if self.gate.is_shared() || self.settle() {
            return true;
        }
        self.send.unlock();
        false
    }

    /// Leaves the gate.
    #[inline(always)]
    pub fn leave(&'static self, inside: Inside) {
        self.left(match inside {
            Inside::Passed(passed) => self.gate.leave_by_pass(me(), passed),
            Inside::Counted => self.gate.leave(),
        });
    }

    /// What there is to do for whoever has just left.
    #[inline(always)]
    pub fn left(&'static self, left: Left) {
        if left.last_and_barred {
            self.left_barred();
        }
    }

    /// Gives the sending half back, and leaves the gate.
    #[inline(always)]
    pub fn leave_sending(&'static self, inside: Inside) {
        if let Inside::Counted = inside {
            self.send.unlock();
        }
        self.mark_dirty();
        self.leave(inside);
    }

    #[cold]
    #[inline(never)]
    fn left_barred(&'static self) {
        sys::keep_errno(|| self.try_recycle());
    }

    /// Keeps new calls out.
    pub fn bar(&self) {
        self.gate.bar();
        self.fence();
    }

    /// Keeps new calls out for good.
    pub(super) fn close(&self) {
        self.gate.close();
        self.fence();
    }

    /// The calling thread does not send on the flow any more.
    pub fn give_back_pass(&self) {
        self.gate.give_back(&MARKS, me());
    }

    /// Whether nobody is inside. It stays so if the gate is barred.
    pub fn idle(&self) -> bool {
        self.gate.idle(&MARKS)
    }

    /// Counts bytes that a call took from the transport.
    #[inline(always)]
    pub fn count(&self, inside: &Inside, n: usize) {
        match inside {
            Inside::Passed(_) => {
                let before = self.received_by_pass.load(Ordering::Relaxed);
                self.received_by_pass
                    .store(before + n as u64, Ordering::Relaxed);
            }
            Inside::Counted => {
                self.received.fetch_add(n as u64, Ordering::Relaxed);
            }
        }
    }

    /// The sending half, of a call that is inside and has it, or of who has locked it.
    ///
    /// # Safety
    /// The caller has it, and lets go of the reference before it gives it back.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn half(&self) -> &mut SendHalf {
        // SAFETY: the caller's contract.
        unsafe { self.send.get() }
    }

    /// Takes the sending half, for control or for a call that is inside.
    pub fn lock_half(&self) {
        self.send.lock();
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
    pub fn unlock_half(&self) {
        self.send.unlock();
    }

    /// The holder of the lock is about to wait in a call that may be its last, or has come back.
    pub fn holder_may_die(&self, may: bool) {
        self.send.may_die(may);
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

    /// Bytes sent since the flow began.
    pub fn sent(&self) -> u64 {
        self.with_half(|s| s.replay.end())
    }

    /// Settles what becomes of the pass, now that the calling thread is about to send without it and has the lock. False
    /// when this is a signal's handler, and the thread has the half already.
    #[cold]
    #[inline(never)]
    fn settle(&self) -> bool {
        let me = me();
        if !self.gate.has_owner() {
            match MARKS.of(me).filter(|_| me != 0 && sys::can_fence()) {
                Some(mark) => self.gate.give_pass(mark),
                None => self.gate.share(),
            }
        } else if self.gate.is_owner(&MARKS, me) {
            return !self.gate.is_owner_sending(&MARKS);
        } else {
            self.gate.share();
            sys::keep_errno(|| {
                sys::fence();
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
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    fn fence(&self) {
        if self.gate.has_owner() {
            self.fence_others();
        }
    }

    /// A thread needs no fence to know what it did itself.
    fn fence_others(&self) {
        if !self.gate.is_owner(&MARKS, me()) {
            sys::keep_errno(sys::fence);
        }
    }
}
