//! Data calls: send, receive, post.

use std::ffi::{c_int, c_void};
use std::io::{IoSlice, IoSliceMut};
use std::slice;

use libc::{iovec, ssize_t};
use slim::{Flow, TransferError};

use crate::codes::Refusal;
use crate::flow::SlimFlow;
use crate::guard::{limit, on};
use crate::posts::UserPointer;

/// Pieces of one vectored call: as many as the kernel takes at most.
const PIECES: usize = 1024;

/// Sends bytes: waits at most `timeout_ms` milliseconds (negative: no limit; 0: does not wait) until at least one byte is sent. Returns the
/// number of bytes, which may be less than `len`.
///
/// Or returns SLIM_ERR_AGAIN (only with 0; SLIM_UPDATE_WRITABLE tells when to try again), SLIM_ERR_TIMEOUT, SLIM_ERR_LOST,
/// SLIM_ERR_SHUTDOWN, SLIM_ERR_CLOSED, SLIM_ERR_KERNEL (for example with `errno` ENOBUFS; the flow goes on), SLIM_ERR_INVALID or
/// SLIM_ERR_INTERNAL. Any thread; the order of concurrent sends is undefined.
///
/// # Safety
/// `flow` is NULL or a handle that is not closed; `data` points to `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_flow_send(
    flow: *const SlimFlow,
    data: *const c_void,
    len: usize,
    timeout_ms: c_int,
) -> ssize_t {
    // SAFETY: promised by the caller.
    unsafe {
        on("slim_flow_send", flow, |flow| {
            let data = bytes(data, len)?;
            let flow = &flow.body.flow;
            let sent = match timeout_ms {
                0 => flow.try_send(data),
                _ => flow.send(data, limit(timeout_ms)),
            };
            Ok(sent? as isize)
        })
    }
}

/// Like slim_flow_send(), with `count` pieces; at most 1024.
///
/// # Safety
/// `flow` is NULL or a handle that is not closed; `pieces` points to `count` elements, and each of them to its bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_flow_sendv(
    flow: *const SlimFlow,
    pieces: *const iovec,
    count: usize,
    timeout_ms: c_int,
) -> ssize_t {
    // SAFETY: promised by the caller.
    unsafe {
        on("slim_flow_sendv", flow, |flow| {
            let vector = check_pieces(pieces, count)?;
            let usable;
            let pieces = match vector.iter().any(|piece| piece.iov_base.is_null()) {
                // An `IoSlice` has the layout of an `iovec` on Unix, but its pointer is never NULL.
                false => slice::from_raw_parts(vector.as_ptr().cast::<IoSlice>(), count),
                true => {
                    let copy = |piece: &iovec| bytes(piece.iov_base, piece.iov_len);
                    let copies = vector.iter().map(|piece| Ok(IoSlice::new(copy(piece)?)));
                    usable = copies.collect::<Result<Vec<_>, Refusal>>()?;
                    &usable
                }
            };
            let flow = &flow.body.flow;
            let sent = match flow.try_send_vectored(pieces) {
                Err(TransferError::WouldBlock) if timeout_ms != 0 => {
                    let first = pieces.iter().find(|piece| !piece.is_empty());
                    flow.send(first.map_or(&[], |piece| &**piece), limit(timeout_ms))
                }
                sent => sent,
            };
            Ok(sent? as isize)
        })
    }
}

/// Sends all `len` bytes; waits at most `timeout_ms` milliseconds (negative: no limit). `*done` becomes the number of bytes sent, also
/// if the call fails; `done` may be NULL.
///
/// Returns 0, SLIM_ERR_TIMEOUT, or another error of slim_flow_send(). Any thread.
///
/// # Safety
/// `flow` is NULL or a handle that is not closed; `data` points to `len` bytes; `done` is NULL or points to a size_t.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_flow_send_all(
    flow: *const SlimFlow,
    data: *const c_void,
    len: usize,
    timeout_ms: c_int,
    done: *mut usize,
) -> c_int {
    // SAFETY: promised by the caller.
    unsafe {
        on("slim_flow_send_all", flow, |flow| {
            let data = bytes(data, len)?;
            let send = |from: usize, left| flow.body.flow.send(&data[from..], left);
            repeat(len, timeout_ms, done.as_mut(), send)
        }) as c_int
    }
}

