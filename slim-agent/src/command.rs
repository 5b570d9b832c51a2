//! The queue between application threads and the agent thread.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use slim_core::endpoint::Opened;
use slim_core::{Cause, FinHow, FlowToken, Role};

use crate::FlowIo;
use crate::done::Done;
use crate::fds::OwnFd;
use crate::memory;
use crate::queue::{Queue, Taken};
use crate::sys;

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
        opened: Opened,
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
    /// The same is about to happen, and the peer is told.
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
pub(crate) struct Sender {
    shared: Arc<Shared>,
}

/// The agent's end.
pub(crate) struct Receiver {
    taken: Taken<Command>,
    shared: Arc<Shared>,
}

struct Shared {
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
const SOON: Duration = Duration::from_millis(5);

/// A new queue.
pub(crate) fn channel() -> io::Result<(Sender, Receiver)> {
    let shared = Arc::new(Shared {
        queue: Queue::new(),
        closed: AtomicBool::new(false),
        wake: sys::eventfd()?,
        awake: AtomicBool::new(false),
        soon: sys::timerfd()?,
        waking: AtomicBool::new(false),
        hurry: AtomicBool::new(false),
    });
    memory::begin(shared.wake.raw());
    let sender = Sender {
        shared: shared.clone(),
    };
    let taken = Taken::new();
    Ok((sender, Receiver { taken, shared }))
}

impl Sender {
    /// Queues a command; false if the agent thread is gone, or cannot be woken any more: some programs close all
    /// numbers that there are.
    pub(crate) fn send(&self, command: Command) -> bool {
        if self.shared.closed.load(Ordering::Acquire) {
            return false;
        }
        self.shared.queue.put(command);
        if !self.shared.awake.swap(true, Ordering::AcqRel)
            && !sys::eventfd_wake(self.shared.wake.raw())
        {
            self.shared.closed.store(true, Ordering::Release);
            return false;
        }
        true
    }

    /// Queues a command that is carried out within some milliseconds, or before the agent does anything else.
    pub(crate) fn send_later(&self, command: Command) -> bool {
        if self.shared.hurry.load(Ordering::Acquire) {
            return self.send(command);
        }
        if self.shared.closed.load(Ordering::Acquire) {
            return false;
        }
        self.shared.queue.put(command);
        if !self.shared.awake.load(Ordering::Acquire)
            && !self.shared.waking.swap(true, Ordering::AcqRel)
        {
            sys::timerfd_set(self.shared.soon.raw(), Some(SOON));
        }
        true
    }
}

impl Receiver {
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
        sys::eventfd_clear(self.shared.soon.raw());
        self.shared.waking.store(false, Ordering::Release);
    }

    /// The next command, if one is there.
    pub(crate) fn next(&self) -> Option<Command> {
        self.taken.next(&self.shared.queue)
    }

    /// The next command, when one comes.
    pub(crate) fn wait(&self) -> Command {
        loop {
            self.rearm();
            match self.next() {
                Some(command) => return command,
                None => sys::wait_readable(self.shared.wake.raw()),
            }
        }
    }

    /// Makes the agent thread look again.
    pub(crate) fn wake(&self) {
        sys::eventfd_wake(self.shared.wake.raw());
    }

    /// Must come before the commands are taken out: one sent after the last [`next`](Self::next)
    /// then wakes us again.
    pub(crate) fn rearm(&self) {
        sys::eventfd_clear(self.shared.wake.raw());
        self.shared.awake.store(false, Ordering::Release);
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Release);
    }
}

impl AsFd for Receiver {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.wake.as_fd()
    }
}

impl AsRawFd for Receiver {
    fn as_raw_fd(&self) -> RawFd {
        self.shared.wake.raw()
    }
}
