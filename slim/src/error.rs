//! Errors: one type for each family of operations.

use std::fmt;
use std::io;

use slim_sys::Errno;

use crate::blob::BlobError;

/// Why a session, or its endpoint, could not be opened or closed.
#[derive(Debug)]
pub enum SessionError {
    /// The agent could not be started.
    Agent(io::Error),
    /// The session is closed.
    Closed,
    /// The kernel refused the named operation with this error number.
    Kernel(&'static str, Errno),
    /// The agent's thread has not ended, or has not answered, within the limit.
    TimedOut,
}

/// Why no flow was accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcceptError {
    /// The endpoint or its session is closed.
    Closed,
    /// The kernel's error number.
    Kernel(Errno),
    /// No connection came within the limit.
    TimedOut,
    /// No connection waits.
    WouldBlock,
}

/// Why a flow could not be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectError {
    /// The endpoint's blob cannot be used.
    Blob(BlobError),
    /// The session, or the flow, is closed.
    Closed,
    /// The kernel's error number, `ECONNREFUSED` for example.
    Kernel(Errno),
    /// The connection was not established within the limit.
    TimedOut,
}

/// Why bytes were not sent, or not received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferError {
    /// This end has closed the flow.
    Closed,
    /// The peer ended the stream before all requested bytes were received.
    Ended,
    /// The kernel refused this call with this error number; the flow goes on.
    Kernel(Errno),
    /// The flow has failed: its connection broke with this error number, and was not replaced.
    Lost(Errno),
    /// This end has finished sending, or the peer has closed the flow.
    ShutDown,
    /// The call did not complete within the limit.
    TimedOut,
    /// Nothing can be sent or received now. Also returned while the flow is suspended.
    WouldBlock,
}

/// Why an object was not opened in its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotOpened {
    /// The session is closed.
    Closed,
    /// The kernel's error number.
    Kernel(Errno),
}

impl From<NotOpened> for AcceptError {
    fn from(why: NotOpened) -> Self {
        match why {
            NotOpened::Closed => Self::Closed,
            NotOpened::Kernel(errno) => Self::Kernel(errno),
        }
    }
}

impl From<NotOpened> for ConnectError {
    fn from(why: NotOpened) -> Self {
        match why {
            NotOpened::Closed => Self::Closed,
            NotOpened::Kernel(errno) => Self::Kernel(errno),
        }
    }
}

/// The error number of an error, or of the error that caused it.
fn number_of(error: &io::Error) -> Option<Errno> {
    error.raw_os_error().or_else(|| {
        let cause = error.get_ref()?.source()?;
        number_of(cause.downcast_ref()?)
    })
}

impl SessionError {
    /// The error number, if there is one.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Agent(e) => number_of(e),
            Self::Kernel(_, errno) => Some(*errno),
            Self::Closed | Self::TimedOut => None,
        }
    }
}

impl AcceptError {
    /// The error number, if there is one.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Kernel(errno) => Some(*errno),
            Self::Closed | Self::TimedOut | Self::WouldBlock => None,
        }
    }
}

impl ConnectError {
    /// The error number, if there is one.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Kernel(errno) => Some(*errno),
            Self::Blob(_) | Self::Closed | Self::TimedOut => None,
        }
    }
}

impl TransferError {
    /// The error number, if there is one.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Kernel(errno) | Self::Lost(errno) => Some(*errno),
            _ => None,
        }
    }
}

/// The text of an error number.
fn text(errno: Errno) -> io::Error {
    io::Error::from_raw_os_error(errno)
}

impl fmt::Display for SessionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Agent(e) => write!(f, "the agent could not be started: {e}"),
            Self::Closed => f.write_str("the session is closed"),
            Self::Kernel(what, errno) => write!(f, "{what}: {}", text(*errno)),
            Self::TimedOut => f.write_str("the agent's thread did not end or answer in time"),
        }
    }
}

