//! The handle that application threads hold.

mod listening;

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use slim_core::config::Config;
use slim_core::endpoint::{Agreed, Announcement, Heard, Opened, Pairs};
use slim_core::{Cause, FinHow, FlowToken, Role, canonical};

use crate::FlowIo;
use crate::commands::command::{self, Command};
use crate::commands::done;
use crate::kernel::sys::during;
use crate::listeners::listening::Together;
use crate::listeners::notes;
use crate::thread;
use crate::transport::{Provider, Providers};
use slim_sys::as_agent;
use slim_sys::cancel::uncancelled;
use slim_sys::fds;
use slim_sys::numbers;
use slim_sys::reserve;

/// The process's agent. Cheap to clone; the thread runs until the process ends.
///
/// Methods without a result queue a command and return at once. They may be called from any
/// thread; those that name a flow by its token also from signal handlers, if the process's Rust
/// allocator may be. After [`after_fork_child`](Self::after_fork_child) they do nothing.
#[derive(Clone)]
pub struct Agent {
    inner: Arc<AgentInner>,
}

struct AgentInner {
    commands: command::CommandSender,
    together: Together,
    /// Of the process the thread was started in; see [`Agent::after_fork_child`].
    generation: u64,
    /// The number of the thread.
    thread: i32,
}

/// Counts forks along a line of processes: a handle from before a fork differs, and is dead.
static GENERATION: AtomicU64 = AtomicU64::new(0);

impl Agent {
    /// Creates the process-wide sockets and starts the thread, with all signals blocked in it.
    ///
    /// # Errors
    /// The operating system's, with what was being done: no UDP or TCP socket to be had, no
    /// descriptor, no thread.
    pub fn start(config: Config) -> io::Result<Agent> {
        Self::start_with(config, Vec::new())
    }

    /// The same with other kinds of transport, the preferred one first. TCP comes last, unless a provider takes its place.
    ///
    /// # Errors
    /// Likewise, and those of the providers.
    pub fn start_with(
        config: Config,
        providers: Vec<Box<dyn Provider + Send>>,
    ) -> io::Result<Agent> {
        numbers::begin();
        // The runtime creates descriptors of its own.
        numbers::make(|| {
            let (commands, receiver) = command::channel().map_err(during("create an eventfd"))?;
            let config = with_job_key(config).map_err(io::Error::other)?;
            notes::draw_lineage()?;
            let together = Together::default();
            let thread = thread::start(
                config,
                receiver,
                together.clone(),
                Providers::new(providers),
            )?;
            Ok(Agent {
                inner: Arc::new(AgentInner {
                    commands,
                    together,
                    generation: GENERATION.load(Ordering::Acquire),
                    thread,
                }),
            })
        })
    }

    /// A connection exists: `connect` or `accept` has returned it, or is about to. Addresses are as
    /// this side sees them; IPv4-mapped ones may be given as they are.
    ///
    /// The flow begins as one that is [`dirty`](Self::dirty), since most applications send at once. To be called with
    /// signals blocked.
    pub fn open(
        &self,
        token: FlowToken,
        io: Arc<dyn FlowIo>,
        role: Role,
        local: SocketAddr,
        remote: SocketAddr,
    ) {
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
        // Whoever may say OPEN does not wait for an answer; a HELLO wakes the agent by itself.
        let urgent = role == Role::Connector || !self.inner.together.short.in_use();
        self.send_when(urgent, open);
    }

    /// A connection to a process that is [known](slim_core::endpoint::Pairs) has been made: it is told by OPEN, and
    /// what that was is the answer, for [`open_known`](Self::open_known). To be called with signals blocked.
    pub fn dial(&self, local: SocketAddr, remote: SocketAddr) -> Option<Arc<Opened>> {
        if self.is_dead() {
            return None;
        }
        let (local, remote) = (canonical(local), canonical(remote));
        as_agent(|| self.inner.together.short.dial(local, remote))
    }

    /// As [`open`](Self::open), for a connection that was [dialled](Self::dial).
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
    pub fn open_agreed(
        &self,
        token: FlowToken,
        io: Arc<dyn FlowIo>,
        role: Role,
        (local, remote): (SocketAddr, SocketAddr),
        agreed: Agreed,
    ) {
        self.send(Command::OpenAgreed {
            token,
            io,
            role,
            local: canonical(local),
            remote: canonical(remote),
            agreed: Box::new(agreed),
        });
    }

