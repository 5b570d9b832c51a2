//! The handle that application threads hold.

mod driving;
mod executing;
mod listening;
mod sharing;
pub(crate) mod surveying;

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use slim_core::config::Config;
use slim_core::endpoint::{Agreed, Announcement, MailboxState, Opened, Pairs};
use slim_core::{Cause, FinHow, FlowToken, Role, canonical};

use crate::FlowIo;
use crate::commands::command::{self, Command, CommandReceiver};
use crate::commands::done;
use crate::driven::Driven;
use crate::event_loop::Parts;
use crate::exec::HandedAgent;
use crate::kernel::sys::during;
use crate::listeners::listening::Together;
use crate::listeners::notes;
use crate::offered::guest::AgentGuest;
use crate::thread;
use crate::transport::{Provider, Providers};
use crate::turn;
use slim_sys::cancel::uncancelled;
use slim_sys::fds;
use slim_sys::numbers;
use slim_sys::reserve;
use slim_sys::{SignalMask, as_agent};

/// The process's agent. Cheap to clone; the thread runs until the process ends.
///
/// Methods without a result queue a command and return at once. They may be called from any thread. Methods that name a
/// flow by its token may also be called from signal handlers, if the process's Rust allocator may be used there. After
/// [`after_fork_child`](Self::after_fork_child) all methods do nothing.
#[derive(Clone)]
pub struct Agent {
    inner: Arc<AgentInner>,
}

struct AgentInner {
    /// Fork generation in which the agent was started; see [`Agent::after_fork_child`].
    generation: u64,
    place: AgentPlace,
    /// [`turn::beats`] after a [`flush_unless_stuck`](Agent::flush_unless_stuck) in vain, or [`ANSWERED`].
    in_vain: AtomicU64,
}

const ANSWERED: u64 = u64::MAX;

/// Where the agent is.
#[allow(clippy::large_enum_variant, reason = "a process has few of them")]
enum AgentPlace {
    /// In this copy of SLIM.
    Here(OwnAgent),
    /// In another copy of SLIM in this process.
    Elsewhere(AgentGuest),
}

/// An agent of this copy of SLIM.
struct OwnAgent {
    commands: command::CommandSender,
    together: Together,
    /// The thread has ended.
    ended: AtomicBool,
    runs: Runs,
}

/// How the agent runs.
enum Runs {
    /// On a thread of its own, with this id.
    Alone(i32),
    /// In the threads that drive it.
    Driven(Driven),
}

/// Fork generation; handles from before a fork are inert.
static GENERATION: AtomicU64 = AtomicU64::new(0);

impl Agent {
    /// Creates the process-wide sockets and starts the thread, with all signals blocked in it.
    ///
    /// # Errors
    /// The operating system's error, with the step that failed: no UDP or TCP socket, no descriptor or no thread is
    /// available.
    pub fn start(config: Config) -> io::Result<Agent> {
        Self::start_with(config, Vec::new())
    }

    /// As [`start`](Self::start), with further kinds of transport, the preferred one first. TCP comes last, unless a
    /// provider replaces it.
    ///
    /// # Errors
    /// As [`start`](Self::start), and errors of the providers.
    pub fn start_with(
        config: Config,
        providers: Vec<Box<dyn Provider + Send>>,
    ) -> io::Result<Agent> {
        Self::begin(config, providers, Default::default(), |parts, receiver| {
            thread::start(parts, receiver).map(Runs::Alone)
        })
    }

    /// As [`start`](Self::start), without a thread: the agent works only while the program is in [`drive`](Self::drive), or waits in
    /// one of the calls that say so.
    ///
    /// # Errors
    /// As [`start`](Self::start). Needs /proc.
    pub fn start_driven(config: Config) -> io::Result<Agent> {
        Self::start_driven_with(config, Vec::new())
    }

