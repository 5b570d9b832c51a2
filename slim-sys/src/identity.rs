//! Identity of the socket behind a descriptor.

use crate::at;
use libc::c_int;
use rustix::fs::{self, FileType};

/// A number that identifies the socket behind a descriptor for as long as the socket exists. `None` if the descriptor is no
/// socket.
pub fn identity(fd: c_int) -> Option<u64> {
    let file = fs::fstat(at(fd)).ok()?;
    let is_socket = FileType::from_raw_mode(file.st_mode) == FileType::Socket;
    is_socket.then(|| identity_of(file.st_dev, file.st_ino))
}

/// The [`identity`] of the socket with this device and inode number. Both numbers have 32 bits in the kernel.
pub fn identity_of(device: u64, inode: u64) -> u64 {
    device << 32 | inode & u64::from(u32::MAX)
}
