//! The states of a flow and the moves between them.
//!
//! ```text
//!                 HELLO_ACK                fault, Suspend
//!  ┌─────────────┐          ┌──────┐ ───────────────────► ┌───────────┐
//!  │ Negotiating ├─────────►│ Live │ ◄─────────────────── │ Suspended │
//!  └──┬───────┬──┘          └─┬──┬─┘       Reinstate      └──┬─────┬──┘
//!     │       │               │  ▲                   RESUME  │ ▲   │
//!     │       │               │  │ installed         sent or │ │ connection lost,
//!     │       │               │  │                   heard   ▼ │ newer fault
//!     │       │               │  └────────────────────────┌────┴──────┐
//!     │       │               │                           │ Resuming  │
//!     │       │ no SLIM there,│ DEMOTE                    └────┬──────┘
//!     │       ▼               ▼                                │
//!     │    ┌────────────────────┐  Suspended, reinstated as it │
//!     │    │       Legacy       │  is after an end of stream   │
//!     │    └─────────┬──────────┘                              │
//!     │ fault, then  │ fault             attempts used up,     │
//!     │ no SLIM      ▼                   peer gone or done     │
//!     │           ┌─────────────┐                              │
//!     └──────────►│  Escalated  │◄─── Live, Suspended ◄────────┘
//!                 └──────┬──────┘
//!                        │ gone                 every state ── reset, gone ──► Closed
//!                        ▼
//!                      Closed
//! ```

use std::fmt;

/// The state of a flow. Only the endpoint moves a flow from one state to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// It is not known yet whether the peer has SLIM. Bytes are counted and copied already.
    Negotiating,
    /// Plain TCP, permanently.
    Legacy,
    /// The peer has SLIM, and a transport carries the flow.
    Live,
    /// Data calls are barred, or about to be; no RESUME has been sent or accepted yet.
    Suspended,
    /// The two sides are agreeing on a new transport, or the replay is being written to it.
    Resuming,
    /// Given up.
    Escalated,
    /// Reset or closed by the application.
    Closed,
}

impl State {
    /// Every state, in the order of a flow's life.
    pub const ALL: [State; 7] = [
        State::Negotiating,
        State::Legacy,
        State::Live,
        State::Suspended,
        State::Resuming,
        State::Escalated,
        State::Closed,
    ];

    /// The transition table.
    fn allows(self, next: State) -> bool {
        use State::*;
        match self {
            Negotiating => matches!(next, Legacy | Live | Escalated | Closed),
            Legacy => matches!(next, Escalated | Closed),
            Live => matches!(next, Legacy | Suspended | Escalated | Closed),
            Suspended => matches!(next, Legacy | Live | Resuming | Escalated | Closed),
            Resuming => matches!(next, Live | Suspended | Escalated | Closed),
            Escalated => matches!(next, Closed),
            Closed => false,
        }
    }
}

/// A transition that the table does not allow: a bug of the endpoint, never of its driver or a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Illegal {
    from: State,
    to: State,
}

impl fmt::Display for Illegal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no move from {:?} to {:?}", self.from, self.to)
    }
}

/// The state of one flow. The field is private, so that every change goes through the table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lifecycle(FlowState);

#[derive(Clone, Copy, Debug)]
struct FlowState {
    state: State,
}

impl Lifecycle {
    pub(super) fn new() -> Self {
        Lifecycle(FlowState {
            state: State::Negotiating,
        })
    }

    pub(super) fn state(self) -> State {
        self.0.state
    }

    /// Moves to `next`. `Ok(false)` if `next` is the state already, which is not an error.
    pub(super) fn go(&mut self, next: State) -> Result<bool, Illegal> {
        let from = self.0.state;
        if from == next {
            return Ok(false);
        }
        if !from.allows(next) {
            return Err(Illegal { from, to: next });
        }
        self.0.state = next;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same transitions as in the diagram, listed by target: the states from which `state` can be reached.
    fn sources(state: State) -> &'static [State] {
        use State::*;
        match state {
            Negotiating => &[],
            Legacy => &[Negotiating, Live, Suspended],
            Live => &[Negotiating, Suspended, Resuming],
            Suspended => &[Live, Resuming],
            Resuming => &[Suspended],
            Escalated => &[Negotiating, Legacy, Live, Suspended, Resuming],
            Closed => &[Negotiating, Legacy, Live, Suspended, Resuming, Escalated],
        }
    }

    #[test]
    fn only_the_transitions_of_the_diagram_are_allowed() {
        for from in State::ALL {
            for to in State::ALL {
                let mut cycle = Lifecycle(FlowState { state: from });
                let got = cycle.go(to);
                if from == to {
                    assert_eq!(got, Ok(false));
                } else if sources(to).contains(&from) {
                    assert_eq!(got, Ok(true), "{from:?} to {to:?}");
                    assert_eq!(cycle.state(), to);
                } else {
                    assert_eq!(got, Err(Illegal { from, to }), "{from:?} to {to:?}");
                    assert_eq!(cycle.state(), from, "a refused move changes nothing");
                }
            }
        }
    }
}
