//! `syscall(2)`: a system call on descriptors is handled like a call of libc's function for it.
//!
//! System calls that SLIM does not handle go to libc, at the cost of one comparison.

use super::looked_up::real_of;
use super::{data, descriptors, numbers, readiness, sockets};
use crate::exec::exec;
use crate::exec::program::{Named, Program};
use crate::ops::closing::given_out;
use crate::ops::limit::{Given, write_left};
use crate::{process, rings, runtime, sys};
use libc::{c_int, c_long, c_uint};
use slim_sys::{cancel, numbers::take_and_wait};
use std::sync::atomic::{AtomicPtr, Ordering};

type SyscallFunction =
    unsafe extern "C" fn(c_long, usize, usize, usize, usize, usize, usize) -> c_long;

/// libc's own `syscall`; not known before our constructor, or the first call.
static REAL: AtomicPtr<()> = AtomicPtr::new(find as SyscallFunction as *mut ());

/// Finds libc's own `syscall`, and makes the call.
unsafe extern "C" fn find(
    nr: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    REAL.store(real_of!(c"syscall").cast(), Ordering::Release);
    real(nr, [a, b, c, d, e, f])
}

fn real(nr: c_long, [a, b, c, d, e, f]: [usize; 6]) -> c_long {
    // SAFETY: libc's function or `find`, which both have this type in the ABI: a variadic function finds its integer
    // arguments where a function of seven arguments has them.
    unsafe {
        let real: SyscallFunction = std::mem::transmute(REAL.load(Ordering::Acquire));
        real(nr, a, b, c, d, e, f)
    }
}

const NUMBERS: usize = 512;

