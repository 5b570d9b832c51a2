//! libc's own functions are looked up when the library is loaded.
//!
//! `dlsym` takes locks and may allocate, and `Once` waits for itself: in a signal's handler that has interrupted the first
//! use of the same function, either would be a deadlock. Hooks that run before our constructor look up for themselves.

use crate::sys::keep_errno;
use libc::c_void;
use std::ffi::CStr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// A function to be looked up, of which libc has more or fewer from version to version.
pub struct LookedUp {
    /// Its name.
    pub name: &'static CStr,
    /// Looks it up for good; called only if there is one.
    pub up: fn(),
}

/// One row of the list, from wherever it is.
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

/// redhook's macro, with a row.
///
/// # Safety
/// What every hook relies on, and nothing else: it is called as libc's function of its name, so its arguments are what that
/// function, and those that stand in for it, may be called with. A body does more than pass them on only where it says why.
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

/// A function of libc's that redhook cannot take the place of: null if libc has none.
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

    /// Where it is.
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

// There is at least one row, so that the linker knows where the list is.
look!(c"", || ());

// The linker's names for it, which the library would export otherwise.
std::arch::global_asm!(".hidden __start_slim_look", ".hidden __stop_slim_look");

unsafe extern "C" {
    #[link_name = "__start_slim_look"]
    static FIRST: u8;
    #[link_name = "__stop_slim_look"]
    static END: u8;
}

/// Looks all of them up.
pub fn all() {
    // SAFETY: the linker puts the rows of all modules into one section, one behind the other, and says where it begins
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
        // What `dlsym` has to say of that is not the program's to read.
        // SAFETY: nothing is passed; the text is not looked at.
        unsafe { libc::dlerror() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_libc_does_not_have_is_null() {
        assert!(Real::new(c"slim_has_no_such_function").get().is_null());
        assert!(!Real::new(c"read").get().is_null());
    }
}
