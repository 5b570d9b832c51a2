//! Registered memory.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use super::abi::{IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE, ibv_mr};
use super::failed;
use super::port::OpenPort;
use crate::address::RemoteKey;
use crate::verbs::{Access, VerbsError};

/// What adapters do with memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MemoryAccess {
    /// The own one reads it.
    Read,
    /// The own one reads it, and writes received messages to it.
    Receive,
    /// A peer writes to it.
    Remote,
    /// A peer reads it.
    Readable,
}

impl From<Access> for MemoryAccess {
    fn from(access: Access) -> Self {
        match access {
            Access::Local => MemoryAccess::Read,
            Access::Remote => MemoryAccess::Remote,
            Access::Readable => MemoryAccess::Readable,
            Access::Sink => MemoryAccess::Receive,
        }
    }
}

impl MemoryAccess {
    fn flags(self) -> i32 {
        match self {
            MemoryAccess::Read => 0,
            MemoryAccess::Receive => IBV_ACCESS_LOCAL_WRITE,
            MemoryAccess::Remote => IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE,
            MemoryAccess::Readable => IBV_ACCESS_REMOTE_READ,
        }
    }
}

/// Memory of its own that is registered. Adapters write to it at any time, so it is never seen through references.
pub(super) struct RegisteredMemory {
    port: Arc<OpenPort>,
    base: *mut u8,
    len: usize,
    /// Null once it is invalidated.
    mr: *mut ibv_mr,
    /// What the peer needs, and what the own adapter needs.
    keys: (RemoteKey, u32),
    /// It could not be invalidated. So its memory is not given back.
    stuck: bool,
}

impl RegisteredMemory {
    pub(super) fn new(
        port: &Arc<OpenPort>,
        len: usize,
        access: MemoryAccess,
    ) -> Result<Self, VerbsError> {
        port.check()?;
        // SAFETY: a new mapping, which nothing else uses.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                len.max(1),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(failed("mmap"));
        }
        let mut memory = RegisteredMemory {
            port: port.clone(),
            base: base.cast(),
            len,
            mr: ptr::null_mut(),
            keys: (RemoteKey::default(), 0),
            stuck: false,
        };
        // A child of a fork does not get it. Else the next write of this process would be to a copy, which the adapter does not know.
        // SAFETY: the mapping is ours.
        if unsafe { libc::madvise(base, len.max(1), libc::MADV_DONTFORK) } != 0 {
            return Err(failed("madvise"));
        }
        // SAFETY: the memory is mapped, and stays mapped until it is deregistered.
        let mr = unsafe { register(port, base, len, access.flags()) }?;
        memory.mr = mr;
        // SAFETY: the library has just made it.
        memory.keys = unsafe {
            let addr = base as u64;
            let key = (*mr).rkey;
            (RemoteKey { addr, key }, (*mr).lkey)
        };
        Ok(memory)
    }

    pub(super) fn remote_key(&self) -> RemoteKey {
        self.keys.0
    }

    /// Address and local key of `len` bytes from `at`, for the own adapter.
    pub(super) fn place(&self, at: usize, len: usize) -> (u64, u32) {
        (self.bytes(at, len) as u64, self.keys.1)
    }

    pub(super) fn invalidate(&mut self) {
        if !self.mr.is_null() && self.port.is_own() {
            // SAFETY: it is registered, and is deregistered once.
            let status = unsafe { (self.port.device.library.ibv_dereg_mr)(self.mr) };
            self.stuck = status != 0;
            self.mr = ptr::null_mut();
        }
    }

    /// The place of `len` bytes from `at`.
    fn bytes(&self, at: usize, len: usize) -> *mut u8 {
        let inside = at.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(inside, "{len} bytes at {at} of {}", self.len);
        // SAFETY: it is inside the mapping, or at its end.
        unsafe { self.base.add(at) }
    }

    pub(super) fn read(&self, at: usize, into: &mut [u8]) {
        let from = self.bytes(at, into.len());
        if !self.port.is_own() {
            return into.fill(0);
        }
        // SAFETY: the bytes are inside the mapping, and `into` is not. A peer that does not keep to the protocol may write to them
        // meanwhile; then some bytes or other are copied, which are looked at afterwards only.
        unsafe { ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
    }

    pub(super) fn write(&mut self, at: usize, bytes: &[u8]) {
        let to = self.bytes(at, bytes.len());
        if !self.port.is_own() {
            return;
        }
        // SAFETY: the bytes are inside the mapping, and `bytes` is not. The adapter only reads this memory, if at all.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }
}

impl Drop for RegisteredMemory {
    fn drop(&mut self) {
        self.invalidate();
        if !self.stuck && self.port.is_own() {
            // SAFETY: the mapping is ours, and no adapter has it any more.
            unsafe { libc::munmap(self.base.cast::<c_void>(), self.len.max(1)) };
        }
    }
}

/// Registers memory, with these flags of access.
///
/// # Safety
/// It is mapped, and stays mapped until it is deregistered.
pub(super) unsafe fn register(
    port: &OpenPort,
    at: *mut c_void,
    len: usize,
    access: i32,
) -> Result<*mut ibv_mr, VerbsError> {
    // SAFETY: the caller's promise; the protection domain lives as long as the port.
    let mr = unsafe { (port.device.library.ibv_reg_mr)(port.pd, at, len, access) };
    match mr.is_null() {
        true => Err(failed(
            "ibv_reg_mr (if there is no memory: RLIMIT_MEMLOCK limits what can be registered)",
        )),
        false => Ok(mr),
    }
}
