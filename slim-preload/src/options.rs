//! Socket options across transports: a new one gets what the application set on the old one.
//!
//! A process sets few kinds of options, and to ask the kernel for all others on both sockets would be half the system
//! calls of a resume. So only those are copied that have ever been set in this process, on whatever socket: connections
//! take them over from their listeners. Where a listener has come from elsewhere, all are ([`any`]). What becomes of
//! which option stands in [`table`].

mod table;

use crate::sys::{self, Errno};
use libc::c_int;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use table::{Fate, ROWS, ValueKind};

/// Bits of SO_BUF_LOCK: the application set the size itself (linux/socket.h).
const SNDBUF_LOCK: c_int = 1;
const RCVBUF_LOCK: c_int = 2;

const fn place(level: c_int, name: c_int) -> Option<usize> {
    let mut i = 0;
    while i < ROWS.len() {
        if ROWS[i].level == level && ROWS[i].name == name {
            return Some(i);
        }
        i += 1;
    }
    None
}

const WORDS: usize = ROWS.len().div_ceil(64);
const TOS: usize = place(libc::IPPROTO_IP, libc::IP_TOS).unwrap();
const PRIORITY: usize = place(libc::SOL_SOCKET, libc::SO_PRIORITY).unwrap();
const NODELAY: usize = place(libc::IPPROTO_TCP, libc::TCP_NODELAY).unwrap();
const _: () = assert!(TOS < PRIORITY);

/// The options that may differ from the kernel's, a bit for each row. TCP_NODELAY always: connections of ours have it
/// from the beginning, and the application's need not.
static SET: [AtomicU64; WORDS] = {
    let mut words = [const { AtomicU64::new(0) }; WORDS];
    words[NODELAY / 64] = AtomicU64::new(1 << (NODELAY % 64));
    words
};

fn note(row: usize) {
    SET[row / 64].fetch_or(1 << (row % 64), Ordering::Relaxed);
}

/// The application sets an option on some socket; whether a connection that has it must be plain TCP.
pub fn set(level: c_int, name: c_int) -> bool {
    let Some(row) = place(level, name) else {
        return true;
    };
    match ROWS[row].fate {
        Fate::Bound => return true,
        Fate::Nothing => {}
        Fate::Like(other) => return set(level, other),
        Fate::After(_) | Fate::Before(_) | Fate::Must(_) => {
            note(row);
            if row == TOS {
                note(PRIORITY);
            }
        }
    }
    false
}

/// There are sockets on which somebody else may have set anything.
pub fn any() {
    static DONE: AtomicBool = AtomicBool::new(false);
    if !DONE.swap(true, Ordering::Relaxed) {
        (0..ROWS.len()).for_each(note);
    }
}

/// The application's SO_RCVBUF, where the transport has more; 0 where it has just that, or what the kernel chooses.
///
/// A connection that stands keeps the size that it was made with, if that is more. The peer's kernel has seen the window
/// of that size, and remembers the largest: it sends pieces of up to half of it. Of a window smaller than such a piece it
/// makes no use but by its probe timer, five times a second. And what was announced may be on its way, and would be dropped.
pub type Receives = c_int;

/// Before a connection that is to follow the one of `from` is bound and made. An error means that it must not be made.
pub fn copy_before(from: c_int, to: c_int, receives: Receives) -> Result<(), Errno> {
    let chosen = |fate| matches!(fate, Fate::Before(_) | Fate::Must(_));
    copy_those(from, to, &mut |sizes| sizes.wanted(receives), chosen)
}

/// Copies the options of one TCP socket to another, a connection that stands. What the kernel refuses stays as it is; an
/// error means that the connection must not be used.
pub fn copy(from: c_int, to: c_int, receives: &mut Receives) -> Result<(), Errno> {
    copy_owner(from, to);
    let mut not_less = |sizes: &Sizes| {
        let wanted = sizes.wanted(*receives)?;
        let has = size(to, libc::SO_RCVBUF)?;
        *receives = if has > wanted { wanted } else { 0 };
        Some(has.max(wanted))
    };
    copy_those(from, to, &mut not_less, |_| true)
}

