//! Flows: their state, and their end. The data calls are in `transfer`.

use std::ffi::{c_int, c_void};
use std::net::SocketAddr;
use std::sync::Arc;

use libc::{sockaddr, socklen_t};
use slim::Flow;

use crate::address;
use crate::codes::Refusal;
use crate::guard::{ApiHandle, Health, entry, limit, on};
use crate::shared::{FlowBody, SessionShared};
use crate::types::{self, SLIM_STATE_CONNECTING, SLIM_STATE_NEGOTIATING, SlimStats, copy_out};

/// A byte stream between two processes, in both directions.
pub struct SlimFlow {
    pub(crate) body: Arc<FlowBody>,
    pub(crate) shared: Arc<SessionShared>,
}

impl ApiHandle for SlimFlow {
    fn health(&self) -> &Health {
        &self.shared.health
    }
}

impl SlimFlow {
    pub(crate) fn new(flow: Flow, shared: &Arc<SessionShared>) -> *mut Self {
        let (body, shared) = (shared.add_flow(flow), shared.clone());
        Box::into_raw(Box::new(Self { body, shared }))
    }
}

/// Returns the flow's number, which updates and events have. Numbers of flows and endpoints are unique in the process and are never reused.
/// 0 if `flow` is NULL. Any thread.
///
/// # Safety
/// `flow` is NULL or a handle that is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_flow_id(flow: *const SlimFlow) -> u64 {
    // SAFETY: promised by the caller.
    unsafe { flow.as_ref() }.map_or(0, |flow| flow.body.flow.id())
}

/// Sets the pointer that later updates and events of the flow have as `context`. The library does not use it otherwise. Set it before
/// the next slim_session_progress(): updates from before have NULL.
///
/// Returns 0, SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread.
///
/// # Safety
/// `flow` is NULL or a handle that is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_flow_set_context(
    flow: *const SlimFlow,
    context: *mut c_void,
) -> c_int {
    // SAFETY: promised by the caller.
    unsafe {
        on("slim_flow_set_context", flow, |flow| {
            flow.shared.set_context(flow.body.flow.id(), context);
            Ok(0)
        }) as c_int
    }
}

/// Returns the flow's state, SLIM_STATE_..., or SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. With SLIM_STATE_FAILED, `*error` is the error of its
/// connection as in `errno`, or 0 if the peer's stream has ended in order; else 0. `error` may be NULL. Any thread.
///
/// # Safety
/// `flow` is NULL or a handle that is not closed; `error` is NULL or points to an int.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_flow_state(flow: *const SlimFlow, error: *mut c_int) -> c_int {
    // SAFETY: promised by the caller.
    unsafe {
        on("slim_flow_state", flow, |flow| {
            let (state, errno) = types::state(flow.body.flow.state());
            if let Some(error) = error.as_mut() {
                *error = errno;
            }
            Ok(state as isize)
        }) as c_int
    }
}

/// Waits until the first connection is established, at most `timeout_ms` milliseconds (negative: no limit).
///
/// Returns 0, SLIM_ERR_TIMEOUT (the connection is still being made), SLIM_ERR_KERNEL (it failed), SLIM_ERR_CLOSED, SLIM_ERR_INVALID or
/// SLIM_ERR_INTERNAL. Any thread.
///
/// # Safety
/// `flow` is NULL or a handle that is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_flow_wait_connected(
    flow: *const SlimFlow,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: promised by the caller.
    unsafe {
        on("slim_flow_wait_connected", flow, |flow| {
            let connected = flow.body.flow.wait_connected(limit(timeout_ms));
            Ok(connected.map(|()| 0)?)
        }) as c_int
    }
}

/// Waits until it is known whether the peer has SLIM, at most `timeout_ms` milliseconds (negative: no limit). A flow can be used before.
///
/// Returns the flow's state then, SLIM_STATE_PROTECTED for example; SLIM_ERR_TIMEOUT, SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread.
///
/// # Safety
/// `flow` is NULL or a handle that is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_flow_wait_negotiated(
    flow: *const SlimFlow,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: promised by the caller.
    unsafe {
        on("slim_flow_wait_negotiated", flow, |flow| {
            let state = flow.body.flow.wait_negotiated(limit(timeout_ms));
            match types::state(state).0 {
                SLIM_STATE_CONNECTING | SLIM_STATE_NEGOTIATING => Err(Refusal::TIMEOUT),
                state => Ok(state as isize),
            }
        }) as c_int
    }
}

