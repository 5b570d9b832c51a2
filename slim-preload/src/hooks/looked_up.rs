//! libc's own functions, looked up when the library is loaded.
//!
//! `dlsym` takes locks and may allocate, and a nested `Once` waits for itself: either would be a deadlock in a signal handler that
//! has interrupted the first use of the same function. A hook that runs before our constructor looks its function up itself.

use crate::sys::keep_errno;
use libc::c_void;
use std::ffi::CStr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// A function to be looked up. Some versions of libc do not have it.
pub struct LookedUp {
    /// Its name.
    pub name: &'static CStr,
    /// Looks it up and keeps the result; called only if libc has the function.
    pub up: fn(),
}

/// Adds one row to the list of functions, from any module.
macro_rules! look {
    ($name:expr, $up:expr) => {
        const _: () = {
            #[used]
            #[unsafe(link_section = "slim_look")]
            static ROW: $crate::hooks::looked_up::LookedUp = $crate::hooks::looked_up::LookedUp {
                name: $name,
                up: $up,
            };
        };
    };
}
pub(super) use look;

/// redhook's macro, plus a row in the list.
///
/// # Safety
/// Every hook relies on this, and on nothing else: it is called like libc's function of its name. So its arguments are valid for
/// that function, and for the functions that replace it. If a body does more than pass the arguments on, it says why.
macro_rules! hook {
    (unsafe fn $name:ident ( $($arg:ident : $kind:ty),* ) $(-> $result:ty)? => $hook:ident $body:block) => {
        redhook::hook! { unsafe fn $name ( $($arg : $kind),* ) $(-> $result)? => $hook {
            // SAFETY: the contract of the macro.
            unsafe { $body }
        }}
        $crate::hooks::looked_up::look! {
            match std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("names of functions have no zeros"),
            },
            || {
                let _ = redhook::real!($name);
            }
        }
    };
}
pub(super) use hook;

/// A libc function that redhook cannot hook; null if libc does not have it.
pub struct Real {
    at: AtomicPtr<c_void>,
    name: &'static CStr,
}

impl Real {
    /// Not looked up yet.
    pub const fn new(name: &'static CStr) -> Self {
        Self {
            at: AtomicPtr::new(std::ptr::null_mut()),
            name,
        }
    }

    /// Its address.
    #[inline]
    pub fn get(&self) -> *mut c_void {
        let known = self.at.load(Ordering::Relaxed);
        if known.is_null() { self.find() } else { known }
    }

    #[cold]
    fn find(&self) -> *mut c_void {
        let found = find(self.name);
        self.at.store(found, Ordering::Relaxed);
        found
    }
}

/// The [`Real`] of a name.
macro_rules! real_of {
    ($name:literal) => {{
        static REAL: $crate::hooks::looked_up::Real = $crate::hooks::looked_up::Real::new($name);
        $crate::hooks::looked_up::look!($name, || {
            let _ = REAL.get();
        });
        REAL.get()
    }};
}
pub(super) use real_of;

fn find(name: &CStr) -> *mut c_void {
    // SAFETY: a valid name.
    keep_errno(|| unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) })
}

// At least one row, so that the linker defines the start and the end of the list.
look!(c"", || ());

// The linker's symbols for the list, which the library would export otherwise.
std::arch::global_asm!(".hidden __start_slim_look", ".hidden __stop_slim_look");

unsafe extern "C" {
    #[link_name = "__start_slim_look"]
    static FIRST: u8;
    #[link_name = "__stop_slim_look"]
    static END: u8;
}

/// Looks up all functions of the list.
pub fn all() {
    // SAFETY: the linker puts the rows of all modules into one section, one after the other, and defines where it begins
    // and ends.
    let rows = unsafe {
        let (first, end) = (&raw const FIRST, &raw const END);
        let (first, end) = (first.cast::<LookedUp>(), end.cast::<LookedUp>());
        std::slice::from_raw_parts(first, end.offset_from(first) as usize)
    };
    let mut missing = false;
    for row in rows {
        match find(row.name).is_null() {
            true => missing = true,
            false => (row.up)(),
        }
    }
    if missing {
        // Clears `dlsym`'s error message, so that the program does not read it.
        // SAFETY: no argument is passed; the text is not accessed.
        unsafe { libc::dlerror() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_that_libc_does_not_have_is_null() {
        assert!(Real::new(c"slim_has_no_such_function").get().is_null());
        assert!(!Real::new(c"read").get().is_null());
    }
}