/// Receives bytes: waits at most `timeout_ms` milliseconds (negative: no limit; 0: does not wait) until at least one byte is there. Returns
/// the number of bytes; 0 at the end of the peer's stream, or if `len` is 0.
///
/// Or returns SLIM_ERR_AGAIN (only with 0; SLIM_UPDATE_READABLE tells when to try again), SLIM_ERR_TIMEOUT, SLIM_ERR_LOST, SLIM_ERR_CLOSED,
/// SLIM_ERR_KERNEL, SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread; the order of concurrent receives is undefined.
///
/// # Safety
/// `flow` is NULL or a handle that is not closed; `into` points to `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_flow_recv(
    flow: *const SlimFlow,
    into: *mut c_void,
    len: usize,
    timeout_ms: c_int,
) -> ssize_t {
    // SAFETY: promised by the caller.
    unsafe {
        on("slim_flow_recv", flow, |flow| {
            let received = receive(&flow.body.flow, room(into, len)?, timeout_ms);
            Ok(received? as isize)
        })
    }
}

/// Like slim_flow_recv(), into `count` pieces; at most 1024.
///
/// # Safety
/// `flow` is NULL or a handle that is not closed; `pieces` points to `count` elements, and each of them to its memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_flow_recvv(
    flow: *const SlimFlow,
    pieces: *const iovec,
    count: usize,
    timeout_ms: c_int,
) -> ssize_t {
    // SAFETY: promised by the caller.
    unsafe {
        on("slim_flow_recvv", flow, |flow| {
            // A copy, since the program's array is constant.
            let mut slices = Vec::with_capacity(count);
            for piece in check_pieces(pieces, count)? {
                slices.push(IoSliceMut::new(room(piece.iov_base, piece.iov_len)?));
            }
            let flow = &flow.body.flow;
            let received = match flow.try_recv_vectored(&mut slices) {
                Err(TransferError::WouldBlock) if timeout_ms != 0 => {
                    match slices.iter_mut().find(|piece| !piece.is_empty()) {
                        Some(first) => flow.recv(first, limit(timeout_ms)),
                        None => Ok(0),
                    }
                }
                received => received,
            };
            Ok(received? as isize)
        })
    }
}

/// Receives exactly `len` bytes; waits at most `timeout_ms` milliseconds (negative: no limit). `*done` becomes the number of bytes
/// received, also if the call fails: these are not received again. `done` may be NULL.
///
/// Returns 0, SLIM_ERR_ENDED (the peer's stream ended before), SLIM_ERR_TIMEOUT, or another error of slim_flow_recv(). Any thread.
///
/// # Safety
/// `flow` is NULL or a handle that is not closed; `into` points to `len` bytes; `done` is NULL or points to a size_t.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_flow_recv_all(
    flow: *const SlimFlow,
    into: *mut c_void,
    len: usize,
    timeout_ms: c_int,
    done: *mut usize,
) -> c_int {
    // SAFETY: promised by the caller.
    unsafe {
        on("slim_flow_recv_all", flow, |flow| {
            let into = room(into, len)?;
            let receive = |from: usize, left| match flow.body.flow.recv(&mut into[from..], left) {
                Ok(0) => Err(TransferError::Ended),
                received => received,
            };
            repeat(len, timeout_ms, done.as_mut(), receive)
        }) as c_int
    }
}

/// Posts a buffer: sends its `len` bytes after all earlier sends and posts, and keeps the buffer itself, not a copy, until the peer's
/// kernel has all of them. Until then the program must not change or free the buffer: after a broken connection its bytes are sent again.
/// An update with SLIM_UPDATE_POST and `post` says when the buffer is free. Posts of a flow are reported in order, each of them exactly
/// once, unless the session is closed before: after slim_session_close() all buffers are free.
///
/// Never waits, so the program must limit the amount of posted bytes. slim_session_progress() sends the bytes that the kernel does not take
/// at once; until it has taken all, slim_flow_send() returns SLIM_ERR_AGAIN. The bytes of buffers of less than a kilobyte may be copied.
///
/// Returns 0, SLIM_ERR_LOST, SLIM_ERR_SHUTDOWN, SLIM_ERR_CLOSED, SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. After SLIM_ERR_INTERNAL the buffer
/// may be in use until the session is closed; after another error it is not in use, and is not reported. Any thread.
///
/// # Safety
/// `flow` is NULL or a handle that is not closed; `data` points to `len` bytes, which are not changed until the buffer is free.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_flow_post(
    flow: *const SlimFlow,
    data: *const c_void,
    len: usize,
    post: *mut c_void,
) -> c_int {
    // SAFETY: promised by the caller.
    unsafe {
        on("slim_flow_post", flow, |flow| {
            bytes(data, len)?;
            let (body, user) = (&flow.body, UserPointer(post));
            let first = || flow.shared.begins_to_post(body.flow.id());
            let data = data.cast::<u8>();
            let posted = body.ledger.post(&body.flow, data, len, user, first);
            Ok(posted.map(|()| 0)?)
        }) as c_int
    }
}