/// Stores both ends of the flow's present connection in `*local` and `*remote`, as getsockname() does: the lengths are the room there, and
/// then the lengths of the addresses. Each pair of pointers may be NULL.
///
/// Returns 0; SLIM_ERR_AGAIN: the flow has no connection at the moment; SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread.
///
/// # Safety
/// `flow` is NULL or a handle that is not closed; the addresses point to as many bytes as their lengths say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_flow_connection(
    flow: *const SlimFlow,
    local: *mut sockaddr,
    locallen: *mut socklen_t,
    remote: *mut sockaddr,
    remotelen: *mut socklen_t,
) -> c_int {
    // SAFETY: promised by the caller.
    unsafe {
        on("slim_flow_connection", flow, |flow| {
            let (here, there) = flow.body.flow.connection().ok_or(Refusal::AGAIN)?;
            let write = |from: SocketAddr, to: *mut sockaddr, len: *mut socklen_t| match to
                .is_null()
                && len.is_null()
            {
                true => Ok(0),
                false => address::write(from, to, len),
            };
            write(here, local, locallen)?;
            write(there, remote, remotelen)
        }) as c_int
    }
}

/// Stores the flow's counters in `*stats`. `size` is sizeof(*stats).
///
/// Returns 0, SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread.
///
/// # Safety
/// `flow` is NULL or a handle that is not closed; `stats` points to `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_flow_stats(
    flow: *const SlimFlow,
    stats: *mut SlimStats,
    size: usize,
) -> c_int {
    // SAFETY: promised by the caller.
    unsafe {
        on("slim_flow_stats", flow, |flow| {
            let of_flow = SlimStats {
                posted: flow.body.ledger.posted(),
                completed: flow.body.flow.completed(),
                ..flow.body.flow.stats().into()
            };
            copy_out(&of_flow, stats, size)
        }) as c_int
    }
}

/// Ends this direction: the peer receives all sent and posted bytes, then the end of the stream. This end can still receive.
///
/// Returns 0, SLIM_ERR_AGAIN (the first connection is not established yet), SLIM_ERR_CLOSED, SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any
/// thread.
///
/// # Safety
/// `flow` is NULL or a handle that is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_flow_finish(flow: *const SlimFlow) -> c_int {
    // SAFETY: promised by the caller.
    unsafe {
        on("slim_flow_finish", flow, |flow| {
            Ok(flow.body.flow.finish().map(|()| 0)?)
        }) as c_int
    }
}

/// Closes the flow and frees it. The library still delivers the sent bytes, even if the connection breaks (SLIM_LINGER). As with close(),
/// the flow is reset if there are bytes that this end has not received. Posts that the kernel has not taken yet are still sent by
/// slim_session_progress() and slim_session_close(); each post is still reported, with SLIM_ERR_CLOSED. To know that the peer has the
/// bytes, wait for the completions before. There are no more updates with the flow's context, except those that slim_session_progress() has
/// returned already. NULL is allowed and does nothing. No other thread may use the flow during the call.
///
/// # Safety
/// `flow` is NULL or a handle that is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_flow_close(flow: *mut SlimFlow) {
    // SAFETY: promised by the caller.
    unsafe { close("slim_flow_close", flow, false) }
}

/// Closes the flow, discards undelivered bytes, and frees it: the peer gets ECONNRESET. Otherwise like slim_flow_close().
///
/// # Safety
/// `flow` is NULL or a handle that is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_flow_reset(flow: *mut SlimFlow) {
    // SAFETY: promised by the caller.
    unsafe { close("slim_flow_reset", flow, true) }
}

/// # Safety
/// `flow` is NULL or a handle that is not closed.
unsafe fn close(name: &str, flow: *mut SlimFlow, reset: bool) {
    entry(name, || {
        if flow.is_null() {
            return Ok(0);
        }
        // SAFETY: a handle that `new` has made, and which is not used any more.
        let handle = *unsafe { Box::from_raw(flow) };
        let SlimFlow { body, shared } = handle;
        // Flows of a broken session may have lost bytes, so their ends must not look orderly.
        let reset = reset || shared.health.is_broken();
        match shared.remove_flow(body) {
            Some(flow) if reset => flow.reset(),
            flow => drop(flow),
        }
        Ok(0)
    });
}
