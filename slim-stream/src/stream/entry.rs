//! How calls enter and leave a stream.
//!
//! The pass works as a biased lock ([`slim_core::gate::pass`]). The thread that first sends on a stream gets it: this owner enters
//! and leaves, and has the sending half meanwhile, without an atomic read-modify-write. All other threads are counted in the gate
//! and take the lock of the half. A thread with the lock has the half only when the owner is not in the middle of a send. An owner
//! that finds the lock taken turns back; `membarrier(2)` covers an owner that may have read the lock too early. When another
//! thread sends as well, the pass ends.
//!
//! A call finds the stream by a name, a descriptor number for example, which may belong to another flow since the call looked it
//! up. So the methods that enter take a closure `still`, which looks the name up again. It runs inside, so its answer stays true.

use super::Stream;
use slim_core::gate::Left;
use slim_core::gate::pass::{Marks, Passed, Purpose};
use slim_sys::keep_errno;
use std::sync::atomic::Ordering;

pub(super) static MARKS: Marks = Marks::new();

/// How a call has entered.
pub enum Inside {
    /// By its thread's pass.
    Passed(Passed<'static>),
    /// Counted in the gate.
    Counted,
}

/// Forgets the marks of all threads, in a forked child: the other threads do not exist there.
pub fn forget_marks() {
    MARKS.forget_all();
}

/// Identifies the calling thread by the address of its control block, which no other living thread has. 0 on processors where
/// that address is not cheap to read.
#[inline(always)]
pub(super) fn me() -> usize {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        let me;
        // SAFETY: the ABI of this processor places the control block's own address at the start of the thread's segment.
        unsafe {
            std::arch::asm!("mov {}, fs:0", out(reg) me, options(readonly, nostack, preserves_flags));
        }
        me
    }
    // Miri lacks assembly. The address of a thread-local variable identifies the thread as well.
    #[cfg(miri)]
    {
        std::thread_local!(static ME: u64 = const { 0 });
        ME.with(|me| std::ptr::from_ref(me).addr())
    }
    #[cfg(not(any(target_arch = "x86_64", miri)))]
    0
}

impl Stream {
    /// Enters by the calling thread's pass, without being counted. Call [`Stream::leave`] afterwards.
    ///
    /// # Errors
    /// The call has not entered. The front end must handle [`Left`] as after [`Stream::leave`]; it nearly always asks for nothing.
    #[inline(always)]
    pub fn pass_to_receive(&self, still: impl FnOnce() -> bool) -> Result<Inside, Left> {
        self.pass(Purpose::Receive, still).map(Inside::Passed)
    }

    /// [`Stream::pass_to_receive`], but also takes the sending half. Call [`Stream::leave_sending`] afterwards.
    ///
    /// # Errors
    /// As for [`Stream::pass_to_receive`].
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

    /// Enters, counted in the gate. False if calls are barred. Call [`Stream::leave`] afterwards.
    #[inline]
    #[must_use]
    pub fn enter(&self) -> bool {
        self.gate.enter()
    }

    /// Leaves. [`Left`] tells whether the stream is barred and control may be waiting for this call.
    #[inline(always)]
    pub fn leave(&self, inside: Inside) -> Left {
        match inside {
            Inside::Passed(passed) => self.gate.leave_by_pass(me(), passed),
            Inside::Counted => self.gate.leave(),
        }
    }

    /// Returns the sending half, after bytes may have been sent, and leaves. `tell` is called when the agent must be told of
    /// unacknowledged bytes.
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

    /// Bars new calls until [`Stream::open`].
    pub fn bar(&self) {
        self.gate.bar();
        self.fence();
    }

    /// Admits calls again.
    pub fn open(&self) {
        self.gate.open();
    }

    /// Bars new calls for good.
    pub fn close(&self) {
        self.gate.close();
        self.fence();
    }

    /// Whether calls are barred.
    pub fn is_barred(&self) -> bool {
        self.gate.is_barred()
    }

    /// Whether calls are barred because the flow is suspended, see [`Gate::is_suspended`](slim_core::gate::Gate::is_suspended).
    pub fn is_suspended(&self) -> bool {
        self.gate.is_suspended()
    }

    /// Whether no call is inside. If calls are barred, that remains true.
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

    /// Fences all threads, unless the caller is the owner of the pass: a thread sees its own writes without a fence.
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
        // From here on this thread enters by its pass, unless the name belongs to another flow (`still` is false).
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
    fn a_barred_stream_admits_no_call_and_the_last_one_to_leave_is_told() {
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
        stream.holder_may_be_cancelled(true);
        assert!(stream.waits_with_half());
        // The handler's own request is served at once.
        assert_eq!(stream.sent(), 0);
        let elsewhere = AtomicBool::new(true);
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| stream.waits_with_half());
            elsewhere.store(asked.join().unwrap(), Ordering::Relaxed);
        });
        assert!(!elsewhere.into_inner());
        stream.holder_may_be_cancelled(false);
        let _ = stream.leave_sending(inside, || ());
    }
}
