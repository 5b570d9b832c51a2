//! The queue between application threads and the agent thread.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use slim_core::{Cause, FinHow, FlowToken, Role};

use crate::FlowIo;
use crate::fds::OwnFd;
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
    Fault {
        token: FlowToken,
        cause: Cause,
    },
    Finish {
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
        done: Option<mpsc::SyncSender<()>>,
    },
    /// Tell the user.
    Warn(String),
    /// Everything sent before this has been carried out.
    Flush {
        done: mpsc::SyncSender<()>,
    },
    /// As `Flush`, and no flow that the application closed is suspended any more.
    DrainExit {
        limit: Duration,
        done: mpsc::SyncSender<()>,
    },
}

/// The application's end: any thread, never blocks.
pub(crate) struct Sender {
    queue: mpsc::Sender<Command>,
    shared: Arc<Shared>,
}

/// The agent's end.
pub(crate) struct Receiver {
    queue: mpsc::Receiver<Command>,
    shared: Arc<Shared>,
}

struct Shared {
    wake: OwnFd,
    /// A wake-up is on its way, so that a burst of commands costs one system call.
    awake: AtomicBool,
}

/// A new queue.
pub(crate) fn channel() -> io::Result<(Sender, Receiver)> {
    let shared = Arc::new(Shared {
        wake: sys::eventfd()?,
        awake: AtomicBool::new(false),
    });
    let (sender, receiver) = mpsc::channel();
    Ok((
        Sender {
            queue: sender,
            shared: shared.clone(),
        },
        Receiver {
            queue: receiver,
            shared,
        },
    ))
}

impl Sender {
    /// Queues a command; false if the agent thread is gone.
    pub(crate) fn send(&self, command: Command) -> bool {
        if self.queue.send(command).is_err() {
            return false;
        }
        if !self.shared.awake.swap(true, Ordering::AcqRel) {
            sys::eventfd_wake(self.shared.wake.raw());
        }
        true
    }
}

impl Receiver {
    /// The next command, if one is there.
    pub(crate) fn next(&self) -> Option<Command> {
        self.queue.try_recv().ok()
    }

    /// The next command, when one comes; `None` if none can.
    pub(crate) fn wait(&self) -> Option<Command> {
        self.queue.recv().ok()
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
