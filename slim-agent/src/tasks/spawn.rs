//! Starts the tasks that the driver wants.

use std::rc::Rc;
use std::time::Duration;

use slim_sys::SignalMask;
use tokio::io::Interest;
use tokio::task::JoinHandle;

use crate::control::receive::{self, receive_rest};
use crate::kernel::{readiness, task};
use crate::listeners::links;
use crate::resume;
use crate::shared::Shared;
use crate::tasks::Task;

/// Interval between checks whether this thread is the only one left.
const ALONE: Duration = Duration::from_millis(50);

/// Starts a task.
pub(crate) fn spawn(shared: &Rc<Shared>, task: Task) -> JoinHandle<()> {
    let shared = shared.clone();
    match task {
        Task::Receive(socket) => task::spawn(receive::serve(socket, shared)),
        Task::Accept {
            listener,
            announced,
        } => task::spawn(resume::listener::serve(listener, announced, shared)),
        Task::Connect {
            conn,
            io,
            path,
            small_segments,
            orders,
        } => task::spawn(resume::io::outgoing(
            conn,
            io,
            (path, small_segments),
            orders,
            shared,
        )),
        Task::Serve(addr, listener) => task::spawn(links::serve(addr, listener, shared)),
        Task::Hear(addr, link) => task::spawn(links::hear_owner(addr, link, shared)),
        Task::Close { addr, socket, done } => task::spawn(async move {
            if let Some((socket, receiving)) = socket {
                receiving.end().await;
                receive_rest(&socket, &shared);
                shared.with(|d, _| d.control.forget(&socket));
            }
            // Only after the socket is closed: other processes must find the port free when their links end.
            let serving = shared.with(|d, _| d.claims.close(addr));
            if let Some(serving) = serving {
                serving.end().await;
            }
            shared.with(|d, _| d.listener_closed(addr));
            if let Some(done) = done {
                done.tell();
            }
        }),
        Task::ExitWhenAlone(mask) => task::spawn(exit_when_alone(shared, mask)),
    }
}

/// The process ends with the last thread of the application. Once the first thread is gone, this checks periodically whether others
/// are left. The handlers that run at exit may use connections, so the agent goes on until they are done.
async fn exit_when_alone(shared: Rc<Shared>, mask: SignalMask) {
    let clock = slim_sys::timerfd().and_then(|clock| readiness::watch(clock, Interest::READABLE));
    let Ok(clock) = clock else { return };
    loop {
        slim_sys::set_timerfd(clock.get_ref().raw(), Some(ALONE));
        let Ok(mut ready) = clock.readable().await else {
            return;
        };
        slim_sys::reset_eventfd(clock.get_ref().raw());
        ready.clear_ready();
        // Two: the first thread, which has ended but still counts, and this one.
        if slim_sys::first_has_ended() && slim_sys::threads() <= 2 {
            if !slim_sys::exit_in_new_thread(mask) {
                // The C library calls `exit` when this thread returns.
                shared.retire();
            }
            return;
        }
    }
}
