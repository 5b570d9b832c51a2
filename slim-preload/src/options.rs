//! Socket options across transports: a new one gets what the application set on the old one.
//!
//! A process sets few kinds of options, and to ask the kernel for all others on both sockets would be half the system
//! calls of a resume. So only those are copied that have ever been set in this process, on whatever socket: connections
//! take them over from their listeners. Where a listener has come from elsewhere, all are ([`any`]).

use crate::sys;
use libc::c_int;
use std::sync::atomic::{AtomicU32, Ordering};

/// Plain integer options that an application sets and expects to stay. IP_TOS sets SO_PRIORITY, too: it comes first.
const INTEGERS: [(c_int, c_int); 19] = [
    (libc::IPPROTO_IP, libc::IP_TOS),
    (libc::IPPROTO_IPV6, libc::IPV6_TCLASS),
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
    (libc::SOL_SOCKET, libc::SO_OOBINLINE),
    (libc::SOL_SOCKET, libc::SO_PRIORITY),
    (libc::SOL_SOCKET, libc::SO_RCVLOWAT),
    (libc::SOL_SOCKET, libc::SO_MARK),
    (libc::SOL_SOCKET, libc::SO_BUSY_POLL),
    (libc::SOL_SOCKET, libc::SO_REUSEADDR),
    (libc::SOL_SOCKET, libc::SO_INCOMING_CPU),
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
// Bits of the others.
const LINGER: usize = INTEGERS.len();
const RCVTIMEO: usize = LINGER + 1;
const SNDTIMEO: usize = LINGER + 2;
const CONGESTION: usize = LINGER + 3;
const BUFFERS: usize = LINGER + 4;

/// Names that libc has under one only (asm-generic/socket.h).
const SO_RCVTIMEO_NEW: c_int = 66;
const SO_SNDTIMEO_NEW: c_int = 67;

/// Bits of SO_BUF_LOCK: the application set the size itself (linux/socket.h).
const SNDBUF_LOCK: c_int = 1;
const RCVBUF_LOCK: c_int = 2;

/// The options that may differ from the kernel's, a bit for each. TCP_NODELAY always: connections of ours have it from
/// the beginning, and the application's need not.
static SET: AtomicU32 = AtomicU32::new(1 << NODELAY);
const TOS: usize = 0;
const PRIORITY: usize = 4;
const NODELAY: usize = 10;
const _: () = assert!(
    INTEGERS[TOS].1 == libc::IP_TOS
        && INTEGERS[PRIORITY].1 == libc::SO_PRIORITY
        && INTEGERS[NODELAY].1 == libc::TCP_NODELAY
        && BUFFERS < 32
);

/// The application sets an option on some socket.
pub fn set(level: c_int, name: c_int) {
    let other = match (level, name) {
        (libc::SOL_SOCKET, libc::SO_LINGER) => Some(LINGER),
        (libc::SOL_SOCKET, libc::SO_RCVTIMEO | SO_RCVTIMEO_NEW) => Some(RCVTIMEO),
        (libc::SOL_SOCKET, libc::SO_SNDTIMEO | SO_SNDTIMEO_NEW) => Some(SNDTIMEO),
        (libc::IPPROTO_TCP, libc::TCP_CONGESTION) => Some(CONGESTION),
        (
            libc::SOL_SOCKET,
            libc::SO_SNDBUF | libc::SO_RCVBUF | libc::SO_SNDBUFFORCE | libc::SO_RCVBUFFORCE,
        ) => Some(BUFFERS),
        _ => None,
    };
    let known = || INTEGERS.iter().position(|o| *o == (level, name));
    if let Some(bit) = other.or_else(known) {
        let with = if bit == TOS { 1 << PRIORITY } else { 0 };
        SET.fetch_or(1 << bit | with, Ordering::Relaxed);
    }
}

/// There are sockets on which somebody else may have set anything.
pub fn any() {
    SET.store(u32::MAX, Ordering::Relaxed);
}

/// Copies the options of one TCP socket to another. What the kernel refuses stays as it is.
pub fn copy(from: c_int, to: c_int) {
    let set = SET.load(Ordering::Relaxed);
    let is_set = |bit: usize| set & 1 << bit != 0;
    for (_, (level, name)) in INTEGERS.iter().enumerate().filter(|(i, _)| is_set(*i)) {
        copy_one::<c_int>(from, to, *level, *name);
    }
    if is_set(LINGER) {
        copy_one::<libc::linger>(from, to, libc::SOL_SOCKET, libc::SO_LINGER);
    }
    for (bit, name) in [(RCVTIMEO, libc::SO_RCVTIMEO), (SNDTIMEO, libc::SO_SNDTIMEO)] {
        if is_set(bit) {
            copy_one::<libc::timeval>(from, to, libc::SOL_SOCKET, name);
        }
    }
    if is_set(CONGESTION) {
        copy_one::<[u8; 16]>(from, to, libc::IPPROTO_TCP, libc::TCP_CONGESTION);
    }
    if is_set(BUFFERS) {
        copy_sizes(from, to);
    }
}

/// Sizes that the application left alone must stay with the kernel's autotuning.
fn copy_sizes(from: c_int, to: c_int) {
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
