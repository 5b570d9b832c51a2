//! An agent without a thread: the application's threads drive its event loop.
//!
//! One thread drives at a time. Its signals are blocked meanwhile, and it counts as the agent's own code, as the agent's thread does. The
//! runtime's epoll instance is readable when there is something to do: sockets, timers and commands are all watched there.

use std::collections::BTreeSet;
use std::io;
use std::mem::{self, MaybeUninit};
use std::os::fd::{AsRawFd, RawFd};
use std::panic;
use std::process;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{self, Timespec};
use slim_core::config::Policy;
use slim_sys::{OwnFd, SignalsBlocked, as_agent, fds, proc};
use tokio::runtime::Handle;

use crate::commands::command::CommandReceiver;
use crate::event_loop::{EventLoop, Parts, Stop};
use crate::events::{self, Log};
use crate::failure::panic::{self as failure, Survivor};
use crate::kernel::sys::during;
use crate::kernel::task;

/// Longest sleep of a waiting thread that no other thread can wake, because it got no descriptor for that.
const SLICE: Duration = Duration::from_millis(1);

/// Longest time for which a busy thread does not drive the agent, in nanoseconds.
const AT_TIMES: u64 = 10_000_000;

/// The event loop, for whichever thread drives it.
pub(crate) struct Driven {
    state: Mutex<DrivenState>,
    /// The runtime's epoll instance.
    epoll: RawFd,
    /// The process that has the agent. A forked child has a copy of the loop, and shares its epoll instance.
    pid: u32,
    /// When a thread last drove it ([`slim_sys::now`]).
    driven_at: AtomicU64,
    /// Event counters of threads that wait until the agent has done something.
    sleepers: Mutex<Vec<RawFd>>,
}

struct DrivenState {
    stage: DrivenStage,
    /// The descriptors that the runtime watches; see [`fds::watched`].
    watched: BTreeSet<RawFd>,
}

enum DrivenStage {
    Running(RunningLoop),
    /// A task has panicked: every flow is plain TCP, or has its error.
    Panicked(Rc<Survivor>),
    Retired,
}

/// The loop, with what outlives a panic of it.
struct RunningLoop {
    event_loop: EventLoop,
    survivor: Rc<Survivor>,
}

// SAFETY: as `EventLoop`: the survivor is shared with the loop, and used under the same lock.
unsafe impl Send for DrivenState {}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Driven {
    /// Creates the event loop.
    pub(crate) fn start(parts: Parts, commands: CommandReceiver) -> io::Result<Self> {
        let wake = commands.as_raw_fd();
        let mut state = DrivenState {
            stage: DrivenStage::Retired,
            watched: BTreeSet::new(),
        };
        let building = Building(parts, commands);
        let built = apart(|| {
            let building = building;
            state.within(None, |stage| build(building, stage))
        });
        built.map_err(during("start a thread"))??;
        let Some(epoll) = epoll_of(wake) else {
            // /proc cannot be read without a free descriptor either.
            let why = slim_sys::eventfd().err();
            let why = why.unwrap_or_else(|| io::Error::other("no entry in /proc/self/fdinfo"));
            return Err(during("find the descriptor of the event loop")(why));
        };
        Ok(Driven {
            state: Mutex::new(state),
            epoll,
            pid: process::id(),
            driven_at: AtomicU64::new(0),
            sleepers: Mutex::default(),
        })
    }

    /// The descriptor that is readable when there is something to do.
    pub(crate) fn descriptor(&self) -> RawFd {
        self.epoll
    }

    /// Does what there is to do, unless another thread is doing that. Does not sleep.
    pub(crate) fn drive(&self) {
        match self.state.try_lock() {
            Ok(mut state) => self.run(&mut state),
            Err(TryLockError::Poisoned(e)) => self.run(&mut e.into_inner()),
            Err(TryLockError::WouldBlock) => {}
        }
    }

    /// As [`drive`](Self::drive), if that was last done a while ago. For threads that are always busy, and never ask whether the descriptor
    /// is readable.
    pub(crate) fn drive_at_times(&self) {
        if slim_sys::now().saturating_sub(self.driven_at.load(Ordering::Relaxed)) > AT_TIMES {
            self.drive();
        }
    }

