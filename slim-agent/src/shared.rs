//! How tasks access the driver.
//!
//! Every task of the agent thread goes through [`Shared::with`] or a similar method. It runs one closure on the driver,
//! carries out all actions, writes all events and sets the alarm. Nothing inside awaits, so no task sees the driver in
//! an intermediate state.

use std::cell::{Cell, RefCell};
use std::os::fd::RawFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use slim_core::Time;
use tokio::io::unix::AsyncFd;
use tokio::select;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time;

use crate::commands::command::CommandReceiver;
use crate::control::Control;
use crate::driver::Driver;
use crate::failure::memory;
use crate::failure::panic;
use crate::kernel::task;
use crate::tasks::Task;
use crate::transport::Providers;
use crate::turn;
use slim_sys::OwnFd;
use slim_sys::reserve;

/// Shortest delay of the alarm. If the endpoint by mistake does not move a deadline that has passed, the process must
/// not spin.
const LEAST_DELAY: Duration = Duration::from_micros(50);
/// How often this thread checks its descriptors while a flow is without a transport.
const LOOK: Duration = Duration::from_secs(1);
/// Shortest time between two attempts to fill the reserve of descriptors.
const FILL: Duration = Duration::from_millis(100);
/// Commands taken in a row before other tasks get a turn.
const MOST_COMMANDS: usize = 4096;

/// Starts a task.
pub(crate) type Spawn = fn(&Rc<Shared>, Task) -> JoinHandle<()>;

/// What every task of the agent thread holds.
pub(crate) struct Shared {
    driver: RefCell<Driver>,
    commands: AsyncFd<Rc<CommandReceiver>>,
    alarm: AsyncFd<OwnFd>,
    /// What the alarm is set to.
    armed: Cell<Option<Time>>,
    /// Number of listeners that lack a descriptor for a waiting connection.
    starved: Cell<u32>,
    /// Notifies them that a descriptor may be free.
    maybe_free: Notify,
    /// Starts a task of the driver.
    spawn: Spawn,
    /// A task that checks this thread's own descriptors is running.
    looks: Cell<bool>,
    /// When the reserve was last filled.
    filled: Cell<Instant>,
    /// Makes resume connections.
    pub(crate) providers: Providers,
    /// Read buffer for replays; one for all connections.
    pub(crate) scratch: RefCell<Vec<u8>>,
}

impl Shared {
    pub(crate) fn new(
        driver: Driver,
        commands: AsyncFd<Rc<CommandReceiver>>,
        alarm: AsyncFd<OwnFd>,
        spawn: Spawn,
        providers: Providers,
    ) -> Self {
        Shared {
            driver: RefCell::new(driver),
            commands,
            alarm,
            armed: Cell::new(None),
            starved: Cell::new(0),
            maybe_free: Notify::new(),
            spawn,
            looks: Cell::new(false),
            filled: Cell::new(Instant::now()),
            providers,
            scratch: RefCell::default(),
        }
    }

    /// Runs `f` on the driver, and carries out what follows from it.
    pub(crate) fn with<R>(self: &Rc<Self>, f: impl FnOnce(&mut Driver, Time) -> R) -> R {
        // Never borrowed twice: there is one thread, no borrow lasts over an await, and nothing called from inside
        // (`Endpoint`, `FlowIo`) has a reference to this object.
        let mut driver = self.driver.borrow_mut();
        turn::begin();
        driver.begin_turn();
        let all = self.take_commands(&mut driver);
        let now = driver.now();
        if all {
            driver.after_commands(now);
        }
        driver.take_mail(now);
        driver.endpoint.send_seen(now);
        driver.carry_out();
        let result = f(&mut driver, now);
        driver.carry_out();
        driver.tasks.drain(|task| (self.spawn)(self, task));
        if driver.survivor.any_away() {
            turn::request();
            match driver.rests() {
                // The thread sleeps until something happens, or a minute has passed.
                true => self.check_own(),
                false => self.look_at_own(),
            }
        }
        self.arm(&driver);
        // This turn may have closed old transports of the application.
        self.descriptor_freed();
        result
    }

