//! Processes that end, and connections that are closed, while the transport is broken: all bytes arrive, and after them the end of
//! the stream. Each program runs bare on unbroken connections, and under the preload on broken ones. Needs root.

mod common;

use common::breaks::{run, unnoticed};
use common::{NEGOTIATED_MS, compile, own_network};

/// The exit handlers of a process run in its last thread, also if the first thread has ended before. Connections still survive
/// breaks then, and the process waits for the last bytes.
#[test]
fn the_last_thread_returns_after_the_first_has_ended() {
    unnoticed(
        "ends_away",
        &["first-ends", "first-ends,words", "first-ends,early"],
        1,
    );
}

#[test]
fn closed_before_the_break_is_noticed() {
    unnoticed(
        "ends_away",
        &[
            "close",
            "close,empty",
            "close,empty,swap",
            "close,lingers",
            "close,lingers,seen",
            "close,lingers,swap",
            "close,lingers,empty",
            "close,lingers,empty,seen",
            "close,lingers,empty,waits",
        ],
        1,
    );
}

#[test]
fn a_close_with_unread_bytes_resets_the_connection() {
    unnoticed("ends_away", &["unread", "unread-seen"], 1);
}

#[test]
fn a_second_exit_waits_for_the_first() {
    let cases = ["exits-twice", "exits-quickly", "exits-in-handler"];
    unnoticed("ends_away", &cases, 1);
}

#[test]
fn shutdowns_before_the_break_is_noticed() {
    unnoticed("ends_away", &["shutdowns"], 1);
}

#[test]
fn an_exit_with_few_descriptors() {
    unnoticed("ends_away", &["scarce"], 1);
}

/// A process ends, or closes a broken connection, that a forked child has, too. An orderly end would be false as long as the child has
/// the connection. If the child has closed it, all bytes arrive, and then the end.
#[test]
fn a_child_that_keeps_the_connection() {
    if !own_network("a_child_that_keeps_the_connection") {
        return;
    }
    let binary = compile("child_keeps", &[]);
    for (args, wanted) in [
        ("exit", "an error\n"),
        ("close", "an error\n"),
        ("close,blind", "an error\n"),
        ("exit,closed", "4 bytes, and the end\n"),
        ("close,closed", "4 bytes, and the end\n"),
    ] {
        let (server, client) = run(&binary, args, 0, true, NEGOTIATED_MS);
        let said = (server.stdout.as_str(), client.ok());
        let client = client.transcript();
        assert_eq!(
            said,
            (wanted, true),
            "{args}\n{}\n{client}",
            server.transcript()
        );
    }
}
