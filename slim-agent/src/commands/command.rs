//! The queue between application threads and the agent thread.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use slim_core::endpoint::{Agreed, Announcement, Opened};
use slim_core::{Cause, FinHow, FlowToken, Role};

use crate::FlowIo;
use crate::commands::done::Done;
use crate::commands::queue::{Queue, Taken};
use crate::failure::memory;
use slim_sys::OwnFd;
use slim_sys::fds::Mark;
use slim_sys::reserve;

/// What an application thread wants done. Carried out in the order sent.
pub(crate) enum Command {
    Open {
        token: FlowToken,
        io: Arc<dyn FlowIo>,
        role: Role,
        local: SocketAddr,
        remote: SocketAddr,
    },
    /// The same for a connection for which OPEN has been sent.
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
    /// What the other end of such a flow is to know of this process.
    Describe {
        answer: Arc<Mutex<Option<Announcement>>>,
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
    Finish {
        token: FlowToken,
        final_seq: u64,
        how: FinHow,
        /// The peer knows it already, or need not know it.
        told: bool,
    },
    /// The application sends no more after `final_seq` bytes, and with [`FinHow::Close`] takes nothing more; it keeps the
    /// flow.
    Shut {
        token: FlowToken,
        final_seq: u64,
        how: FinHow,
    },
    /// The flow is about to be finished with, and the peer is told.
    Announce {
        token: FlowToken,
        final_seq: u64,
        how: FinHow,
    },
    Dirty {
        token: FlowToken,
    },
    Demote {
        token: FlowToken,
    },
    /// The same, as soon as the peer has heard it.
    DemoteHeard {
        token: FlowToken,
    },
    Gone {
        token: FlowToken,
    },
    Listen {
        addr: SocketAddr,
        socket: OwnFd,
        /// Where other processes can claim connections to it.
        claims: Option<OwnFd>,
    },
    /// Another process has the control socket of `addr`.
    Elsewhere {
        addr: SocketAddr,
        owner: OwnFd,
    },
    /// Somebody stopped listening on `addr`; the control socket goes if nobody else does.
    Unlisten {
        addr: SocketAddr,
        done: Option<Done>,
    },
    /// Tell the user.
    Inform(String),
    /// Everything sent before this has been carried out.
    Flush {
        done: Done,
    },
    /// As `Flush`, and no flow that the application closed is suspended any more.
    DrainExit {
        limit: Duration,
        done: Done,
    },
    /// The first thread of the process ends, and others may go on.
    FirstLeaves,
    /// The thread is to end.
    Retire,
}

/// The application's end: any thread, and any signal's handler in it; never blocks.
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
    /// A wake-up is on its way, so that a burst of commands costs one system call.
    awake: AtomicBool,
    /// Wakes the agent for what is not urgent.
    soon: OwnFd,
    /// It is set.
    waking: AtomicBool,
    /// Everything is urgent.
    hurry: AtomicBool,
}

/// When the agent is to look at a command that is not urgent.
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
    reserve::begin(shared.wake.raw());
    Mark::SOON.set(shared.soon.raw());
    let sender = CommandSender {
        shared: shared.clone(),
    };
    let taken = Taken::new();
    Ok((sender, CommandReceiver { taken, shared }))
}

impl CommandSender {
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

    /// Queues a command that is carried out within some milliseconds, or before the agent does anything else.
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
    /// Whether the agent thread is gone, or sleeps for good. It does when somebody has closed what wakes it, even if that
    /// was between a command and its waking up: epoll forgets what is closed. So this has to be asked each time, and not
    /// only when the thread has to be woken.
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

    /// What becomes readable when there are commands that are not urgent.
    pub(crate) fn soon(&self) -> BorrowedFd<'_> {
        self.shared.soon.as_fd()
    }

    /// Nobody waits for that any more.
    pub(crate) fn all_urgent(&self) {
        self.shared.hurry.store(true, Ordering::Release);
        self.wake();
    }

    /// As [`rearm`](Self::rearm), for those.
    pub(crate) fn rearm_soon(&self) {
        slim_sys::reset_eventfd(self.shared.soon.raw());
        self.shared.waking.store(false, Ordering::Release);
    }

    /// The next command, if one is there.
    pub(crate) fn next(&self) -> Option<Command> {
        self.taken.next(&self.shared.queue)
    }

    /// The next command, when one comes.
    pub(crate) fn wait(&self) -> Command {
        loop {
            let lost = self.shared.is_lost();
            if !lost {
                self.rearm();
            }
            match self.next() {
                Some(command) => return command,
                // Nobody sends any more.
                None if lost => slim_sys::nap(LONG),
                None => {
                    slim_sys::poll(self.shared.wake.raw(), libc::POLLIN, None);
                }
            }
        }
    }

    /// Makes the agent thread look again.
    pub(crate) fn wake(&self) {
        if !self.shared.is_lost() {
            slim_sys::signal_eventfd(self.shared.wake.raw());
        }
    }

    /// Must come before the commands are taken out: one sent after the last [`next`](Self::next)
    /// then wakes us again.
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
