//! The side that has the agent: see [`offered`](super).

use std::io;
use std::os::fd::AsRawFd;
use std::ptr::{from_mut, null};
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use libc::c_void;
use slim_core::{FinHow, FlowToken, Role, Verdict};
use slim_stream::{Drained, Probe, Undelivered};
use slim_sys::{AckWait, as_agent};

use crate::commands::command::FlowsEnd;
use crate::handover::{Transport, TransportRef};
use crate::offered::calls::{
    FlowCall, OfferedAgentCalls, PlainCommand, PlainFlow, of_agent, of_flow,
};
use crate::offered::plain;
use crate::{Agent, FlowIo};

/// Set in the tokens of guests' flows.
const HOSTED: u64 = 1 << 63;
/// Bits of a token that its guest assigns; the bits between are the guest's number.
const OWN_BITS: u32 = 40;
/// Interval between two looks at flows that are about to end.
const LOOK: Duration = Duration::from_millis(2);

/// Limit of the wait for threads that open flows. They wait for a lock of the agent, at most 0.2 s.
const OPENED: Duration = Duration::from_secs(1);
/// Limit of the wait for the agent's answer.
const ANSWER: Duration = Duration::from_secs(1);

/// Guests' flows that the agent has.
static FLOWS: AtomicUsize = AtomicUsize::new(0);
/// The process does not use SLIM any more.
static ENDED: AtomicBool = AtomicBool::new(false);
/// Threads that open flows and have seen that `ENDED` was not set.
static OPENING: AtomicUsize = AtomicUsize::new(0);
static NEXT_GUEST: AtomicU64 = AtomicU64::new(0);

/// Has the agent that a copy offers.
pub trait AgentOwner {
    /// The agent, which is started if necessary. `None` if it has other [settings](slim_core::config::Config::serves), or cannot work.
    fn agent(digest: &[u8; 32]) -> Option<Agent>;
}

/// What the copy with this agent offers to others.
pub fn offered<O: AgentOwner>() -> &'static OfferedAgentCalls {
    const {
        &OfferedAgentCalls {
            size: size_of::<OfferedAgentCalls>(),
            join: join::<O>,
            command,
            leave,
            release,
        }
    }
}

/// Whether the agent has flows of guests.
pub fn has_flows() -> bool {
    FLOWS.load(Ordering::Acquire) > 0
}

/// The agent is about to end while its guests go on. Their flows become plain TCP, and the peers are told. Flows without a transport are
/// waited for, at most `limit`, and end with `ECONNRESET` then. Flows that are opened later are plain TCP. Also does what
/// [`drain_exit`](Agent::drain_exit) does, with the same limit.
pub fn step_back(agent: &Agent, limit: Duration) {
    ENDED.store(true, Ordering::SeqCst);
    wait_until_none(&OPENING, OPENED);
    let begun = Instant::now();
    let all = || FlowToken(HOSTED)..=FlowToken(u64::MAX);
    let demote = || agent.end_flows(all(), FlowsEnd::Plain, ANSWER);
    while demote().is_some_and(|left| left > 0) && begun.elapsed() < limit {
        slim_sys::nap(LOOK);
    }
    agent.drain_exit(limit);
    agent.end_flows(all(), FlowsEnd::Lost, ANSWER);
}

/// In a forked child, which has none of its parent's flows.
pub fn after_fork_child() {
    FLOWS.store(0, Ordering::Release);
    OPENING.store(0, Ordering::Release);
}

/// What the host knows of a guest.
struct Hosted {
    agent: Agent,
    number: u64,
    /// Flows that are not released.
    flows: AtomicUsize,
    /// Threads that open flows and have seen that `left` was not set.
    opening: AtomicUsize,
    left: AtomicBool,
}

impl Hosted {
    /// The flow that the guest gives this name.
    fn token(&self, own: u64) -> FlowToken {
        let most = (1 << OWN_BITS) - 1;
        FlowToken(HOSTED | (self.number << OWN_BITS) & !HOSTED | own & most)
    }

    fn is_there(&self) -> bool {
        !self.left.load(Ordering::SeqCst) && !ENDED.load(Ordering::SeqCst)
    }
}

