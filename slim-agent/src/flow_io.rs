//! What a front end does for the agent.

use std::io;
use std::time::Duration;

use slim_core::Verdict;
use slim_stream::{Drained, Owed, Probe, Stream};

use crate::handover::{Transport, TransportRef};

/// One flow, as its front end sees it.
///
/// Every method is called on the agent thread and must not block for longer than a lock is held
/// for a few instructions: all flows of the process wait meanwhile. In particular none waits for a data call: the
/// agent asks whether one is [inside](Self::idle) until none is. None may call back into the
/// agent and wait for the outcome; queueing a command with [`Agent`](crate::Agent) is fine.
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
    /// The flow's bytes.
    fn stream(&self) -> &Stream;

    /// The peer has SLIM, and the flow will survive its transport.
    fn live(&self);

    /// The flow is plain TCP from now on: stop counting and buffering, free the memory. `refused`
    /// says that policy does not allow this, so that the application must get an error.
    fn legacy(&self, refused: bool);

    /// Keeps new data calls out, and cuts the transport, so that those which wait in it come out. True when no
    /// call is inside any more; if not, [`idle`](Self::idle) is asked until it is. Also called for a flow that the front end
    /// has suspended by itself, before [`drain`](Self::drain) and [`escalate`](Self::escalate).
    fn suspend(&self) -> bool;

    /// After [`suspend`](Self::suspend): whether no call is inside any more.
    fn idle(&self) -> bool;

    /// Whether the application still has the connection to itself. It may have closed it where the front end does not see it,
    /// or another process may have used it; the peer, which asks about the flow now, is then to believe its kernel.
    fn is_held(&self) -> bool {
        true
    }

    /// Whether the kernel has the flow's connection still. Once it has given it up, another one can have the same addresses
    /// and ports.
    fn stands(&self) -> bool {
        true
    }

    /// The kernel's number of an accepted flow's first connection (`SO_COOKIE`), if that is known.
    fn connection(&self) -> Option<u64> {
        None
    }

    /// For how long that connection has stood, if that is known.
    fn age(&self) -> Option<Duration> {
        None
    }

    /// Reads the old transport dry into the stash and closes it. After that nothing received can
    /// change any more, except by [`stash`](Self::stash). No call is inside.
    ///
    /// Called again for a flow whose new transport failed during the replay; there is no old
    /// transport then, and only the counters are wanted.
    fn drain(&self) -> Drained;

    /// Bytes sent since the flow began. Asked while the flow is barred and no call is inside; does not move then.
    fn sent(&self) -> u64 {
        self.stream().sent()
    }

    /// Appends bytes that the agent read for the flow, and counts them as received.
    fn stash(&self, data: &[u8]);

    /// The peer holds everything before `peer_received`: forget it.
    fn trim(&self, peer_received: u64) {
        self.stream().trim(peer_received);
    }

    /// Hands out the bytes kept from `from` on, in contiguous pieces, until `f` takes less than it
    /// was offered or there are no more. Returns the position reached.
    fn replay(&self, from: u64, f: &mut dyn FnMut(&[u8]) -> usize) -> u64;

    /// Whether the application's socket is an IPv6 one for an IPv4 connection: its transports are to be such, too.
    fn maps_v4(&self) -> bool {
        false
    }

    /// A connection is about to be made for this flow: copies those socket options that the kernel
    /// looks at when it is bound and connected. After an error, which may be that this kind of transport is not taken, it is
    /// not made: the attempt has failed.
    fn before_connect(&self, transport: TransportRef<'_>) -> io::Result<()>;

    /// Makes a fresh connection like the one the application had: copies its socket options. The
    /// connection must stay non-blocking until [`install`](Self::install). After an error, as in
    /// [`before_connect`](Self::before_connect), nothing of the flow is sent on it.
    fn prepare(&self, transport: TransportRef<'_>) -> io::Result<()>;

    /// The replay is written: `transport`, which was [prepared](Self::prepare), is the flow's. Swaps it in and wakes sleepers. If the
    /// application has ended its direction, the write side is shut here, as [`Stream::carried_by`] does, under the lock under
    /// which the application ends it: it may do so at any moment.
    fn install(&self, transport: Transport);

    /// Puts the old transport back, which was suspended but never drained; `legacy` as in
    /// [`legacy`](Self::legacy), with nothing refused.
    fn reinstate(&self, legacy: bool);

    /// The peer has ended its direction after `seq` bytes: an end of stream there is orderly.
    fn peer_final(&self, seq: u64);

    /// The flow is given up. The application gets what is stashed, and then `verdict`. If the flow was suspended no call is
    /// inside, but for one that has not come out in 10 s.
    fn escalate(&self, verdict: Verdict);

    /// Asks the kernel how far the peer has acknowledged, and trims.
    ///
    /// The front end may have suspended the flow by itself a moment ago, with the fault still on
    /// its way to the agent. Then nothing may be trimmed, and the answer must be that something is
    /// unacknowledged.
    ///
    /// A front end that remembers having called [`Agent::dirty`](crate::Agent::dirty) must forget
    /// it *before* it reads what it then reports as `unacked == 0`: the agent stops looking, and
    /// the next bytes sent must call again.
    fn probe(&self) -> Probe;

    /// The transport has ended. Begins, or stops, to have the kernel ask the peer's kernel on it every second.
    fn ask_kernel(&self, on: bool) {
        let _ = on;
    }

    /// Whether the peer's kernel has answered such a question within the time `since`, with a segment from behind the end of
    /// the stream.
    fn kernel_answered(&self, since: Duration) -> bool {
        let _ = since;
        false
    }

    /// After how many bytes the application ended its direction, if it has.
    fn local_final(&self) -> Option<u64> {
        self.stream().local_final()
    }

    /// For a flow that the application has closed: what is owed to the peer. `None` once that is nothing, that is,
    /// all bytes sent are acknowledged (or data came in after the close, or the flow was given
    /// up) and the transport is closed. Something is owed while it is suspended.
    fn owed(&self) -> Option<Owed>;
}
