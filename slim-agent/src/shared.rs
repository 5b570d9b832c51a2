//! How tasks get at the driver.
//!
//! Every task of the agent thread enters through [`Shared::with`] (or a sibling of it), which lets
//! one closure at the driver, carries out all actions, writes down all events and sets the alarm.
//! Nothing inside awaits, so the driver is never seen half-way through.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use slim_core::Time;
use tokio::io::unix::AsyncFd;
use tokio::select;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::{task, time};

use crate::commands::command::CommandReceiver;
use crate::control::Control;
use crate::driver::Driver;
use crate::failure::memory;
use crate::failure::panic;
use crate::tasks::Task;
use crate::transport::Providers;
use crate::turn;
use slim_sys::OwnFd;
use slim_sys::reserve;

/// A deadline that has passed already is looked at again after this long, should the endpoint not
/// have moved it: a mistake there must not make the process spin.
const LEAST_DELAY: Duration = Duration::from_micros(50);
/// How often this thread looks at its descriptors while a flow is without a transport.
const LOOK: Duration = Duration::from_secs(1);
/// How often the reserve of descriptors is tried to be filled.
const FILL: Duration = Duration::from_millis(100);
/// Commands taken in a row before everybody else gets a turn.
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
    /// Listeners that have no descriptor for a connection that waits.
    starved: Cell<u32>,
    /// Tells them that one may be free.
    maybe_free: Notify,
    /// Starts a task that the driver wants.
    spawn: Spawn,
    /// A task looks at this thread's own descriptors.
    looks: Cell<bool>,
    /// When the reserve was last looked after.
    filled: Cell<Instant>,
    /// Makes resume connections.
    pub(crate) providers: Providers,
    /// For reading during a replay; one for all connections.
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

    /// Lets `f` tell the endpoint something, and does what follows from it.
    pub(crate) fn with<R>(self: &Rc<Self>, f: impl FnOnce(&mut Driver, Time) -> R) -> R {
        // Never borrowed twice: there is one thread, no borrow lasts over an await, and nobody
        // called from inside (`Endpoint`, `FlowIo`) has this object.
        let mut driver = self.driver.borrow_mut();
        turn::begin();
        driver.begin_turn();
        self.take_commands(&mut driver);
        let now = driver.now();
        driver.take_mail(now);
        driver.endpoint.tell_seen(now);
        driver.settle();
        let result = f(&mut driver, now);
        driver.settle();
        driver.tasks.drain(|task| (self.spawn)(self, task));
        if driver.survivor.any_away() {
            turn::want();
            self.look_at_own();
        }
        self.arm(&driver);
        // The application's old transports are closed in there.
        self.descriptor_freed();
        result
    }

    /// While a flow is without a transport its application waits for this thread, which is woken by nothing when somebody
    /// has closed its descriptors. So it looks by itself.
    fn look_at_own(self: &Rc<Self>) {
        if self.looks.replace(true) {
            return;
        }
        let shared = self.clone();
        task::spawn_local(async move {
            while shared.driver.borrow().survivor.any_away() {
                time::sleep(LOOK).await;
                if shared.commands.get_ref().is_lost() {
                    panic::give_up(panic::LOST);
                }
            }
            shared.looks.set(false);
        });
    }

    /// Whether connections wait to be accepted for want of descriptors. Then none may be spent on
    /// connecting.
    pub(crate) fn is_starved(&self) -> bool {
        self.starved.get() > 0
    }

    /// Waits until a descriptor may be free, because something has happened, or until `new` is
    /// ready.
    pub(crate) async fn starve(&self, new: impl Future) {
        self.starved.set(self.starved.get() + 1);
        select! {
            () = self.maybe_free.notified() => {}
            _ = new => {}
        }
        self.starved.set(self.starved.get() - 1);
    }

    /// The thread is to end.
    pub(crate) fn retire(&self) {
        self.driver.borrow_mut().retired = true;
        self.commands.get_ref().wake();
    }

    /// Whether it is.
    pub(crate) fn is_retired(&self) -> bool {
        self.driver.borrow().retired
    }

    /// A descriptor was closed.
    pub(crate) fn descriptor_freed(&self) {
        if reserve::is_wanting() && self.filled.get().elapsed() > FILL {
            reserve::fill();
            self.filled.set(Instant::now());
        }
        if self.is_starved() {
            self.maybe_free.notify_waiters();
        }
    }

    /// Carries out what application threads have asked for, before anything else happens. A front
    /// end that reports a fault under the same lock that its `FlowIo` takes can thus be sure that
    /// the fault is not taken for one of a later transport.
    fn take_commands(self: &Rc<Self>, driver: &mut Driver) {
        let mut taken = 0;
        loop {
            if memory::is_out() {
                panic::give_up("no memory is left");
            }
            let Some(command) = self.commands.get_ref().next() else {
                driver.after_commands(driver.now());
                break;
            };
            driver.command(driver.now(), command);
            driver.settle();
            taken += 1;
            if taken == MOST_COMMANDS {
                // The rest has its turn right after everybody else's.
                self.commands.get_ref().wake();
                break;
            }
        }
        if driver.retired {
            // Whoever looks for it may not be the one who has taken the command.
            self.commands.get_ref().wake();
        }
    }

    /// The control sockets, when there is nothing to follow.
    pub(crate) fn with_control<R>(&self, f: impl FnOnce(&Control) -> R) -> R {
        f(&self.driver.borrow().control)
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
        let next = [driver.endpoint.poll_timeout(), driver.watch.next()]
            .into_iter()
            .flatten()
            .min();
        // One that fires too early sets the next one: that is cheaper than to put it off each time
        // that something has happened before it, and nobody is woken again and again.
        let soon = |armed: Time| next.is_some_and(|next| armed <= next);
        if !self.armed.get().is_some_and(soon) && self.armed.replace(next) != next {
            let delay = next.map(|at| at.since(driver.now()).max(LEAST_DELAY));
            slim_sys::set_timerfd(self.alarm.get_ref().raw(), delay);
        }
    }
}
