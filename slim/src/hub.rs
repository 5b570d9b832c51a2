//! State that the flows and endpoints of a session share: one poll set, updates, events, statistics.

use std::collections::{HashMap, VecDeque};
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
use slim_sys::{Errno, OwnFd};

use crate::blob::JobOf;
use crate::event::{FlowChange, FlowStats, SessionEvent, SessionStats};

/// Limit of events that are kept for the program. Beyond it the oldest are dropped.
const EVENTS: usize = 4096;
/// Events that one `epoll_wait` returns at most.
const BATCH: usize = 64;
/// The eventfd's number in the poll set; numbers of flows and endpoints begin with 1.
const WAKE: u64 = 0;
/// The number of the alarm, a timerfd.
const ALARM: u64 = u64::MAX;
/// First and longest interval of asking the kernel for acknowledgements of posts: the kernel does not report them by itself.
const PUMP_FIRST: Duration = Duration::from_micros(200);
const PUMP_LAST: Duration = Duration::from_millis(20);

/// What has changed about a flow or an endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Update {
    /// The number of the [flow](crate::Flow::id) or [endpoint](crate::Endpoint::id).
    pub id: u64,
    /// For an endpoint: flows may be waiting to be accepted.
    pub acceptable: bool,
    /// A receive may return bytes, the end of the stream, or an error.
    pub readable: bool,
    /// A flow that took no more bytes, or that has just been opened, may take bytes now.
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

/// The program's callback for events.
pub(crate) type Callback = Arc<dyn Fn(&SessionEvent) + Send + Sync>;

/// The shared part of a session.
pub(crate) struct Hub {
    pub(crate) agent: Agent,
    job: String,
    key: Option<JobKey>,
    /// The process that opened the session.
    pid: u32,
    set: OwnedFd,
    wake: OwnFd,
    /// The eventfd is readable, or is about to become so.
    awake: AtomicBool,
    alarm: OwnFd,
    members: Mutex<HashMap<u64, Weak<dyn Member>>>,
    pumped: Mutex<Pumped>,
    /// Flows with posts that still exist, closed ones included.
    posters: Mutex<HashMap<u64, Weak<dyn Member>>>,
    changed: Mutex<Vec<u64>>,
    events: Mutex<Events>,
    callback: Mutex<Option<Callback>>,
    past: Mutex<SessionStats>,
    /// Number of closed flows with undelivered bytes.
    lingering: AtomicU32,
    closed: AtomicBool,
}

#[derive(Default)]
struct Events {
    kept: VecDeque<SessionEvent>,
    lost: u64,
}

