//! Connections that end without any fault: nothing is suspended, and no attempt is made.

mod common;

use common::events::Events;
use common::{NEGOTIATED_MS, Program, apart, compile, pair, scratch};

/// Number of connections for each way of ending.
const CONNECTIONS: usize = 200;

/// The event logs after the connections have ended in the way `how`, ended by the program `ends_it`.
fn events(how: &str, ends_it: &str) -> Events {
    let program = compile("clean_ends", &[]);
    let log = scratch("clean-ends");
    let one = || {
        Program::new(&program)
            .env("T_ARGS", format!("{how} {CONNECTIONS} {ends_it}"))
            .env("SLIM_EVENTS", &log)
            .preloaded(true)
            .negotiation_ms(NEGOTIATED_MS)
    };
    let (server, client) = pair(one(), one());
    assert!(
        server.ok() && client.ok(),
        "{how}, by the {ends_it}\n{}\n{}",
        server.transcript(),
        client.transcript()
    );
    Events::read(&log)
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
            let counts = events.counts();
            println!("{how}, by the {ends_it}: {counts:?}");
            if ["attempt", "suspend"]
                .iter()
                .any(|kind| counts.contains_key(*kind))
            {
                bad.push(format!("{how}, by the {ends_it}: {counts:?}"));
            }
        }
    }
    assert!(bad.is_empty(), "\n{}", bad.join("\n"));
}
