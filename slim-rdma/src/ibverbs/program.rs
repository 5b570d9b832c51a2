//! Memory of the program that is registered at a port: the adapter reads it for peers, or places there what it reads at peers.

use std::sync::Arc;

use super::abi::{IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_READ, ibv_mr};
use super::memory::register;
use super::port::OpenPort;
use crate::verbs::{LocalKey, VerbsError};

/// What is done with memory of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramAccess {
    /// Peers read it. It need not be writable.
    Readable,
    /// The own adapter places there what it reads at peers.
    Sink,
    /// Both.
    Both,
}

/// A port at which memory of the program can be registered. It lives as long as what is registered there.
#[derive(Clone)]
pub struct ProgramPort(pub(super) Arc<OpenPort>);

impl ProgramPort {
    /// Global identifier of the port.
    pub fn gid(&self) -> [u8; 16] {
        self.0.address.gid
    }

    /// Whether memory can be registered although the process may fork. Before Linux 5.13 a fork moves registered pages of the parent to other places at its next
    /// write, and the adapter goes on with the old ones. (libibverbs tells it since rdma-core 35; an older one counts as "no".)
    pub fn survives_forks(&self) -> bool {
        self.0.device.library.forks_keep_pages()
    }

    /// Registers memory until the result is dropped.
    ///
    /// # Errors
    /// There is no such memory, the process may lock no more, or the port [does not survive forks](Self::survives_forks).
    ///
    /// # Safety
    /// The `len` bytes at `at` stay mapped until the result is dropped. While a read is on its way into it, nobody relies on what the memory contains.
    pub unsafe fn register(
        &self,
        at: *mut u8,
        len: usize,
        access: ProgramAccess,
    ) -> Result<ProgramMemory, VerbsError> {
        self.0.check()?;
        if !self.survives_forks() {
            return Err(VerbsError::new(
                "registration that a fork would spoil",
                libc::EOPNOTSUPP,
            ));
        }
        let flags = match access {
            ProgramAccess::Readable => IBV_ACCESS_REMOTE_READ,
            ProgramAccess::Sink => IBV_ACCESS_LOCAL_WRITE,
            ProgramAccess::Both => IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ,
        };
        // SAFETY: the caller's promise.
        let mr = unsafe { register(&self.0, at.cast(), len, flags) }?;
        // SAFETY: the library has just made it.
        let keys = unsafe { ((*mr).lkey, (*mr).rkey) };
        Ok(ProgramMemory {
            port: self.0.clone(),
            mr,
            keys,
        })
    }
}

/// Memory of the program that is registered. Dropping it ends that.
pub struct ProgramMemory {
    port: Arc<OpenPort>,
    mr: *mut ibv_mr,
    /// The own adapter's, and the peer's.
    keys: (u32, u32),
}

// SAFETY: libibverbs may be called from any thread; the pointer is used by `drop` only.
unsafe impl Send for ProgramMemory {}
// SAFETY: a shared reference only reads the keys.
unsafe impl Sync for ProgramMemory {}

impl ProgramMemory {
    /// The byte at this address, for the own adapter.
    pub fn local_key(&self, addr: u64) -> LocalKey {
        LocalKey {
            addr,
            key: self.keys.0,
        }
    }

    /// The key that a peer needs.
    pub fn remote_key(&self) -> u32 {
        self.keys.1
    }
}

impl Drop for ProgramMemory {
    fn drop(&mut self) {
        if self.port.is_own() {
            // SAFETY: it is registered, and is deregistered once. If that fails, the adapter has gone.
            unsafe { (self.port.device.library.ibv_dereg_mr)(self.mr) };
        }
    }
}
