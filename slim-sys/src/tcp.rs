//! Queries and options of TCP sockets.

use crate::{Errno, at, option, option_with_len, set_option, try_option};
use libc::c_int;
use std::time::Duration;

/// Value for SO_LINGER with which `close` resets the connection.
pub const AT_ONCE: libc::linger = libc::linger {
    l_onoff: 1,
    l_linger: 0,
};

/// Value for SO_LINGER with which `close` does not wait.
pub const NOT_AT_ALL: libc::linger = libc::linger {
    l_onoff: 0,
    l_linger: 0,
};

/// Whether the descriptor is a TCP socket.
pub fn is_tcp(fd: c_int) -> bool {
    option::<c_int>(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL) == Some(libc::IPPROTO_TCP)
}

/// `TCP_INFO` of a connection.
pub fn tcp_info(fd: c_int) -> Option<libc::tcp_info> {
    option(fd, libc::IPPROTO_TCP, libc::TCP_INFO)
}

/// The kernel's byte counters of a connection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Counters {
    /// Bytes of ours that the peer has acknowledged. If we connected, our SYN counts, too.
    pub acked: u64,
    /// Bytes received in order. The peer's FIN counts, too.
    pub received: u64,
    /// The kernel has given the connection up: the counters are final.
    pub is_over: bool,
}

/// The counters, from Linux 4.1 on. They are read at their offsets in struct tcp_info (linux/tcp.h), which only ever
/// grows at its end. The libc crate's definition of it has different lengths in different releases.
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

/// The age of a connection that has just been accepted. The kernel sets the time of the last send when the connection is made,
/// and nothing has been sent since.
pub fn age_of_accepted(fd: c_int) -> Option<Duration> {
    let info = tcp_info(fd)?;
    Some(Duration::from_millis(info.tcpi_last_data_sent.into()))
}

/// Whether the peer's FIN has arrived on a connection from which everything has been read. `TCP_ZEROCOPY_RECEIVE` then fails with
/// EIO, because no more bytes can arrive. If the option is missing (before Linux 4.18) or forbidden, the answer is
/// [`is_state_of_end`] of the state, which is also true for a connection that is over and may have had no FIN.
pub fn has_peer_fin(fd: c_int) -> bool {
    const TCP_ZEROCOPY_RECEIVE: c_int = 35;
    // All zero: no memory to map.
    match try_option::<[u64; 2]>(fd, libc::IPPROTO_TCP, TCP_ZEROCOPY_RECEIVE) {
        Ok(_) => false,
        Err(libc::EIO) => true,
        Err(_) => tcp_state(fd).is_none_or(is_state_of_end),
    }
}

/// Whether in this state the peer's FIN has arrived (CLOSE_WAIT, LAST_ACK, CLOSING, TIME_WAIT), or may have ([`TCP_CLOSE`]).
pub fn is_state_of_end(state: u8) -> bool {
    [8, 9, 11, 6, TCP_CLOSE].contains(&state)
}

/// `TCP_CLOSE` of linux/tcp_states.h: the kernel has given the connection up.
pub const TCP_CLOSE: u8 = 7;
/// `TCP_ESTABLISHED`.
pub const TCP_ESTABLISHED: u8 = 1;
/// `TCP_FIN_WAIT2`: the peer has acknowledged our FIN.
pub const TCP_FIN_WAIT2: u8 = 5;
/// `TCP_CLOSE_WAIT`: the peer's FIN has arrived.
pub const TCP_CLOSE_WAIT: u8 = 8;
/// `TCP_LISTEN`.
pub const TCP_LISTEN: u8 = 10;
/// `TCP_SYN_SENT`.
pub const TCP_SYN_SENT: u8 = 2;

/// The state of a TCP connection; `None` if the descriptor is not a TCP socket.
pub fn tcp_state(fd: c_int) -> Option<u8> {
    tcp_info(fd).map(|i| i.tcpi_state)
}

/// [`tcp_state`], after the kernel has finished its current work on the socket. When the kernel gives a connection up it
/// sets the error before the state. The first query waits for the socket lock, so the second one sees the final state.
pub fn stable_state(fd: c_int) -> Option<u8> {
    tcp_state(fd)?;
    tcp_state(fd)
}

/// Whether the kernel has given a connection up.
pub fn is_over(fd: c_int) -> bool {
    stable_state(fd) == Some(TCP_CLOSE)
}

/// Whether a connection is not known to be over, and yet its oldest unacknowledged segment does not get through. One lost
/// segment does not count: it must have been retransmitted twice. Nor does one failure to send at all.
pub fn is_stuck(fd: c_int) -> bool {
    tcp_info(fd).is_some_and(|i| {
        let stands = ![TCP_CLOSE, TCP_SYN_SENT].contains(&i.tcpi_state);
        let tried = i.tcpi_retransmits >= 2 || (cannot_send(&i) && i.tcpi_probes >= 2);
        stands && tried
    })
}

