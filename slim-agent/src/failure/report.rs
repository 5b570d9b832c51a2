//! Whether the agent thread has started.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use crate::commands::done::Done;

/// Tells the starting thread what became of the start. The first word counts.
///
/// A channel of the standard library's would leave memory of libc's `malloc` behind in the starting thread.
pub(crate) struct StartReport {
    outcome: StartOutcome,
    done: Done,
}

/// What became of the start, once it is known.
pub(crate) type StartOutcome = Arc<Mutex<Option<io::Result<()>>>>;

impl StartReport {
    /// Whoever waits for `done` finds the word in `outcome`.
    pub(crate) fn new(outcome: StartOutcome, done: Done) -> Self {
        StartReport { outcome, done }
    }

    /// The starting thread may have been cancelled; then nobody wants to know.
    pub(crate) fn answer(&self, outcome: io::Result<()>) {
        let mut said = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        said.get_or_insert(outcome);
        drop(said);
        self.done.tell();
    }
}
