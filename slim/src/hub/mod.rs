//! State that the flows and endpoints of a session share: one poll set, updates, events, statistics.

mod event_queue;
mod pump;

use std::collections::HashMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::process;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};
use slim_agent::Agent;
use slim_core::auth::JobKey;
use slim_core::config::{Config, Policy};
use slim_sys::{Errno, OwnFd};

use self::event_queue::{Callback, EventQueue};
use self::pump::PostPump;
use crate::blob::JobOf;
use crate::error::NotOpened;
use crate::event::{FlowChange, FlowStats, SessionEvent, SessionStats};

/// Events that one `epoll_wait` returns at most.
const BATCH: usize = 64;
/// The eventfd's number in the poll set; numbers of flows and endpoints begin with 1.
const WAKE: u64 = 0;
/// The number of the alarm, a timerfd.
const ALARM: u64 = u64::MAX;
/// The number of the agent's descriptor, if the agent has no thread.
const AGENT: u64 = u64::MAX - 1;

/// What has changed about a flow or an endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Update {
    /// The number of the [flow](crate::Flow::id) or [endpoint](crate::Endpoint::id).
    pub id: u64,
    /// For an endpoint: flows may be waiting to be accepted.
    pub acceptable: bool,
    /// A receive may return bytes, the end of the stream, or an error.
    pub readable: bool,
    /// The flow may take bytes. Reported when the flow opens, after each resume, and when there is room again after a
    /// [`try_send`](crate::Flow::try_send) that took fewer bytes than it was offered, or none.
    pub writable: bool,
    /// The state of the flow may have changed.
    pub changed: bool,
    /// The flow has failed.
    pub ended: bool,
    /// The peer's kernel has acknowledged more [posts](crate::Flow::post).
    pub completed: bool,
}

/// Bits for the fields of [`Update`].
pub(crate) mod bits {
    pub(crate) const READABLE: u32 = 1;
    pub(crate) const WRITABLE: u32 = 2;
    pub(crate) const CHANGED: u32 = 4;
    pub(crate) const ENDED: u32 = 8;
    pub(crate) const COMPLETED: u32 = 16;
}

/// A member of the poll set.
pub(crate) trait Member: Send + Sync {
    /// Handles an epoll event of the member's descriptor.
    fn ready(self: Arc<Self>, flags: epoll::EventFlags);
    /// Takes the changes since the last call.
    fn take_update(&self) -> Update;
    /// The member's number.
    fn id(&self) -> u64;
    /// Whether posts are not completed yet.
    fn is_posting(&self) -> bool {
        false
    }
    /// Whether the kernel has not taken all posts yet.
    fn is_queued(&self) -> bool {
        false
    }
    /// Closes the member. With `reset` a flow discards undelivered bytes.
    fn close(&self, reset: bool);
    /// Releases the posted buffers that are kept for a replay. If the connection breaks now, the flow ends.
    fn release_posts(&self) {}
    /// Sends queued posts and counts completed ones. Returns whether posts are left.
    fn pump(self: Arc<Self>) -> bool {
        false
    }
    /// The counters of a flow; `None` for an endpoint.
    fn stats(&self) -> Option<FlowStats>;
}

/// The shared part of a session.
pub(crate) struct Hub {
    pub(crate) agent: Agent,
    job: String,
    key: Option<JobKey>,
    /// Flows may not be plain TCP.
    is_required: bool,
    /// The process that opened the session.
    pid: u32,
    set: OwnedFd,
    wake: OwnFd,
    /// The eventfd is readable, or is about to become so.
    awake: AtomicBool,
    members: Mutex<HashMap<u64, Weak<dyn Member>>>,
    pump: PostPump,
    /// The list below is not empty. Written under its lock.
    any_changed: AtomicBool,
    /// Flows with posts that still exist, closed ones included.
    posters: Mutex<HashMap<u64, Weak<dyn Member>>>,
    changed: Mutex<Vec<u64>>,
    events: EventQueue,
    past: Mutex<SessionStats>,
    /// Number of closed flows with undelivered bytes.
    lingering: AtomicU32,
    closed: AtomicBool,
}