    /// Does what there is to do. If another thread is doing that, waits until it has done it.
    fn drive_all(&self) {
        let mut state = locked(&self.state);
        if slim_sys::ready(self.epoll, libc::POLLIN) != 0 {
            self.run(&mut state);
        }
    }

    /// Waits until the descriptor has one of these events of poll(2), or until the agent has done something, at most `limit`.
    pub(crate) fn wait_for(&self, fd: RawFd, events: i16, limit: Duration) {
        let ready = slim_sys::poll_two((fd, events), (self.epoll, libc::POLLIN), limit);
        if ready.1 {
            self.drive_all();
        }
    }

    /// Drives the agent until `done` returns true, at most `limit`. Returns whether it did. Sleeps while there is nothing to do.
    pub(crate) fn drive_until(&self, limit: Duration, mut done: impl FnMut() -> bool) -> bool {
        let begun = Instant::now();
        let sleeper = self.sleeper();
        loop {
            self.drive_all();
            if let Some(sleeper) = &sleeper {
                slim_sys::reset_eventfd(sleeper.0.raw());
            }
            if done() {
                return true;
            }
            let left = limit.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return false;
            }
            match &sleeper {
                Some(sleeper) => self.wait_for(sleeper.0.raw(), libc::POLLIN, left),
                None => drop(slim_sys::poll(
                    self.epoll,
                    libc::POLLIN,
                    Some(left.min(SLICE)),
                )),
            }
        }
    }

    /// Whether the agent has been told to end, and has ended, or has panicked.
    pub(crate) fn is_over(&self) -> bool {
        !matches!(locked(&self.state).stage, DrivenStage::Running(_))
    }

    /// Wakes threads that wait until the agent has done something.
    pub(crate) fn wake_sleepers(&self) {
        let sleepers = locked(&self.sleepers);
        sleepers.iter().for_each(|fd| slim_sys::signal_eventfd(*fd));
    }

    fn sleeper(&self) -> Option<Sleeper<'_>> {
        let counter = slim_sys::eventfd().ok()?;
        locked(&self.sleepers).push(counter.raw());
        Some(Sleeper(counter, self))
    }

    fn run(&self, state: &mut DrivenState) {
        // In a forked child the agent belongs to the parent.
        if matches!(state.stage, DrivenStage::Retired) || process::id() != self.pid {
            return;
        }
        self.driven_at.store(slim_sys::now(), Ordering::Relaxed);
        let ran = apart(|| {
            let file = match &state.stage {
                DrivenStage::Running(running) => running.event_loop.events_file(),
                _ => None,
            };
            state.within(file, |stage| advance(stage, self.epoll));
        });
        if ran.is_err() {
            // The descriptor stays readable. The caller would try again at once.
            slim_sys::nap(SLICE);
        }
        self.wake_sleepers();
    }
}

/// A thread that waits until the agent has done something.
struct Sleeper<'a>(OwnFd, &'a Driven);

impl Drop for Sleeper<'_> {
    fn drop(&mut self) {
        locked(&self.1.sleepers).retain(|fd| *fd != self.0.raw());
    }
}

impl DrivenState {
    /// Runs `f` with the variables of this thread that belong to the agent.
    fn within<R>(&mut self, file: Option<RawFd>, f: impl FnOnce(&mut DrivenStage) -> R) -> R {
        fds::swap_watched(&mut self.watched);
        task::forget_panics();
        events::use_file(file);
        let r = f(&mut self.stage);
        events::use_file(None);
        fds::swap_watched(&mut self.watched);
        r
    }
}

/// What the loop is built of. It is in one thread at a time.
struct Building(Parts, CommandReceiver);

// SAFETY: the starting thread has created all of it, and waits while another one builds the loop. The providers are `Send`.
unsafe impl Send for Building {}

