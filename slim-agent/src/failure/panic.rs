//! What the agent thread does after it has panicked.
//!
//! A panic is a mistake in SLIM. It must not end the program, and no thread may wait for ever for an agent thread that
//! is gone. So the panic hook never returns: the thread goes on inside it, and does only what needs none of its state.
//! Flows that have their transport become plain TCP, and flows that have lost it end in an error. Flows that begin
//! later are plain TCP, and threads that wait for the agent are answered at once. The agent's sockets are shut, which
//! tells the peers that nothing is resumed here.
//!
//! An agent without a thread ([`crate::driven`]) does the same, but the application's thread must return: its panics are caught
//! ([`caught`]), unless the program is built with `panic = "abort"`.
//!
//! Limits: a front end's lock that was held at that moment stays locked; a second panic, inside the hook, ends the
//! process; a thread that sets another panic hook waits for ever.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::mem;
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, RawFd};
use std::panic::{self, AssertUnwindSafe};
use std::rc::Rc;
use std::sync::{Arc, Once};

use slim_core::{FlowToken, Time, Verdict};

use crate::FlowIo;
use crate::commands::command::{Command, CommandReceiver};
use crate::commands::done::Done;
use crate::events::{self, Log};
use crate::failure::report::StartReport;
use crate::kernel::readiness;

thread_local! {
    /// The text of the first panic inside [`caught`].
    static CAUGHT: RefCell<Option<String>> = const { RefCell::new(None) };
    /// Number of calls of [`caught`] that this thread is in.
    static CATCHING: Cell<u32> = const { Cell::new(0) };
    static SURVIVOR: RefCell<Option<Rc<Survivor>>> = const { RefCell::new(None) };
}

/// The reason why the thread cannot go on when the program has closed its descriptors.
pub(crate) const LOST: &str = "the program has closed descriptors of SLIM";

/// The state that outlives a panic of the agent thread.
pub(crate) struct Survivor {
    commands: Rc<CommandReceiver>,
    /// For the thread that waits for the start.
    started: Option<Rc<StartReport>>,
    log: Log,
    /// Whether plain TCP is not allowed.
    required: bool,
    /// All flows. Never borrowed while a flow is called, because that call may panic.
    flows: RefCell<BTreeMap<FlowToken, Arc<dyn FlowIo>>>,
    /// Flows that have lost their transport, as far as the agent thread knows.
    away: RefCell<BTreeSet<FlowToken>>,
    /// Threads that wait to exit, and until when.
    exiting: RefCell<Vec<(Time, Done)>>,
}

/// Does the same when the agent thread cannot go on for another reason. Does not return, unless this has happened
/// before.
pub(crate) fn give_up(why: &str) {
    if let Some(survivor) = SURVIVOR.take() {
        survivor.survive(why);
    }
    assert!(CATCHING.get() == 0, "{why}");
}

/// Runs `f` for an agent without a thread.
///
/// # Errors
/// The text of a panic, which the runtime may have caught already. Nothing is printed.
pub(crate) fn caught<R>(f: impl FnOnce() -> R) -> Result<R, String> {
    CATCHING.set(CATCHING.get() + 1);
    let result = panic::catch_unwind(AssertUnwindSafe(f));
    CATCHING.set(CATCHING.get() - 1);
    match (result, CAUGHT.take()) {
        (Ok(result), None) => Ok(result),
        (_, why) => Err(why.unwrap_or_else(|| "panic".to_owned())),
    }
}

/// Whether this thread still has the variables that [`caught`] needs.
pub(crate) fn is_usable() -> bool {
    CAUGHT.try_with(|_| ()).is_ok()
}

/// Has panics of this copy's agents survived, and those inside [`caught`] not printed.
pub(crate) fn set_hook() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let others = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let survivor = SURVIVOR.try_with(|s| s.try_borrow_mut().ok()?.take());
            match survivor.ok().flatten() {
                Some(survivor) => survivor.survive(&format!("internal error ({info})")),
                None if CATCHING.try_with(Cell::get).is_ok_and(|n| n > 0) => {
                    let text = info.to_string();
                    CAUGHT.with_borrow_mut(|caught| _ = caught.get_or_insert(text));
                }
                None => others(info),
            }
        }));
    });
}

impl Survivor {
    /// From now on a panic of this thread is survived.
    pub(crate) fn prepare(
        commands: Rc<CommandReceiver>,
        started: Rc<StartReport>,
        log: Log,
        required: bool,
    ) -> Rc<Self> {
        let survivor = Self::new(commands, Some(started), log, required);
        SURVIVOR.set(Some(survivor.clone()));
        survivor
    }

