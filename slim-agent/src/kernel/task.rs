//! Tasks of the runtime.
//!
//! Tasks share the agent's state by `Rc`, and never run at the same time: the runtime has one thread, or is driven by one
//! thread at a time ([`crate::driven`]).

use std::cell::Cell;
use std::future::Future;
use std::mem::ManuallyDrop;
use std::panic::{self, AssertUnwindSafe};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::task::{self, AbortHandle, JoinHandle, JoinSet};

thread_local! {
    /// Number of tasks that this thread has run.
    static RUNS: Cell<u64> = const { Cell::new(0) };
    /// A task has panicked since [`forget_panics`].
    static HAS_PANICKED: Cell<bool> = const { Cell::new(false) };
}

/// Number of times that this thread has run a task.
pub(crate) fn runs() -> u64 {
    RUNS.get()
}

/// Whether a task has panicked in this thread since [`forget_panics`]. No task runs from then on.
pub(crate) fn has_panicked() -> bool {
    HAS_PANICKED.get()
}

/// Lets the tasks of another runtime run in this thread.
pub(crate) fn forget_panics() {
    HAS_PANICKED.set(false);
}

/// Starts a task. Must run inside the runtime.
pub(crate) fn spawn(task: impl Future<Output = ()> + 'static) -> JoinHandle<()> {
    task::spawn(Confined::new(task))
}

/// Starts a task of the set, as [`spawn`].
pub(crate) fn spawn_on(
    set: &mut JoinSet<()>,
    task: impl Future<Output = ()> + 'static,
) -> AbortHandle {
    set.spawn(Confined::new(task))
}

/// A task that stays within the agent.
struct Confined(ManuallyDrop<Pin<Box<dyn Future<Output = ()>>>>);

// SAFETY: the runtime has no threads of its own. It runs tasks, and drops them, in the thread that drives it (`Runtime::block_on`)
// or drops it. That is the agent's thread, or a thread that has the lock of `Driven`, which orders its accesses after those of earlier
// threads. What tasks share by `Rc`, only tasks and `EventLoop` hold, and `EventLoop` is moved and used in the same way. Nothing that
// stays with its thread lives in a task over an `await`: no lock guard, and no reference to a thread-local variable.
unsafe impl Send for Confined {}

impl Confined {
    fn new(task: impl Future<Output = ()> + 'static) -> Self {
        Confined(ManuallyDrop::new(Box::pin(task)))
    }
}

impl Future for Confined {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        RUNS.set(RUNS.get() + 1);
        if HAS_PANICKED.get() {
            return Poll::Pending;
        }
        let task = &mut *self.0;
        // The runtime would end this task only, and go on with the others, whatever state it has left behind.
        let polled = panic::catch_unwind(AssertUnwindSafe(|| task.as_mut().poll(context)));
        polled.unwrap_or_else(|_| {
            HAS_PANICKED.set(true);
            Poll::Pending
        })
    }
}

impl Drop for Confined {
    fn drop(&mut self) {
        // After a panic, destructors may meet anything.
        if !HAS_PANICKED.get() {
            // SAFETY: not used again.
            unsafe { ManuallyDrop::drop(&mut self.0) };
        }
    }
}
