//! The process executes another program, which goes on with the flows.

use std::sync::{Arc, PoisonError};

use slim_core::endpoint::{HandOver, HandedFlow};
use slim_core::{FlowToken, Time};

use super::Driver;
use crate::FlowIo;
use crate::commands::command::HandOverAnswer;
use crate::commands::done::Done;
use crate::events;
use crate::exec::{AgentPause, HandedAgent, HandedFd, HandedPlace, Identity, NotHanded};

impl Driver {
    /// Hands these flows over and stops, if all of them can be handed over.
    pub(super) fn hand_over(
        &mut self,
        tokens: &[FlowToken],
        answer: &HandOverAnswer,
        pause: &AgentPause,
        done: &Done,
    ) {
        // Messages that have arrived are not lost with this thread.
        self.carry_out();
        let handed = self.handed(tokens);
        let is_handed = handed.is_ok();
        *answer.lock().unwrap_or_else(PoisonError::into_inner) = Some(handed);
        if is_handed {
            events::write_out();
            pause.hold(|| done.tell());
        } else {
            done.tell();
        }
    }

    fn handed(&self, tokens: &[FlowToken]) -> Result<HandedAgent, Vec<(FlowToken, NotHanded)>> {
        let (mut flows, mut refused) = (Vec::new(), Vec::new());
        for &token in tokens {
            match self.endpoint.hand_over(token) {
                HandOver::Ready(flow) => flows.push((token, *flow)),
                HandOver::Negotiates => refused.push((token, NotHanded::Soon)),
                HandOver::Busy => refused.push((token, NotHanded::Busy)),
                HandOver::Never => refused.push((token, NotHanded::Never)),
            }
        }
        // The program may have closed descriptors of ours unseen.
        let places = self.control.places().map(|(at, control, resume)| {
            Some(HandedPlace {
                at,
                control: HandedFd::of(control)?,
                resume: match resume {
                    Some(fd) => Some(HandedFd::of(fd)?),
                    None => None,
                },
            })
        });
        let (known, ports) = (self.endpoint.announcement(), self.control.ports());
        match places.collect() {
            Some(places) if refused.is_empty() => Ok(HandedAgent {
                identity: Identity {
                    id: known.id,
                    serial: known.serial,
                },
                ports: (ports.control, ports.resume),
                maps: self.control.maps(),
                places,
                flows,
            }),
            None => Err(tokens.iter().map(|t| (*t, NotHanded::Never)).collect()),
            Some(_) => Err(refused),
        }
    }

    /// Goes on with a flow of the program before.
    pub(super) fn open_handed(
        &mut self,
        now: Time,
        token: FlowToken,
        io: Arc<dyn FlowIo>,
        flow: HandedFlow,
    ) {
        // The sockets that were handed over serve the flow's address.
        self.add_flow(now, token, io);
        self.endpoint.open_handed(now, token, flow);
    }
}
