//! The agents of this process: sessions with equal settings share one.

use std::io;
use std::mem;
use std::process;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use slim_agent::Agent;
use slim_core::config::Config;

/// An agent, with the sessions that use it.
struct JoinedAgent {
    config: Config,
    agent: Agent,
    sessions: usize,
    /// The process that started the agent: a forked child does not have the agent thread.
    pid: u32,
}

static AGENTS: Mutex<Vec<JoinedAgent>> = Mutex::new(Vec::new());

fn agents() -> MutexGuard<'static, Vec<JoinedAgent>> {
    AGENTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the agent for these settings; starts it if necessary. The caller must call [`leave`] later.
///
/// # Errors
/// The agent cannot be started.
pub(crate) fn join(config: &Config) -> io::Result<Agent> {
    let mut agents = agents();
    // Before the first descriptor is made.
    slim_sys::copies::join();
    forget_parents(&mut agents);
    if let Some(shared) = agents.iter_mut().find(|shared| shared.config == *config) {
        shared.sessions += 1;
        return Ok(shared.agent.clone());
    }
    let agent = Agent::start(config.clone())?;
    agents.push(JoinedAgent {
        config: config.clone(),
        agent: agent.clone(),
        sessions: 1,
        pid: process::id(),
    });
    Ok(agent)
}

/// Ends the use of an agent by one session. The last session ends the agent: it waits at most `limit` for the delivery of sent bytes,
/// and at most `limit` again for the agent thread. Returns false if that thread has not ended.
pub(crate) fn leave(config: &Config, limit: Duration) -> bool {
    let mut all = agents();
    let Some(at) = all.iter().position(|shared| shared.config == *config) else {
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
