//! Entering the gate of a flow by a descriptor number: the part that [`slim_stream`] leaves to its front end.
//!
//! The table decides whether a number still is the flow's. The last call that leaves an unreferenced flow makes it reusable. The agent
//! is told of the first bytes that are sent after its sweep has stopped.

use super::is_still;
use crate::flow::Flow;
use crate::{runtime, sys};
use libc::c_int;
use slim_core::gate::Left;
use slim_stream::Inside;

impl Flow {
    /// Enters the flow that was found behind `fd`, by the calling thread's pass, uncounted. Call [`Flow::leave`] afterwards; on
    /// failure call [`Flow::left`].
    #[inline(always)]
    pub fn pass_to_receive(&'static self, fd: c_int) -> Result<Inside, Left> {
        self.stream.pass_to_receive(|| is_still(fd, self))
    }

    /// Likewise, with the sending half. Call [`Flow::leave_sending`] afterwards.
    #[inline(always)]
    pub fn pass_to_send(&'static self, fd: c_int) -> Result<Inside, Left> {
        self.stream.pass_to_send(|| is_still(fd, self))
    }

    /// Enters the flow that was found behind `fd`, counted; `None` if the gate is barred. Call [`Flow::leave`] afterwards.
    #[inline]
    pub fn enter_to_receive(&'static self, fd: c_int) -> Option<Inside> {
        if !self.stream.enter() {
            return None;
        }
        // The number may have become another file's between the load and the entry.
        if is_still(fd, self) {
            return Some(Inside::Counted);
        }
        self.leave(Inside::Counted);
        None
    }

    /// Likewise, with the sending half; `None` if that is taken, too. Call [`Flow::leave_sending`] afterwards.
    #[inline]
    pub fn enter_to_send(&'static self, fd: c_int) -> Option<Inside> {
        let inside = self.enter_to_receive(fd)?;
        if self.stream.try_take_half() {
            return Some(inside);
        }
        self.leave(inside);
        None
    }

    /// Leaves the gate.
    #[inline(always)]
    pub fn leave(&'static self, inside: Inside) {
        self.left(self.stream.leave(inside));
    }

    /// The work that remains for a call that has just left.
    #[inline(always)]
    pub fn left(&'static self, left: Left) {
        if left.last_and_barred {
            self.left_barred();
        }
    }

    /// Gives the sending half back, and leaves the gate.
    #[inline(always)]
    pub fn leave_sending(&'static self, inside: Inside) {
        let left = self.stream.leave_sending(inside, || self.tell_dirty());
        self.left(left);
    }

    #[cold]
    #[inline(never)]
    fn left_barred(&'static self) {
        sys::keep_errno(|| self.try_recycle());
    }

    /// Marks the flow for the agent's sweep; called after each send.
    pub fn mark_dirty(&self) {
        self.stream.mark_dirty(|| self.tell_dirty());
    }

    fn tell_dirty(&self) {
        sys::keep_errno(|| runtime::with_agent(|a| a.dirty(self.token())));
    }
}
