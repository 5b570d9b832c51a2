//! Resumes: connections that are to become transports, the messages on them, and the replay.
//!
//! | module | what it holds |
//! | --- | --- |
//! | `listener` | task: accepts who resumes |
//! | `io` | task: a connection, from its beginning until it is closed or becomes a transport |
//! | `pump` | ... and then: the replay |
//! | `link` | a connection with its task's tools |
//! | `reader` | messages out of a connection |

pub(crate) mod io;
pub(crate) mod link;
pub(crate) mod listener;
pub(crate) mod pump;
pub(crate) mod reader;
