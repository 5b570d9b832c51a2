//! The resume, reduced to what concerns the bytes: who suspends when, which counts are told, and what is sent again.
//!
//! The order is that of `docs/PROTOCOL.md`. Everything else of the network goes on between two steps. The resume itself does not fail
//! here: that is what `slim-core`'s simulation is about.

use std::cell::RefCell;
use std::rc::Rc;

use slim_rdma::{HalfPair, PairSizes, RingShape};

use crate::carrier::Carrier;
use crate::pipe::Pipe;
use crate::world::{Mutation, World};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Live,
    /// This side has suspended the flow, and asks the other one.
    Asked(usize),
    /// The other side has suspended it, too, and has told how much it has received.
    Answered(usize, u64),
}

impl World {
    pub fn resume(&mut self) -> Result<(), String> {
        match self.phase {
            Phase::Live => {
                let faulted = [0, 1].map(|s| self.sides[s].faulted);
                let Some(initiator) = (0..2)
                    .filter(|s| faulted[*s])
                    .max_by_key(|_| self.random.u8(..))
                else {
                    return Ok(());
                };
                self.stats.unknown_to_one += u64::from(faulted != [true; 2]);
                self.suspend(initiator);
                self.phase = Phase::Asked(initiator);
            }
            Phase::Asked(initiator) => {
                let received = self.count(1 - initiator)?;
                self.phase = Phase::Answered(initiator, received);
            }
            Phase::Answered(initiator, received) => {
                let own = self.count(initiator)?;
                let mut counts = [0; 2];
                counts[initiator] = own;
                counts[1 - initiator] = received;
                self.go_on(counts)?;
                self.phase = Phase::Live;
            }
        }
        Ok(())
    }

    /// No data call uses the transport any more. A queue pair takes nothing more, either.
    fn suspend(&mut self, s: usize) {
        let early = self.mutation == Some(Mutation::CountEarly);
        let side = &mut self.sides[s];
        if let Some(Carrier::Pair(pair)) = &mut side.carrier
            && !early
        {
            pair.suspend(&mut side.adapter);
        }
    }

    /// Takes everything out of the old transport, and closes it. Returns how many bytes of the flow this side has received.
    fn count(&mut self, s: usize) -> Result<u64, String> {
        let early = self.mutation == Some(Mutation::CountEarly);
        self.suspend(s);
        let side = &mut self.sides[s];
        let told = match &side.carrier {
            Some(Carrier::Pair(pair)) if early => Some(side.base[1] + pair.received()),
            _ => None,
        };
        if early && let Some(Carrier::Pair(pair)) = &mut side.carrier {
            pair.progress(&mut side.adapter);
        }
        if let Some(mut carrier) = side.carrier.take() {
            // A queue pair that works never says that there is no more; only one that is suspended does.
            while let Ok(bytes) = carrier.recv(s, &mut side.adapter, 1000)
                && !bytes.is_empty()
            {
                side.taken += bytes.len() as u64;
                side.stash.extend(bytes);
            }
            match carrier {
                Carrier::Pair(mut pair) => {
                    let received = pair.suspend(&mut side.adapter);
                    if !early && side.base[1] + received != side.taken {
                        return Err(format!("byte counts of side {s} differ: {received}"));
                    }
                    pair.release(&mut side.adapter);
                }
                // No byte arrives at a closed end.
                Carrier::Pipe(pipe) => pipe.borrow_mut().kill(),
            }
        }
        Ok(told.unwrap_or(side.taken))
    }

    /// Both go on with a new transport. `counts`: bytes that each side has received.
    fn go_on(&mut self, counts: [u64; 2]) -> Result<(), String> {
        self.stats.resumes += 1;
        let known = self.mutation == Some(Mutation::ReplayFromKnown);
        for s in 0..2 {
            let wanted = counts[1 - s];
            let side = &mut self.sides[s];
            let from = if known { side.replay.start() } else { wanted };
            if side.replay.chunk_at(from).is_err() {
                return Err(format!("byte {from} of side {s} is forgotten"));
            }
            side.replay.trim(from);
            side.carried = from;
            side.base = [from, counts[s]];
            side.faulted = false;
        }
        self.quiet = 0;
        self.connect();
        Ok(())
    }

    /// Makes a transport of either kind.
    pub fn connect(&mut self) {
        if self.random.u32(0..4) == 0 {
            self.stats.to_pipe += 1;
            self.on_pair = false;
            let pipe = Rc::new(RefCell::new(Pipe::default()));
            for side in &mut self.sides {
                side.carrier = Some(Carrier::Pipe(pipe.clone()));
            }
            return;
        }
        self.stats.to_pair += 1;
        self.stats.from_pair_to_pair += u64::from(self.on_pair);
        self.on_pair = true;
        let halves = [0, 1].map(|s| {
            let sizes = self.sizes();
            HalfPair::open(&mut self.sides[s].adapter, sizes).expect("there are enough")
        });
        let [a, b] = [halves[0].address(), halves[1].address()];
        for ((half, peer), side) in halves.into_iter().zip([b, a]).zip(&mut self.sides) {
            let pair = half
                .connect(&mut side.adapter, &peer)
                .expect("the peer's address is right");
            side.carrier = Some(Carrier::Pair(Box::new(pair)));
        }
    }

    fn sizes(&mut self) -> PairSizes {
        let ring = 1 << self.random.u32(6..=9);
        PairSizes {
            shape: RingShape::new(ring, 1 << self.random.u32(2..=5)).expect("within bounds"),
            depth: self.random.u32(1..20),
            staging: 1 << self.random.u32(6..=9),
            inline: self.random.usize(0..80),
            message: self.random.u64(1..300),
        }
    }
}
