//! Error codes, their texts, and the error numbers that go with them.

use std::ffi::{CStr, c_char, c_int};

use slim::{AcceptError, BlobError, ConnectError, SessionError, TransferError};

/// An argument is NULL or has a value that is not allowed, or the function must not be called here. `errno`: `EINVAL`.
pub const SLIM_ERR_INVALID: c_int = -1;
/// Nothing can be done now without waiting. `errno`: `EAGAIN`.
pub const SLIM_ERR_AGAIN: c_int = -2;
/// The time limit has passed. `errno`: `ETIMEDOUT`.
pub const SLIM_ERR_TIMEOUT: c_int = -3;
/// The session, the endpoint or the flow is closed. `errno`: `EBADF`.
pub const SLIM_ERR_CLOSED: c_int = -4;
/// The peer ended the stream before all requested bytes were received. `errno`: `ENODATA`.
pub const SLIM_ERR_ENDED: c_int = -5;
/// This end has finished sending, or the peer has closed the flow. `errno`: `EPIPE`.
pub const SLIM_ERR_SHUTDOWN: c_int = -6;
/// The flow has failed: its connection broke and was not replaced. `errno`: the error of the connection.
pub const SLIM_ERR_LOST: c_int = -7;
/// The kernel refused a system call, or a connection was not established. `errno`: the kernel's error number.
pub const SLIM_ERR_KERNEL: c_int = -8;
/// A setting cannot be used; slim_error_detail() says which one. `errno`: `EINVAL`.
pub const SLIM_ERR_SETTING: c_int = -9;
/// The bytes are not the blob of an endpoint. `errno`: `EINVAL`.
pub const SLIM_ERR_BLOB: c_int = -10;
/// The blob's endpoint belongs to another job, or has another job key. `errno`: `EACCES`.
pub const SLIM_ERR_JOB: c_int = -11;
/// The caller's memory is too small for the result. `errno`: `ENOBUFS`.
pub const SLIM_ERR_ROOM: c_int = -12;
/// The library has met a mistake of its own, which slim_error_detail() describes. The session cannot be used any more: calls with it, its
/// endpoints and its flows return this code. Only the functions that close or reset a handle still work: they reset the flows, so that the
/// peers get an error. `errno`: `ENOTRECOVERABLE`.
pub const SLIM_ERR_INTERNAL: c_int = -13;

/// Why a call failed: an error code, an error number, and details if there are any.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) code: c_int,
    pub(crate) errno: c_int,
    pub(crate) detail: Option<String>,
}

impl Refusal {
    pub(crate) const INVALID: Self = Self::new(SLIM_ERR_INVALID, libc::EINVAL);
    pub(crate) const INTERNAL: Self = Self::new(SLIM_ERR_INTERNAL, libc::ENOTRECOVERABLE);
    pub(crate) const ROOM: Self = Self::new(SLIM_ERR_ROOM, libc::ENOBUFS);
    pub(crate) const AGAIN: Self = Self::new(SLIM_ERR_AGAIN, libc::EAGAIN);
    pub(crate) const TIMEOUT: Self = Self::new(SLIM_ERR_TIMEOUT, libc::ETIMEDOUT);
    const CLOSED: Self = Self::new(SLIM_ERR_CLOSED, libc::EBADF);

    const fn new(code: c_int, errno: c_int) -> Self {
        Self {
            code,
            errno,
            detail: None,
        }
    }

    pub(crate) fn setting(problem: String) -> Self {
        Self {
            detail: Some(problem),
            ..Self::new(SLIM_ERR_SETTING, libc::EINVAL)
        }
    }
}

impl From<TransferError> for Refusal {
    fn from(e: TransferError) -> Self {
        match e {
            TransferError::Closed => Self::CLOSED,
            TransferError::Ended => Self::new(SLIM_ERR_ENDED, libc::ENODATA),
            TransferError::Kernel(errno) => Self::new(SLIM_ERR_KERNEL, errno),
            TransferError::Lost(errno) => Self::new(SLIM_ERR_LOST, errno),
            TransferError::ShutDown => Self::new(SLIM_ERR_SHUTDOWN, libc::EPIPE),
            TransferError::TimedOut => Self::TIMEOUT,
            TransferError::WouldBlock => Self::AGAIN,
        }
    }
}