/// Waits until the peer's kernel has the bytes of all posts of the flow, at most `timeout_ms` milliseconds (negative: no limit). The next
/// slim_session_progress() reports them.
///
/// Returns 0, SLIM_ERR_TIMEOUT, SLIM_ERR_LOST, SLIM_ERR_SHUTDOWN, SLIM_ERR_CLOSED, SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread.
///
/// # Safety
/// `flow` is NULL or a handle that is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_flow_wait_completed(
    flow: *const SlimFlow,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: promised by the caller.
    unsafe {
        on("slim_flow_wait_completed", flow, |flow| {
            let completed = flow.body.flow.wait_completed(limit(timeout_ms));
            Ok(completed.map(|()| 0)?)
        }) as c_int
    }
}

fn receive(flow: &Flow, into: &mut [u8], timeout_ms: c_int) -> Result<usize, TransferError> {
    match timeout_ms {
        0 => flow.try_recv(into),
        _ => flow.recv(into, limit(timeout_ms)),
    }
}

/// Repeats `step(done, time left)` until it has transferred `len` bytes.
fn repeat(
    len: usize,
    timeout_ms: c_int,
    done: Option<&mut usize>,
    mut step: impl FnMut(usize, Option<std::time::Duration>) -> Result<usize, TransferError>,
) -> Result<isize, Refusal> {
    let mut unused = 0;
    let done = done.unwrap_or(&mut unused);
    *done = 0;
    let limit = limit(timeout_ms);
    let begun = std::time::Instant::now();
    while *done < len {
        let left = limit.map(|limit| limit.saturating_sub(begun.elapsed()));
        *done += step(*done, left)?;
    }
    Ok(0)
}

/// The pieces of a vectored call. None of them is NULL and not empty, and their lengths add up to a possible result.
///
/// # Safety
/// `pieces` is NULL, or points to `count` elements that live as long as the call.
unsafe fn check_pieces<'a>(pieces: *const iovec, count: usize) -> Result<&'a [iovec], Refusal> {
    let pieces = match (pieces.is_null(), count) {
        (_, 0) => &[],
        (true, _) => return Err(Refusal::INVALID),
        (false, _) if count > PIECES => return Err(Refusal::INVALID),
        // SAFETY: promised by the caller.
        (false, _) => unsafe { slice::from_raw_parts(pieces, count) },
    };
    let mut all = 0_usize;
    for piece in pieces {
        all = all.saturating_add(piece.iov_len);
        if all > isize::MAX as usize || (piece.iov_base.is_null() && piece.iov_len > 0) {
            return Err(Refusal::INVALID);
        }
    }
    Ok(pieces)
}

/// Bytes of the program.
///
/// # Safety
/// `data` is NULL, or points to `len` bytes that live as long as the call.
unsafe fn bytes<'a>(data: *const c_void, len: usize) -> Result<&'a [u8], Refusal> {
    match (data.is_null(), len) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(Refusal::INVALID),
        (false, _) if len > isize::MAX as usize => Err(Refusal::INVALID),
        // SAFETY: promised by the caller.
        (false, _) => Ok(unsafe { slice::from_raw_parts(data.cast(), len) }),
    }
}

/// Memory of the program.
///
/// # Safety
/// As for [`bytes()`], and nothing else uses the memory.
unsafe fn room<'a>(into: *mut c_void, len: usize) -> Result<&'a mut [u8], Refusal> {
    match (into.is_null(), len) {
        (_, 0) => Ok(&mut []),
        (true, _) => Err(Refusal::INVALID),
        (false, _) if len > isize::MAX as usize => Err(Refusal::INVALID),
        // SAFETY: promised by the caller. The library only writes to it.
        (false, _) => Ok(unsafe { slice::from_raw_parts_mut(into.cast(), len) }),
    }
}
