//! Passes: the way in and out of a gate without an atomic read-modify-write.
//!
//! Most flows are written to by one thread only. It gets a pass: it says where it is inside in a [mark](Marks) of its
//! own, with plain stores, and is not counted in the gate's word. So it need not write what other threads write, nor
//! wait for the processor to empty its store buffer; that, four times for each small message, costs as much as all
//! the rest of what SLIM does for it.
//!
//! # Why it is right
//!
//! Both sides write first and read then: the owner of the pass marks that it is inside, and looks whether it may be;
//! control says that it may not, and looks whether it is. If each of them has a full fence between its two steps, at least one
//! sees what the other wrote. The owner has none, for that would cost what is to be saved. Control's `fence` makes
//! one for both: it returns when every thread of the process has gone through a full fence since it was called
//! (`membarrier(2)`). The owner's own fence orders what the compiler does, no more; under loom, which knows no such call, it
//! is a full one.
//!
//! *What a call did inside is visible to control after that.* The mark is taken back with a release, and read with an
//! acquire.
//!
//! *A pass of an earlier life of the flow is good for nothing.* Whoever is about to enter looks at the gate's owner again
//! after it has marked itself: a gate is only [reused](super::Gate::reuse) when no thread is marked as inside, and
//! then has no owner.
//!
//! *A thread is inside by at most one pass.* A signal's handler that finds its thread's mark in use is
//! counted, as is everybody without a pass.

use super::{BARRED, Gate, Left, ONE, SHARED};
use crate::sync::{AtomicUsize, Ordering, light_fence};

/// How many threads of a process can have passes, and one; a power of two.
const MARKS: usize = if cfg!(loom) { 4 } else { 256 };
/// A mark's name is its place in memory, counted from the first.
const SIZE: usize = size_of::<PassMark>();
/// The bits of a gate's word that name its owner's mark.
const OWNER: u64 = ((MARKS - 1) * SIZE) as u64;
const _: () = assert!(SIZE.is_power_of_two() && OWNER < SHARED);

/// What the mark of no thread says.
const NOWHERE: usize = usize::MAX;

/// What a call with a pass does inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Nothing that more than one thread could not do at once.
    Receive,
    /// It writes, as the only one.
    Send,
}

/// Where the threads of a process are inside with their passes. There is one for all gates of a process.
///
/// The first one belongs to nobody.
pub struct Marks([PassMark; MARKS]);

/// The mark of one thread; its own cache line, since it is written by each call.
#[derive(Debug)]
#[repr(align(64))]
struct PassMark {
    /// The thread's name, once the mark is its own. Never changes then: another thread gets the name only
    /// when this one has ended.
    thread: AtomicUsize,
    /// The gate behind which it is, and to what [`Purpose`]; or the thread's name, which is no gate's.
    inside: AtomicUsize,
}

/// Inside a gate by a pass: which mark says so.
#[derive(Debug)]
#[must_use]
pub struct Passed<'a>(&'a PassMark);

impl Marks {
    /// Nobody's yet.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Self(
            [const {
                PassMark {
                    thread: AtomicUsize::new(0),
                    inside: AtomicUsize::new(NOWHERE),
                }
            }; MARKS],
        )
    }

    /// Nobody's yet. (loom's atomics cannot be made in a constant.)
    #[cfg(loom)]
    pub fn new() -> Self {
        Self(std::array::from_fn(|_| PassMark {
            thread: AtomicUsize::new(0),
            inside: AtomicUsize::new(NOWHERE),
        }))
    }

    /// The mark of the calling thread, whose name is `me`: the address of something that no other living thread has.
    /// `None` when too many threads have one.
    pub fn of(&self, me: usize) -> Option<u64> {
        let mut names = (SIZE as u64..=OWNER).step_by(SIZE);
        names.find(|name| {
            let PassMark { thread, inside } = self.named(*name);
            let owner = thread.compare_exchange(0, me, Ordering::AcqRel, Ordering::Acquire);
            if owner.is_ok() {
                inside.store(me, Ordering::Release);
            }
            owner.is_ok() || owner == Err(me)
        })
    }

    /// In a forked child: the other threads are not there, wherever they were.
    pub fn forget_all(&self) {
        for mark in &self.0 {
            let thread = mark.thread.load(Ordering::Relaxed);
            let outside = if thread == 0 { NOWHERE } else { thread };
            mark.inside.store(outside, Ordering::Relaxed);
        }
    }

    #[inline(always)]
    fn named(&self, name: u64) -> &PassMark {
        &self.0[(name & OWNER) as usize / SIZE]
    }
}

