//! Sessions.

use std::fmt;
use std::io;
use std::mem;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use slim_agent::transport::Provider;
use slim_core::config::{Config, LogLevel, Problem};

use crate::agents::{self, AgentThread};
use crate::blob::{Blob, BlobError, DoorKey};
use crate::endpoint::SessionEndpoint;
use crate::error::{ConnectError, SessionError};
use crate::event::{SessionEvent, SessionStats};
use crate::flow::SessionFlow;
use crate::hub::{Hub, Update};

/// Time limit of a dropped session for the delivery of sent bytes, and again for the end of the agent.
const DROPPED: Duration = Duration::from_secs(1);

/// Options of a session.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    /// Name of the job. Blobs are valid only in sessions with the same name.
    pub job: String,
    /// Policy, attempts and time limits, job key, peers. [`Config::from_vars`] reads them from the environment.
    pub config: Config,
    /// The thread on which the session's agent works.
    pub agent_thread: AgentThread,
}

impl SessionOptions {
    /// The default settings, with nothing on standard error.
    pub fn new(job: impl Into<String>) -> Self {
        let config = Config {
            log: LogLevel::Off,
            ..Config::default()
        };
        Self {
            job: job.into(),
            config,
            agent_thread: AgentThread::Own,
        }
    }

    /// Has the session run without a thread: its agent works only while the program is in [`Session::progress`] or [`Session::wait`], or
    /// waits in a blocking call of the session, its endpoints and flows, or in [`Session::close`]. So the program must call `progress`
    /// when [`Session::descriptor`] is readable. docs/LIBRARY.md says what happens if it is late.
    pub fn without_thread(mut self) -> Self {
        self.agent_thread = AgentThread::None;
        self
    }
}

/// All endpoints and flows of one job in this process.
///
/// Dropping a session [closes](Self::close) it with a limit of one second.
pub struct Session {
    options: SessionOptions,
    hub: Arc<Hub>,
}

impl Session {
    /// Opens a session. Starts an agent, unless another session with the same settings, or the preload library, has one.
    ///
    /// # Errors
    /// [`SessionError::Agent`]: the agent got no socket, descriptor or thread, or the job key's file could not be used.
    pub fn open(options: SessionOptions) -> Result<Self, SessionError> {
        Self::open_with(options, Vec::new())
    }

    /// As [`open`](Self::open), with further kinds of transport, the preferred one first. TCP comes last. Flows begin on TCP, and move
    /// to the preferred kind soon after; after a fallback they come back. The connections of a kind must become an `Arc<dyn Carrier>` of
    /// `slim-stream` ([`slim_stream::carrier::IsCarrier`]). The session has an agent of its own.
    ///
    /// # Errors
    /// As [`open`](Self::open), and errors of the providers.
    pub fn open_with(
        mut options: SessionOptions,
        kinds: Vec<Box<dyn Provider + Send>>,
    ) -> Result<Self, SessionError> {
        read_job_key(&mut options.config)
            .map_err(|problem| SessionError::Agent(io::Error::other(problem.to_string())))?;
        let thread = options.agent_thread;
        let agent = agents::join(&options.config, thread, kinds).map_err(SessionError::Agent)?;
        match Hub::new(agent.clone(), &options.job, &options.config) {
            Ok(hub) => Ok(Self {
                options,
                hub: Arc::new(hub),
            }),
            Err(e) => {
                agents::leave(&agent, DROPPED);
                Err(SessionError::Agent(e))
            }
        }
    }

    /// Name of the job.
    pub fn job(&self) -> &str {
        &self.options.job
    }

    /// The settings.
    pub fn config(&self) -> &Config {
        &self.options.config
    }

    /// Opens an endpoint that accepts flows at this address. With port 0 the kernel chooses a port.
    ///
    /// # Errors
    /// [`SessionError::Kernel`]: for example, the address is in use, or does not belong to this host.
    pub fn listen(&self, addr: SocketAddr) -> Result<SessionEndpoint, SessionError> {
        SessionEndpoint::listen(&self.hub, addr)
    }

