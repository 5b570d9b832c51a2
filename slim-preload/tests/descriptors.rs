//! Descriptors that are copied, closed, passed on, or shared with other processes while their connections break.

mod common;

use common::breaks::{differences, run, unnoticed};
use common::{NEGOTIATED_MS, compile, own_network};

/// Child processes that share the descriptor table, or close inherited descriptors where no hook sees it.
#[test]
fn other_processes_with_the_same_descriptors() {
    unnoticed("kindred", &["shares", "server"], 1);
}

/// The closed descriptors include SLIM's own: the connection cannot be resumed, and no program waits for that.
#[test]
fn all_descriptors_closed_where_no_hook_sees_it() {
    for args in ["closes-all", "closes-each", "closes-in-child", "away"] {
        if !own_network(args) {
            return;
        }
        let binary = compile("kindred", &[]);
        let bare = run(&binary, args, 1, false, 0);
        assert!(bare.0.ok() && bare.1.ok(), "{}", bare.1.transcript());
        let got = run(&binary, args, 1, true, NEGOTIATED_MS);
        let bad = differences(args, &bare, &got);
        assert!(bad.is_empty(), "\n{}", bad.join("\n"));
        let took = got.0.took.max(got.1.took);
        assert!(took.as_secs() < 10, "{args}: ended after {took:?}");
    }
}

#[test]
fn more_connections_than_free_descriptors() {
    unnoticed("broken", &["scarce"], 1);
}

#[test]
fn no_descriptor_is_left() {
    unnoticed("broken", &["none-left", "none-left-close"], 1);
}

/// The program has reached its limit on open files: its connections are resumed one after the other.
#[test]
fn programs_at_their_limit_on_open_files() {
    let ways = [
        "200 900 client",
        "200 900 server",
        "200 900 both",
        "200 200 client",
        "200 200 server",
        "200 200 both",
    ];
    unnoticed("full", &ways, 1);
}

#[test]
fn copies_of_descriptors() {
    unnoticed("broken", &["copies"], 1);
}

/// A `dup2` that the kernel refuses does not close the descriptor that it would have replaced.
#[test]
fn copies_that_are_refused() {
    unnoticed("refused", &[""], 1);
}

#[test]
fn registrations_that_no_hook_sees() {
    let ways = [
        "level",
        "edge",
        "once",
        "level-unseen",
        "edge-unseen",
        "once-unseen",
        "level-change",
        "edge-change",
    ];
    unnoticed("wakes", &ways, 1);
}

/// A file that the program puts under a connection's descriptor number, where no hook sees it, stays there.
#[test]
fn numbers_taken_while_the_connection_is_away() {
    if !own_network("numbers_taken_while_the_connection_is_away") {
        return;
    }
    let binary = compile("taken", &[]);
    for what in ["file", "pair", "sink"] {
        let bare = run(&binary, what, 0, false, 0);
        let mut got = run(&binary, what, 1, true, NEGOTIATED_MS);
        // SLIM reports the lost connections.
        for end in [&mut got.0, &mut got.1] {
            assert!(
                end.stderr.lines().all(|l| l.contains("escalate")),
                "{}",
                end.stderr
            );
            end.stderr.clear();
        }
        let bad = differences(&format!("taken {what}"), &bare, &got);
        assert!(bad.is_empty(), "\n{}", bad.join("\n"));
    }
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
fn descriptors_passed_on_at_any_moment_of_a_break() {
    unnoticed("handed", &["any-moment"], 1);
}

#[test]
fn epoll_instances_whose_numbers_change_hands() {
    unnoticed("mirrors", &["fork", "first", "second", "over"], 1);
}

/// epoll goes on reporting a connection that was registered by a descriptor number that is closed by now.
#[test]
fn registered_by_a_number_that_is_closed() {
    let cases = ["copy", "copy-late", "copy-over", "copy-edge", "copy-once"];
    unnoticed("mirrors", &cases, 1);
}
