//! Which socket a descriptor is.

use crate::at;
use libc::c_int;
use rustix::fs::{self, FileType};

/// Which socket a descriptor is, as long as that exists; `None` if it is none.
pub fn identity(fd: c_int) -> Option<u64> {
    let file = fs::fstat(at(fd)).ok()?;
    let is_socket = FileType::from_raw_mode(file.st_mode) == FileType::Socket;
    is_socket.then(|| identity_of(file.st_dev, file.st_ino))
}

/// The [`identity`] of a socket that is this file. The kernel numbers sockets with 32 bits, and file systems too.
pub fn identity_of(device: u64, inode: u64) -> u64 {
    device << 32 | inode & u64::from(u32::MAX)
}
