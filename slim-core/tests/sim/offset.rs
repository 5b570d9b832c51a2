//! An exchange whose connection is killed after a given byte.

use slim_core::FlowToken;

use crate::event::Harm;
use crate::front::{Front, Plan};
use crate::kinds::Kinds;
use crate::node::Owner;
use crate::tcp::Tcp;
use crate::world::World;

/// Bytes that fit into each of a connection's buffers.
const ROOM: usize = 16 << 10;

impl World {
    /// Both sides write `bytes` on one flow, in a network without faults. Its connection is killed when `at` bytes of `side` have arrived.
    pub fn exchange(seed: u64, bytes: u64, side: usize, at: usize) -> World {
        let mut world = World::empty(seed, None, Kinds::agreed());
        (world.udp_loss, world.udp_twice, world.icmp) = (0, 0, None);
        (world.snipes, world.flows, world.taken_for_quiet) = (0, 1, 0);
        (world.latency, world.mss, world.chunk) = (100, 1460, ROOM as u64);
        let conn = world.new_tcp(0);
        world.tcps[conn] = Tcp::new(0, ROOM, ROOM);
        world.tcps[conn].fatal = Some((side, at));
        let token = FlowToken(1);
        for node in 0..2 {
            let front = Front::new((conn, node), 0, Plan::Orderly, bytes);
            world.nodes[node].fronts.insert(token, front);
            world.owners[conn][node] = Owner::Flow(token);
        }
        world.agree(0, token);
        world
    }

    /// Kills a connection at one end. The other end may learn of it.
    pub fn kill_now(&mut self, conn: usize) {
        let side = self.dice.pick(0, 1) as usize;
        let reset = self.dice.chance(70);
        self.harm(Harm::Snipe { conn, side, reset });
    }
}
