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
    /// The process that started it: a forked child has no such thread.
    pid: u32,
}

static AGENTS: Mutex<Vec<JoinedAgent>> = Mutex::new(Vec::new());

fn agents() -> MutexGuard<'static, Vec<JoinedAgent>> {
    AGENTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The agent for these settings; [`leave`] afterwards.
///
/// # Errors
/// It cannot be started.
pub(crate) fn join(config: &Config) -> io::Result<Agent> {
    let mut agents = agents();
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

/// A session with these settings is over. The last one ends the agent, after at most `limit` for what is still to be delivered and
/// as much for its end: whether it has ended, if it had to.
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
    // Whoever opens a session with the same settings meanwhile starts an agent of its own.
    drop(all);
    if shared.pid != process::id() {
        mem::forget(shared.agent);
        return true;
    }
    shared.agent.drain_exit(limit);
    shared.agent.retire(limit)
}

/// In a forked child nothing is left of its parent's agents but their descriptors.
fn forget_parents(agents: &mut Vec<JoinedAgent>) {
    if agents.iter().any(|shared| shared.pid != process::id()) {
        Agent::after_fork_child();
        // Dropping one could need a lock that the lost thread had.
        mem::forget(mem::take(agents));
    }
}
