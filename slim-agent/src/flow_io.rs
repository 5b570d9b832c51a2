//! What a front end does for the agent.

use std::io;
use std::time::Duration;

use slim_core::Verdict;
use slim_stream::{Drained, Probe, Undelivered};
use slim_sys::AckWait;

use crate::handover::{Transport, TransportRef};

/// One flow, as its front end sees it.
///
/// Every method is called on the agent thread, or by the thread that drives an agent without one. It may block only
/// as long as a lock is held for a few instructions, because all flows of the process wait meanwhile. In particular
/// it must not wait for a data call: the agent polls [`idle`](Self::idle) until no call is inside. It must not call
/// the agent and wait for the outcome; queueing a command with [`Agent`](crate::Agent) is fine.
///
/// ```text
///            live()                suspend()            drain()
/// counting ─────────► counting ───────────────► barred ─────────► barred, transport gone
///     │ legacy()                  idle() until true                  │ prepare, trim, replay,
///     ▼                                                              │ stash, install
///  plain TCP                       live again ◄──────────────────────┤
///                                  given up   ◄──────────────────────┘ escalate
/// ```
pub trait FlowIo: Send + Sync + 'static {
    /// The peer has SLIM, and the flow will survive its transport.
    fn live(&self);

    /// The flow is plain TCP from now on: stop counting and buffering, free the memory. With `refused` the policy does
    /// not allow plain TCP, so the application must get an error.
    fn legacy(&self, refused: bool);

    /// Bars new data calls, and cuts the transport so that calls which wait in it return. Returns true when no call is
    /// inside any more; otherwise the agent polls [`idle`](Self::idle) until that is so. Before [`drain`](Self::drain)
    /// and [`escalate`](Self::escalate) this is also called for a flow that the front end has suspended by itself.
    fn suspend(&self) -> bool;

    /// After [`suspend`](Self::suspend): whether no call is inside any more.
    fn idle(&self) -> bool;

    /// Whether the application still holds the connection, and no other process uses it. The application may have
    /// closed it where the front end does not see that. Asked when the peer asks about the flow: if false, the agent
    /// demotes the flow, and the peer believes its own kernel.
    fn is_exclusive(&self) -> bool {
        true
    }

    /// Whether the kernel still has the flow's connection. Once the kernel has given it up, another connection can have
    /// the same addresses and ports.
    fn connection_exists(&self) -> bool {
        true
    }

    /// The kernel's number (`SO_COOKIE`) of the flow's first connection, if known.
    fn connection(&self) -> Option<u64> {
        None
    }

    /// How long that connection has existed, if it was accepted and that is known.
    fn age(&self) -> Option<Duration> {
        None
    }

    /// Drains the old transport into the stash and closes it. Afterwards the received bytes are final, except for
    /// [`stash`](Self::stash). Called while no data call is inside.
    ///
    /// Called again for a flow whose new transport failed during the replay. There is no old transport then, and only
    /// the counters are needed.
    fn drain(&self) -> Drained;

    /// Bytes sent since the flow began. Called while the flow is barred and no call is inside, so the value does not
    /// change.
    fn sent(&self) -> u64;

    /// Appends bytes that the agent read for the flow, and counts them as received.
    fn stash(&self, data: &[u8]);

    /// The peer holds everything before `peer_received`: trims the replay buffer.
    fn trim(&self, peer_received: u64);

    /// Passes the kept bytes from position `from` on to `f`, in contiguous pieces, until `f` takes less than it was
    /// offered or no bytes are left. Returns the position reached. `None` if bytes are missing: the front end has [given the
    /// flow up](crate::Agent::out_of_step).
    fn replay(&self, from: u64, f: &mut dyn FnMut(&[u8]) -> usize) -> Option<u64>;

    /// Whether the application's socket is an IPv6 socket with an IPv4 connection. The flow's later transports must be
    /// such sockets, too.
    fn maps_v4(&self) -> bool {
        false
    }

    /// Called before a connection is made for this flow. Copies the socket options that the kernel evaluates at bind
    /// and connect. On an error the connection is not made and the attempt fails; a front end refuses a kind of
    /// transport this way.
    fn before_connect(&self, transport: TransportRef<'_>) -> io::Result<()>;

    /// Copies the socket options of the application's connection to a new connection, which must stay non-blocking
    /// until [`install`](Self::install). On an error, as in [`before_connect`](Self::before_connect), no bytes of the
    /// flow are sent on it.
    fn prepare(&self, transport: TransportRef<'_>) -> io::Result<()>;

    /// The replay is written: makes `transport`, which was [prepared](Self::prepare), the flow's transport, and wakes
    /// sleepers. If the application has ended its direction, the write side is shut here, as [`Stream::install`](slim_stream::Stream::install)
    /// does. This happens under the lock under which the application ends its direction, because it may do so at any
    /// moment.
    fn install(&self, transport: Transport);

    /// Puts back the old transport, which was suspended but never drained. With `legacy` the flow is plain TCP from now
    /// on, as after [`legacy(false)`](Self::legacy).
    fn reinstate(&self, legacy: bool);

    /// The peer has ended its direction after `seq` bytes: an end of stream at that position is orderly.
    fn peer_final(&self, seq: u64);

    /// Gives the flow up. The application gets the stashed bytes, and then `verdict`. If the flow was suspended, no
    /// call is inside, except one that has not returned within 10 s.
    fn escalate(&self, verdict: Verdict);

    /// Asks the kernel how many bytes the peer has acknowledged, and trims the replay buffer.
    ///
    /// The front end may have suspended the flow by itself a moment ago, while the fault is still on its way to the
    /// agent. Then it must not trim, and must report unacknowledged bytes.
    ///
    /// A front end that records its call of [`Agent::dirty`](crate::Agent::dirty) must clear that record *before* it
    /// reads the state that it then reports as `unacked == 0`. The agent stops probing then, and the next bytes sent
    /// must call `dirty` again.
    fn probe(&self) -> Probe;

    /// What the flow's connection waits for; `None` if all that could be sent is acknowledged, or if it cannot be told: the flow has no
    /// transport, or one of a kind for which a silent path is noticed otherwise.
    fn ack_wait(&self) -> Option<AckWait> {
        None
    }

    /// The transport's stream has ended. Starts or stops (`on`) questions of the kernel to the peer's kernel on that
    /// connection, one every second.
    fn ask_kernel(&self, on: bool) {
        let _ = on;
    }

    /// Whether the peer's kernel has answered such a question within the last `since`, with a segment whose sequence
    /// number lies behind the end of the stream.
    fn kernel_answered(&self, since: Duration) -> bool {
        let _ = since;
        false
    }

    /// The number of bytes after which the application ended its direction, if it has.
    fn local_final(&self) -> Option<u64>;

    /// For a flow that the application has closed: its bytes that the peer has not acknowledged. `None` once the
    /// transport is closed and all bytes sent are acknowledged, or data came in after the close, or the flow was given
    /// up. Never `None` while the flow is suspended.
    fn undelivered(&self) -> Option<Undelivered>;
}
