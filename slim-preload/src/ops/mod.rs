//! The logic of hooked calls on managed descriptors; [`crate::hooks`] only marshals.

pub mod buffers;
pub mod closing;
pub mod demoting;
pub mod duplicating;
pub mod epoll;
pub mod files;
pub mod left;
pub mod limit;
pub mod many;
pub mod names;
pub mod passing;
pub mod pieces;
pub mod poll;
pub mod receive;
pub mod rings;
pub mod select;
pub mod socket_options;
pub mod sockets;
pub mod told;
pub mod transmit;

use crate::flow::Flow;
pub use crate::sys::fail;
use crate::table;
use crate::transport::CtlGuard;
use crate::{direct, sys};
use libc::c_int;
use slim_stream::Inside;

/// How a call reaches a descriptor.
pub enum Way {
    /// Directly through the kernel: the descriptor is no flow.
    Plain,
    /// The call is inside the gate of a flow whose transport is under the number, counted. Call [`Flow::leave`] afterwards.
    In(&'static Flow),
    /// The flow's gate is barred.
    Barred(&'static Flow),
}

/// Enters the flow behind `fd`, if there is one, counted.
pub fn enter(fd: c_int) -> Way {
    loop {
        let Some(flow) = table::flow(fd).filter(|_| !crate::runtime::is_another_process()) else {
            return Way::Plain;
        };
        match (flow.stream.enter(), table::is_still(fd, flow)) {
            (true, true) => return Way::In(flow),
            (false, true) => return Way::Barred(flow),
            (true, false) => flow.leave(Inside::Counted),
            (false, false) => {}
        }
    }
}

/// After a call that failed: whether the file under the number is not the flow's any more, because it is no socket. Then the
/// application has closed the number.
#[cold]
pub fn is_lost(flow: &'static Flow, fd: c_int, errno: c_int) -> bool {
    let no_socket = matches!(errno, libc::ENOTSOCK | libc::EBADF);
    if no_socket && !sys::keep_errno(crate::runtime::in_own_process) {
        // The caller is a vforked child, which has replaced the file where no hook saw it. The flow is its parent's.
        direct::numbers_differ();
        return true;
    }
    no_socket && flow.own_at(fd).is_none()
}

/// The next step of a call.
pub enum Next {
    /// Look at the descriptor again.
    Again,
    /// Return this (errno is set when it is -1).
    Return(isize),
}

/// A non-blocking call returns with nothing. If the program's polling keeps the agent from running, the thread naps.
#[inline]
pub fn came_back_empty() {
    if slim_agent::turn::is_requested() {
        slim_agent::turn::yield_to_agent();
    }
}

/// Waits until the flow changes. `option` is the socket option that limits the wait (`SO_RCVTIMEO` or
/// `SO_SNDTIMEO`).
pub fn wait(flow: &'static Flow, ctl: CtlGuard, fd: c_int, dontwait: bool, option: c_int) -> Next {
    if dontwait || ctl.is_nonblocking(fd) {
        if told::wait(flow, ctl, fd, option == libc::SO_SNDTIMEO) {
            return Next::Again;
        }
        came_back_empty();
        return Next::Return(fail(libc::EAGAIN));
    }
    let limit = ctl.old().and_then(|t| timeout(t, option));
    let seen = flow.stream.signal();
    drop(ctl);
    match flow.stream.wait(seen, limit) {
        Err(libc::EINTR) => Next::Return(fail(libc::EINTR)),
        Err(libc::ETIMEDOUT) => Next::Return(fail(libc::EAGAIN)),
        _ => Next::Again,
    }
}

/// A socket's own time limit for blocking calls.
fn timeout(fd: c_int, option: c_int) -> Option<std::time::Duration> {
    let t: libc::timeval = sys::option(fd, libc::SOL_SOCKET, option)?;
    let limit = std::time::Duration::new(
        t.tv_sec.max(0) as u64,
        (t.tv_usec.max(0) as u32).saturating_mul(1000),
    );
    (!limit.is_zero()).then_some(limit)
}

/// Whether an errno means that the transport is dead. The kernel's state of the connection decides, because several errnos can
/// also be transient.
pub fn broken(fd: c_int, errno: c_int) -> bool {
    let passing = [
        libc::EAGAIN,
        libc::EINTR,
        libc::EFAULT,
        libc::EINVAL,
        libc::EBADF,
        libc::ENOTSOCK,
        libc::ENOMEM,
    ];
    !passing.contains(&errno) && sys::keep_errno(|| sys::is_over(fd))
}
