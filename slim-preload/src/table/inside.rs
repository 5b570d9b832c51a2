//! How calls get inside of a flow by a descriptor number: what [`slim_stream`] leaves to its front end.
//!
//! Whether a number still is the flow's, the table says. Whoever is last out of a flow that nobody has any more gives it back,
//! and the agent hears of the first bytes that are sent after it has stopped looking.

use super::is_still;
use crate::flow::Flow;
use crate::{runtime, sys};
use libc::c_int;
use slim_core::gate::Left;
use slim_stream::Inside;

impl Flow {
    /// Enters the flow, which was found behind `fd`, by the calling thread's pass, and not counted. [`Flow::leave`]
    /// afterwards; if it cannot be, [`Flow::left`] afterwards.
    #[inline(always)]
    pub fn pass_to_receive(&'static self, fd: c_int) -> Result<Inside, Left> {
        self.stream.pass_to_receive(|| is_still(fd, self))
    }

    /// Likewise, with the sending half. [`Flow::leave_sending`] afterwards.
    #[inline(always)]
    pub fn pass_to_send(&'static self, fd: c_int) -> Result<Inside, Left> {
        self.stream.pass_to_send(|| is_still(fd, self))
    }

    /// Enters the flow, which was found behind `fd`, as one of many, if that is so at once. [`Flow::leave`] afterwards.
    #[inline]
    pub fn enter_to_receive(&'static self, fd: c_int) -> Option<Inside> {
        if !self.stream.enter() {
            return None;
        }
        // The number may have changed hands between the load and the entry.
        if is_still(fd, self) {
            return Some(Inside::Counted);
        }
        self.leave(Inside::Counted);
        None
    }

    /// Likewise, with the sending half. [`Flow::leave_sending`] afterwards.
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
