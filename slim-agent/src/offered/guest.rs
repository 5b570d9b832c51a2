//! The side that uses the agent of another copy: see [`offered`](super).

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::from_mut;
use std::slice;
use std::sync::Arc;
use std::time::Duration;

use libc::c_void;
use slim_core::config::Config;
use slim_core::endpoint::{Announcement, MailboxState};
use slim_core::{FlowToken, Role};
use slim_sys::OwnFd;

use crate::FlowIo;
use crate::commands::command::Command;
use crate::failure::panic;
use crate::handover::{Transport, TransportRef};
use crate::offered::calls::{
    FlowCall, OfferedAgentCalls, PlainCommand, PlainFlow, SYMBOL, TakeBytes, of_agent, of_flow,
};
use crate::offered::plain;

/// The use of another copy's agent.
pub(crate) struct AgentGuest {
    calls: &'static OfferedAgentCalls,
    at: *const c_void,
}

// SAFETY: the host's functions may be called from any thread.
unsafe impl Send for AgentGuest {}
// SAFETY: as above.
unsafe impl Sync for AgentGuest {}

impl AgentGuest {
    /// Begins to use the agent that another copy offers, if one does, and if its settings are these.
    pub(crate) fn join(config: &Config) -> Option<Self> {
        let calls = offered()?;
        let digest = config.digest();
        let at = (calls.join)(&raw const digest);
        if at.is_null() {
            return None;
        }
        panic::set_hook();
        Some(Self { calls, at })
    }

    /// Hands a command over. Returns false if the agent is gone.
    pub(crate) fn send(&self, command: Command) -> bool {
        match command {
            Command::Open {
                token,
                io,
                role,
                local,
                remote,
            } => self.open(of_agent::OPEN, (token, io, role), (local, remote), &[]),
            Command::OpenAgreed {
                token,
                io,
                role,
                local,
                remote,
                agreed,
            } => {
                let agreed = plain::agreed(&agreed);
                let ends = (local, remote);
                self.open(of_agent::OPEN_AGREED, (token, io, role), ends, &agreed)
            }
            Command::Fault { token, cause } => {
                self.of_flow(of_agent::FAULT, token, plain::cause(cause))
            }
            Command::Suspect { token } => self.of_flow(of_agent::SUSPECT, token, [0; 2]),
            Command::Shut {
                token,
                final_seq,
                how,
            } => self.of_flow(of_agent::SHUT, token, [final_seq, plain::how(how)]),
            Command::Finish {
                token,
                final_seq,
                how,
                told: false,
            } => self.of_flow(of_agent::FINISH, token, [final_seq, plain::how(how)]),
            Command::Dirty { token } => self.of_flow(of_agent::DIRTY, token, [0; 2]),
            Command::OutOfStep { token } => self.of_flow(of_agent::OUT_OF_STEP, token, [0; 2]),
            Command::Demote { token } => self.of_flow(of_agent::DEMOTE, token, [0; 2]),
            Command::Gone { token } => self.of_flow(of_agent::GONE, token, [0; 2]),
            // Not used by front ends that share an agent. Threads that wait for one of these are told that nobody answers.
            Command::OpenKnown { .. }
            | Command::OpenHanded { .. }
            | Command::HandOver { .. }
            | Command::Describe { .. }
            | Command::Survey { .. }
            | Command::AboutToConnect { .. }
            | Command::Finish { told: true, .. }
            | Command::Announce { .. }
            | Command::DemoteConfirmed { .. }
            | Command::Listen { .. }
            | Command::Elsewhere { .. }
            | Command::Unlisten { .. }
            | Command::Inform(_)
            | Command::Flush { .. }
            | Command::DrainExit { .. }
            | Command::FirstThreadEnds(_)
            | Command::ProcessEnds
            | Command::EndFlows { .. }
            | Command::Retire => false,
        }
    }

    pub(crate) fn announcement(&self, limit: Duration) -> Option<Announcement> {
        let mut bytes: Vec<u8> = Vec::new();
        let mut command = PlainCommand::new(of_agent::ANNOUNCEMENT, 0, [plain::nanos(limit), 0]);
        command.take = Some(append);
        command.context = from_mut(&mut bytes).cast();
        self.command(&mut command)
            .then(|| plain::as_announcement(&bytes))?
    }

