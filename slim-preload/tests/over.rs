//! Connections that are over leave nothing behind for good. However a connection has ended, its descriptors, its replay
//! buffer and its table entries are freed; the state that outlives it is bounded.

mod common;

use common::events::Events;
use common::{Outcome, Program, compile, own_network, pair, pair_started, scratch};
use std::path::Path;
use std::time::Duration;

fn one(program: &Path, args: &str) -> Program {
    Program::new(program)
        .env("T_ARGS", args)
        .env("T_OWN_NETWORK", "1")
}

fn good(outcome: &Outcome) {
    assert!(outcome.ok(), "{}", outcome.transcript());
}

/// The number that follows `what` in the line that begins with `when`.
fn figure(outcome: &Outcome, when: &str, what: &str) -> i64 {
    let line = outcome.stdout.lines().find(|l| l.starts_with(when));
    let number = line.and_then(|l| {
        l.split_once(what)?
            .1
            .split_whitespace()
            .next()?
            .parse()
            .ok()
    });
    number.unwrap_or_else(|| panic!("no {what:?} of {when:?} in\n{}", outcome.transcript()))
}

/// Growth of a process between its two reports, in bytes for each of `connections`.
fn growth(outcome: &Outcome, connections: i64) -> i64 {
    let kilobytes = |when| figure(outcome, when, "resident ");
    (kilobytes("over:") - kilobytes("begun:")) * 1024 / connections
}

#[test]
fn clients_without_slim() {
    if !own_network("clients_without_slim") {
        return;
    }
    let program = compile("over", &[]);
    let all = 24_000;
    let args = format!("plain-clients {all}");
    let (server, client) = pair(one(&program, &args).preloaded(true), one(&program, &args));
    good(&client);
    good(&server);
    println!("{}", server.stdout);
    let grown = growth(&server, all * 3 / 4);
    assert!(grown < 40, "{grown} bytes a connection");
    assert_eq!(figure(&server, "over:", "descriptors "), 0);
}

/// The log line with the sizes of a process's tables at its exit.
fn tables(outcome: &Outcome) -> &str {
    let line = outcome.stderr.lines().rfind(|l| l.contains("at exit: "));
    line.unwrap_or_else(|| panic!("no tables in\n{}", outcome.transcript()))
}

/// The number of rounds through all ways to end, and the number of connections for each way. `scripts/soak` sets SLIM_SOAK.
fn ways() -> (i64, i64) {
    match std::env::var_os("SLIM_SOAK") {
        Some(_) => (25, 100),
        None => (4, 20),
    }
}

/// Connections end in every way, again and again, at both ends. Some are legacy: by a refusal, by silence, by another key.
/// Some become plain TCP: by fork, exec, passing, splicing and stdio. Some are resumed, or escalated after all attempts or
/// because the peer is gone. They are closed, reset or half-closed: at once, while suspended, or with bytes undelivered.
#[test]
fn every_way_to_end() {
    if !own_network("every_way_to_end") {
        return;
    }
    let program = compile("over", &[]);
    let (rounds, each) = ways();
    let end = || {
        one(&program, &format!("ways {rounds} {each}"))
            .env("SLIM_ATTEMPTS", "1")
            .env("SLIM_ATTEMPT_TIMEOUTS", "0.5")
            .env("SLIM_HELLO_TIMEOUT", "0.3")
            .env("SLIM_LOG", "debug")
            .env("T_LIMIT_SCALE", "12")
            .negotiation_ms(30)
            .preloaded(true)
    };
    let (server, client) = pair_started(end(), end());
    let limit = Duration::from_secs(1600);
    let ends = [server.finish_within(limit), client.finish_within(limit)];
    for end in &ends {
        good(end);
        let exit = tables(end);
        println!("{}{exit}", end.stdout);
        for what in ["flows: 0,", "names: 0,", "conns: 0,", "questions: 0,"] {
            assert!(exit.contains(what), "{exit}");
        }
        assert_eq!(figure(end, "over:", "descriptors "), 0);
        let woken = figure(end, "over: wake-ups", "wake-ups ");
        assert!(woken <= 6, "woken {woken} times with nothing to do");
        let connections =
            figure(end, "over after", "after ") - figure(end, "begun after", "after ");
        let grown = growth(end, connections);
        // The tables remember some thousands of flows for a while after their end, in a few hundred bytes each.
        let most = if rounds > 4 { 50 } else { 400 };
        assert!(grown <= most, "{grown} bytes a connection");
    }
}

/// A server closes connections to clients that do not read. Returns how many descriptors it keeps for them, and how many
/// `orphaned` events name `limit`. The clients still get every byte.
fn not_read(
    test: &str,
    bytes: u64,
    settings: &[(&str, &str)],
    limit: &str,
) -> Option<(i64, usize)> {
    if !own_network(test) {
        return None;
    }
    let program = compile("over", &[]);
    let log = scratch("events");
    let end = || {
        one(&program, &format!("not-read {bytes} 40"))
            .negotiation_ms(60)
            .preloaded(true)
    };
    let server = settings
        .iter()
        .fold(end(), |server, (name, value)| server.env(name, value));
    let (server, client) = pair(server.env("SLIM_EVENTS", &log), end());
    good(&server);
    good(&client);
    assert!(client.stdout.contains("all: 1"), "{}", client.transcript());
    let events = Events::read(&log);
    let limit = format!("\"limit\":\"{limit}\"");
    let orphaned = events
        .of_kind("orphaned")
        .filter(|line| line.contains(&limit));
    Some((figure(&server, "kept:", "descriptors "), orphaned.count()))
}

/// One descriptor is the mailbox, which the server's process has after its first connections.
const MAILBOX: i64 = 1;

#[test]
fn clients_that_do_not_read_for_long() {
    let settings = [("SLIM_LINGER", "1")];
    let found = not_read(
        "clients_that_do_not_read_for_long",
        1 << 20,
        &settings,
        "time",
    );
    if let Some((descriptors, orphaned)) = found {
        assert_eq!((descriptors, orphaned), (MAILBOX, 40));
    }
}

#[test]
fn clients_that_do_not_read_much() {
    let settings = [("SLIM_LINGER", "3600"), ("SLIM_LINGER_MEMORY", "1")];
    let found = not_read(
        "clients_that_do_not_read_much",
        1 << 30,
        &settings,
        "memory",
    );
    if let Some((descriptors, orphaned)) = found {
        assert!(descriptors < 4 + MAILBOX, "{descriptors}");
        assert_eq!(orphaned as i64, 40 - (descriptors - MAILBOX));
    }
}

#[test]
fn many_clients_that_do_not_read() {
    let settings = [("SLIM_LINGER", "3600"), ("T_FILES", "256")];
    let found = not_read("many_clients_that_do_not_read", 1 << 30, &settings, "flows");
    if let Some((descriptors, orphaned)) = found {
        assert_eq!((descriptors, orphaned), (16 + MAILBOX, 24));
    }
}
