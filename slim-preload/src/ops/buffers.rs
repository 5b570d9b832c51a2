//! The application's buffers, as its calls pass them.

use crate::flow::Flow;
use crate::sys::{self, Errno};
use libc::{iovec, msghdr};
use slim_stream::send_half::LARGE;
use std::sync::atomic::Ordering;

/// The application's buffers. They are not accessed before the kernel has accepted them: a bad pointer must give
/// `EFAULT`, not a crash.
#[derive(Clone, Copy)]
pub enum Buffers {
    /// The buffer of a `read(2)`.
    One(*mut u8, usize),
    /// The list of a `readv(2)`.
    List(*const iovec, usize),
    /// The header of a `recvmsg(2)`.
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
    /// Likewise, as `read(2)` and `write(2)` ask.
    #[inline]
    pub unsafe fn one(base: *const libc::c_void, len: usize) -> Self {
        Self::One(base.cast_mut().cast(), len)
    }

    /// The entries of the list; none for a single buffer. The list need not be aligned: the kernel does not require that.
    #[inline]
    fn list(&self) -> impl Iterator<Item = (*mut u8, usize)> {
        let (list, count) = match *self {
            Self::List(list, count) => (list, count),
            Self::Message(m) if !m.is_null() => {
                // SAFETY: the contract of `message`, and the kernel has accepted it.
                let m = unsafe { m.read_unaligned() };
                (m.msg_iov.cast_const(), m.msg_iovlen)
            }
            _ => (std::ptr::null(), 0),
        };
        let count = if list.is_null() { 0 } else { count };
        (0..count).map(move |i| {
            // SAFETY: the contract of `new`.
            let v = unsafe { list.add(i).read_unaligned() };
            (v.iov_base.cast(), v.iov_len)
        })
    }

    fn slices(&self) -> impl Iterator<Item = (*mut u8, usize)> {
        let one = match *self {
            Self::One(base, len) => Some((base, len)),
            _ => None,
        };
        one.into_iter().chain(self.list())
    }

    /// The total number of bytes.
    #[inline(always)]
    pub fn len(&self) -> usize {
        match *self {
            Self::One(_, len) => len,
            _ => self.list().map(|(_, len)| len).sum(),
        }
    }

    /// Calls `f` with the pieces of memory that hold bytes `[from, to)`, until it gives false.
    fn range(&self, from: usize, to: usize, mut f: impl FnMut(*const u8, usize) -> bool) {
        let mut at = 0;
        for (base, len) in self.slices() {
            let (lo, hi) = (from.clamp(at, at + len), to.clamp(at, at + len));
            if lo < hi && !f(base.wrapping_add(lo - at), hi - lo) {
                return;
            }
            at += len;
        }
    }

    /// The error that the kernel would report for the buffers before it looks at the socket. Costs a system call or a few.
    pub fn flaw(&self) -> Option<Errno> {
        // No processor has user addresses with these bits.
        let far = |base: *mut u8| base.addr() >> 56 != 0;
        let (list, count, most) = match *self {
            Self::One(base, _) => return far(base).then_some(libc::EFAULT),
            Self::List(list, count) => (list, count, libc::EINVAL),
            // SAFETY: the application's header, of integers and pointers.
            Self::Message(m) => match unsafe { sys::copy_of(m) } {
                Some(m) => (m.msg_iov.cast_const(), m.msg_iovlen, libc::EMSGSIZE),
                None => return Some(libc::EFAULT),
            },
        };
        if count > libc::UIO_MAXIOV as usize {
            return Some(most);
        }
        if !sys::is_readable(list.cast(), count * size_of::<iovec>()) {
            return Some(libc::EFAULT);
        }
        self.slices().find_map(|(base, len)| {
            let endless = (len > isize::MAX as usize).then_some(libc::EINVAL);
            endless.or_else(|| far(base).then_some(libc::EFAULT))
        })
    }

    /// Whether the first `n` bytes of the buffers are writable.
    pub fn can_take(&self, n: usize) -> bool {
        let mut good = true;
        self.range(0, n, |base, len| {
            good = sys::is_writable(base, len);
            good
        });
        good
    }

    /// Fills the buffers from byte `from` on by calling `f` for each piece, until it fills less than offered.
    pub fn fill(&self, from: usize, mut f: impl FnMut(&mut [u8]) -> usize) -> usize {
        let (mut at, mut filled) = (0, 0);
        for (base, len) in self.slices() {
            let lo = from.clamp(at, at + len);
            if lo < at + len {
                // SAFETY: the application's buffer, which it asked to have filled.
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

/// The bytes of a send, to be copied after the kernel has taken them.
pub trait Source: Copy {
    /// Calls `f` with bytes `[from, to)` of what was sent.
    fn copy(&self, from: usize, to: usize, f: impl FnMut(&[u8]));

    /// Calls `f` with all the bytes.
    fn copy_all(&self, f: impl FnMut(&[u8]));

    /// Calls `f` with the pieces of memory that hold bytes `[from, to)`, until it gives false. The kernel need not have accepted
    /// them yet.
    fn offer(&self, from: usize, to: usize, f: impl FnMut(*const u8, usize) -> bool);

    /// Whether the call may write more than usual, by a quick check.
    fn may_be_large(&self, flow: &Flow) -> bool;

    /// The number of bytes of the call, if it can be determined before the kernel has accepted the buffers, and the call may be
    /// split.
    fn announced(&self) -> Option<usize>;

    /// The number of bytes that a blocking call has to write before it returns.
    fn total(&self) -> usize;

    /// The error that the kernel would report before it looks at the socket.
    fn flaw(&self) -> Option<Errno> {
        None
    }
}

impl Source for Buffers {
    fn copy(&self, from: usize, to: usize, mut f: impl FnMut(&[u8])) {
        self.range(from, to, |base, len| {
            // SAFETY: the kernel has just read these bytes from there.
            f(unsafe { std::slice::from_raw_parts(base, len) });
            true
        });
    }

    fn offer(&self, from: usize, to: usize, f: impl FnMut(*const u8, usize) -> bool) {
        self.range(from, to, f);
    }

    #[inline(always)]
    fn may_be_large(&self, flow: &Flow) -> bool {
        match *self {
            Self::One(_, len) => len >= LARGE,
            // Adding up a list is not worth its cost if the flow's calls write little.
            _ => flow.writes_much.load(Ordering::Relaxed) > 0,
        }
    }

    fn announced(&self) -> Option<usize> {
        // The kernel refuses lists with a larger total.
        let most = isize::MAX as usize;
        let add = |sum: usize, (_, len)| sum.checked_add(len).filter(|sum| *sum <= most);
        // Control data belongs to one call: such a message is not split.
        let control = match *self {
            // SAFETY: the application's header, of integers and pointers.
            Self::Message(m) => unsafe { sys::copy_of(m) }?.msg_controllen,
            _ => 0,
        };
        if control > 0 || self.flaw().is_some() {
            return None;
        }
        self.slices().try_fold(0, add)
    }

    #[inline(always)]
    fn copy_all(&self, mut f: impl FnMut(&[u8])) {
        if let Self::One(base, len) = *self {
            // SAFETY: the kernel has just read these bytes from there.
            return f(unsafe { std::slice::from_raw_parts(base, len) });
        }
        for (base, len) in self.list().filter(|(_, len)| *len > 0) {
            // SAFETY: likewise.
            f(unsafe { std::slice::from_raw_parts(base, len) });
        }
    }

    #[inline(always)]
    fn total(&self) -> usize {
        self.len()
    }

    fn flaw(&self) -> Option<Errno> {
        Buffers::flaw(self)
    }
}
