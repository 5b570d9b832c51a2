//! Descriptors of any kind.

use crate::{Errno, fds, limit, numbers, proc};
use libc::c_int;
use std::os::fd::{BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};

/// A number as rustix wants it, for one system call. Whether anything is open there is for the kernel to say.
pub fn at(fd: RawFd) -> BorrowedFd<'static> {
    // The one number that this type does not take; nothing is ever open there, either.
    let fd = if fd == -1 { RawFd::MAX } else { fd };
    // SAFETY: not -1; and a call on a number that is not open is answered with EBADF.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

/// Closes a descriptor of ours.
pub fn close(fd: c_int) {
    numbers::whole(|| {
        fds::release(fd);
        let _ = call!(libc::SYS_close, fd);
    });
}

/// A duplicate of our own of `fd`: close-on-exec, far above the numbers that the application expects next, if
/// possible above its limit, so that it costs the application none; and not the application's to close.
pub fn dup_high(fd: c_int) -> Result<c_int, Errno> {
    let dup =
        |floor: c_int| call!(libc::SYS_fcntl, fd, libc::F_DUPFD_CLOEXEC, floor).map(|n| n as c_int);
    numbers::whole(|| {
        let beyond = limit::above(dup).unwrap_or(Err(libc::EMFILE));
        beyond
            .or_else(|_| dup(fds::floor()))
            .or_else(|_| dup(3))
            .map(own)
    })
}

/// Registers a descriptor as ours.
pub(crate) fn own(fd: c_int) -> c_int {
    // SAFETY: every caller has just got this descriptor from the kernel; nobody else has it.
    fds::adopt(unsafe { OwnedFd::from_raw_fd(fd) }).into_raw_fd()
}

/// Makes `to` refer to what `from` refers to; `to` keeps its close-on-exec flag.
pub fn replace(from: c_int, to: c_int) -> Result<(), Errno> {
    let cloexec =
        call!(libc::SYS_fcntl, to, libc::F_GETFD).unwrap_or(0) as c_int & libc::FD_CLOEXEC != 0;
    call!(
        libc::SYS_dup3,
        from,
        to,
        if cloexec { libc::O_CLOEXEC } else { 0 }
    )
    .map(drop)
}

/// File status flags (`F_GETFL`).
pub fn status(fd: c_int) -> c_int {
    call!(libc::SYS_fcntl, fd, libc::F_GETFL).unwrap_or(0) as c_int
}

/// Sets file status flags (`F_SETFL`).
pub fn set_status(fd: c_int, flags: c_int) {
    let _ = call!(libc::SYS_fcntl, fd, libc::F_SETFL, flags);
}

/// Whether the description is in non-blocking mode.
pub fn is_nonblocking(fd: c_int) -> bool {
    status(fd) & libc::O_NONBLOCK != 0
}

/// Whether the number is an open descriptor.
pub fn is_open(fd: c_int) -> bool {
    call!(libc::SYS_fcntl, fd, libc::F_GETFD).is_ok()
}

/// Whether the descriptor survives an exec.
pub fn survives_exec(fd: c_int) -> bool {
    call!(libc::SYS_fcntl, fd, libc::F_GETFD).is_ok_and(|f| f as c_int & libc::FD_CLOEXEC == 0)
}

/// An ioctl that takes nothing, and gives a number.
pub fn ioctl(fd: c_int, request: libc::c_ulong) -> Result<c_int, Errno> {
    call!(libc::SYS_ioctl, fd, request, 0usize).map(|n| n as c_int)
}

/// An ioctl that fills one int.
pub fn ioctl_int(fd: c_int, request: libc::c_ulong) -> Result<c_int, Errno> {
    let mut v: c_int = 0;
    call!(libc::SYS_ioctl, fd, request, &raw mut v)?;
    Ok(v)
}

/// Bytes ready to be read.
pub fn readable(fd: c_int) -> u64 {
    ioctl_int(fd, libc::FIONREAD).map_or(0, |v| v.max(0) as u64)
}

/// `write`; what cannot be written is lost.
pub fn write(fd: c_int, bytes: &[u8]) {
    let _ = call!(libc::SYS_write, fd, bytes.as_ptr(), bytes.len());
}

/// `pread` into a buffer of ours.
pub fn pread(fd: c_int, buf: &mut [u8], offset: i64) -> Result<usize, Errno> {
    call!(libc::SYS_pread64, fd, buf.as_mut_ptr(), buf.len(), offset).map(|n| n as usize)
}

/// The current file offset; an error where the descriptor has none.
pub fn file_offset(fd: c_int) -> Result<i64, Errno> {
    call!(libc::SYS_lseek, fd, 0, libc::SEEK_CUR)
}

/// No number beyond is open, unless the limit was higher before.
fn numbers_at_most() -> c_int {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    let none = std::ptr::null::<libc::rlimit>();
    let asked = call!(
        libc::SYS_prlimit64,
        0,
        libc::RLIMIT_NOFILE,
        none,
        &raw mut limit
    );
    // As many as the kernel has by default (fs.nr_open).
    let most = 1 << 20;
    asked.map_or(most, |_| limit.rlim_cur.min(most as u64) as c_int)
}

/// Calls `f` with the numbers that are open, but for the one that it takes to find out. Uses no heap.
pub fn for_each_open(mut f: impl FnMut(c_int)) {
    numbers::make(|| {
        let Ok(dir) = proc::open(format_args!("self/fd"), libc::O_RDONLY | libc::O_DIRECTORY)
        else {
            // There is no /proc, after a chroot for example: every number is tried.
            return (0..numbers_at_most())
                .filter(|fd| is_open(*fd))
                .for_each(&mut f);
        };
        // As in linux/dirent.h: where in an entry its length is, and its name.
        const LENGTH: usize = 16;
        const NAME: usize = 19;
        let mut entries = [0u8; 2048];
        while let Ok(filled @ 1..) = call!(
            libc::SYS_getdents64,
            dir,
            entries.as_mut_ptr(),
            entries.len()
        ) {
            let mut rest = &entries[..filled as usize];
            while rest.len() > NAME {
                let length = u16::from_ne_bytes([rest[LENGTH], rest[LENGTH + 1]]);
                let (entry, others) = rest.split_at(rest.len().min(length.max(1).into()));
                let name = entry.get(NAME..).unwrap_or_default();
                let name = name.split(|b| *b == 0).next().unwrap_or_default();
                let number = std::str::from_utf8(name).ok().and_then(|n| n.parse().ok());
                if let Some(number) = number.filter(|n| *n != dir) {
                    f(number);
                }
                rest = others;
            }
        }
        let _ = call!(libc::SYS_close, dir);
    });
}

/// Sets the file offset.
pub fn seek(fd: c_int, to: i64) {
    let _ = call!(libc::SYS_lseek, fd, to, libc::SEEK_SET);
}

/// `epoll_ctl`.
pub fn epoll_ctl(
    epfd: c_int,
    op: c_int,
    fd: c_int,
    event: &libc::epoll_event,
) -> Result<(), Errno> {
    call!(libc::SYS_epoll_ctl, epfd, op, fd, std::ptr::from_ref(event)).map(drop)
}

/// The kernel's table of descriptors has at least as many places.
pub const TABLE_MIN: c_int = 64;
