//! A second kind of transport beside TCP: from memory to memory, on a network of its own.
//!
//! Or it leads through the witness: what was written counts as acknowledged at once, though it may get lost ([`Kinds::relay`]).
//! Or it consists of queue pairs: what has arrived may get lost as long as nobody has read it ([`Kinds::queue_pairs`]).
//!
//! That network carries no datagrams. So while the networks of TCP are down, connections of the second kind are the only way
//! in which the two processes can communicate.

use slim_core::endpoint::{Agreed, State};
use slim_core::transport::{Locator, OtherLocator, TransportKind, Transports};
use slim_core::{FlowId, FlowToken, Role};

use crate::dice::Dice;
use crate::event::{Ev, Harm};
use crate::net::{CONTROL, RESUME, addr, host_of};
use crate::world::{MS, SECOND, World};

pub const MEMORY: TransportKind = TransportKind::TEST;
/// Number of the second kind's network. Lower numbers are networks of TCP.
pub const FABRIC: usize = 2;

/// The kinds of transport that the two processes have.
#[derive(Clone, Debug)]
pub struct Kinds {
    /// The kinds of each process, the preferred one first.
    of: [Vec<TransportKind>; 2],
    /// No connection of the second kind is ever made.
    pub deaf: bool,
    /// Flows are agreed on by other means than HELLO.
    agreed: bool,
    /// The second kind goes through the witness.
    pub relay: bool,
    /// Connections of the second kind are queue pairs: only the receiver's software acknowledges (`docs/VERBS.md`).
    pub software: bool,
}

impl Kinds {
    pub fn tcp() -> Kinds {
        Kinds {
            of: [Vec::new(), Vec::new()],
            deaf: false,
            agreed: false,
            relay: false,
            software: false,
        }
    }

    /// TCP, and flows that are agreed on by other means than HELLO.
    pub fn agreed() -> Kinds {
        Kinds {
            agreed: true,
            ..Kinds::tcp()
        }
    }

    /// Beside TCP, both processes have connections through the witness.
    pub fn relay() -> Kinds {
        Kinds {
            of: [vec![TransportKind::RELAY], vec![TransportKind::RELAY]],
            relay: true,
            ..Kinds::tcp()
        }
    }

    fn second(&self) -> TransportKind {
        match self.relay {
            true => TransportKind::RELAY,
            false => MEMORY,
        }
    }

    /// A random choice. Most processes have both kinds.
    pub fn some(seed: u64) -> Kinds {
        let mut dice = Dice::new(seed);
        let of = [0, 1].map(|_| match dice.pick(0, 9) {
            0 => vec![TransportKind::TCP],
            1..=5 => vec![MEMORY, TransportKind::TCP],
            _ => vec![TransportKind::TCP, MEMORY],
        });
        Kinds {
            of,
            deaf: dice.chance(10),
            agreed: dice.chance(30),
            relay: false,
            software: false,
        }
    }

    /// A random choice, with queue pairs as the second kind.
    pub fn queue_pairs(seed: u64) -> Kinds {
        Kinds {
            software: true,
            ..Kinds::some(seed)
        }
    }

    /// Both processes have both kinds, and the connector prefers the second one.
    pub fn preferred(seed: u64) -> Kinds {
        let mut dice = Dice::new(seed);
        let some = Kinds::some(seed);
        Kinds {
            of: [
                vec![MEMORY, TransportKind::TCP],
                match dice.chance(50) {
                    true => vec![MEMORY, TransportKind::TCP],
                    false => vec![TransportKind::TCP, MEMORY],
                },
            ],
            deaf: false,
            software: dice.chance(50),
            ..some
        }
    }

    /// Whether both processes have the second kind.
    pub fn shared(&self) -> bool {
        self.of.iter().all(|kinds| kinds.contains(&self.second()))
    }

    pub fn transports(&self, n: usize) -> Transports {
        let kinds = self.of[n].clone();
        let second = self.second();
        let others = kinds.contains(&second).then(|| locator(second, n));
        Transports {
            locators: others.into_iter().collect(),
            kinds,
            ..Transports::tcp(vec![addr(n, 0), addr(n, 1)], RESUME, CONTROL)
        }
    }
}

fn locator(kind: TransportKind, n: usize) -> OtherLocator {
    OtherLocator::new(kind, &[b'm', n as u8]).expect("two bytes")
}