extern "C" fn join<O: AgentOwner>(digest: *const [u8; 32]) -> *const c_void {
    // SAFETY: the guest passes its digest.
    let digest = unsafe { &*digest };
    if ENDED.load(Ordering::Acquire) {
        return null();
    }
    let hosted = O::agent(digest).map(|agent| Hosted {
        agent,
        number: NEXT_GUEST.fetch_add(1, Ordering::Relaxed),
        flows: AtomicUsize::new(0),
        opening: AtomicUsize::new(0),
        left: AtomicBool::new(false),
    });
    hosted.map_or(null(), |hosted| Arc::into_raw(Arc::new(hosted)).cast())
}

extern "C" fn release(at: *const c_void) {
    // SAFETY: `join` has made it, and the guest releases it once.
    drop(unsafe { Arc::from_raw(at.cast::<Hosted>()) });
}

extern "C" fn leave(at: *const c_void, limit: u64) -> bool {
    // SAFETY: the guest has not released it.
    let hosted = unsafe { &*at.cast::<Hosted>() };
    let (begun, limit) = (Instant::now(), Duration::from_nanos(limit));
    hosted.left.store(true, Ordering::SeqCst);
    wait_until_none(&hosted.opening, limit.min(OPENED));
    let own = hosted.token(0)..=hosted.token(u64::MAX);
    // If the agent is gone, it has released them.
    hosted.agent.end_flows(own, FlowsEnd::Forgotten, limit);
    let is_over = || hosted.flows.load(Ordering::Acquire) == 0 || hosted.agent.is_dead();
    while !is_over() && begun.elapsed() < limit {
        slim_sys::nap(Duration::from_micros(50));
    }
    is_over()
}

extern "C" fn command(at: *const c_void, command: *mut PlainCommand) -> bool {
    // SAFETY: the guest has not released the first, and nothing else refers to the second meanwhile.
    let (hosted, command) = unsafe { (shared(at), &mut *command) };
    // Some of the agent's methods require that signals are blocked.
    as_agent(|| carry_out(hosted, command))
}

/// Another reference to what `join` has returned.
///
/// # Safety
/// The guest has not released it.
unsafe fn shared(at: *const c_void) -> Arc<Hosted> {
    let at = at.cast::<Hosted>();
    // SAFETY: `join` has made it from an `Arc`, and the guest owns a reference.
    unsafe {
        Arc::increment_strong_count(at);
        Arc::from_raw(at)
    }
}

fn carry_out(hosted: Arc<Hosted>, command: &mut PlainCommand) -> bool {
    let flow = opened(&hosted, command);
    // Before the look: whatever ends the use of the agent waits until the flow is handed over.
    let _opening = flow.is_some().then(|| Opening::begin(&hosted));
    if !hosted.is_there() {
        return false;
    }
    let (agent, token) = (&hosted.agent, hosted.token(command.token));
    let [first, second] = command.numbers;
    let how = || plain::as_how(second).unwrap_or(FinHow::Reset);
    match command.kind {
        of_agent::SUSPECT => agent.suspect(token),
        of_agent::SHUT => agent.shut(token, first, how()),
        of_agent::FINISH => agent.finish(token, first, how()),
        of_agent::DIRTY => agent.dirty(token),
        of_agent::DEMOTE => agent.demote(token),
        of_agent::OUT_OF_STEP => agent.out_of_step(token),
        of_agent::GONE => agent.gone(token),
        of_agent::LISTEN => {
            let fd = (first as u32).cast_signed();
            agent.listen(slim_sys::at(fd), command.local.into());
        }
        of_agent::UNLISTEN => agent.unlisten(command.local.into()),
        of_agent::READ_MAILBOXES => {
            let heard = agent.read_mailboxes(command.local.into(), command.remote.into());
            command.numbers = plain::mailbox(heard);
        }
        _ => return ask(agent, token, flow, command),
    }
    true
}

