//! Flows that are in use for minutes, while the kind of transport that they prefer comes and goes.

use slim_core::endpoint::State;
use slim_core::{FlowToken, Role};

use crate::dice::mix;
use crate::event::{Ev, Harm};
use crate::front::{Front, Plan};
use crate::kinds::{FABRIC, Kinds};
use crate::node::Owner;
use crate::world::{MS, Mutation, SECOND, World};

/// The longest pause between two trials with all that is added to it, on the slowest clock.
const LONGEST: u64 = 90 * SECOND;
/// More than the applications write in that time.
const MANY: u64 = 1_000_000;

impl World {
    /// Flows that never end, and write all the time. With a mutation, nothing goes wrong besides.
    pub fn failback(seed: u64, mutation: Option<Mutation>) -> World {
        let kinds = Kinds::preferred(mix(seed ^ 0xfa11));
        let mut world = World::empty(seed, mutation, kinds);
        world.chunk = world.dice.spread(1, 100);
        world.udp_loss = world.udp_loss.min(20);
        world.patience = 0;
        for flow in 0..world.flows {
            world.start_idle(flow);
        }
        if mutation.is_none() {
            world.some_flaps();
        }
        world
    }

    fn start_idle(&mut self, flow: usize) {
        let (agreed, network) = self.first_network();
        let conn = self.new_tcp(network);
        let token = FlowToken(flow as u64 + 1);
        let (local, remote) = self.names(flow);
        for (node, role) in [(0, Role::Connector), (1, Role::Acceptor)] {
            let front = Front::new((conn, node), network, Plan::Idle, MANY);
            self.nodes[node].fronts.insert(token, front);
            self.owners[conn][node] = Owner::Flow(token);
            let (at, now) = (5 * MS, self.clock(node));
            match role {
                _ if agreed => {}
                Role::Connector => {
                    let endpoint = &mut self.nodes[node].endpoint;
                    endpoint.open(now, token, role, local, remote);
                    self.later(0, at, Ev::Tick { node, token });
                }
                Role::Acceptor => self.later(0, at, Ev::Accept { flow }),
            }
        }
        if agreed {
            self.agree(flow, token);
        }
    }

    /// The second kind fails for a while, most often soon after a flow may have moved to it; TCP only for moments.
    fn some_flaps(&mut self) {
        let mut at = self.dice.spread(10 * MS, 2 * SECOND);
        for _ in 0..self.dice.pick(0, 12) {
            let until = at + self.dice.spread(MS, 20 * SECOND);
            let harm = match self.dice.pick(0, 9) {
                0..=5 => Harm::Blackout {
                    fabric: true,
                    until,
                },
                6 => Harm::Cut {
                    path: 0,
                    ways: self.dice.pick(1, 3) as usize,
                    until: until.min(at + SECOND),
                },
                7 => Harm::Stall {
                    node: self.dice.pick(0, 1) as usize,
                    flow: self.dice.next() as usize,
                },
                _ => Harm::Kill {
                    newest: self.dice.pick(0, 1),
                    side: self.dice.pick(0, 1) as usize,
                    reset: self.dice.chance(70),
                },
            };
            self.at(at, Ev::Fault(harm));
            self.healthy = self.healthy.max(until);
            at = until + self.dice.spread(MS, 10 * SECOND);
        }
    }

    /// Runs such a world. In the end each flow must be where it prefers to be, and all bytes must arrive.
    pub fn run_failback(&mut self) -> Result<(), String> {
        self.go_on()?;
        if self.any_front(|front| front.legacy) {
            // A flow became plain TCP.
            return Ok(());
        }
        // From now on, no process suspects a path that is well, and none reads so late that a move fails and the next trial comes after a minute.
        (self.taken_for_quiet, self.readers_pause) = (0, false);
        self.patience = LONGEST;
        self.go_on()?;
        if self.any_front(|front| !front.live && (front.legacy || front.over)) {
            // A flow broke before it was agreed on.
            return Ok(());
        }
        let fronts = |node: usize| self.nodes[node].fronts.iter();
        for (node, (token, front)) in (0..2).flat_map(|n| fronts(n).map(move |f| (n, f))) {
            let state = self.nodes[node].endpoint.state(*token);
            if front.network != FABRIC || state != Some(State::Live) || front.sent == MANY {
                let (network, tell) = (front.network, front.tell());
                return Err(format!(
                    "side {node}: {token:?} is {state:?} on network {network}: {tell}"
                ));
            }
        }
        let all = self.nodes.iter_mut().flat_map(|n| n.fronts.values_mut());
        all.for_each(|front| front.to_write = 0);
        self.patience += 200 * SECOND;
        self.go_on()?;
        let (delivered, sent) = (self.delivered(), self.sent());
        if delivered != sent {
            return Err(format!("{delivered} of {sent} bytes have arrived"));
        }
        self.run()
    }

    fn any_front(&self, is: impl Fn(&Front) -> bool) -> bool {
        let mut fronts = self.nodes.iter().flat_map(|node| node.fronts.values());
        fronts.any(is)
    }

    fn delivered(&self) -> u64 {
        let fronts = self.nodes.iter().flat_map(|node| node.fronts.values());
        fronts.map(|front| front.delivered).sum()
    }

    fn sent(&self) -> u64 {
        let fronts = self.nodes.iter().flat_map(|node| node.fronts.values());
        fronts.map(|front| front.sent).sum()
    }
}