    /// What the other end of such a flow is to know of this process. Waits for the agent thread, at most `limit`.
    pub fn announcement(&self, limit: Duration) -> Option<Announcement> {
        let answer = Arc::<Mutex<Option<Announcement>>>::default();
        let (done, is_done) = done::done();
        let describe = Command::Describe {
            answer: answer.clone(),
            done,
        };
        let told = self.send(describe) && uncancelled(|| is_done.wait(limit));
        told.then(|| answer.lock().unwrap_or_else(PoisonError::into_inner).take())
            .flatten()
    }

    /// Tells the process that was [told](Self::dial) of a flow that the application closes it after `final_seq` bytes. If
    /// that is not possible, the answer is false, and [`finish`](Self::finish) does it. To be called with signals blocked.
    pub fn say_closed(&self, opened: &Opened, local: SocketAddr, final_seq: u64) -> bool {
        let fin = opened.fin(final_seq, FinHow::Close);
        !self.is_dead()
            && as_agent(|| {
                self.inner
                    .together
                    .short
                    .send(opened, canonical(local), &fin)
            })
    }

    /// As [`finish`](Self::finish) with [`FinHow::Close`], of a flow whose peer knows it already, or has closed it before
    /// and all of whose bytes have been read.
    pub fn finish_told(&self, token: FlowToken, final_seq: u64) {
        let (how, told) = (FinHow::Close, true);
        let finish = Command::Finish {
            token,
            final_seq,
            how,
            told,
        };
        self.send_when(false, finish);
    }

    /// Looks into the mailboxes for what a peer may have said of an accepted connection. To be called with signals
    /// blocked.
    pub fn heard(&self, local: SocketAddr, remote: SocketAddr) -> Heard {
        let short = &self.inner.together.short;
        let pairs = short.pairs().filter(|_| short.in_use() && !self.is_dead());
        let Some(pairs) = pairs else {
            return Heard::Nothing;
        };
        let (local, remote) = (canonical(local), canonical(remote));
        let mut heard = pairs.heard(short.now(), local, remote);
        let mut enough = |pairs: &Pairs| {
            heard = pairs.heard(short.now(), local, remote);
            matches!(heard, Heard::Closed(_))
        };
        if !enough(pairs) {
            as_agent(|| short.drain(&mut enough));
            // The agent's thread may have emptied the mailbox meanwhile.
            enough(pairs);
        }
        heard
    }

    /// A data call found the transport dead; the front end has suspended the flow.
    ///
    /// To be called while still holding the lock under which it was suspended, the one that
    /// [`FlowIo::suspend`] needs. Otherwise the peer may resume the flow in between, and this fault
    /// would be taken for one of the new transport.
    ///
    /// False if the agent thread is gone: nobody resumes the flow.
    pub fn fault(&self, token: FlowToken, cause: Cause) -> bool {
        self.send(Command::Fault { token, cause })
    }

    /// The application has shut its direction after `final_seq` bytes, and keeps the flow. [`FinHow::Close`]: it has shut
    /// the other one as well, so that the kernel refuses what the peer still sends.
    pub fn shut(&self, token: FlowToken, final_seq: u64, how: FinHow) {
        self.send(Command::Shut {
            token,
            final_seq,
            how,
        });
    }

    /// The application has let go of the flow after sending `final_seq` bytes. With [`FinHow::Close`] the agent
    /// keeps it until [`FlowIo::owed`] says that it may go, or too many such flows have to be kept.
    pub fn finish(&self, token: FlowToken, final_seq: u64, how: FinHow) {
        self.send(Command::Finish {
            token,
            final_seq,
            how,
            told: false,
        });
    }

    /// The process is about to end, and the kernel to close the flow's transport: the peer is told. Nothing changes
    /// for the flow, which may still be used until then.
    pub fn announce(&self, token: FlowToken, final_seq: u64, how: FinHow) {
        self.send(Command::Announce {
            token,
            final_seq,
            how,
        });
    }

    /// The flow has unacknowledged bytes: look at it about once a second, until it has none. Call
    /// once, and again only after [`FlowIo::probe`] reported none.
    pub fn dirty(&self, token: FlowToken) {
        self.send(Command::Dirty { token });
    }

    /// The flow is plain TCP from now on (its descriptor went to another process); the peer is told.
    pub fn demote(&self, token: FlowToken) {
        self.send(Command::Demote { token });
    }

    /// The flow is to be plain TCP, as soon as the peer has heard that, which takes as long as an answer takes to come;
    /// without an answer in the end all the same. [`FlowIo::legacy`] says when. Until then nothing changes.
    pub fn demote_heard(&self, token: FlowToken) {
        self.send(Command::DemoteHeard { token });
    }

