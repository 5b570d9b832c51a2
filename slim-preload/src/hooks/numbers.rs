//! Calls that give out descriptor numbers.
//!
//! They get the number that they would get without SLIM: [`numbers`](slim_sys::numbers) keeps them apart from the creation of
//! SLIM's own descriptors. Calls that do more than that (`accept`, `dup`, `close` …) are in other modules.

use super::looked_up::hook;
use crate::ops::closing::given_out;
use crate::ops::epoll;
use crate::runtime;
use libc::{FILE, c_char, c_int, c_uint, mode_t, sigset_t};
use redhook::real;
use slim_sys::numbers::{make, take, take_and_wait};

macro_rules! give_out {
    ($take:ident; $($hook:ident: $name:ident($($arg:ident: $kind:ty),*) -> $result:ty;)*) => {$(
        hook! { unsafe fn $name($($arg: $kind),*) -> $result => $hook {
            let given = $take(|| real!($name)($($arg),*));
            given.note();
            given
        }}
    )*};
}

/// The result of a call that creates a descriptor.
trait GivenNumber {
    /// Removes an old entry of the number from the table.
    fn note(&self);
}

impl GivenNumber for c_int {
    #[inline]
    fn note(&self) {
        given_out(*self);
    }
}

impl GivenNumber for *mut libc::DIR {
    fn note(&self) {
        if !self.is_null() {
            // SAFETY: a directory that libc has just opened.
            given_out(unsafe { libc::dirfd(*self) });
        }
    }
}

impl GivenNumber for *mut FILE {
    fn note(&self) {
        if !self.is_null() {
            // SAFETY: a stream that libc has just opened.
            given_out(unsafe { libc::fileno(*self) });
        }
    }
}

/// Likewise, for a call that creates two descriptors.
fn note_both(given: c_int, ends: *const c_int) -> c_int {
    if given == 0 {
        // SAFETY: the kernel has just written the two numbers.
        unsafe { [*ends, *ends.add(1)] }
            .into_iter()
            .for_each(given_out);
    }
    given
}

type FilePath = *const c_char;
type Template = *mut c_char;

// `open` and `openat` are variadic in C; on the supported platforms the last argument is passed like a fixed one.
give_out! {
    take_and_wait;
    slim_creat: creat(path: FilePath, mode: mode_t) -> c_int;
    slim_creat64: creat64(path: FilePath, mode: mode_t) -> c_int;
    slim_fopen: fopen(path: FilePath, mode: *const c_char) -> *mut FILE;
    slim_fopen64: fopen64(path: FilePath, mode: *const c_char) -> *mut FILE;
    slim_freopen: freopen(path: FilePath, mode: *const c_char, stream: *mut FILE) -> *mut FILE;
    slim_freopen64: freopen64(path: FilePath, mode: *const c_char, stream: *mut FILE) -> *mut FILE;
    slim_mkostemp: mkostemp(path: Template, flags: c_int) -> c_int;
    slim_mkostemp64: mkostemp64(path: Template, flags: c_int) -> c_int;
    slim_mkostemps: mkostemps(path: Template, suffix: c_int, flags: c_int) -> c_int;
    slim_mkostemps64: mkostemps64(path: Template, suffix: c_int, flags: c_int) -> c_int;
    slim_mkstemp: mkstemp(path: Template) -> c_int;
    slim_mkstemp64: mkstemp64(path: Template) -> c_int;
    slim_mkstemps: mkstemps(path: Template, suffix: c_int) -> c_int;
    slim_mkstemps64: mkstemps64(path: Template, suffix: c_int) -> c_int;
    slim_open: open(path: FilePath, flags: c_int, mode: mode_t) -> c_int;
    slim_open64: open64(path: FilePath, flags: c_int, mode: mode_t) -> c_int;
    slim___open_2: __open_2(path: FilePath, flags: c_int) -> c_int;
    slim___open64_2: __open64_2(path: FilePath, flags: c_int) -> c_int;
    slim_openat: openat(at: c_int, path: FilePath, flags: c_int, mode: mode_t) -> c_int;
    slim_openat64: openat64(at: c_int, path: FilePath, flags: c_int, mode: mode_t) -> c_int;
    slim___openat_2: __openat_2(at: c_int, path: FilePath, flags: c_int) -> c_int;
    slim___openat64_2: __openat64_2(at: c_int, path: FilePath, flags: c_int) -> c_int;
    slim_opendir: opendir(path: FilePath) -> *mut libc::DIR;
    slim_posix_openpt: posix_openpt(flags: c_int) -> c_int;
    slim_shm_open: shm_open(name: FilePath, flags: c_int, mode: mode_t) -> c_int;
    slim_tmpfile: tmpfile() -> *mut FILE;
    slim_tmpfile64: tmpfile64() -> *mut FILE;
}
give_out! {
    take;
    slim_inotify_init: inotify_init() -> c_int;
    slim_inotify_init1: inotify_init1(flags: c_int) -> c_int;
    slim_memfd_create: memfd_create(name: *const c_char, flags: c_uint) -> c_int;
    slim_signalfd: signalfd(fd: c_int, mask: *const sigset_t, flags: c_int) -> c_int;
    slim_socket: socket(family: c_int, kind: c_int, protocol: c_int) -> c_int;
    slim_timerfd_create: timerfd_create(clock: c_int, flags: c_int) -> c_int;
}

hook! { unsafe fn epoll_create(size: c_int) -> c_int => slim_epoll_create {
    epoll::created(ours_or_theirs(|| real!(epoll_create)(size)))
}}
hook! { unsafe fn pipe(ends: *mut c_int) -> c_int => slim_pipe {
    note_both(take(|| real!(pipe)(ends)), ends)
}}
hook! { unsafe fn pipe2(ends: *mut c_int, flags: c_int) -> c_int => slim_pipe2 {
    note_both(take(|| real!(pipe2)(ends, flags)), ends)
}}
hook! { unsafe fn socketpair(family: c_int, kind: c_int, protocol: c_int, ends: *mut c_int) -> c_int => slim_socketpair {
    note_both(take(|| real!(socketpair)(family, kind, protocol, ends)), ends)
}}

// The agent's runtime (tokio) makes its own descriptors by these calls.
hook! { unsafe fn epoll_create1(flags: c_int) -> c_int => slim_epoll_create1 {
    epoll::created(ours_or_theirs(|| real!(epoll_create1)(flags)))
}}
hook! { unsafe fn eventfd(count: c_uint, flags: c_int) -> c_int => slim_eventfd {
    ours_or_theirs(|| real!(eventfd)(count, flags))
}}

fn ours_or_theirs(real: impl Fn() -> c_int) -> c_int {
    if runtime::is_our_call() {
        make(|| runtime::out_of_the_way(real()))
    } else {
        let given = take(real);
        given.note();
        given
    }
}
