//! Fragments: Open MPI's descriptors, with the component's header.
//!
//! The layouts are those of Open MPI 4.1 and 5.0 on x86-64. The shim asserts the same offsets against Open MPI's headers.

use std::alloc::{Layout, alloc, dealloc};
use std::ffi::{c_int, c_void};
use std::mem::offset_of;
use std::ptr::{self, NonNull};
use std::slice;

use crate::hdr::{FrameHeader, FrameKind, HEADER, padding};

/// `MCA_BTL_DES_FLAGS_BTL_OWNERSHIP`: the component frees the fragment when it is done.
pub const BTL_OWNERSHIP: u32 = 2;
/// `MCA_BTL_DES_SEND_ALWAYS_CALLBACK`: the callback is called however the send ends.
pub const ALWAYS_CALLBACK: u32 = 4;

/// `OPAL_SUCCESS`.
pub const SUCCESS: c_int = 0;
/// `OPAL_ERR_UNREACH`.
pub const UNREACHABLE: c_int = -12;

/// A fragment that owns its memory beyond the descriptor is at most this long.
const MAX_DATA: usize = 1 << 30;
const ALIGN: usize = 16;
const PADDING: [u8; HEADER] = [0; HEADER];

/// `mca_btl_base_completion_fn_t`: module, endpoint, descriptor, status.
pub type CompletionFn =
    unsafe extern "C" fn(*mut c_void, *mut c_void, *mut BtlDescriptor, status: c_int);

/// `mca_btl_base_segment_t`.
#[repr(C)]
#[derive(Debug)]
pub struct BtlSegment {
    addr: *mut u8,
    len: usize,
}

/// `mca_btl_base_descriptor_t`.
#[repr(C)]
#[derive(Debug)]
pub struct BtlDescriptor {
    /// `opal_free_list_item_t`: these fragments are in no list.
    item: [u64; 7],
    segments: *mut BtlSegment,
    count: usize,
    cbfunc: Option<CompletionFn>,
    cbdata: *mut c_void,
    context: *mut c_void,
    flags: u32,
    order: u8,
}

const _: () = assert!(size_of::<BtlSegment>() == 16 && size_of::<BtlDescriptor>() == 104);
const _: () = assert!(offset_of!(BtlDescriptor, segments) == 56);
const _: () = assert!(offset_of!(BtlDescriptor, cbfunc) == 72);
const _: () = assert!(offset_of!(BtlDescriptor, flags) == 96);
const _: () = assert!(offset_of!(BtlDescriptor, order) == 100);

/// A fragment. Its data lies behind it in the same allocation; the second segment may point into the program's buffer.
#[repr(C, align(16))]
#[derive(Debug)]
pub struct BtlFrag {
    descriptor: BtlDescriptor,
    segments: [BtlSegment; 2],
    allocated: usize,
    header: [u8; HEADER],
}

const _: () = assert!(align_of::<BtlFrag>() == ALIGN && size_of::<BtlFrag>().is_multiple_of(ALIGN));

/// The right to use a fragment: Open MPI's between `alloc` and `send`, this component's until the callback.
#[derive(Debug)]
pub struct FragRef(NonNull<BtlFrag>);

// SAFETY: a fragment belongs to whoever has its FragRef; nothing in it is bound to a thread.
unsafe impl Send for FragRef {}

impl FragRef {
    /// A fragment with one segment of `len` bytes; `None` without memory for it.
    pub fn allocate(len: usize, flags: u32, order: u8) -> Option<Self> {
        let layout = layout(len)?;
        // SAFETY: the layout is not empty.
        let frag = NonNull::new(unsafe { alloc(layout) }.cast::<BtlFrag>())?;
        let at = frag.as_ptr();
        // SAFETY: the allocation has room for a BtlFrag and `len` bytes behind it, and is aligned for it; what is written here is
        // the whole BtlFrag.
        unsafe {
            let data = at.add(1).cast::<u8>();
            let empty = BtlSegment {
                addr: ptr::null_mut(),
                len: 0,
            };
            at.write(BtlFrag {
                descriptor: BtlDescriptor {
                    item: [0; 7],
                    segments: &raw mut (*at).segments[0],
                    count: 1,
                    cbfunc: None,
                    cbdata: ptr::null_mut(),
                    context: ptr::null_mut(),
                    flags,
                    order,
                },
                segments: [BtlSegment { addr: data, len }, empty],
                allocated: len,
                header: [0; HEADER],
            });
        }
        Some(Self(frag))
    }

    /// From the descriptor that Open MPI hands back.
    ///
    /// # Safety
    /// It comes from [`into_raw`](Self::into_raw), and nothing else uses the fragment.
    pub unsafe fn from_raw(descriptor: NonNull<BtlDescriptor>) -> Self {
        Self(descriptor.cast())
    }

    /// The descriptor, for Open MPI.
    pub fn into_raw(self) -> *mut BtlDescriptor {
        self.0.as_ptr().cast()
    }

    /// Frees the fragment.
    pub fn free(self) {
        // SAFETY: the fragment is this one's, and was allocated with the layout of its length, which was valid then.
        unsafe {
            let layout = layout(self.0.as_ref().allocated).unwrap_unchecked();
            dealloc(self.0.as_ptr().cast(), layout);
        }
    }