/// Carries out a command that may fail. Returns whether it has succeeded.
fn ask(
    agent: &Agent,
    token: FlowToken,
    flow: Option<Arc<HostedFlow>>,
    command: &PlainCommand,
) -> bool {
    let (local, remote) = (command.local.into(), command.remote.into());
    let limit = Duration::from_nanos(command.numbers[0]);
    let role = match command.is_acceptor {
        true => Role::Acceptor,
        false => Role::Connector,
    };
    match command.kind {
        of_agent::OPEN => flow.is_some_and(|flow| agent.open(token, flow, role, local, remote)),
        of_agent::OPEN_AGREED => {
            let agreed = flow.zip(plain::as_agreed(data(command)));
            agreed.is_some_and(|(flow, agreed)| {
                agent.open_agreed(token, flow, role, (local, remote), agreed)
            })
        }
        of_agent::ANNOUNCEMENT => {
            let told = agent.announcement(limit).zip(command.take);
            told.is_some_and(|(told, take)| {
                let bytes = plain::announcement(&told);
                take(command.context, bytes.as_ptr(), bytes.len()) == bytes.len()
            })
        }
        of_agent::FAULT => {
            let cause = plain::as_cause(command.numbers);
            cause.is_some_and(|cause| agent.fault(token, cause))
        }
        of_agent::FLUSH => agent.flush(limit),
        of_agent::IS_THERE => !agent.is_dead(),
        _ => false,
    }
}

/// A thread that opens a flow.
struct Opening<'a>(&'a Hosted);

impl<'a> Opening<'a> {
    fn begin(hosted: &'a Hosted) -> Self {
        OPENING.fetch_add(1, Ordering::SeqCst);
        hosted.opening.fetch_add(1, Ordering::SeqCst);
        Self(hosted)
    }
}

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        OPENING.fetch_sub(1, Ordering::SeqCst);
        self.0.opening.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Waits until no thread opens a flow.
fn wait_until_none(opening: &AtomicUsize, limit: Duration) {
    let begun = Instant::now();
    while opening.load(Ordering::SeqCst) > 0 && begun.elapsed() < limit {
        slim_sys::nap(Duration::from_micros(50));
    }
}

/// The flow that the command passes.
fn opened(hosted: &Arc<Hosted>, command: &PlainCommand) -> Option<Arc<HostedFlow>> {
    // SAFETY: null, or a flow whose reference the guest gives away.
    let flow = unsafe { command.flow.as_ref() }?;
    hosted.flows.fetch_add(1, Ordering::AcqRel);
    FLOWS.fetch_add(1, Ordering::AcqRel);
    Some(Arc::new(HostedFlow {
        flow: *flow,
        hosted: hosted.clone(),
    }))
}

fn data(command: &PlainCommand) -> &[u8] {
    match command.data.is_null() {
        true => &[],
        // SAFETY: the guest passes bytes that stay until the command returns.
        false => unsafe { slice::from_raw_parts(command.data, command.len) },
    }
}

/// A flow of a guest.
struct HostedFlow {
    flow: PlainFlow,
    hosted: Arc<Hosted>,
}

// SAFETY: what the guest passes is a `FlowIo`, which may be used from any thread.
unsafe impl Send for HostedFlow {}
// SAFETY: as above.
unsafe impl Sync for HostedFlow {}

impl HostedFlow {
    fn call_with(&self, mut call: FlowCall) -> [u64; 3] {
        let method = call.method;
        let returned = (self.flow.call)(self.flow.this, from_mut(&mut call));
        // The agent survives this as any mistake of SLIM.
        assert!(
            returned,
            "method {method} of a flow of the program has panicked"
        );
        call.numbers
    }

    fn call(&self, method: u32, number: u64) -> [u64; 3] {
        self.call_with(FlowCall::new(method, [number, 0, 0]))
    }

    fn ask(&self, method: u32) -> bool {
        self.call(method, 0)[0] != 0
    }

    /// Calls a method with a transport, which must have a descriptor.
    fn check(&self, method: u32, transport: TransportRef<'_>) -> io::Result<()> {
        let relayed = matches!(transport, TransportRef::Relayed(_));
        let fd = transport.socket()?.as_raw_fd().cast_unsigned();
        match self.call_with(FlowCall::new(method, [fd.into(), relayed.into(), 0]))[0] {
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(plain::as_errno(errno))),
        }
    }
}

impl Drop for HostedFlow {
    fn drop(&mut self) {
        (self.flow.release)(self.flow.this);
        FLOWS.fetch_sub(1, Ordering::AcqRel);
        // Last: the guest may be unloaded then.
        self.hosted.flows.fetch_sub(1, Ordering::AcqRel);
    }
}

impl FlowIo for HostedFlow {
    fn live(&self) {
        self.call(of_flow::LIVE, 0);
    }

    fn legacy(&self, refused: bool) {
        self.call(of_flow::LEGACY, refused.into());
    }

