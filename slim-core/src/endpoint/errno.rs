//! Error numbers of Linux. This crate does not depend on libc.

pub(super) const EPIPE: i32 = 32;
pub(super) const ECONNRESET: i32 = 104;
pub(super) const ECONNREFUSED: i32 = 111;