impl fmt::Display for AcceptError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("the endpoint is closed"),
            Self::Kernel(errno) => write!(f, "cannot accept a flow: {}", text(*errno)),
            Self::TimedOut => f.write_str("no flow came in time"),
            Self::WouldBlock => f.write_str("no flow is waiting to be accepted"),
        }
    }
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Blob(BlobError::Garbage) => f.write_str("not a blob of an endpoint"),
            Self::Blob(BlobError::OtherJob) => {
                f.write_str("the endpoint belongs to another job, or has another job key")
            }
            Self::Closed => f.write_str("the session or the flow is closed"),
            Self::Kernel(errno) => write!(f, "cannot connect: {}", text(*errno)),
            Self::TimedOut => f.write_str("the connection was not established in time"),
        }
    }
}

impl fmt::Display for TransferError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("the flow is closed"),
            Self::Ended => f.write_str("the peer ended the stream too early"),
            Self::Kernel(errno) => write!(f, "the kernel refused the call: {}", text(*errno)),
            Self::Lost(errno) => write!(f, "the flow has failed: {}", text(*errno)),
            Self::ShutDown => f.write_str("the flow takes no more bytes"),
            Self::TimedOut => f.write_str("the operation did not complete in time"),
            Self::WouldBlock => f.write_str("the operation would block"),
        }
    }
}

impl std::error::Error for SessionError {}
impl std::error::Error for AcceptError {}
impl std::error::Error for ConnectError {}
impl std::error::Error for TransferError {}

impl From<SessionError> for io::Error {
    fn from(e: SessionError) -> Self {
        match e {
            SessionError::Agent(e) => e,
            SessionError::Kernel(_, errno) => text(errno),
            SessionError::Closed => io::Error::new(io::ErrorKind::NotConnected, e),
            SessionError::TimedOut => io::ErrorKind::TimedOut.into(),
        }
    }
}

impl From<AcceptError> for io::Error {
    fn from(e: AcceptError) -> Self {
        match e {
            AcceptError::Kernel(errno) => text(errno),
            AcceptError::Closed => io::Error::new(io::ErrorKind::NotConnected, e),
            AcceptError::TimedOut => io::ErrorKind::TimedOut.into(),
            AcceptError::WouldBlock => io::ErrorKind::WouldBlock.into(),
        }
    }
}

impl From<ConnectError> for io::Error {
    fn from(e: ConnectError) -> Self {
        match e {
            ConnectError::Kernel(errno) => text(errno),
            ConnectError::Blob(_) => io::Error::new(io::ErrorKind::InvalidInput, e),
            ConnectError::Closed => io::Error::new(io::ErrorKind::NotConnected, e),
            ConnectError::TimedOut => io::ErrorKind::TimedOut.into(),
        }
    }
}

impl From<TransferError> for io::Error {
    fn from(e: TransferError) -> Self {
        match e {
            TransferError::Kernel(errno) | TransferError::Lost(errno) => text(errno),
            TransferError::Closed => io::Error::new(io::ErrorKind::NotConnected, e),
            TransferError::Ended => io::ErrorKind::UnexpectedEof.into(),
            TransferError::ShutDown => io::ErrorKind::BrokenPipe.into(),
            TransferError::TimedOut => io::ErrorKind::TimedOut.into(),
            TransferError::WouldBlock => io::ErrorKind::WouldBlock.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversion_to_io_error_keeps_the_error_number_and_the_kind() {
        let lost = TransferError::Lost(libc::ETIMEDOUT);
        assert_eq!(lost.errno(), Some(libc::ETIMEDOUT));
        assert_eq!(io::Error::from(lost).raw_os_error(), Some(libc::ETIMEDOUT));
        let kind = |e: TransferError| io::Error::from(e).kind();
        assert_eq!(kind(TransferError::WouldBlock), io::ErrorKind::WouldBlock);
        assert_eq!(kind(TransferError::Ended), io::ErrorKind::UnexpectedEof);
        assert_eq!(kind(TransferError::ShutDown), io::ErrorKind::BrokenPipe);
        assert!(lost.to_string().contains("timed out"), "{lost}");
        let refused = io::Error::from(ConnectError::Kernel(libc::ECONNREFUSED));
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        let taken = SessionError::Kernel("bind", libc::EADDRINUSE);
        assert_eq!(
            taken.to_string(),
            "bind: Address already in use (os error 98)"
        );
        assert_eq!(io::Error::from(taken).kind(), io::ErrorKind::AddrInUse);
        let none = io::Error::from(AcceptError::WouldBlock);
        assert_eq!(none.kind(), io::ErrorKind::WouldBlock);
    }
}
