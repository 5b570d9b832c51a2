//! Several copies of this crate in one process.
//!
//! A program that links SLIM has a copy of its own, also under the preload library. Only the preload library's copy sees the calls of
//! the process. So it keeps the registry of all descriptors of SLIM, and knows for each thread whether SLIM's own code runs. The other
//! copies [`join`] it: they register their descriptors there, and tell it when their code runs. Their sockets are then none that the
//! preload library manages, and the program cannot close them by a range.
//!
//! The copies may come from different builds. So they share C functions only, and no Rust type. The name of [`SYMBOL`] ends in the
//! version of [`OfferedCalls`].

use std::any::Any;
use std::ffi::CStr;
use std::mem;
use std::panic::{self, AssertUnwindSafe};
use std::ptr::{self, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::{c_int, c_void};

/// The name under which the preload library exports [`crate::offered`].
pub const SYMBOL: &CStr = c"slim_offered_1";

/// A closure as C sees it, with its argument.
pub(crate) type Work = extern "C" fn(*mut c_void);

/// How [`OfferedCalls::run`] runs a closure.
#[derive(Clone, Copy)]
pub(crate) enum How {
    /// As [`crate::as_agent`].
    AsAgent = 0,
    /// As [`crate::numbers::whole`].
    Whole = 1,
    /// As [`crate::numbers::apart`].
    Apart = 2,
}

/// What one copy offers to the others.
#[repr(C)]
pub struct OfferedCalls {
    /// Size of this structure in bytes.
    pub(crate) size: usize,
    /// Runs the closure in one of the ways of [`How`].
    pub(crate) run: extern "C" fn(u32, Work, *mut c_void),
    /// Registers a descriptor as SLIM's, or removes it from the registry.
    pub(crate) register: extern "C" fn(c_int, bool),
    pub(crate) is_registered: extern "C" fn(c_int) -> bool,
    /// An agent begins, or has ended.
    pub(crate) agent: extern "C" fn(bool),
}

/// What this copy has joined; null in the copy that offers it, and in a process without the preload library.
static JOINED: AtomicPtr<OfferedCalls> = AtomicPtr::new(null_mut());

#[inline]
pub(crate) fn joined() -> Option<&'static OfferedCalls> {
    // SAFETY: null, or set by `join` to a structure that is never freed.
    unsafe { JOINED.load(Ordering::Acquire).as_ref() }
}

/// Joins the preload library's copy, if the process has it. To be called before this copy has made a descriptor. Further calls do
/// nothing.
pub fn join() {
    if joined().is_some() {
        return;
    }
    // SAFETY: the preload library exports this structure's function under this name.
    if let Some(offered) = unsafe { look_up::<OfferedCalls>(SYMBOL) } {
        JOINED.store(ptr::from_ref(offered).cast_mut(), Ordering::Release);
    }
}

/// What the preload library's copy offers under this name; `None` if the process does not have it, or its structure is an older one.
///
/// # Safety
/// Whatever exports the name exports a function `extern "C" fn() -> *const T`. `T` is `repr(C)`, and begins with its size in bytes, as a
/// `usize`, in all versions.
pub unsafe fn look_up<T>(symbol: &CStr) -> Option<&'static T> {
    // The interpreter has no other copies.
    if cfg!(miri) {
        return None;
    }
    // SAFETY: a C string.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, symbol.as_ptr()) };
    if found.is_null() {
        return None;
    }
    // SAFETY: promised by the caller.
    let offered: extern "C" fn() -> *const T = unsafe { mem::transmute(found) };
    let offered = offered();
    // SAFETY: null, or a structure that lives as long as the process: a preload library is never unloaded. All versions begin with the
    // size.
    let size = unsafe { offered.cast::<usize>().as_ref() };
    let fits = size.is_some_and(|size| *size >= size_of::<T>());
    // SAFETY: as above; it has all fields.
    fits.then(|| unsafe { &*offered })
}

/// Whether this copy has joined the preload library's.
pub fn is_joined() -> bool {
    joined().is_some()
}

impl OfferedCalls {
    /// Runs `f` as the other copy's code, too.
    pub(crate) fn run<F: FnOnce() -> R, R>(&self, how: How, f: F) -> R {
        let mut call = OfferedCall {
            f: Some(f),
            result: None,
        };
        (self.run)(how as u32, work::<F, R>, (&raw mut call).cast());
        match call.result {
            Some(Ok(result)) => result,
            Some(Err(panic)) => panic::resume_unwind(panic),
            None => unreachable!("the other copy runs the closure"),
        }
    }

    pub(crate) fn register(&self, fd: c_int, on: bool) {
        (self.register)(fd, on);
    }

    pub(crate) fn is_registered(&self, fd: c_int) -> bool {
        (self.is_registered)(fd)
    }

    pub(crate) fn agent(&self, begins: bool) {
        (self.agent)(begins);
    }
}

/// A closure, and its result.
struct OfferedCall<F, R> {
    f: Option<F>,
    result: Option<Result<R, Box<dyn Any + Send>>>,
}

extern "C" fn work<F: FnOnce() -> R, R>(call: *mut c_void) {
    // SAFETY: `run` passes its own call, and uses it again only after this function has returned.
    let call = unsafe { &mut *call.cast::<OfferedCall<F, R>>() };
    if let Some(f) = call.f.take() {
        // A panic must not unwind into the other copy.
        call.result = Some(panic::catch_unwind(AssertUnwindSafe(f)));
    }
}