    pub(crate) fn read_mailboxes(&self, local: SocketAddr, remote: SocketAddr) -> MailboxState {
        let mut command = PlainCommand::new(of_agent::READ_MAILBOXES, 0, [0; 2]);
        (command.local, command.remote) = (local.into(), remote.into());
        self.command(&mut command);
        plain::as_mailbox(command.numbers)
    }

    pub(crate) fn listen(&self, fd: BorrowedFd<'_>, addr: SocketAddr) {
        let fd = fd.as_raw_fd().cast_unsigned();
        let mut command = PlainCommand::new(of_agent::LISTEN, 0, [fd.into(), 0]);
        command.local = addr.into();
        self.command(&mut command);
    }

    pub(crate) fn unlisten(&self, addr: SocketAddr) {
        let mut command = PlainCommand::new(of_agent::UNLISTEN, 0, [0; 2]);
        command.local = addr.into();
        self.command(&mut command);
    }

    pub(crate) fn flush(&self, limit: Duration) -> bool {
        let flush = PlainCommand::new(of_agent::FLUSH, 0, [plain::nanos(limit), 0]);
        self.command(&mut { flush })
    }

    /// Whether the agent still takes commands.
    pub(crate) fn is_there(&self) -> bool {
        self.command(&mut PlainCommand::new(of_agent::IS_THERE, 0, [0; 2]))
    }

    /// Has the agent forget all flows of this guest. Returns whether it has released them within `limit`.
    pub(crate) fn leave(&self, limit: Duration) -> bool {
        (self.calls.leave)(self.at, plain::nanos(limit))
    }

    fn open(
        &self,
        kind: u32,
        (token, io, role): (FlowToken, Arc<dyn FlowIo>, Role),
        (local, remote): (SocketAddr, SocketAddr),
        agreed: &[u8],
    ) -> bool {
        let flow = PlainFlow {
            this: Box::into_raw(Box::new(io)).cast(),
            call,
            release,
        };
        let mut command = PlainCommand::new(kind, token.0, [0; 2]);
        command.is_acceptor = role == Role::Acceptor;
        (command.local, command.remote) = (local.into(), remote.into());
        command.flow = &raw const flow;
        (command.data, command.len) = (agreed.as_ptr(), agreed.len());
        self.command(&mut command)
    }

    fn of_flow(&self, kind: u32, token: FlowToken, numbers: [u64; 2]) -> bool {
        self.command(&mut PlainCommand::new(kind, token.0, numbers))
    }

    fn command(&self, command: &mut PlainCommand) -> bool {
        (self.calls.command)(self.at, from_mut(command))
    }
}

impl Drop for AgentGuest {
    fn drop(&mut self) {
        (self.calls.release)(self.at);
    }
}

/// What another copy in this process offers.
fn offered() -> Option<&'static OfferedAgentCalls> {
    // SAFETY: this structure is exported under this name.
    unsafe { slim_sys::copies::look_up(SYMBOL) }
}

extern "C" fn append(bytes: *mut c_void, data: *const u8, len: usize) -> usize {
    // SAFETY: `announcement` passes its own vector, and waits for the host to return; the host passes valid bytes.
    let (bytes, data) = unsafe {
        (
            &mut *bytes.cast::<Vec<u8>>(),
            slice::from_raw_parts(data, len),
        )
    };
    bytes.extend(data);
    len
}

extern "C" fn release(this: *const c_void) {
    // SAFETY: `open` has made it, and the host releases it once.
    let io = unsafe { Box::from_raw(this.cast::<Arc<dyn FlowIo>>().cast_mut()) };
    // A panic must not unwind into the other copy. While the agent's thread ends, one would end the program.
    match panic::is_usable() {
        true => drop(panic::caught(|| drop(io))),
        false => drop(io),
    }
}

extern "C" fn call(this: *const c_void, call: *mut FlowCall) -> bool {
    // The host calls methods in its agent's thread, where signals are blocked for good.
    slim_sys::be_agent_thread();
    // SAFETY: the host passes a flow that it has not released, and a call that nothing else refers to meanwhile.
    let (io, call) = unsafe { (&*this.cast::<Arc<dyn FlowIo>>(), &mut *call) };
    panic::caught(|| answer(&**io, call)).is_ok()
}