    /// Begins to connect to an endpoint, or to any TCP server. The flow is
    /// [connecting](crate::StreamState::Connecting) at first.
    ///
    /// # Errors
    /// Errors that the kernel reports at once.
    pub fn try_connect(&self, to: SocketAddr) -> Result<SessionFlow, ConnectError> {
        SessionFlow::connect(&self.hub, to)
    }

    /// Connects; waits at most `limit` until the connection is established. The negotiation with the peer may still go on then
    /// ([`Flow::wait_negotiated`](crate::Flow::wait_negotiated)).
    ///
    /// # Errors
    /// [`ConnectError::TimedOut`], and errors of the kernel.
    pub fn connect(
        &self,
        to: SocketAddr,
        limit: Option<Duration>,
    ) -> Result<SessionFlow, ConnectError> {
        let flow = self.try_connect(to)?;
        flow.wait_connected(limit)?;
        Ok(flow)
    }

    /// Begins to connect to the endpoint with this [blob](crate::Endpoint::blob). Its addresses are tried in order: the next one, if there
    /// is one, when the present one fails or has not admitted this process within three seconds. The flow is protected as soon as it is
    /// connected, without negotiation. The call waits a few microseconds for the agent thread.
    ///
    /// # Errors
    /// [`ConnectError::Blob`], and errors that the kernel reports at once.
    pub fn try_connect_blob(&self, blob: &[u8]) -> Result<SessionFlow, ConnectError> {
        let (doors, key) = self.doors(blob)?;
        SessionFlow::connect_by_name(&self.hub, doors, key)
    }

    /// Like [`try_connect_blob`](Self::try_connect_blob), but tries one address after the other, and waits at most `limit` until the
    /// endpoint has accepted the flow.
    ///
    /// # Errors
    /// [`ConnectError::TimedOut`], [`ConnectError::Blob`], and the kernel's error for the last address. `ECONNREFUSED`: the
    /// endpoint is closed, or does not recognize this process as one of its job.
    pub fn connect_blob(
        &self,
        blob: &[u8],
        limit: Option<Duration>,
    ) -> Result<SessionFlow, ConnectError> {
        let (doors, key) = self.doors(blob)?;
        let until = limit.and_then(|limit| Instant::now().checked_add(limit));
        let mut last = ConnectError::Blob(BlobError::Garbage);
        for (n, door) in doors.iter().enumerate() {
            let left = until.map(|at| at.saturating_duration_since(Instant::now()));
            // The remaining time is divided equally among the remaining addresses.
            let share = left.map(|left| left / (doors.len() - n) as u32);
            let connect = || {
                let flow = SessionFlow::connect_by_name(&self.hub, vec![*door], key.clone())?;
                flow.wait_connected(share)?;
                Ok(flow)
            };
            match connect() {
                Ok(flow) => return Ok(flow),
                Err(e) => last = e,
            }
        }
        Err(last)
    }

    fn doors(&self, blob: &[u8]) -> Result<(Vec<SocketAddr>, DoorKey), ConnectError> {
        let job = self.hub.job();
        let blob = Blob::decode(blob, &job).map_err(ConnectError::Blob)?;
        let key = job.door_key(&blob.secret);
        Ok((blob.doors, key))
    }

