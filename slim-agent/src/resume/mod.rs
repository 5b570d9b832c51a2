//! Resumes: connections that are to become transports, the messages on them, and the replay.
//!
//! | module | what it holds |
//! | --- | --- |
//! | `listener` | task: accepts resume connections |
//! | `io` | task: a connection, from its beginning until it is closed or becomes a transport |
//! | `pump` | the same task, once the connection becomes a transport: the replay |
//! | `link` | a connection, with the state of its task |
//! | `reader` | reads messages from a connection |

pub(crate) mod io;
pub(crate) mod link;
pub(crate) mod listener;
pub(crate) mod pump;
pub(crate) mod reader;
