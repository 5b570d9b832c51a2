//! Finds out whether the calling thread is in a signal handler.
//!
//! The kernel keeps no record of this, but the stack shows it: above the frames of a handler lies the frame that the kernel has
//! pushed. That frame begins with the return address, `sa_restorer`, which the kernel reports for each signal. The frame of a
//! handler that has returned may still lie in unused parts of the stack, so the signal mask is checked as well: a handler runs
//! with its own signal blocked.

use crate::memory::read_memory;
use std::ptr;

/// Signals are numbered from 1.
const SIGNALS: usize = 64;
/// How far the stack is searched, in bytes. The frames between a handler and its call to us take a small part of it.
const REACH: usize = 256 << 10;
/// How many words of the stack are read at a time.
const PIECE: usize = 128;

/// The action of a signal, as the kernel stores it (`struct kernel_sigaction`).
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct KernelSigaction {
    handler: usize,
    flags: u64,
    restorer: usize,
    mask: u64,
}

/// Whether the calling thread is in a signal handler, as far as the stack shows. Always false on processors other than x86-64.
///
/// Makes at least 65 system calls. Allocates from our own heap only.
pub fn in_handler() -> bool {
    if cfg!(any(not(target_arch = "x86_64"), miri)) {
        return false;
    }
    let blocked = blocked();
    let may_run = |(n, action): &(usize, KernelSigaction)| {
        action.restorer != 0 && (blocked & bit(*n) != 0 || has_no_defer(action))
    };
    // The running handler may have been removed since, or by the signal itself (SA_RESETHAND). Its restorer stays registered.
    let running: Vec<_> = (1..=SIGNALS)
        .filter_map(|n| Some((n, action(n)?)))
        .filter(may_run)
        .collect();
    let restorers: Vec<_> = running.iter().map(|(_, action)| action.restorer).collect();
    !running.is_empty() && is_on_stack(&restorers, |frame| frame.agrees(&running, blocked))
}

fn bit(signal: usize) -> u64 {
    1 << (signal - 1)
}

fn has_no_defer(action: &KernelSigaction) -> bool {
    action.flags & libc::SA_NODEFER as u64 != 0
}

/// The signals that the calling thread blocks.
fn blocked() -> u64 {
    let (mut mask, none) = (0u64, ptr::null::<u64>());
    // SAFETY: the kernel writes 8 bytes to `mask`, and changes nothing else.
    let _ = unsafe {
        call!(
            libc::SYS_rt_sigprocmask,
            libc::SIG_BLOCK,
            none,
            &raw mut mask,
            size_of::<u64>()
        )
    };
    mask
}

fn action(signal: usize) -> Option<KernelSigaction> {
    let (mut action, none) = (KernelSigaction::default(), ptr::null::<KernelSigaction>());
    // SAFETY: the kernel writes one `KernelSigaction`, with a mask of 8 bytes, and changes nothing else.
    let r = unsafe {
        call!(
            libc::SYS_rt_sigaction,
            signal,
            none,
            &raw mut action,
            size_of::<u64>()
        )
    };
    r.is_ok().then_some(action)
}

/// The frame that the kernel pushes before it runs a handler (`struct rt_sigframe` of x86-64), in words.
struct Frame([usize; Frame::WORDS]);

impl Frame {
    const WORDS: usize = Self::MASK + 1;
    const RESTORER: usize = 0;
    const FLAGS: usize = 1;
    const LINK: usize = 2;
    /// Registers begin at word 6: 8 to 15, di, si, bp, bx, dx, ax, cx, sp, ip, flags, segments.
    const SEGMENTS: usize = 24;
    const MASK: usize = 38;

    /// Whether this can be the frame of one of the handlers in `running`.
    fn agrees(&self, running: &[(usize, KernelSigaction)], blocked: u64) -> bool {
        const USER_CODE_SEGMENT: usize = 0x33;
        let saved = self.0[Self::MASK] as u64;
        self.0[Self::FLAGS] < 8
            && self.0[Self::LINK] == 0
            && self.0[Self::SEGMENTS] & 0xffff == USER_CODE_SEGMENT
            && running.iter().any(|(n, action)| {
                let is_blocked_by_handler = blocked & !saved & bit(*n) != 0;
                action.restorer == self.0[Self::RESTORER]
                    && (is_blocked_by_handler || has_no_defer(action))
            })
    }
}

/// Whether the stack above the caller has a frame that begins with one of `restorers` and satisfies `is_it`.
fn is_on_stack(restorers: &[usize], is_it: impl Fn(&Frame) -> bool) -> bool {
    let here = 0usize;
    let start = ptr::from_ref(&here);
    let mut piece = [0usize; PIECE];
    let step = size_of_val(&piece);
    // No piece crosses a page boundary, so the first one that cannot be read is behind the end of the stack.
    let first = start.wrapping_byte_sub(start.addr() % step);
    for n in 0..REACH / step {
        let at = first.wrapping_byte_add(n * step);
        if !read_words(at, &mut piece) {
            break;
        }
        for (i, _) in piece
            .iter()
            .enumerate()
            .filter(|(_, word)| restorers.contains(word))
        {
            let mut frame = Frame([0; Frame::WORDS]);
            if read_words(at.wrapping_add(i), &mut frame.0) && is_it(&frame) {
                return true;
            }
        }
    }
    false
}

fn read_words(at: *const usize, words: &mut [usize]) -> bool {
    let len = size_of_val(words);
    // SAFETY: the same memory, seen as bytes; any bytes are valid integers.
    let bytes = unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast::<u8>(), len) };
    read_memory(at.cast(), bytes)
}

#[cfg(all(test, target_arch = "x86_64", not(miri)))]
mod tests {
    use super::*;
    use libc::c_int;
    use std::sync::atomic::{AtomicU32, Ordering};

    static FOUND: AtomicU32 = AtomicU32::new(0);

    extern "C" fn look(_: c_int) {
        FOUND.fetch_add(u32::from(in_handler()), Ordering::Relaxed);
    }

    fn found_with(flags: c_int) -> u32 {
        FOUND.store(0, Ordering::Relaxed);
        let handler: extern "C" fn(c_int) = look;
        // SAFETY: all bytes zero are an empty mask and no flags; the handler is async-signal-safe.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as usize;
            action.sa_flags = flags;
            assert_eq!(
                libc::sigaction(libc::SIGUSR2, &raw const action, ptr::null_mut()),
                0
            );
            assert_eq!(libc::raise(libc::SIGUSR2), 0);
        }
        FOUND.load(Ordering::Relaxed)
    }

    #[test]
    fn a_running_handler_is_detected() {
        assert!(!in_handler());
        for flags in [0, libc::SA_SIGINFO, libc::SA_NODEFER, libc::SA_RESETHAND] {
            assert_eq!(found_with(flags), 1, "flags {flags:#x}");
            assert!(!in_handler(), "after a handler with flags {flags:#x}");
        }
    }

    #[test]
    fn blocked_signals_alone_do_not_look_like_a_handler() {
        let mut old = 0u64;
        // SAFETY: the kernel reads and writes masks of 8 bytes.
        let set = |mask: u64, old: *mut u64| unsafe {
            call!(
                libc::SYS_rt_sigprocmask,
                libc::SIG_SETMASK,
                &raw const mask,
                old,
                size_of::<u64>()
            )
        };
        set(!0, &raw mut old).unwrap();
        let found = in_handler();
        set(old, ptr::null_mut()).unwrap();
        assert!(!found);
    }
}