    /// While a flow is without a transport, the application waits for this thread. Nothing wakes this thread if the
    /// program has closed its descriptors. So a task checks them periodically.
    fn look_at_own(self: &Rc<Self>) {
        if self.looks.replace(true) {
            return;
        }
        let shared = self.clone();
        task::spawn(async move {
            while shared.waits_for_network() {
                time::sleep(LOOK).await;
                shared.check_own();
            }
            shared.looks.set(false);
        });
    }

    /// Whether flows are without a transport, and not only held.
    fn waits_for_network(&self) -> bool {
        let driver = self.driver.borrow();
        driver.survivor.any_away() && !driver.rests()
    }

    fn check_own(&self) {
        if self.commands.get_ref().is_lost() {
            panic::give_up(panic::LOST);
        }
    }

    /// Whether connections wait to be accepted because descriptors are short. Then none may be spent on connecting.
    pub(crate) fn is_starved(&self) -> bool {
        self.starved.get() > 0
    }

    /// Waits until a descriptor may be free, or until `new` is ready.
    pub(crate) async fn starve(&self, new: impl Future) {
        self.starved.set(self.starved.get() + 1);
        select! {
            () = self.maybe_free.notified() => {}
            _ = new => {}
        }
        self.starved.set(self.starved.get() - 1);
    }

    /// Ends the thread.
    pub(crate) fn retire(&self) {
        self.driver.borrow_mut().retired = true;
        self.commands.get_ref().wake();
    }

    /// Whether the thread is to end.
    pub(crate) fn is_retired(&self) -> bool {
        self.driver.borrow().retired
    }

    /// A descriptor may have been closed: fills the reserve, and notifies the listeners that lack a descriptor.
    pub(crate) fn descriptor_freed(&self) {
        if reserve::is_wanting() && self.filled.get().elapsed() > FILL {
            reserve::fill();
            self.filled.set(Instant::now());
        }
        if self.is_starved() {
            self.maybe_free.notify_waiters();
        }
    }

    /// Carries out the commands of application threads before anything else happens. So a fault that a front end
    /// reports under the lock that its `FlowIo` takes cannot be taken for a fault of a later transport.
    ///
    /// Returns false if there are so many that some are left for later.
    fn take_commands(self: &Rc<Self>, driver: &mut Driver) -> bool {
        let mut taken = 0;
        let all = loop {
            if memory::is_out() {
                panic::give_up("no memory is left");
            }
            let Some(command) = self.commands.get_ref().next() else {
                break true;
            };
            driver.command(driver.now(), command);
            driver.carry_out();
            taken += 1;
            if taken == MOST_COMMANDS {
                // The rest is taken right after the other tasks' turn.
                self.commands.get_ref().wake();
                break false;
            }
        };
        if driver.retired {
            // Wakes the task that ends the thread, in case another task has taken the command.
            self.commands.get_ref().wake();
        }
        all
    }

    /// Access to the control sockets for a call after which no action is to be carried out.
    pub(crate) fn with_control<R>(&self, f: impl FnOnce(&Control) -> R) -> R {
        f(&self.driver.borrow().control)
    }

    /// The file of the event log.
    pub(crate) fn events_file(&self) -> Option<RawFd> {
        self.driver.borrow().events_file()
    }

    pub(crate) fn commands(&self) -> &AsyncFd<Rc<CommandReceiver>> {
        &self.commands
    }

    pub(crate) fn alarm(&self) -> &AsyncFd<OwnFd> {
        &self.alarm
    }

    pub(crate) fn alarm_fired(&self) {
        self.armed.set(None);
    }

    fn arm(&self, driver: &Driver) {
        let next = [
            driver.endpoint.poll_timeout(),
            driver.watch.next(driver.endpoint.hold_timer().is_some()),
            driver.survivor.next_exit(),
        ]
        .into_iter()
        .flatten()
        .min();
        // An alarm that fires too early sets the next one. That is cheaper than postponing the alarm on every event,
        // and does not wake the thread again and again.
        let soon = |armed: Time| next.is_some_and(|next| armed <= next);
        if !self.armed.get().is_some_and(soon) && self.armed.replace(next) != next {
            let delay = next.map(|at| at.since(driver.now()).max(LEAST_DELAY));
            slim_sys::set_timerfd(self.alarm.get_ref().raw(), delay);
        }
    }
}
