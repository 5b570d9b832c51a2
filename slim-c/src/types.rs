//! Structures and constants that the program sees.

use std::ffi::{c_char, c_int, c_void};
use std::time::Duration;

use slim::{FlowChange, FlowStats, SessionStats, StreamState};

/// The first connection is not established yet.
pub const SLIM_STATE_CONNECTING: c_int = 1;
/// The flow is usable, and the peer is being asked whether it has SLIM. Its bytes are kept already. But if the connection breaks now and
/// the peer does not answer within half a second, the flow fails. To be sure, wait for SLIM_STATE_PROTECTED (slim_flow_wait_negotiated()),
/// or open the flow by blob (slim_connect_blob()): such a flow is never in this state.
pub const SLIM_STATE_NEGOTIATING: c_int = 2;
/// The flow outlives its connection.
pub const SLIM_STATE_PROTECTED: c_int = 3;
/// The flow is plain TCP: the peer does not have SLIM, or the settings forbid it.
pub const SLIM_STATE_PLAIN: c_int = 4;
/// The connection is broken, or suspected to be, and is being replaced.
pub const SLIM_STATE_SUSPENDED: c_int = 5;
/// The flow has failed: its connection broke and was not replaced.
pub const SLIM_STATE_FAILED: c_int = 6;
/// The session is closed.
pub const SLIM_STATE_CLOSED: c_int = 7;

/// Of an endpoint: flows may be waiting to be accepted.
pub const SLIM_UPDATE_ACCEPTABLE: u32 = 1;
/// A receive may return bytes, the end of the stream, or an error.
pub const SLIM_UPDATE_READABLE: u32 = 2;
/// A flow that took no more bytes, or that has just been opened, may take bytes now.
pub const SLIM_UPDATE_WRITABLE: u32 = 4;
/// The state of the flow may have changed.
pub const SLIM_UPDATE_CHANGED: u32 = 8;
/// The flow has failed.
pub const SLIM_UPDATE_ENDED: u32 = 16;
/// A post is completed: `post` and `status` say which one and how. No other bit is set in such an update.
pub const SLIM_UPDATE_POST: u32 = 32;

/// The first connection is established.
pub const SLIM_EVENT_CONNECTED: u32 = 1;
/// The peer has SLIM: from now on the flow outlives its connection.
pub const SLIM_EVENT_PROTECTED: u32 = 2;
/// The flow is plain TCP from now on.
pub const SLIM_EVENT_PLAIN: u32 = 3;
/// The flow has lost its connection and is suspended. `error` is the error of the connection, if this end met one.
pub const SLIM_EVENT_SUSPENDED: u32 = 4;
/// The flow has a new connection.
pub const SLIM_EVENT_RESUMED: u32 = 5;
/// The flow goes on with its old connection, which proved to be intact.
pub const SLIM_EVENT_REINSTATED: u32 = 6;
/// The flow has failed with `error`; 0: with an end of the stream.
pub const SLIM_EVENT_ESCALATED: u32 = 7;

/// Options of a session. Set all of them by SLIM_OPTIONS_INIT first: `slim_options options = SLIM_OPTIONS_INIT;`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SlimOptions {
    /// sizeof(slim_options), which tells the library how many options the program knows.
    pub size: usize,
    /// Name of the job. Blobs are valid only in sessions with the same name. NULL: an empty name.
    pub job: *const c_char,
    /// Settings, as NAME=VALUE, with a NULL at the end: those of SLIM's environment variables (docs/ENVIRONMENT.md). Other names are
    /// ignored, so `environ` may be given. NULL: the default of each. The default of SLIM_LOG is `off`.
    pub settings: *const *const c_char,
    /// Kinds of transport that flows may use, the preferred one first: "tcp", or "verbs,tcp" (queue pairs of InfiniBand and RoCE where these can be made, and TCP else;
    /// docs/VERBS.md). Such a session has a thread of its own. NULL: "tcp".
    pub transports: *const c_char,
    /// With "verbs,tcp": adapters or their ports, with commas between, for example "mlx5_0,mlx5_1:2". NULL: all that have a link when the session is opened.
    pub verbs_ports: *const c_char,
}

/// A change of a flow or an endpoint, or the completion of a post.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SlimUpdate {
    /// The number of the flow or endpoint.
    pub id: u64,
    /// The pointer that was set for the flow or endpoint, else NULL. Also NULL if the flow is closed already.
    pub context: *mut c_void,
    /// With SLIM_UPDATE_POST: the pointer that was given to slim_flow_post(). The buffer belongs to the program again.
    pub post: *mut c_void,
    /// SLIM_UPDATE_... bits.
    pub what: u32,
    /// With SLIM_UPDATE_POST: 0 if the peer's kernel has the bytes. SLIM_ERR_LOST or SLIM_ERR_SHUTDOWN if the flow has failed before, and
    /// SLIM_ERR_CLOSED if it was closed before: then the peer may have all, some or none of them.
    pub status: i32,
}

// SAFETY: the pointers are the program's. The library only hands them back.
unsafe impl Send for SlimUpdate {}

