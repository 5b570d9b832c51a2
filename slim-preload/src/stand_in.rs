//! What takes a descriptor number while no transport can.
//!
//! * the *placeholder* is never ready: a listening unix socket is neither readable, writable nor hung up;
//! * the *ready* stand-in is always readable and writable: while stashed bytes wait;
//! * the *dead* and the *ended* one are real TCP connections over loopback that were reset, or closed, by
//!   their other end, so that the kernel itself gives the errors, poll bits and end of file.

use crate::sys::{self, Errno};
use libc::c_int;
use std::sync::atomic::{AtomicI32, Ordering};

/// A new placeholder.
pub fn placeholder() -> Result<c_int, Errno> {
    let fd = sys::socket(libc::AF_UNIX, libc::SOCK_STREAM)?;
    // Bound by family alone: the kernel picks an abstract name (unix(7), autobind).
    let family = libc::AF_UNIX as libc::sa_family_t;
    let bound = sys::bind(fd, (&raw const family).cast(), size_of_val(&family))
        .and_then(|()| sys::listen(fd, 1));
    if let Err(e) = bound {
        sys::close(fd);
        return Err(e);
    }
    Ok(fd)
}

static READY: AtomicI32 = AtomicI32::new(-1);

/// The process's one always-ready descriptor, to be duplicated, never read.
pub fn ready() -> Result<c_int, Errno> {
    let have = READY.load(Ordering::Acquire);
    if have >= 0 {
        return Ok(have);
    }
    let [a, b] = sys::socketpair()?;
    sys::send(b, b"!", 0)?;
    // `b` stays open for good: closing it would hang `a` up. Two threads that race here leak one pair.
    READY.store(a, Ordering::Release);
    Ok(a)
}

/// Descriptors of this module that a forked child must not keep are close-on-exec; the number is told so
/// that `close` from the application leaves it alone.
pub fn is_ours(fd: c_int) -> bool {
    fd >= 0 && READY.load(Ordering::Relaxed) == fd
}

/// A connection that was reset by its peer: `ECONNRESET` once, then as the kernel does.
pub fn dead() -> Result<c_int, Errno> {
    pair(|far| {
        sys::set_option(
            far,
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            &libc::linger {
                l_onoff: 1,
                l_linger: 0,
            },
        )
    })
}

/// A connection that was closed by its peer: end of file.
pub fn ended() -> Result<c_int, Errno> {
    pair(|_| ())
}

/// One end of a loopback connection whose other end was closed after `last` had it.
fn pair(last: impl FnOnce(c_int)) -> Result<c_int, Errno> {
    let listener = sys::socket(libc::AF_INET, libc::SOCK_STREAM)?;
    let near = sys::socket(libc::AF_INET, libc::SOCK_STREAM);
    let made = near.and_then(|near| {
        let made = (|| {
            let any = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: 0,
                sin_addr: libc::in_addr {
                    s_addr: u32::from_ne_bytes([127, 0, 0, 1]),
                },
                sin_zero: [0; 8],
            };
            sys::bind(listener, (&raw const any).cast(), size_of_val(&any))?;
            sys::listen(listener, 1)?;
            let at = crate::addr::RawAddr::local(listener).ok_or(libc::EINVAL)?;
            sys::connect(near, (&raw const at.storage).cast(), at.len as usize)?;
            let far = sys::accept(listener)?;
            last(far);
            sys::close(far);
            Ok(near)
        })();
        if made.is_err() {
            sys::close(near);
        }
        made
    });
    sys::close(listener);
    made
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ready_for(fd: c_int) -> i16 {
        let mut p = libc::pollfd {
            fd,
            events: libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP,
            revents: 0,
        };
        // SAFETY: one valid pollfd.
        unsafe { libc::poll(&raw mut p, 1, 0) };
        p.revents
    }

    #[test]
    fn placeholder_is_never_ready() {
        let fd = placeholder().unwrap();
        assert_eq!(ready_for(fd), 0);
        sys::close(fd);
    }

    #[test]
    fn ready_is_always_ready() {
        let fd = ready().unwrap();
        assert_eq!(ready_for(fd), libc::POLLIN | libc::POLLOUT);
        assert_eq!(ready().unwrap(), fd);
    }

    #[test]
    fn dead_and_ended_are_as_the_kernel_has_them() {
        let fd = dead().unwrap();
        let bits = ready_for(fd);
        assert_eq!(
            bits,
            libc::POLLIN | libc::POLLOUT | libc::POLLERR | libc::POLLHUP | libc::POLLRDHUP
        );
        assert_eq!(sys::recv(fd, &mut [0; 1], 0), Err(libc::ECONNRESET));
        assert_eq!(sys::recv(fd, &mut [0; 1], 0), Ok(0));
        sys::close(fd);
        let fd = ended().unwrap();
        assert_eq!(
            ready_for(fd),
            libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP
        );
        assert_eq!(sys::recv(fd, &mut [0; 1], 0), Ok(0));
        sys::close(fd);
    }
}
