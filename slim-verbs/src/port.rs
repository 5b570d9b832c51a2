//! What a port of an adapter has: its queue pairs, the agreements on new ones, and the times at which something is due.
//!
//! Nothing here runs by itself. [`turn`](PortShared::turn) is called by the port's task ([`crate::listener`]) when the adapter has something to report, and at the
//! time that the last turn has asked for.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use slim_core::network_distance;
use slim_core::transport::{OtherLocator, TransportKind};
use slim_rdma::agreement::{
    ASK_LIMIT, AnswerLimits, AskFailure, PairAttempt, PairExchange, PairOutcome, PairRefusal,
};
use slim_rdma::ibverbs::VerbsAdapter;
use slim_rdma::{AdapterEvent, Datagrams, PortLocator, QpNumber, QueuePair, Verbs, VerbsError};
use slim_sys::OwnFd;

use crate::mail::PatientMail;
use crate::pair::SharedPair;
use crate::paths::{PairPath, PortChoice, PortPaths};
use crate::settings::VerbsSettings;

/// A question that was given up after so long counts as one without an answer.
const UNANSWERED: Duration = Duration::from_millis(500);

/// A port's queue for datagrams, by which it agrees with others on queue pairs.
pub type PortMail = Box<dyn Datagrams + Send>;

/// An open port, as it is given to a provider.
pub struct VerbsPort<V> {
    /// The port. A clone of it is a handle for one queue pair.
    pub verbs: V,
    /// Readable when [`Verbs::reported`] or [`Verbs::event`] has something to say. Each report makes them readable anew; they are not read.
    pub reports: Vec<OwnFd>,
    /// Its queue for datagrams.
    pub mail: PortMail,
}

impl VerbsPort<VerbsAdapter> {
    /// A port of libibverbs.
    ///
    /// # Errors
    /// The process has no descriptors left, or the adapter no queue pair for datagrams.
    pub fn new(verbs: VerbsAdapter) -> Result<Self, VerbsError> {
        let descriptors = [verbs.completion_descriptor(), verbs.event_descriptor()];
        let same = descriptors.map(|fd| OwnFd::make(|| fd.try_clone_to_owned()));
        let reports = same.into_iter().collect::<io::Result<_>>();
        let of_errno = |e: io::Error| VerbsError::new("dup", e.raw_os_error().unwrap_or_default());
        Ok(VerbsPort {
            reports: reports.map_err(of_errno)?,
            mail: Box::new(PatientMail::new(verbs.datagrams()?)),
            verbs,
        })
    }
}

pub(crate) fn io_error(e: VerbsError) -> io::Error {
    io::Error::from_raw_os_error(e.errno)
}

