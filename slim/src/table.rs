//! What a process can ask SLIM: its peers, its flows, and the last escalations with their evidence. Under the preload library, and for
//! sessions that share its agent, these are those of the whole process.
//!
//! The structures and functions are those of C (`slim-c/include/slim_table.h`), where their fields are explained. A call waits for the
//! agents, at most one second. It must not be made in a signal handler.
//!
//! ```
//! for flow in slim::table::flows()? {
//!     println!("{} to {}", slim::table::text(&flow.flow), slim::table::text(&flow.peer));
//! }
//! # Ok::<(), std::io::Error>(())
//! ```

use std::ffi::{CStr, c_char};
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

use slim_agent::table::asking;

pub use slim_agent::table::types::*;

/// The table itself, for C.
pub fn calls() -> &'static TableCalls {
    asking::table()
}

/// The peer processes.
///
/// # Errors
/// `ETIMEDOUT`: an agent has not answered.
pub fn peers() -> io::Result<Vec<TablePeer>> {
    asking::all()
}

/// The flows with a session, and the last 64 without one.
///
/// # Errors
/// As for [`peers`].
pub fn flows() -> io::Result<Vec<TableFlow>> {
    asking::all()
}

/// The last 64 escalations, the newest first.
///
/// # Errors
/// None today.
pub fn escalations() -> io::Result<Vec<TableEscalation>> {
    asking::all()
}

/// A descriptor that becomes readable with each escalation from now on. It does not block; read it empty before [`escalations`].
///
/// # Errors
/// The kernel's; `EMFILE` if there are 64 of them.
pub fn descriptor() -> io::Result<OwnedFd> {
    match (calls().descriptor)() {
        // SAFETY: a new descriptor, which the caller owns.
        fd @ 0.. => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        error => Err(io::Error::from_raw_os_error(-error)),
    }
}

/// A text of a structure.
pub fn text(field: &[c_char]) -> &str {
    // SAFETY: as long as the array, and of the same type but for the sign.
    let bytes = unsafe { std::slice::from_raw_parts(field.as_ptr().cast(), field.len()) };
    let text = CStr::from_bytes_until_nul(bytes).unwrap_or_default();
    text.to_str().unwrap_or_default()
}
