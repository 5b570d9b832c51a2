//! Why verbs, or an adapter, cannot be used.

use std::fmt;

use crate::verbs::VerbsError;

/// Why verbs, or an adapter, cannot be used. Its text is one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdapterError {
    /// The library cannot be loaded: what the loader says.
    Library(String),
    /// The library has no such function.
    Symbol(String, &'static str),
    /// There is no adapter that fits: what was looked for, and what there is.
    NoAdapter(String),
    /// A setting is out of its range.
    Setting(&'static str),
    /// A call has failed on this adapter.
    Call(String, VerbsError),
}

impl fmt::Display for AdapterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AdapterError::Library(why) => write!(f, "verbs cannot be used: {why}"),
            AdapterError::Symbol(file, name) => write!(
                f,
                "verbs cannot be used: {file} has no {name} (rdma-core 32 or newer has it)"
            ),
            AdapterError::NoAdapter(what) => write!(f, "verbs cannot be used: {what}"),
            AdapterError::Setting(what) => write!(f, "verbs cannot be used: {what}"),
            AdapterError::Call(adapter, e) => write!(f, "adapter {adapter} cannot be used: {e}"),
        }
    }
}

impl std::error::Error for AdapterError {}