    /// The state for a loop whose panics are [`caught`].
    pub(crate) fn new(
        commands: Rc<CommandReceiver>,
        started: Option<Rc<StartReport>>,
        log: Log,
        required: bool,
    ) -> Rc<Self> {
        set_hook();
        Rc::new(Survivor {
            commands,
            started,
            log,
            required,
            flows: RefCell::default(),
            away: RefCell::default(),
            exiting: RefCell::default(),
        })
    }

    /// Adds a new flow.
    pub(crate) fn add(&self, token: FlowToken, io: Arc<dyn FlowIo>) {
        self.flows.borrow_mut().insert(token, io);
    }

    /// Removes a flow that is over.
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

    /// The flows with these tokens.
    pub(crate) fn tokens(&self, tokens: RangeInclusive<FlowToken>) -> Vec<FlowToken> {
        let flows = self.flows.borrow();
        flows.range(tokens).map(|(token, _)| *token).collect()
    }

    /// Records whether the flow is without a transport: from the moment that it is suspended until it has a transport
    /// again, or needs none.
    pub(crate) fn set_away(&self, token: FlowToken, away: bool) {
        if !away {
            self.away.borrow_mut().remove(&token);
        } else if self.has(token) {
            self.away.borrow_mut().insert(token);
        }
    }

    /// Whether the flow is without a transport.
    pub(crate) fn is_away(&self, token: FlowToken) -> bool {
        self.away.borrow().contains(&token)
    }

    /// Whether any flow is without a transport.
    pub(crate) fn any_away(&self) -> bool {
        !self.away.borrow().is_empty()
    }

    /// Whether this holds for all flows that are without a transport.
    pub(crate) fn all_away(&self, holds: impl Fn(FlowToken) -> bool) -> bool {
        self.away.borrow().iter().all(|token| holds(*token))
    }

    /// Adds a thread that waits to exit.
    pub(crate) fn add_exiting(&self, until: Time, done: Done) {
        self.exiting.borrow_mut().push((until, done));
    }

    /// When the first time limit of such a thread is over.
    pub(crate) fn next_exit(&self) -> Option<Time> {
        self.exiting.borrow().iter().map(|(until, _)| *until).min()
    }

    /// Answers those threads whose time limit `is_over` accepts.
    pub(crate) fn release_exiting(&self, is_over: impl Fn(Time) -> bool) {
        self.exiting.borrow_mut().retain(|(until, done)| {
            let over = is_over(*until);
            if over {
                // The thread may have stopped waiting, which does no harm.
                done.tell();
            }
            !over
        });
    }

    fn survive(&self, why: &str) -> ! {
        self.end_flows(why);
        loop {
            let command = self.commands.wait();
            self.handle(command);
        }
    }

    /// Whether the program has closed the agent's descriptors.
    pub(crate) fn is_lost(&self) -> bool {
        self.commands.is_lost()
    }

    /// The number of the descriptor that commands make readable.
    pub(crate) fn wake_number(&self) -> RawFd {
        self.commands.as_raw_fd()
    }

    /// Answers the commands that are queued, after [`end_flows`](Self::end_flows).
    pub(crate) fn serve(&self) {
        if !self.is_lost() {
            self.commands.rearm();
        }
        while let Some(command) = self.commands.next() {
            self.handle(command);
        }
    }

    /// Ends the session: every flow becomes plain TCP, or gets its error.
    pub(crate) fn end_flows(&self, why: &str) {
        // If the program has closed this thread's descriptors, their numbers belong to the program now. The event loop
        // panics in that case.
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
        // In case the panic happened while starting.
        if let Some(started) = &self.started {
            started.answer(Err(io::Error::other("internal error")));
        }
        if !lost {
            readiness::shut_watched();
        }
        let away = self.away.try_borrow_mut();
        let mut away = away.map(|mut a| mem::take(&mut *a)).unwrap_or_default();
        // A flow whose fault is still queued is not in `away` yet.
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
        before.into_iter().for_each(|command| self.handle(command));
        if let Ok(exiting) = self.exiting.try_borrow() {
            exiting.iter().for_each(|(_, done)| done.tell());
        }
    }

    fn handle(&self, command: Command) {
        match command {
            Command::Open { io, .. }
            | Command::OpenAgreed { io, .. }
            | Command::OpenKnown { io, .. } => io.legacy(self.required),
            Command::Unlisten {
                done: Some(done), ..
            }
            | Command::Flush { done }
            | Command::DrainExit { done, .. }
            | Command::EndFlows { done, .. } => done.tell(),
            // Every flow is plain TCP by now, or has its error. A socket that is part of the command is closed here.
            _ => {}
        }
    }
}