/// The network of a connection to the other process.
pub fn network(to: Locator) -> Option<usize> {
    match to {
        Locator::Tcp(addr) => host_of(&addr).map(|(_, path)| path),
        Locator::Other(_) => Some(FABRIC),
    }
}

impl Kinds {
    /// Where a connection of the process `n` comes from.
    pub fn origin(&self, n: usize, network: usize) -> Locator {
        match network {
            FABRIC => locator(self.second(), n).into(),
            path => Locator::Tcp((addr(n, path), 40_000).into()),
        }
    }
}

impl World {
    /// Opens a flow that both processes have agreed on. Its first transport is of either kind.
    pub fn agree(&mut self, flow: usize, token: FlowToken) {
        self.stats.agreed += 1;
        let (local, remote) = self.names(flow);
        for (node, role, ends) in [
            (0, Role::Connector, (local, remote)),
            (1, Role::Acceptor, (remote, local)),
        ] {
            let agreed = Agreed {
                flow: FlowId([flow as u8 + 1; 16]),
                secrets: [[3; 32], [4; 32]],
                peer: self.nodes[1 - node].endpoint.announcement(),
            };
            let now = self.clock(node);
            let endpoint = &mut self.nodes[node].endpoint;
            endpoint.open_agreed(now, token, role, ends, &agreed);
            self.later(0, 5 * MS, Ev::Tick { node, token });
        }
    }

    /// Whether flows are agreed on by other means, and the network of the first transport of such a flow.
    pub fn first_network(&mut self) -> (bool, usize) {
        let (agreed, shared) = (self.kinds.agreed, self.kinds.shared());
        let fabric = agreed && shared && !self.kinds.deaf && self.dice.chance(50);
        (agreed, if fabric { FABRIC } else { 0 })
    }

    /// All networks of one kind may fail for a long time, provided that the other kind works.
    pub fn some_blackouts(&mut self) {
        // A flow goes to the witness only if TCP fails while it is in use. A process that has closed a flow may forget it after some two
        // minutes, and a flow that is idle meanwhile does not go to the witness to learn of that.
        let (least, first, most) = match self.kinds.relay {
            true => (1, 2 * SECOND, 70 * SECOND),
            false => (0, 8 * SECOND, 120 * SECOND),
        };
        for _ in 0..self.dice.pick(least, 3) {
            let at = self.dice.spread(200 * MS, first);
            let until = at + self.dice.spread(SECOND, most);
            let fabric = self.dice.chance(if self.kinds.relay { 20 } else { 50 });
            self.at(at, Ev::Fault(Harm::Blackout { fabric, until }));
        }
    }

    pub fn blackout(&mut self, fabric: bool, until: u64) {
        let networks = if fabric {
            FABRIC..FABRIC + 1
        } else {
            0..FABRIC
        };
        let well = |way: &u64| *way <= self.now;
        let all_well = self.cut.iter().flatten().all(well);
        if !all_well || !fabric && !self.can_do_without_tcp() {
            return;
        }
        self.stats.blackouts += 1;
        self.healthy = self.healthy.max(until);
        self.cut[networks].fill([until; 2]);
    }

    /// Whether both processes know how they are reached by the second kind.
    fn can_do_without_tcp(&self) -> bool {
        let knows = |node: &crate::node::Node| {
            let mut flows = node.fronts.iter().filter(|(_, front)| !front.gone);
            flows.all(|(token, _)| {
                let state = node.endpoint.state(*token);
                let carries = [State::Live, State::Suspended, State::Resuming];
                state.is_some_and(|state| carries.contains(&state))
                    && !node.endpoint.locators(*token).is_empty()
            })
        };
        !self.kinds.deaf && self.nodes.iter().all(knows)
    }

    /// A flow has a new transport on `network`.
    pub fn moved(&mut self, node: usize, token: FlowToken, network: usize) {
        let before = std::mem::replace(&mut self.front(node, token).network, network);
        match (before == FABRIC, network == FABRIC) {
            (false, true) => self.stats.to_memory += 1,
            (true, false) => self.stats.to_tcp += 1,
            _ => {}
        }
        assert!(
            network != FABRIC || self.kinds.shared() && !self.kinds.deaf,
            "a transport of a kind that is not available"
        );
    }
}