/// Whether nothing is under way although bytes wait to be sent and the peer has room for a segment: the kernel can send no packet.
/// For example, the local address is gone. For a window smaller than a segment, the kernel waits for 0.2 s or more before it sends a
/// part of one, so that does not count. Always false before Linux 5.4, which does not tell the peer's window.
pub fn cannot_send(info: &libc::tcp_info) -> bool {
    let segment = info.tcpi_snd_mss.min(info.tcpi_notsent_bytes);
    info.tcpi_unacked == 0 && segment > 0 && info.tcpi_snd_wnd >= segment
}

/// What a connection with bytes under way waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AckWait {
    /// As [`Counters::acked`].
    pub acked: u64,
    /// Time since the kernel has last sent data, or has last heard from the peer, whichever is shorter. The kernel measures it in
    /// ticks of at most 10 ms.
    pub waited: Duration,
    /// A long round trip: the average and four deviations, as the kernel estimates them. The peer's kernel may delay
    /// acknowledgements, and the estimate contains that, so it counts only up to four of the shortest round trips, or 2 ms.
    pub round_trip: Duration,
}

/// What a connection waits for; `None` if the peer has acknowledged everything that could be sent.
pub fn ack_wait(fd: c_int) -> Option<AckWait> {
    let info = tcp_info(fd)?;
    let waits = info.tcpi_unacked > 0 || cannot_send(&info);
    let stands = ![TCP_CLOSE, TCP_SYN_SENT].contains(&info.tcpi_state);
    let waited = info.tcpi_last_data_sent.min(info.tcpi_last_ack_recv);
    let estimate = u64::from(info.tcpi_rtt) + 4 * u64::from(info.tcpi_rttvar);
    let round_trip = match info.tcpi_min_rtt {
        // Before Linux 4.6, and before the first acknowledgement.
        0 | u32::MAX => estimate,
        shortest => estimate.min(2000.max(4 * u64::from(shortest))),
    };
    (waits && stands).then(|| AckWait {
        acked: info.tcpi_bytes_acked,
        waited: Duration::from_millis(waited.into()),
        round_trip: Duration::from_micros(round_trip),
    })
}

/// Bytes written that the peer's kernel has not acknowledged. The number can still be read after the connection has died
/// (tcp(7), SIOCOUTQ).
pub fn unacked(fd: c_int) -> Result<u64, Errno> {
    let mut queued: c_int = 0;
    // SAFETY: the kernel writes an int, if the descriptor is a socket or a terminal.
    unsafe { call!(libc::SYS_ioctl, fd, libc::TIOCOUTQ, &raw mut queued) }?;
    Ok(queued.max(0) as u64)
}

/// Keep-alive settings of a connection: SO_KEEPALIVE and TCP_KEEPIDLE.
#[derive(Clone, Copy)]
pub struct KeepAlive {
    on: bool,
    /// In seconds. The kernel's maximum fits.
    idle: u16,
}

impl KeepAlive {
    /// Probes the peer's kernel after one second of silence, the kernel's minimum.
    pub const SOON: Self = Self { on: true, idle: 1 };

    /// The settings of `fd`.
    pub fn of(fd: c_int) -> Option<Self> {
        let on: c_int = option(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE)?;
        let idle: c_int = option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE)?;
        Some(Self {
            on: on != 0,
            idle: idle.try_into().ok()?,
        })
    }

    /// Applies the settings to `fd`.
    pub fn set(&self, fd: c_int) {
        let (on, idle) = (c_int::from(self.on), c_int::from(self.idle));
        set_option(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE, &on);
        set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, &idle);
    }
}

/// For a connection whose peer has ended its direction: whether the connection still stands and the peer's kernel has sent an
/// acceptable segment within the time `since`. A segment from before the end of the stream is not acceptable, so the peer's
/// kernel knows of that end.
pub fn answered_within(fd: c_int, since: Duration) -> bool {
    // The kernel measures time in ticks of at most 10 ms.
    const TICK: Duration = Duration::from_millis(10);
    let since = since.saturating_sub(TICK).as_millis();
    tcp_info(fd)
        .is_some_and(|i| i.tcpi_state != TCP_CLOSE && u128::from(i.tcpi_last_ack_recv) < since)
}

/// Resets a TCP connection, for every process that shares it (connect(2), AF_UNSPEC).
pub fn disconnect(fd: c_int) {
    let _ = rustix::net::connect_unspec(at(fd));
}
