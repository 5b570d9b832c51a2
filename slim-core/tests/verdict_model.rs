//! Every interleaving of accusations, verdicts and fencing, for two and three processes and their witness: `docs/PROTOCOL.md`, section "The
//! witness".
//!
//! Any process may accuse any other at any moment, which covers every partition. A message that was sent may arrive at any later moment, any
//! number of times, or never. Processes may crash.
//!
//! One rule of the protocol is about time: a lost process that hears of no verdict fences itself within 10 s. The model takes it as given: what
//! waits for these 10 s happens only when the lost process is fenced or dead. `verdicts.rs` checks it, with clocks and with the real code.
//!
//! In every state it must hold that
//!
//! * a process that goes on has given up only processes that are fenced or dead;
//! * a process that neither accuses nor is accused is not lost.
//!
//! And in every state in which nothing can happen any more, no process waits for a verdict; and of two processes that both reach the witness,
//! exactly one is lost if there was an accusation.
//!
//! Each rule is also broken once, and then the search must find a state in which something is wrong.

use std::collections::{HashSet, VecDeque};

const MOST: usize = 3;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Process {
    #[default]
    Works,
    Fenced,
    Dead,
}

/// What a process knows of one that it has accused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Case {
    #[default]
    None,
    Asked,
    Lost,
    Settled,
}