/// Calls the method, and puts its results into the call.
fn answer(io: &dyn FlowIo, call: &mut FlowCall) {
    let first = call.numbers[0];
    match call.method {
        of_flow::LIVE => io.live(),
        of_flow::LEGACY => io.legacy(first != 0),
        of_flow::STASH => io.stash(data(call)),
        of_flow::TRIM => io.trim(first),
        of_flow::INSTALL => install(io, as_fd(first), call.numbers[1] != 0),
        of_flow::REINSTATE => io.reinstate(first != 0),
        of_flow::PEER_FINAL => io.peer_final(first),
        of_flow::ESCALATE => io.escalate(plain::as_verdict(call.numbers)),
        of_flow::ASK_KERNEL => io.ask_kernel(first != 0),
        _ => call.numbers = ask(io, call),
    }
}

/// Calls a method that has results.
fn ask(io: &dyn FlowIo, call: &FlowCall) -> [u64; 3] {
    let truth = |is: bool| [is.into(), 0, 0];
    let first = call.numbers[0];
    let transport = || {
        let fd = slim_sys::at(as_fd(first));
        match call.numbers[1] != 0 {
            true => TransportRef::Relayed(fd),
            false => TransportRef::Descriptor(fd),
        }
    };
    match call.method {
        of_flow::SUSPEND => truth(io.suspend()),
        of_flow::IDLE => truth(io.idle()),
        of_flow::IS_EXCLUSIVE => truth(io.is_exclusive()),
        of_flow::CONNECTION_EXISTS => truth(io.connection_exists()),
        of_flow::CONNECTION => plain::option(io.connection()),
        of_flow::AGE => plain::option(io.age().map(plain::nanos)),
        of_flow::DRAIN => {
            let drained = io.drain();
            [drained.received, drained.sent, 0]
        }
        of_flow::SENT => [io.sent(), 0, 0],
        of_flow::REPLAY => plain::option(replay(io, call)),
        of_flow::MAPS_V4 => truth(io.maps_v4()),
        of_flow::BEFORE_CONNECT => refusal(io.before_connect(transport())),
        of_flow::PREPARE => refusal(io.prepare(transport())),
        of_flow::PROBE => plain::probe(io.probe()),
        of_flow::ACK_WAIT => plain::ack_wait(io.ack_wait()),
        of_flow::KERNEL_ANSWERED => truth(io.kernel_answered(Duration::from_nanos(first))),
        of_flow::LOCAL_FINAL => plain::option(io.local_final()),
        of_flow::UNDELIVERED => io
            .undelivered()
            .map_or([0; 3], |rest| [1, rest.kept as u64, rest.acked]),
        // A host calls only what belongs to this version.
        unknown => unreachable!("method {unknown}"),
    }
}

fn refusal(done: io::Result<()>) -> [u64; 3] {
    let errno = |e: io::Error| e.raw_os_error().unwrap_or(libc::ENOTSUP);
    [done.map_or_else(errno, |()| 0).cast_unsigned().into(), 0, 0]
}

fn as_fd(number: u64) -> RawFd {
    (number as u32).cast_signed()
}

fn data(call: &FlowCall) -> &[u8] {
    match call.data.is_null() {
        true => &[],
        // SAFETY: the host passes bytes that stay until the call returns.
        false => unsafe { slice::from_raw_parts(call.data, call.len) },
    }
}

fn replay(io: &dyn FlowIo, call: &FlowCall) -> Option<u64> {
    let (from, context) = (call.numbers[0], call.context);
    let take: TakeBytes = call.take.expect("the host passes it");
    io.replay(from, &mut |bytes| {
        take(context, bytes.as_ptr(), bytes.len())
    })
}

fn install(io: &dyn FlowIo, fd: RawFd, relayed: bool) {
    // SAFETY: the host gives the descriptor away. It stays registered as SLIM's.
    let own = OwnFd::make(|| Ok(unsafe { OwnedFd::from_raw_fd(fd) }));
    if let Ok(own) = own {
        io.install(match relayed {
            true => Transport::Relayed(own),
            false => Transport::Descriptor(own),
        });
    }
}
