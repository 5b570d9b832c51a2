//! The agents of this process: sessions with equal settings share one. Under the preload library that is the preload library's agent, if
//! it has the same settings, too.

use std::io;
use std::process;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use slim_agent::Agent;
use slim_agent::transport::Provider;
use slim_core::config::Config;

use crate::forks;

/// The thread on which the agent of a session works.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AgentThread {
    /// No thread: the agent works while the program is in [`Session::progress`](crate::Session::progress), or waits in a blocking call.
    None,
    /// A thread of its own. Sessions with equal settings share it; under the preload library, if that has these settings, too, it is the
    /// preload library's thread.
    #[default]
    Own,
}

/// An agent, with the sessions that use it.
struct JoinedAgent {
    config: Config,
    thread: AgentThread,
    /// It has kinds of transport of its own, so no other session uses it.
    alone: bool,
    agent: Agent,
    sessions: usize,
}

/// The agents of one process.
struct AgentTable {
    pid: u32,
    agents: Mutex<Vec<JoinedAgent>>,
}

/// The table of this process. Tables are never freed. A forked child makes a new one: its parent's agents have no thread there, and
/// another thread of the parent may have held the parent's lock at the fork.
static TABLE: AtomicPtr<AgentTable> = AtomicPtr::new(ptr::null_mut());

fn agents() -> MutexGuard<'static, Vec<JoinedAgent>> {
    loop {
        let present = TABLE.load(Ordering::Acquire);
        // SAFETY: null, or a table that was leaked below.
        let table = unsafe { present.as_ref() };
        if let Some(table) = table.filter(|table| table.pid == process::id()) {
            return table.agents.lock().unwrap_or_else(PoisonError::into_inner);
        }
        forks::register();
        let own = Box::leak(Box::new(AgentTable {
            pid: process::id(),
            agents: Mutex::default(),
        }));
        let at = ptr::from_mut(own);
        // Locked before other threads see it, so that none of them starts an agent before the parent's are forgotten.
        let agents = own.agents.lock().unwrap_or_else(PoisonError::into_inner);
        let first = TABLE.compare_exchange(present, at, Ordering::AcqRel, Ordering::Relaxed);
        if first.is_ok() {
            if !present.is_null() {
                Agent::after_fork_child();
            }
            return agents;
        }
    }
}

/// Returns the agent for these settings and this kind of thread; starts it if necessary. With further kinds of transport it always starts one.
/// The caller must call [`leave`] later.
///
/// # Errors
/// The agent cannot be started.
pub(crate) fn join(
    config: &Config,
    thread: AgentThread,
    kinds: Vec<Box<dyn Provider + Send>>,
) -> io::Result<Agent> {
    let mut agents = agents();
    // Before the first descriptor is made.
    slim_sys::copies::join();
    let alone = !kinds.is_empty();
    let usable = |shared: &&mut JoinedAgent| {
        !(alone || shared.alone)
            && shared.config == *config
            && shared.thread == thread
            && !shared.agent.has_left()
    };
    if let Some(shared) = agents.iter_mut().find(usable) {
        shared.sessions += 1;
        return Ok(shared.agent.clone());
    }
    let agent = forks::keep_out(|| match thread {
        AgentThread::None => Agent::start_driven_with(config.clone(), kinds),
        AgentThread::Own if alone => Agent::start_with(config.clone(), kinds),
        AgentThread::Own => match Agent::join(config) {
            Some(agent) => Ok(agent),
            None => Agent::start(config.clone()),
        },
    })?;
    agents.push(JoinedAgent {
        config: config.clone(),
        thread,
        alone,
        agent: agent.clone(),
        sessions: 1,
    });
    Ok(agent)
}

/// Ends the use of an agent by one session. The last session ends the agent: it waits at most `limit` for the delivery of sent bytes,
/// and at most `limit` again for the agent thread. Returns false if that thread has not ended. The preload library's agent goes on, but
/// forgets the flows of these sessions.
pub(crate) fn leave(agent: &Agent, limit: Duration) -> bool {
    let mut all = agents();
    let Some(at) = all.iter().position(|shared| shared.agent.is_same(agent)) else {
        return true;
    };
    all[at].sessions -= 1;
    if all[at].sessions > 0 {
        return true;
    }
    let shared = all.swap_remove(at);
    // A session that is opened meanwhile with the same settings starts a new agent.
    drop(all);
    if shared.agent.is_elsewhere() {
        return shared.agent.leave(limit);
    }
    shared.agent.drain_exit(limit);
    forks::keep_out(|| shared.agent.retire(limit))
}