/// Flows with posts that are not completed.
struct Pumped {
    /// Kept here until their posts are completed, even if the program drops its handles.
    flows: HashMap<u64, Arc<dyn Member>>,
    /// The next interval of the alarm.
    pause: Duration,
    /// The alarm is set.
    armed: bool,
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
    pub(crate) fn new(agent: Agent, job: &str, key: Option<&JobKey>) -> io::Result<Self> {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = slim_sys::eventfd()?;
        let data = epoll::EventData::new_u64(WAKE);
        epoll::add(&set, &wake, data, epoll::EventFlags::IN)?;
        let alarm = slim_sys::timerfd()?;
        let data = epoll::EventData::new_u64(ALARM);
        epoll::add(&set, &alarm, data, epoll::EventFlags::IN)?;
        Ok(Self {
            agent,
            job: job.to_owned(),
            key: key.cloned(),
            pid: process::id(),
            set,
            wake,
            awake: AtomicBool::new(false),
            alarm,
            members: Mutex::default(),
            pumped: Mutex::new(Pumped {
                flows: HashMap::new(),
                pause: PUMP_FIRST,
                armed: false,
            }),
            posters: Mutex::default(),
            changed: Mutex::default(),
            events: Mutex::default(),
            callback: Mutex::default(),
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

    pub(crate) fn add(&self, id: u64, member: Weak<dyn Member>, is_flow: bool) {
        locked(&self.members).insert(id, member);
        if is_flow {
            locked(&self.past).flows += 1;
        }
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
        stats.lost_events = locked(&self.events).lost;
        stats
    }

    /// Watches a flow's transport, edge-triggered.
    pub(crate) fn watch_flow(&self, fd: &OwnFd, id: u64) -> Result<(), Errno> {
        use epoll::EventFlags as E;
        self.watch(fd, id, E::IN | E::OUT | E::RDHUP | E::ET)
    }

    /// Watches an endpoint's poll set, level-triggered: readable as long as connections wait.
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
        locked(&self.changed).push(id);
        if wake && !self.awake.swap(true, Ordering::AcqRel) {
            slim_sys::signal_eventfd(self.wake.as_raw_fd());
        }
    }

    pub(crate) fn tell(&self, flow: u64, change: FlowChange) {
        let mut events = locked(&self.events);
        if events.kept.len() == EVENTS {
            events.kept.pop_front();
            events.lost += 1;
        }
        events.kept.push_back(SessionEvent { flow, change });
        drop(events);
        if locked(&self.callback).is_some() && !self.awake.swap(true, Ordering::AcqRel) {
            slim_sys::signal_eventfd(self.wake.as_raw_fd());
        }
    }

    pub(crate) fn set_callback(&self, callback: Option<Callback>) {
        *locked(&self.callback) = callback;
    }

    pub(crate) fn take_events(&self, limit: usize) -> Vec<SessionEvent> {
        let mut events = locked(&self.events);
        let count = events.kept.len().min(limit);
        events.kept.drain(..count).collect()
    }

    /// Waits until the poll set is readable, at most `limit`.
    pub(crate) fn wait(&self, limit: Option<Duration>) {
        slim_sys::poll(self.set.as_raw_fd(), libc::POLLIN, limit);
    }

    /// Appends the changes since the last call to `updates`. Calls the callback for events.
    pub(crate) fn progress(&self, updates: &mut Vec<Update>) {
        self.ask_kernel();
        self.pump();
        let mut changed = std::mem::take(&mut *locked(&self.changed));
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
        drop(now);
        let callback = locked(&self.callback).clone();
        if let Some(callback) = callback {
            self.take_events(usize::MAX)
                .iter()
                .for_each(|event| callback(event));
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
                    slim_sys::reset_eventfd(self.alarm.as_raw_fd());
                    locked(&self.pumped).armed = false;
                    continue;
                }
                if id == WAKE {
                    slim_sys::reset_eventfd(self.wake.as_raw_fd());
                    self.awake.store(false, Ordering::Release);
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

    /// Adds a flow with posts to those that are pumped.
    pub(crate) fn pump_later(&self, flow: Arc<dyn Member>) {
        locked(&self.posters).insert(flow.id(), Arc::downgrade(&flow));
        let mut pumped = locked(&self.pumped);
        let before = pumped.flows.insert(flow.id(), flow);
        pumped.pause = PUMP_FIRST;
        self.set_alarm(&mut pumped);
        drop(pumped);
        // This may be the last reference to the flow, so it is dropped after the lock.
        drop(before);
    }

    /// Sets the alarm, after which the kernel is asked for acknowledgements: it does not report them by itself.
    fn set_alarm(&self, pumped: &mut Pumped) {
        if !std::mem::replace(&mut pumped.armed, true) {
            slim_sys::set_timerfd(self.alarm.as_raw_fd(), Some(pumped.pause));
            pumped.pause = (pumped.pause * 2).min(PUMP_LAST);
        }
    }

    /// Pumps all flows with posts. Returns whether posts are left.
    pub(crate) fn pump(&self) -> bool {
        let flows: Vec<_> = locked(&self.pumped).flows.values().cloned().collect();
        if flows.is_empty() {
            return false;
        }
        let mut done = Vec::new();
        for flow in flows {
            if !flow.clone().pump() {
                done.push(flow);
            }
        }
        let mut pumped = locked(&self.pumped);
        for flow in &done {
            // The program may have posted more in the meantime.
            if !flow.is_posting() {
                pumped.flows.remove(&flow.id());
            }
        }
        let any = !pumped.flows.is_empty();
        if any {
            self.set_alarm(&mut pumped);
        }
        drop(pumped);
        any
    }

    /// Resets the alarm's interval after completed posts: the next ones may follow soon.
    pub(crate) fn completes(&self) {
        locked(&self.pumped).pause = PUMP_FIRST;
    }

    /// Waits until the kernel has taken all posts, at most `limit`. Then releases all flows with posts. Returns whether all were taken.
    pub(crate) fn finish_pumping(&self, limit: Duration) -> bool {
        let begun = Instant::now();
        let queued = |hub: &Self| {
            locked(&hub.pumped)
                .flows
                .values()
                .any(|flow| flow.is_queued())
        };
        while self.pump() && queued(self) && begun.elapsed() < limit {
            slim_sys::nap(PUMP_FIRST);
        }
        let sent = !queued(self);
        let rest = std::mem::take(&mut locked(&self.pumped).flows);
        drop(rest);
        sent
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
