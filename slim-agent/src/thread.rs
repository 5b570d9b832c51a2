//! The agent thread, which drives the agent's event loop.

use std::io;
use std::rc::Rc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use slim_core::config::Policy;

use crate::commands::command::CommandReceiver;
use crate::commands::done;
use crate::event_loop::{EventLoop, Parts};
use crate::events::Log;
use crate::failure::panic::Survivor;
use crate::failure::report::StartReport;
use crate::kernel::sys::during;
use crate::turn;
use slim_sys::{as_agent, be_agent_thread};

/// Stack size in addition to what the C library needs. This is address space, not memory: pages are touched as needed.
const STACK: usize = 512 * 1024;

/// Longest wait for the end of a thread that could not start the event loop: it only closes its descriptors.
const ENDS: Duration = Duration::from_secs(2);

/// Waits until the thread with this id has ended, after the command `Retire`. Returns whether it has.
pub(crate) fn wait_for_end(thread: i32, limit: Duration) -> bool {
    let begun = Instant::now();
    loop {
        if !slim_sys::thread_lives(thread) {
            return true;
        }
        if begun.elapsed() > limit {
            return false;
        }
        slim_sys::nap(Duration::from_micros(50));
    }
}

/// Starts the thread. Returns its thread id, once the thread has reported that it runs.
pub(crate) fn start(parts: Parts, commands: CommandReceiver) -> io::Result<i32> {
    // A process may have several agents, so the thread puts its number here.
    let thread = Arc::<AtomicI32>::default();
    let number = thread.clone();
    let outcome = Arc::<Mutex<Option<io::Result<()>>>>::default();
    let (done, answered) = done::done();
    let report = StartReport::new(outcome.clone(), done);
    let blocked = slim_sys::SignalsBlocked::new();
    let spawned = thread::Builder::new()
        .name("slim-agent".to_owned())
        .stack_size(slim_sys::stack_size(STACK))
        .spawn(move || {
            as_agent(|| run(parts, commands, report, &number));
            slim_sys::fds::forget_watched();
        });
    drop(blocked);
    spawned.map_err(during("start a thread"))?;
    answered.wait(Duration::MAX);
    let mut said = outcome.lock().unwrap_or_else(PoisonError::into_inner);
    let started = said
        .take()
        .unwrap_or_else(|| Err(io::Error::other("the agent thread ended while starting")));
    let thread = thread.load(Ordering::Acquire);
    if started.is_err() {
        // It closes its descriptors after the report.
        wait_for_end(thread, ENDS);
    }
    started.map(|()| thread)
}

fn run(parts: Parts, commands: CommandReceiver, report: StartReport, number: &AtomicI32) {
    let report = Rc::new(report);
    be_agent_thread();
    number.store(slim_sys::tid(), Ordering::Release);
    let log = Log::new(parts.config().log);
    if let Err(e) = turn::take_own(parts.config().priority) {
        log.warn(|| {
            let why = std::io::Error::from_raw_os_error(e);
            format!("SLIM_PRIORITY=realtime: {why}; allow it with CAP_SYS_NICE or the limit rtprio; using raised")
        });
    }
    let commands = Rc::new(commands);
    let survivor = Survivor::prepare(
        commands.clone(),
        report.clone(),
        log,
        parts.config().policy == Policy::Required,
    );
    match EventLoop::build(parts, commands, survivor) {
        Ok(event_loop) => {
            report.answer(Ok(()));
            event_loop.run_until_retired();
        }
        Err(e) => report.answer(Err(e)),
    }
}
