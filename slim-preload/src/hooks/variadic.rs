//! Functions that Rust cannot define and pass on: those with any number of arguments, and those that jump. (Those that execute a
//! program: [`super::lists`].)
//!
//! Each hook saves the registers that carry arguments and calls its `before` function, which does the work and gives the
//! address of libc's own function. Then the hook restores the registers and jumps to that address: libc's function finds
//! everything as its caller left it. On processors other than x86-64 and aarch64 these names are not hooked.

use super::looked_up::real_of;
use crate::ops::{demoting, left};
use crate::sys::keep_errno;
use crate::{exec, process};
use libc::{c_int, c_void};

type RealFunction = *mut c_void;

/// The stack pointer after a jump to this `jmp_buf`. libc stores it in a private, mangled form.
fn stack_in(env: *const usize) -> usize {
    #[cfg(target_arch = "x86_64")]
    {
        // As in glibc's `PTR_DEMANGLE` and `JB_RSP`.
        const JB_RSP: usize = 6;
        let guard: usize;
        // SAFETY: the ABI has the guard at this offset of the thread's segment; `env` was filled by `setjmp`.
        unsafe {
            std::arch::asm!("mov {}, fs:0x30", out(reg) guard, options(readonly, nostack, preserves_flags));
            env.add(JB_RSP).read().rotate_right(17) ^ guard
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = env;
        // Assumes that the jump abandons all waiting calls, as a handler that ends in a jump usually does.
        usize::MAX
    }
}

macro_rules! before_jump {
    ($($before:ident: $name:literal;)*) => {$(
        extern "C" fn $before(env: *const usize) -> RealFunction {
            exec::withdraw();
            if crate::flow::waits::waiting().is_some() {
                left::before_jump(stack_in(env));
            }
            real_of!($name)
        }
    )*};
}

before_jump! {
    before_longjmp: c"longjmp";
    before__longjmp: c"_longjmp";
    before_siglongjmp: c"siglongjmp";
    before_longjmp_chk: c"__longjmp_chk";
}

extern "C" fn before_clone(_: RealFunction, _: RealFunction, flags: c_int) -> RealFunction {
    if flags & libc::CLONE_VM == 0 {
        keep_errno(process::before_clone);
    }
    real_of!(c"clone")
}

extern "C" fn before_dprintf(fd: c_int) -> RealFunction {
    demoting::for_stdio(fd);
    real_of!(c"dprintf")
}

extern "C" fn before_dprintf_chk(fd: c_int) -> RealFunction {
    demoting::for_stdio(fd);
    real_of!(c"__dprintf_chk")
}

macro_rules! pass_on {
    ($($name:ident => $before:ident;)*) => {$(
        #[cfg(target_arch = "x86_64")]
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name() {
            // rax holds the number of vector registers in use (al, for variadic calls).
            std::arch::naked_asm!(
                "push rbp",
                "mov rbp, rsp",
                "sub rsp, 192",
                "mov [rsp], rdi",
                "mov [rsp + 8], rsi",
                "mov [rsp + 16], rdx",
                "mov [rsp + 24], rcx",
                "mov [rsp + 32], r8",
                "mov [rsp + 40], r9",
                "mov [rsp + 48], rax",
                "movaps [rsp + 64], xmm0",
                "movaps [rsp + 80], xmm1",
                "movaps [rsp + 96], xmm2",
                "movaps [rsp + 112], xmm3",
                "movaps [rsp + 128], xmm4",
                "movaps [rsp + 144], xmm5",
                "movaps [rsp + 160], xmm6",
                "movaps [rsp + 176], xmm7",
                "call {before}",
                "mov r11, rax",
                "mov rdi, [rsp]",
                "mov rsi, [rsp + 8]",
                "mov rdx, [rsp + 16]",
                "mov rcx, [rsp + 24]",
                "mov r8, [rsp + 32]",
                "mov r9, [rsp + 40]",
                "mov rax, [rsp + 48]",
                "movaps xmm0, [rsp + 64]",
                "movaps xmm1, [rsp + 80]",
                "movaps xmm2, [rsp + 96]",
                "movaps xmm3, [rsp + 112]",
                "movaps xmm4, [rsp + 128]",
                "movaps xmm5, [rsp + 144]",
                "movaps xmm6, [rsp + 160]",
                "movaps xmm7, [rsp + 176]",
                "leave",
                "jmp r11",
                before = sym $before,
            )
        }

        #[cfg(target_arch = "aarch64")]
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name() {
            std::arch::naked_asm!(
                "stp x29, x30, [sp, #-224]!",
                "mov x29, sp",
                "stp x0, x1, [sp, #16]",
                "stp x2, x3, [sp, #32]",
                "stp x4, x5, [sp, #48]",
                "stp x6, x7, [sp, #64]",
                "stp q0, q1, [sp, #96]",
                "stp q2, q3, [sp, #128]",
                "stp q4, q5, [sp, #160]",
                "stp q6, q7, [sp, #192]",
                "bl {before}",
                "mov x16, x0",
                "ldp x0, x1, [sp, #16]",
                "ldp x2, x3, [sp, #32]",
                "ldp x4, x5, [sp, #48]",
                "ldp x6, x7, [sp, #64]",
                "ldp q0, q1, [sp, #96]",
                "ldp q2, q3, [sp, #128]",
                "ldp q4, q5, [sp, #160]",
                "ldp q6, q7, [sp, #192]",
                "ldp x29, x30, [sp], #224",
                "br x16",
                before = sym $before,
            )
        }
    )*};
}

pass_on! {
    clone => before_clone;
    dprintf => before_dprintf;
    __dprintf_chk => before_dprintf_chk;
    longjmp => before_longjmp;
    _longjmp => before__longjmp;
    siglongjmp => before_siglongjmp;
    __longjmp_chk => before_longjmp_chk;
}
