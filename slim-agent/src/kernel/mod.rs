//! Requests to the kernel and to the runtime.
//!
//! | module | what it holds |
//! | --- | --- |
//! | `sys` | safe wrappers of system calls |
//! | `netlink`, `sock_diag` | netlink(7): parsing messages, questions about sockets |
//! | `readiness`, `task` | descriptors that the runtime watches, and its tasks |

pub(crate) mod netlink;
pub(crate) mod readiness;
pub(crate) mod sock_diag;
pub(crate) mod sys;
pub(crate) mod task;