#[cfg(not(loom))]
impl Default for Marks {
    fn default() -> Self {
        Self::new()
    }
}

impl Gate {
    /// Gives the pass to the thread with this mark ([`Marks::of`]), unless it is given away. Only inside, counted, and
    /// as the only one who sends.
    pub fn give_pass(&self, mark: u64) {
        if !self.has_owner() {
            self.0.fetch_or(mark & OWNER, Ordering::AcqRel);
        }
    }

    /// The thread named `me` wants in with its pass. `Err` if it has none, or is kept out: then it may
    /// [`enter`](Self::enter) as others do, after it has done what `Left` asks of it.
    ///
    /// # Errors
    /// As after [`leave`](Self::leave): nearly always nothing.
    #[inline(always)]
    pub fn pass<'a>(
        &self,
        marks: &'a Marks,
        me: usize,
        purpose: Purpose,
    ) -> Result<Passed<'a>, Left> {
        let owner = self.0.load(Ordering::Acquire) & OWNER;
        let mark = marks.named(owner);
        // Neither another thread's, nor in use.
        if mark.inside.load(Ordering::Relaxed) != me {
            return Err(Left::default());
        }
        mark.inside.store(self.name(purpose), Ordering::Relaxed);
        light_fence();
        // All but the count: nothing bars, the pass is good, and it is this one.
        if self.0.load(Ordering::Acquire) % ONE != owner {
            return Err(self.leave_by_pass(me, Passed(mark)));
        }
        Ok(Passed(mark))
    }

    /// A call that got in by its pass is through, and has accounted for what it did.
    #[inline(always)]
    pub fn leave_by_pass(&self, me: usize, passed: Passed<'_>) -> Left {
        passed.0.inside.store(me, Ordering::Release);
        light_fence();
        Left {
            last_and_barred: self.0.load(Ordering::Acquire) & BARRED != 0,
        }
    }

    /// Whether somebody has the pass. After [`bar`](Self::bar), [`close`](Self::close) or [`share`](Self::share), or after
    /// the lock was taken that the owner looks at when it is inside, the caller then makes a fence, before
    /// it asks [`idle`](Self::idle) or [`is_owner_sending`](Self::is_owner_sending).
    #[inline]
    #[must_use]
    pub fn has_owner(&self) -> bool {
        self.0.load(Ordering::Acquire) & OWNER != 0
    }

    /// Whether the pass is that of the thread named `me`.
    #[must_use]
    pub fn is_owner(&self, marks: &Marks, me: usize) -> bool {
        let mark = marks.named(self.0.load(Ordering::Acquire));
        mark.thread.load(Ordering::Relaxed) == me
    }

    /// The thread named `me` needs its pass no more, if it has it: control need not make a fence for it from here on.
    pub fn give_back(&self, marks: &Marks, me: usize) {
        let mark = marks.named(self.0.load(Ordering::Acquire));
        // Not in a signal's handler that has interrupted a call of the thread's with a pass.
        if mark.thread.load(Ordering::Relaxed) == me && mark.inside.load(Ordering::Relaxed) == me {
            self.0.fetch_and(!OWNER, Ordering::AcqRel);
        }
    }

    /// From now on nobody gets in by the pass: more than one thread sends.
    pub fn share(&self) {
        self.0.fetch_or(SHARED, Ordering::AcqRel);
    }

    /// Whether the pass is good for nothing.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.0.load(Ordering::Acquire) & SHARED != 0
    }

    /// Whether the owner of the pass is inside to send.
    #[must_use]
    pub fn is_owner_sending(&self, marks: &Marks) -> bool {
        self.owner_is(marks) == self.name(Purpose::Send)
    }

    /// Whether the owner of the pass is inside.
    pub(super) fn is_owner_inside(&self, marks: &Marks) -> bool {
        let inside = self.owner_is(marks);
        inside == self.name(Purpose::Receive) || inside == self.name(Purpose::Send)
    }

    fn owner_is(&self, marks: &Marks) -> usize {
        let mark = marks.named(self.0.load(Ordering::Acquire));
        mark.inside.load(Ordering::Acquire)
    }

    /// What a mark says of somebody who is inside here.
    fn name(&self, purpose: Purpose) -> usize {
        let receiving = std::ptr::from_ref(self).addr();
        match purpose {
            Purpose::Receive => receiving,
            // No other gate's, since they are aligned.
            Purpose::Send => receiving - 1,
        }
    }
}
