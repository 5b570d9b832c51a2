//! Sessions.

use std::fmt;
use std::io;
use std::mem;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use slim_core::config::{Config, LogLevel};

use crate::agents;
use crate::blob::{Blob, BlobError, DoorKey};
use crate::endpoint::SessionEndpoint;
use crate::error::{ConnectError, SessionError};
use crate::event::{SessionEvent, SessionStats};
use crate::flow::SessionFlow;
use crate::hub::{Hub, Update};

/// How long a session that is dropped waits for what is still to be delivered, and as long for the agent.
const DROPPED: Duration = Duration::from_secs(1);

/// What a session is opened with.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    /// Name of the job, for people.
    pub job: String,
    /// Policy, attempts and time limits, job key, peers. [`Config::from_vars`] reads them from the environment.
    pub config: Config,
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
        }
    }
}

/// All endpoints and flows of one job in this process.
///
/// A session that is dropped is [closed](Self::close), with a limit of a second.
pub struct Session {
    options: SessionOptions,
    hub: Arc<Hub>,
}

impl Session {
    /// Opens a session; starts the agent, unless a session with the same settings has one.
    ///
    /// # Errors
    /// [`SessionError::Agent`]: no socket, descriptor or thread for it.
    pub fn open(mut options: SessionOptions) -> Result<Self, SessionError> {
        read_job_key(&mut options.config).map_err(SessionError::Agent)?;
        let agent = agents::join(&options.config).map_err(SessionError::Agent)?;
        let key = options.config.job_key.as_ref();
        match Hub::new(agent, &options.job, key) {
            Ok(hub) => Ok(Self {
                options,
                hub: Arc::new(hub),
            }),
            Err(e) => {
                agents::leave(&options.config, DROPPED);
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

    /// Accepts flows at this address; with port 0 the kernel chooses one.
    ///
    /// # Errors
    /// [`SessionError::Kernel`]: the address is in use, or none of this host's.
    pub fn listen(&self, addr: SocketAddr) -> Result<SessionEndpoint, SessionError> {
        SessionEndpoint::listen(&self.hub, addr)
    }

    /// Begins to connect to an endpoint, or to any TCP server. The flow is
    /// [connecting](crate::StreamState::Connecting) at first.
    ///
    /// # Errors
    /// Those that the kernel reports at once.
    pub fn try_connect(&self, to: SocketAddr) -> Result<SessionFlow, ConnectError> {
        SessionFlow::connect(&self.hub, to)
    }

    /// Connects; waits at most `limit` until the connection stands. Whether the peer has SLIM is found out meanwhile and later
    /// ([`Flow::wait_negotiated`](crate::Flow::wait_negotiated)).
    ///
    /// # Errors
    /// [`ConnectError::TimedOut`], and those of the kernel.
    pub fn connect(
        &self,
        to: SocketAddr,
        limit: Option<Duration>,
    ) -> Result<SessionFlow, ConnectError> {
        let flow = self.try_connect(to)?;
        flow.wait_connected(limit)?;
        Ok(flow)
    }

    /// Begins to connect to the endpoint that has published this [blob](crate::Endpoint::blob), at the first of its addresses. The
    /// flow is protected as soon as it is connected: nobody is asked. Waits for the agent thread, some microseconds.
    ///
    /// # Errors
    /// [`ConnectError::Blob`], and those that the kernel reports at once.
    pub fn try_connect_blob(&self, blob: &[u8]) -> Result<SessionFlow, ConnectError> {
        let (doors, key) = self.doors(blob)?;
        let first = doors
            .first()
            .ok_or(ConnectError::Blob(BlobError::Garbage))?;
        SessionFlow::connect_by_name(&self.hub, *first, key)
    }

    /// As [`try_connect_blob`](Self::try_connect_blob); tries one address after the other, and waits at most `limit` until the endpoint
    /// has accepted the flow.
    ///
    /// # Errors
    /// [`ConnectError::TimedOut`], [`ConnectError::Blob`], and those of the kernel about the last address. `ECONNREFUSED`: the
    /// endpoint is gone, or does not take us for one of its job.
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
            // Each of those that are left gets as much of the time.
            let share = left.map(|left| left / (doors.len() - n) as u32);
            let connect = || {
                let flow = SessionFlow::connect_by_name(&self.hub, *door, key.clone())?;
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

    /// A descriptor that is readable when [`progress`](Self::progress) may have something to tell: for poll, select or epoll. It
    /// is the session's, and must not be read from or closed.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.hub.descriptor()
    }

    /// Appends what has changed since the last time, one [`Update`] at most for each flow and endpoint, and says whether there
    /// was something. Does not wait. Calls the [callback](Self::on_event).
    pub fn progress(&self, updates: &mut Vec<Update>) -> bool {
        let before = updates.len();
        self.hub.progress(updates);
        updates.len() > before
    }

    /// As [`progress`](Self::progress); waits until something has changed, at most `limit`.
    pub fn wait(&self, updates: &mut Vec<Update>, limit: Option<Duration>) -> bool {
        let until = limit.and_then(|limit| Instant::now().checked_add(limit));
        loop {
            if self.progress(updates) || self.hub.is_closed() {
                return !updates.is_empty();
            }
            let left = until.map(|at| at.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return false;
            }
            self.hub.wait(left);
        }
    }

    /// Has `callback` called with each event, by the thread that calls [`progress`](Self::progress) or [`wait`](Self::wait), and
    /// no other. It takes the place of the one before.
    pub fn on_event(&self, callback: impl Fn(&SessionEvent) + Send + Sync + 'static) {
        self.hub.set_callback(Some(Arc::new(callback)));
    }

    /// What has happened since the last time that was asked. Without a callback up to 4096 events are kept, the last ones.
    pub fn events(&self) -> Vec<SessionEvent> {
        self.hub.take_events()
    }

    /// Counters.
    pub fn stats(&self) -> SessionStats {
        self.hub.stats()
    }

    /// Closes all endpoints and flows. Waits at most `limit` until what was sent is delivered, and, if no other session uses the
    /// agent, ends it, for which there is as much time again.
    ///
    /// # Errors
    /// [`SessionError::TimedOut`]: the agent's thread has not ended; it still will.
    pub fn close(self, limit: Duration) -> Result<(), SessionError> {
        match self.end(limit) {
            true => Ok(()),
            false => Err(SessionError::TimedOut),
        }
    }

    fn end(&self, limit: Duration) -> bool {
        if self.hub.is_parents() || !self.hub.close() {
            return true;
        }
        let begun = Instant::now();
        self.hub.set_callback(None);
        self.hub.finish_pumping(limit);
        self.hub.members().iter().for_each(|member| member.close());
        self.hub
            .wait_for_lingering(limit.saturating_sub(begun.elapsed()));
        agents::leave(
            &self.options.config,
            limit.saturating_sub(begun.elapsed()).max(limit / 2),
        )
    }
}

/// Where the key is in a file that has not been read yet.
fn read_job_key(config: &mut Config) -> io::Result<()> {
    if let Some(path) = config.job_key_file.clone() {
        let file = slim_agent::read_job_key(&path);
        let file = file.as_ref().map(|(bytes, mode)| (&bytes[..], *mode));
        let taken = config.set_job_key(file.map_err(String::as_str));
        taken.map_err(|problem| io::Error::other(problem.to_string()))?;
    }
    Ok(())
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.hub.is_parents() {
            return mem::forget(self.hub.clone());
        }
        self.end(DROPPED);
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