/// A queue pair that a peer has asked for, as long as it is not known who the peer is.
#[derive(Clone)]
pub(crate) struct StrangersPair(#[allow(dead_code, reason = "it is counted")] Arc<()>);

/// What has become of a question for a queue pair.
enum AskedPair<V: Verbs> {
    Waits(Option<Waker>),
    Answered(io::Result<Arc<SharedPair<V>>>),
}

/// A question for a queue pair.
struct PairQuestion<V: Verbs> {
    path: Arc<PairPath>,
    at: Instant,
    state: AskedPair<V>,
}

struct PortState<V: Verbs + Clone> {
    /// The handle that takes the reports.
    verbs: V,
    exchange: PairExchange<V, PortMail>,
    /// A report was taken that concerns none of `pairs`, but the exchange.
    exchange_is_due: bool,
    up: bool,
    /// The link is up, and the exchange works.
    can_ask: bool,
    pairs: BTreeMap<QpNumber, Weak<SharedPair<V>>>,
    asked: BTreeMap<PairAttempt, PairQuestion<V>>,
    paths: PortPaths,
    /// Those that can be accepted, and where they were asked for.
    proved: VecDeque<(Arc<SharedPair<V>>, OtherLocator, StrangersPair)>,
    /// Of these, and of those that are accepted and no transport yet, each has a copy.
    strangers: StrangersPair,
    /// When queue pairs are looked at again: all that are not armed, and those that owe their peer a count.
    due: BTreeMap<QpNumber, Instant>,
    /// When all check their paths.
    ping_at: Option<Instant>,
    /// `can_ask` has changed since it was last told.
    changed: bool,
    watcher: Option<Waker>,
    task: Option<Waker>,
}

/// A port of a provider.
pub(crate) struct PortShared<V: Verbs + Clone> {
    settings: VerbsSettings,
    state: Mutex<PortState<V>>,
}

impl<V: Verbs + Clone> PortShared<V> {
    pub(crate) fn new(verbs: V, mail: PortMail, settings: VerbsSettings) -> io::Result<Self> {
        let limits = AnswerLimits {
            unproved: settings.most_unproved,
            life: settings.proof_within,
            ..AnswerLimits::default()
        };
        let mut secret = [0; 32];
        getrandom::fill(&mut secret).map_err(io::Error::other)?;
        let now = Instant::now();
        let can_ask = !mail.is_broken();
        let exchange = PairExchange::new(verbs.clone(), mail, settings.sizes, limits, secret, now);
        Ok(PortShared {
            settings,
            state: Mutex::new(PortState {
                verbs,
                exchange,
                exchange_is_due: true,
                up: true,
                can_ask,
                pairs: BTreeMap::new(),
                asked: BTreeMap::new(),
                paths: PortPaths::default(),
                proved: VecDeque::new(),
                strangers: StrangersPair(Arc::new(())),
                due: BTreeMap::new(),
                ping_at: None,
                changed: false,
                watcher: None,
                task: None,
            }),
        })
    }

    fn state(&self) -> MutexGuard<'_, PortState<V>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What speaks against this port for a question to this locator. `None` if queue pairs cannot be made here now, by this side or by peers.
    pub(crate) fn can_ask(&self, to: &OtherLocator) -> Option<PortChoice> {
        let state = self.state();
        let gid = PortLocator::decode(to.bytes()).map(|to| to.gid);
        let choice = PortChoice {
            doubts: state.paths.doubts(to, Instant::now()),
            distance: gid.map_or(0, |gid| {
                network_distance(state.exchange.locator().gid.into(), gid.into())
            }),
            pairs: state.in_use(),
        };
        state.can_ask.then_some(choice)
    }

    /// Where peers ask for queue pairs, unless they cannot now.
    pub(crate) fn locator(&self) -> Option<OtherLocator> {
        let mut state = self.state();
        state.changed = false;
        let bytes = state.exchange.locator().encode();
        let locator = OtherLocator::new(TransportKind::VERBS, &bytes);
        locator.filter(|_| state.can_ask)
    }

    /// Ready when [`locator`](Self::locator) has changed since its last call.
    pub(crate) fn poll_changed(&self, context: &Context<'_>) -> Poll<()> {
        let mut state = self.state();
        state.watcher = Some(context.waker().clone());
        match state.changed {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    }

    /// Asks the process with this locator for a queue pair. To be followed by [`poll_answer`](Self::poll_answer) or [`forget`](Self::forget).
    pub(crate) fn ask(&self, to: &OtherLocator) -> io::Result<PairAttempt> {
        let port = PortLocator::decode(to.bytes()).ok_or(io::ErrorKind::InvalidInput)?;
        let attempt = PairAttempt::random().map_err(io_error)?;
        let mut state = self.state();
        let path = state.paths.to(to);
        let asked = state.exchange.ask(attempt, port, Instant::now(), ASK_LIMIT);
        asked.map_err(|e| {
            path.fails();
            io_error(e)
        })?;
        let question = PairQuestion {
            path,
            at: Instant::now(),
            state: AskedPair::Waits(None),
        };
        state.asked.insert(attempt, question);
        // Its turn sends the question.
        state.exchange_is_due = true;
        state.task.iter().for_each(Waker::wake_by_ref);
        Ok(attempt)
    }

    /// The queue pair, connected and used once. Wakes the task that asked last.
    pub(crate) fn poll_answer(
        &self,
        attempt: PairAttempt,
        context: &Context<'_>,
    ) -> Poll<io::Result<Arc<SharedPair<V>>>> {
        let mut state = self.state();
        let Some(asked) = state.asked.get_mut(&attempt) else {
            return Poll::Ready(Err(io::ErrorKind::NotConnected.into()));
        };
        let waits = AskedPair::Waits(Some(context.waker().clone()));
        match std::mem::replace(&mut asked.state, waits) {
            AskedPair::Waits(_) => Poll::Pending,
            AskedPair::Answered(answer) => {
                state.asked.remove(&attempt);
                Poll::Ready(answer)
            }
        }
    }

    /// Nobody wants the queue pair any more.
    pub(crate) fn forget(&self, attempt: PairAttempt) {
        let mut state = self.state();
        state.exchange.cancel(attempt);
        let asked = state.asked.remove(&attempt);
        if let Some(asked) = asked
            && matches!(asked.state, AskedPair::Waits(_))
            && asked.at.elapsed() >= UNANSWERED
        {
            asked.path.fails();
        }
    }

    /// Something may be due at a queue pair that no completion reports: it is looked at soon.
    pub(crate) fn look_soon(&self, number: QpNumber) {
        self.state().look_soon(number, &self.settings);
    }

    /// A queue pair that a peer has asked for and used, and where it has asked. As long as the last part is kept, it counts as one that is not used.
    pub(crate) fn accept(&self) -> Option<(Arc<SharedPair<V>>, OtherLocator, StrangersPair)> {
        self.state().proved.pop_front()
    }

    /// Does what is due. Returns when the next turn is due, and wakes the task before that if something is to be done earlier.
    pub(crate) fn turn(&self, context: &Context<'_>) -> Option<Instant> {
        let mut state = self.state();
        state.task = Some(context.waker().clone());
        let now = Instant::now();
        state.take_reports(now, &self.settings);
        state.agree(now, &self.settings);
        state.do_what_is_due(now, &self.settings);
        let look_at = state.due.values().min().copied();
        let dues = [look_at, state.ping_at, state.exchange.timeout()];
        dues.into_iter().flatten().min()
    }

    /// Whether a queue pair can be accepted.
    pub(crate) fn has_proved(&self) -> bool {
        !self.state().proved.is_empty()
    }
}

impl<V: Verbs + Clone> PortState<V> {
    fn look_soon(&mut self, number: QpNumber, settings: &VerbsSettings) {
        let at = Instant::now() + settings.tell_after;
        if self.due.values().all(|due| *due > at) {
            self.task.iter().for_each(Waker::wake_by_ref);
        }
        self.look_by(number, at);
    }

    /// Queue pairs that there are, and that are asked for.
    fn in_use(&self) -> usize {
        let pairs = self.pairs.values();
        pairs.filter(|pair| pair.strong_count() > 0).count() + self.asked.len()
    }

    /// The queue pair is looked at by this time.
    fn look_by(&mut self, number: QpNumber, at: Instant) {
        let due = self.due.entry(number).or_insert(at);
        *due = at.min(*due);
    }

    fn take_reports(&mut self, now: Instant, settings: &VerbsSettings) {
        while let Some(number) = self.verbs.reported() {
            let Some(pair) = self.pairs.get(&number).and_then(Weak::upgrade) else {
                self.exchange_is_due = true;
                continue;
            };
            if pair.reported() {
                self.look_by(number, now + settings.tell_after);
            }
        }
        while let Some(event) = self.verbs.event() {
            match event {
                AdapterEvent::PairFailed(_) => self.exchange_is_due = true,
                AdapterEvent::PortUp => self.up = true,
                AdapterEvent::PortDown | AdapterEvent::Removed => self.up = false,
            }
            self.note_whether_it_can_ask();
            self.each_pair(|pair| pair.handle_event(event));
        }
    }

    fn note_whether_it_can_ask(&mut self) {
        let can_ask = self.up && !self.exchange.is_broken();
        if can_ask != self.can_ask {
            (self.can_ask, self.changed) = (can_ask, true);
            self.watcher.iter().for_each(Waker::wake_by_ref);
        }
    }

    /// Goes on with the agreements on new queue pairs.
    fn agree(&mut self, now: Instant, settings: &VerbsSettings) {
        let is_due = std::mem::take(&mut self.exchange_is_due);
        if !is_due && self.exchange.timeout().is_none_or(|at| at > now) {
            return;
        }
        self.hold_strangers();
        while let Some(outcome) = self.exchange.poll(now) {
            match outcome {
                PairOutcome::Connected {
                    attempt,
                    pair,
                    verbs,
                } => {
                    let path = self.path_of(attempt);
                    path.works();
                    let pair = self.adopt(pair, verbs, path, settings);
                    self.answer(attempt, Ok(pair));
                }
                PairOutcome::Failed { attempt, why } => {
                    // What the peer lacks, it lacks for all ports.
                    if why != AskFailure::Refused(PairRefusal::NoPair) {
                        self.path_of(attempt).fails();
                    }
                    self.answer(attempt, Err(why_not(why)));
                }
                PairOutcome::Accepted { key, pair, verbs } => {
                    let from = OtherLocator::new(TransportKind::VERBS, &key.peer.encode());
                    let from = from.expect("27 bytes");
                    let path = self.paths.to(&from);
                    path.works();
                    let pair = self.adopt(pair, verbs, path, settings);
                    self.proved.push_back((pair, from, self.strangers.clone()));
                    self.hold_strangers();
                }
            }
        }
        self.note_whether_it_can_ask();
    }

    fn path_of(&self, attempt: PairAttempt) -> Arc<PairPath> {
        let asked = self.asked.get(&attempt);
        asked.map(|asked| asked.path.clone()).unwrap_or_default()
    }

    fn hold_strangers(&mut self) {
        let strangers = Arc::strong_count(&self.strangers.0) - 1;
        self.exchange.hold(strangers);
    }

    fn answer(&mut self, attempt: PairAttempt, answer: io::Result<Arc<SharedPair<V>>>) {
        if let Some(asked) = self.asked.get_mut(&attempt) {
            let before = std::mem::replace(&mut asked.state, AskedPair::Answered(answer));
            if let AskedPair::Waits(Some(waker)) = before {
                waker.wake();
            }
        }
    }

    /// Has the completions of a queue pair reported, and its path checked.
    fn adopt(
        &mut self,
        pair: QueuePair,
        verbs: V,
        path: Arc<PairPath>,
        settings: &VerbsSettings,
    ) -> Arc<SharedPair<V>> {
        let number = pair.number();
        let pair = Arc::new(SharedPair::new(pair, verbs, path));
        self.pairs.retain(|_, pair| pair.strong_count() > 0);
        self.pairs.insert(number, Arc::downgrade(&pair));
        pair.with(|used| used.arm());
        let ping_at = Instant::now() + settings.ping_every;
        self.ping_at.get_or_insert(ping_at);
        self.look_soon(number, settings);
        pair
    }

    fn each_pair(&self, f: impl FnMut(Arc<SharedPair<V>>)) {
        self.pairs.values().filter_map(Weak::upgrade).for_each(f);
    }

    fn do_what_is_due(&mut self, now: Instant, settings: &VerbsSettings) {
        let pairs = &self.pairs;
        self.due.retain(|number, at| {
            if *at > now {
                return true;
            }
            let pair = pairs.get(number).and_then(Weak::upgrade);
            let pause = pair.and_then(|pair| pair.turn());
            *at = now + settings.tell_after * pause.unwrap_or(0);
            pause.is_some()
        });
        if self.ping_at.is_some_and(|at| at <= now) {
            self.pairs.retain(|_, pair| pair.strong_count() > 0);
            self.each_pair(|pair| pair.ping());
            let more = !self.pairs.is_empty();
            self.ping_at = more.then(|| now + settings.ping_every);
        }
    }
}

fn why_not(why: AskFailure) -> io::Error {
    match why {
        AskFailure::TimedOut => io::Error::from_raw_os_error(libc::ETIMEDOUT),
        AskFailure::Refused(_) => io::Error::from_raw_os_error(libc::ECONNREFUSED),
        AskFailure::Adapter(e) => io_error(e),
    }
}

#[cfg(test)]
mod tests;
