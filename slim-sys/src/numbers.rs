//! The lowest free descriptor number belongs to the application.
//!
//! The kernel gives whatever is created the lowest number that is free, and there is no way to ask
//! for another one: it can only be moved afterwards. Programs count on that number (`close(0);
//! open(…)`), or know that a number is free and put something there (`dup2`). So a descriptor of
//! ours must not be seen before it has been moved:
//!
//! * [`make`] is the time from creating a descriptor of ours until it is moved;
//! * [`take`] and [`take_and_wait`] are calls of the application that give out, overwrite or close numbers.
//!
//! The two exclude each other, but neither waits for its own kind: making takes some microseconds,
//! and a call that takes a number has it after some hundred nanoseconds. A call in [`take_and_wait`]
//! can also sleep when it has its number (`accept`, or `open` of a FIFO), be cancelled, or be left by
//! `longjmp`. So a call that began some milliseconds ago is taken to sleep, and making does not wait for it. A call in [`take`] does not
//! sleep, so making waits until its thread has run. Signals are blocked there: a handler that connected would wait for the call that it
//! has interrupted.
//!
//! A forked child gets a copy of every descriptor, and closes those that are registered as ours
//! ([`crate::fds`]). So a fork waits until each of them is registered or closed ([`whole`]).
//!
//! Everything here may run in signal handlers and in vforked children. No handler interrupts [`make`] or [`whole`]: one that
//! forks would wait for what it has interrupted, and one that jumps out would hold up all forks and closes to come.

use std::cell::Cell;
use std::hint;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::copies::{How, joined};
use crate::lock::block_signals;
use crate::{as_agent, futex_wait, futex_wake_all, in_agent, now, pid};

/// How often a thread in [`make`] checks again at once, and how long it sleeps between checks from then on.
const SHORTLY: u32 = 50;
const NAP: Duration = Duration::from_micros(20);
/// Bound on waiting for threads in [`make`]. A thread that takes longer, on however busy a machine, never ends.
const MADE: Duration = Duration::from_secs(2);

/// Number of agents in this process. Only they make descriptors.
static AGENTS: AtomicU32 = AtomicU32::new(0);
/// The process that has them. A vforked child shares this memory, but has descriptors of its own.
static PROCESS: AtomicI32 = AtomicI32::new(0);
/// Threads in [`make`].
static MAKERS: AtomicU32 = AtomicU32::new(0);
/// Threads that sleep until no thread is in [`make`].
static SLEEPERS: AtomicU32 = AtomicU32::new(0);
/// Calls in [`take`]. They do not sleep, and no handler interrupts them: they end as soon as their thread runs.
static PROMPT: Takers = Takers::new(MADE);
/// Calls in [`take_and_wait`]. A call that began this long ago sleeps, and has its number: the kernel chooses it first of all. A shorter
/// limit would be wrong on a busy machine, whose scheduler stops threads for milliseconds.
static PATIENT: Takers = Takers::new(Duration::from_millis(5));

/// How many calls of one kind can be waited for at a time; further ones are not waited for.
const SLOTS: usize = 64;

/// Calls that take numbers.
struct Takers {
    /// When each of them began, in nanoseconds ([`now`]); 0 in a free slot. A call that never returns leaves its slot behind, so
    /// a slot is free again when its call began [`limit`](Self::limit) ago.
    slots: [AtomicU64; SLOTS],
    /// Making does not wait for a call that began this long ago.
    limit: Duration,
}

