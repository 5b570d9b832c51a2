//! How each socket option is treated when a flow gets another connection. Every option that Linux has for a TCP socket
//! is listed here. An option that is not listed counts as [`Fate::Bound`].

use libc::c_int;

/// How an option is treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Copied when the new connection is made.
    After(ValueKind),
    /// Copied before the new connection is made, if this process makes it: the kernel uses the option for connecting.
    Before(ValueKind),
    /// Likewise; and if the option cannot be copied, no new connection may be made: its bytes would take a forbidden path.
    Must(ValueKind),
    /// Another name of the option with this number.
    Like(c_int),
    /// Cannot be read, or does not concern only the connection's future: a connection that has it becomes plain TCP.
    Bound,
    /// No state of a connection: read-only, or of listeners, or of other kinds of sockets, or a command.
    Nothing,
}

/// The type of an option's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueKind {
    /// `int`, or another type of four bytes.
    Int,
    /// `struct linger`
    Linger,
    /// Sixteen characters.
    Name,
    /// The sizes of both buffers. Copied if the application has set them.
    Sizes,
    /// `struct timeval`
    Time,
    /// Eight bytes.
    Wide,
}

/// An option.
#[derive(Debug)]
pub struct Row {
    /// Its level.
    pub level: c_int,
    /// Its number.
    pub name: c_int,
    /// Its name in C.
    #[allow(dead_code, reason = "for tests")]
    pub label: &'static str,
    /// How it is treated.
    pub fate: Fate,
}

macro_rules! number {
    ($name:ident) => {
        libc::$name
    };
    ($name:ident = $number:literal) => {
        $number
    };
}

macro_rules! options {
    ($($level:ident { $($fate:expr => $($name:ident $(= $number:literal)?),*;)* })*) => {
        /// All options, in the order in which they are copied.
        pub const ROWS: &[Row] = &[$($($(
            Row {
                level: libc::$level,
                name: number!($name $(= $number)?),
                label: stringify!($name),
                fate: $fate,
            },
        )*)*)*];
    };
}

use Fate::{After, Before, Bound, Like, Must, Nothing};
use ValueKind::{Int, Linger, Name, Sizes, Time, Wide};

