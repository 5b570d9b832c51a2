//! A file in memory that goes over to the next program, when the process executes one.
//!
//! It lies at one of a few numbers below the floor of our own descriptors. The next program's library has the same floor, and so finds
//! the file with a few system calls. The file holds keys: only its owner may open it, nobody can change it, and it ends when it is
//! read.

use crate::{Errno, OwnFd, at, close, errno::number, fds, numbers, pread};
use libc::c_int;
use rustix::fs::{self, MemfdFlags, Mode, SealFlags};
use rustix::io;
use rustix::process::geteuid;
use std::os::fd::{AsFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};

/// How many numbers below the floor may hold the file.
const NUMBERS: c_int = 4;
const SEALS: SealFlags = SealFlags::SEAL
    .union(SealFlags::SHRINK)
    .union(SealFlags::GROW)
    .union(SealFlags::WRITE);
const NAME: &str = "slim-exec";
/// The first bytes of the file.
const MARK: [u8; 16] = *b"SLIM hands over\n";

/// Leaves these bytes for the next program. The descriptor is registered as ours; [`withdraw`] it if the exec fails.
///
/// # Errors
/// The kernel's; `EMFILE` if the program itself uses all numbers.
pub fn leave(bytes: &[u8]) -> Result<RawFd, Errno> {
    let create = || {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        Ok(fs::memfd_create(NAME, flags)?)
    };
    let failed = |e: std::io::Error| e.raw_os_error().unwrap_or(libc::EIO);
    let file = OwnFd::make(create).map_err(failed)?;
    for mut rest in [&MARK, bytes] {
        while !rest.is_empty() {
            let written = io::write(&file, rest).map_err(number)?;
            rest = rest.get(written..).unwrap_or_default();
        }
    }
    fs::fchmod(&file, Mode::RUSR).map_err(number)?;
    fs::fcntl_add_seals(&file, SEALS).map_err(number)?;
    numbers::make(|| {
        let floor = fds::present_floor();
        // SAFETY: no memory is passed. (rustix has this call only with close-on-exec.)
        let copy =
            unsafe { call!(libc::SYS_fcntl, file.raw(), libc::F_DUPFD, floor - NUMBERS) }? as RawFd;
        if copy < floor {
            fds::claim(copy);
            return Ok(copy);
        }
        close(copy);
        Err(libc::EMFILE)
    })
}

/// Closes what [`leave`] has left.
pub fn withdraw(file: RawFd) {
    close(file);
}

/// What the program before has left, if it has left anything.
pub fn take() -> Option<Vec<u8>> {
    let floor = fds::present_floor();
    // A program may have sealed a file of its own, and passed it on. A file of another user may come with a program that changed users.
    let is_ours = |fd| {
        let about = fs::fstat(at(fd)).map(|about| about.st_uid);
        about == Ok(geteuid().as_raw())
    };
    let is_left = |fd: &RawFd| {
        let mut mark = [0; MARK.len()];
        fs::fcntl_get_seals(at(*fd)) == Ok(SEALS)
            && is_ours(*fd)
            && pread(*fd, &mut mark, 0) == Ok(mark.len())
            && mark == MARK
    };
    let fd = (floor - NUMBERS..floor).find(is_left)?;
    // SAFETY: the file is ours, and no code of the program has run yet.
    let file = unsafe { OwnedFd::from_raw_fd(fd) };
    let len = fs::fstat(file.as_fd()).ok()?.st_size;
    let mut bytes = vec![0; usize::try_from(len).ok()?];
    let mut filled = 0;
    while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match pread(fd, rest, filled as i64) {
            Ok(n @ 1..) => filled += n,
            _ => break,
        }
    }
    close(file.into_raw_fd());
    Some(bytes.split_off(MARK.len()))
}

/// Whether a descriptor of ours survives an exec.
pub fn set_survives(fd: RawFd, survives: bool) {
    let flags = match survives {
        true => io::FdFlags::empty(),
        false => io::FdFlags::CLOEXEC,
    };
    let _ = io::fcntl_setfd(at(fd), flags);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_taken_once() {
        let file = leave(b"for the next program").unwrap();
        assert!(crate::survives_exec(file) && fds::is_internal(file));
        assert!(io::write(at(file), b"more").is_err());
        assert_eq!(take().as_deref(), Some(&b"for the next program"[..]));
        assert!(!crate::is_open(file));
        assert_eq!(take(), None);
        withdraw(leave(b"again").unwrap());
        assert_eq!(take(), None);
    }
}
