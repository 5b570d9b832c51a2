//! The states of a flow, by the file under its descriptor numbers, and the moves between them.
//!
//! ```text
//!                suspend                   show_stash
//!  ┌──────┐ ───────────────► ┌───────────┐ ───────────────► ┌──────────────┐
//!  │ Open │                  │ Suspended │                  │ Stashed,     │
//!  └─┬────┘ ◄─────────────── └─────┬─────┘ ◄─────────────── │ then Open    │
//!    │  ▲          open            │            suspend     └─┬──────────┬─┘
//!    │  └──────────────────────────┼──────────────────────────┼──────────┘
//!    │ escalate                    │ escalate                 │      open
//!    ▼                             ▼                          ▼
//!  ┌──────┐  the stash is read   ┌────────────────┐  taken  ┌────────────────┐
//!  │ Dead │ ◄─────────────────── │ Stashed, Error ├───────► │ Stashed, Over  │
//!  └──────┘                      └────────────────┘         └────────────────┘
//!
//!  taken: the application has got the pending error.
//!  escalate leads to one of these three, depending on the pending error and the stash; from Open, where nothing is stashed,
//!  it leads to Dead only. linger leads from every state to Lingering.
//! ```

use libc::c_int;

/// The state of a flow: which file is under its descriptor numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The transport.
    Open,
    /// The old transport, which data calls, poll, select and epoll do not see; or a placeholder
    /// ([`Ctl::set_placeholder`](super::Ctl::set_placeholder)).
    Suspended,
    /// A stand-in: the stash is read first, then the flow goes on to `then`.
    Stashed {
        /// What follows the last stashed byte.
        then: Then,
    },
    /// A dead file; the application still has to get this errno (the pending error).
    Dead(c_int),
    /// None: the application has closed its last number, and the agent delivers the remaining bytes. Or the numbers are plain
    /// descriptors.
    Lingering,
}

/// What follows when the stash of a flow has been read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// The waiting transport takes the numbers.
    Open,
    /// The flow is given up, with this errno as pending error.
    Error(c_int),
    /// The flow is given up, and the kernel reports the end of the file under the numbers by itself.
    Over,
}

/// The transport waits until the stash is read.
const WAITS: Mode = Mode::Stashed { then: Then::Open };
/// Only the stash is left.
const OVER: Mode = Mode::Stashed { then: Then::Over };

impl Mode {
    /// The transition table.
    pub(super) fn allows(self, next: Self) -> bool {
        use Mode::*;
        match self {
            Open => matches!(next, Suspended | Dead(_) | Lingering),
            Suspended => matches!(next, Open | Stashed { .. } | Dead(_) | Lingering),
            WAITS => next != WAITS,
            Stashed {
                then: Then::Error(errno),
            } => next == Dead(errno) || matches!(next, OVER | Lingering),
            OVER | Dead(_) => next == Lingering,
            Lingering => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ERROR: Mode = Mode::Stashed {
        then: Then::Error(libc::ETIMEDOUT),
    };
    const DEAD: Mode = Mode::Dead(libc::ETIMEDOUT);
    const ALL: [Mode; 7] = [
        Mode::Open,
        Mode::Suspended,
        WAITS,
        ERROR,
        OVER,
        DEAD,
        Mode::Lingering,
    ];

    /// The diagram above in reverse: the states from which each state can be entered.
    fn sources(mode: Mode) -> &'static [Mode] {
        use Mode::*;
        match mode {
            Open => &[Suspended, WAITS],
            Suspended => &[Open, WAITS],
            WAITS => &[Suspended],
            ERROR => &[Suspended, WAITS],
            OVER => &[Suspended, WAITS, ERROR],
            DEAD => &[Open, Suspended, WAITS, ERROR],
            Lingering => &[Open, Suspended, WAITS, ERROR, OVER, DEAD],
            _ => unreachable!(),
        }
    }

    #[test]
    fn the_transition_table_matches_the_diagram() {
        for from in ALL {
            for to in ALL {
                let want = sources(to).contains(&from);
                assert_eq!(from.allows(to), want, "{from:?} to {to:?}");
            }
        }
        assert!(!ERROR.allows(Mode::Dead(libc::EPIPE)), "another errno");
    }
}
