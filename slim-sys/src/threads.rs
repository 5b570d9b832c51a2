//! Stacks, scheduling and signals of threads.

use crate::pid;
use libc::c_int;
use std::mem::{self, MaybeUninit};

/// The size of a stack with `room` bytes for us. The C library places the program's thread-local storage, which may be
/// megabytes, on the stack of each thread.
pub fn stack_size(room: usize) -> usize {
    /// Used if the C library does not report its need. It costs address space, not memory.
    const PLENTY: usize = 4 << 20;
    // SAFETY: a C string.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__pthread_get_minstack".as_ptr()) };
    if found.is_null() {
        return room + PLENTY;
    }
    // SAFETY: the function of that name has this type wherever it exists (glibc).
    let least: extern "C" fn(*const libc::pthread_attr_t) -> libc::size_t =
        unsafe { mem::transmute(found) };
    // SAFETY: all bytes zero are a valid value; the function does not read it.
    let attr: libc::pthread_attr_t = unsafe { mem::zeroed() };
    room + least(&attr)
}

/// The scheduling policy of the calling thread.
fn policy() -> c_int {
    // SAFETY: no memory is passed.
    let policy = unsafe { call!(libc::SYS_sched_getscheduler, 0) }.unwrap_or(0);
    policy as c_int & !libc::SCHED_RESET_ON_FORK
}

/// Whether the calling thread has a real-time policy.
pub fn is_real_time() -> bool {
    [libc::SCHED_FIFO, libc::SCHED_RR].contains(&policy())
}

/// If the calling thread has a real-time policy: raises its priority by one, or gives it the normal policy if that is refused.
pub fn leave_real_time() {
    if !is_real_time() {
        return;
    }
    // The C library's functions apply to the whole process or to the calling thread, depending on the library. The system
    // calls apply to the thread. Their structure is one integer (sched(7), `struct sched_param`).
    let mut priority: c_int = 0;
    // SAFETY: the kernel writes the integer.
    let _ = unsafe { call!(libc::SYS_sched_getparam, 0, &raw mut priority) };
    let set = |policy, priority: c_int| {
        // SAFETY: the kernel reads the integer.
        unsafe { call!(libc::SYS_sched_setscheduler, 0, policy, &raw const priority) }
    };
    if set(libc::SCHED_FIFO, (priority + 1).min(99)).is_err() {
        let _ = set(libc::SCHED_OTHER, 0);
    }
}

/// Lowers the nice value of the calling thread by this much, if it has the normal policy. Threads that it starts get the value 0.
///
/// # Errors
/// The kernel's error: the process may not.
pub fn lower_nice(by: i32) -> Result<(), c_int> {
    if policy() != libc::SCHED_OTHER {
        return Ok(());
    }
    // SAFETY: no memory is passed. The call returns 20 minus the nice value, so that it is positive.
    let now = 20 - unsafe { call!(libc::SYS_getpriority, libc::PRIO_PROCESS, 0) }? as i32;
    schedule(libc::SCHED_OTHER, (now - by).max(-20), 0)
}

/// Gives the calling thread the real-time policy SCHED_FIFO with the lowest priority. Threads that it starts get the normal policy.
///
/// # Errors
/// The kernel's error: the process may not.
pub fn be_real_time() -> Result<(), c_int> {
    schedule(libc::SCHED_FIFO, 0, 1)
}

fn schedule(policy: c_int, nice: i32, priority: u32) -> Result<(), c_int> {
    /// `struct sched_attr` in its first size (sched_setattr(2)).
    #[repr(C)]
    struct Attributes {
        size: u32,
        policy: u32,
        flags: u64,
        nice: i32,
        priority: u32,
        of_deadline_policy: [u64; 3],
    }
    let wanted = Attributes {
        size: size_of::<Attributes>() as u32,
        policy: policy as u32,
        flags: libc::SCHED_FLAG_RESET_ON_FORK as u64,
        nice,
        priority,
        of_deadline_policy: [0; 3],
    };
    // SAFETY: the kernel reads `size` bytes of the structure.
    unsafe { call!(libc::SYS_sched_setattr, 0, &raw const wanted, 0) }.map(drop)
}

/// Lets the calling thread run on the processors of the process's first thread, besides its own.
pub fn use_all_processors() {
    /// For 8192 processors, more than any kernel is built for.
    const WORDS: usize = 8192 / 64;
    type Set = [u64; WORDS];
    let size = size_of::<Set>();
    let allowed = |thread: c_int| -> Option<(Set, usize)> {
        let mut set: Set = [0; WORDS];
        // SAFETY: the kernel writes at most `size` bytes to the set, and returns their number.
        let got = unsafe { call!(libc::SYS_sched_getaffinity, thread, size, set.as_mut_ptr()) };
        Some((set, got.ok()? as usize))
    };
    let (Some((own, got)), Some((first, _))) = (allowed(0), allowed(pid())) else {
        return;
    };
    let both: Set = std::array::from_fn(|i| own.get(i).unwrap_or(&0) | first.get(i).unwrap_or(&0));
    if both != own {
        // SAFETY: the kernel reads `got` bytes of the set, which has as many.
        let _ = unsafe { call!(libc::SYS_sched_setaffinity, 0, got, both.as_ptr()) };
    }
}

