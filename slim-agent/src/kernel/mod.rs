//! What is asked of the kernel and of the runtime.
//!
//! | module | what it holds |
//! | --- | --- |
//! | `sys` | system calls, made safe |
//! | `netlink`, `sock_diag` | netlink(7): what is the case, and which sockets there are |
//! | `readiness` | descriptors that the runtime watches |

pub(crate) mod netlink;
pub(crate) mod readiness;
pub(crate) mod sock_diag;
pub(crate) mod sys;
