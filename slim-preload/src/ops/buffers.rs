//! The application's memory, as its calls name it.

use libc::{iovec, msghdr};

/// The application's buffers. Nothing of them is looked at before the kernel has found them good, for a bad
/// pointer is an `EFAULT`, not a crash.
#[derive(Clone, Copy)]
pub enum Buffers {
    /// As `readv(2)` has them.
    List(*const iovec, usize),
    /// As `recvmsg(2)` has them.
    Message(*const msghdr),
}

impl Buffers {
    /// # Safety
    /// `list` points to `count` iovecs, as `readv(2)` asks; the pointer and the memory that they name may be bad
    /// as long as the kernel then refuses the call.
    pub unsafe fn new(list: *const iovec, count: usize) -> Self {
        Self::List(list, count)
    }

    /// # Safety
    /// Likewise, as `recvmsg(2)` asks.
    pub unsafe fn message(message: *const msghdr) -> Self {
        Self::Message(message)
    }

    /// # Safety
    /// `one` stays where it is for as long as the buffers are used.
    pub unsafe fn one(one: &iovec) -> Self {
        Self::List(one, 1)
    }

    fn slices(&self) -> impl Iterator<Item = (*mut u8, usize)> + use<> {
        let (list, count) = match *self {
            Self::List(list, count) => (list, count),
            // SAFETY: the contract of `message`, and the kernel has accepted it.
            Self::Message(m) if !m.is_null() => unsafe {
                ((*m).msg_iov.cast_const(), (*m).msg_iovlen)
            },
            Self::Message(_) => (std::ptr::null(), 0),
        };
        let count = if list.is_null() { 0 } else { count };
        // SAFETY: the contract of `new`.
        (0..count)
            .map(move |i| unsafe { &*list.add(i) })
            .map(|v| (v.iov_base.cast(), v.iov_len))
    }

    /// All their bytes.
    pub fn len(&self) -> usize {
        self.slices().map(|(_, n)| n).sum()
    }

    /// Calls `f` with the pieces of bytes `[from, to)`.
    fn range(&self, from: usize, to: usize, mut f: impl FnMut(&[u8])) {
        let mut at = 0;
        for (base, len) in self.slices() {
            let (lo, hi) = (from.clamp(at, at + len), to.clamp(at, at + len));
            if lo < hi {
                // SAFETY: the kernel has just read these bytes from there.
                f(unsafe { std::slice::from_raw_parts(base.add(lo - at), hi - lo) });
            }
            at += len;
        }
    }

    /// Fills them from byte `from` on by calling `f` for each piece, until it fills less than offered.
    pub fn fill(&self, from: usize, mut f: impl FnMut(&mut [u8]) -> usize) -> usize {
        let (mut at, mut filled) = (0, 0);
        for (base, len) in self.slices() {
            let lo = from.clamp(at, at + len);
            if lo < at + len {
                // SAFETY: the application's buffer, that it asked to have filled.
                let piece =
                    unsafe { std::slice::from_raw_parts_mut(base.add(lo - at), at + len - lo) };
                let n = f(piece);
                filled += n;
                if n < piece.len() {
                    break;
                }
            }
            at += len;
        }
        filled
    }
}

/// Where a send's bytes are to be found again, to be copied.
pub trait Source {
    /// Calls `f` with bytes `[from, to)` of what was sent; false when they cannot be had.
    fn copy(&self, from: usize, to: usize, f: &mut dyn FnMut(&[u8])) -> bool;

    /// How many bytes a blocking call has to write before it returns; 0 when it may always return early.
    fn total(&self) -> usize {
        0
    }
}

impl Source for Buffers {
    #[inline]
    fn copy(&self, from: usize, to: usize, f: &mut dyn FnMut(&[u8])) -> bool {
        self.range(from, to, f);
        true
    }

    #[inline]
    fn total(&self) -> usize {
        self.len()
    }
}