/// Number of threads of this process. The first thread counts until the process ends, even if it has ended itself.
pub fn threads() -> usize {
    let links = rustix::fs::stat(c"/proc/self/task").map(|task| task.st_nlink);
    // Two links are the directory's own "." and its entry in the parent.
    let links = links.ok().and_then(|links| usize::try_from(links).ok());
    links.map_or(usize::MAX, |links| links.saturating_sub(2))
}

/// Whether the process's first thread has ended while others still run.
pub fn first_has_ended() -> bool {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{}/stat", std::process::id()));
    // The state follows the name, which is in parentheses and may contain any character.
    stat.is_ok_and(|s| {
        s.rsplit(')')
            .next()
            .is_some_and(|rest| rest.starts_with(" Z"))
    })
}

/// The signals that a thread has blocked, as the kernel writes them.
#[derive(Clone, Copy)]
pub struct SignalMask(u64);

impl SignalMask {
    /// Those of the calling thread.
    pub fn of_this_thread() -> Self {
        let mut mask = 0;
        Self::change(std::ptr::null(), &raw mut mask);
        Self(mask)
    }

    fn change(new: *const u64, old: *mut u64) {
        // SAFETY: each is null or valid; the kernel's set has as many bytes.
        let _ = unsafe {
            call!(
                libc::SYS_rt_sigprocmask,
                libc::SIG_SETMASK,
                new,
                old,
                size_of::<u64>()
            )
        };
    }
}

/// Runs `f`. A SIGPIPE that the calling thread gets meanwhile has no effect.
pub fn without_sigpipe<R>(f: impl FnOnce() -> R) -> R {
    let pipe = 1u64 << (libc::SIGPIPE - 1);
    let SignalMask(before) = SignalMask::of_this_thread();
    SignalMask::change(&(before | pipe), std::ptr::null_mut());
    let mut pending = 0u64;
    // SAFETY: the kernel writes a mask of 8 bytes.
    let _ = unsafe { call!(libc::SYS_rt_sigpending, &raw mut pending, size_of::<u64>()) };
    let r = f();
    if (before | pending) & pipe == 0 {
        let at_once = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let nothing = std::ptr::null::<libc::siginfo_t>();
        // SAFETY: the kernel reads a mask of 8 bytes and the time, and writes nothing.
        let _ = unsafe {
            call!(
                libc::SYS_rt_sigtimedwait,
                &raw const pipe,
                nothing,
                &raw const at_once,
                size_of::<u64>()
            )
        };
    }
    SignalMask::change(&before, std::ptr::null_mut());
    r
}

/// Calls `exit(0)` in a new thread with this signal mask, as the C library does in the last thread of a process. Returns whether there
/// is such a thread.
pub fn exit_in_new_thread(mask: SignalMask) -> bool {
    extern "C" fn exit(mask: *mut libc::c_void) -> *mut libc::c_void {
        SignalMask::change(&(mask.addr() as u64), std::ptr::null_mut());
        // SAFETY: the handlers that it runs may run in any thread.
        unsafe { libc::exit(0) }
    }
    let mut thread = MaybeUninit::uninit();
    let mask = std::ptr::without_provenance_mut(mask.0 as usize);
    // SAFETY: valid for a write; without attributes it is a thread like the program's.
    unsafe { libc::pthread_create(thread.as_mut_ptr(), std::ptr::null(), exit, mask) == 0 }
}

/// Blocks every signal in the calling thread for the lifetime of the guard. A thread started
/// meanwhile inherits the mask.
pub struct SignalsBlocked(libc::sigset_t);

impl SignalsBlocked {
    /// Blocks the signals until the guard is dropped, which must happen in the same thread.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        // Miri has no signals, and the set is not used there.
        if cfg!(miri) {
            // SAFETY: a set is plain numbers.
            return SignalsBlocked(unsafe { mem::zeroed() });
        }
        let mut all = MaybeUninit::<libc::sigset_t>::uninit();
        let mut old = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: both sets are valid for writes; `sigfillset` and `sigemptyset` initialise them
        // whatever `pthread_sigmask` does.
        unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::sigemptyset(old.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), old.as_mut_ptr());
            SignalsBlocked(old.assume_init())
        }
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        if cfg!(miri) {
            return;
        }
        // SAFETY: the set was filled in by `pthread_sigmask`.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, std::ptr::null_mut()) };
    }
}