impl From<AcceptError> for Refusal {
    fn from(e: AcceptError) -> Self {
        match e {
            AcceptError::Closed => Self::CLOSED,
            AcceptError::Kernel(errno) => Self::new(SLIM_ERR_KERNEL, errno),
            AcceptError::TimedOut => Self::TIMEOUT,
            AcceptError::WouldBlock => Self::AGAIN,
        }
    }
}

impl From<ConnectError> for Refusal {
    fn from(e: ConnectError) -> Self {
        match e {
            ConnectError::Blob(BlobError::Garbage) => Self::new(SLIM_ERR_BLOB, libc::EINVAL),
            ConnectError::Blob(BlobError::OtherJob) => Self::new(SLIM_ERR_JOB, libc::EACCES),
            ConnectError::Closed => Self::CLOSED,
            ConnectError::Kernel(errno) => Self::new(SLIM_ERR_KERNEL, errno),
            ConnectError::TimedOut => Self::TIMEOUT,
        }
    }
}

impl From<SessionError> for Refusal {
    fn from(e: SessionError) -> Self {
        let errno = e.errno().unwrap_or(libc::EIO);
        let detail = Some(e.to_string());
        match e {
            SessionError::Agent(_) | SessionError::Kernel(..) => Self {
                detail,
                ..Self::new(SLIM_ERR_KERNEL, errno)
            },
            SessionError::Closed => Self::CLOSED,
            SessionError::TimedOut => Self::TIMEOUT,
        }
    }
}

/// Returns the text of an error code, for example "the time limit has passed". Never NULL; the text is constant. Codes that are not
/// negative are "success". The text of `errno` is strerror()'s. Any thread, also with no session open.
#[unsafe(no_mangle)]
pub extern "C" fn slim_strerror(code: c_int) -> *const c_char {
    text(code).as_ptr()
}

fn text(code: c_int) -> &'static CStr {
    match code {
        0.. => c"success",
        SLIM_ERR_INVALID => c"an argument is not valid",
        SLIM_ERR_AGAIN => c"nothing can be done now without waiting",
        SLIM_ERR_TIMEOUT => c"the time limit has passed",
        SLIM_ERR_CLOSED => c"the session, the endpoint or the flow is closed",
        SLIM_ERR_ENDED => c"the peer ended the stream too early",
        SLIM_ERR_SHUTDOWN => c"the flow takes no more bytes",
        SLIM_ERR_LOST => c"the flow has failed: its connection broke and was not replaced",
        SLIM_ERR_KERNEL => c"the kernel refused a system call",
        SLIM_ERR_SETTING => c"a setting cannot be used",
        SLIM_ERR_BLOB => c"the bytes are not the blob of an endpoint",
        SLIM_ERR_JOB => c"the endpoint belongs to another job, or has another job key",
        SLIM_ERR_ROOM => c"the caller's memory is too small for the result",
        SLIM_ERR_INTERNAL => c"the library has met a mistake of its own",
        _ => c"unknown error code",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_a_text_of_its_own() {
        let texts: std::collections::BTreeSet<_> = (SLIM_ERR_INTERNAL..=0).map(text).collect();
        assert_eq!(texts.len(), 14);
        assert!(!texts.contains(text(SLIM_ERR_INTERNAL - 1)));
        assert_eq!(text(7), c"success");
    }

    #[test]
    fn errors_of_the_kernel_keep_their_number() {
        let lost = Refusal::from(TransferError::Lost(libc::ECONNRESET));
        assert_eq!((lost.code, lost.errno), (SLIM_ERR_LOST, libc::ECONNRESET));
        let busy = Refusal::from(SessionError::Kernel("bind", libc::EADDRINUSE));
        assert_eq!((busy.code, busy.errno), (SLIM_ERR_KERNEL, libc::EADDRINUSE));
        assert!(busy.detail.is_some_and(|d| d.starts_with("bind: ")));
    }
}
