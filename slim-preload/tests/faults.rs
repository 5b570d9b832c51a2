//! Connections that break under a program with the preload at both ends: the program must not notice.
//!
//! Each program runs bare on whole connections, and then under the preload while every connection of its network
//! namespace is destroyed (`SOCK_DESTROY`) again and again; what it writes down must be the same. Needs root.

mod common;

use common::{Outcome, Program, SETTLED, compare, compile, own_network, pair, scratch};
use std::fs;
use std::path::Path;

fn run(
    program: &Path,
    args: &str,
    breaks: u32,
    preloaded: bool,
    settle: u32,
) -> (Outcome, Outcome) {
    let one = || {
        Program::new(program)
            .env("T_ARGS", args)
            .env("T_BREAKS", breaks.to_string())
            .env("T_OWN_NETWORK", "1")
            .preloaded(preloaded)
            .settle(settle)
    };
    pair(one(), one())
}

fn differences(name: &str, bare: &(Outcome, Outcome), got: &(Outcome, Outcome)) -> Vec<String> {
    [("server", &bare.0, &got.0), ("client", &bare.1, &got.1)]
        .into_iter()
        .filter_map(|(end, want, got)| compare(&format!("{name}, {end}"), want, got))
        .collect()
}

/// What the program says with the preload and broken connections is what it says bare with whole ones.
fn unnoticed(program: &str, args: &[&str], breaks: u32) {
    if !own_network(&format!("{program} {args:?}")) {
        return;
    }
    let binary = compile(program, &[]);
    let mut bad = Vec::new();
    for args in args {
        let bare = run(&binary, args, 0, false, 0);
        let got = run(&binary, args, breaks, true, SETTLED);
        bad.extend(differences(&format!("{program} {args}"), &bare, &got));
    }
    assert!(bad.is_empty(), "\n{}", bad.join("\n"));
}

#[test]
fn transfers_with_blocking_calls() {
    unnoticed("xfer", &["block", "msg", "much", "waitall", "dup"], 12);
}

#[test]
fn transfers_that_look_first() {
    unnoticed("xfer", &["peek", "fionread", "time-limits", "sendfile"], 12);
}

#[test]
fn transfers_with_poll_and_select() {
    unnoticed("xfer", &["poll", "ppoll", "select", "pselect"], 12);
}

#[test]
fn transfers_with_epoll() {
    unnoticed(
        "xfer",
        &["epoll-level", "epoll-edge", "epoll-oneshot", "epoll-two"],
        12,
    );
}

/// The same breaks end a bare transfer: the tests above can fail.
#[test]
fn bare_transfers_do_not_survive() {
    if !own_network("bare_transfers_do_not_survive") {
        return;
    }
    let binary = compile("xfer", &[]);
    let whole = run(&binary, "block", 0, false, 0);
    let broken = run(&binary, "block", 12, false, 0);
    assert!(
        !differences("xfer block", &whole, &broken).is_empty(),
        "nothing was broken"
    );
}

/// The preload resumed, and said so; otherwise nothing above was tested.
#[test]
fn resumes_are_written_to_the_event_log() {
    if !own_network("resumes_are_written_to_the_event_log") {
        return;
    }
    let binary = compile("xfer", &[]);
    let log = scratch("events");
    let one = || {
        Program::new(&binary)
            .env("T_ARGS", "block")
            .env("T_BREAKS", "5")
            .env("T_OWN_NETWORK", "1")
            .env("SLIM_EVENTS", &log)
            .preloaded(true)
            .settle(SETTLED)
    };
    let (server, client) = pair(one(), one());
    assert!(
        server.ok() && client.ok(),
        "{}\n{}",
        server.transcript(),
        client.transcript()
    );
    let log = fs::read_to_string(&log).expect("an event log");
    let resumes = log
        .lines()
        .filter(|l| l.contains("\"kind\":\"resume\""))
        .count();
    assert!(resumes >= 6, "{resumes} resumes in\n{log}");
    assert!(!log.contains("escalate"), "{log}");
}

#[test]
fn idle_connections() {
    unnoticed("broken", &["idle"], 1);
}

#[test]
fn options_go_with_the_connection() {
    unnoticed("broken", &["options", "options-exec"], 1);
}

#[test]
fn half_closed_connections() {
    unnoticed("broken", &["half-close"], 1);
}

#[test]
fn closed_with_bytes_on_the_way() {
    unnoticed("broken", &["linger"], 1);
}

#[test]
fn closed_and_gone_with_bytes_on_the_way() {
    unnoticed("broken", &["linger-exit"], 1);
}

#[test]
fn gone_without_having_noticed() {
    unnoticed("broken", &["leave"], 1);
}

#[test]
fn ended_while_it_is_replaced() {
    unnoticed("broken", &["shut"], 1);
}

#[test]
fn one_send_of_64_mb() {
    unnoticed("broken", &["big-send"], 1);
}

#[test]
fn waiting_calls() {
    unnoticed("broken", &["waits"], 1);
}

#[test]
fn broken_while_negotiating() {
    unnoticed("broken", &["hello", "hello-shut"], 1);
}

#[test]
fn broken_while_connecting() {
    unnoticed("broken", &["connecting"], 1);
}

#[test]
fn several_senders_on_one_connection() {
    unnoticed("senders", &["threads"], 12);
}

#[test]
fn a_thousand_connections_at_once() {
    unnoticed("broken", &["many"], 1);
}

#[test]
fn more_connections_than_free_descriptors() {
    unnoticed("broken", &["scarce"], 1);
}

#[test]
fn no_descriptor_is_left() {
    unnoticed("broken", &["none-left", "none-left-close"], 1);
}

#[test]
fn copies_of_descriptors() {
    unnoticed("broken", &["copies"], 1);
}

#[test]
fn calls_right_after_a_break() {
    unnoticed("broken", &["at-once"], 1);
}

#[test]
fn forks_while_the_connection_is_away() {
    unnoticed("handed", &["forked", "dark", "late", "reading"], 1);
}

#[test]
fn programs_started_while_the_connection_is_away() {
    unnoticed("handed", &["started", "exec"], 1);
}

#[test]
fn descriptors_passed_while_the_connection_is_away() {
    unnoticed("handed", &["passed", "passed-many", "passed-unread"], 1);
}

#[test]
fn other_numbers_while_the_connection_is_away() {
    unnoticed("handed", &["numbers", "streams"], 1);
}

#[test]
fn handed_on_at_any_moment_of_a_break() {
    unnoticed("handed", &["any-moment"], 1);
}

/// A peer that is really gone is reported as bare, and as fast.
#[test]
fn a_peer_that_dies() {
    unnoticed(
        "broken",
        &[
            "death",
            "death-poll",
            "death-unread",
            "death-send",
            "death-broken",
        ],
        0,
    );
}
