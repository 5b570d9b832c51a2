//! What is under a flow's descriptor numbers, and the moves from one state to the next.
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
//!  ┌──────┐  the stash is read   ┌────────────────┐  paid   ┌────────────────┐
//!  │ Dead │ ◄─────────────────── │ Stashed, Owed  ├───────► │ Stashed, Over  │
//!  └──────┘                      └────────────────┘         └────────────────┘
//!
//!  escalate leads to each of the three, by what is owed and stashed, but with nothing stashed from Open to Dead only;
//!  linger from everywhere to Lingering.
//! ```

use libc::c_int;

/// What is under the descriptor numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The transport.
    Open,
    /// The old transport, which data calls, poll, select and epoll do not see; or a placeholder ([`Ctl::veil`](super::Ctl::veil)).
    Suspended,
    /// A stand-in: the stash is read first, then `then` happens.
    Stashed {
        /// What follows the last stashed byte.
        then: Then,
    },
    /// Something dead that still owes the application this errno.
    Dead(c_int),
    /// Nothing: the application has closed its last number; the agent delivers what is left. Or the numbers are plain
    /// descriptors.
    Lingering,
}

/// What a flow becomes when its stash is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// The waiting transport takes the numbers.
    Open,
    /// The flow is given up, with this errno, which we owe.
    Owed(c_int),
    /// The flow is given up, and what is under the numbers speaks for itself.
    Over,
}

/// The transport waits until the stash is read.
const WAITS: Mode = Mode::Stashed { then: Then::Open };
/// Nothing but the stash is left.
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
                then: Then::Owed(errno),
            } => next == Dead(errno) || matches!(next, OVER | Lingering),
            OVER | Dead(_) => next == Lingering,
            Lingering => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWED: Mode = Mode::Stashed {
        then: Then::Owed(libc::ETIMEDOUT),
    };
    const DEAD: Mode = Mode::Dead(libc::ETIMEDOUT);
    const ALL: [Mode; 7] = [
        Mode::Open,
        Mode::Suspended,
        WAITS,
        OWED,
        OVER,
        DEAD,
        Mode::Lingering,
    ];

    /// The diagram above, the other way round: from where can one come.
    fn sources(mode: Mode) -> &'static [Mode] {
        use Mode::*;
        match mode {
            Open => &[Suspended, WAITS],
            Suspended => &[Open, WAITS],
            WAITS => &[Suspended],
            OWED => &[Suspended, WAITS],
            OVER => &[Suspended, WAITS, OWED],
            DEAD => &[Open, Suspended, WAITS, OWED],
            Lingering => &[Open, Suspended, WAITS, OWED, OVER, DEAD],
            _ => unreachable!(),
        }
    }

    #[test]
    fn every_move_is_as_in_the_table() {
        for from in ALL {
            for to in ALL {
                let want = sources(to).contains(&from);
                assert_eq!(from.allows(to), want, "{from:?} to {to:?}");
            }
        }
        assert!(!OWED.allows(Mode::Dead(libc::EPIPE)), "another errno");
    }
}
