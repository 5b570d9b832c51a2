//! The functions that one copy calls in the other. Numbers of commands and methods are never reused.

use std::ffi::CStr;
use std::ptr::{null, null_mut};

use libc::c_void;

use crate::offered::plain::PlainAddr;

/// The name under which the preload library exports [`host::offered`](crate::offered::host::offered).
pub const SYMBOL: &CStr = c"slim_offered_agent_4";

/// What the host offers.
#[repr(C)]
pub struct OfferedAgentCalls {
    /// Size of this structure in bytes.
    pub(crate) size: usize,
    /// Begins to use the agent, with the digest of the guest's settings. Returns null if the agent has other settings, or cannot be used.
    pub(crate) join: extern "C" fn(*const [u8; 32]) -> *const c_void,
    /// Carries out a [command](of_agent) and returns what the agent's method of that name returns, or true.
    pub(crate) command: extern "C" fn(*const c_void, *mut PlainCommand) -> bool,
    /// Has the agent forget all flows of the guest, and waits at most so many nanoseconds until it has released them. Returns whether it
    /// has. Later commands are not carried out.
    pub(crate) leave: extern "C" fn(*const c_void, u64) -> bool,
    /// Frees what `join` has returned.
    pub(crate) release: extern "C" fn(*const c_void),
}

/// Numbers of commands; each is a method of [`Agent`](crate::Agent).
pub(crate) mod of_agent {
    pub(crate) const OPEN: u32 = 1;
    pub(crate) const OPEN_AGREED: u32 = 2;
    /// `numbers`: the limit in nanoseconds. The answer goes to `take`.
    pub(crate) const ANNOUNCEMENT: u32 = 3;
    /// The answer is in `numbers`.
    pub(crate) const READ_MAILBOXES: u32 = 4;
    /// `numbers`: kind and value of the cause.
    pub(crate) const FAULT: u32 = 5;
    pub(crate) const SUSPECT: u32 = 6;
    /// `numbers`: where the stream ends, and how.
    pub(crate) const SHUT: u32 = 7;
    /// As `SHUT`.
    pub(crate) const FINISH: u32 = 8;
    pub(crate) const DIRTY: u32 = 9;
    pub(crate) const DEMOTE: u32 = 10;
    pub(crate) const GONE: u32 = 11;
    /// `numbers`: the descriptor.
    pub(crate) const LISTEN: u32 = 12;
    pub(crate) const UNLISTEN: u32 = 13;
    /// `numbers`: the limit in nanoseconds.
    pub(crate) const FLUSH: u32 = 14;
    /// Whether the agent takes commands.
    pub(crate) const IS_THERE: u32 = 15;
    pub(crate) const OUT_OF_STEP: u32 = 16;
}

/// Numbers of the methods of [`FlowIo`](crate::FlowIo).
pub(crate) mod of_flow {
    pub(crate) const LIVE: u32 = 1;
    pub(crate) const LEGACY: u32 = 2;
    pub(crate) const SUSPEND: u32 = 3;
    pub(crate) const IDLE: u32 = 4;
    pub(crate) const IS_EXCLUSIVE: u32 = 5;
    pub(crate) const CONNECTION_EXISTS: u32 = 6;
    pub(crate) const CONNECTION: u32 = 7;
    /// Nanoseconds.
    pub(crate) const AGE: u32 = 8;
    pub(crate) const DRAIN: u32 = 9;
    pub(crate) const SENT: u32 = 10;
    pub(crate) const STASH: u32 = 11;
    pub(crate) const TRIM: u32 = 12;
    pub(crate) const REPLAY: u32 = 13;
    pub(crate) const MAPS_V4: u32 = 14;
    /// The numbers are the descriptor, and whether it is relayed; and then the error number or 0.
    pub(crate) const BEFORE_CONNECT: u32 = 15;
    /// As `BEFORE_CONNECT`.
    pub(crate) const PREPARE: u32 = 16;
    /// The numbers are as for `BEFORE_CONNECT`. The flow's front end owns the descriptor from then on.
    pub(crate) const INSTALL: u32 = 17;
    pub(crate) const REINSTATE: u32 = 18;
    pub(crate) const PEER_FINAL: u32 = 19;
    pub(crate) const ESCALATE: u32 = 20;
    /// Unacknowledged, acknowledged, and a bit for each of stuck, relayed and full.
    pub(crate) const PROBE: u32 = 21;
    pub(crate) const ASK_KERNEL: u32 = 22;
    /// Nanoseconds.
    pub(crate) const KERNEL_ANSWERED: u32 = 23;
    pub(crate) const LOCAL_FINAL: u32 = 24;
    pub(crate) const UNDELIVERED: u32 = 25;
    /// Acknowledged; nanoseconds waited; nanoseconds of a round trip and 1, or 0 if nothing is waited for.
    pub(crate) const ACK_WAIT: u32 = 26;
}

/// A function that takes bytes, and returns how many it has taken.
pub(crate) type TakeBytes = extern "C" fn(*mut c_void, *const u8, usize) -> usize;

/// A flow of the guest. The host owns one reference, which it releases once.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct PlainFlow {
    pub(crate) this: *const c_void,
    /// Calls a [method](of_flow); false if it has panicked.
    pub(crate) call: extern "C" fn(*const c_void, *mut FlowCall) -> bool,
    pub(crate) release: extern "C" fn(*const c_void),
}

/// A call of a method of a flow.
#[repr(C)]
pub(crate) struct FlowCall {
    pub(crate) method: u32,
    /// Arguments, and then results: what an option has is preceded by 1, and its absence is 0.
    pub(crate) numbers: [u64; 3],
    /// Bytes that are passed.
    pub(crate) data: *const u8,
    pub(crate) len: usize,
    /// Receives replayed bytes.
    pub(crate) take: Option<TakeBytes>,
    pub(crate) context: *mut c_void,
}

impl FlowCall {
    pub(crate) fn new(method: u32, numbers: [u64; 3]) -> Self {
        Self {
            method,
            numbers,
            data: null(),
            len: 0,
            take: None,
            context: null_mut(),
        }
    }
}

/// A command of a guest.
#[repr(C)]
pub(crate) struct PlainCommand {
    pub(crate) kind: u32,
    pub(crate) is_acceptor: bool,
    /// The flow, as its guest names it.
    pub(crate) token: u64,
    pub(crate) numbers: [u64; 2],
    pub(crate) local: PlainAddr,
    pub(crate) remote: PlainAddr,
    /// The flow that is opened.
    pub(crate) flow: *const PlainFlow,
    /// What both ends have agreed on.
    pub(crate) data: *const u8,
    pub(crate) len: usize,
    pub(crate) take: Option<TakeBytes>,
    pub(crate) context: *mut c_void,
}

impl PlainCommand {
    pub(crate) fn new(kind: u32, token: u64, numbers: [u64; 2]) -> Self {
        Self {
            kind,
            is_acceptor: false,
            token,
            numbers,
            local: PlainAddr::default(),
            remote: PlainAddr::default(),
            flow: null(),
            data: null(),
            len: 0,
            take: None,
            context: null_mut(),
        }
    }
}