/// The application sets its SO_RCVBUF by `set`, on the transport `fd`.
pub fn set_receives(fd: c_int, receives: &mut Receives, set: impl FnOnce() -> c_int) -> c_int {
    if *receives == 0 {
        return set();
    }
    let before = size(fd, libc::SO_RCVBUF);
    let r = set();
    let now = size(fd, libc::SO_RCVBUF);
    if let Some((before, now)) = before.zip(now).filter(|_| r == 0) {
        *receives = if before > now { now } else { 0 };
        if before > now {
            sys::keep_errno(|| set_size(fd, libc::SO_RCVBUF, before));
        }
    }
    r
}

fn copy_those(
    from: c_int,
    to: c_int,
    rcvbuf: &mut dyn FnMut(&Sizes) -> Option<c_int>,
    chosen: impl Fn(Fate) -> bool,
) -> Result<(), Errno> {
    for (i, word) in SET.iter().enumerate() {
        let mut bits = word.load(Ordering::Relaxed);
        while bits != 0 {
            let row = &ROWS[i * 64 + bits.trailing_zeros() as usize];
            bits &= bits - 1;
            let (Fate::After(kind) | Fate::Before(kind) | Fate::Must(kind)) = row.fate else {
                continue;
            };
            if chosen(row.fate) {
                let copied = copy_row(from, to, row.level, row.name, kind, rcvbuf);
                if let (Fate::Must(_), Err(errno)) = (row.fate, copied) {
                    return Err(errno);
                }
            }
        }
    }
    Ok(())
}

fn copy_row(
    from: c_int,
    to: c_int,
    level: c_int,
    name: c_int,
    kind: ValueKind,
    rcvbuf: &mut dyn FnMut(&Sizes) -> Option<c_int>,
) -> Result<(), Errno> {
    match kind {
        ValueKind::Int => copy_one::<c_int>(from, to, level, name),
        ValueKind::Linger | ValueKind::Wide => copy_one::<[u32; 2]>(from, to, level, name),
        ValueKind::Name => copy_one::<[u8; 16]>(from, to, level, name),
        ValueKind::Sizes => {
            copy_sizes(from, to, rcvbuf);
            Ok(())
        }
        ValueKind::Time => copy_one::<[u64; 2]>(from, to, level, name),
    }
}

/// Values are compared as the kernel gives them.
fn copy_one<T: sys::Plain + PartialEq>(
    from: c_int,
    to: c_int,
    level: c_int,
    name: c_int,
) -> Result<(), Errno> {
    let Some(want) = sys::option::<T>(from, level, name) else {
        return Ok(());
    };
    if sys::option::<T>(to, level, name) == Some(want) {
        return Ok(());
    }
    sys::try_set_option(to, level, name, &want)
}

/// The sizes of a socket's buffers.
struct Sizes {
    fd: c_int,
    /// Those that the application has set: bits of SO_BUF_LOCK.
    locked: c_int,
}

impl Sizes {
    fn of(fd: c_int) -> Self {
        let locked = sys::option::<c_int>(fd, libc::SOL_SOCKET, libc::SO_BUF_LOCK).unwrap_or(0);
        Self { fd, locked }
    }

    /// What the application wants for SO_RCVBUF. Sizes that it left alone must stay with the kernel's autotuning.
    fn wanted(&self, receives: Receives) -> Option<c_int> {
        match receives {
            _ if self.locked & RCVBUF_LOCK == 0 => None,
            0 => size(self.fd, libc::SO_RCVBUF),
            receives => Some(receives),
        }
    }
}

