//! What the copy with the table offers to other copies of SLIM in the process. As in [`crate::offered`], only C functions and plain data
//! cross, and the name of [`SYMBOL`] ends in the version.

use std::ffi::{CStr, c_int, c_void};
use std::ptr::{self, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering};

use slim_sys::copies;

use crate::table::types::{TableCalls, TableEscalation};

/// The name under which the preload library exports [`offered`](crate::table::asking::offered).
pub const SYMBOL: &CStr = c"slim_offered_table_1";

/// Takes one structure: its address, and its size in bytes.
pub(crate) type TakeRow = extern "C" fn(*mut c_void, *const c_void, usize);

/// Surveys the agents of a copy, within so many nanoseconds: passes each [peer](PEERS) or [flow](FLOWS). Returns 0, or a negative error
/// number.
pub(crate) type Survey = extern "C" fn(u32, u64, TakeRow, *mut c_void) -> c_int;

/// What is surveyed.
pub(crate) const PEERS: u32 = 1;
/// As `PEERS`.
pub(crate) const FLOWS: u32 = 2;

/// What one copy offers to the others.
#[repr(C)]
pub struct OfferedTableCalls {
    /// Size of this structure in bytes.
    pub(crate) size: usize,
    pub(crate) table: &'static TableCalls,
    /// Another copy has agents (true), or has none any more. Then the function is not called again.
    pub(crate) source: extern "C" fn(Survey, bool),
    /// Another copy has escalated a flow. The size is that of the structure.
    pub(crate) escalated: extern "C" fn(*const TableEscalation, usize),
}

/// What the preload library's copy offers, if this is another copy, and has [joined](slim_sys::copies::join) it.
pub(crate) fn elsewhere() -> Option<&'static OfferedTableCalls> {
    static FOUND: AtomicPtr<OfferedTableCalls> = AtomicPtr::new(null_mut());
    if !copies::is_joined() {
        return None;
    }
    // SAFETY: null, or what was found.
    if let Some(found) = unsafe { FOUND.load(Ordering::Acquire).as_ref() } {
        return Some(found);
    }
    // SAFETY: this structure is exported under this name.
    let found: &OfferedTableCalls = unsafe { copies::look_up(SYMBOL) }?;
    FOUND.store(ptr::from_ref(found).cast_mut(), Ordering::Release);
    Some(found)
}