    /// A descriptor for poll, select or epoll: readable when [`progress`](Self::progress) may have updates. It belongs to the session:
    /// the program must not read from it or close it.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.hub.descriptor()
    }

    /// Appends the changes since the last call to `updates` and returns whether there were any. Does not wait. Calls the
    /// [callback](Self::on_event). Without an agent thread it does the agent's work; if another thread is doing that, it goes on at
    /// once.
    pub fn progress(&self, updates: &mut Vec<Update>) -> bool {
        let before = updates.len();
        self.hub.progress(updates);
        updates.len() > before
    }

    /// Like [`progress`](Self::progress), but waits for an update, at most `limit`.
    pub fn wait(&self, updates: &mut Vec<Update>, limit: Option<Duration>) -> bool {
        let before = updates.len();
        let until = limit.and_then(|limit| Instant::now().checked_add(limit));
        loop {
            if self.progress(updates) || self.hub.is_closed() {
                return updates.len() > before;
            }
            let left = until.map(|at| at.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return false;
            }
            self.hub.wait(left);
        }
    }

    /// Sets the callback for events, in place of any earlier one. Only [`progress`](Self::progress) and [`wait`](Self::wait) call it,
    /// in the thread that called them. Events reach it one by one, in order. It may call the library. If it panics, so does the call,
    /// and later events are kept for the next one.
    pub fn on_event(&self, callback: impl Fn(&SessionEvent) + Send + Sync + 'static) {
        self.hub.set_callback(Some(Arc::new(callback)));
    }

    /// Takes the events since the last call. Without a callback the last 4096 events are kept.
    pub fn events(&self) -> Vec<SessionEvent> {
        self.hub.take_events(usize::MAX)
    }

    /// Takes the oldest events, at most `limit`.
    pub fn take_events(&self, limit: usize) -> Vec<SessionEvent> {
        self.hub.take_events(limit)
    }

    /// Counters.
    pub fn stats(&self) -> SessionStats {
        self.hub.stats()
    }

    /// Closes all endpoints and flows. Waits at most `limit` until all sent bytes are delivered. If nothing else uses the agent, the
    /// call also ends the agent, which may take about as long again. No [posted](crate::Flow::post) buffer is kept after it.
    ///
    /// # Errors
    /// [`SessionError::TimedOut`]: posts were left that the kernel did not take within the limit, and their flows were reset; or the agent's
    /// thread has not ended yet, and will end later.
    pub fn close(self, limit: Duration) -> Result<(), SessionError> {
        match self.end(limit, false) {
            true => Ok(()),
            false => Err(SessionError::TimedOut),
        }
    }

    /// Closes all endpoints and [resets](crate::Flow::reset) all flows: undelivered bytes are discarded. Waits at most `limit` for
    /// the end of the agent, if no other session uses it.
    ///
    /// # Errors
    /// [`SessionError::TimedOut`]: the agent's thread has not ended yet, and will end later.
    pub fn abort(self, limit: Duration) -> Result<(), SessionError> {
        match self.end(limit, true) {
            true => Ok(()),
            false => Err(SessionError::TimedOut),
        }
    }

    fn end(&self, limit: Duration, reset: bool) -> bool {
        if self.hub.is_parents() || !self.hub.close() {
            return true;
        }
        let begun = Instant::now();
        self.hub.set_callback(None);
        let close_all = |reset| {
            let members = self.hub.members();
            members.iter().for_each(|member| member.close(reset));
        };
        if reset {
            close_all(true);
        }
        let sent = self.hub.finish_pumping(limit) || reset;
        close_all(false);
        self.hub
            .wait_for_lingering(limit.saturating_sub(begun.elapsed()));
        let left = limit.saturating_sub(begun.elapsed()).max(limit / 2);
        let ended = agents::leave(&self.hub.agent, left);
        self.hub.release_posts();
        ended && sent
    }
}

/// Reads the job key from the file that the settings name, if they name one. [`Session::open`] does so, too; this is for programs
/// that want to tell the problem, and to go on: a file that gives no key switches SLIM off.
///
/// # Errors
/// The file cannot be read, others than its owner can use it, or it holds no key.
pub fn read_job_key(config: &mut Config) -> Result<(), Problem> {
    let Some(path) = config.job_key_file.clone() else {
        return Ok(());
    };
    let file = slim_agent::read_job_key(&path);
    let file = file.as_ref().map(|(bytes, mode)| (&bytes[..], *mode));
    config.set_job_key(file.map_err(String::as_str))
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.hub.is_parents() {
            return mem::forget(self.hub.clone());
        }
        self.end(DROPPED, false);
    }
}

impl AsFd for Session {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor()
    }
}

impl AsRawFd for Session {
    fn as_raw_fd(&self) -> RawFd {
        self.descriptor().as_raw_fd()
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("job", &self.options.job)
            .field("closed", &self.hub.is_closed())
            .finish_non_exhaustive()
    }
}