fn build(Building(parts, commands): Building, stage: &mut DrivenStage) -> io::Result<()> {
    let commands = Rc::new(commands);
    let required = parts.config().policy == Policy::Required;
    let log = Log::new(parts.config().log);
    let survivor = Survivor::new(commands.clone(), None, log, required);
    let building = || EventLoop::build(parts, commands, survivor.clone());
    let event_loop = failure::caught(building)
        .unwrap_or_else(|why| Err(io::Error::other(format!("internal error ({why})"))))?;
    *stage = DrivenStage::Running(RunningLoop {
        event_loop,
        survivor,
    });
    Ok(())
}

/// Does what there is to do.
fn advance(stage: &mut DrivenStage, epoll: RawFd) {
    let why = match stage {
        DrivenStage::Running(running) if running.survivor.is_lost() => failure::LOST.to_owned(),
        DrivenStage::Running(running) => {
            match failure::caught(|| running.event_loop.run_until_idle()) {
                Ok(Stop::Idle | Stop::Busy) => return,
                Ok(Stop::Retired) => return *stage = DrivenStage::Retired,
                Ok(Stop::Panicked) => "internal error".to_owned(),
                Err(why) => format!("internal error ({why})"),
            }
        }
        DrivenStage::Panicked(survivor) => {
            // Nothing is left to be done after a second panic.
            let _ = failure::caught(|| survivor.serve());
            return;
        }
        DrivenStage::Retired => return,
    };
    if let DrivenStage::Running(running) = mem::replace(stage, DrivenStage::Retired) {
        // Its destructors may meet anything.
        mem::forget(running.event_loop);
        watch_commands_only(epoll, running.survivor.wake_number());
        let _ = failure::caught(|| running.survivor.end_flows(&why));
        *stage = DrivenStage::Panicked(running.survivor);
    }
}

/// Nothing reads the sockets of the runtime any more: takes them out of its epoll instance, and leaves the descriptor that commands make
/// readable.
fn watch_commands_only(epoll: RawFd, wake: RawFd) {
    fds::for_each_watched(|fd| {
        if fd != wake {
            let _ = event::epoll::delete(slim_sys::at(epoll), slim_sys::at(fd));
        }
    });
    let at_once = Timespec::default();
    let mut buffer = [const { MaybeUninit::<event::epoll::Event>::uninit() }; 64];
    // Forgets the wake-ups of the runtime itself.
    while event::epoll::wait(slim_sys::at(epoll), &mut buffer, Some(&at_once))
        .is_ok_and(|(events, _)| !events.is_empty())
    {}
}

/// Runs `f` as the agent's code. Another thread runs it if this one cannot: no runtime may run inside another, or in a thread that ends
/// and has destroyed the variables of the runtime.
///
/// # Errors
/// The other thread cannot be started.
fn apart<R: Send>(f: impl FnOnce() -> R + Send) -> io::Result<R> {
    let is_outside = Handle::try_current().is_err_and(|e| e.is_missing_context());
    if is_outside && events::is_usable() && failure::is_usable() {
        return Ok(as_agent(f));
    }
    let blocked = SignalsBlocked::new();
    let ran = thread::scope(|scope| {
        let thread = thread::Builder::new().spawn_scoped(scope, || as_agent(f));
        drop(blocked);
        thread.map(ScopedJoinHandle::join)
    });
    Ok(ran?.unwrap_or_else(|panic| panic::resume_unwind(panic)))
}

/// The epoll instance that watches this descriptor.
fn epoll_of(watched: RawFd) -> Option<RawFd> {
    let watches = |info: &str| {
        let mut numbers = info.lines().filter_map(|line| line.strip_prefix("tfd:"));
        numbers.any(|rest| {
            let number = rest.split_whitespace().next();
            number.and_then(|n| n.parse().ok()) == Some(watched)
        })
    };
    let mut open = Vec::new();
    slim_sys::for_each_open(|fd| open.push(fd));
    // A number may be that of a file that is closed. So the instance must also notice an event.
    slim_sys::signal_eventfd(watched);
    open.into_iter().find(|fd| {
        let info = proc::read(format_args!("self/fdinfo/{fd}"));
        let info = info.and_then(|info| String::from_utf8(info).ok());
        info.is_some_and(|info| watches(&info)) && slim_sys::ready(*fd, libc::POLLIN) != 0
    })
}
