//! System calls without libc: our calls must not enter our own hook of `syscall`, nor change `errno`.

use crate::Errno;
use libc::{c_int, c_long};

/// A type that can be an argument of a system call.
pub trait Word {
    /// The value of the register.
    fn word(self) -> usize;
}

macro_rules! words {
    ($($kind:ty: |$value:ident| $word:expr;)*) => {$(
        impl Word for $kind {
            #[inline(always)]
            fn word(self) -> usize {
                let $value = self;
                $word
            }
        }
    )*};
}

words! {
    usize: |w| w;
    // libc::c_ulong and libc::c_long.
    u64: |w| w as usize;
    i64: |w| w as usize;
    u32: |w| w as usize;
    // The kernel uses the lower half only.
    c_int: |w| w as u32 as usize;
}

impl<T> Word for *const T {
    #[inline(always)]
    fn word(self) -> usize {
        self as usize
    }
}

impl<T> Word for *mut T {
    #[inline(always)]
    fn word(self) -> usize {
        self as usize
    }
}

/// Pads the arguments of a call to six. The kernel ignores those that the call does not have.
#[inline(always)]
pub fn padded<const N: usize>(args: [usize; N]) -> [usize; 6] {
    std::array::from_fn(|i| args.get(i).copied().unwrap_or(0))
}

/// Converts the kernel's return value; errors are negative errno values.
#[inline(always)]
pub fn result(answer: isize) -> Result<c_long, Errno> {
    // No valid address lies in the last page, so these values are always errors.
    match answer {
        -4095..=-1 => Err(-answer as Errno),
        n => Ok(n as c_long),
    }
}

/// Makes a system call and returns the kernel's raw value.
///
/// # Safety
/// The arguments are valid for this system call.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub unsafe fn syscall(nr: c_long, args: [usize; 6]) -> isize {
    let r;
    // SAFETY: the kernel preserves all registers but rax, rcx and r11; the caller guarantees valid arguments.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") nr as isize => r,
            in("rdi") args[0],
            in("rsi") args[1],
            in("rdx") args[2],
            in("r10") args[3],
            in("r8") args[4],
            in("r9") args[5],
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    r
}

/// Makes a system call and returns the kernel's raw value.
///
/// # Safety
/// The arguments are valid for this system call.
#[cfg(target_arch = "aarch64")]
#[inline(always)]
pub unsafe fn syscall(nr: c_long, args: [usize; 6]) -> isize {
    let r;
    // SAFETY: the kernel preserves all registers but x0; the caller guarantees valid arguments.
    unsafe {
        std::arch::asm!(
            "svc 0",
            in("x8") nr,
            inlateout("x0") args[0] => r,
            in("x1") args[1],
            in("x2") args[2],
            in("x3") args[3],
            in("x4") args[4],
            in("x5") args[5],
            options(nostack),
        );
    }
    r
}

/// Makes a system call and returns the kernel's raw value. On these processors `syscall` is not hooked.
///
/// # Safety
/// The arguments are valid for this system call.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub unsafe fn syscall(nr: c_long, args: [usize; 6]) -> isize {
    let [a, b, c, d, e, f] = args;
    // SAFETY: the caller's contract.
    let r = crate::keep_errno(|| match unsafe { libc::syscall(nr, a, b, c, d, e, f) } {
        -1 => -c_long::from(crate::errno()),
        n => n,
    });
    r as isize
}
