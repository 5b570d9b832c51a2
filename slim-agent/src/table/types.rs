//! Structures of the table as C sees them: cbindgen makes `slim-c/include/slim_table.h` of this file.

use std::ffi::{c_char, c_int};

/// Version of slim_table_calls. It changes only if a program for an older version would not work any more.
pub const SLIM_TABLE_VERSION: u32 = 1;

/// SLIM does not work in this process: it is off, it has ended, or the process has not used a TCP socket yet. There are no peers and no
/// flows with a session.
pub const SLIM_TABLE_OFF: c_int = 0;
/// SLIM works in this process.
pub const SLIM_TABLE_ON: c_int = 1;

/// State of a flow: it is not known yet whether the peer has SLIM.
pub const SLIM_TABLE_FLOW_NEGOTIATING: u32 = 0;
/// State of a flow: a connection carries it.
pub const SLIM_TABLE_FLOW_ACTIVE: u32 = 1;
/// State of a flow: it has lost its connection and has no new one yet.
pub const SLIM_TABLE_FLOW_SUSPENDED: u32 = 2;
/// State of a flow: both sides agree on a new connection, or lost bytes are sent again.
pub const SLIM_TABLE_FLOW_RESUMING: u32 = 3;
/// State of a flow: escalated. `reason` says why.
pub const SLIM_TABLE_FLOW_ENDED: u32 = 4;
/// State of a flow: plain TCP. `reason` says why.
pub const SLIM_TABLE_FLOW_LEGACY: u32 = 5;

/// State of a peer: at least one flow to it has a connection.
pub const SLIM_TABLE_PEER_REACHABLE: u32 = 0;
/// State of a peer: no flow to it has a connection.
pub const SLIM_TABLE_PEER_SUSPENDED: u32 = 1;
/// State of a peer: no flow to it is left, and the last one ended with evidence; or the witness of the job says that it is lost.
pub const SLIM_TABLE_PEER_LOST: u32 = 2;

/// No evidence: the peer itself has ended the flow, or it was not given up because of the network.
pub const SLIM_TABLE_EVIDENCE_NONE: u32 = 0;
/// Evidence: the peer's host says that the process does not exist, or another process of the host answers for it.
pub const SLIM_TABLE_EVIDENCE_PROCESS_GONE: u32 = 1;
/// Evidence: nothing at the peer's host has answered during the outage.
pub const SLIM_TABLE_EVIDENCE_HOST_SILENT: u32 = 2;
/// Evidence: the peer's host has answered, but no connection could be kept.
pub const SLIM_TABLE_EVIDENCE_PATH_LOST: u32 = 3;
/// Evidence: the user's limit for a resume has passed.
pub const SLIM_TABLE_EVIDENCE_DEADLINE: u32 = 4;

/// A peer process. Texts end with a zero byte.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct TablePeer {
    /// Name of the process: host, process id and incarnation, as in `process` of a flow.
    pub process: [c_char; 40],
    /// The whole id of its host, as 32 hexadecimal digits.
    pub host: [c_char; 40],
    /// Where it is reached for a resume: address and port, or the kind of transport and its locator. The first `locator_count` of them;
    /// those that do not fit are left out.
    pub locators: [[c_char; 144]; 8],
    /// Number of `locators`.
    pub locator_count: u32,
    /// Its process id on its host.
    pub pid: u32,
    /// SLIM_TABLE_PEER_...
    pub state: u32,
    /// SLIM_TABLE_EVIDENCE_...: the last evidence against it.
    pub evidence: u32,
    /// Flows to it that have a session.
    pub flows: u32,
    /// Those of them that have no connection.
    pub suspended: u32,
}

/// A flow. Texts end with a zero byte.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct TableFlow {
    /// Its name, the same at both ends and in the event log: 32 hexadecimal digits. Zeros while it has none.
    pub flow: [c_char; 40],
    /// Our address and port, as getsockname() has them.
    pub sock: [c_char; 64],
    /// The peer's address and port, as getpeername() has them.
    pub peer: [c_char; 64],
    /// Name of the peer process; empty while it is not known.
    pub process: [c_char; 40],
    /// Why it is plain TCP or was given up: the word of the event log. "demoted" if this process made it plain TCP. Empty in other states.
    pub reason: [c_char; 24],
    /// SLIM_TABLE_FLOW_...
    pub state: u32,
    /// 1 if the program has closed it, and its bytes are still being delivered.
    pub closed: u32,
    /// Number of the connection in use; 0 is the program's own.
    pub epoch: u64,
    /// How often it was resumed.
    pub resumes: u64,
}

/// An escalation: a flow that was given up. Texts end with a zero byte.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct TableEscalation {
    /// Number of the escalation in this process, counted from 1.
    pub seq: u64,
    /// When: nanoseconds since 1970, UTC.
    pub time_ns: u64,
    /// The flow's name.
    pub flow: [c_char; 40],
    /// Our address and port.
    pub sock: [c_char; 64],
    /// The peer's address and port.
    pub peer: [c_char; 64],
    /// Name of the peer process; empty if it is not known.
    pub process: [c_char; 40],
    /// Why the flow was suspended: the word of the event log.
    pub cause: [c_char; 24],
    /// Why it could not be resumed: the word of the event log.
    pub reason: [c_char; 24],
    /// The peer's process id on its host; 0 if it is not known.
    pub pid: u32,
    /// SLIM_TABLE_EVIDENCE_...
    pub evidence: u32,
    /// Attempts to resume that were begun.
    pub attempts: u32,
    /// The error that the program gets (an error number); 0 for an end of stream.
    pub error: c_int,
}

/// The functions of the table. Later versions of the library add members at the end: before a member beyond `descriptor` is used, `size`
/// must be compared.
#[repr(C)]
pub struct TableCalls {
    /// SLIM_TABLE_VERSION of the library.
    pub version: u32,
    /// Size of this structure in bytes, in the library.
    pub size: u32,
    /// Whether SLIM works in this process: SLIM_TABLE_ON or SLIM_TABLE_OFF.
    pub state: extern "C" fn() -> c_int,
    /// Stores the peers: see above.
    pub peers: unsafe extern "C" fn(at: *mut TablePeer, capacity: usize, size: usize) -> c_int,
    /// Stores the flows that have a session, or may get one; and then the last 64 that have none any more, because they were given up or
    /// became plain TCP. A connection that SLIM has released is not watched: it may be closed by now.
    pub flows: unsafe extern "C" fn(at: *mut TableFlow, capacity: usize, size: usize) -> c_int,
    /// Stores the last escalations, the newest first, at most 64.
    pub escalations:
        unsafe extern "C" fn(at: *mut TableEscalation, capacity: usize, size: usize) -> c_int,
    /// Returns a new descriptor, which becomes readable with each escalation from now on; or a negative error number (-EMFILE: too many).
    /// The caller reads it empty (it does not block) before it asks for escalations, and closes it.
    pub descriptor: extern "C" fn() -> c_int,
}
