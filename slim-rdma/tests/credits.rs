//! Every interleaving of messages and credits, for the smallest ring and queue: nobody waits for ever.
//!
//! The real windows are searched, not a copy of their rules. In every state it must hold that no message comes without a receive or
//! without room, that what a side knows is true, and that two sides which have taken everything can go on.

#[path = "../../slim-core/tests/model/mark.rs"]
mod mark;

use std::collections::{HashSet, VecDeque};

use mark::mark;
use slim_rdma::{Immediate, ReceiveWindow, RingShape, SendWindow};

#[derive(Clone, Hash)]
struct End {
    out: SendWindow,
    inn: ReceiveWindow,
    /// Messages that the application has still to send.
    left: u8,
    coming: VecDeque<(u8, u32)>,
}

type World = [End; 2];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mutation {
    /// Any message may take the last slot.
    AnyTakesTheLastSlot,
    /// Nothing is sent for the sake of slots.
    SlotsAreNotReturned,
    /// Nothing is sent for the sake of room.
    RoomIsNotReturned,
}

struct Rules {
    len: u64,
    mutation: Option<Mutation>,
    /// The counts may be told at any moment.
    tells: bool,
    /// The application reads at any moment; otherwise as soon as something is there.
    reads: bool,
}

impl Rules {
    fn post(&self, world: &World, s: usize, len: u64) -> World {
        let mut next = world.clone();
        let says = next[s].inn.says(false).pack();
        next[s].inn.told();
        next[s].out.post(len, false);
        next[1 - s].coming.push_back((len as u8, says));
        next
    }

    /// Sends what is due. The order is that of `QueuePair`.
    fn settled(&self, mut world: World, s: usize) -> World {
        let end = &world[s];
        let slots = end.inn.owes_slots() && self.mutation != Some(Mutation::SlotsAreNotReturned);
        let room = end.inn.owes_room() && self.mutation != Some(Mutation::RoomIsNotReturned);
        if slots && end.out.has_slot(true) || room && end.out.has_slot(self.no_reserve()) {
            world = self.post(&world, s, 0);
        }
        world
    }

    fn no_reserve(&self) -> bool {
        self.mutation == Some(Mutation::AnyTakesTheLastSlot)
    }

    fn can_send(&self, end: &End) -> bool {
        end.out.room() >= self.len && end.out.has_slot(self.no_reserve())
    }

    fn steps(&self, world: &World) -> Result<Vec<World>, String> {
        let mut steps = Vec::new();
        for s in 0..2 {
            let end = &world[s];
            if end.left > 0 && self.can_send(end) {
                let mut next = self.post(world, s, self.len);
                next[s].left -= 1;
                steps.push(next);
            }
            if self.tells && end.inn.owes_count() && end.out.has_slot(self.no_reserve()) {
                steps.push(self.post(world, s, 0));
            }
            if !end.coming.is_empty() {
                let mut next = world.clone();
                let (len, says) = next[s].coming.pop_front().unwrap_or_default();
                let recorded = next[s].inn.record(len.into(), false);
                recorded.map_err(|e| format!("{e:?}"))?;
                if !self.reads {
                    next[s].inn.consume(len.into());
                }
                let learned = next[s].out.learn(Immediate::unpack(says));
                learned.map_err(|e| format!("{e:?}"))?;
                steps.push(self.settled(next, s));
            }
            if end.inn.unread() > 0 {
                let mut next = world.clone();
                next[s].inn.consume(self.len);
                steps.push(self.settled(next, s));
            }
        }
        // Nothing is on its way and everything is read, but somebody still has something to send.
        if steps.is_empty() && world.iter().any(|end| end.left > 0) {
            return Err("nobody can go on".to_owned());
        }
        Ok(steps)
    }
}

fn search(shapes: [RingShape; 2], messages: [u8; 2], rules: &Rules) -> (usize, Result<(), String>) {
    let end = |n: usize| End {
        out: SendWindow::new(shapes[1 - n]),
        inn: ReceiveWindow::new(shapes[n]),
        left: messages[n],
        coming: VecDeque::new(),
    };
    let start = [end(0), end(1)];
    let mut known = HashSet::from([mark(&start)]);
    let mut queue = VecDeque::from([start]);
    let mut done = 0;
    while let Some(world) = queue.pop_front() {
        for (s, shape) in shapes.iter().enumerate() {
            if world[s].coming.len() as u64 > shape.slots() {
                return (known.len(), Err("a message without a receive".to_owned()));
            }
        }
        let rests = |end: &End| end.left == 0 && end.coming.is_empty();
        done += usize::from(world.iter().all(rests));
        match rules.steps(&world) {
            Ok(steps) => {
                let new = steps.into_iter().filter(|next| known.insert(mark(next)));
                queue.extend(new);
            }
            Err(problem) => return (known.len(), Err(problem)),
        }
    }
    assert!(
        done > 0,
        "a model in which nothing can succeed proves nothing"
    );
    (known.len(), Ok(()))
}

/// Sides, messages of each, bytes of a message.
fn check(slots: [u64; 2], messages: [u8; 2], len: u64, tells: bool) {
    let shapes = slots.map(|slots| RingShape::new(64, slots).unwrap());
    let reads = len > 1;
    let rules = Rules {
        len,
        mutation: None,
        tells,
        reads,
    };
    let (states, outcome) = search(shapes, messages, &rules);
    println!(
        "{slots:?} slots, {messages:?} messages of {len} bytes, tells {tells}: {states} states"
    );
    outcome.unwrap();
}

/// Messages of one byte: slots are short, and room is not. More than eight messages make the counters of slots wrap.
#[test]
fn nobody_waits_for_a_slot_for_ever() {
    check([4, 4], [9, 9], 1, false);
    check([4, 4], [20, 0], 1, true);
    check([4, 8], [8, 12], 1, false);
    check([4, 4], [4, 4], 1, true);
}

/// Messages of a half and a quarter of the ring: room is short.
#[test]
fn nobody_waits_for_room_for_ever() {
    check([16, 16], [6, 6], 32, false);
    check([4, 4], [3, 3], 16, false);
    if !cfg!(debug_assertions) {
        check([4, 4], [6, 3], 16, false);
    }
}

fn is_found(mutation: Mutation, slots: u64, len: u64) {
    let shapes = [RingShape::new(64, slots).unwrap(); 2];
    let rules = Rules {
        len,
        mutation: Some(mutation),
        tells: false,
        reads: len > 1,
    };
    let (states, outcome) = search(shapes, [5, 5], &rules);
    let problem = outcome.expect_err("not noticed");
    println!("{mutation:?}: {problem} ({states} states)");
}

#[test]
fn without_a_reserved_slot_two_sides_wait_for_each_other() {
    is_found(Mutation::AnyTakesTheLastSlot, 4, 1);
}

#[test]
fn without_credits_for_slots_a_sender_waits_for_ever() {
    is_found(Mutation::SlotsAreNotReturned, 4, 1);
}

#[test]
fn without_credits_for_room_a_sender_waits_for_ever() {
    is_found(Mutation::RoomIsNotReturned, 16, 32);
}
