//! Two processes with one flow, the network between them, and what goes wrong.

use std::collections::VecDeque;

use fastrand::Rng;
use slim_core::replay::Replay;
use slim_rdma::in_memory::{Fabric, MemoryAdapter, Step};

use crate::carrier::Carrier;
use crate::resume::Phase;

/// A rule that is broken on purpose, to check that the simulation notices it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// A side forgets the bytes that it has posted.
    TrimPosted,
    /// A side tells how much it has received while its queue pair still works.
    CountEarly,
    /// The region of an old queue pair stays valid.
    KeepKeys,
    /// A side sends again from where it knew the peer to be, instead of from the peer's count.
    ReplayFromKnown,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Stats {
    pub resumes: u64,
    pub to_pair: u64,
    pub to_pipe: u64,
    pub from_pair_to_pair: u64,
    pub replayed: u64,
    pub failed: u64,
    pub parts: u64,
    pub lost_completions: u64,
    /// Breaks of which one side only learned from the other.
    pub unknown_to_one: u64,
    pub fenced: u64,
    pub late: u64,
    pub strayed: u64,
    pub bytes: u64,
    /// Calls that found the end of a direction.
    pub ended: u64,
}

impl Stats {
    pub fn add(&mut self, other: Stats) {
        let all = [
            (&mut self.resumes, other.resumes),
            (&mut self.to_pair, other.to_pair),
            (&mut self.to_pipe, other.to_pipe),
            (&mut self.from_pair_to_pair, other.from_pair_to_pair),
            (&mut self.replayed, other.replayed),
            (&mut self.failed, other.failed),
            (&mut self.parts, other.parts),
            (&mut self.lost_completions, other.lost_completions),
            (&mut self.unknown_to_one, other.unknown_to_one),
            (&mut self.fenced, other.fenced),
            (&mut self.late, other.late),
            (&mut self.strayed, other.strayed),
            (&mut self.bytes, other.bytes),
            (&mut self.ended, other.ended),
        ];
        all.into_iter().for_each(|(sum, more)| *sum += more);
    }
}

pub struct Side {
    pub adapter: MemoryAdapter,
    pub carrier: Option<Carrier>,
    /// Bytes of the flow that were sent and received before the present transport.
    pub base: [u64; 2],
    /// Bytes of the flow that have a place in the replay buffer.
    pub replay: Replay,
    /// Bytes of the flow that the present transport has taken.
    pub carried: u64,
    /// Bytes that were taken out of old transports and not read.
    pub stash: VecDeque<u8>,
    /// Bytes taken out of transports.
    pub taken: u64,
    /// Bytes that the application has read.
    pub read: u64,
    /// Bytes that the application sends in all.
    pub total: u64,
    /// It has noticed that its transport is dead.
    pub faulted: bool,
}

pub struct World {
    pub random: Rng,
    pub fabric: Fabric,
    pub sides: [Side; 2],
    pub phase: Phase,
    pub mutation: Option<Mutation>,
    pub stats: Stats,
    /// Steps since bytes were read.
    pub quiet: u32,
    /// Nothing arrives while it is positive.
    hole: u32,
    /// Faults that may still happen.
    faults: u32,
    /// Whether the present transport is a queue pair.
    pub on_pair: bool,
}

/// Byte `at` of what a side sends.
fn byte(side: usize, at: u64) -> u8 {
    ((at ^ at >> 7 ^ at >> 13) as u8).wrapping_mul(167) ^ (side as u8 * 0x5a)
}

/// After so many steps without a byte read, somebody suspects the transport.
const SUSPICION: u32 = 400;

impl World {
    pub fn new(seed: u64, mutation: Option<Mutation>) -> World {
        let mut random = Rng::with_seed(seed ^ 0x7665_7262_7321);
        let fabric = Fabric::new(seed);
        if mutation == Some(Mutation::KeepKeys) {
            fabric.keep_keys();
        }
        let sides = [0, 1].map(|n| Side {
            adapter: fabric.adapter(n),
            carrier: None,
            base: [0; 2],
            replay: Replay::new(),
            carried: 0,
            stash: VecDeque::new(),
            taken: 0,
            read: 0,
            total: random.u64(0..4000),
            faulted: false,
        });
        let faults = random.u32(1..14);
        let mut world = World {
            random,
            fabric,
            sides,
            phase: Phase::Live,
            mutation,
            stats: Stats::default(),
            quiet: 0,
            hole: 0,
            faults,
            on_pair: false,
        };
        world.connect();
        world
    }

    pub fn stats(&self) -> Stats {
        let tallies = self.fabric.tallies();
        Stats {
            fenced: tallies.fenced,
            late: tallies.late,
            strayed: tallies.strayed,
            bytes: self.sides.iter().map(|side| side.read).sum(),
            ..self.stats
        }
    }

    fn is_done(&self) -> bool {
        let read = |s: usize| self.sides[s].read == self.sides[1 - s].total;
        read(0) && read(1)
    }

    /// Runs until everything is read.
    pub fn run(&mut self) -> Result<(), String> {
        for _ in 0..400_000 {
            if self.is_done() && self.phase == Phase::Live {
                return self.finish();
            }
            self.quiet += 1;
            self.hole = self.hole.saturating_sub(1);
            match self.random.u32(0..100) {
                0..=54 => self.network(),
                55..=59 => self.fault(),
                60..=69 => self.resume()?,
                70..=72 => self.look(),
                n => self.application((n % 2) as usize)?,
            }
            if self.quiet > SUSPICION && self.phase == Phase::Live {
                self.quiet = 0;
                let suspicious = self.random.usize(0..2);
                self.sides[suspicious].faulted = true;
            }
        }
        Err("no end".to_owned())
    }