fn copy_sizes(from: c_int, to: c_int, rcvbuf: &mut dyn FnMut(&Sizes) -> Option<c_int>) {
    let (sizes, already) = (Sizes::of(from), Sizes::of(to).locked);
    let locked = sizes.locked & SNDBUF_LOCK != 0;
    let sends = size(from, libc::SO_SNDBUF).filter(|_| locked);
    for (bit, name, want) in [
        (SNDBUF_LOCK, libc::SO_SNDBUF, sends),
        (RCVBUF_LOCK, libc::SO_RCVBUF, rcvbuf(&sizes)),
    ] {
        if let Some(want) = want.filter(|want| already & bit == 0 || size(to, name) != Some(*want))
        {
            set_size(to, name, want);
        }
    }
}

fn size(fd: c_int, name: c_int) -> Option<c_int> {
    sys::option(fd, libc::SOL_SOCKET, name)
}

fn set_size(fd: c_int, name: c_int, want: c_int) {
    // The kernel doubles what it is given (socket(7)).
    sys::set_option(fd, libc::SOL_SOCKET, name, &(want / 2));
    if size(fd, name) != Some(want) {
        // Beyond the system's limit, by privilege.
        let force = match name {
            libc::SO_SNDBUF => libc::SO_SNDBUFFORCE,
            _ => libc::SO_RCVBUFFORCE,
        };
        sys::set_option(fd, libc::SOL_SOCKET, force, &(want / 2));
    }
}

/// Some descriptor has been given an owner, who is told by a signal what it is ready for.
static OWNED: AtomicBool = AtomicBool::new(false);

/// The application names an owner (`F_SETOWN`), or his signal.
pub fn owned() {
    OWNED.store(true, Ordering::Relaxed);
}

fn copy_owner(from: c_int, to: c_int) {
    if OWNED.load(Ordering::Relaxed) {
        sys::copy_owner(from, to);
    }
}

/// There is something new under `number`, the file of `fd` or what comes before it, of which the owner of the file has
/// heard nothing yet.
pub fn tell_owner(fd: c_int, number: c_int) {
    if OWNED.load(Ordering::Relaxed) {
        sys::tell_owner(fd, number);
    }
}

/// Sockets with an option that binds them to their one connection, by their cookies: of those that were not connected yet.
static BOUND: [AtomicU64; 1024] = [const { AtomicU64::new(0) }; 1024];
/// How many there are. With more than fit, every connection is plain.
static BINDING: AtomicUsize = AtomicUsize::new(0);

/// A connected socket has such an option. It keeps some of them when it is dissolved.
static CONNECTED: AtomicBool = AtomicBool::new(false);

/// A TCP socket has got such an option.
#[cold]
pub fn bind(fd: c_int) {
    let unconnected = [sys::TCP_CLOSE, sys::TCP_LISTEN, sys::TCP_SYN_SENT];
    match sys::tcp_state(fd) {
        Some(state) if unconnected.contains(&state) => add(fd),
        Some(_) => CONNECTED.store(true, Ordering::SeqCst),
        None => {}
    }
}

/// The association of a socket has been dissolved; which connection it had, and with which options, is not known any more.
pub fn dissolved(fd: c_int) {
    if any_connected() {
        add(fd);
    }
}

/// Whether there has been one.
pub fn any_connected() -> bool {
    CONNECTED.load(Ordering::SeqCst)
}

fn add(fd: c_int) {
    if is_bound(fd) {
        return;
    }
    let at = BINDING.fetch_add(1, Ordering::SeqCst);
    if let Some(place) = BOUND.get(at) {
        place.store(sys::cookie(fd).unwrap_or(0), Ordering::SeqCst);
    } else if at == BOUND.len() {
        crate::runtime::say(
            "too many sockets with options that cannot go with a connection: new connections are plain TCP",
        );
    }
}

/// Whether connections of this socket must be plain TCP.
pub fn is_bound(fd: c_int) -> bool {
    match BINDING.load(Ordering::SeqCst) {
        0 => false,
        n if n > BOUND.len() => true,
        n => {
            let cookie = sys::cookie(fd).unwrap_or(0);
            BOUND[..n]
                .iter()
                .any(|c| c.load(Ordering::SeqCst) == cookie)
        }
    }
}
