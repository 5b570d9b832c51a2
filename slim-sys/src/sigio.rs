//! The signal that the owner of a descriptor gets when the descriptor is ready (fcntl(2), `F_SETSIG`).

use crate::Errno;
use libc::c_int;

/// As in `asm-generic/fcntl.h`; the libc crate lacks them for some targets.
const F_SETSIG: c_int = 10;
const F_GETSIG: c_int = 11;

/// The signal that the owner of a descriptor gets (`F_GETSIG`); 0 means `SIGIO`.
pub(crate) fn signal_of(fd: c_int) -> Result<c_int, Errno> {
    // SAFETY: no memory is passed.
    unsafe { call!(libc::SYS_fcntl, fd, F_GETSIG) }.map(|signal| signal as c_int)
}

/// Sets the signal that the owner of a descriptor gets (`F_SETSIG`).
pub(crate) fn set_signal(fd: c_int, signal: c_int) {
    // SAFETY: no memory is passed.
    let _ = unsafe { call!(libc::SYS_fcntl, fd, F_SETSIG, signal) };
}
