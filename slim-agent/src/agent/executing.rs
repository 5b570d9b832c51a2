//! The process executes another program, which goes on with the flows.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use slim_core::FlowToken;
use slim_core::config::Config;
use slim_core::endpoint::HandedFlow;

use super::{Agent, Runs};
use crate::FlowIo;
use crate::commands::command::Command;
use crate::commands::done;
use crate::exec::{AgentPause, HandedAgent, NotHanded, Stopped};
use crate::thread;

impl Agent {
    /// Before the process executes another program: the agent as that program gets it, with these flows. The agent thread stops until
    /// the second value is dropped.
    ///
    /// # Errors
    /// The flows that cannot be handed over now, each with the reason; the agent thread goes on. None if it has not answered within
    /// `limit`.
    pub fn hand_over(
        &self,
        tokens: Vec<FlowToken>,
        limit: Duration,
    ) -> Result<(HandedAgent, Stopped), Vec<(FlowToken, NotHanded)>> {
        let answer = Arc::<Mutex<_>>::default();
        let pause = AgentPause::default();
        let (done, is_done) = done::done();
        let command = Command::HandOver {
            tokens,
            answer: Arc::clone(&answer),
            pause: pause.clone(),
            done,
        };
        // Ends the pause if it begins after the wait.
        let stopped = Stopped::new(pause);
        if !self.send(command) || !self.wait(is_done, limit) {
            return Err(Vec::new());
        }
        let answer = answer.lock().unwrap_or_else(PoisonError::into_inner).take();
        match answer {
            Some(Ok(handed)) => Ok((handed, stopped)),
            Some(Err(refused)) => Err(refused),
            None => Err(Vec::new()),
        }
    }

    /// As [`start`](Self::start), with the identity, the sockets and these flows of the agent before. A peer that already waits at one of
    /// the sockets finds the flows.
    ///
    /// # Errors
    /// As [`start`](Self::start), or a socket is not there.
    pub fn start_handed(
        config: Config,
        before: HandedAgent,
        flows: Vec<(FlowToken, Arc<dyn FlowIo>, HandedFlow)>,
    ) -> io::Result<Agent> {
        let flows = flows.into_iter().map(|(token, io, flow)| {
            let flow = Box::new(flow);
            Command::OpenHanded { token, io, flow }
        });
        let first = flows.collect();
        Self::begin(
            config,
            Vec::new(),
            (Some(before), first),
            |parts, receiver| thread::start(parts, receiver).map(Runs::Alone),
        )
    }
}