    fn suspend(&self) -> bool {
        self.ask(of_flow::SUSPEND)
    }

    fn idle(&self) -> bool {
        self.ask(of_flow::IDLE)
    }

    fn is_exclusive(&self) -> bool {
        self.ask(of_flow::IS_EXCLUSIVE)
    }

    fn connection_exists(&self) -> bool {
        self.ask(of_flow::CONNECTION_EXISTS)
    }

    fn connection(&self) -> Option<u64> {
        plain::as_option(self.call(of_flow::CONNECTION, 0))
    }

    fn age(&self) -> Option<Duration> {
        plain::as_option(self.call(of_flow::AGE, 0)).map(Duration::from_nanos)
    }

    fn drain(&self) -> Drained {
        let [received, sent, _] = self.call(of_flow::DRAIN, 0);
        Drained { received, sent }
    }

    fn sent(&self) -> u64 {
        self.call(of_flow::SENT, 0)[0]
    }

    fn stash(&self, data: &[u8]) {
        let mut call = FlowCall::new(of_flow::STASH, [0; 3]);
        (call.data, call.len) = (data.as_ptr(), data.len());
        self.call_with(call);
    }

    fn trim(&self, peer_received: u64) {
        self.call(of_flow::TRIM, peer_received);
    }

    fn replay(&self, from: u64, f: &mut dyn FnMut(&[u8]) -> usize) -> Option<u64> {
        let mut taker: ReplayTaker<'_> = f;
        let mut call = FlowCall::new(of_flow::REPLAY, [from, 0, 0]);
        call.take = Some(take);
        call.context = from_mut(&mut taker).cast();
        plain::as_option(self.call_with(call))
    }

    fn maps_v4(&self) -> bool {
        self.ask(of_flow::MAPS_V4)
    }

    fn before_connect(&self, transport: TransportRef<'_>) -> io::Result<()> {
        self.check(of_flow::BEFORE_CONNECT, transport)
    }

    fn prepare(&self, transport: TransportRef<'_>) -> io::Result<()> {
        self.check(of_flow::PREPARE, transport)
    }

    fn install(&self, transport: Transport) {
        // Other transports are refused before.
        if let Some((fd, relayed)) = transport.into_socket() {
            let fd = fd.leak().cast_unsigned();
            self.call_with(FlowCall::new(
                of_flow::INSTALL,
                [fd.into(), relayed.into(), 0],
            ));
        }
    }

    fn reinstate(&self, legacy: bool) {
        self.call(of_flow::REINSTATE, legacy.into());
    }

    fn peer_final(&self, seq: u64) {
        self.call(of_flow::PEER_FINAL, seq);
    }

    fn escalate(&self, verdict: Verdict) {
        self.call_with(FlowCall::new(of_flow::ESCALATE, plain::verdict(verdict)));
    }

    fn probe(&self) -> Probe {
        plain::as_probe(self.call(of_flow::PROBE, 0))
    }

    fn ack_wait(&self) -> Option<AckWait> {
        plain::as_ack_wait(self.call(of_flow::ACK_WAIT, 0))
    }

    fn ask_kernel(&self, on: bool) {
        self.call(of_flow::ASK_KERNEL, on.into());
    }

    fn kernel_answered(&self, since: Duration) -> bool {
        self.call(of_flow::KERNEL_ANSWERED, plain::nanos(since))[0] != 0
    }

    fn local_final(&self) -> Option<u64> {
        plain::as_option(self.call(of_flow::LOCAL_FINAL, 0))
    }

    fn undelivered(&self) -> Option<Undelivered> {
        let [is_some, kept, acked] = self.call(of_flow::UNDELIVERED, 0);
        let kept = usize::try_from(kept).unwrap_or(usize::MAX);
        (is_some != 0).then_some(Undelivered { kept, acked })
    }
}

/// What takes the bytes of a replay.
type ReplayTaker<'a> = &'a mut dyn FnMut(&[u8]) -> usize;

extern "C" fn take(context: *mut c_void, data: *const u8, len: usize) -> usize {
    // SAFETY: `replay` passes its own closure, and waits for the guest to return; the guest passes valid bytes.
    let (f, data) = unsafe {
        (
            &mut *context.cast::<ReplayTaker<'_>>(),
            slice::from_raw_parts(data, len),
        )
    };
    f(data)
}
