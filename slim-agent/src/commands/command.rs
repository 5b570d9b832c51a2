//! The queue between application threads and the agent thread.

use std::io;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use slim_core::endpoint::{Agreed, Announcement, HandedFlow, Opened, SurveyedFlow, SurveyedPeer};
use slim_core::{Cause, FinHow, FlowToken, Role};

use crate::FlowIo;
use crate::commands::done::Done;
use crate::commands::queue::{Queue, Taken};
use crate::exec::{AgentPause, HandedAgent, NotHanded};
use crate::failure::memory;
use slim_sys::fds::Mark;
use slim_sys::{OwnFd, SignalMask};

/// What the next program gets, or the flows that cannot be handed over now.
pub(crate) type HandOverAnswer =
    Arc<Mutex<Option<Result<HandedAgent, Vec<(FlowToken, NotHanded)>>>>>;

/// A command of an application thread. Commands are carried out in the order sent.
pub(crate) enum Command {
    Open {
        token: FlowToken,
        io: Arc<dyn FlowIo>,
        role: Role,
        local: SocketAddr,
        remote: SocketAddr,
    },
    /// As `Open`, for a connection for which OPEN has been sent.
    OpenKnown {
        token: FlowToken,
        io: Arc<dyn FlowIo>,
        local: SocketAddr,
        opened: Arc<Opened>,
    },
    /// The same for a flow that both ends have agreed on by other means.
    OpenAgreed {
        token: FlowToken,
        io: Arc<dyn FlowIo>,
        role: Role,
        local: SocketAddr,
        remote: SocketAddr,
        agreed: Box<Agreed>,
    },
    /// A flow of the program that this process has executed before.
    OpenHanded {
        token: FlowToken,
        io: Arc<dyn FlowIo>,
        flow: Box<HandedFlow>,
    },
    /// The process executes another program: hands these flows over, and stops.
    HandOver {
        tokens: Vec<FlowToken>,
        answer: HandOverAnswer,
        pause: AgentPause,
        done: Done,
    },
    /// What the other end of such a flow is to know of this process.
    Describe {
        answer: Arc<Mutex<Option<Announcement>>>,
        done: Done,
    },
    /// What layers above ask for.
    Survey {
        answer: Arc<Mutex<AgentSurvey>>,
        done: Done,
    },
    /// A connection with these addresses is about to be made.
    AboutToConnect {
        local: SocketAddr,
        remote: SocketAddr,
    },
    Fault {
        token: FlowToken,
        cause: Cause,
    },
    Suspect {
        token: FlowToken,
    },
    Finish {
        token: FlowToken,
        final_seq: u64,
        how: FinHow,
        /// The peer already knows of the end, or need not know it.
        told: bool,
    },
    /// The application sends no more after `final_seq` bytes and, with [`FinHow::Close`], receives no more. It keeps
    /// the flow.
    Shut {
        token: FlowToken,
        final_seq: u64,
        how: FinHow,
    },
    /// Announces to the peer that the flow is about to end.
    Announce {
        token: FlowToken,
        final_seq: u64,
        how: FinHow,
    },
    Dirty {
        token: FlowToken,
    },
    OutOfStep {
        token: FlowToken,
    },
    Demote {
        token: FlowToken,
    },
    /// As `Demote`, as soon as the peer has confirmed it.
    DemoteConfirmed {
        token: FlowToken,
    },
    Gone {
        token: FlowToken,
    },
    Listen {
        addr: SocketAddr,
        socket: OwnFd,
        /// The socket on which other processes claim connections to `addr`.
        claims: Option<OwnFd>,
    },
    /// Another process has the control socket of `addr`.
    Elsewhere {
        addr: SocketAddr,
        owner: OwnFd,
    },
    /// The application has closed its last listener on `addr`: closes the control socket once it is not needed.
    Unlisten {
        addr: SocketAddr,
        done: Option<Done>,
    },
    /// Tells the user, at level `info`.
    Inform(String),
    /// Answered once everything sent before has been carried out.
    Flush {
        done: Done,
    },
    /// As `Flush`, once no flow that the application closed is suspended any more, or after `limit`.
    DrainExit {
        limit: Duration,
        done: Done,
    },
    /// The process is about to end: no limit applies to closed flows any more.
    ProcessEnds,
    /// Ends the session of the flows with these tokens. The answer is how many there were, without closed ones that are not delivered.
    EndFlows {
        tokens: RangeInclusive<FlowToken>,
        how: FlowsEnd,
        answer: Arc<AtomicUsize>,
        done: Done,
    },
    /// The first thread of the process ends, with these signals blocked, while others may go on.
    FirstThreadEnds(SignalMask),
    /// Ends the agent thread.
    Retire,
}

/// What an agent knows, for layers above.
#[derive(Default)]
pub(crate) struct AgentSurvey {
    pub(crate) flows: Vec<SurveyedFlow>,
    pub(crate) peers: Vec<SurveyedPeer>,
}

/// How [`Command::EndFlows`] ends flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FlowsEnd {
    /// The front end is gone.
    Forgotten,
    /// The agent is about to end: flows without a transport get an error, all others become plain TCP.
    Lost,
    /// They become plain TCP, flows without a transport as soon as they have one. Closed flows that are not delivered yet go on.
    Plain,
}

/// The application's end, for any thread and any signal handler; never blocks.
pub(crate) struct CommandSender {
    shared: Arc<CommandsShared>,
}

/// The agent's end.
pub(crate) struct CommandReceiver {
    taken: Taken<Command>,
    shared: Arc<CommandsShared>,
}

