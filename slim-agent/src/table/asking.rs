//! The functions of the table.

use std::ffi::{c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::ptr::{from_mut, null_mut};
use std::sync::{PoisonError, RwLock};
use std::time::{Duration, Instant};

use slim_sys::cancel::uncancelled;
use slim_sys::keep_errno;

use crate::Agent;
use crate::agent::surveying;
use crate::failure::panic;
use crate::offered::plain::nanos;
use crate::table::escalations;
use crate::table::offered::{self, FLOWS, OfferedTableCalls, PEERS, Survey};
use crate::table::per_process::PerProcess;
use crate::table::types::*;

/// Limit of the wait for all agents.
const ANSWER: Duration = Duration::from_secs(1);

static TABLE: TableCalls = TableCalls {
    version: SLIM_TABLE_VERSION,
    size: size_of::<TableCalls>() as u32,
    state,
    peers,
    flows,
    escalations: last_escalations,
    descriptor,
};

static OFFERED: OfferedTableCalls = OfferedTableCalls {
    size: size_of::<OfferedTableCalls>(),
    table: &TABLE,
    source,
    escalated,
};

/// Other copies of SLIM that have agents. Locked while they are asked, so that none of them goes away meanwhile.
static SOURCES: PerProcess<RwLock<Vec<Survey>>> = PerProcess::new();

/// The table of the process, for a program that links SLIM. Under the preload library it is the preload library's.
pub fn table() -> &'static TableCalls {
    slim_sys::copies::join();
    offered::elsewhere().map_or(&TABLE, |host| host.table)
}

/// The table of this copy, for the preload library.
pub fn own_table() -> &'static TableCalls {
    &TABLE
}

/// What the preload library's copy offers to other copies.
pub fn offered() -> &'static OfferedTableCalls {
    &OFFERED
}

/// All rows that a function of the table has.
///
/// # Errors
/// That of the function.
pub fn all<R: TableRow>() -> io::Result<Vec<R>> {
    let mut rows = Vec::new();
    loop {
        let room = rows.capacity();
        let at: *mut R = if room == 0 {
            null_mut()
        } else {
            rows.as_mut_ptr()
        };
        // SAFETY: there is room for so many rows.
        let found = unsafe { R::function(table())(at, room, size_of::<R>()) };
        let Ok(found) = usize::try_from(found) else {
            return Err(io::Error::from_raw_os_error(-found));
        };
        if found <= room {
            // SAFETY: the function has stored so many rows.
            unsafe { rows.set_len(found) };
            return Ok(rows);
        }
        // A few more may come.
        rows.reserve(found + 8);
    }
}

/// A structure of the table.
///
/// # Safety
/// Any bytes are a valid value.
pub unsafe trait TableRow: Copy {
    /// The function of the table that stores rows of this kind.
    fn function(table: &TableCalls) -> unsafe extern "C" fn(*mut Self, usize, usize) -> c_int;
}

// SAFETY: integers only.
unsafe impl TableRow for TablePeer {
    fn function(table: &TableCalls) -> unsafe extern "C" fn(*mut Self, usize, usize) -> c_int {
        table.peers
    }
}

// SAFETY: integers only.
unsafe impl TableRow for TableFlow {
    fn function(table: &TableCalls) -> unsafe extern "C" fn(*mut Self, usize, usize) -> c_int {
        table.flows
    }
}

// SAFETY: integers only.
unsafe impl TableRow for TableEscalation {
    fn function(table: &TableCalls) -> unsafe extern "C" fn(*mut Self, usize, usize) -> c_int {
        table.escalations
    }
}

extern "C" fn state() -> c_int {
    entry(|| {
        let others = SOURCES.get().read().unwrap_or_else(PoisonError::into_inner);
        let works = !others.is_empty() || surveying::agents().iter().any(Agent::works);
        Ok(if works { SLIM_TABLE_ON } else { SLIM_TABLE_OFF })
    })
}

unsafe extern "C" fn peers(at: *mut TablePeer, capacity: usize, size: usize) -> c_int {
    // SAFETY: promised by the caller.
    entry(|| unsafe { store(at, capacity, size, || collect(PEERS)) })
}

unsafe extern "C" fn flows(at: *mut TableFlow, capacity: usize, size: usize) -> c_int {
    // SAFETY: promised by the caller.
    entry(|| unsafe { store(at, capacity, size, || collect(FLOWS)) })
}

