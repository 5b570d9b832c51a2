//! Socket options across transports: a new transport gets the options that the application set on the old one.
//!
//! A process sets few kinds of options, and reading all others from both sockets would be half the system calls of a
//! resume. So only those options are copied that have ever been set in this process, on whatever socket: connections
//! take them over from their listeners. If a listener comes from another process, all options are copied ([`any`]).
//! [`table`] says how each option is treated.

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

/// The options that may differ from the kernel's defaults, one bit for each row. TCP_NODELAY always may: SLIM's connections
/// have it from the beginning, and the application's need not.
static SET: [AtomicU64; WORDS] = {
    let mut words = [const { AtomicU64::new(0) }; WORDS];
    words[NODELAY / 64] = AtomicU64::new(1 << (NODELAY % 64));
    words
};

fn note(row: usize) {
    SET[row / 64].fetch_or(1 << (row % 64), Ordering::Relaxed);
}

/// The application sets an option on some socket. True if a connection that has the option must be plain TCP.
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

/// There are sockets on which another process, or the program before, may have set any option and an owner.
pub fn any() {
    owned();
    static DONE: AtomicBool = AtomicBool::new(false);
    if !DONE.swap(true, Ordering::Relaxed) {
        (0..ROWS.len()).for_each(note);
    }
}

/// The application's SO_RCVBUF, if the transport has a larger one; 0 if the transport has just that, or the kernel chooses.
///
/// An established connection keeps the size that it was made with, if that is larger. The peer's kernel has seen a window
/// of that size, remembers the largest window, and sends segments of up to half of it. It uses a window smaller than such a
/// segment only by its probe timer, five times a second. And data for the announced window may be on its way, and would be
/// dropped.
pub type Receives = c_int;

/// Copies the options that a new connection needs before it is bound and made. An error means that it must not be made.
pub fn copy_before(from: c_int, to: c_int, receives: Receives) -> Result<(), Errno> {
    let chosen = |fate| matches!(fate, Fate::Before(_) | Fate::Must(_));
    copy_those(from, to, &mut |sizes| sizes.wanted(receives), chosen)
}

/// Copies the options of one TCP socket to another, which is connected. An option that the kernel refuses stays as it is. An
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

/// The application sets its SO_RCVBUF, by `set`, on the transport `fd`.
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

/// Compares the values in the form in which the kernel gives them.
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
    /// Which sizes the application has set: bits of SO_BUF_LOCK.
    locked: c_int,
}

impl Sizes {
    fn of(fd: c_int) -> Self {
        let locked = sys::option::<c_int>(fd, libc::SOL_SOCKET, libc::SO_BUF_LOCK).unwrap_or(0);
        Self { fd, locked }
    }

    /// The SO_RCVBUF that the application wants. A size that it has not set must stay with the kernel's autotuning.
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
    // The kernel doubles the size that it is given (socket(7)).
    sys::set_option(fd, libc::SOL_SOCKET, name, &(want / 2));
    if size(fd, name) != Some(want) {
        // The size is above the system's limit: a privileged process can force it.
        let force = match name {
            libc::SO_SNDBUF => libc::SO_SNDBUFFORCE,
            _ => libc::SO_RCVBUFFORCE,
        };
        sys::set_option(fd, libc::SOL_SOCKET, force, &(want / 2));
    }
}

/// Some descriptor has an owner, a process that gets a signal when the descriptor is ready.
static OWNED: AtomicBool = AtomicBool::new(false);

/// The application sets an owner (`F_SETOWN`), or the owner's signal.
pub fn owned() {
    OWNED.store(true, Ordering::Relaxed);
}

fn copy_owner(from: c_int, to: c_int) {
    if OWNED.load(Ordering::Relaxed) {
        sys::copy_owner(from, to);
    }
}

/// Signals the owner of the file `fd`: `number` has got this file, or a stand-in whose bytes come before it, and the owner has not
/// been told that it is ready.
pub fn tell_owner(fd: c_int, number: c_int) {
    if OWNED.load(Ordering::Relaxed) {
        sys::tell_owner(fd, number);
    }
}

/// The application has closed the file `fd`, which stays open until its last bytes are delivered: it signals no more.
pub fn disown(fd: c_int) {
    if OWNED.load(Ordering::Relaxed) {
        sys::set_status(fd, sys::status(fd) & !libc::O_ASYNC);
    }
}

/// The cookies of unconnected sockets that have an option which binds them to one connection ([`Fate::Bound`]).
static BOUND: [AtomicU64; 1024] = [const { AtomicU64::new(0) }; 1024];
/// The number of such sockets. If it is more than fit, every new connection is plain TCP.
static BINDING: AtomicUsize = AtomicUsize::new(0);

/// Some connected socket has such an option. It keeps some of these options when its association is dissolved.
static CONNECTED: AtomicBool = AtomicBool::new(false);

/// Notes that a TCP socket has got such an option.
#[cold]
pub fn bind(fd: c_int) {
    let unconnected = [sys::TCP_CLOSE, sys::TCP_LISTEN, sys::TCP_SYN_SENT];
    match sys::tcp_state(fd) {
        Some(state) if unconnected.contains(&state) => add(fd),
        Some(_) => CONNECTED.store(true, Ordering::SeqCst),
        None => {}
    }
}

/// The association of a socket has been dissolved. It is not known any more which options its connection had.
pub fn dissolved(fd: c_int) {
    if any_connected() {
        add(fd);
    }
}

/// Whether a connected socket has ever got such an option.
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
            "too many sockets with options that bind them to one connection: new connections are plain TCP",
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