    /// The front end holds nothing of the flow any more.
    pub fn gone(&self, token: FlowToken) {
        self.send(Command::Gone { token });
    }

    /// A connection is about to be made that has these addresses: an earlier one that had them is over.
    pub fn about_to_connect(&self, local: SocketAddr, remote: SocketAddr) {
        let (local, remote) = (canonical(local), canonical(remote));
        self.send_when(false, Command::AboutToConnect { local, remote });
    }

    /// Waits until everything asked for so far by this thread is done, at most `limit`. True if it
    /// is. Before `exec`, which ends the agent, and after [`open`](Self::open) of a connector, whose HELLO
    /// is sent then, or waits for its turn.
    pub fn flush(&self, limit: Duration) -> bool {
        let (done, is_done) = done::done();
        self.send(Command::Flush { done }) && uncancelled(|| is_done.wait(limit))
    }

    /// At process exit: sends what is announced, and waits at most `limit` for flows that the
    /// application closed while they were suspended. What is live and closed the kernel delivers
    /// by itself. False if the agent thread did not answer: it is busy, or gone.
    pub fn drain_exit(&self, limit: Duration) -> bool {
        let (done, is_done) = done::done();
        // A little longer than the agent's own limit, which is the one that should fire.
        let wait = limit + Duration::from_millis(50);
        self.send(Command::DrainExit { limit, done }) && uncancelled(|| is_done.wait(wait))
    }

    /// The first thread of the process is about to end, and the process goes on with others. The agent's thread will
    /// end with the last of those.
    pub fn first_leaves(&self) {
        self.send(Command::FirstLeaves);
    }

    /// Ends the agent's thread, and waits for that, at most `limit`; whether it has ended. Nothing that is asked for
    /// afterwards is done.
    pub fn retire(&self, limit: Duration) -> bool {
        self.send(Command::Retire) && uncancelled(|| thread::wait_for_end(self.inner.thread, limit))
    }

    /// In a forked child: closes the descriptors shared with the parent's agent and forgets the
    /// thread, which does not exist here. Every handle from before the fork becomes inert; a new
    /// agent can be started. Async-signal-safe.
    ///
    /// The last handle must be forgotten ([`std::mem::forget`]), not dropped: dropping it could
    /// need a lock that the lost thread held, and would close numbers that are the child's own.
    pub fn after_fork_child() {
        GENERATION.fetch_add(1, Ordering::AcqRel);
        numbers::forget_in_child();
        fds::close_all_in_child();
        reserve::forget();
    }

    fn is_dead(&self) -> bool {
        self.inner.generation != GENERATION.load(Ordering::Acquire)
    }

    fn send_when(&self, urgent: bool, command: Command) -> bool {
        if urgent {
            return self.send(command);
        }
        !self.is_dead() && self.inner.commands.send_later(command)
    }

    fn send(&self, command: Command) -> bool {
        !self.is_dead() && as_agent(|| self.inner.commands.send(command))
    }
}

impl fmt::Debug for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Agent")
            .field("dead", &self.is_dead())
            .finish_non_exhaustive()
    }
}

/// Takes the job key where the configuration says it is in a file that has not been read yet.
fn with_job_key(mut config: Config) -> Result<Config, String> {
    if let Some(path) = config.job_key_file.clone() {
        let file = read_job_key(&path);
        let file = file.as_ref().map(|(bytes, mode)| (&bytes[..], *mode));
        let taken = config.set_job_key(file.map_err(String::as_str));
        taken.map_err(|problem| problem.to_string())?;
    }
    Ok(config)
}

/// What [`Config::set_job_key`] wants to know of the file with the job key.
///
/// # Errors
/// Why it cannot be read.
pub fn read_job_key(path: &Path) -> Result<(Vec<u8>, u32), String> {
    let read = || {
        // To open a FIFO that nobody writes to must not wait.
        let how = libc::O_NONBLOCK | libc::O_CLOEXEC;
        let mut file = File::options().read(true).custom_flags(how).open(path)?;
        let about = file.metadata()?;
        if !about.is_file() {
            return Err(io::Error::other("not a regular file"));
        }
        let mut bytes = Vec::new();
        // More than any key has.
        file.by_ref().take(1 << 16).read_to_end(&mut bytes)?;
        Ok((bytes, about.mode() & 0o777))
    };
    read().map_err(|e: io::Error| e.to_string())
}