    /// As [`start_driven`](Self::start_driven), with further kinds of transport, as [`start_with`](Self::start_with).
    ///
    /// # Errors
    /// As [`start_driven`](Self::start_driven), and errors of the providers.
    pub fn start_driven_with(
        config: Config,
        providers: Vec<Box<dyn Provider + Send>>,
    ) -> io::Result<Agent> {
        Self::begin(config, providers, Default::default(), |parts, receiver| {
            Driven::start(parts, receiver).map(Runs::Driven)
        })
    }

    fn at(place: AgentPlace) -> Self {
        let generation = GENERATION.load(Ordering::Acquire);
        let in_vain = AtomicU64::new(ANSWERED);
        let inner = AgentInner {
            generation,
            place,
            in_vain,
        };
        Self {
            inner: Arc::new(inner),
        }
    }

    fn begin(
        config: Config,
        providers: Vec<Box<dyn Provider + Send>>,
        (before, first): (Option<HandedAgent>, Vec<Command>),
        start: impl FnOnce(Parts, CommandReceiver) -> io::Result<Runs>,
    ) -> io::Result<Agent> {
        numbers::begin();
        // Everything is created inside `make`, because the runtime creates descriptors, too.
        let started = numbers::make(|| {
            let (commands, receiver) = command::channel().map_err(during("create an eventfd"))?;
            for command in first {
                commands.send(command);
            }
            let config = with_job_key(config).map_err(io::Error::other)?;
            notes::draw_lineage()?;
            let together = Together::default();
            let providers = Providers::new(&config, providers);
            let parts = Parts::make(config, together.clone(), providers, before)?;
            let runs = start(parts, receiver)?;
            // An agent that is not started has nothing that gives the reserved numbers back.
            reserve::begin(commands.wake_number());
            Ok(Self::at(AgentPlace::Here(OwnAgent {
                commands,
                together,
                ended: AtomicBool::new(false),
                runs,
            })))
        });
        match &started {
            Ok(agent) => agent.register(),
            Err(_) => numbers::end(),
        }
        started
    }

