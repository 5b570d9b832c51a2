//! Keeps threads of the application from being cancelled inside our code.
//!
//! `pthread_cancel` ends a thread at its next cancellation point (pthreads(7)). Nearly every libc call that can wait is one.
//! A thread that ended inside our code would never release what it holds. So our own code runs with cancellation off, and a
//! call of the application that holds something during a system call passes an explicit cancellation point first ([`point`]).

use libc::c_int;

const DISABLE: c_int = 1;

unsafe extern "C" {
    // The libc crate does not declare these functions for Linux.
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
    fn pthread_testcancel();
}

/// Runs `f` with cancellation off. A pending cancellation takes effect at the next cancellation point after `f`.
pub fn uncancelled<R>(f: impl FnOnce() -> R) -> R {
    struct Restore(c_int);
    impl Drop for Restore {
        fn drop(&mut self) {
            // SAFETY: `self.0` is the state that the first call returned; the old state may be null, which means not wanted.
            unsafe { pthread_setcancelstate(self.0, std::ptr::null_mut()) };
        }
    }
    let mut old = 0;
    // SAFETY: `old` is valid for a write.
    unsafe { pthread_setcancelstate(DISABLE, &raw mut old) };
    let _restore = Restore(old);
    f()
}

/// A cancellation point. In a thread with a pending cancellation it does not return, and no destructor of its callers runs.
#[cold]
#[inline(never)]
pub fn point() {
    // SAFETY: no arguments. libc unwinds from here as it does from any of its calls that wait: it runs no destructor of ours
    // and does not return.
    unsafe { pthread_testcancel() }
}
