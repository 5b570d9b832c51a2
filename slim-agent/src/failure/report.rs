//! The report whether the agent thread has started.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use crate::commands::done::Done;

/// Tells the starting thread the outcome of the start. Only the first answer counts.
///
/// The standard library's channels are not used: one would leave memory of libc's `malloc` behind in the starting
/// thread.
pub(crate) struct StartReport {
    outcome: StartOutcome,
    done: Done,
}

/// The outcome of the start, once it is known.
pub(crate) type StartOutcome = Arc<Mutex<Option<io::Result<()>>>>;

impl StartReport {
    /// The thread that waits for `done` finds the answer in `outcome`.
    pub(crate) fn new(outcome: StartOutcome, done: Done) -> Self {
        StartReport { outcome, done }
    }

    /// Answers. The starting thread may have been cancelled, and then does not read the answer.
    pub(crate) fn answer(&self, outcome: io::Result<()>) {
        let mut said = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        said.get_or_insert(outcome);
        drop(said);
        self.done.tell();
    }
}
