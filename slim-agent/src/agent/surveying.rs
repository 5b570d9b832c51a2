//! The agents of this copy of SLIM, and what they know of peers and flows.

use std::mem;
use std::ptr::from_ref;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use libc::{c_int, c_void};
use slim_sys::lock::SignalSafeMutex;

use super::{Agent, AgentInner};
use crate::commands::command::{AgentSurvey, Command};
use crate::commands::done;
use crate::table::offered::{self, FLOWS, PEERS, TakeRow};
use crate::table::per_process::PerProcess;
use crate::table::types::{TableFlow, TablePeer};

static AGENTS: PerProcess<SignalSafeMutex<Vec<Weak<AgentInner>>>> = PerProcess::new();

/// The running agents of this copy.
pub(crate) fn agents() -> Vec<Agent> {
    let mut all = AGENTS.get().lock();
    all.retain(|agent| agent.strong_count() > 0);
    let inner = all.iter().filter_map(Weak::upgrade);
    inner.map(|inner| Agent { inner }).collect()
}

/// Surveys the running agents of this copy: see [`offered::Survey`].
pub(crate) extern "C" fn survey(
    what: u32,
    limit: u64,
    take: TakeRow,
    context: *mut c_void,
) -> c_int {
    let until = Instant::now() + Duration::from_nanos(limit);
    for agent in agents() {
        let Some(found) = agent.survey(until) else {
            return -libc::ETIMEDOUT;
        };
        match what {
            PEERS => give::<_, TablePeer>(found.peers, take, context),
            FLOWS => give::<_, TableFlow>(found.flows, take, context),
            _ => return -libc::EINVAL,
        }
    }
    0
}

fn give<S, R: From<S>>(found: Vec<S>, take: TakeRow, context: *mut c_void) {
    for one in found {
        let row = R::from(one);
        take(context, from_ref(&row).cast(), size_of::<R>());
    }
}

impl Agent {
    /// The agent has begun.
    pub(super) fn register(&self) {
        AGENTS.get().lock().push(Arc::downgrade(&self.inner));
        if let Some(host) = offered::elsewhere() {
            (host.source)(survey, true);
        }
    }

    /// The agent has ended.
    pub(super) fn unregister(&self) {
        let own = Arc::as_ptr(&self.inner);
        let mut all = AGENTS.get().lock();
        all.retain(|agent| agent.as_ptr() != own);
        let last = all.is_empty();
        drop(all);
        if last && let Some(host) = offered::elsewhere() {
            (host.source)(survey, false);
        }
    }

    /// Whether the agent protects flows: it has not ended, and has not panicked.
    pub(crate) fn works(&self) -> bool {
        self.own().is_some_and(|own| !own.commands.is_over())
    }

    /// What the agent knows; nothing if it is gone, and `None` if it does not answer in time.
    fn survey(&self, until: Instant) -> Option<AgentSurvey> {
        let answer = Arc::<Mutex<AgentSurvey>>::default();
        let (done, is_done) = done::done();
        let survey = Command::Survey {
            answer: answer.clone(),
            done,
        };
        let left = until.saturating_duration_since(Instant::now());
        if self.send(survey) && !self.wait(is_done, left) && Instant::now() >= until {
            return None;
        }
        let mut answer = answer.lock().unwrap_or_else(PoisonError::into_inner);
        Some(mem::take(&mut *answer))
    }
}
