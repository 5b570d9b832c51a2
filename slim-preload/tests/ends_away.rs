//! Processes that end, and connections that are closed, while the transport is broken: all bytes arrive, and after them the end of
//! the stream. Each program runs bare on unbroken connections, and under the preload on broken ones. Needs root.

mod common;

use common::breaks::unnoticed;

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
fn an_exit_with_few_descriptors() {
    unnoticed("ends_away", &["scarce"], 1);
}