    /// Everything that was posted is given back.
    fn finish(&mut self) -> Result<(), String> {
        if self.fabric.tallies().not_ready > 0 {
            return Err("a message found no receive".to_owned());
        }
        for side in &mut self.sides {
            if let Some(Carrier::Pair(pair)) = side.carrier.take() {
                pair.release(&mut side.adapter);
            }
        }
        let left = !self.fabric.is_empty() && self.mutation.is_none();
        (!left)
            .then_some(())
            .ok_or_else(|| "objects are left".to_owned())
    }

    fn network(&mut self) {
        let n = self.random.usize(0..200);
        for s in 0..2 {
            if let Some(Carrier::Pipe(pipe)) = &self.sides[s].carrier {
                pipe.borrow_mut().arrive(s, n);
            }
        }
        let mut steps = self.fabric.steps();
        if self.hole > 0 {
            steps.retain(|step| matches!(step, Step::Place | Step::Reveal(_)));
        }
        // Late packets wait: mostly somebody else uses the memory by then.
        if self.random.u32(0..4) > 0 {
            steps.retain(|step| *step != Step::ArriveLate);
        }
        if self.random.u32(0..3) > 0 {
            steps.retain(|step| *step != Step::Place);
        }
        if let Some(step) = self.random.choice(steps) {
            self.fabric.take(step);
        }
    }

    fn fault(&mut self) {
        if self.faults == 0 || self.random.u32(0..6) > 0 {
            return;
        }
        let one = self.random.usize(0..2);
        let number = match &self.sides[one].carrier {
            Some(Carrier::Pair(pair)) => pair.number(),
            Some(Carrier::Pipe(pipe)) => {
                if self.random.u32(0..4) == 0 {
                    self.faults -= 1;
                    pipe.borrow_mut().kill();
                }
                return;
            }
            None => return,
        };
        self.faults -= 1;
        match self.random.u32(0..10) {
            0..=3 => {
                self.stats.failed += 1;
                self.fabric.take(Step::Fail(number));
            }
            4..=5 => {
                self.stats.parts += 1;
                let len = self.random.usize(0..300);
                self.fabric.take(Step::PlacePart(len));
            }
            6..=7 => {
                if self.fabric.steps().contains(&Step::Reveal(number)) {
                    self.stats.lost_completions += 1;
                }
                self.fabric.take(Step::LoseCompletion(number));
            }
            8 => self.fabric.take(Step::LoseLate),
            _ => self.hole = self.random.u32(50..900),
        }
    }

    /// Software of one side looks at its completions without a data call.
    fn look(&mut self) {
        let s = self.random.usize(0..2);
        let what = self.random.u32(0..4);
        let side = &mut self.sides[s];
        if let Some(Carrier::Pair(pair)) = &mut side.carrier {
            match what {
                0 => pair.ping(&mut side.adapter),
                1 => pair.tell_count(&mut side.adapter),
                _ => drop(pair.progress(&mut side.adapter)),
            }
        }
    }

    fn application(&mut self, s: usize) -> Result<(), String> {
        let n = self.random.usize(1..250);
        match self.random.u32(0..2) {
            0 => self.read(s, n),
            _ => {
                self.write(s, n);
                Ok(())
            }
        }
    }

    fn read(&mut self, s: usize, most: usize) -> Result<(), String> {
        let usable = self.phase == Phase::Live && !self.sides[s].faulted;
        let end = self.sides[1 - s].total;
        let side = &mut self.sides[s];
        let n = most.min(side.stash.len());
        let mut bytes: Vec<u8> = side.stash.drain(..n).collect();
        if n == 0
            && usable
            && let Some(carrier) = &mut side.carrier
        {
            match carrier.recv(s, &mut side.adapter, most) {
                Ok(got) => bytes = got,
                Err(_) => side.faulted = true,
            }
            side.taken += bytes.len() as u64;
        }
        if let Some(carrier) = &side.carrier
            && let Some(received) = carrier.ended()
        {
            self.stats.ended += 1;
            if side.base[1] + received != end {
                return Err(format!("an end before byte {end} at side {s}"));
            }
        }
        for got in bytes {
            let want = byte(1 - s, side.read);
            if side.read >= end {
                return Err(format!("a byte behind the end at side {s}"));
            }
            if got != want {
                return Err(format!("wrong byte {} at side {s}", side.read));
            }
            side.read += 1;
            self.quiet = 0;
        }
        Ok(())
    }

    fn write(&mut self, s: usize, most: usize) {
        if self.phase != Phase::Live || self.sides[s].faulted {
            return;
        }
        let mutation = self.mutation;
        let side = &mut self.sides[s];
        let Some(carrier) = &mut side.carrier else {
            return;
        };
        let at = side.carried;
        if at == side.total {
            if self.random.u32(0..4) == 0 {
                carrier.end(&mut side.adapter);
            }
            return;
        }
        // What is in the replay buffer goes first.
        let again = side
            .replay
            .chunk_at(at)
            .expect("checked when the peer asked")
            .map(<[u8]>::to_vec);
        let is_new = again.is_none();
        let data = again.unwrap_or_else(|| {
            let end = side.total.min(at + most as u64);
            (at..end).map(|at| byte(s, at)).collect()
        });
        match carrier.send(s, &mut side.adapter, &data[..data.len().min(most)]) {
            Ok(n) => {
                if is_new {
                    side.replay.push(&data[..n]);
                } else {
                    self.stats.replayed += n as u64;
                }
                side.carried += n as u64;
                let sent = side.carried - side.base[0];
                let acked = match mutation {
                    Some(Mutation::TrimPosted) if carrier.is_pair() => sent,
                    _ => carrier.acked(s),
                };
                side.replay.trim(side.base[0] + acked);
            }
            Err(_) => side.faulted = true,
        }
    }
}
