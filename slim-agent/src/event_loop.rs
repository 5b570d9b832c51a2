//! The agent's event loop: its runtime, sockets and tasks, and the two ways to drive them.

use std::future::poll_fn;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::rc::Rc;
use std::task::Poll;

use slim_core::config::Config;
use slim_core::transport::Transports;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::{self, Runtime};
use tokio::sync::Notify;

use crate::commands::command::CommandReceiver;
use crate::control::Control;
use crate::control::places::{self, Place, Ports};
use crate::control::receive::receive_waiting;
use crate::driver::Driver;
use crate::events;
use crate::exec::{HandedAgent, Identity};
use crate::failure::panic::Survivor;
use crate::host::address_watch;
use crate::kernel::sys::during;
use crate::kernel::{readiness, task};
use crate::listeners::listening::Together;
use crate::shared::Shared;
use crate::tasks::Task;
use crate::tasks::spawn;
use crate::transport::Providers;
use slim_sys::OwnFd;
use slim_sys::reserve;

/// Tasks that run between two polls of the sockets. Small, so that a flood on one socket does not delay the others.
const TASKS_PER_LOOK: u32 = 8;
/// Tasks that [`EventLoop::run_until_idle`] runs at most. The driving thread is the application's, and has other work.
const TASKS_PER_DRIVE: u64 = 256;

/// What the loop needs. Everything whose creation can fail is created in the thread that starts the agent, or its failure is
/// reported to that thread.
pub(crate) struct Parts {
    config: Config,
    shared: Together,
    ports: Ports,
    places: Vec<Place>,
    /// Of the agent before, and whether it has accepted IPv4 connections as IPv6 sockets.
    before: Option<(Identity, bool)>,
    alarm: OwnFd,
    seed: [u8; 40],
    providers: Providers,
}

impl Parts {
    /// Creates the process-wide sockets, or takes those of the agent `before`.
    pub(crate) fn make(
        config: Config,
        shared: Together,
        providers: Providers,
        before: Option<HandedAgent>,
    ) -> io::Result<Self> {
        let mut seed = [0; 40];
        getrandom::fill(&mut seed)
            .map_err(|e| during("get random numbers")(io::Error::other(e)))?;
        let (ports, places) = match &before {
            None => places::take().map_err(during("bind a control socket and a listener"))?,
            Some(before) => {
                let (control, resume) = before.ports;
                let places: Vec<_> = before.places.iter().map(Place::handed).collect();
                let places: Option<_> = places.into_iter().collect();
                let places = places.ok_or_else(|| io::Error::other("a socket is missing"));
                let places = places.map_err(during("take the sockets"))?;
                (Ports { control, resume }, places)
            }
        };
        Ok(Parts {
            config,
            shared,
            ports,
            places,
            before: before.map(|before| (before.identity, before.maps)),
            alarm: slim_sys::timerfd().map_err(during("create a timer"))?,
            seed,
            providers,
        })
    }

    pub(crate) fn config(&self) -> &Config {
        &self.config
    }
}

/// Why [`EventLoop::run_until_idle`] has returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// Nothing is left to do now.
    Idle,
    /// There is more to do.
    Busy,
    /// A task has panicked. The loop must not be used, nor dropped.
    Panicked,
    /// The agent has been told to end.
    Retired,
}

/// The runtime, with all sockets and tasks.
pub(crate) struct EventLoop {
    runtime: Runtime,
    shared: Rc<Shared>,
    /// The command to retire has been carried out.
    retired: Rc<Notify>,
}

// SAFETY: as for the tasks (`kernel::task`): whoever has the loop is the only one to use what it and its tasks hold.
unsafe impl Send for EventLoop {}

impl EventLoop {
    /// Creates the runtime, registers all sockets with it and starts the tasks.
    pub(crate) fn build(
        parts: Parts,
        commands: Rc<CommandReceiver>,
        survivor: Rc<Survivor>,
    ) -> io::Result<Self> {
        let runtime = runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .event_interval(TASKS_PER_LOOK)
            .on_thread_park(events::write_out)
            .build()
            .map_err(during("start the event loop"))?;
        let retired = Rc::new(Notify::new());
        let shared = runtime.block_on(async { assemble(parts, commands, survivor, &retired) })?;
        Ok(EventLoop {
            runtime,
            shared,
            retired,
        })
    }

