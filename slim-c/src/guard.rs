//! The way into the library: arguments are checked, and a panic becomes an error code.
//!
//! ```text
//!   C ──► entry / on ──► catch_unwind ──► the Rust API
//!                             │ panic
//!                             ▼
//!              the session is broken, SLIM_ERR_INTERNAL
//! ```
//!
//! A panic hook of this crate keeps the message of such a panic instead of printing it. The agent thread has a hook of its own, which comes
//! first (`slim_agent::failure::panic`).

use std::cell::{Cell, RefCell};
use std::ffi::{CString, c_char, c_int};
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::codes::Refusal;

thread_local! {
    /// Number of entries of this thread into the library: a callback may enter it again.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    /// Number of callbacks that this thread is in.
    static CALLBACKS: Cell<u32> = const { Cell::new(0) };
    static DETAIL: RefCell<Option<CString>> = const { RefCell::new(None) };
}

/// A session is broken after a panic in one of its calls.
#[derive(Default)]
pub(crate) struct Health(AtomicBool);

impl Health {
    pub(crate) fn is_broken(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// An object behind a pointer that the program holds.
pub(crate) trait ApiHandle {
    /// The health of the handle's session.
    fn health(&self) -> &Health;
}

/// Counts up on creation, and down when dropped.
struct Nested(&'static std::thread::LocalKey<Cell<u32>>);

impl Nested {
    fn new(count: &'static std::thread::LocalKey<Cell<u32>>) -> Self {
        count.set(count.get() + 1);
        Self(count)
    }
}

impl Drop for Nested {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// Runs a callback of the program.
pub(crate) fn in_callback(f: impl FnOnce()) {
    let _nested = Nested::new(&CALLBACKS);
    f();
}

/// Whether the calling thread is in a callback.
pub(crate) fn is_in_callback() -> bool {
    CALLBACKS.get() > 0
}

/// Has panics in the library's calls recorded, not printed.
pub(crate) fn install_hook() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let others = panic::take_hook();
        panic::set_hook(Box::new(move |info| match DEPTH.try_with(Cell::get) {
            Ok(1..) => detail(info.to_string().replace('\n', " ")),
            _ => others(info),
        }));
    });
}

fn detail(text: String) {
    let text = CString::new(text.replace('\0', " ")).ok();
    // Fails only while the thread ends, or inside of this function.
    let _ = DETAIL.try_with(|detail| {
        if let Ok(mut detail) = detail.try_borrow_mut() {
            *detail = text;
        }
    });
}

/// Runs one call into the library. `name` is the name of the C function.
pub(crate) fn entry(name: &str, f: impl FnOnce() -> Result<isize, Refusal>) -> isize {
    let _nested = Nested::new(&DEPTH);
    let run = || {
        forced_panic(name);
        f()
    };
    let result = panic::catch_unwind(AssertUnwindSafe(run));
    match result {
        Ok(Ok(value)) => value,
        Ok(Err(refusal)) => refused(refusal),
        Err(payload) => {
            // Dropping the payload could panic again.
            std::mem::forget(payload);
            // The hook has recorded the details.
            set_errno(Refusal::INTERNAL.errno);
            Refusal::INTERNAL.code as isize
        }
    }
}

fn refused(refusal: Refusal) -> isize {
    if let Some(text) = refusal.detail {
        detail(text);
    }
    set_errno(refusal.errno);
    refusal.code as isize
}

/// Runs one call on a handle. A panic breaks the handle's session.
///
/// # Safety
/// `handle` is NULL, or a handle of this type that is not closed before this call returns.
pub(crate) unsafe fn on<H: ApiHandle>(
    name: &str,
    handle: *const H,
    f: impl FnOnce(&H) -> Result<isize, Refusal>,
) -> isize {
    // SAFETY: promised by the caller.
    let Some(handle) = (unsafe { handle.as_ref() }) else {
        return refused(Refusal::INVALID);
    };
    if handle.health().is_broken() {
        return refused(Refusal::INTERNAL);
    }
    let value = entry(name, || f(handle));
    if value == Refusal::INTERNAL.code as isize {
        handle.health().0.store(true, Ordering::Release);
    }
    value
}

#[cfg(feature = "forced-panic")]
fn forced_panic(name: &str) {
    let forced = std::env::var_os("SLIM_FORCED_PANIC");
    assert!(
        forced.is_none_or(|forced| forced != name),
        "forced in {name}"
    );
}

#[cfg(not(feature = "forced-panic"))]
fn forced_panic(_: &str) {}

fn set_errno(errno: c_int) {
    // SAFETY: the pointer is to the calling thread's own errno, which lives as long as the thread.
    unsafe { *libc::__errno_location() = errno };
}

/// A time limit in milliseconds as the Rust API has it. Negative: none.
pub(crate) fn limit(timeout_ms: c_int) -> Option<Duration> {
    u64::try_from(timeout_ms).ok().map(Duration::from_millis)
}

/// Returns details of the last failure in this thread that had any: the setting that cannot be used, the system call that was refused, or
/// the library's own mistake. An empty string if there was none. Never NULL. The text is valid until the next call of the library in this
/// thread.
#[unsafe(no_mangle)]
pub extern "C" fn slim_error_detail() -> *const c_char {
    let kept = DETAIL.try_with(|detail| {
        let detail = detail.try_borrow().ok()?;
        detail.as_deref().map(|text| text.as_ptr())
    });
    kept.ok().flatten().unwrap_or(c"".as_ptr())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codes::{SLIM_ERR_INTERNAL, SLIM_ERR_INVALID};

    struct Thing(Health);

    impl ApiHandle for Thing {
        fn health(&self) -> &Health {
            &self.0
        }
    }

    #[test]
    fn a_panic_is_an_error_and_breaks_the_session() {
        install_hook();
        let thing = Thing(Health::default());
        let call = |f: fn() -> Result<isize, Refusal>| {
            // SAFETY: `thing` outlives the call.
            unsafe { on("test", &thing, |_| f()) }
        };
        assert_eq!(call(|| Ok(5)), 5);
        assert_eq!(call(|| panic!("by\nintent")), SLIM_ERR_INTERNAL as isize);
        // SAFETY: valid until the next call.
        let text = unsafe { std::ffi::CStr::from_ptr(slim_error_detail()) };
        assert!(text.to_str().unwrap().contains("by intent"), "{text:?}");
        assert_eq!(call(|| Ok(5)), SLIM_ERR_INTERNAL as isize);
        assert_eq!(DEPTH.get(), 0);
    }

    #[test]
    fn a_null_handle_is_an_error() {
        // SAFETY: NULL is allowed.
        let value = unsafe { on("test", std::ptr::null::<Thing>(), |_| Ok(0)) };
        assert_eq!(value, SLIM_ERR_INVALID as isize);
    }
}
