//! How calls get inside of a stream and out again.
//!
//! The thread that first sends on a stream gets its pass ([`slim_core::gate::pass`]): it gets in and out, and has
//! the sending half meanwhile, without an atomic read-modify-write. All others are counted in the gate and take
//! the lock of the half. Who has the lock has the half only when the owner of the pass is not in the middle of
//! something: an owner that finds the lock taken turns back, and for one that may have looked too early there is
//! `membarrier(2)`. When another thread sends as well, the pass ends.
//!
//! A call comes here by a name of the stream, a descriptor number perhaps, that may have changed hands since the call
//! looked it up. So the methods that enter are given `still`, which looks again: asked inside, the answer stays true.

use super::Stream;
use slim_core::gate::Left;
use slim_core::gate::pass::{Marks, Passed, Purpose};
use slim_sys::keep_errno;
use std::sync::atomic::Ordering;

pub(super) static MARKS: Marks = Marks::new();

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
pub(super) fn me() -> usize {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        let me;
        // SAFETY: on this processor the ABI has the control block's own address at the start of the thread's segment.
        unsafe {
            std::arch::asm!("mov {}, fs:0", out(reg) me, options(readonly, nostack, preserves_flags));
        }
        me
    }
    // Miri knows no assembly; a thread's own variable tells threads apart as well.
    #[cfg(miri)]
    {
        std::thread_local!(static ME: u64 = const { 0 });
        ME.with(|me| std::ptr::from_ref(me).addr())
    }
    #[cfg(not(any(target_arch = "x86_64", miri)))]
    0
}

impl Stream {
    /// Enters by the calling thread's pass, and not counted. [`Stream::leave`] afterwards; if it cannot be, what is to be
    /// done as after that.
    ///
    /// # Errors
    /// As after [`Stream::leave`]: nearly always nothing.
    #[inline(always)]
    pub fn pass_to_receive(&self, still: impl FnOnce() -> bool) -> Result<Inside, Left> {
        self.pass(Purpose::Receive, still).map(Inside::Passed)
    }

    /// Likewise, with the sending half. [`Stream::leave_sending`] afterwards.
    ///
    /// # Errors
    /// Likewise.
    #[inline(always)]
    pub fn pass_to_send(&self, still: impl FnOnce() -> bool) -> Result<Inside, Left> {
        let passed = self.pass(Purpose::Send, still)?;
        if self.send.is_free() {
            return Ok(Inside::Passed(passed));
        }
        Err(self.gate.leave_by_pass(me(), passed))
    }

    #[inline(always)]
    fn pass(
        &self,
        purpose: Purpose,
        still: impl FnOnce() -> bool,
    ) -> Result<Passed<'static>, Left> {
        let passed = self.gate.pass(&MARKS, me(), purpose)?;
        if still() {
            return Ok(passed);
        }
        Err(self.gate.leave_by_pass(me(), passed))
    }

    /// Enters as one of many, and is counted. False if nobody may. [`Stream::leave`] afterwards.
    #[inline]
    #[must_use]
    pub fn enter(&self) -> bool {
        self.gate.enter()
    }

    /// Leaves. The last one out of a stream that is barred may have something to do for its front end.
    #[inline(always)]
    pub fn leave(&self, inside: Inside) -> Left {
        match inside {
            Inside::Passed(passed) => self.gate.leave_by_pass(me(), passed),
            Inside::Counted => self.gate.leave(),
        }
    }

    /// Gives the sending half back, after something may have been sent, and leaves. `tell` is called when the agent has to
    /// hear that there are unacknowledged bytes.
    #[inline(always)]
    pub fn leave_sending(&self, inside: Inside, tell: impl FnOnce()) -> Left {
        if let Inside::Counted = inside {
            self.unlock_half();
        }
        self.mark_dirty(tell);
        self.leave(inside)
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

    /// Keeps new calls out until [`Stream::open`].
    pub fn bar(&self) {
        self.gate.bar();
        self.fence();
    }

    /// Lets calls in again.
    pub fn open(&self) {
        self.gate.open();
    }

    /// Keeps new calls out for good.
    pub fn close(&self) {
        self.gate.close();
        self.fence();
    }

    /// Whether calls are kept out.
    pub fn is_barred(&self) -> bool {
        self.gate.is_barred()
    }

    /// Whether calls are kept out because the transport is away, see [`Gate::is_suspended`](slim_core::gate::Gate::is_suspended).
    pub fn is_suspended(&self) -> bool {
        self.gate.is_suspended()
    }

    /// Whether nobody is inside. It stays so if calls are kept out.
    pub fn idle(&self) -> bool {
        self.gate.idle(&MARKS)
    }

    /// The calling thread does not send on the stream any more.
    pub fn give_back_pass(&self) {
        self.gate.give_back(&MARKS, me());
    }

    fn fence(&self) {
        if self.gate.has_owner() {
            self.fence_others();
        }
    }

    /// A thread needs no fence to know what it did itself.
    pub(super) fn fence_others(&self) {
        if !self.gate.is_owner(&MARKS, me()) {
            keep_errno(slim_sys::fence);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    fn counted(stream: &Stream) -> Inside {
        assert!(stream.enter());
        Inside::Counted
    }

    #[test]
    fn the_first_sender_gets_the_pass_and_loses_it_to_a_second_one() {
        slim_sys::register_fence();
        let stream = Stream::new();
        assert!(stream.pass_to_send(|| true).is_err());
        let inside = counted(&stream);
        assert!(stream.try_take_half());
        let mut told = 0;
        let _ = stream.leave_sending(inside, || told += 1);
        assert_eq!(told, 1);
        // From here on this thread passes, unless the stream is not the caller's any more.
        assert!(stream.pass_to_receive(|| false).is_err());
        let inside = stream.pass_to_send(|| true).expect("it has the pass");
        stream.count(&inside, 3);
        let _ = stream.leave_sending(inside, || told += 1);
        assert_eq!((told, stream.received()), (1, 3));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let inside = counted(&stream);
                assert!(stream.try_take_half());
                let _ = stream.leave_sending(inside, || ());
            });
        });
        assert!(stream.pass_to_send(|| true).is_err());
    }

    #[test]
    fn nobody_enters_what_is_barred_and_the_last_one_out_is_told() {
        let stream = Stream::new();
        let (first, second) = (counted(&stream), counted(&stream));
        stream.bar();
        assert!(!stream.enter() && !stream.idle());
        assert!(!stream.leave(first).last_and_barred);
        assert!(stream.leave(second).last_and_barred);
        assert!(stream.idle() && stream.is_suspended());
        stream.open();
        let inside = counted(&stream);
        let _ = stream.leave(inside);
        stream.close();
        stream.open();
        assert!(stream.is_barred() && !stream.is_suspended());
        stream.renew();
        stream.begin();
        assert!(stream.enter());
    }

    #[test]
    fn a_handler_finds_that_its_thread_waits_with_the_half() {
        let stream = Stream::new();
        let inside = counted(&stream);
        assert!(stream.try_take_half());
        assert!(!stream.waits_with_half());
        stream.holder_may_die(true);
        assert!(stream.waits_with_half());
        // What it asks for it gets at once.
        assert_eq!(stream.sent(), 0);
        let elsewhere = AtomicBool::new(true);
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| stream.waits_with_half());
            elsewhere.store(asked.join().unwrap(), Ordering::Relaxed);
        });
        assert!(!elsewhere.into_inner());
        stream.holder_may_die(false);
        let _ = stream.leave_sending(inside, || ());
    }
}