static NEXT: AtomicU64 = AtomicU64::new(1);

/// A number that is unique among the flows and endpoints of the process.
pub(crate) fn next_id() -> u64 {
    NEXT.fetch_add(1, Ordering::Relaxed)
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Hub {
    pub(crate) fn new(agent: Agent, job: &str, config: &Config) -> io::Result<Self> {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = slim_sys::eventfd()?;
        let data = epoll::EventData::new_u64(WAKE);
        epoll::add(&set, &wake, data, epoll::EventFlags::IN)?;
        let pump = PostPump::new(slim_sys::timerfd()?);
        let data = epoll::EventData::new_u64(ALARM);
        epoll::add(&set, pump.alarm(), data, epoll::EventFlags::IN)?;
        if let Some(agent) = agent.descriptor() {
            let data = epoll::EventData::new_u64(AGENT);
            epoll::add(&set, slim_sys::at(agent), data, epoll::EventFlags::IN)?;
        }
        Ok(Self {
            agent,
            job: job.to_owned(),
            key: config.job_key.clone(),
            is_required: config.policy == Policy::Required,
            pid: process::id(),
            set,
            wake,
            awake: AtomicBool::new(false),
            members: Mutex::default(),
            pump,
            any_changed: AtomicBool::new(false),
            posters: Mutex::default(),
            changed: Mutex::default(),
            events: EventQueue::default(),
            past: Mutex::default(),
            lingering: AtomicU32::new(0),
            closed: AtomicBool::new(false),
        })
    }

    /// The job whose blobs this session makes and accepts.
    pub(crate) fn job(&self) -> JobOf<'_> {
        JobOf {
            key: self.key.as_ref(),
            name: &self.job,
        }
    }

    /// Whether the settings forbid flows that are plain TCP from the beginning.
    pub(crate) fn is_required(&self) -> bool {
        self.is_required
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }

    /// Whether this process is a forked child of the session's process. There the agent thread is missing, the connections belong to
    /// the parent, and descriptor numbers may be reused. So objects that are dropped there are leaked, not closed.
    pub(crate) fn is_parents(&self) -> bool {
        self.pid != process::id()
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Marks the session as closed. Returns whether it was open until now.
    pub(crate) fn close(&self) -> bool {
        !self.closed.swap(true, Ordering::AcqRel)
    }

    /// Adds a flow or an endpoint to those that [`close`](Self::close) reaches. The caller calls [`remove`](Self::remove) later.
    ///
    /// # Errors
    /// [`NotOpened::Closed`].
    pub(crate) fn add(&self, id: u64, member: Weak<dyn Member>) -> Result<(), NotOpened> {
        let mut members = locked(&self.members);
        // Checked under the lock: who closes the session marks it first, and then locks the members.
        if self.is_closed() {
            return Err(NotOpened::Closed);
        }
        members.insert(id, member);
        Ok(())
    }

    /// Counts a flow that was opened.
    pub(crate) fn opened(&self) {
        locked(&self.past).flows += 1;
    }

    /// Removes a flow or an endpoint. `last`: the counters that a flow adds to the sums.
    pub(crate) fn remove(&self, id: u64, last: Option<FlowStats>) {
        let removed = locked(&self.members).remove(&id);
        if let (Some(_), Some(stats)) = (removed, last) {
            locked(&self.past).total.add(&stats);
        }
    }

    pub(crate) fn failed(&self) {
        locked(&self.past).failed += 1;
    }

    /// The members that are still alive. The caller may hold the last reference to one, and must drop it without holding a lock.
    pub(crate) fn members(&self) -> Vec<Arc<dyn Member>> {
        let members = locked(&self.members);
        members.values().filter_map(Weak::upgrade).collect()
    }

    pub(crate) fn stats(&self) -> SessionStats {
        let mut stats = *locked(&self.past);
        for member in self.members() {
            if let Some(flow) = member.stats() {
                stats.open += 1;
                stats.total.add(&flow);
            }
        }
        stats.lost_events = self.events.lost();
        stats
    }

    /// Watches a flow's transport, edge-triggered.
    pub(crate) fn watch_flow(&self, fd: &OwnFd, id: u64) -> Result<(), Errno> {
        use epoll::EventFlags as E;
        self.watch(fd, id, E::IN | E::OUT | E::RDHUP | E::ET)
    }

    /// Watches the descriptor of a carrier, edge-triggered.
    pub(crate) fn watch_carrier(&self, fd: &OwnFd, id: u64) -> Result<(), Errno> {
        use epoll::EventFlags as E;
        self.watch(fd, id, E::IN | E::ET)
    }

    /// Watches another descriptor of a member, level-triggered: an endpoint's poll set, or an alarm.
    pub(crate) fn watch_set(&self, fd: &OwnFd, id: u64) -> Result<(), Errno> {
        self.watch(fd, id, epoll::EventFlags::IN)
    }

    fn watch(&self, fd: &OwnFd, id: u64, flags: epoll::EventFlags) -> Result<(), Errno> {
        let data = epoll::EventData::new_u64(id);
        epoll::add(&self.set, fd, data, flags).map_err(|e| e.raw_os_error())
    }

    /// Must be called before the descriptor is closed: the agent may hold a copy for a moment, and epoll would go on reporting it.
    pub(crate) fn unwatch(&self, fd: &OwnFd) {
        let _ = epoll::delete(&self.set, fd);
    }

    /// Notes that the member with this number has changed. With `wake` the poll set becomes readable.
    pub(crate) fn change(&self, id: u64, wake: bool) {
        let mut changed = locked(&self.changed);
        changed.push(id);
        self.any_changed.store(true, Ordering::Release);
        drop(changed);
        if wake {
            self.wake();
        }
    }

    /// Makes the poll set readable.
    fn wake(&self) {
        if !self.awake.swap(true, Ordering::AcqRel) {
            slim_sys::signal_eventfd(self.wake.as_raw_fd());
        }
    }

    pub(crate) fn tell(&self, flow: u64, change: FlowChange) {
        if self.events.push(SessionEvent { flow, change }) {
            self.wake();
        }
    }

    pub(crate) fn set_callback(&self, callback: Option<Callback>) {
        self.events.set_callback(callback);
    }

    pub(crate) fn take_events(&self, limit: usize) -> Vec<SessionEvent> {
        self.events.take(limit)
    }

    /// Waits until the poll set is readable, at most `limit`.
    pub(crate) fn wait(&self, limit: Option<Duration>) {
        slim_sys::poll(self.set.as_raw_fd(), libc::POLLIN, limit);
    }

    /// Appends the changes since the last call to `updates`. Calls the callback for events. Where nothing has happened this costs one
    /// system call and takes no lock.
    pub(crate) fn progress(&self, updates: &mut Vec<Update>) {
        self.ask_kernel();
        if self.pump.has_flows() {
            self.pump.pump();
        }
        self.agent.attend();
        if self.any_changed.load(Ordering::Acquire) {
            self.take_changes(updates);
        }
        if self.events.is_due() {
            self.events.call_back();
        }
    }

    fn take_changes(&self, updates: &mut Vec<Update>) {
        let mut list = locked(&self.changed);
        let mut changed = std::mem::take(&mut *list);
        self.any_changed.store(false, Ordering::Release);
        drop(list);
        for id in &changed {
            let member = locked(&self.members).get(id).and_then(Weak::upgrade);
            let update = member.map(|member| member.take_update());
            updates.extend(update.filter(|update| {
                *update
                    != Update {
                        id: *id,
                        ..Update::default()
                    }
            }));
        }
        // Reuse the vector's memory.
        changed.clear();
        let mut now = locked(&self.changed);
        if now.is_empty() {
            *now = changed;
        }
    }

    /// Sleeps for a moment, in a call that waits for something that wakes no thread.
    pub(crate) fn nap(&self, time: Duration) {
        match self.agent.descriptor() {
            Some(agent) => self.agent.wait_for(agent, libc::POLLIN, time),
            None => slim_sys::nap(time),
        }
    }

    fn ask_kernel(&self) {
        let at_once = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // The number of rounds is limited, since level-triggered listeners are reported in every round.
        for _ in 0..BATCH {
            let mut buffer = [MaybeUninit::<epoll::Event>::uninit(); BATCH];
            let Ok((events, _)) = epoll::wait(&self.set, &mut buffer, Some(&at_once)) else {
                return;
            };
            let count = events.len();
            for event in events {
                let id = event.data.u64();
                if id == ALARM {
                    self.pump.expired();
                    continue;
                }
                if id == WAKE {
                    slim_sys::reset_eventfd(self.wake.as_raw_fd());
                    // A swap, not a store: the caller looks for changes next, and must see those whose wake-up found `awake` set.
                    self.awake.swap(false, Ordering::AcqRel);
                    continue;
                }
                if id == AGENT {
                    self.agent.drive();
                    continue;
                }
                let member = locked(&self.members).get(&id).and_then(Weak::upgrade);
                if let Some(member) = member {
                    member.ready(event.flags);
                }
            }
            if count < BATCH {
                return;
            }
        }
    }

    /// Adds a flow with posts to those that are pumped, unless the session is closed.
    pub(crate) fn pump_later(&self, flow: Arc<dyn Member>) {
        locked(&self.posters).insert(flow.id(), Arc::downgrade(&flow));
        self.pump.add(flow);
    }

    /// Posts were completed: the next ones may follow soon.
    pub(crate) fn completes(&self) {
        self.pump.completes();
    }

    /// Waits until the kernel has taken all posts, at most `limit`. Then releases all flows with posts. Returns whether all were taken.
    pub(crate) fn finish_pumping(&self, limit: Duration) -> bool {
        self.pump.finish(limit, |time| self.nap(time))
    }

    /// A flow with posts is dropped.
    pub(crate) fn posts_no_more(&self, id: u64) {
        locked(&self.posters).remove(&id);
    }

    /// Releases the posted buffers of all flows.
    pub(crate) fn release_posts(&self) {
        let posters = std::mem::take(&mut *locked(&self.posters));
        let flows: Vec<_> = posters.values().filter_map(Weak::upgrade).collect();
        flows.iter().for_each(|flow| flow.release_posts());
    }

    /// Counts closed flows with undelivered bytes: one more if `begins`, otherwise one less.
    pub(crate) fn lingers(&self, begins: bool) {
        if begins {
            self.lingering.fetch_add(1, Ordering::AcqRel);
        } else if self.lingering.fetch_sub(1, Ordering::AcqRel) == 1 {
            slim_sys::futex_wake_all(&self.lingering);
        }
    }

    /// Waits until no closed flow has undelivered bytes, at most `limit`.
    pub(crate) fn wait_for_lingering(&self, limit: Duration) {
        let begun = Instant::now();
        if self.agent.is_driven() {
            let none = || self.lingering.load(Ordering::Acquire) == 0;
            self.agent.drive_until(limit, none);
            return;
        }
        loop {
            let lingering = self.lingering.load(Ordering::Acquire);
            let left = limit.saturating_sub(begun.elapsed());
            if lingering == 0 || left.is_zero() {
                return;
            }
            let _ = slim_sys::futex_wait(&self.lingering, lingering, Some(left));
        }
    }
}