    /// A connection exists: `connect` or `accept` has returned it, or is about to. Addresses are as this side sees
    /// them; IPv4-mapped addresses are accepted.
    ///
    /// The flow begins as [`dirty`](Self::dirty), since most applications send at once. Must be called with signals
    /// blocked.
    ///
    /// Returns false if the agent is gone: no method of `io` will be called.
    pub fn open(
        &self,
        token: FlowToken,
        io: Arc<dyn FlowIo>,
        role: Role,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> bool {
        let (local, remote) = (canonical(local), canonical(remote));
        if role == Role::Acceptor {
            self.find_control_socket(local);
        }
        let open = Command::Open {
            token,
            io,
            role,
            local,
            remote,
        };
        // If mailboxes are in use, the connector may have sent OPEN, and then waits for no answer. If it sent HELLO
        // instead, that datagram wakes the agent.
        let mailboxes = || self.own().is_some_and(|own| own.together.short.in_use());
        let urgent = role == Role::Connector || !mailboxes();
        self.send_when(urgent, open)
    }

    /// Sends OPEN for a new connection, if the process at `remote` is [known](slim_core::endpoint::Pairs). Returns what
    /// was sent, for [`open_known`](Self::open_known); `None` if nothing was. Must be called with signals blocked.
    pub fn dial(&self, local: SocketAddr, remote: SocketAddr) -> Option<Arc<Opened>> {
        let own = self.own()?;
        let (local, remote) = (canonical(local), canonical(remote));
        as_agent(|| own.together.short.dial(local, remote))
    }

    /// As [`open`](Self::open), for a connection whose OPEN was sent by [`dial`](Self::dial).
    pub fn open_known(
        &self,
        token: FlowToken,
        io: Arc<dyn FlowIo>,
        local: SocketAddr,
        opened: Arc<Opened>,
    ) {
        let local = canonical(local);
        let open = Command::OpenKnown {
            token,
            io,
            local,
            opened,
        };
        self.send_when(false, open);
    }

    /// As [`open`](Self::open), for a flow that both ends have agreed on by other means: it is live at once
    /// (`docs/PROTOCOL.md`, section "Flows agreed on by other means").
    /// Returns false if the agent is gone.
    pub fn open_agreed(
        &self,
        token: FlowToken,
        io: Arc<dyn FlowIo>,
        role: Role,
        (local, remote): (SocketAddr, SocketAddr),
        agreed: Agreed,
    ) -> bool {
        self.send(Command::OpenAgreed {
            token,
            io,
            role,
            local: canonical(local),
            remote: canonical(remote),
            agreed: Box::new(agreed),
        })
    }

    /// What the other end of such a flow is to know of this process. Waits for the agent thread, at most `limit`.
    pub fn announcement(&self, limit: Duration) -> Option<Announcement> {
        if let Some(guest) = self.guest() {
            return guest.announcement(limit);
        }
        let answer = Arc::<Mutex<Option<Announcement>>>::default();
        let (done, is_done) = done::done();
        let describe = Command::Describe {
            answer: answer.clone(),
            done,
        };
        let told = self.send(describe) && self.wait(is_done, limit);
        told.then(|| answer.lock().unwrap_or_else(PoisonError::into_inner).take())
            .flatten()
    }

    /// Sends FIN for a flow whose OPEN was sent by [`dial`](Self::dial): the application closes the flow after
    /// `final_seq` bytes. Returns false if that is not possible; then [`finish`](Self::finish) announces the end. Must
    /// be called with signals blocked.
    pub fn announce_close(&self, opened: &Opened, local: SocketAddr, final_seq: u64) -> bool {
        let fin = opened.fin(final_seq, FinHow::Close);
        self.own()
            .is_some_and(|own| as_agent(|| own.together.short.send(opened, canonical(local), &fin)))
    }

    /// As [`finish`](Self::finish) with [`FinHow::Close`], for a flow whose end need not be announced: the peer already
    /// knows it, or the peer has closed the flow before and all of the peer's bytes have been read.
    pub fn finish_announced(&self, token: FlowToken, final_seq: u64) {
        let (how, told) = (FinHow::Close, true);
        let finish = Command::Finish {
            token,
            final_seq,
            how,
            told,
        };
        self.send_when(false, finish);
    }

    /// Reads the mailboxes for messages of the peer about an accepted connection. Must be called with signals blocked.
    pub fn read_mailboxes(&self, local: SocketAddr, remote: SocketAddr) -> MailboxState {
        let (local, remote) = (canonical(local), canonical(remote));
        if let Some(guest) = self.guest() {
            return guest.read_mailboxes(local, remote);
        }
        let short = self.own().map(|own| &own.together.short);
        let Some(short) = short.filter(|short| short.in_use()) else {
            return MailboxState::Nothing;
        };
        let Some(pairs) = short.pairs() else {
            return MailboxState::Nothing;
        };
        let mut heard = pairs.read_mailboxes(short.now(), local, remote);
        let mut enough = |pairs: &Pairs| {
            heard = pairs.read_mailboxes(short.now(), local, remote);
            matches!(heard, MailboxState::Closed(_))
        };
        if !enough(pairs) {
            as_agent(|| short.drain(&mut enough));
            // The agent thread may have emptied the mailbox meanwhile.
            enough(pairs);
        }
        heard
    }

    /// A data call found the transport dead; the front end has suspended the flow.
    ///
    /// Must be called while still holding the lock under which the flow was suspended, the lock that
    /// [`FlowIo::suspend`] takes. Otherwise the peer may resume the flow in between, and this fault would be taken for
    /// a fault of the new transport.
    ///
    /// Returns false if the agent thread is gone: the flow will not be resumed.
    pub fn fault(&self, token: FlowToken, cause: Cause) -> bool {
        self.send(Command::Fault { token, cause })
    }

    /// The front end suspects the path of a flow's connection. The agent tries to replace the connection, over another path first; the
    /// flow goes on with the present one until the new one works.
    pub fn suspect(&self, token: FlowToken) {
        self.send(Command::Suspect { token });
    }

    /// The application has shut its direction after `final_seq` bytes, and keeps the flow. With [`FinHow::Close`] it
    /// has shut the other direction as well, so that the kernel refuses what the peer still sends.
    pub fn shut(&self, token: FlowToken, final_seq: u64, how: FinHow) {
        self.send(Command::Shut {
            token,
            final_seq,
            how,
        });
    }

    /// The application has closed or reset the flow after sending `final_seq` bytes. With [`FinHow::Close`] the agent
    /// keeps the flow until [`FlowIo::undelivered`] returns `None`, or until a limit for such flows is exceeded.
    pub fn finish(&self, token: FlowToken, final_seq: u64, how: FinHow) {
        self.send(Command::Finish {
            token,
            final_seq,
            how,
            told: false,
        });
    }

    /// Announces the flow's end to the peer: the process is about to end, and the kernel will close the flow's
    /// transport. Nothing changes for the flow, which may still be used until then.
    pub fn announce(&self, token: FlowToken, final_seq: u64, how: FinHow) {
        self.send(Command::Announce {
            token,
            final_seq,
            how,
        });
    }

    /// The flow has unacknowledged bytes: the agent probes it about once a second until it has none. To be called once,
    /// and again only after [`FlowIo::probe`] has reported none.
    pub fn dirty(&self, token: FlowToken) {
        self.send(Command::Dirty { token });
    }

    /// The flow is plain TCP from now on (its descriptor went to another process); the peer is told.
    pub fn demote(&self, token: FlowToken) {
        self.send(Command::Demote { token });
    }

    /// The front end has given the flow up, because its stream lacks bytes. The peer is told that the flow is reset, and
    /// [`FlowIo::escalate`] is called unless the flow is plain TCP or over.
    pub fn out_of_step(&self, token: FlowToken) {
        self.send(Command::OutOfStep { token });
    }

    /// Makes the flow plain TCP as soon as the peer has confirmed that, or after it has failed to answer.
    /// [`FlowIo::legacy`] is called at that moment; until then nothing changes.
    pub fn demote_confirmed(&self, token: FlowToken) {
        self.send(Command::DemoteConfirmed { token });
    }

    /// The front end holds nothing of the flow any more.
    pub fn gone(&self, token: FlowToken) {
        self.send(Command::Gone { token });
    }

    /// A connection between these addresses is about to be made: an earlier connection between them is over.
    pub fn about_to_connect(&self, local: SocketAddr, remote: SocketAddr) {
        let (local, remote) = (canonical(local), canonical(remote));
        self.send_when(false, Command::AboutToConnect { local, remote });
    }

    /// Waits at most `limit` until all commands queued by this thread are carried out. Returns whether they are. To be
    /// called before `exec`, which ends the agent, and after [`open`](Self::open) of a connector: its HELLO is then
    /// sent or queued.
    pub fn flush(&self, limit: Duration) -> bool {
        if let Some(guest) = self.guest() {
            return guest.flush(limit);
        }
        let (done, is_done) = done::done();
        self.send(Command::Flush { done }) && self.wait(is_done, limit)
    }

    /// As [`flush`](Self::flush). After one in vain the next ones wait at most `again`, until the agent has run: a debugger may have stopped its
    /// thread, or a system call filter ended it, while the program goes on.
    pub fn flush_unless_stuck(&self, limit: Duration, again: Duration) -> bool {
        let in_vain = &self.inner.in_vain;
        let is_stuck = in_vain.load(Ordering::Relaxed) == turn::beats();
        let done = self.flush(if is_stuck { again } else { limit });
        let after = if done { ANSWERED } else { turn::beats() };
        in_vain.store(after, Ordering::Relaxed);
        done
    }

    /// The process is about to end: flows that are [finished](Self::finish) from now on are kept, however many they are.
    pub fn process_ends(&self) {
        self.send(Command::ProcessEnds);
    }

    /// At process exit, or when a close must wait: sends pending announcements, and waits at most `limit` for closed flows that are
    /// suspended or go through the witness. For all others the kernel delivers the rest. Returns false if the agent thread did not answer
    /// because it is busy or gone.
    pub fn drain_exit(&self, limit: Duration) -> bool {
        let (done, is_done) = done::done();
        // Slightly longer than the agent's own limit, which should expire first.
        let wait = limit + Duration::from_millis(50);
        self.send(Command::DrainExit { limit, done }) && self.wait(is_done, wait)
    }

    /// The first thread of the process ends, with these signals blocked, while others go on. When the last of them has ended, the
    /// agent ends the process by `exit(0)` in a new thread, as the C library would in that last one. The handlers that run at exit find
    /// the agent at work. To be called once.
    pub fn first_thread_ends(&self, mask: SignalMask) {
        self.send(Command::FirstThreadEnds(mask));
    }

    /// Ends the agent thread, and waits at most `limit` for its end. Returns whether it has ended. Commands queued
    /// afterwards are not carried out. An agent of another copy goes on.
    pub fn retire(&self, limit: Duration) -> bool {
        let AgentPlace::Here(own) = &self.inner.place else {
            return false;
        };
        let ended = self.send(Command::Retire)
            && match &own.runs {
                Runs::Alone(thread) => uncancelled(|| thread::wait_for_end(*thread, limit)),
                Runs::Driven(driven) => driven.drive_until(limit, || driven.is_over()),
            };
        if ended && !own.ended.swap(true, Ordering::SeqCst) {
            self.unregister();
            numbers::end();
        }
        ended
    }

    /// In a forked child: closes the descriptors shared with the parent's agent and forgets the
    /// thread, which does not exist here. Every handle from before the fork becomes inert; a new
    /// agent can be started. Async-signal-safe.
    ///
    /// The last handle must be forgotten ([`std::mem::forget`]), not dropped: dropping it could need a lock that the
    /// lost thread held, and would close descriptor numbers that belong to the child.
    pub fn after_fork_child() {
        GENERATION.fetch_add(1, Ordering::AcqRel);
        numbers::forget_in_child();
        fds::close_all_in_child();
        reserve::forget();
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.inner.generation != GENERATION.load(Ordering::Acquire)
    }

    /// The agent of this copy, if it is usable.
    fn own(&self) -> Option<&OwnAgent> {
        match &self.inner.place {
            AgentPlace::Here(own) if !self.is_dead() => Some(own),
            _ => None,
        }
    }

    fn send_when(&self, urgent: bool, command: Command) -> bool {
        match self.own() {
            Some(own) if !urgent => own.commands.send_later(command),
            _ => self.send(command),
        }
    }

    fn send(&self, command: Command) -> bool {
        match &self.inner.place {
            _ if self.is_dead() => false,
            AgentPlace::Here(own) => as_agent(|| own.commands.send(command)),
            AgentPlace::Elsewhere(guest) => guest.send(command),
        }
    }
}

impl fmt::Debug for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Agent")
            .field("dead", &self.is_dead())
            .finish_non_exhaustive()
    }
}

