//! State that a session shares with its flows and endpoints: contexts, posts, and updates that the program has not taken.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::{mem, ptr};

use slim::{Flow, StreamState, Update};

use crate::codes::{SLIM_ERR_CLOSED, SLIM_ERR_LOST, SLIM_ERR_SHUTDOWN};
use crate::guard::Health;
use crate::posts::{PostLedger, UserPointer};
use crate::types::{
    SLIM_UPDATE_ACCEPTABLE, SLIM_UPDATE_CHANGED, SLIM_UPDATE_ENDED, SLIM_UPDATE_POST,
    SLIM_UPDATE_READABLE, SLIM_UPDATE_WRITABLE, SlimUpdate,
};

/// A flow and its ledger. The program's handle has the only lasting reference.
pub(crate) struct FlowBody {
    pub(crate) flow: Flow,
    pub(crate) ledger: Arc<PostLedger>,
}

/// The shared part of a session.
#[derive(Default)]
pub(crate) struct SessionShared {
    pub(crate) health: Health,
    registry: Mutex<Registry>,
    /// Updates that the program has not taken: one for each flow and endpoint, and one for each post. Locked after the registry.
    pending: Mutex<VecDeque<SlimUpdate>>,
}

#[derive(Default)]
struct Registry {
    members: HashMap<u64, ApiMember>,
    /// Flows whose ledger is not empty.
    posting: BTreeSet<u64>,
    /// Ledgers of closed flows, until they are empty.
    closed: Vec<(u64, Arc<PostLedger>)>,
}

/// A flow or an endpoint that the program has not closed.
struct ApiMember {
    context: UserPointer,
    /// The bits of its update that the program has not taken; 0: there is none.
    untaken: u32,
    /// Upgraded only with the registry locked, so that `close` finds the handle's reference to be the last one.
    flow: Weak<FlowBody>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SessionShared {
    pub(crate) fn add_endpoint(&self, id: u64) {
        self.add(id, Weak::new());
    }

    pub(crate) fn add_flow(&self, flow: Flow) -> Arc<FlowBody> {
        let body = Arc::new(FlowBody {
            flow,
            ledger: Arc::default(),
        });
        self.add(body.flow.id(), Arc::downgrade(&body));
        body
    }

    fn add(&self, id: u64, flow: Weak<FlowBody>) {
        let context = UserPointer(ptr::null_mut());
        let added = ApiMember {
            context,
            untaken: 0,
            flow,
        };
        locked(&self.registry).members.insert(id, added);
    }

    pub(crate) fn set_context(&self, id: u64, context: *mut c_void) {
        if let Some(member) = locked(&self.registry).members.get_mut(&id) {
            member.context = UserPointer(context);
        }
    }

    /// The context of a flow or endpoint; NULL if it is closed.
    pub(crate) fn context(&self, id: u64) -> *mut c_void {
        let registry = locked(&self.registry);
        let member = registry.members.get(&id);
        member.map_or(ptr::null_mut(), |member| member.context.0)
    }

    /// The first post of a flow, or the first after all others were reported.
    pub(crate) fn begins_to_post(&self, id: u64) {
        locked(&self.registry).posting.insert(id);
    }

    /// The program closes an endpoint.
    pub(crate) fn remove(&self, id: u64) {
        locked(&self.registry).members.remove(&id);
        let mut pending = locked(&self.pending);
        pending.retain(|update| update.id != id || update.what == SLIM_UPDATE_POST);
        for update in pending.iter_mut().filter(|update| update.id == id) {
            update.context = ptr::null_mut();
        }
    }

    /// The program closes a flow. Returns it.
    pub(crate) fn remove_flow(&self, body: Arc<FlowBody>) -> Option<Flow> {
        let id = body.flow.id();
        self.remove(id);
        let mut registry = locked(&self.registry);
        if registry.posting.remove(&id) {
            registry.closed.push((id, body.ledger.clone()));
        }
        drop(registry);
        Arc::into_inner(body).map(|body| body.flow)
    }

    /// Takes all flows and contexts out, because the session ends.
    pub(crate) fn clear(&self) {
        let _gone = mem::take(&mut *locked(&self.registry));
        locked(&self.pending).clear();
    }

    /// Whether completions may come that the session's descriptor does not announce.
    pub(crate) fn has_closed_posts(&self) -> bool {
        !locked(&self.registry).closed.is_empty()
    }

    /// Adds updates of the session, and completed posts, to those that the program has not taken.
    pub(crate) fn gather(&self, updates: &[Update]) {
        let mut registry = locked(&self.registry);
        let mut pending = locked(&self.pending);
        for update in updates {
            let Some(member) = registry.members.get_mut(&update.id) else {
                continue;
            };
            let what = what_of(update);
            // A program that takes no updates, or few, must not make the library collect them without end.
            if what != 0 && member.untaken == 0 {
                pending.push_back(SlimUpdate {
                    id: update.id,
                    context: ptr::null_mut(),
                    post: ptr::null_mut(),
                    what: 0,
                    status: 0,
                });
            }
            member.untaken |= what;
        }
        let mut report = |id, context, post: UserPointer, status| {
            pending.push_back(SlimUpdate {
                id,
                context,
                post: post.0,
                what: SLIM_UPDATE_POST,
                status,
            });
        };
        let Registry {
            members,
            posting,
            closed,
        } = &mut *registry;
        posting.retain(|id| {
            let body = members.get(id).and_then(|m| Some((m, m.flow.upgrade()?)));
            body.is_some_and(|(member, body)| {
                let over = over(body.flow.state());
                let context = member.context.0;
                let to = |post, status| report(*id, context, post, status);
                body.ledger.report(body.flow.completed(), over, to)
            })
        });
        closed.retain(|(id, ledger)| {
            ledger.report_closed(|post, status| report(*id, ptr::null_mut(), post, status))
        });
    }

    /// Hands over updates, and returns their number.
    pub(crate) fn take(&self, into: &mut [mem::MaybeUninit<SlimUpdate>]) -> usize {
        let mut registry = locked(&self.registry);
        let mut pending = locked(&self.pending);
        let count = into.len().min(pending.len());
        for (to, mut update) in into.iter_mut().zip(pending.drain(..count)) {
            if update.what != SLIM_UPDATE_POST
                && let Some(member) = registry.members.get_mut(&update.id)
            {
                update.what = mem::take(&mut member.untaken);
                update.context = member.context.0;
            }
            to.write(update);
        }
        count
    }

    pub(crate) fn has_pending(&self) -> bool {
        !locked(&self.pending).is_empty()
    }
}

/// The bits of an update. Completions have updates of their own.
fn what_of(update: &Update) -> u32 {
    [
        (update.acceptable, SLIM_UPDATE_ACCEPTABLE),
        (update.readable, SLIM_UPDATE_READABLE),
        (update.writable, SLIM_UPDATE_WRITABLE),
        (update.changed, SLIM_UPDATE_CHANGED),
        (update.ended, SLIM_UPDATE_ENDED),
    ]
    .into_iter()
    .filter_map(|(set, bit)| set.then_some(bit))
    .sum()
}

/// The status of posts that will never be completed, because the flow has reached this state.
fn over(state: StreamState) -> Option<c_int> {
    match state {
        StreamState::Failed(Some(_)) => Some(SLIM_ERR_LOST),
        StreamState::Failed(None) => Some(SLIM_ERR_SHUTDOWN),
        StreamState::Closed => Some(SLIM_ERR_CLOSED),
        _ => None,
    }
}