    /// Leaves the fragment to whoever still has its descriptor: nobody calls back, and its memory is not used again.
    pub fn abandon(self) {
        let _ = self.into_raw();
    }

    fn frag(&self) -> &BtlFrag {
        // SAFETY: the fragment is this one's.
        unsafe { self.0.as_ref() }
    }

    /// Payload bytes.
    pub fn len(&self) -> usize {
        self.segments().iter().map(|s| s.len).sum()
    }

    /// Whether the payload is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn segments(&self) -> &[BtlSegment] {
        let frag = self.frag();
        &frag.segments[..frag.descriptor.count.min(2)]
    }

    /// Writes the header: from here on the segments stay as they are.
    pub fn seal(&mut self, tag: u8) {
        let header = FrameHeader {
            kind: FrameKind::Data,
            tag,
            len: self.len(),
        };
        // SAFETY: the fragment is this one's.
        unsafe { self.0.as_mut() }.header = header.encode();
    }

    /// From here on the callback is owed.
    pub fn owe_callback(&mut self) {
        // SAFETY: the fragment is this one's.
        unsafe { self.0.as_mut() }.descriptor.flags |= ALWAYS_CALLBACK;
    }

    /// The frame, in pieces.
    pub fn pieces(&self) -> [&[u8]; 4] {
        let bytes = |s: &BtlSegment| -> &[u8] {
            match s.len {
                0 => &[],
                // SAFETY: Open MPI keeps the memory of a segment valid and unchanged from `send` to the callback.
                len => unsafe { slice::from_raw_parts(s.addr, len) },
            }
        };
        let segments = self.segments();
        let first = segments.first().map_or(&[][..], bytes);
        let second = segments.get(1).map_or(&[][..], bytes);
        let padding = &PADDING[..padding(first.len() + second.len())];
        [&self.frag().header, first, second, padding]
    }

    /// Calls the callback if it is owed, and frees the fragment if the component owns it.
    ///
    /// # Safety
    /// `module` and `endpoint` are those that Open MPI knows. No lock is held: the callback may send, and make progress.
    pub unsafe fn complete(self, module: *mut c_void, endpoint: *mut c_void, status: c_int) {
        // The callback may free the fragment, so the flags are read first.
        let BtlDescriptor { flags, cbfunc, .. } = self.frag().descriptor;
        let descriptor = self.0.as_ptr().cast::<BtlDescriptor>();
        if let Some(callback) = cbfunc.filter(|_| flags & ALWAYS_CALLBACK != 0) {
            // SAFETY: Open MPI has set the callback for this descriptor; the arguments are the ones it knows.
            unsafe { callback(module, endpoint, descriptor, status) };
        }
        if flags & BTL_OWNERSHIP != 0 {
            self.free();
        }
    }
}

fn layout(len: usize) -> Option<Layout> {
    let bytes = size_of::<BtlFrag>() + Some(len).filter(|len| *len <= MAX_DATA)?;
    Layout::from_size_align(bytes, ALIGN).ok()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A sealed fragment with `len` bytes, each of them `tag`.
    pub(crate) fn fragment(len: usize, tag: u8) -> FragRef {
        let mut frag = FragRef::allocate(len, 0, 255).unwrap();
        fill(&frag, tag);
        frag.seal(tag);
        frag
    }

    fn fill(frag: &FragRef, with: u8) {
        let segment = &frag.segments()[0];
        // SAFETY: the segment is the fragment's own memory.
        unsafe { ptr::write_bytes(segment.addr, with, segment.len) };
    }

    #[test]
    fn a_fragment_becomes_one_padded_frame() {
        let mut frag = FragRef::allocate(13, 0, 255).unwrap();
        fill(&frag, 7);
        frag.seal(0x41);
        let frame = frag.pieces().concat();
        let header = FrameHeader::parse(frame[..8].try_into().unwrap()).unwrap();
        assert_eq!((header.tag, header.len), (0x41, 13));
        assert_eq!(frame.len(), header.frame_len());
        assert_eq!((&frame[8..21], &frame[21..]), (&[7; 13][..], &[0; 3][..]));
        frag.free();
    }

    #[test]
    fn the_callback_comes_once_and_only_if_it_is_owed() {
        unsafe extern "C" fn count(
            calls: *mut c_void,
            _: *mut c_void,
            _: *mut BtlDescriptor,
            status: c_int,
        ) {
            // SAFETY: the test hands its counter in as the module.
            unsafe { *calls.cast::<c_int>() += 1 - status };
        }
        let mut calls: c_int = 0;
        for owed in [false, true] {
            let mut frag = FragRef::allocate(0, BTL_OWNERSHIP, 255).unwrap();
            // SAFETY: the fragment is the test's.
            unsafe { frag.0.as_mut() }.descriptor.cbfunc = Some(count);
            if owed {
                frag.owe_callback();
            }
            // SAFETY: the callback is the one above.
            unsafe { frag.complete((&raw mut calls).cast(), ptr::null_mut(), UNREACHABLE) };
            assert_eq!(calls, if owed { 13 } else { 0 });
        }
    }

    #[test]
    fn absurd_lengths_are_refused() {
        assert!(FragRef::allocate(usize::MAX, 0, 0).is_none());
    }
}
