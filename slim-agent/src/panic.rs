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

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::panic;
use std::rc::Rc;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Once};

use slim_core::{FlowToken, Verdict};

use crate::FlowIo;
use crate::command::{Command, Receiver};
use crate::events::Log;
use crate::fds;

thread_local! {
    static SURVIVOR: RefCell<Option<Rc<Survivor>>> = const { RefCell::new(None) };
}

/// What outlives a panic of the agent thread.
pub(crate) struct Survivor {
    commands: Rc<Receiver>,
    started: SyncSender<io::Result<()>>,
    log: Log,
    /// Whether plain TCP is not allowed.
    required: bool,
    flows: RefCell<HashMap<FlowToken, Ward>>,
}

struct Ward {
    io: Arc<dyn FlowIo>,
    away: Away,
}

/// Whether a flow has lost its transport, as far as the agent thread knows.
pub(crate) type Away = Rc<Cell<bool>>;

impl Survivor {
    /// From now on a panic of this thread is survived.
    pub(crate) fn prepare(
        commands: Rc<Receiver>,
        started: SyncSender<io::Result<()>>,
        log: Log,
        required: bool,
    ) -> Rc<Self> {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let others = panic::take_hook();
            panic::set_hook(Box::new(move |info| {
                let survivor = SURVIVOR.try_with(|s| s.try_borrow_mut().ok()?.take());
                match survivor.ok().flatten() {
                    Some(survivor) => survivor.go_on(&info.to_string()),
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
        });
        SURVIVOR.set(Some(survivor.clone()));
        survivor
    }

    /// There is a new flow.
    pub(crate) fn add(&self, token: FlowToken, io: Arc<dyn FlowIo>) -> Away {
        let away = Away::default();
        let ward = Ward {
            io,
            away: away.clone(),
        };
        self.flows.borrow_mut().insert(token, ward);
        away
    }

    /// The flow is over.
    pub(crate) fn remove(&self, token: FlowToken) {
        self.flows.borrow_mut().remove(&token);
    }

    fn go_on(&self, why: &str) {
        let why = why.replace('\n', " ");
        self.log
            .error(|| format!("internal error ({why}): connections are plain TCP from now on"));
        // For the case that it happened while starting.
        let _ = self
            .started
            .try_send(Err(io::Error::other("internal error")));
        fds::shut_watched();
        // Faults that are queued are of flows that still look well here.
        let mut before = Vec::new();
        while let Some(command) = self.commands.next() {
            match command {
                Command::Fault { token, .. } => self.lost(token),
                other => before.push(other),
            }
        }
        let flows = self
            .flows
            .try_borrow_mut()
            .map(|mut f| std::mem::take(&mut *f));
        for ward in flows.unwrap_or_default().into_values() {
            ward.settle();
        }
        before.into_iter().for_each(|command| self.obey(command));
        loop {
            match self.commands.wait() {
                Some(command) => self.obey(command),
                // All handles are gone, but the front end's calls may still be on our stack.
                None => std::thread::park(),
            }
        }
    }

    fn lost(&self, token: FlowToken) {
        if let Ok(flows) = self.flows.try_borrow()
            && let Some(ward) = flows.get(&token)
        {
            ward.away.set(true);
        }
    }

    fn obey(&self, command: Command) {
        match command {
            Command::Open { io, .. } => io.legacy(self.required),
            Command::Unlisten {
                done: Some(done), ..
            }
            | Command::Flush { done }
            | Command::DrainExit { done, .. } => drop(done.try_send(())),
            // Every flow that there was is plain TCP or has its error; a socket that comes along is
            // closed here.
            _ => {}
        }
    }
}

impl Ward {
    fn settle(self) {
        if self.away.get() {
            self.io.escalate(Verdict::Errno(libc::ECONNRESET));
        } else {
            self.io.legacy(false);
        }
    }
}
