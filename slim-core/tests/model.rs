//! Every interleaving of the resume handshake, for small bounds.
//!
//! The rules are those of `docs/PROTOCOL.md`, section "The resume handshake and why it is correct",
//! over two kernels that may receive, acknowledge and die at any moment. Both sides may start a
//! resume at any moment, with or without an error, and give it up again. A message on a connection
//! that one side has given up may still be read by the other side. Draining a transport and closing
//! it are two steps, and anything may arrive in between.
//!
//! In every state it must hold that
//!
//! * a side reads the byte that it needs next, never another one: no gap, no duplicate;
//! * the peer has every byte that a side has trimmed, or its kernel holds that byte for it;
//! * every byte that must be replayed is in the replay buffer.
//!
//! The number of states is printed. Each rule is also broken once, and then the search must find a
//! state in which something is wrong.

#[path = "model/mark.rs"]
mod mark;
#[path = "model/rules.rs"]
mod rules;
#[path = "model/state.rs"]
mod state;

use std::collections::{HashSet, VecDeque};

use mark::mark;
use rules::{Bounds, Mutation, Rules};
use state::World;

struct Found {
    states: usize,
    /// States in which both sides use one new transport and have every byte.
    done: usize,
    problem: Option<String>,
}

fn search(rules: &Rules) -> Found {
    let start = World::start();
    let mut known = HashSet::from([mark(&start)]);
    let mut queue = VecDeque::from([start]);
    let mut done = 0;
    while let Some(world) = queue.pop_front() {
        done += usize::from(is_done(&world, rules.bounds));
        for step in rules.steps(&world) {
            match step {
                Ok(mut next) => {
                    next.tidy();
                    if known.insert(mark(&next)) {
                        queue.push_back(next);
                    }
                }
                Err(problem) => {
                    return Found {
                        states: known.len(),
                        done,
                        problem: Some(format!("{problem}, after\n{world:#?}")),
                    };
                }
            }
        }
    }
    Found {
        states: known.len(),
        done,
        problem: None,
    }
}

fn is_done(world: &World, bounds: Bounds) -> bool {
    let [a, b] = &world.sides;
    let all = |s: usize| world.sides[s].received == bounds.bytes[1 - s];
    a.live == b.live && a.live.is_some_and(|c| c > 0) && all(0) && all(1)
}

fn check(bytes: [u8; 2], conns: u8, mutation: Option<Mutation>) {
    check_kinds(bytes, conns, mutation, 0);
}

/// `software`: see [`Rules::software`].
fn check_kinds(bytes: [u8; 2], conns: u8, mutation: Option<Mutation>, software: u8) {
    let bounds = Bounds { bytes, conns };
    let found = search(&Rules {
        bounds,
        mutation,
        software,
    });
    println!(
        "{} bytes one way, {} the other, {conns} connections (software: {software:#b}): {} states, {} of them done",
        bytes[0], bytes[1], found.states, found.done
    );
    if let Some(problem) = found.problem {
        panic!("{problem}");
    }
    assert!(
        found.done > 0,
        "a model in which nothing can succeed proves nothing"
    );
}

#[test]
fn nothing_is_lost_doubled_or_forgotten() {
    check([1, 1], 3, None);
    if !cfg!(debug_assertions) {
        check([2, 2], 3, None);
        check([3, 2], 3, None);
        check([1, 1], 4, None);
    }
}

/// Much memory and some minutes: run it by name, in release.
#[test]
#[ignore = "takes minutes"]
fn nothing_is_lost_with_larger_bounds() {
    check([2, 2], 4, None);
}

/// Connections of both kinds in each order. The side that suspends a flow drains a connection of software's at once, which over TCP is the
/// mistake that `draining_before_resume_ok_is_noticed` finds.
#[test]
fn nothing_is_lost_where_only_software_acknowledges() {
    for software in 1..8 {
        check_kinds([1, 1], 3, None, software);
    }
    if !cfg!(debug_assertions) {
        check_kinds([2, 2], 3, None, 0b111);
        check_kinds([3, 2], 3, None, 0b111);
    }
}

/// What a suspended side trims, and what is lost with CONFIRM, is only what software has counted.
#[test]
fn rules_3_and_5_are_not_needed_where_only_software_acknowledges() {
    for mutation in [Mutation::TrimSuspended, Mutation::DropAwaiting] {
        check_kinds([1, 1], 3, Some(mutation), 0b111);
        if !cfg!(debug_assertions) {
            check_kinds([2, 2], 3, Some(mutation), 0b111);
        }
    }
}

/// Precedence between two resumes is needed for progress. Whether bytes are lost does not depend on it.
#[test]
fn precedence_is_not_needed_for_safety() {
    check([1, 1], 3, Some(Mutation::AcceptBelowOwn));
}

fn is_found(mutation: Mutation) {
    is_found_in(mutation, 0);
}

fn is_found_in(mutation: Mutation, software: u8) {
    let mut total = 0;
    for conns in [2, 3] {
        let bounds = Bounds {
            bytes: [1, 1],
            conns,
        };
        let found = search(&Rules {
            bounds,
            mutation: Some(mutation),
            software,
        });
        total += found.states;
        if let Some(problem) = found.problem {
            let line = problem.lines().next().unwrap_or_default();
            println!("{mutation:?}: {line} ({total} states)");
            return;
        }
    }
    panic!("{mutation:?} was not noticed in {total} states");
}

#[test]
fn draining_before_resume_ok_is_noticed() {
    is_found(Mutation::DrainEarly);
}

#[test]
fn trimming_while_suspended_is_noticed() {
    is_found(Mutation::TrimSuspended);
}

#[test]
fn dropping_a_connection_that_may_hold_confirm_is_noticed() {
    is_found(Mutation::DropAwaiting);
}

#[test]
fn putting_the_old_connection_back_is_noticed() {
    is_found(Mutation::PutBack);
}

#[test]
fn using_a_superseded_connection_is_noticed() {
    is_found(Mutation::UseSuperseded);
}

#[test]
fn a_count_that_is_told_before_the_last_byte_is_read_is_noticed() {
    is_found(Mutation::CountEarly);
    is_found_in(Mutation::CountEarly, 0b111);
}
