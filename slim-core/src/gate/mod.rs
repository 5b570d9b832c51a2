//! Lets data calls in, and keeps them out while a flow is suspended.
//!
//! A data call is *inside* from before it looks up the transport until what the kernel took or
//! gave has been accounted. Control bars the gate, waits until nobody is inside, and then owns the
//! flow: counters stand still, buffers are its own, the transport can be exchanged. No lock is
//! held over a blocking call; a call that sleeps in the kernel while the gate is barred has to be
//! woken by control (it shuts the transport down), comes out, and does not get in again.
//!
//! ```text
//!            bar()                    idle()                      open()
//!   open ───────────► barred, n inside ───────► barred, nobody ──────────► open
//!                        │  ▲                        inside
//!                 leave()└──┘ n falls, and never rises
//! ```
//!
//! Everything lies in one word: the number of calls inside in its upper half; two bits that bar, and what is
//! said of the [`pass`], in its lower half.
//!
//! # Why it is right
//!
//! *Nobody is inside once `bar()` has returned and `idle()` has said so, until `open()`.* All
//! changes are read-modify-writes of one word, so they have one order. A call gets in only by an
//! exchange that found neither bit set; after `bar()` no such exchange succeeds, so the number can
//! only fall. When `idle()` reads 0, every call that ever got in has left.
//!
//! *What a call did inside is visible to control after that.* `leave()` releases; `idle()` acquires
//! and reads a value from the chain of read-modify-writes behind every `leave()`, so it
//! synchronises with all of them. In the other direction `open()` releases and a call that gets in
//! acquires.
//!
//! One thread may get in and out without any of this: see [`pass`].

#[cfg(all(test, loom))]
mod loom_tests;
pub mod pass;

use crate::sync::{AtomicU64, Ordering};
use pass::Marks;

const SUSPENDED: u64 = 1 << 31;
const CLOSED: u64 = 1 << 30;
const BARRED: u64 = SUSPENDED | CLOSED;
/// The pass is good for nothing.
const SHARED: u64 = 1 << 29;
/// One call inside.
const ONE: u64 = 1 << 32;

/// The gate in front of one flow. See the [module](self).
#[derive(Debug)]
pub struct Gate(AtomicU64);

/// What a call that leaves has to know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct Left {
    /// The gate is barred and this was the last call inside, or the one with the pass: control may be waiting for it.
    pub last_and_barred: bool,
}

impl Gate {
    /// An open gate with nobody inside.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Gate(AtomicU64::new(0))
    }

    /// An open gate with nobody inside. (loom's atomics cannot be made in a constant.)
    #[cfg(loom)]
    pub fn new() -> Self {
        Gate(AtomicU64::new(0))
    }

    /// A data call wants in. If it may not (the flow is suspended or closed) nothing happened; if
    /// it may, it must [`leave`](Gate::leave).
    #[inline]
    #[must_use]
    pub fn enter(&self) -> bool {
        let seen = self.0.load(Ordering::Relaxed);
        // Not add-and-undo: a call that is turned away must not be counted even for a moment, or
        // the last one out would not know that it is the last.
        if seen & BARRED == 0 {
            let entered =
                self.0
                    .compare_exchange(seen, seen + ONE, Ordering::Acquire, Ordering::Relaxed);
            return match entered {
                Ok(_) => true,
                Err(now) => self.enter_again(now),
            };
        }
        false
    }

    /// After somebody else has changed the word in between.
    #[cold]
    fn enter_again(&self, mut seen: u64) -> bool {
        while seen & BARRED == 0 {
            let with_us = seen + ONE;
            match self
                .0
                .compare_exchange_weak(seen, with_us, Ordering::Acquire, Ordering::Relaxed)
            {
                Ok(_) => return true,
                Err(now) => seen = now,
            }
        }
        false
    }

    /// A data call that got in is through, and has accounted for what it did.
    #[inline]
    pub fn leave(&self) -> Left {
        let before = self.0.fetch_sub(ONE, Ordering::Release);
        debug_assert!(before >= ONE, "leave without enter");
        // One branch where nothing bars.
        Left {
            last_and_barred: before & BARRED != 0 && last(before),
        }
    }

    /// Keeps new calls out until [`open`](Gate::open). Says whether the gate was open until now.
    pub fn bar(&self) -> bool {
        self.0.fetch_or(SUSPENDED, Ordering::AcqRel) & BARRED == 0
    }

    /// Keeps new calls out for good.
    pub fn close(&self) {
        self.0.fetch_or(CLOSED, Ordering::AcqRel);
    }

    /// Whether nobody is inside. Only if the gate is barred will it stay so.
    #[must_use]
    pub fn idle(&self, marks: &Marks) -> bool {
        self.0.load(Ordering::Acquire) < ONE && !self.is_owner_inside(marks)
    }

    /// Lets calls in again after [`bar`](Gate::bar). A closed gate stays closed.
    pub fn open(&self) {
        self.0.fetch_and(!SUSPENDED, Ordering::AcqRel);
    }

    /// Opens a gate again that was closed for good: what it guards has begun a new life. Only when
    /// nobody is inside who entered the old one ([`idle`](Self::idle) after [`close`](Self::close)).
    pub fn reuse(&self) {
        self.0.store(0, Ordering::Release);
    }

    /// Whether calls are kept out.
    #[must_use]
    pub fn is_barred(&self) -> bool {
        self.0.load(Ordering::Acquire) & BARRED != 0
    }

    /// Whether calls are kept out because the transport is away. A call inside that has met an error finds out by this
    /// whether it met it on a transport that counts no more; that of a flow that is only closed is still under its number.
    #[must_use]
    pub fn is_suspended(&self) -> bool {
        self.0.load(Ordering::Acquire) & SUSPENDED != 0
    }

    /// Whether calls are kept out for good.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.0.load(Ordering::Acquire) & CLOSED != 0
    }
}

