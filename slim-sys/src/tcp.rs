//! What is asked of TCP sockets.

use crate::{Errno, at, option, option_with_len, set_option, try_option};
use libc::c_int;
use std::time::Duration;

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
    let (raw, len): ([u8; RECEIVED + 8], _) =
        option_with_len(fd, libc::IPPROTO_TCP, libc::TCP_INFO).ok()?;
    let at = |offset: usize| {
        Some(u64::from_ne_bytes(
            raw.get(offset..offset + 8)?.try_into().ok()?,
        ))
    };
    (len == raw.len()).then_some(())?;
    Some(Counters {
        acked: at(ACKED)?,
        received: at(RECEIVED)?,
        // tcpi_state is the first byte.
        is_over: raw.first() == Some(&TCP_CLOSE),
    })
}

/// For how long a connection has stood that has just been accepted: it was made as if something were sent then, and
/// nothing has been sent since.
pub fn age_of_accepted(fd: c_int) -> Option<Duration> {
    let info = tcp_info(fd)?;
    Some(Duration::from_millis(info.tcpi_last_data_sent.into()))
}

/// Whether the peer's FIN has come to a connection of which everything has been read: the kernel refuses to map bytes
/// that cannot come any more. Where it does not tell (before Linux 4.18, or forbidden), the state has to do, and a
/// connection that is over may have had one.
pub fn has_come_to_an_end(fd: c_int) -> bool {
    const TCP_ZEROCOPY_RECEIVE: c_int = 35;
    // Where to map: nowhere.
    match try_option::<[u64; 2]>(fd, libc::IPPROTO_TCP, TCP_ZEROCOPY_RECEIVE) {
        Ok(_) => false,
        Err(libc::EIO) => true,
        Err(_) => tcp_state(fd).is_none_or(is_state_of_end),
    }
}

/// Whether the peer's FIN has come in this state (CLOSE_WAIT, LAST_ACK, CLOSING, TIME_WAIT), or may have ([`TCP_CLOSE`]).
pub fn is_state_of_end(state: u8) -> bool {
    [8, 9, 11, 6, TCP_CLOSE].contains(&state)
}

/// `TCP_CLOSE` of linux/tcp_states.h: the kernel has given the connection up.
pub const TCP_CLOSE: u8 = 7;
/// `TCP_ESTABLISHED`.
pub const TCP_ESTABLISHED: u8 = 1;
/// `TCP_FIN_WAIT2`: the peer has our FIN.
pub const TCP_FIN_WAIT2: u8 = 5;
/// `TCP_CLOSE_WAIT`: we have the peer's.
pub const TCP_CLOSE_WAIT: u8 = 8;
/// `TCP_LISTEN`.
pub const TCP_LISTEN: u8 = 10;
/// `TCP_SYN_SENT`.
pub const TCP_SYN_SENT: u8 = 2;

/// The state of a TCP connection; `None` when the descriptor is none.
pub fn tcp_state(fd: c_int) -> Option<u8> {
    tcp_info(fd).map(|i| i.tcpi_state)
}

/// The same after the kernel has done with what it is at: it shows the error of a connection that it is giving up before the
/// state, and the first question waits for it.
pub fn settled_state(fd: c_int) -> Option<u8> {
    tcp_state(fd)?;
    tcp_state(fd)
}

/// Whether the kernel has given a connection up.
pub fn is_over(fd: c_int) -> bool {
    settled_state(fd) == Some(TCP_CLOSE)
}

/// Whether a connection stands, as far as is known, and yet the kernel does not get its oldest unacknowledged segment through. A
/// segment lost once is nothing: it must have been sent again twice.
pub fn is_stuck(fd: c_int) -> bool {
    tcp_info(fd).is_some_and(|i| {
        let stands = ![TCP_CLOSE, TCP_SYN_SENT].contains(&i.tcpi_state);
        stands && i.tcpi_retransmits >= 2
    })
}

/// Bytes written that the peer's kernel has not acknowledged; readable after the connection died
/// (tcp(7), SIOCOUTQ).
pub fn unacked(fd: c_int) -> Result<u64, Errno> {
    let mut queued: c_int = 0;
    // SAFETY: the kernel writes an int, if the descriptor is a socket or a terminal.
    unsafe { call!(libc::SYS_ioctl, fd, libc::TIOCOUTQ, &raw mut queued) }?;
    Ok(queued.max(0) as u64)
}

/// How a connection that nothing moves on is looked after: SO_KEEPALIVE and TCP_KEEPIDLE.
#[derive(Clone, Copy)]
pub struct KeepAlive {
    on: bool,
    /// In seconds, of which the kernel takes no more than fit.
    idle: u16,
}

impl KeepAlive {
    /// The peer's kernel is asked as soon as it has not been heard for a second: no less can be had.
    pub const SOON: Self = Self { on: true, idle: 1 };

    /// As `fd` has it.
    pub fn of(fd: c_int) -> Option<Self> {
        let on: c_int = option(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE)?;
        let idle: c_int = option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE)?;
        Some(Self {
            on: on != 0,
            idle: idle.try_into().ok()?,
        })
    }

    /// Gives it to `fd`.
    pub fn set(&self, fd: c_int) {
        let (on, idle) = (c_int::from(self.on), c_int::from(self.idle));
        set_option(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE, &on);
        set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, &idle);
    }
}

/// Whether a connection that has ended towards us still stands, and the peer's kernel has sent something acceptable
/// within the time `since`. A segment from before the end of the stream is not, so it knows of that end.
pub fn answered_within(fd: c_int, since: Duration) -> bool {
    // The kernel counts in ticks of at most 10 ms.
    const TICK: Duration = Duration::from_millis(10);
    let since = since.saturating_sub(TICK).as_millis();
    tcp_info(fd)
        .is_some_and(|i| i.tcpi_state != TCP_CLOSE && u128::from(i.tcpi_last_ack_recv) < since)
}

/// Resets a TCP connection, for all who have it (connect(2), AF_UNSPEC).
pub fn disconnect(fd: c_int) {
    let _ = rustix::net::connect_unspec(at(fd));
}
