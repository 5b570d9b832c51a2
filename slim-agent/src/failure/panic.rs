//! What is left to do when the agent thread has panicked.
//!
//! That is a mistake in SLIM, and must not be the program's end, nor may anybody wait for ever for a
//! thread that is not there any more. So the panic never ends: the thread goes on, below whatever it
//! was doing, with the little that needs none of its state. Flows that have their transport become
//! plain TCP; those that have lost it end in an error; so does everything that is asked for later.
//! Our sockets are shut, which tells the peers that nobody is here to resume with.
//!
//! What cannot be helped: a front end's lock that was held at that moment stays locked; a second
//! panic, in here, ends the process; and who wants to set another panic hook waits for ever.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::mem;
use std::panic;
use std::rc::Rc;
use std::sync::{Arc, Once};

use slim_core::{FlowToken, Verdict};

use crate::FlowIo;
use crate::commands::command::{Command, CommandReceiver};
use crate::events::{self, Log};
use crate::failure::report::StartReport;
use crate::kernel::readiness;

thread_local! {
    static SURVIVOR: RefCell<Option<Rc<Survivor>>> = const { RefCell::new(None) };
}

/// Why the thread cannot go on after somebody has closed its descriptors.
pub(crate) const LOST: &str = "the program has closed descriptors of SLIM's";

/// What outlives a panic of the agent thread.
pub(crate) struct Survivor {
    commands: Rc<CommandReceiver>,
    started: Rc<StartReport>,
    log: Log,
    /// Whether plain TCP is not allowed.
    required: bool,
    /// All flows. Never borrowed while one of them is called: that is where a panic may come from.
    flows: RefCell<BTreeMap<FlowToken, Arc<dyn FlowIo>>>,
    /// Those that have lost their transport, as far as the agent thread knows.
    away: RefCell<BTreeSet<FlowToken>>,
}

/// The agent thread cannot go on, though it has not panicked. Does not return, unless that has happened before.
pub(crate) fn give_up(why: &str) {
    if let Some(survivor) = SURVIVOR.take() {
        survivor.go_on(why);
    }
}

impl Survivor {
    /// From now on a panic of this thread is survived.
    pub(crate) fn prepare(
        commands: Rc<CommandReceiver>,
        started: Rc<StartReport>,
        log: Log,
        required: bool,
    ) -> Rc<Self> {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let others = panic::take_hook();
            panic::set_hook(Box::new(move |info| {
                let survivor = SURVIVOR.try_with(|s| s.try_borrow_mut().ok()?.take());
                match survivor.ok().flatten() {
                    Some(survivor) => survivor.go_on(&format!("internal error ({info})")),
                    None => others(info),
                }
            }));
        });
        let survivor = Rc::new(Survivor {
            commands,
            started,
            log,
            required,
            flows: RefCell::default(),
            away: RefCell::default(),
        });
        SURVIVOR.set(Some(survivor.clone()));
        survivor
    }

    /// There is a new flow.
    pub(crate) fn add(&self, token: FlowToken, io: Arc<dyn FlowIo>) {
        self.flows.borrow_mut().insert(token, io);
    }

    /// The flow is over.
    pub(crate) fn remove(&self, token: FlowToken) {
        self.set_away(token, false);
        let io = self.flows.borrow_mut().remove(&token);
        drop(io);
    }

    /// The front end of a flow.
    pub(crate) fn io(&self, token: FlowToken) -> Option<Arc<dyn FlowIo>> {
        self.flows.borrow().get(&token).cloned()
    }

    /// Whether there is such a flow.
    pub(crate) fn has(&self, token: FlowToken) -> bool {
        self.flows.borrow().contains_key(&token)
    }

    /// Whether the flow is without a transport: from the moment that it is suspended until it has one again, or
    /// needs none.
    pub(crate) fn set_away(&self, token: FlowToken, away: bool) {
        if !away {
            self.away.borrow_mut().remove(&token);
        } else if self.has(token) {
            self.away.borrow_mut().insert(token);
        }
    }

    /// Whether a flow is.
    pub(crate) fn is_away(&self, token: FlowToken) -> bool {
        self.away.borrow().contains(&token)
    }

    /// Whether any flow is.
    pub(crate) fn any_away(&self) -> bool {
        !self.away.borrow().is_empty()
    }

    fn go_on(&self, why: &str) -> ! {
        // If this thread's descriptors have been closed, the numbers are the program's. The event loop ends in a panic then.
        let lost = self.commands.is_lost();
        let why = if lost { LOST } else { why };
        let text = || {
            let why = why.replace('\n', " ");
            format!("{why}: connections are plain TCP from now on")
        };
        if lost {
            self.log.info(text);
        } else {
            events::write_out();
            self.log.error(text);
        }
        // For the case that it happened while starting.
        self.started.answer(Err(io::Error::other("internal error")));
        if !lost {
            readiness::shut_watched();
        }
        let away = self.away.try_borrow_mut();
        let mut away = away.map(|mut a| mem::take(&mut *a)).unwrap_or_default();
        // Faults that are queued are of flows that still look well here.
        let mut before = Vec::new();
        while let Some(command) = self.commands.next() {
            match command {
                Command::Fault { token, .. } => drop(away.insert(token)),
                other => before.push(other),
            }
        }
        self.commands.all_urgent();
        let flows = self.flows.try_borrow_mut();
        let flows = flows.map(|mut f| mem::take(&mut *f)).unwrap_or_default();
        for (token, io) in flows {
            if away.contains(&token) {
                io.escalate(Verdict::Errno(libc::ECONNRESET));
            } else {
                io.legacy(false);
            }
        }
        before.into_iter().for_each(|command| self.obey(command));
        loop {
            let command = self.commands.wait();
            self.obey(command);
        }
    }

    fn obey(&self, command: Command) {
        match command {
            Command::Open { io, .. }
            | Command::OpenAgreed { io, .. }
            | Command::OpenKnown { io, .. } => io.legacy(self.required),
            Command::Unlisten {
                done: Some(done), ..
            }
            | Command::Flush { done }
            | Command::DrainExit { done, .. } => done.tell(),
            // Every flow that there was is plain TCP or has its error; a socket that comes along is
            // closed here.
            _ => {}
        }
    }
}
