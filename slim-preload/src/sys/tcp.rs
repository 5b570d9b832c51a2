//! What is asked of TCP sockets.

use super::{Errno, connect, errno, ioctl_int, option};
use libc::c_int;

/// For SO_LINGER: `close` resets the connection.
pub const AT_ONCE: libc::linger = libc::linger {
    l_onoff: 1,
    l_linger: 0,
};

/// Whether the descriptor is a TCP socket.
pub fn is_tcp(fd: c_int) -> bool {
    option::<c_int>(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL) == Some(libc::IPPROTO_TCP)
}

/// What the kernel knows of a TCP connection.
pub fn tcp_info(fd: c_int) -> Option<libc::tcp_info> {
    option(fd, libc::IPPROTO_TCP, libc::TCP_INFO)
}

/// The kernel's byte counters of a connection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Counters {
    /// Bytes of ours that the peer acknowledged, the connector's SYN included.
    pub acked: u64,
    /// Bytes received in order, the peer's FIN included.
    pub received: u64,
    /// The kernel has given the connection up: nothing changes any more.
    pub is_over: bool,
}

/// The counters, from Linux 4.1 on. Read at their offsets in struct tcp_info (linux/tcp.h), which only ever
/// grows at its end; libc's definition of it differs between releases in how far it goes.
pub fn counters(fd: c_int) -> Option<Counters> {
    const ACKED: usize = 120;
    const RECEIVED: usize = 128;
    let mut raw = [0u8; RECEIVED + 8];
    let mut len = raw.len() as libc::socklen_t;
    call!(
        libc::SYS_getsockopt,
        fd,
        libc::IPPROTO_TCP,
        libc::TCP_INFO,
        raw.as_mut_ptr(),
        &raw mut len
    )
    .ok()?;
    let at = |offset: usize| {
        Some(u64::from_ne_bytes(
            raw.get(offset..offset + 8)?.try_into().ok()?,
        ))
    };
    (len as usize == raw.len()).then_some(())?;
    Some(Counters {
        acked: at(ACKED)?,
        received: at(RECEIVED)?,
        // tcpi_state is the first byte.
        is_over: raw.first() == Some(&TCP_CLOSE),
    })
}

/// `TCP_CLOSE` of linux/tcp_states.h: the kernel has given the connection up.
pub const TCP_CLOSE: u8 = 7;
/// `TCP_ESTABLISHED`.
pub const TCP_ESTABLISHED: u8 = 1;
/// `TCP_SYN_SENT`.
pub const TCP_SYN_SENT: u8 = 2;

/// The state of a TCP connection; `None` when the descriptor is none.
pub fn tcp_state(fd: c_int) -> Option<u8> {
    tcp_info(fd).map(|i| i.tcpi_state)
}

/// Bytes written that the peer's kernel has not acknowledged; readable after the connection died
/// (tcp(7), SIOCOUTQ).
pub fn unacked(fd: c_int) -> Result<u64, Errno> {
    ioctl_int(fd, libc::TIOCOUTQ).map(|v| v.max(0) as u64)
}

/// Resets a TCP connection, for all who have it (connect(2), AF_UNSPEC).
pub fn disconnect(fd: c_int) {
    let nobody = libc::sockaddr {
        sa_family: libc::AF_UNSPEC as libc::sa_family_t,
        sa_data: [0; 14],
    };
    let _ = connect(fd, (&raw const nobody).cast(), size_of_val(&nobody));
}
