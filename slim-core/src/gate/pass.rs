//! Passes: entering and leaving a gate without an atomic read-modify-write.
//!
//! Most flows are written by one thread only. That thread gets a pass: it records in a [mark](Marks) of its own, with plain
//! stores, which gate it is inside, and the gate's word does not count it. So the thread need not write a word that other
//! threads write, nor wait for the processor to empty its store buffer. Four such waits for each small message would cost
//! as much as everything else that SLIM does for the message.
//!
//! # Why it is right
//!
//! Both sides write first and read second. The owner of the pass sets its mark, and then reads whether the gate lets it in.
//! Control bars the gate, and then reads the mark. If each side has a full fence between its two steps, at least one side
//! sees what the other wrote. The owner has no full fence, because that is the cost to be saved. Control's fence serves
//! both sides: `membarrier(2)` returns when every thread of the process has executed a full fence since the call. The
//! owner's own fence only restrains the compiler; under loom, which has no such call, it is a full fence.
//!
//! *What a call did inside is visible to control after that.* The mark is taken back with a release, and read with an
//! acquire.
//!
//! *A pass from before a [reuse](super::Gate::reuse) of the gate is invalid.* A thread that enters reads the gate's owner
//! again after it has set its mark. A gate is reused only when no mark says that a thread is inside, and has no owner then.
//!
//! *A thread is inside by at most one pass.* A signal handler that finds its thread's mark in use enters as a counted call,
//! like every call without a pass.

use super::{BARRED, Gate, Left, ONE, SHARED};
use crate::sync::{AtomicUsize, Ordering, light_fence};

/// Number of marks: one more than the threads of a process that can have passes; a power of two.
const MARKS: usize = if cfg!(loom) { 4 } else { 256 };
/// Size of a mark. The name of a mark is its offset in memory from the first one.
const SIZE: usize = size_of::<PassMark>();
/// The bits of a gate's word that name its owner's mark.
const OWNER: u64 = ((MARKS - 1) * SIZE) as u64;
const _: () = assert!(SIZE.is_power_of_two() && OWNER < SHARED);

/// Content of a mark that belongs to no thread.
const NOWHERE: usize = usize::MAX;

/// What a call with a pass does inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The call does only what several threads may do at once.
    Receive,
    /// The call sends. No other call may send at the same time.
    Send,
}

/// The marks of a process's threads: which gate each thread is inside by its pass. A process has one `Marks` for all its
/// gates.
///
/// The first mark belongs to no thread, because its name means that a gate has no owner.
pub struct Marks([PassMark; MARKS]);

/// The mark of one thread. It has a cache line of its own, because each call writes it.
#[derive(Debug)]
#[repr(align(64))]
struct PassMark {
    /// The name of the thread that the mark belongs to, 0 if it belongs to none. It never changes once it is set: another
    /// thread gets the same name only when this one has ended.
    thread: AtomicUsize,
    /// Inside a gate: that gate and the call's [`Purpose`]. Outside: the thread's name, which is the address of no gate.
    inside: AtomicUsize,
}

/// A call that is inside a gate by a pass, with the mark that says so.
#[derive(Debug)]
#[must_use]
pub struct Passed<'a>(&'a PassMark);

impl Marks {
    /// Marks that belong to no thread yet.
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

    /// Marks that belong to no thread yet. (loom's atomics cannot be made in a constant.)
    #[cfg(loom)]
    pub fn new() -> Self {
        Self(std::array::from_fn(|_| PassMark {
            thread: AtomicUsize::new(0),
            inside: AtomicUsize::new(NOWHERE),
        }))
    }

    /// The name of the calling thread's mark. The thread's name is `me`: the address of something that no other living
    /// thread has. `None` if all marks belong to other threads.
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

    /// In a forked child: marks all threads as outside, because those that were inside do not exist there.
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
    /// Gives the pass to the thread with this mark ([`Marks::of`]), unless the gate has an owner. The caller must be inside
    /// as a counted call, and must be the only one that sends.
    pub fn give_pass(&self, mark: u64) {
        if !self.has_owner() {
            self.0.fetch_or(mark & OWNER, Ordering::AcqRel);
        }
    }

    /// Lets the thread named `me` in by its pass.
    ///
    /// # Errors
    /// The thread has no valid pass, or the gate is barred. The caller handles [`Left`] as after [`leave`](Self::leave), which
    /// nearly always means nothing to do. Then it may [`enter`](Self::enter) as a counted call.
    #[inline(always)]
    pub fn pass<'a>(
        &self,
        marks: &'a Marks,
        me: usize,
        purpose: Purpose,
    ) -> Result<Passed<'a>, Left> {
        let owner = self.0.load(Ordering::Acquire) & OWNER;
        let mark = marks.named(owner);
        // The mark is another thread's, or is in use.
        if mark.inside.load(Ordering::Relaxed) != me {
            return Err(Left::default());
        }
        mark.inside.store(self.name(purpose), Ordering::Relaxed);
        light_fence();
        // All bits but the count: the gate is not barred, the pass is valid, and the owner is the same.
        if self.0.load(Ordering::Acquire) % ONE != owner {
            return Err(self.leave_by_pass(me, Passed(mark)));
        }
        Ok(Passed(mark))
    }

    /// Ends a call that entered by its pass and has accounted for what it did.
    #[inline(always)]
    pub fn leave_by_pass(&self, me: usize, passed: Passed<'_>) -> Left {
        passed.0.inside.store(me, Ordering::Release);
        light_fence();
        Left {
            last_and_barred: self.0.load(Ordering::Acquire) & BARRED != 0,
        }
    }

    /// Whether a thread has the pass. If so, the caller must make a fence after it has called [`bar`](Self::bar),
    /// [`close`](Self::close) or [`share`](Self::share), or has taken the lock that the owner checks when inside, and before
    /// it asks [`idle`](Self::idle) or [`is_owner_sending`](Self::is_owner_sending).
    #[inline]
    #[must_use]
    pub fn has_owner(&self) -> bool {
        self.0.load(Ordering::Acquire) & OWNER != 0
    }

    /// Whether the pass belongs to the thread named `me`.
    #[must_use]
    pub fn is_owner(&self, marks: &Marks, me: usize) -> bool {
        let mark = marks.named(self.0.load(Ordering::Acquire));
        mark.thread.load(Ordering::Relaxed) == me
    }

    /// Gives the pass back, if the thread named `me` has it: from here on control need not make a fence.
    pub fn give_back(&self, marks: &Marks, me: usize) {
        let mark = marks.named(self.0.load(Ordering::Acquire));
        // The second check fails in a signal handler that has interrupted its thread's call by the pass: the pass stays.
        if mark.thread.load(Ordering::Relaxed) == me && mark.inside.load(Ordering::Relaxed) == me {
            self.0.fetch_and(!OWNER, Ordering::AcqRel);
        }
    }

    /// Makes the pass invalid, because more than one thread sends.
    pub fn share(&self) {
        self.0.fetch_or(SHARED, Ordering::AcqRel);
    }

    /// Whether the pass was made invalid by [`share`](Self::share).
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

    /// Content of the mark of a thread that is inside this gate.
    fn name(&self, purpose: Purpose) -> usize {
        let receiving = std::ptr::from_ref(self).addr();
        match purpose {
            Purpose::Receive => receiving,
            // Gates are aligned, so this is the address of no other gate.
            Purpose::Send => receiving - 1,
        }
    }
}
