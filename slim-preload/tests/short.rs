//! Short connections between processes whose agents already know each other.

mod common;

use common::events::Events;
use common::{Outcome, Program, compile, preload, scratch};
use std::fs;
use std::path::Path;

const COUNT: usize = 500;

fn run(program: &Path, events: Option<&Path>) -> Outcome {
    let run = Program::new(program).arg(COUNT.to_string());
    match events {
        Some(events) => run
            .env("LD_PRELOAD", preload())
            .env("SLIM_EVENTS", events.join("%p.jsonl"))
            .run(),
        None => run.run(),
    }
}

#[test]
fn each_of_many_short_connections_is_protected() {
    let program = compile("short", &[]);
    let events = scratch("short-events");
    fs::create_dir_all(&events).expect("a directory for the events");
    let (bare, got) = (run(&program, None), run(&program, Some(&events)));
    assert!(bare.ok(), "{bare:?}");
    // The transcript also lists UDP ports of the process that the kernel may give to a listener: there must be none.
    assert_eq!(bare.transcript(), got.transcript());
    let logs = fs::read_dir(&events).expect("the events");
    let live: Vec<usize> = logs
        .map(|log| Events::read(&log.expect("a log").path()).count("live"))
        .collect();
    // Both ends log every flow, except the first few: before the processes know each other a connection may end before its
    // negotiation does.
    assert_eq!(live.len(), 2, "{live:?}");
    assert!(live.iter().all(|n| *n >= COUNT - 6), "{live:?}");
}
