//! Endpoints.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;

use libc::{sockaddr, socklen_t};
use slim::Endpoint;

use crate::address;
use crate::codes::Refusal;
use crate::flow::SlimFlow;
use crate::guard::{ApiHandle, Health, entry, limit, on};
use crate::shared::SessionShared;

/// An address at which a session accepts flows.
pub struct SlimEndpoint {
    endpoint: Endpoint,
    shared: Arc<SessionShared>,
}

impl ApiHandle for SlimEndpoint {
    fn health(&self) -> &Health {
        &self.shared.health
    }
}

impl SlimEndpoint {
    pub(crate) fn new(endpoint: Endpoint, shared: &Arc<SessionShared>) -> *mut Self {
        shared.add_endpoint(endpoint.id());
        let shared = shared.clone();
        Box::into_raw(Box::new(Self { endpoint, shared }))
    }
}

/// Returns the endpoint's number, which updates have as `id`. Numbers of flows and endpoints are unique in the process and are never
/// reused. 0 if `endpoint` is NULL. Any thread.
///
/// # Safety
/// `endpoint` is NULL or a handle that is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_endpoint_id(endpoint: *const SlimEndpoint) -> u64 {
    // SAFETY: promised by the caller.
    unsafe { endpoint.as_ref() }.map_or(0, |endpoint| endpoint.endpoint.id())
}

/// Sets the pointer that later updates of the endpoint have as `context`. The library does not use it otherwise.
///
/// Returns 0, SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread.
///
/// # Safety
/// `endpoint` is NULL or a handle that is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_endpoint_set_context(
    endpoint: *const SlimEndpoint,
    context: *mut c_void,
) -> c_int {
    // SAFETY: promised by the caller.
    unsafe {
        on("slim_endpoint_set_context", endpoint, |endpoint| {
            let id = endpoint.endpoint.id();
            endpoint.shared.set_context(id, context);
            Ok(0)
        }) as c_int
    }
}

/// Stores the address at which the endpoint listens in `*addr`, as getsockname() does: `*addrlen` is the room there, and then the length
/// of the address.
///
/// Returns 0, SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread.
///
/// # Safety
/// `endpoint` is NULL or a handle that is not closed; `addr` points to `*addrlen` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_endpoint_address(
    endpoint: *const SlimEndpoint,
    addr: *mut sockaddr,
    addrlen: *mut socklen_t,
) -> c_int {
    // SAFETY: promised by the caller.
    unsafe {
        on("slim_endpoint_address", endpoint, |endpoint| {
            address::write(endpoint.endpoint.local_addr(), addr, addrlen)
        }) as c_int
    }
}

/// Stores the endpoint's blob, a few hundred bytes, in `blob`. `*len` is the room there, and then the length of the blob. The program sends
/// the blob to the other processes of the job by its own means; they pass it to slim_connect_blob(). The blob holds a secret: a process
/// that has the blob, and the job key if there is one, can open a flow. The first call opens one more listening port.
///
/// Returns 0; SLIM_ERR_ROOM, and `*len` is the length that is needed; SLIM_ERR_KERNEL; SLIM_ERR_TIMEOUT: the library's thread did not tell
/// the host's addresses in time; SLIM_ERR_CLOSED; SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread.
///
/// # Safety
/// `endpoint` is NULL or a handle that is not closed; `blob` points to `*len` bytes, or is NULL and `*len` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_endpoint_blob(
    endpoint: *const SlimEndpoint,
    blob: *mut c_void,
    len: *mut usize,
) -> c_int {
    // SAFETY: promised by the caller.
    unsafe {
        on("slim_endpoint_blob", endpoint, |endpoint| {
            if len.is_null() || (blob.is_null() && *len > 0) {
                return Err(Refusal::INVALID);
            }
            let bytes = endpoint.endpoint.blob()?;
            let room = std::mem::replace(&mut *len, bytes.len());
            if room < bytes.len() {
                return Err(Refusal::ROOM);
            }
            ptr::copy_nonoverlapping(bytes.as_ptr(), blob.cast::<u8>(), bytes.len());
            Ok(0)
        }) as c_int
    }
}

/// Accepts a flow and stores it in `*flow`; close it by slim_flow_close(). Waits at most `timeout_ms` milliseconds (negative: no limit; 0:
/// does not wait). Flows that were opened by blob are accepted in the same way: call it until SLIM_ERR_AGAIN at each
/// SLIM_UPDATE_ACCEPTABLE, since the endpoint answers their connectors in this call.
///
/// Returns 0, SLIM_ERR_AGAIN (only with 0), SLIM_ERR_TIMEOUT, SLIM_ERR_CLOSED, SLIM_ERR_KERNEL (for example with `errno` EMFILE),
/// SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread.
///
/// # Safety
/// `endpoint` is NULL or a handle that is not closed; `flow` points to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_accept(
    endpoint: *const SlimEndpoint,
    timeout_ms: c_int,
    flow: *mut *mut SlimFlow,
) -> c_int {
    // SAFETY: promised by the caller.
    unsafe {
        on("slim_accept", endpoint, |endpoint| {
            if flow.is_null() {
                return Err(Refusal::INVALID);
            }
            let accepted = match timeout_ms {
                0 => endpoint.endpoint.try_accept()?,
                _ => endpoint.endpoint.accept(limit(timeout_ms))?,
            };
            *flow = SlimFlow::new(accepted, &endpoint.shared);
            Ok(0)
        }) as c_int
    }
}

/// Closes the endpoint and frees it; accepted flows stay open. There are no more updates with its context, except those that
/// slim_session_progress() has returned already. NULL is allowed and does nothing. No other thread may use the endpoint during the call.
///
/// # Safety
/// `endpoint` is NULL or a handle that is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_endpoint_close(endpoint: *mut SlimEndpoint) {
    entry("slim_endpoint_close", || {
        if !endpoint.is_null() {
            // SAFETY: a handle that `new` has made, and which is not used any more.
            let endpoint = unsafe { Box::from_raw(endpoint) };
            endpoint.shared.remove(endpoint.endpoint.id());
        }
        Ok(0)
    });
}