/// An event of a flow.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SlimEvent {
    /// The number of the flow.
    pub flow: u64,
    /// The pointer that was set for the flow, else NULL. Also NULL if the flow is closed already.
    pub context: *mut c_void,
    /// One of SLIM_EVENT_...
    pub change: u32,
    /// An error number as in `errno`, or 0.
    pub error: i32,
    /// With SLIM_EVENT_RESUMED: bytes that this end has replayed in this resume.
    pub replayed: u64,
    /// With SLIM_EVENT_RESUMED: length of the suspension, in nanoseconds.
    pub away_ns: u64,
}

/// Counters of a flow, or of a session.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct SlimStats {
    /// Bytes that the program has sent.
    pub sent: u64,
    /// Bytes that the program has received.
    pub received: u64,
    /// Number of resumes onto a new connection.
    pub resumes: u64,
    /// Bytes that this end has replayed.
    pub replayed: u64,
    /// Total time of all suspensions, the present ones included, in nanoseconds.
    pub suspended_ns: u64,
    /// Of a flow: number of posts; of a session: 0.
    pub posted: u64,
    /// Of a flow: number of posts whose bytes the peer's kernel has; of a session: 0.
    pub completed: u64,
    /// Of a session: flows that are open; of a flow: 0, as all that follow.
    pub open: u64,
    /// Flows that were opened or accepted.
    pub flows: u64,
    /// Flows that have failed.
    pub failed: u64,
    /// Events that were dropped because the program did not take them in time.
    pub lost_events: u64,
}

/// A callback for events. It may call the library, except slim_session_close(), and must return: no longjmp(), no C++ exception.
pub type SlimEventCallback =
    Option<unsafe extern "C" fn(event: *const SlimEvent, arg: *mut c_void)>;

fn nanoseconds(duration: Duration) -> u64 {
    duration.as_nanos().try_into().unwrap_or(u64::MAX)
}

impl From<FlowStats> for SlimStats {
    fn from(stats: FlowStats) -> Self {
        Self {
            sent: stats.sent,
            received: stats.received,
            resumes: stats.resumes,
            replayed: stats.replayed,
            suspended_ns: nanoseconds(stats.suspended),
            ..Self::default()
        }
    }
}

impl From<SessionStats> for SlimStats {
    fn from(stats: SessionStats) -> Self {
        Self {
            open: stats.open,
            flows: stats.flows,
            failed: stats.failed,
            lost_events: stats.lost_events,
            ..Self::from(stats.total)
        }
    }
}

impl SlimEvent {
    pub(crate) fn new(flow: u64, context: *mut c_void, change: FlowChange) -> Self {
        let mut event = Self {
            flow,
            context,
            change: SLIM_EVENT_CONNECTED,
            error: 0,
            replayed: 0,
            away_ns: 0,
        };
        match change {
            FlowChange::Connected => {}
            FlowChange::Protected => event.change = SLIM_EVENT_PROTECTED,
            FlowChange::Plain => event.change = SLIM_EVENT_PLAIN,
            FlowChange::Suspended { errno } => {
                event.change = SLIM_EVENT_SUSPENDED;
                event.error = errno.unwrap_or(0);
            }
            FlowChange::Resumed { replayed, away } => {
                event.change = SLIM_EVENT_RESUMED;
                event.replayed = replayed;
                event.away_ns = nanoseconds(away);
            }
            FlowChange::Reinstated => event.change = SLIM_EVENT_REINSTATED,
            FlowChange::Escalated { errno } => {
                event.change = SLIM_EVENT_ESCALATED;
                event.error = errno.unwrap_or(0);
            }
        }
        event
    }
}

/// The number of a state, and the error number of a failed one.
pub(crate) fn state(state: StreamState) -> (c_int, c_int) {
    match state {
        StreamState::Connecting => (SLIM_STATE_CONNECTING, 0),
        StreamState::Negotiating => (SLIM_STATE_NEGOTIATING, 0),
        StreamState::Protected => (SLIM_STATE_PROTECTED, 0),
        StreamState::Plain => (SLIM_STATE_PLAIN, 0),
        StreamState::Suspended => (SLIM_STATE_SUSPENDED, 0),
        StreamState::Failed(errno) => (SLIM_STATE_FAILED, errno.unwrap_or(0)),
        StreamState::Closed => (SLIM_STATE_CLOSED, 0),
    }
}

/// Copies as much of a structure as the program knows, and sets to zero what only the program knows.
///
/// # Safety
/// `to` is NULL, or points to `size` writable bytes.
pub(crate) unsafe fn copy_out<T: Copy>(
    from: &T,
    to: *mut T,
    size: usize,
) -> Result<isize, crate::codes::Refusal> {
    if to.is_null() {
        return Err(crate::codes::Refusal::INVALID);
    }
    let known = size_of::<T>().min(size);
    let (from, to) = (std::ptr::from_ref(from).cast::<u8>(), to.cast::<u8>());
    // SAFETY: promised by the caller; `known` bytes are within both structures.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, known);
        std::ptr::write_bytes(to.add(known), 0, size - known);
    }
    Ok(0)
}
