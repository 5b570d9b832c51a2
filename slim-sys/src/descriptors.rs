//! Descriptors of any kind.

use crate::errno::number;
use crate::{Errno, fds, limit, numbers};
use libc::c_int;
use rustix::fs::{self, OFlags, SeekFrom};
use rustix::io::{self, FdFlags};
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};

/// Wraps a number for one rustix call. It need not be open: the kernel checks that.
pub fn at(fd: RawFd) -> BorrowedFd<'static> {
    // `BorrowedFd` must not be -1. `RawFd::MAX` is never open either.
    let fd = if fd == -1 { RawFd::MAX } else { fd };
    // SAFETY: not -1; and a call on a number that is not open fails with EBADF.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

/// Closes a descriptor of ours.
pub fn close(fd: c_int) {
    numbers::whole(|| {
        fds::release(fd);
        // SAFETY: the descriptor is ours and is not used again.
        unsafe { io::close(fd) };
    });
}

/// As [`close`], of a file for which the kernel may wait (`SO_LINGER`). Signals come in, and end the wait; forks do not wait.
pub fn close_and_wait(fd: c_int) {
    numbers::whole(|| fds::release(fd));
    // SAFETY: the descriptor is ours and is not used again.
    unsafe { io::close(fd) };
}

/// Closes a descriptor that is not registered as ours. Dropping it would call libc's `close`, which our hook replaces.
pub(crate) fn close_unregistered(fd: OwnedFd) {
    // SAFETY: owned, and not used again.
    unsafe { io::close(fd.into_raw_fd()) };
}

/// Duplicates `fd` as a descriptor of ours: close-on-exec, registered, and far above the numbers that the application expects
/// next. If possible it lies above the application's limit, so that it uses up none of the application's numbers.
pub fn dup_high(fd: c_int) -> Result<c_int, Errno> {
    let dup = |floor| io::fcntl_dupfd_cloexec(at(fd), floor);
    numbers::whole(|| {
        let beyond = limit::above(dup).unwrap_or(Err(io::Errno::MFILE));
        let copy = beyond.or_else(|_| dup(fds::floor())).or_else(|_| dup(3));
        copy.map(own).map_err(number)
    })
}

/// Registers a descriptor as ours.
pub(crate) fn own(fd: OwnedFd) -> c_int {
    fds::adopt(fd).into_raw_fd()
}

/// Makes `to` refer to what `from` refers to; `to` keeps its close-on-exec flag.
pub fn replace(from: c_int, to: c_int) -> Result<(), Errno> {
    let flags = io::fcntl_getfd(at(to)).unwrap_or(FdFlags::empty());
    let cloexec = match flags.contains(FdFlags::CLOEXEC) {
        true => libc::O_CLOEXEC,
        false => 0,
    };
    // SAFETY: no memory is passed. (rustix's `dup3` would require `to` to be owned.)
    unsafe { call!(libc::SYS_dup3, from, to, cloexec) }.map(drop)
}

/// File status flags (`F_GETFL`).
pub fn status(fd: c_int) -> c_int {
    fs::fcntl_getfl(at(fd)).map_or(0, |flags| flags.bits() as c_int)
}

/// Sets file status flags (`F_SETFL`).
pub fn set_status(fd: c_int, flags: c_int) {
    let _ = fs::fcntl_setfl(at(fd), OFlags::from_bits_retain(flags as u32));
}

/// Whether the open file description is in non-blocking mode.
pub fn is_nonblocking(fd: c_int) -> bool {
    status(fd) & libc::O_NONBLOCK != 0
}

/// Whether the number is an open descriptor.
pub fn is_open(fd: c_int) -> bool {
    io::fcntl_getfd(at(fd)).is_ok()
}

/// Whether the descriptor survives an exec.
pub fn survives_exec(fd: c_int) -> bool {
    io::fcntl_getfd(at(fd)).is_ok_and(|flags| !flags.contains(FdFlags::CLOEXEC))
}

/// Whether an executable file gives capabilities to the process that executes it. True if that is unknown.
pub fn has_capabilities(file: &impl AsFd) -> bool {
    let found = fs::fgetxattr(file, "security.capability", &mut [0u8; 64]);
    !matches!(found, Err(io::Errno::NODATA | io::Errno::OPNOTSUPP))
}

/// Bytes ready to be read.
pub fn readable(fd: c_int) -> u64 {
    let readable = io::ioctl_fionread(at(fd)).unwrap_or(0);
    // The kernel returns an int, which rustix widens.
    u64::from(u32::try_from(readable).unwrap_or(0))
}

/// `write`. Errors and short writes are ignored.
pub fn write(fd: c_int, bytes: &[u8]) {
    let _ = io::write(at(fd), bytes);
}

/// `pread` into a buffer of ours.
pub fn pread(fd: c_int, buf: &mut [u8], offset: i64) -> Result<usize, Errno> {
    io::pread(at(fd), buf, offset as u64).map_err(number)
}

/// The current file offset; an error where the descriptor has none.
pub fn file_offset(fd: c_int) -> Result<i64, Errno> {
    fs::tell(at(fd)).map(|at| at as i64).map_err(number)
}

/// Sets the file offset.
pub fn seek(fd: c_int, to: i64) {
    let _ = fs::seek(at(fd), SeekFrom::Start(to as u64));
}

/// `epoll_ctl`.
pub fn epoll_ctl(
    epfd: c_int,
    op: c_int,
    fd: c_int,
    event: &libc::epoll_event,
) -> Result<(), Errno> {
    let event = std::ptr::from_ref(event);
    // SAFETY: the kernel reads the event, which is valid. (rustix's event type cannot hold arbitrary flags.)
    unsafe { call!(libc::SYS_epoll_ctl, epfd, op, fd, event) }.map(drop)
}

/// The least number of entries in the kernel's descriptor table.
pub const TABLE_MIN: c_int = 64;