/// Reads the job key, if the configuration names a key file that has not been read yet.
fn with_job_key(mut config: Config) -> Result<Config, String> {
    if let Some(path) = config.job_key_file.clone() {
        let file = read_job_key(&path);
        let file = file.as_ref().map(|(bytes, mode)| (&bytes[..], *mode));
        let taken = config.set_job_key(file.map_err(String::as_str));
        taken.map_err(|problem| problem.to_string())?;
    }
    Ok(config)
}

/// Reads the job key file: its content and its permission bits, as [`Config::set_job_key`] needs them.
///
/// # Errors
/// The reason why it cannot be read.
pub fn read_job_key(path: &Path) -> Result<(Vec<u8>, u32), String> {
    let read = || {
        // Opening a FIFO without a writer must not wait.
        let how = libc::O_NONBLOCK | libc::O_CLOEXEC;
        let mut file = File::options().read(true).custom_flags(how).open(path)?;
        let about = file.metadata()?;
        if !about.is_file() {
            return Err(io::Error::other("not a regular file"));
        }
        let mut bytes = Vec::new();
        // Longer than any key.
        file.by_ref().take(1 << 16).read_to_end(&mut bytes)?;
        Ok((bytes, about.mode() & 0o777))
    };
    read().map_err(|e: io::Error| e.to_string())
}