/// A call's slot, and when the call began.
type Taker = Option<(&'static AtomicU64, u64)>;

/// Threads in [`whole`].
static CHANGING: AtomicU32 = AtomicU32::new(0);
/// Threads that fork.
static FORKING: AtomicU32 = AtomicU32::new(0);
/// Bound on waiting for threads that fork or are in [`whole`]. A thread that takes longer never ends.
const FORKED: Duration = Duration::from_secs(2);

thread_local! {
    /// Whether this thread is in [`whole`].
    static IN_CHANGE: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f`, which creates a descriptor of ours and moves it away, while no call of the application
/// takes a number. As [`as_agent`], too.
pub fn make<R>(f: impl FnOnce() -> R) -> R {
    whole(|| apart(f))
}

/// Runs `f` while no call of the application takes a number. As [`as_agent`], too.
pub fn apart<R>(f: impl FnOnce() -> R) -> R {
    match joined() {
        Some(other) => other.run(How::Apart, || apart_here(f)),
        None => apart_here(f),
    }
}

fn apart_here<R>(f: impl FnOnce() -> R) -> R {
    as_agent(|| {
        MAKERS.fetch_add(1, Ordering::SeqCst);
        PROMPT.wait();
        PATIENT.wait();
        let made = f();
        if MAKERS.fetch_sub(1, Ordering::SeqCst) == 1 && SLEEPERS.load(Ordering::SeqCst) != 0 {
            futex_wake_all(&MAKERS);
        }
        made
    })
}

/// Runs `f`, which creates a descriptor of ours and registers it, or closes one: no fork comes in between. `f` must not
/// take a lock that a fork takes before [`before_fork`]; a lock that a fork takes after it must not be held here.
pub fn whole<R>(f: impl FnOnce() -> R) -> R {
    match joined() {
        // In the order of fork handlers: the preload library's are registered first, so they run last before a fork.
        Some(other) => whole_here(|| other.run(How::Whole, f)),
        None => whole_here(f),
    }
}

fn whole_here<R>(f: impl FnOnce() -> R) -> R {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            IN_CHANGE.set(false);
            leave();
        }
    }
    if IN_CHANGE.get() {
        return f();
    }
    // Dropped last.
    let _signals = block_signals();
    enter();
    IN_CHANGE.set(true);
    let _leave = Leave;
    f()
}

fn enter() {
    CHANGING.fetch_add(1, Ordering::SeqCst);
    if FORKING.load(Ordering::SeqCst) != 0 {
        wait_for_forks();
    }
}

fn leave() {
    if CHANGING.fetch_sub(1, Ordering::SeqCst) == 1 && FORKING.load(Ordering::SeqCst) != 0 {
        futex_wake_all(&CHANGING);
    }
}

/// Lets forks go on, until there are none.
#[cold]
fn wait_for_forks() {
    let begun = Instant::now();
    while FORKING.load(Ordering::SeqCst) != 0 && begun.elapsed() < FORKED {
        leave();
        wait_until_zero(&FORKING, FORKED, begun);
        CHANGING.fetch_add(1, Ordering::SeqCst);
    }
}

/// A thread is about to fork: waits until no thread is in [`whole`], and keeps others out of it.
pub fn before_fork() {
    FORKING.fetch_add(1, Ordering::SeqCst);
    // A signal handler that forks may have interrupted its own thread in `whole`: waiting for that would never end.
    if CHANGING.load(Ordering::SeqCst) != 0 && !IN_CHANGE.get() {
        wait_until_zero(&CHANGING, FORKED, Instant::now());
    }
}

/// After a fork, on either side.
pub fn after_fork(child: bool) {
    if child {
        forget_in_child();
    } else if FORKING.fetch_sub(1, Ordering::SeqCst) == 1 {
        futex_wake_all(&FORKING);
    }
}

fn wait_until_zero(word: &AtomicU32, limit: Duration, begun: Instant) {
    loop {
        let now = word.load(Ordering::SeqCst);
        let left = limit.saturating_sub(begun.elapsed());
        if now == 0 || left.is_zero() {
            return;
        }
        let _ = futex_wait(word, now, Some(left));
    }
}

/// Runs `f`, a call of the application that gives out, overwrites or closes descriptor numbers,
/// while no descriptor of ours has a number that it should not have. `f` does not sleep; signals are blocked meanwhile.
#[inline]
pub fn take<R>(f: impl FnOnce() -> R) -> R {
    // A vforked child that is killed in here would leave its parent's thread with signals that are taken to be blocked.
    if !Takers::counts() || pid() != PROCESS.load(Ordering::Relaxed) {
        return f();
    }
    // Dropped last.
    let _signals = block_signals();
    PROMPT.take(f)
}

/// Likewise, but `f` may sleep once it has its number, and may be interrupted, cancelled, or left by `longjmp`: nothing of ours must
/// have to be undone should `f` never return.
#[inline]
pub fn take_and_wait<R>(f: impl FnOnce() -> R) -> R {
    PATIENT.take(f)
}

/// An agent is about to be started.
pub fn begin() {
    if let Some(other) = joined() {
        other.agent(true);
    }
    PROCESS.store(pid(), Ordering::SeqCst);
    AGENTS.fetch_add(1, Ordering::SeqCst);
}

/// An agent has ended, or could not be started. When the last one has, the application's calls are made as they are, with no other
/// system call beside them: a filter of the application may forbid that.
pub fn end() {
    if let Some(other) = joined() {
        other.agent(false);
    }
    AGENTS.fetch_sub(1, Ordering::SeqCst);
}

/// Resets the state in a forked child, which has no other threads.
pub fn forget_in_child() {
    AGENTS.store(0, Ordering::Relaxed);
    MAKERS.store(0, Ordering::Relaxed);
    SLEEPERS.store(0, Ordering::Relaxed);
    PROMPT.forget();
    PATIENT.forget();
    // A signal handler that forked returns to the code that it has interrupted, which may be in `whole`.
    CHANGING.store(IN_CHANGE.get().into(), Ordering::Relaxed);
    FORKING.store(0, Ordering::Relaxed);
}

impl Takers {
    const fn new(limit: Duration) -> Self {
        Self {
            slots: [const { AtomicU64::new(0) }; SLOTS],
            limit,
        }
    }

    /// Whether calls of this thread are to be waited for: there is an agent, and they are not its own.
    #[inline]
    fn counts() -> bool {
        AGENTS.load(Ordering::Relaxed) != 0 && !in_agent()
    }

    #[inline]
    fn take<R>(&'static self, f: impl FnOnce() -> R) -> R {
        if !Self::counts() {
            return f();
        }
        let mut taker = self.enter();
        if MAKERS.load(Ordering::SeqCst) != 0 {
            taker = self.step_back(taker);
        }
        let taken = f();
        leave_slot(taker);
        taken
    }

    #[inline]
    fn enter(&'static self) -> Taker {
        let now = now();
        // Threads begin to look at different slots.
        let first = IN_CHANGE.with(|own| std::ptr::from_ref(own).addr() >> 6);
        (0..SLOTS).find_map(|n| {
            let slot = &self.slots[first.wrapping_add(n) % SLOTS];
            let was = slot.load(Ordering::Relaxed);
            let free = was == 0 || self.is_old(was, now);
            let taken = |()| {
                let taken = slot.compare_exchange(was, now, Ordering::SeqCst, Ordering::Relaxed);
                taken.ok().map(|_| (slot, now))
            };
            free.then_some(()).and_then(taken)
        })
    }

    fn is_old(&self, begun: u64, now: u64) -> bool {
        u128::from(now.saturating_sub(begun)) >= self.limit.as_nanos()
    }

    /// Waits until the calls that have begun have ended, or sleep. Those that begin from now on see a maker, and wait.
    fn wait(&self) {
        for slot in &self.slots {
            let begun = slot.load(Ordering::SeqCst);
            let mut looks = 0;
            while begun != 0 && slot.load(Ordering::SeqCst) == begun && !self.is_old(begun, now()) {
                looks += 1;
                match looks {
                    ..SHORTLY => hint::spin_loop(),
                    // Not `sched_yield`: on a busy machine each one costs the time slices of all others.
                    _ => thread::sleep(NAP),
                }
            }
        }
    }

    /// Lets the makers go on, until there are none.
    #[cold]
    fn step_back(&'static self, mut taker: Taker) -> Taker {
        let begun = Instant::now();
        while MAKERS.load(Ordering::SeqCst) != 0 && begun.elapsed() < MADE {
            leave_slot(taker);
            SLEEPERS.fetch_add(1, Ordering::SeqCst);
            wait_until_zero(&MAKERS, MADE, begun);
            SLEEPERS.fetch_sub(1, Ordering::SeqCst);
            taker = self.enter();
        }
        taker
    }

    fn forget(&self) {
        let slots = self.slots.iter();
        slots.for_each(|slot| slot.store(0, Ordering::Relaxed));
    }
}

/// Frees the slot, unless another call has taken it over.
#[inline]
fn leave_slot(taker: Taker) {
    if let Some((slot, begun)) = taker {
        let _ = slot.compare_exchange(begun, 0, Ordering::SeqCst, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    const LONG: Duration = Duration::from_millis(50);

    #[test]
    fn a_fork_waits_for_what_has_begun_and_holds_up_what_has_not() {
        static DONE: AtomicU32 = AtomicU32::new(0);
        let change = |begun: mpsc::Sender<()>| {
            make(|| {
                begun.send(()).unwrap();
                thread::sleep(LONG);
                // In a change already.
                whole(|| DONE.fetch_add(1, Ordering::SeqCst));
            });
        };
        let (tell, begun) = mpsc::channel();
        let first = tell.clone();
        let first = thread::spawn(move || change(first));
        begun.recv().unwrap();
        before_fork();
        assert_eq!(DONE.load(Ordering::SeqCst), 1);
        let second = thread::spawn(move || change(tell));
        thread::sleep(LONG);
        assert!(begun.try_recv().is_err(), "it has begun before the fork");
        after_fork(false);
        begun.recv().unwrap();
        before_fork();
        assert_eq!(DONE.load(Ordering::SeqCst), 2);
        after_fork(false);
        [first, second].into_iter().for_each(|t| t.join().unwrap());
    }

    #[test]
    fn no_handler_comes_in_between() {
        let blocked = || {
            let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
            let mask = status.lines().find_map(|l| l.strip_prefix("SigBlk:"));
            let mask = u64::from_str_radix(mask.unwrap().trim(), 16).unwrap();
            mask >> (libc::SIGUSR1 - 1) & 1 == 1
        };
        begin();
        assert!(!blocked() && !take_and_wait(blocked));
        assert!(make(blocked) && whole(blocked) && apart(blocked) && take(blocked));
        assert!(!blocked());
    }

    #[test]
    fn a_handler_that_forks_does_not_wait_for_itself() {
        let begun = Instant::now();
        whole(|| {
            before_fork();
            after_fork(false);
        });
        assert!(begun.elapsed() < FORKED / 2);
    }
}