struct CommandsShared {
    queue: Queue<Command>,
    /// The agent thread is gone.
    closed: AtomicBool,
    wake: OwnFd,
    /// A wake-up is on its way: a burst of commands costs one system call.
    awake: AtomicBool,
    /// A timer that wakes the agent for commands that are not urgent.
    soon: OwnFd,
    /// `soon` is set.
    waking: AtomicBool,
    /// Every command is urgent from now on.
    hurry: AtomicBool,
}

/// Longest time until the agent takes a command that is not urgent.
const SOON: Duration = Duration::from_millis(20);

const LONG: Duration = Duration::from_secs(3600);

/// A new queue.
pub(crate) fn channel() -> io::Result<(CommandSender, CommandReceiver)> {
    let shared = Arc::new(CommandsShared {
        queue: Queue::new(),
        closed: AtomicBool::new(false),
        wake: slim_sys::eventfd()?,
        awake: AtomicBool::new(false),
        soon: slim_sys::timerfd()?,
        waking: AtomicBool::new(false),
        hurry: AtomicBool::new(false),
    });
    memory::begin(shared.wake.raw());
    Mark::WAKE.set(shared.wake.raw());
    Mark::SOON.set(shared.soon.raw());
    let sender = CommandSender {
        shared: shared.clone(),
    };
    let taken = Taken::new();
    Ok((sender, CommandReceiver { taken, shared }))
}

impl CommandSender {
    /// The descriptor that wakes the agent.
    pub(crate) fn wake_number(&self) -> RawFd {
        self.shared.wake.raw()
    }

    /// Whether the receiver has been woken, and has not [rearmed](CommandReceiver::rearm) yet.
    pub(crate) fn is_awake(&self) -> bool {
        self.shared.awake.load(Ordering::Acquire)
    }

    /// Whether the agent has ended the sessions of all flows, and begins no others.
    pub(crate) fn is_over(&self) -> bool {
        self.shared.hurry.load(Ordering::Acquire) || self.shared.is_lost()
    }

    /// Queues a command; false if the agent thread is gone, or cannot be woken any more.
    pub(crate) fn send(&self, command: Command) -> bool {
        if self.shared.is_lost() {
            return false;
        }
        self.shared.queue.put(command);
        if !self.shared.awake.swap(true, Ordering::AcqRel) {
            slim_sys::signal_eventfd(self.shared.wake.raw());
        }
        true
    }

    /// Queues a command that is not urgent: it is carried out after [`SOON`], or when the agent next runs for another
    /// reason.
    pub(crate) fn send_later(&self, command: Command) -> bool {
        if self.shared.hurry.load(Ordering::Acquire) {
            return self.send(command);
        }
        if self.shared.is_lost() {
            return false;
        }
        self.shared.queue.put(command);
        if !self.shared.awake.load(Ordering::Acquire)
            && !self.shared.waking.swap(true, Ordering::AcqRel)
        {
            let soon = self.shared.soon.raw();
            if !Mark::SOON.is_on(soon) {
                self.shared.closed.store(true, Ordering::Release);
                return false;
            }
            slim_sys::set_timerfd(soon, Some(SOON));
        }
        true
    }
}

impl CommandsShared {
    /// Whether the agent thread is gone, or sleeps for ever because the program has closed the descriptor that wakes
    /// it. Epoll forgets a descriptor that is closed, even after a command has signalled it and before the thread wakes
    /// up. So this must be checked for every command, and not only when the thread has to be woken.
    fn is_lost(&self) -> bool {
        if !self.closed.load(Ordering::Acquire) && !Mark::WAKE.is_on(self.wake.raw()) {
            self.closed.store(true, Ordering::Release);
        }
        self.closed.load(Ordering::Acquire)
    }
}

impl CommandReceiver {
    /// Whether nothing wakes this thread any more.
    pub(crate) fn is_lost(&self) -> bool {
        self.shared.is_lost()
    }

    /// The descriptor that becomes readable when commands that are not urgent are due.
    pub(crate) fn soon(&self) -> BorrowedFd<'_> {
        self.shared.soon.as_fd()
    }

    /// The thread no longer waits on [`soon`](Self::soon): makes every command urgent.
    pub(crate) fn all_urgent(&self) {
        self.shared.hurry.store(true, Ordering::Release);
        self.wake();
    }

    /// As [`rearm`](Self::rearm), for commands that are not urgent.
    pub(crate) fn rearm_soon(&self) {
        slim_sys::reset_eventfd(self.shared.soon.raw());
        self.shared.waking.store(false, Ordering::Release);
    }

    /// The next command, if one is there.
    pub(crate) fn next(&self) -> Option<Command> {
        self.taken.next(&self.shared.queue)
    }

    /// Waits for the next command.
    pub(crate) fn wait(&self) -> Command {
        loop {
            let lost = self.shared.is_lost();
            if !lost {
                self.rearm();
            }
            match self.next() {
                Some(command) => return command,
                // No thread sends any more.
                None if lost => slim_sys::nap(LONG),
                None => {
                    slim_sys::poll(self.shared.wake.raw(), libc::POLLIN, None);
                }
            }
        }
    }

    /// Wakes the agent thread.
    pub(crate) fn wake(&self) {
        if !self.shared.is_lost() {
            slim_sys::signal_eventfd(self.shared.wake.raw());
        }
    }

    /// Must be called before the commands are taken: a command sent after the last [`next`](Self::next) then wakes the
    /// thread again.
    pub(crate) fn rearm(&self) {
        slim_sys::reset_eventfd(self.shared.wake.raw());
        self.shared.awake.store(false, Ordering::Release);
    }
}

impl Drop for CommandReceiver {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Release);
    }
}

impl AsFd for CommandReceiver {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.wake.as_fd()
    }
}

impl AsRawFd for CommandReceiver {
    fn as_raw_fd(&self) -> RawFd {
        self.shared.wake.raw()
    }
}