unsafe extern "C" fn last_escalations(
    at: *mut TableEscalation,
    capacity: usize,
    size: usize,
) -> c_int {
    // SAFETY: promised by the caller.
    entry(|| unsafe { store(at, capacity, size, || Ok(escalations::last())) })
}

extern "C" fn descriptor() -> c_int {
    let errno = |e: io::Error| e.raw_os_error().unwrap_or(libc::EIO);
    entry(|| escalations::descriptor().map_err(errno))
}

extern "C" fn source(survey: Survey, has_agents: bool) {
    let mut all = SOURCES
        .get()
        .write()
        .unwrap_or_else(PoisonError::into_inner);
    all.retain(|one| *one as usize != survey as usize);
    if has_agents {
        all.push(survey);
    }
}

extern "C" fn escalated(row: *const TableEscalation, size: usize) {
    // SAFETY: the other copy passes a structure of this size.
    escalations::record(unsafe { read_row(row.cast(), size) });
}

/// Runs one call of the program. The result is negative on an error, and `errno` is left alone.
fn entry(f: impl FnOnce() -> Result<c_int, c_int>) -> c_int {
    let run = || match panic::is_usable() {
        // A panic must not unwind into the program.
        true => panic::caught(f).unwrap_or(Err(libc::ENOTRECOVERABLE)),
        false => f(),
    };
    keep_errno(|| uncancelled(run)).unwrap_or_else(|errno| -errno)
}

/// The rows of all agents of the process.
fn collect<R: TableRow>(what: u32) -> Result<Vec<R>, c_int> {
    let until = Instant::now() + ANSWER;
    let mut rows: Vec<R> = Vec::new();
    let others = SOURCES.get().read().unwrap_or_else(PoisonError::into_inner);
    let own: Survey = surveying::survey;
    for survey in [own].iter().chain(others.iter()) {
        let left = until.saturating_duration_since(Instant::now());
        match survey(what, nanos(left), push::<R>, from_mut(&mut rows).cast()) {
            0 => {}
            error => return Err(-error),
        }
    }
    Ok(rows)
}

extern "C" fn push<R: TableRow>(rows: *mut c_void, row: *const c_void, size: usize) {
    // SAFETY: `collect` passes its own vector, and waits for the other copy to return; that one passes a structure of this size.
    let (rows, row) = unsafe { (&mut *rows.cast::<Vec<R>>(), read_row(row, size)) };
    rows.push(row);
}

/// Reads a structure of another version: what is missing is zero.
///
/// # Safety
/// `at` points to `size` bytes.
unsafe fn read_row<R: TableRow>(at: *const c_void, size: usize) -> R {
    let mut row = MaybeUninit::<R>::zeroed();
    let len = size.min(size_of::<R>());
    // SAFETY: promised by the caller; any bytes are a valid row.
    unsafe {
        at.cast::<u8>()
            .copy_to_nonoverlapping(row.as_mut_ptr().cast(), len);
        row.assume_init()
    }
}

/// Stores as many rows as the caller's array has room for, in elements of `size` bytes. Returns how many rows there are.
///
/// # Safety
/// `at` is NULL, or points to `capacity` elements of `size` bytes.
unsafe fn store<R: TableRow>(
    at: *mut R,
    capacity: usize,
    size: usize,
    rows: impl FnOnce() -> Result<Vec<R>, c_int>,
) -> Result<c_int, c_int> {
    let fits = capacity.checked_mul(size);
    let fits = fits.is_some_and(|all| isize::try_from(all).is_ok());
    if size == 0 || !fits || (at.is_null() && capacity > 0) {
        return Err(libc::EINVAL);
    }
    let rows = rows()?;
    let len = size.min(size_of::<R>());
    for (n, row) in rows.iter().take(capacity).enumerate() {
        // SAFETY: promised by the caller. A program for a later version has larger elements, whose rest becomes zero.
        unsafe {
            let to = at.cast::<u8>().add(n * size);
            std::ptr::from_ref(row)
                .cast::<u8>()
                .copy_to_nonoverlapping(to, len);
            to.add(len).write_bytes(0, size - len);
        }
    }
    Ok(c_int::try_from(rows.len()).unwrap_or(c_int::MAX))
}