macro_rules! on_descriptors {
    ($($(#[$only:meta])* $nr:ident($arg:ident) => $call:expr;)*) => {
        /// The system calls that SLIM handles.
        static OURS: [bool; NUMBERS] = {
            let mut ours = [false; NUMBERS];
            $($(#[$only])* { ours[libc::$nr as usize] = true; })*
            ours
        };

        /// Makes a call that SLIM handles.
        ///
        /// # Safety
        /// As the system call of this number requires.
        #[allow(unused_unsafe, reason = "some of the calls are safe")]
        unsafe extern "C" fn dispatch(nr: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
            let args = [a, b, c, d, e, f];
            if runtime::is_our_call() {
                return real(nr, args);
            }
            match nr {
                // SAFETY: the hook is the one of libc's function for this call, and takes the same arguments as the call.
                $($(#[$only])* libc::$nr => { let $arg = args; let r = unsafe { $call }; r as c_long })*
                _ => real(nr, args),
            }
        }
    };
}

/// A call that creates a descriptor.
fn creates(nr: c_long, args: [usize; 6]) -> c_long {
    let given = take_and_wait(|| real(nr, args));
    given_out(given as c_int);
    given
}

/// `clone(2)` and `clone3`: a child with memory and descriptors of its own is a forked child.
fn clones(nr: c_long, args: [usize; 6], flags: u64) -> c_long {
    match flags & (libc::CLONE_VM | libc::CLONE_FILES) as u64 {
        0 => process::forking(|| real(nr, args) as libc::pid_t).into(),
        _ => real(nr, args),
    }
}

/// Makes a call of libc's function without its cancellation point: the system call itself has none.
fn plainly<R>(call: impl FnOnce() -> R) -> R {
    cancel::uncancelled(call)
}

/// Makes a call whose time limit the kernel counts down, by libc's function (`call`), which does not. If the limit cannot be
/// read or is invalid, makes the system call (`refuse`), so that the kernel refuses it: libc's function would read the limit
/// itself.
///
/// # Safety
/// The limit is the application's.
unsafe fn counted_down(
    timeout: usize,
    refuse: impl FnOnce() -> c_long,
    call: impl FnOnce() -> c_int,
) -> c_long {
    let at = timeout as *mut libc::timespec;
    let Some(limit) = Given::Spec(at).read() else {
        return refuse();
    };
    let limit = limit.begun();
    let r = call();
    if (r >= 0 || sys::errno() == libc::EINTR)
        && let Some(left) = limit.left().filter(|_| !at.is_null())
    {
        // SAFETY: the caller's contract.
        unsafe { write_left(at, left) };
    }
    r.into()
}

/// `pselect6`: its last argument points to a set of signals and its size.
///
/// # Safety
/// As `pselect6(2)` requires.
unsafe fn pselect6(x: [usize; 6]) -> c_long {
    let mask = match x[5] {
        0 => Some([0, MASK]),
        // SAFETY: two integers of the application.
        at => unsafe { sys::copy_of(at as *const [usize; 2]) },
    };
    let Some([mask, _]) = mask.filter(|[mask, size]| *mask == 0 || *size == MASK) else {
        return real(libc::SYS_pselect6, x);
    };
    let [sets @ .., timeout, _] = x;
    let select = || {
        let [count, read, write, except] = sets;
        // SAFETY: the caller's contract.
        unsafe {
            readiness::slim_pselect(
                fd(count),
                read as _,
                write as _,
                except as _,
                timeout as _,
                mask as _,
            )
        }
    };
    let refuse = || real(libc::SYS_pselect6, x);
    // SAFETY: the caller's contract.
    plainly(|| unsafe { counted_down(timeout, refuse, select) })
}

/// The size of the kernel's signal set. libc's functions pass the pointer to such a set on unchanged.
const MASK: usize = 8;

fn fd(word: usize) -> c_int {
    word as c_int
}

on_descriptors! {
    SYS_accept(x) => plainly(|| sockets::slim_accept(fd(x[0]), x[1] as _, x[2] as _));
    SYS_accept4(x) => plainly(|| sockets::slim_accept4(fd(x[0]), x[1] as _, x[2] as _, fd(x[3])));
    SYS_bind(x) => sockets::slim_bind(fd(x[0]), x[1] as _, x[2] as _);
    SYS_clone(x) => clones(libc::SYS_clone, x, x[0] as u64);
    SYS_clone3(x) => clones(libc::SYS_clone3, x, process::clone3_flags(x[0] as _, x[1]));
    SYS_close(x) => plainly(|| descriptors::slim_close(fd(x[0])));
    SYS_close_range(x) => descriptors::slim_close_range(x[0] as c_uint, x[1] as c_uint, fd(x[2]));
    SYS_connect(x) => plainly(|| sockets::slim_connect(fd(x[0]), x[1] as _, x[2] as _));
    #[cfg(target_arch = "x86_64")]
    SYS_creat(x) => creates(libc::SYS_creat, x);
    SYS_dup(x) => descriptors::slim_dup(fd(x[0]));
    #[cfg(target_arch = "x86_64")]
    SYS_dup2(x) => descriptors::slim_dup2(fd(x[0]), fd(x[1]));
    SYS_dup3(x) => descriptors::slim_dup3(fd(x[0]), fd(x[1]), fd(x[2]));
    #[cfg(target_arch = "x86_64")]
    SYS_epoll_create(x) => numbers::slim_epoll_create(fd(x[0]));
    SYS_epoll_create1(x) => numbers::slim_epoll_create1(fd(x[0]));
    SYS_epoll_ctl(x) => readiness::slim_epoll_ctl(fd(x[0]), fd(x[1]), fd(x[2]), x[3] as _);
    SYS_epoll_pwait(x) => match x[5] {
        MASK => plainly(|| readiness::slim_epoll_pwait(fd(x[0]), x[1] as _, fd(x[2]), fd(x[3]), x[4] as _)) as c_long,
        _ => real(libc::SYS_epoll_pwait, x),
    };
    SYS_epoll_pwait2(x) => match x[5] {
        MASK => plainly(|| readiness::slim_epoll_pwait2(fd(x[0]), x[1] as _, fd(x[2]), x[3] as _, x[4] as _)) as c_long,
        _ => real(libc::SYS_epoll_pwait2, x),
    };
    #[cfg(target_arch = "x86_64")]
    SYS_epoll_wait(x) => plainly(|| readiness::slim_epoll_wait(fd(x[0]), x[1] as _, fd(x[2]), fd(x[3])));
    #[cfg(target_arch = "x86_64")]
    SYS_eventfd(x) => creates(libc::SYS_eventfd, x);
    SYS_eventfd2(x) => creates(libc::SYS_eventfd2, x);
    SYS_execve(x) => exec(&Program { named: Named::Path(x[0] as _), env: x[2] as _ }, || real(libc::SYS_execve, x));
    SYS_execveat(x) => exec(&Program { named: Named::At(fd(x[0]), x[1] as _, fd(x[4])), env: x[3] as _ }, || real(libc::SYS_execveat, x));
    SYS_fanotify_init(x) => creates(libc::SYS_fanotify_init, x);
    SYS_fcntl(x) => plainly(|| descriptors::slim_fcntl(fd(x[0]), fd(x[1]), x[2] as _));
    #[cfg(target_arch = "x86_64")]
    SYS_fork(x) => process::forking(|| real(libc::SYS_fork, x) as libc::pid_t);
    SYS_getpeername(x) => sockets::slim_getpeername(fd(x[0]), x[1] as _, x[2] as _);
    SYS_getsockname(x) => sockets::slim_getsockname(fd(x[0]), x[1] as _, x[2] as _);
    SYS_getsockopt(x) => sockets::slim_getsockopt(fd(x[0]), fd(x[1]), fd(x[2]), x[3] as _, x[4] as _);
    #[cfg(target_arch = "x86_64")]
    SYS_inotify_init(x) => creates(libc::SYS_inotify_init, x);
    SYS_inotify_init1(x) => creates(libc::SYS_inotify_init1, x);
    SYS_io_submit(x) => { data::submitted(x[1], x[2] as _); real(libc::SYS_io_submit, x) };
    SYS_io_uring_enter(x) => rings::enter(fd(x[1]), || real(libc::SYS_io_uring_enter, x));
    SYS_io_uring_register(x) => { crate::ops::rings::register(x[1] as c_uint, x[2], x[3]); real(libc::SYS_io_uring_register, x) };
    SYS_io_uring_setup(x) => { rings::set_up(); creates(libc::SYS_io_uring_setup, x) };
    SYS_ioctl(x) => sockets::slim_ioctl(fd(x[0]), x[1] as _, x[2] as _);
    SYS_listen(x) => sockets::slim_listen(fd(x[0]), fd(x[1]));
    SYS_memfd_create(x) => creates(libc::SYS_memfd_create, x);
    #[cfg(target_arch = "x86_64")]
    SYS_open(x) => creates(libc::SYS_open, x);
    SYS_openat(x) => creates(libc::SYS_openat, x);
    SYS_openat2(x) => creates(libc::SYS_openat2, x);
    #[cfg(target_arch = "x86_64")]
    SYS_pipe(x) => numbers::slim_pipe(x[0] as _);
    SYS_pipe2(x) => numbers::slim_pipe2(x[0] as _, fd(x[1]));
    #[cfg(target_arch = "x86_64")]
    SYS_poll(x) => plainly(|| readiness::slim_poll(x[0] as _, x[1] as _, fd(x[2])));
    SYS_ppoll(x) => match x[4] {
        MASK => plainly(|| counted_down(x[2], || real(libc::SYS_ppoll, x), || readiness::slim_ppoll(x[0] as _, x[1] as _, x[2] as _, x[3] as _))),
        _ => real(libc::SYS_ppoll, x),
    };
    SYS_prctl(x) => {
        if fd(x[0]) == libc::PR_SET_SECCOMP { process::before_filter(); }
        real(libc::SYS_prctl, x)
    };
    SYS_preadv2(x) => plainly(|| data::slim_preadv2(fd(x[0]), x[1] as _, fd(x[2]), x[3] as _, fd(x[5])));
    SYS_pwritev2(x) => plainly(|| data::slim_pwritev2(fd(x[0]), x[1] as _, fd(x[2]), x[3] as _, fd(x[5])));
    SYS_pselect6(x) => pselect6(x);
    SYS_pidfd_getfd(x) => creates(libc::SYS_pidfd_getfd, x);
    SYS_pidfd_open(x) => creates(libc::SYS_pidfd_open, x);
    SYS_read(x) => plainly(|| data::slim_read(fd(x[0]), x[1] as _, x[2]));
    SYS_readv(x) => plainly(|| data::slim_readv(fd(x[0]), x[1] as _, fd(x[2])));
    SYS_recvfrom(x) => plainly(|| data::slim_recvfrom(fd(x[0]), x[1] as _, x[2], fd(x[3]), x[4] as _, x[5] as _));
    SYS_recvmmsg(x) => plainly(|| data::slim_recvmmsg(fd(x[0]), x[1] as _, x[2] as _, fd(x[3]), x[4] as _));
    SYS_recvmsg(x) => plainly(|| data::slim_recvmsg(fd(x[0]), x[1] as _, fd(x[2])));
    SYS_seccomp(x) => {
        let sets = [libc::SECCOMP_SET_MODE_STRICT, libc::SECCOMP_SET_MODE_FILTER];
        if sets.contains(&(x[0] as c_uint)) { process::before_filter(); }
        real(libc::SYS_seccomp, x)
    };
    #[cfg(target_arch = "x86_64")]
    SYS_select(x) => match Given::Val(x[4] as _).read() {
        Some(_) => plainly(|| readiness::slim_select(fd(x[0]), x[1] as _, x[2] as _, x[3] as _, x[4] as _)) as c_long,
        None => real(libc::SYS_select, x),
    };
    SYS_sendfile(x) => plainly(|| data::slim_sendfile(fd(x[0]), fd(x[1]), x[2] as _, x[3]));
    SYS_sendmmsg(x) => plainly(|| data::slim_sendmmsg(fd(x[0]), x[1] as _, x[2] as _, fd(x[3])));
    SYS_sendmsg(x) => plainly(|| data::slim_sendmsg(fd(x[0]), x[1] as _, fd(x[2])));
    SYS_sendto(x) => plainly(|| data::slim_sendto(fd(x[0]), x[1] as _, x[2], fd(x[3]), x[4] as _, x[5] as _));
    SYS_setsockopt(x) => sockets::slim_setsockopt(fd(x[0]), fd(x[1]), fd(x[2]), x[3] as _, x[4] as _);
    SYS_setns(x) => process::set_namespace(fd(x[0]), fd(x[1]), || real(libc::SYS_setns, x) as c_int);
    SYS_shutdown(x) => sockets::slim_shutdown(fd(x[0]), fd(x[1]));
    #[cfg(target_arch = "x86_64")]
    SYS_signalfd(x) => creates(libc::SYS_signalfd, x);
    SYS_signalfd4(x) => creates(libc::SYS_signalfd4, x);
    SYS_socket(x) => numbers::slim_socket(fd(x[0]), fd(x[1]), fd(x[2]));
    SYS_socketpair(x) => numbers::slim_socketpair(fd(x[0]), fd(x[1]), fd(x[2]), x[3] as _);
    SYS_splice(x) => plainly(|| data::slim_splice(fd(x[0]), x[1] as _, fd(x[2]), x[3] as _, x[4], x[5] as _));
    SYS_timerfd_create(x) => creates(libc::SYS_timerfd_create, x);
    SYS_unshare(x) => process::unshare(fd(x[0]), || real(libc::SYS_unshare, x) as c_int);
    SYS_userfaultfd(x) => creates(libc::SYS_userfaultfd, x);
    SYS_write(x) => plainly(|| data::slim_write(fd(x[0]), x[1] as _, x[2]));
    SYS_writev(x) => plainly(|| data::slim_writev(fd(x[0]), x[1] as _, fd(x[2])));
}

// Variadic in C: the arguments are where a function of seven arguments has them. Arguments that a caller does not give are
// ignored.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn syscall() {
    std::arch::naked_asm!(
        "cmp rdi, {numbers}",
        "jae 2f",
        "lea rax, [rip + {ours}]",
        "cmp byte ptr [rax + rdi], 0",
        "jne {dispatch}",
        "2:",
        "jmp qword ptr [rip + {real}]",
        numbers = const NUMBERS,
        ours = sym OURS,
        dispatch = sym dispatch,
        real = sym REAL,
    )
}

#[cfg(target_arch = "aarch64")]
#[unsafe(no_mangle)]
unsafe extern "C" fn syscall(
    nr: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    let ours = usize::try_from(nr).is_ok_and(|nr| OURS.get(nr) == Some(&true));
    match ours {
        // SAFETY: the caller's contract.
        true => unsafe { dispatch(nr, a, b, c, d, e, f) },
        false => real(nr, [a, b, c, d, e, f]),
    }
}
