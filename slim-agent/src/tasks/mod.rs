//! Tasks that the driver wants to be started. The driver does not know how they run: tasks call the driver, and not the
//! other way round.

pub(crate) mod mailbox;
pub(crate) mod order;
pub(crate) mod spawn;

use std::cell::RefCell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use slim_core::ConnId;
use slim_core::transport::Path;
use slim_sys::{OwnFd, SignalMask};
use tokio::io::unix::AsyncFd;
use tokio::task::JoinHandle;

use crate::FlowIo;
use crate::commands::done::Done;
use crate::control::socket::ControlSocket;
use crate::listeners::neighbour::Neighbour;
use crate::tasks::mailbox::Receiver;
use crate::tasks::order::Order;
use crate::transport::Listener;

/// What a task does.
pub(crate) enum Task {
    /// Receives datagrams on a control socket.
    Receive(Rc<ControlSocket>),
    /// Accepts resume connections.
    Accept {
        listener: Box<dyn Listener>,
        /// The place of its locator in the driver's list; `None` for TCP.
        announced: Option<usize>,
    },
    /// Makes a resume connection, and exchanges messages on it.
    Connect {
        conn: ConnId,
        io: Option<Arc<dyn FlowIo>>,
        path: Path,
        small_segments: bool,
        orders: Receiver<Order>,
    },
    /// Serves other processes that accept at an address of ours.
    Serve(SocketAddr, AsyncFd<OwnFd>),
    /// Receives from the owner of an address at which we accept.
    Hear(SocketAddr, Rc<Neighbour>),
    /// Closes the control socket of a listener, once its receiving task has ended.
    Close {
        addr: SocketAddr,
        socket: Option<(Rc<ControlSocket>, RunningTask)>,
        done: Option<Done>,
    },
    /// Ends the process once the application has no thread left.
    ExitWhenAlone(SignalMask),
}

/// Tasks to be started when the driver's turn is over.
#[derive(Default)]
pub(crate) struct Tasks(Vec<(Task, Slot)>);

impl Tasks {
    /// Has a task started, which runs at most as long as the returned handle lives.
    pub(crate) fn start(&mut self, task: Task) -> RunningTask {
        let slot = Slot::default();
        self.0.push((task, slot.clone()));
        RunningTask(slot)
    }

    /// Has a task started that ends by itself.
    pub(crate) fn start_and_forget(&mut self, task: Task) {
        self.0.push((task, Slot::default()));
    }

    /// Calls `spawn` for each task that is still wanted.
    pub(crate) fn drain(&mut self, mut spawn: impl FnMut(Task) -> JoinHandle<()>) {
        for (task, slot) in self.0.drain(..) {
            let mut slot = slot.borrow_mut();
            if let TaskState::Waiting = *slot {
                *slot = TaskState::Started(spawn(task));
            }
        }
    }
}

type Slot = Rc<RefCell<TaskState>>;

#[derive(Default)]
enum TaskState {
    #[default]
    Waiting,
    Started(JoinHandle<()>),
    Ended,
}

/// The handle of a task, which ends when the handle is dropped.
pub(crate) struct RunningTask(Slot);

impl RunningTask {
    /// Ends the task, and waits until it has ended.
    pub(crate) async fn end(self) {
        let state = self.0.replace(TaskState::Ended);
        if let TaskState::Started(task) = state {
            task.abort();
            // An error is the cancellation that was asked for.
            let _ = task.await;
        }
    }
}

impl Drop for RunningTask {
    fn drop(&mut self) {
        if let TaskState::Started(task) = self.0.replace(TaskState::Ended) {
            task.abort();
        }
    }
}
