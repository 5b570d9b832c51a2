//! Posted buffers of the program, from the post to the completion.
//!
//! ```text
//!   slim_flow_post ──► ledger entry, LentBuffer ──► the flow keeps the buffer
//!                                                      │ dropped: released
//!        update ◄── entry is taken ◄── released, and counted as completed (or the flow is over)
//! ```
//!
//! A completion is reported only once the library has dropped the buffer: from then on nothing reads it.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::slice;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use slim::{Flow, TransferError};

use crate::codes::SLIM_ERR_CLOSED;

/// A pointer that the program gave, to be handed back.
#[derive(Clone, Copy)]
pub(crate) struct UserPointer(pub(crate) *mut c_void);

// SAFETY: the library never uses the memory behind it.
unsafe impl Send for UserPointer {}

/// The posts of a flow that are not reported yet.
#[derive(Default)]
pub(crate) struct PostLedger {
    /// Held during a post, so that the entries are in the order of the flow's own numbers.
    order: Mutex<()>,
    /// Innermost lock: nothing of the flow is called with it.
    entries: Mutex<LedgerEntries>,
}

#[derive(Default)]
struct LedgerEntries {
    open: VecDeque<LedgerEntry>,
    /// Number of posts that were reported.
    reported: u64,
}

struct LedgerEntry {
    user: UserPointer,
    /// The library has dropped the buffer.
    released: bool,
    /// The flow has taken the post: it is to be reported.
    taken: bool,
}

/// A buffer of the program, which the library reads until this is dropped.
struct LentBuffer {
    data: *const u8,
    len: usize,
    ledger: Arc<PostLedger>,
    number: u64,
}

// SAFETY: the program promises to leave the buffer untouched until the completion, so any thread may read it.
unsafe impl Send for LentBuffer {}

impl AsRef<[u8]> for LentBuffer {
    fn as_ref(&self) -> &[u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: the program promises `len` readable bytes until the completion, which is not reported before `self` is dropped.
        unsafe { slice::from_raw_parts(self.data, self.len) }
    }
}

impl Drop for LentBuffer {
    fn drop(&mut self) {
        let mut entries = self.ledger.entries();
        let at = self.number - entries.reported - 1;
        if let Some(entry) = entries.open.get_mut(at as usize) {
            entry.released = true;
        }
    }
}

impl PostLedger {
    fn entries(&self) -> MutexGuard<'_, LedgerEntries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Posts a buffer. Calls `first` before if no other post is open.
    ///
    /// # Safety
    /// `data` points to `len` bytes that stay readable and unchanged until the post is reported, or the session is closed.
    pub(crate) unsafe fn post(
        self: &Arc<Self>,
        flow: &Flow,
        data: *const u8,
        len: usize,
        user: UserPointer,
        first: impl FnOnce(),
    ) -> Result<(), TransferError> {
        let _order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        let mut entries = self.entries();
        let was_empty = entries.open.is_empty();
        entries.open.push_back(LedgerEntry {
            user,
            released: false,
            taken: false,
        });
        let number = entries.reported + entries.open.len() as u64;
        drop(entries);
        if was_empty {
            first();
        }
        let ledger = self.clone();
        let posted = flow.post(Bytes::from_owner(LentBuffer {
            data,
            len,
            ledger,
            number,
        }));
        if let Err(error) = posted {
            // The flow has dropped the buffer.
            self.entries().open.pop_back();
            return Err(error);
        }
        if let Some(entry) = self.entries().open.back_mut() {
            entry.taken = true;
        }
        Ok(())
    }

    /// The number of posts.
    pub(crate) fn posted(&self) -> u64 {
        let entries = self.entries();
        entries.reported + entries.open.len() as u64
    }

    /// Reports posts that are completed, or that will never be: with 0 the first `completed` posts of the flow, and the others with the
    /// code `over`, if there is one. Returns whether posts are left.
    pub(crate) fn report(
        &self,
        completed: u64,
        over: Option<c_int>,
        mut to: impl FnMut(UserPointer, c_int),
    ) -> bool {
        let mut entries = self.entries();
        while let Some(entry) = entries.open.front().filter(|e| e.released && e.taken) {
            let status = match over {
                _ if entries.reported < completed => 0,
                Some(code) => code,
                None => break,
            };
            to(entry.user, status);
            entries.open.pop_front();
            entries.reported += 1;
        }
        !entries.open.is_empty()
    }

    /// The same, for a flow that is closed.
    pub(crate) fn report_closed(&self, to: impl FnMut(UserPointer, c_int)) -> bool {
        self.report(0, Some(SLIM_ERR_CLOSED), to)
    }
}
