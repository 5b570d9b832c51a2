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
//! Everything lies in one 32-bit word: two bits that bar, and the number of calls inside.
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

#[cfg(all(test, loom))]
mod loom_tests;

use crate::sync::{AtomicU32, Ordering};

const SUSPENDED: u32 = 1 << 31;
const CLOSED: u32 = 1 << 30;
const BARRED: u32 = SUSPENDED | CLOSED;
const COUNT: u32 = CLOSED - 1;

/// The gate in front of one flow. See the [module](self).
#[derive(Debug)]
pub struct Gate(AtomicU32);

/// What the caller of [`Gate::leave`] has to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Left {
    /// The gate is barred and this was the last call inside: control may be waiting for it.
    pub last_and_barred: bool,
}

impl Gate {
    /// An open gate with nobody inside.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Gate(AtomicU32::new(0))
    }

    /// An open gate with nobody inside. (loom's atomics cannot be made in a constant.)
    #[cfg(loom)]
    pub fn new() -> Self {
        Gate(AtomicU32::new(0))
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
                    .compare_exchange(seen, seen + 1, Ordering::Acquire, Ordering::Relaxed);
            return match entered {
                Ok(_) => true,
                Err(now) => self.enter_again(now),
            };
        }
        false
    }

    /// After somebody else has changed the word in between.
    #[cold]
    fn enter_again(&self, mut seen: u32) -> bool {
        while seen & BARRED == 0 {
            let with_us = seen + 1;
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
        let before = self.0.fetch_sub(1, Ordering::Release);
        debug_assert!(before & COUNT > 0, "leave without enter");
        // One branch where nothing bars.
        Left {
            last_and_barred: before > COUNT && last(before),
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
    pub fn idle(&self) -> bool {
        self.0.load(Ordering::Acquire) & COUNT == 0
    }

    /// Lets calls in again after [`bar`](Gate::bar). A closed gate stays closed.
    pub fn open(&self) {
        self.0.fetch_and(!SUSPENDED, Ordering::AcqRel);
    }

    /// Opens a gate again that was closed for good: what it guards has begun a new life. Only when
    /// nobody is inside who entered the old one ([`idle`](Self::idle) after [`close`](Self::close)).
    pub fn reuse(&self) {
        self.0.fetch_and(!BARRED, Ordering::AcqRel);
    }

    /// Whether calls are kept out.
    #[must_use]
    pub fn is_barred(&self) -> bool {
        self.0.load(Ordering::Acquire) & BARRED != 0
    }

    /// Whether calls are kept out for good.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.0.load(Ordering::Acquire) & CLOSED != 0
    }
}

#[cold]
fn last(before: u32) -> bool {
    before & COUNT == 1
}

impl Default for Gate {
    fn default() -> Self {
        Gate::new()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Op {
        Enter,
        Leave,
        Bar,
        Open,
        Close,
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            6 => Just(Op::Enter),
            6 => Just(Op::Leave),
            3 => Just(Op::Bar),
            3 => Just(Op::Open),
            1 => Just(Op::Close),
        ]
    }

    proptest! {
        #[test]
        fn does_what_two_flags_and_a_number_do(ops in proptest::collection::vec(op(), 0..80)) {
            let gate = Gate::new();
            let (mut inside, mut suspended, mut closed) = (0u32, false, false);
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
                    Op::Bar => {
                        prop_assert_eq!(gate.bar(), !barred);
                        suspended = true;
                    }
                    Op::Open => {
                        gate.open();
                        suspended = false;
                    }
                    Op::Close => {
                        gate.close();
                        closed = true;
                    }
                }
                prop_assert_eq!(gate.idle(), inside == 0);
                prop_assert_eq!(gate.is_barred(), suspended || closed);
                prop_assert_eq!(gate.is_closed(), closed);
            }
        }
    }
}
