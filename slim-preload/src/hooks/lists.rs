//! `execl`, `execle` and `execlp`: the arguments of the new program are those of the call, up to a null pointer.
//!
//! Each hook stores the registers that carry arguments, and calls its function with them and with the place of the other arguments on
//! the stack. On processors other than x86-64 and aarch64 these names are not hooked.

use super::descriptors::{slim_execv, slim_execve, slim_execvp};
use libc::{c_char, c_int};
use smallvec::SmallVec;

/// How many arguments registers carry.
#[cfg(target_arch = "x86_64")]
const REGISTERS: usize = 6;
#[cfg(not(target_arch = "x86_64"))]
const REGISTERS: usize = 8;

type Argument = *const c_char;

/// The arguments of a call.
struct ListedArguments {
    registers: *const Argument,
    stack: *const Argument,
}

impl ListedArguments {
    /// # Safety
    /// The caller has passed more than `n` arguments.
    unsafe fn get(&self, n: usize) -> Argument {
        // SAFETY: the ABI has them there.
        unsafe {
            match n.checked_sub(REGISTERS) {
                None => self.registers.add(n).read(),
                Some(n) => self.stack.add(n).read(),
            }
        }
    }

    /// The list that begins behind the path, with the null pointer that ends it. On the stack, unless it is long: a vforked child
    /// shares its parent's heap, and frees nothing when it executes the program.
    ///
    /// # Safety
    /// The caller has passed a null pointer.
    unsafe fn list(&self) -> SmallVec<[Argument; 256]> {
        let mut all = SmallVec::new();
        loop {
            // SAFETY: no null pointer has come yet.
            let next = unsafe { self.get(1 + all.len()) };
            all.push(next);
            if next.is_null() {
                return all;
            }
        }
    }
}

macro_rules! lists {
    ($($name:ident => $gathered:ident($all:ident, $list:ident) $call:expr;)*) => {$(
        unsafe extern "C" fn $gathered(registers: *const Argument, stack: *const Argument) -> c_int {
            let $all = ListedArguments { registers, stack };
            // SAFETY: the arguments are as the function of this name requires.
            unsafe {
                let $list = $all.list();
                $call
            }
        }

        #[cfg(target_arch = "x86_64")]
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name() {
            std::arch::naked_asm!(
                "push rbp",
                "mov rbp, rsp",
                "sub rsp, 48",
                "mov [rsp], rdi",
                "mov [rsp + 8], rsi",
                "mov [rsp + 16], rdx",
                "mov [rsp + 24], rcx",
                "mov [rsp + 32], r8",
                "mov [rsp + 40], r9",
                "mov rdi, rsp",
                "lea rsi, [rbp + 16]",
                "call {gathered}",
                "leave",
                "ret",
                gathered = sym $gathered,
            )
        }

        #[cfg(target_arch = "aarch64")]
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name() {
            std::arch::naked_asm!(
                "stp x29, x30, [sp, #-80]!",
                "mov x29, sp",
                "stp x0, x1, [sp, #16]",
                "stp x2, x3, [sp, #32]",
                "stp x4, x5, [sp, #48]",
                "stp x6, x7, [sp, #64]",
                "add x0, sp, #16",
                "add x1, sp, #80",
                "bl {gathered}",
                "ldp x29, x30, [sp], #80",
                "ret",
                gathered = sym $gathered,
            )
        }
    )*};
}

lists! {
    execl => gathered_execl(all, list) slim_execv(all.get(0), list.as_ptr());
    execle => gathered_execle(all, list) slim_execve(all.get(0), list.as_ptr(), all.get(1 + list.len()).cast());
    execlp => gathered_execlp(all, list) slim_execvp(all.get(0), list.as_ptr());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_on_the_stack_follow_those_in_registers() {
        let all: Vec<Argument> = (1..20).map(std::ptr::without_provenance).collect();
        let mut words = all.clone();
        words.push(std::ptr::null());
        let (registers, stack) = words.split_at(REGISTERS);
        let (registers, stack) = (registers.as_ptr(), stack.as_ptr());
        let arguments = ListedArguments { registers, stack };
        // SAFETY: so many were passed.
        let (path, list) = unsafe { (arguments.get(0), arguments.list()) };
        assert_eq!(path, all[0]);
        assert_eq!(list[..list.len() - 1], all[1..]);
    }
}
