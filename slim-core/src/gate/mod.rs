//! Lets data calls in, and keeps them out while a flow is suspended.
//!
//! A data call is *inside* from before it looks up the transport until it has accounted for the
//! bytes that the kernel took or gave. Control bars the gate, waits until no call is inside, and
//! then owns the flow: the counters stand still, the buffers belong to control, and the transport
//! can be exchanged. No lock is held over a blocking call. A call that sleeps in the kernel while
//! the gate is barred must be woken by control, which shuts the transport down. The call then
//! leaves, and cannot enter again.
//!
//! ```text
//!            bar()                    idle()                      open()
//!   open ───────────► barred, n inside ───────► barred, none ────────────► open
//!                        │  ▲                       inside
//!                 leave()└──┘ n falls, and never rises
//! ```
//!
//! All state is in one word. Its upper half is the number of calls inside. Its lower half holds two bits that bar the gate,
//! and the state of the [`pass`].
//!
//! # Why it is right
//!
//! *After `bar()`, once `idle()` has returned true, no call is inside until `open()`.* All changes
//! are read-modify-writes of one word, so they have one order (`reuse()` is a store, but needs an
//! idle gate). A call enters only by an exchange that found neither bit set. After `bar()` no such
//! exchange succeeds, so the number can only fall. When `idle()` reads 0, every call that ever
//! entered has left.
//!
//! *What a call did inside is visible to control after that.* `leave()` releases; `idle()` acquires
//! and reads a value from the chain of read-modify-writes behind every `leave()`, so it
//! synchronises with all of them. In the other direction `open()` releases, and a call that enters
//! acquires.
//!
//! One thread may enter and leave without any of this: see [`pass`].

#[cfg(all(test, loom))]
mod loom_tests;
pub mod pass;

use crate::sync::{AtomicU64, Ordering};
use pass::Marks;

const SUSPENDED: u64 = 1 << 31;
const CLOSED: u64 = 1 << 30;
const BARRED: u64 = SUSPENDED | CLOSED;
/// The pass is invalid.
const SHARED: u64 = 1 << 29;
/// One call inside.
const ONE: u64 = 1 << 32;

/// The gate in front of one flow. See the [module](self).
#[derive(Debug)]
pub struct Gate(AtomicU64);

/// What a call learns when it leaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct Left {
    /// The gate is barred, and this was the last counted call or the call with the pass: control may be waiting for it.
    pub last_and_barred: bool,
}

impl Gate {
    /// An open gate with no call inside.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Gate(AtomicU64::new(0))
    }

    /// An open gate with no call inside. (loom's atomics cannot be made in a constant.)
    #[cfg(loom)]
    pub fn new() -> Self {
        Gate(AtomicU64::new(0))
    }

    /// Lets a data call in, unless the flow is suspended or closed. Returns whether the call is
    /// inside; if so, it must [`leave`](Gate::leave).
    #[inline]
    #[must_use]
    pub fn enter(&self) -> bool {
        let seen = self.0.load(Ordering::Relaxed);
        // Not add-and-undo: a call that is turned away must not be counted even for a moment, or
        // the last call to leave would not know that it is the last.
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

    /// Tries again after another thread has changed the word.
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

    /// Ends a data call that entered and has accounted for what it did.
    #[inline]
    pub fn leave(&self) -> Left {
        let before = self.0.fetch_sub(ONE, Ordering::Release);
        debug_assert!(before >= ONE, "leave without enter");
        // Only one branch while the gate is not barred.
        Left {
            last_and_barred: before & BARRED != 0 && last(before),
        }
    }

    /// Keeps new calls out until [`open`](Gate::open). Returns whether the gate was open until now.
    pub fn bar(&self) -> bool {
        self.0.fetch_or(SUSPENDED, Ordering::AcqRel) & BARRED == 0
    }

    /// Keeps new calls out for good.
    pub fn close(&self) {
        self.0.fetch_or(CLOSED, Ordering::AcqRel);
    }

    /// Whether no call is inside. The answer stays true only while the gate is barred.
    #[must_use]
    pub fn idle(&self, marks: &Marks) -> bool {
        self.0.load(Ordering::Acquire) < ONE && !self.is_owner_inside(marks)
    }

    /// Lets calls in again after [`bar`](Gate::bar). A closed gate stays closed.
    pub fn open(&self) {
        self.0.fetch_and(!SUSPENDED, Ordering::AcqRel);
    }

    /// Opens a closed gate for another flow that takes the place of the old one. To be called only
    /// when no call of the old flow is inside ([`idle`](Self::idle) after [`close`](Self::close)).
    pub fn reuse(&self) {
        self.0.store(0, Ordering::Release);
    }

    /// Whether calls are kept out.
    #[must_use]
    pub fn is_barred(&self) -> bool {
        self.0.load(Ordering::Acquire) & BARRED != 0
    }

    /// Whether calls are kept out because the flow is suspended. A call inside that got an error asks this to learn whether
    /// the error came from a transport that is out of use. A flow that is only closed still has its transport under its
    /// descriptor number.
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
    fn a_pass_belongs_to_one_thread_until_the_gate_is_reused() {
        let (gate, marks) = (Gate::new(), Marks::new());
        let (mine, other) = (marks.of(ME).unwrap(), marks.of(2 * ME).unwrap());
        assert_eq!(marks.of(ME), Some(mine));
        assert!(gate.pass(&marks, ME, Purpose::Send).is_err());
        gate.give_pass(mine);
        gate.give_pass(other);
        assert!(gate.pass(&marks, 2 * ME, Purpose::Send).is_err());
        let passed = gate.pass(&marks, ME, Purpose::Send).unwrap();
        // A thread that is inside one gate by its pass cannot enter another gate by its pass.
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
    fn at_most_255_threads_get_marks() {
        let marks = Marks::new();
        let all: Vec<_> = (1..=400).map(|n| marks.of(n * ME)).collect();
        assert_eq!(all.iter().flatten().count(), 255);
        assert!(!all.contains(&Some(0)));
    }
}
