//! Keeping threads of the application from ending inside our code.
//!
//! `pthread_cancel` ends a thread inside the first cancellation point that it comes to (pthreads(7)), and libc makes
//! one of nearly every call that could wait. A thread that ended inside ours would leave behind whatever it holds. So
//! our own code runs with cancellation off, and a call of the application that holds something while it asks the
//! kernel is a cancellation point before that ([`point`]).

use libc::c_int;

const DISABLE: c_int = 1;

unsafe extern "C" {
    // libc has them, the crate of this name not for Linux.
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
    fn pthread_testcancel();
}

/// Runs `f` to its end: a thread that is to be cancelled is so at its next cancellation point after it.
pub fn uncancelled<R>(f: impl FnOnce() -> R) -> R {
    struct Restore(c_int);
    impl Drop for Restore {
        fn drop(&mut self) {
            // SAFETY: the state that the other call found; the old one is not asked for.
            unsafe { pthread_setcancelstate(self.0, std::ptr::null_mut()) };
        }
    }
    let mut old = 0;
    // SAFETY: `old` is valid for a write.
    unsafe { pthread_setcancelstate(DISABLE, &raw mut old) };
    let _restore = Restore(old);
    f()
}

/// A cancellation point: does not return in a thread that is to be cancelled, nor are its callers' destructors run.
#[cold]
#[inline(never)]
pub fn point() {
    // SAFETY: no arguments. What unwinds from here is libc's own, as from any call of libc's that waits: it runs no
    // destructor of ours and does not come back.
    unsafe { pthread_testcancel() }
}