#[cold]
fn last(before: u64) -> bool {
    before < 2 * ONE
}

impl Default for Gate {
    fn default() -> Self {
        Gate::new()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::pass::Purpose;
    use super::*;
    use proptest::prelude::*;

    const ME: usize = 4096;

    #[derive(Clone, Debug)]
    enum Op {
        Enter,
        Leave,
        Pass(Purpose),
        LeaveByPass,
        Bar,
        Open,
        Share,
        Close,
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            6 => Just(Op::Enter),
            6 => Just(Op::Leave),
            6 => prop_oneof![Just(Purpose::Receive), Just(Purpose::Send)].prop_map(Op::Pass),
            6 => Just(Op::LeaveByPass),
            3 => Just(Op::Bar),
            3 => Just(Op::Open),
            1 => Just(Op::Share),
            1 => Just(Op::Close),
        ]
    }

    proptest! {
        #[test]
        fn does_what_three_flags_a_number_and_a_mark_do(ops in proptest::collection::vec(op(), 0..80)) {
            let (gate, marks) = (Gate::new(), Marks::new());
            gate.give_pass(marks.of(ME).unwrap());
            let (mut inside, mut suspended, mut shared, mut closed) = (0u32, false, false, false);
            let mut passed = None;
            for op in ops {
                let barred = suspended || closed;
                match op {
                    Op::Enter => {
                        prop_assert_eq!(gate.enter(), !barred);
                        inside += u32::from(!barred);
                    }
                    Op::Leave if inside > 0 => {
                        inside -= 1;
                        let last_and_barred = barred && inside == 0;
                        prop_assert_eq!(gate.leave(), Left { last_and_barred });
                    }
                    Op::Leave => {}
                    Op::Pass(purpose) => {
                        let may = !barred && !shared && passed.is_none();
                        match gate.pass(&marks, ME, purpose) {
                            Ok(p) => {
                                prop_assert!(may);
                                passed = Some((p, purpose));
                            }
                            Err(left) => {
                                prop_assert!(!may);
                                prop_assert_eq!(left.last_and_barred, barred && passed.is_none());
                            }
                        }
                    }
                    Op::LeaveByPass => if let Some((p, _)) = passed.take() {
                        let left = gate.leave_by_pass(ME, p);
                        prop_assert_eq!(left.last_and_barred, barred);
                    }
                    Op::Bar => {
                        prop_assert_eq!(gate.bar(), !barred);
                        suspended = true;
                    }
                    Op::Open => {
                        gate.open();
                        suspended = false;
                    }
                    Op::Share => {
                        gate.share();
                        shared = true;
                    }
                    Op::Close => {
                        gate.close();
                        closed = true;
                    }
                }
                prop_assert_eq!(gate.idle(&marks), inside == 0 && passed.is_none());
                let sends = passed.as_ref().is_some_and(|p| p.1 == Purpose::Send);
                prop_assert_eq!(gate.is_owner_sending(&marks), sends);
                prop_assert_eq!(gate.is_suspended(), suspended);
                prop_assert_eq!(gate.is_barred(), suspended || closed);
                prop_assert_eq!(gate.is_closed(), closed);
                prop_assert_eq!(gate.is_shared(), shared);
            }
        }
    }

    #[test]
    fn a_pass_is_one_threads_for_one_life() {
        let (gate, marks) = (Gate::new(), Marks::new());
        let (mine, other) = (marks.of(ME).unwrap(), marks.of(2 * ME).unwrap());
        assert_eq!(marks.of(ME), Some(mine));
        assert!(gate.pass(&marks, ME, Purpose::Send).is_err());
        gate.give_pass(mine);
        gate.give_pass(other);
        assert!(gate.pass(&marks, 2 * ME, Purpose::Send).is_err());
        let passed = gate.pass(&marks, ME, Purpose::Send).unwrap();
        // Behind another gate than the one that the thread is inside of already.
        let second = Gate::new();
        second.give_pass(mine);
        assert!(second.pass(&marks, ME, Purpose::Send).is_err());
        assert!(second.idle(&marks) && !gate.idle(&marks));
        let _ = gate.leave_by_pass(ME, passed);
        gate.share();
        gate.close();
        gate.reuse();
        assert!(!gate.has_owner() && !gate.is_shared());
        assert!(gate.pass(&marks, ME, Purpose::Send).is_err());
    }

    #[test]
    fn marks_are_not_endless() {
        let marks = Marks::new();
        let all: Vec<_> = (1..=400).map(|n| marks.of(n * ME)).collect();
        assert_eq!(all.iter().flatten().count(), 255);
        assert!(!all.contains(&Some(0)));
    }
}