type Pairs = [[bool; MOST]; MOST];

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct World {
    processes: [Process; MOST],
    /// By accuser and accused.
    cases: [[Case; MOST]; MOST],
    /// ACCUSE that was sent, by accuser and accused.
    accuse: Pairs,
    /// LOST that was sent, by receiver and lost process: not settled, and settled.
    lost: [Pairs; 2],
    /// FENCED that was sent.
    fenced: [bool; MOST],
    /// What the witness knows.
    convicts: [bool; MOST],
    confirmed: [bool; MOST],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mutation {
    /// The accuser goes on as soon as it knows of the verdict.
    SettledAtOnce,
    /// The accusation of a lost process counts.
    LostMayAccuse,
    /// The witness may be started anew, and knows nothing.
    WitnessForgets,
}

#[derive(Clone, Copy)]
struct Rules {
    count: usize,
    /// The witness may be out of reach, and processes may crash.
    faults: bool,
    mutation: Option<Mutation>,
}

impl World {
    fn is_out(&self, p: usize) -> bool {
        self.processes[p] != Process::Works
    }

    fn with(mut self, change: impl FnOnce(&mut World)) -> World {
        change(&mut self);
        self
    }
}

impl Rules {
    fn broken(&self, mutation: Mutation) -> bool {
        self.mutation == Some(mutation)
    }

    fn steps(&self, world: &World) -> Vec<World> {
        let mut steps = Vec::new();
        for p in 0..self.count {
            if !world.is_out(p) {
                self.alone(world, p, &mut steps);
            }
            for q in (0..self.count).filter(|q| *q != p) {
                if !world.is_out(p) {
                    self.of_pair(world, p, q, &mut steps);
                }
                if world.accuse[p][q] {
                    steps.push(self.at_witness(world, p, q, q));
                    // More others may have accused the accuser.
                    steps.push(self.at_witness(world, p, q, p));
                }
            }
            if world.fenced[p] {
                steps.push(world.with(|w| w.confirmed[p] = w.convicts[p]));
            }
        }
        if self.broken(Mutation::WitnessForgets) {
            steps.push(world.with(|w| {
                w.convicts = Default::default();
                w.confirmed = Default::default();
            }));
        }
        steps
    }

    /// Steps of a process that works.
    fn alone(&self, world: &World, p: usize, steps: &mut Vec<World>) {
        if self.faults {
            steps.push(world.with(|w| w.processes[p] = Process::Dead));
            // It hears nothing from the witness.
            if world.cases[p].contains(&Case::Asked) {
                steps.push(world.with(|w| w.processes[p] = Process::Fenced));
            }
        }
        if world.lost[1][p][p] {
            steps.push(world.with(|w| {
                w.processes[p] = Process::Fenced;
                w.fenced[p] = true;
            }));
        }
    }

    /// Steps of a process `p` that works and `q`.
    fn of_pair(&self, world: &World, p: usize, q: usize, steps: &mut Vec<World>) {
        match world.cases[p][q] {
            Case::None => steps.push(world.with(|w| {
                w.cases[p][q] = Case::Asked;
                w.accuse[p][q] = true;
            })),
            Case::Asked if world.lost[0][p][q] || world.lost[1][p][q] => {
                steps.push(world.with(|w| {
                    w.cases[p][q] = match self.broken(Mutation::SettledAtOnce) {
                        true => Case::Settled,
                        false => Case::Lost,
                    };
                    // The accuser tells the lost process, too.
                    w.lost[1][q][q] = true;
                }));
            }
            Case::Lost if world.lost[1][p][q] || world.is_out(q) => {
                steps.push(world.with(|w| w.cases[p][q] = Case::Settled));
            }
            _ => {}
        }
    }

    /// The witness decides the accusation of `q` by `p`, if it must, against `against`.
    fn at_witness(&self, world: &World, p: usize, q: usize, against: usize) -> World {
        world.with(|w| {
            if w.convicts[p] && !self.broken(Mutation::LostMayAccuse) {
                w.lost[1][p][p] = true;
                return;
            }
            if !w.convicts[q] {
                w.convicts[against] = true;
                w.lost[1][against][against] = true;
            }
            if against == p && !w.convicts[q] {
                return;
            }
            let settled = w.confirmed[q] || w.is_out(q);
            w.lost[usize::from(settled)][p][q] = true;
        })
    }

    /// What is wrong in a state, whatever comes next.
    fn problem(&self, world: &World) -> Option<String> {
        let all_out = (0..self.count).all(|p| world.is_out(p));
        if self.count == 2 && !self.faults && all_out {
            return Some("both processes are lost".to_owned());
        }
        for p in 0..self.count {
            for q in (0..self.count).filter(|q| *q != p) {
                let given_up = world.cases[p][q] == Case::Settled;
                if !world.is_out(p) && given_up && !world.is_out(q) {
                    return Some(format!("{p} has given {q} up, and both go on"));
                }
            }
            let mut others = 0..self.count;
            let party = others.any(|other| world.accuse[other][p] || world.accuse[p][other]);
            if !self.faults && world.is_out(p) && !party {
                return Some(format!("{p} is lost without an accusation"));
            }
        }
        None
    }

    /// What is wrong in a state in which nothing can happen any more.
    fn problem_at_end(&self, world: &World) -> Option<String> {
        let out = (0..self.count).filter(|p| world.is_out(*p)).count();
        let accused = world.accuse.iter().flatten().any(|accused| *accused);
        for p in (0..self.count).filter(|p| !world.is_out(*p)) {
            let waits = |case: &&Case| matches!(case, Case::Asked | Case::Lost);
            if world.cases[p].iter().any(|case| waits(&case)) {
                return Some(format!("{p} waits for ever"));
            }
        }
        let none = self.count == 2 && !self.faults && accused && out == 0;
        none.then(|| "none of two processes is lost".to_owned())
    }

    /// Number of states, and how many of them are ends.
    fn search(&self) -> Result<(usize, usize), String> {
        let start = World::default();
        let mut known = HashSet::from([start]);
        let mut queue = VecDeque::from([start]);
        let mut ends = 0;
        while let Some(world) = queue.pop_front() {
            let mut steps = self.steps(&world);
            steps.retain(|next| *next != world);
            let mut problem = self.problem(&world);
            if steps.is_empty() {
                ends += 1;
                problem = problem.or_else(|| self.problem_at_end(&world));
            }
            if let Some(problem) = problem {
                return Err(format!("{problem}, in\n{world:#?}"));
            }
            queue.extend(steps.into_iter().filter(|next| known.insert(*next)));
        }
        Ok((known.len(), ends))
    }
}

#[test]
fn there_is_one_verdict() {
    for (count, faults) in [(2, false), (2, true), (3, false), (3, true)] {
        let rules = Rules {
            count,
            faults,
            mutation: None,
        };
        let (states, ends) = rules.search().unwrap_or_else(|problem| panic!("{problem}"));
        println!("{count} processes, faults: {faults}: {states} states, {ends} ends");
        assert!(ends > 0, "a model that never ends proves nothing");
    }
}

fn is_found(mutation: Mutation) {
    let found = [false, true].map(|faults| {
        let rules = Rules {
            count: 2,
            faults,
            mutation: Some(mutation),
        };
        rules.search().err()
    });
    let problem = found.into_iter().flatten().next();
    let problem = problem.unwrap_or_else(|| panic!("{mutation:?} was not noticed"));
    println!(
        "{mutation:?}: {}",
        problem.lines().next().unwrap_or_default()
    );
}

#[test]
fn going_on_before_the_lost_process_is_fenced_is_noticed() {
    is_found(Mutation::SettledAtOnce);
}

#[test]
fn accusations_by_lost_processes_are_noticed() {
    is_found(Mutation::LostMayAccuse);
}

#[test]
fn a_witness_that_forgets_is_noticed() {
    is_found(Mutation::WitnessForgets);
}