    /// Drives the loop until the agent is told to end. Sleeps while there is nothing to do.
    pub(crate) fn run_until_retired(&self) {
        self.runtime.block_on(self.retired.notified());
        self.end();
    }

    /// Drives the loop until there is nothing to do now. Does not sleep.
    pub(crate) fn run_until_idle(&self) -> Stop {
        let first = task::runs();
        let (mut last, mut quiet) = (first, 0);
        let stop = self.runtime.block_on(poll_fn(|context| {
            // The runtime polls its sockets between two runs of this closure, and then runs the tasks that it has woken. So nothing is
            // left to do if no task has run twice in a row.
            let runs = task::runs();
            quiet = if runs == last { quiet + 1 } else { 0 };
            last = runs;
            let stop = if task::has_panicked() {
                Some(Stop::Panicked)
            } else if self.shared.is_retired() {
                Some(Stop::Retired)
            } else if quiet > 2 {
                Some(Stop::Idle)
            } else {
                (runs - first > TASKS_PER_DRIVE).then_some(Stop::Busy)
            };
            stop.map_or_else(
                || {
                    context.waker().wake_by_ref();
                    Poll::Pending
                },
                Poll::Ready,
            )
        }));
        match stop {
            Stop::Busy => self.shared.commands().get_ref().wake(),
            Stop::Retired => self.end(),
            Stop::Idle | Stop::Panicked => {}
        }
        events::write_out();
        stop
    }

    /// The file of the event log.
    pub(crate) fn events_file(&self) -> Option<RawFd> {
        self.shared.events_file()
    }

    fn end(&self) {
        reserve::end();
        // Ending the tasks does not close every socket; the others must not serve peers any more.
        readiness::shut_watched();
    }
}

/// Registers all sockets with the runtime and starts their tasks.
fn assemble(
    parts: Parts,
    commands: Rc<CommandReceiver>,
    survivor: Rc<Survivor>,
    retired: &Rc<Notify>,
) -> io::Result<Rc<Shared>> {
    let register = during("watch a descriptor");
    let soon = Soon(commands.clone());
    let soon = readiness::watch(soon, Interest::READABLE).map_err(&register)?;
    let commands = readiness::watch(commands, Interest::READABLE).map_err(&register)?;
    let alarm = readiness::watch(parts.alarm, Interest::READABLE).map_err(&register)?;
    let listeners = parts.providers.listeners().map_err(during("listen"))?;
    let locators: Vec<_> = listeners.iter().map(|l| l.locator()).collect();
    let others = Transports {
        locators: locators.iter().flatten().copied().collect(),
        kinds: parts.providers.kinds(),
        ..Transports::default()
    };
    let mut driver = Driver::new(
        parts.config,
        others,
        (parts.ports, parts.before),
        parts.shared,
        survivor,
        &parts.seed,
    );
    driver.locators = locators;
    let spawn = spawn::spawn;
    let shared = Rc::new(Shared::new(driver, commands, alarm, spawn, parts.providers));
    let mut places = parts.places.into_iter();
    shared
        .with(|d, _| places.try_for_each(|place| d.control.serve(place, &mut d.tasks)))
        .map_err(&register)?;
    for (nth, listener) in listeners.into_iter().enumerate() {
        let announced = Some(nth);
        spawn(
            &shared,
            Task::Accept {
                listener,
                announced,
            },
        );
    }
    address_watch::watch(&shared);
    task::spawn(handle_commands(shared.clone(), retired.clone()));
    task::spawn(handle_alarm(shared.clone()));
    task::spawn(handle_deferred_commands(soon, shared.clone()));
    Ok(shared)
}

/// Lets the driver take the commands of application threads, until the process ends or the agent retires.
async fn handle_commands(shared: Rc<Shared>, retired: Rc<Notify>) {
    while let Ok(mut guard) = shared.commands().readable().await {
        shared.commands().get_ref().rearm();
        guard.clear_ready();
        drop(guard);
        shared.with(|_, _| ());
        if shared.is_retired() {
            return retired.notify_one();
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
