//! The agents of this process: sessions with equal settings share one.

use std::io;
use std::mem;
use std::process;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use slim_agent::Agent;
use slim_core::config::Config;

/// The thread on which the agent of a session works.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AgentThread {
    /// No thread: the agent works while the program is in [`Session::progress`](crate::Session::progress), or waits in a blocking call.
    None,
    /// A thread of its own.
    #[default]
    Own,
}

/// An agent, with the sessions that use it.
struct JoinedAgent {
    config: Config,
    thread: AgentThread,
    agent: Agent,
    sessions: usize,
    /// The process that started the agent: a forked child does not have the agent thread.
    pid: u32,
}

static AGENTS: Mutex<Vec<JoinedAgent>> = Mutex::new(Vec::new());

fn agents() -> MutexGuard<'static, Vec<JoinedAgent>> {
    AGENTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the agent for these settings and this kind of thread; starts it if necessary. The caller must call [`leave`] later.
///
/// # Errors
/// The agent cannot be started.
pub(crate) fn join(config: &Config, thread: AgentThread) -> io::Result<Agent> {
    let mut agents = agents();
    // Before the first descriptor is made.
    slim_sys::copies::join();
    forget_parents(&mut agents);
    let found = agents
        .iter_mut()
        .find(|shared| shared.config == *config && shared.thread == thread);
    if let Some(shared) = found {
        shared.sessions += 1;
        return Ok(shared.agent.clone());
    }
    let agent = match thread {
        AgentThread::None => Agent::start_driven(config.clone()),
        AgentThread::Own => Agent::start(config.clone()),
    }?;
    agents.push(JoinedAgent {
        config: config.clone(),
        thread,
        agent: agent.clone(),
        sessions: 1,
        pid: process::id(),
    });
    Ok(agent)
}

/// Ends the use of an agent by one session. The last session ends the agent: it waits at most `limit` for the delivery of sent bytes,
/// and at most `limit` again for the agent thread. Returns false if that thread has not ended.
pub(crate) fn leave(config: &Config, thread: AgentThread, limit: Duration) -> bool {
    let mut all = agents();
    let is_it = |shared: &JoinedAgent| shared.config == *config && shared.thread == thread;
    let Some(at) = all.iter().position(is_it) else {
        return true;
    };
    all[at].sessions -= 1;
    if all[at].sessions > 0 {
        return true;
    }
    let shared = all.swap_remove(at);
    // A session that is opened meanwhile with the same settings starts a new agent.
    drop(all);
    if shared.pid != process::id() {
        mem::forget(shared.agent);
        return true;
    }
    shared.agent.drain_exit(limit);
    shared.agent.retire(limit)
}

/// Forgets the parent's agents in a forked child, where only their descriptors are left.
fn forget_parents(agents: &mut Vec<JoinedAgent>) {
    if agents.iter().any(|shared| shared.pid != process::id()) {
        Agent::after_fork_child();
        // Dropping an agent could need a lock that a thread of the parent held at the fork.
        mem::forget(mem::take(agents));
    }
}
