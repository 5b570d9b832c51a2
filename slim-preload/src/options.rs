//! Socket options across transports: a new one gets what the application set on the old one.

use crate::sys;
use libc::c_int;

/// Plain integer options that an application sets and expects to stay.
const INTEGERS: &[(c_int, c_int)] = &[
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
    (libc::SOL_SOCKET, libc::SO_OOBINLINE),
    (libc::SOL_SOCKET, libc::SO_PRIORITY),
    (libc::SOL_SOCKET, libc::SO_RCVLOWAT),
    (libc::SOL_SOCKET, libc::SO_MARK),
    (libc::SOL_SOCKET, libc::SO_BUSY_POLL),
    (libc::SOL_SOCKET, libc::SO_REUSEADDR),
    (libc::SOL_SOCKET, libc::SO_INCOMING_CPU),
    (libc::IPPROTO_IP, libc::IP_TOS),
    (libc::IPPROTO_IPV6, libc::IPV6_TCLASS),
    (libc::IPPROTO_TCP, libc::TCP_NODELAY),
    (libc::IPPROTO_TCP, libc::TCP_CORK),
    (libc::IPPROTO_TCP, libc::TCP_QUICKACK),
    (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE),
    (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL),
    (libc::IPPROTO_TCP, libc::TCP_KEEPCNT),
    (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT),
    (libc::IPPROTO_TCP, libc::TCP_LINGER2),
    (libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT),
];

/// Bits of SO_BUF_LOCK: the application set the size itself (linux/socket.h).
const SNDBUF_LOCK: c_int = 1;
const RCVBUF_LOCK: c_int = 2;

/// Copies the options of one TCP socket to another. What the kernel refuses stays as it is.
pub fn copy(from: c_int, to: c_int) {
    for (level, name) in INTEGERS {
        copy_one::<c_int>(from, to, *level, *name);
    }
    copy_one::<libc::linger>(from, to, libc::SOL_SOCKET, libc::SO_LINGER);
    copy_one::<libc::timeval>(from, to, libc::SOL_SOCKET, libc::SO_RCVTIMEO);
    copy_one::<libc::timeval>(from, to, libc::SOL_SOCKET, libc::SO_SNDTIMEO);
    copy_one::<[u8; 16]>(from, to, libc::IPPROTO_TCP, libc::TCP_CONGESTION);
    // Sizes that the application left alone must stay with the kernel's autotuning.
    let locked = sys::option::<c_int>(from, libc::SOL_SOCKET, libc::SO_BUF_LOCK).unwrap_or(0);
    for (bit, name) in [
        (SNDBUF_LOCK, libc::SO_SNDBUF),
        (RCVBUF_LOCK, libc::SO_RCVBUF),
    ] {
        if locked & bit != 0
            && let Some(size) = sys::option::<c_int>(from, libc::SOL_SOCKET, name)
        {
            // The kernel doubles what it is given (socket(7)).
            sys::set_option(to, libc::SOL_SOCKET, name, &(size / 2));
        }
    }
}

fn copy_one<T: Copy + SockOpt>(from: c_int, to: c_int, level: c_int, name: c_int) {
    let (Some(want), have) = (
        sys::option::<T>(from, level, name),
        sys::option::<T>(to, level, name),
    ) else {
        return;
    };
    if !have.is_some_and(|h| h.same(&want)) {
        sys::set_option(to, level, name, &want);
    }
}

/// Comparison of option values as the kernel sees them.
trait SockOpt {
    fn same(&self, other: &Self) -> bool;
}

impl SockOpt for c_int {
    fn same(&self, other: &Self) -> bool {
        self == other
    }
}

impl SockOpt for [u8; 16] {
    fn same(&self, other: &Self) -> bool {
        self == other
    }
}

impl SockOpt for libc::linger {
    fn same(&self, other: &Self) -> bool {
        (self.l_onoff, self.l_linger) == (other.l_onoff, other.l_linger)
    }
}

impl SockOpt for libc::timeval {
    fn same(&self, other: &Self) -> bool {
        (self.tv_sec, self.tv_usec) == (other.tv_sec, other.tv_usec)
    }
}
