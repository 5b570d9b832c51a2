//! Starts the agent thread.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::rc::Rc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use slim_core::config::{Config, Policy};
use slim_core::transport::Transports;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime;
use tokio::task::{self, LocalSet};

use crate::commands::command::CommandReceiver;
use crate::commands::done;
use crate::control::Control;
use crate::control::places::{self, Place, Ports};
use crate::control::receive::receive_waiting;
use crate::driver::Driver;
use crate::events::{self, Log};
use crate::failure::panic::Survivor;
use crate::failure::report::StartReport;
use crate::host::address_watch;
use crate::kernel::readiness;
use crate::kernel::sys::during;
use crate::listeners::listening::Together;
use crate::shared::Shared;
use crate::tasks::Task;
use crate::tasks::spawn;
use crate::transport::Providers;
use crate::turn;
use slim_sys::OwnFd;
use slim_sys::reserve;
use slim_sys::{as_agent, be_agent_thread};

/// Stack size in addition to what the C library needs. This is address space, not memory: pages are touched as needed.
const STACK: usize = 512 * 1024;
/// Tasks that run between two polls of the sockets. Small, so that a flood on one socket does not delay the others.
const TASKS_PER_LOOK: u32 = 8;

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

/// What the thread needs. Everything whose creation can fail is created in the caller, or its failure is reported to
/// the caller.
struct Parts {
    config: Config,
    shared: Together,
    /// Where the thread puts its number. A process may have several agents.
    thread: Arc<AtomicI32>,
    ports: Ports,
    places: Vec<Place>,
    alarm: OwnFd,
    seed: [u8; 40],
    providers: Providers,
}

/// Creates the process-wide sockets and starts the thread. Returns its thread id, once the thread has reported that it runs.
pub(crate) fn start(
    config: Config,
    commands: CommandReceiver,
    shared: Together,
    providers: Providers,
) -> io::Result<i32> {
    let mut seed = [0; 40];
    getrandom::fill(&mut seed).map_err(|e| during("get random numbers")(io::Error::other(e)))?;
    let (ports, places) = places::take().map_err(during("bind a control socket and a listener"))?;
    let thread = Arc::<AtomicI32>::default();
    let parts = Parts {
        config,
        shared,
        thread: thread.clone(),
        ports,
        places,
        alarm: slim_sys::timerfd().map_err(during("create a timer"))?,
        seed,
        providers,
    };
    let outcome = Arc::<Mutex<Option<io::Result<()>>>>::default();
    let (done, answered) = done::done();
    let report = StartReport::new(outcome.clone(), done);
    let blocked = slim_sys::SignalsBlocked::new();
    let spawned = thread::Builder::new()
        .name("slim-agent".to_owned())
        .stack_size(slim_sys::stack_size(STACK))
        .spawn(move || {
            as_agent(|| run(parts, commands, report));
            slim_sys::fds::forget_watched();
        });
    drop(blocked);
    spawned.map_err(during("start a thread"))?;
    answered.wait(Duration::MAX);
    let mut said = outcome.lock().unwrap_or_else(PoisonError::into_inner);
    said.take()
        .unwrap_or_else(|| Err(io::Error::other("the agent thread ended while starting")))
        .map(|()| thread.load(Ordering::Acquire))
}

fn run(parts: Parts, commands: CommandReceiver, report: StartReport) {
    let report = Rc::new(report);
    be_agent_thread();
    parts.thread.store(slim_sys::tid(), Ordering::Release);
    turn::take_own();
    let commands = Rc::new(commands);
    let survivor = Survivor::prepare(
        commands.clone(),
        report.clone(),
        Log::new(parts.config.log),
        parts.config.policy == Policy::Required,
    );
    let built = runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .event_interval(TASKS_PER_LOOK)
        .on_thread_park(events::write_out)
        .build();
    let runtime = match built.map_err(during("start the event loop")) {
        Ok(runtime) => runtime,
        Err(e) => return report.answer(Err(e)),
    };
    LocalSet::new().block_on(&runtime, async {
        match assemble(parts, commands, survivor) {
            Ok(shared) => {
                report.answer(Ok(()));
                handle_commands(shared).await;
            }
            Err(e) => report.answer(Err(e)),
        }
    });
}

/// Registers all sockets with the runtime and starts their tasks.
fn assemble(
    parts: Parts,
    commands: Rc<CommandReceiver>,
    survivor: Rc<Survivor>,
) -> io::Result<Rc<Shared>> {
    let register = during("watch a descriptor");
    let soon = Soon(commands.clone());
    let soon = readiness::watch(soon, Interest::READABLE).map_err(&register)?;
    let commands = readiness::watch(commands, Interest::READABLE).map_err(&register)?;
    let alarm = readiness::watch(parts.alarm, Interest::READABLE).map_err(&register)?;
    let listeners = parts.providers.listeners().map_err(during("listen"))?;
    let others = Transports {
        locators: listeners.iter().filter_map(|l| l.locator()).collect(),
        kinds: parts.providers.kinds(),
        ..Transports::default()
    };
    let driver = Driver::new(
        parts.config,
        others,
        parts.ports,
        parts.shared,
        survivor,
        &parts.seed,
    );
    let spawn = spawn::spawn;
    let shared = Rc::new(Shared::new(driver, commands, alarm, spawn, parts.providers));
    let mut places = parts.places.into_iter();
    shared
        .with(|d, _| places.try_for_each(|place| d.control.serve(place, &mut d.tasks)))
        .map_err(&register)?;
    for listener in listeners {
        spawn(&shared, Task::Accept(listener));
    }
    address_watch::watch(&shared);
    task::spawn_local(handle_alarm(shared.clone()));
    task::spawn_local(handle_deferred_commands(soon, shared.clone()));
    Ok(shared)
}

/// Lets the driver take the commands of application threads, until the process ends or the agent retires.
async fn handle_commands(shared: Rc<Shared>) {
    while let Ok(mut guard) = shared.commands().readable().await {
        shared.commands().get_ref().rearm();
        guard.clear_ready();
        drop(guard);
        shared.with(|_, _| ());
        if shared.is_retired() {
            reserve::end();
            // Ending the tasks does not close every socket; the others must not serve peers any more.
            return readiness::shut_watched();
        }
    }
}

/// The descriptor that wakes the agent for commands that are not urgent.
struct Soon(Rc<CommandReceiver>);

impl AsFd for Soon {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.soon()
    }
}

impl AsRawFd for Soon {
    fn as_raw_fd(&self) -> RawFd {
        self.0.soon().as_raw_fd()
    }
}

/// As [`handle_commands`], for commands that are not urgent.
async fn handle_deferred_commands(soon: AsyncFd<Soon>, shared: Rc<Shared>) {
    while let Ok(mut guard) = soon.readable().await {
        soon.get_ref().0.rearm_soon();
        guard.clear_ready();
        drop(guard);
        shared.with(|_, _| ());
    }
}

/// Calls the driver when the alarm fires.
async fn handle_alarm(shared: Rc<Shared>) {
    while let Ok(mut guard) = shared.alarm().readable().await {
        slim_sys::reset_eventfd(shared.alarm().get_ref().raw());
        guard.clear_ready();
        drop(guard);
        shared.alarm_fired();
        // This thread may not have run since long before the deadline. Datagrams that have arrived by now count as in
        // time.
        for socket in shared.with_control(Control::all) {
            receive_waiting(&socket, &shared);
        }
        shared.with(|d, now| d.on_time(now));
    }
}