options! {
    // Order matters: IP_TOS also sets SO_PRIORITY, so it is copied first.
    IPPROTO_IP {
        Before(Int) => IP_FREEBIND, IP_MTU_DISCOVER, IP_TOS, IP_TRANSPARENT, IP_LOCAL_PORT_RANGE = 51;
        After(Int) => IP_BIND_ADDRESS_NO_PORT, IP_CHECKSUM = 23, IP_MINTTL, IP_PASSSEC, IP_PKTINFO, IP_RECVERR,
            IP_RECVERR_RFC4884 = 26, IP_RECVFRAGSIZE = 25, IP_RECVOPTS, IP_RECVORIGDSTADDR, IP_RECVTOS, IP_RECVTTL,
            IP_RETOPTS, IP_TTL, IP_UNICAST_IF;
        Bound => IP_IPSEC_POLICY, IP_OPTIONS, IP_XFRM_POLICY;
        Nothing => IP_ADD_MEMBERSHIP, IP_ADD_SOURCE_MEMBERSHIP, IP_BLOCK_SOURCE, IP_DROP_MEMBERSHIP,
            IP_DROP_SOURCE_MEMBERSHIP, IP_HDRINCL, IP_MSFILTER, IP_MTU, IP_MULTICAST_ALL, IP_MULTICAST_IF,
            IP_MULTICAST_LOOP, IP_MULTICAST_TTL, IP_NODEFRAG, IP_PKTOPTIONS, IP_PROTOCOL = 52, IP_ROUTER_ALERT,
            IP_UNBLOCK_SOURCE, MCAST_BLOCK_SOURCE = 43, MCAST_JOIN_GROUP = 42, MCAST_JOIN_SOURCE_GROUP = 46,
            MCAST_LEAVE_GROUP = 45, MCAST_LEAVE_SOURCE_GROUP = 47, MCAST_MSFILTER = 48, MCAST_UNBLOCK_SOURCE = 44,
            SO_ORIGINAL_DST = 80;
    }
    IPPROTO_IPV6 {
        Before(Int) => IPV6_ADDR_PREFERENCES, IPV6_AUTOFLOWLABEL = 70, IPV6_FREEBIND, IPV6_MTU_DISCOVER, IPV6_TCLASS,
            IPV6_TRANSPARENT, IPV6_UNICAST_HOPS;
        After(Int) => IPV6_2292DSTOPTS = 4, IPV6_2292HOPLIMIT = 8, IPV6_2292HOPOPTS = 3, IPV6_2292PKTINFO = 2,
            IPV6_2292RTHDR = 5, IPV6_DONTFRAG, IPV6_FLOWINFO = 11, IPV6_FLOWINFO_SEND = 33, IPV6_MINHOPCOUNT,
            IPV6_RECVDSTOPTS, IPV6_RECVERR, IPV6_RECVERR_RFC4884 = 31, IPV6_RECVFRAGSIZE, IPV6_RECVHOPLIMIT,
            IPV6_RECVHOPOPTS, IPV6_RECVORIGDSTADDR, IPV6_RECVPATHMTU, IPV6_RECVPKTINFO, IPV6_RECVRTHDR,
            IPV6_RECVTCLASS, IPV6_UNICAST_IF;
        Bound => IPV6_2292PKTOPTIONS = 6, IPV6_DSTOPTS, IPV6_FLOWLABEL_MGR = 32, IPV6_HOPOPTS, IPV6_IPSEC_POLICY,
            IPV6_MTU, IPV6_PKTINFO, IPV6_RTHDR, IPV6_RTHDRDSTOPTS, IPV6_XFRM_POLICY;
        // IPV6_V6ONLY concerns the address that a socket is bound to, which no longer matters for a connection.
        Nothing => IPV6_ADDRFORM, IPV6_ADD_MEMBERSHIP, IPV6_AUTHHDR, IPV6_CHECKSUM, IPV6_DROP_MEMBERSHIP, IPV6_HDRINCL,
            IPV6_HOPLIMIT, IPV6_JOIN_ANYCAST, IPV6_LEAVE_ANYCAST, IPV6_MULTICAST_ALL = 29, IPV6_MULTICAST_HOPS,
            IPV6_MULTICAST_IF, IPV6_MULTICAST_LOOP, IPV6_NEXTHOP, IPV6_PATHMTU, IPV6_ROUTER_ALERT,
            IPV6_ROUTER_ALERT_ISOLATE = 30, IPV6_USE_MIN_MTU = 63, IPV6_V6ONLY, SO_ORIGINAL_DST6 = 80;
    }
    SOL_SOCKET {
        Must(Name) => SO_BINDTODEVICE;
        Must(Int) => SO_MARK;
        Before(Sizes) => SO_SNDBUF;
        Before(Int) => SO_DONTROUTE, SO_PRIORITY;
        After(Int) => SO_BROADCAST, SO_BUSY_POLL, SO_BUSY_POLL_BUDGET = 70, SO_DEBUG, SO_INCOMING_CPU, SO_INQ = 84,
            SO_KEEPALIVE, SO_LOCK_FILTER, SO_NOFCS, SO_NO_CHECK, SO_OOBINLINE, SO_PASSCRED, SO_PASSPIDFD = 76,
            SO_PASSRIGHTS = 83, SO_PASSSEC, SO_PREFER_BUSY_POLL = 69, SO_RCVLOWAT, SO_RCVMARK = 75,
            SO_RCVPRIORITY = 82, SO_RESERVE_MEM = 73, SO_REUSEADDR, SO_REUSEPORT, SO_RXQ_OVFL, SO_SELECT_ERR_QUEUE,
            SO_TIMESTAMP, SO_TIMESTAMPNS, SO_TIMESTAMPNS_NEW = 64, SO_TIMESTAMP_NEW = 63, SO_TXREHASH = 74,
            SO_WIFI_STATUS, SO_ZEROCOPY;
        After(Linger) => SO_LINGER;
        After(Time) => SO_RCVTIMEO, SO_SNDTIMEO;
        After(Wide) => SO_MAX_PACING_RATE, SO_TXTIME;
        Like(libc::SO_SNDBUF) => SO_BUF_LOCK, SO_RCVBUF, SO_RCVBUFFORCE, SO_SNDBUFFORCE;
        Like(libc::SO_BINDTODEVICE) => SO_BINDTOIFINDEX;
        Like(libc::SO_RCVTIMEO) => SO_RCVTIMEO_NEW = 66;
        Like(libc::SO_SNDTIMEO) => SO_SNDTIMEO_NEW = 67;
        // Notices in the error queue count bytes from the connection's beginning, and so does SO_PEEK_OFF.
        Bound => SO_ATTACH_BPF, SO_ATTACH_FILTER, SO_DEVMEM_DMABUF = 79, SO_DEVMEM_DONTNEED = 80, SO_DEVMEM_LINEAR = 78,
            SO_PEEK_OFF, SO_TIMESTAMPING, SO_TIMESTAMPING_NEW = 65;
        Nothing => SO_ACCEPTCONN, SO_ATTACH_REUSEPORT_CBPF, SO_ATTACH_REUSEPORT_EBPF, SO_BPF_EXTENSIONS,
            SO_BSDCOMPAT, SO_CNX_ADVICE, SO_COOKIE, SO_DETACH_FILTER, SO_DETACH_REUSEPORT_BPF = 68, SO_DOMAIN,
            SO_ERROR, SO_INCOMING_NAPI_ID, SO_MEMINFO, SO_NETNS_COOKIE = 71, SO_PEERCRED, SO_PEERGROUPS, SO_PEERNAME,
            SO_PEERPIDFD = 77, SO_PEERSEC, SO_PROTOCOL, SO_SECURITY_AUTHENTICATION = 22,
            SO_SECURITY_ENCRYPTION_NETWORK = 24, SO_SECURITY_ENCRYPTION_TRANSPORT = 23, SO_SNDLOWAT, SO_TYPE;
    }
    IPPROTO_TCP {
        After(Int) => TCP_NODELAY, TCP_CORK, TCP_DEFER_ACCEPT, TCP_DELACK_MAX_US = 46, TCP_INQ, TCP_KEEPCNT,
            TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_LINGER2, TCP_NOTSENT_LOWAT, TCP_QUICKACK, TCP_RTO_MAX_MS = 44,
            TCP_RTO_MIN_US = 45, TCP_SYNCNT, TCP_THIN_LINEAR_TIMEOUTS, TCP_TX_DELAY = 37, TCP_USER_TIMEOUT;
        After(Name) => TCP_CONGESTION;
        // A window smaller than the one that a connection was made with makes it stall: its peer sends larger segments.
        Bound => TCP_WINDOW_CLAMP, TCP_AO_ADD_KEY = 38, TCP_AO_DEL_KEY = 39, TCP_AO_INFO = 40, TCP_AO_REPAIR = 42, TCP_MAXSEG, TCP_MD5SIG,
            TCP_MD5SIG_EXT, TCP_QUEUE_SEQ, TCP_REPAIR, TCP_REPAIR_OPTIONS, TCP_REPAIR_QUEUE, TCP_REPAIR_WINDOW, TCP_ULP,
            TCP_ZEROCOPY_RECEIVE;
        // Options of listeners, options for connecting, and read-only options.
        Nothing => TCP_AO_GET_KEYS = 41, TCP_CC_INFO, TCP_FASTOPEN, TCP_FASTOPEN_CONNECT, TCP_FASTOPEN_KEY,
            TCP_FASTOPEN_NO_COOKIE, TCP_INFO, TCP_IS_MPTCP = 43, TCP_SAVED_SYN, TCP_SAVE_SYN, TCP_THIN_DUPACK, TCP_TIMESTAMP;
    }
}
