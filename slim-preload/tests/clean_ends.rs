//! Connections that end without any fault: nothing is suspended, and no attempt is made.

mod common;

use common::{Program, SETTLED, apart, compile, pair, scratch};
use std::collections::BTreeMap;
use std::fs;

/// Connections that end in each way.
const CONNECTIONS: usize = 200;

/// How often each kind of event is in the logs, once the connections have ended in this way.
fn events(how: &str, ends_it: &str) -> BTreeMap<String, usize> {
    let program = compile("clean_ends", &[]);
    let log = scratch("clean-ends");
    let one = || {
        Program::new(&program)
            .env("T_ARGS", format!("{how} {CONNECTIONS} {ends_it}"))
            .env("SLIM_EVENTS", &log)
            .preloaded(true)
            .settle(SETTLED)
    };
    let (server, client) = pair(one(), one());
    assert!(
        server.ok() && client.ok(),
        "{how}, by the {ends_it}\n{}\n{}",
        server.transcript(),
        client.transcript()
    );
    let mut events = BTreeMap::new();
    for line in fs::read_to_string(&log).expect("an event log").lines() {
        let kind = line.split("\"kind\":\"").nth(1).expect("a kind");
        let kind = kind.split('"').next().expect("its end");
        *events.entry(kind.to_owned()).or_default() += 1;
    }
    events
}

#[test]
fn nothing_is_taken_for_a_fault() {
    apart();
    let mut bad = Vec::new();
    for how in [
        "read",
        "loop-read",
        "write",
        "loop-write",
        "unread",
        "hard",
        "half",
        "both",
        "exit",
    ] {
        for ends_it in ["client", "server"] {
            let events = events(how, ends_it);
            println!("{how}, by the {ends_it}: {events:?}");
            if ["attempt", "suspend"]
                .iter()
                .any(|kind| events.contains_key(*kind))
            {
                bad.push(format!("{how}, by the {ends_it}: {events:?}"));
            }
        }
    }
    assert!(bad.is_empty(), "\n{}", bad.join("\n"));
}
