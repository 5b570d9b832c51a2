//! Programs that execute other programs, which go on with the same connections.

mod common;

use common::breaks::{self, unnoticed};
use common::{NEGOTIATED_MS, Program, compile, own_network};

#[test]
fn connections_break_at_any_moment_of_many_execs() {
    unnoticed("executes", &["chain", "s-chain"], 1);
}

#[test]
fn connections_break_just_before_and_after_an_exec() {
    unnoticed("executes", &["before", "s-before", "after", "s-after"], 1);
}

#[test]
fn all_functions_that_execute_a_program() {
    unnoticed("executes", &["names"], 1);
}

#[test]
fn an_exec_that_fails_changes_nothing() {
    unnoticed("executes", &["failures", "s-failures"], 1);
}

#[test]
fn children_other_numbers_and_threads() {
    unnoticed(
        "executes",
        &["children", "two", "threads", "child-keeps"],
        1,
    );
}

#[test]
fn a_program_without_the_library_has_a_plain_connection_and_no_descriptors_of_slim() {
    unnoticed("executes", &["without", "s-without", "off"], 1);
    let other = compile("executes", &["-static"]);
    unnoticed("executes", &[&format!("static {}", other.display())], 1);
}

/// The exec ends these threads in the middle of their calls, after the connection has been handed over.
#[test]
fn other_threads_read_and_send_at_the_moment_of_an_exec() {
    unnoticed("executes", &["moving", "backlog", "moving", "backlog"], 1);
}

/// What it sends then may cost the connection, but no program hangs.
#[test]
fn a_handler_interrupts_the_thread_that_executes() {
    if !own_network("a_handler_interrupts_the_thread_that_executes") {
        return;
    }
    let program = compile("executes", &[]);
    for _ in 0..8 {
        let (server, client) = breaks::run(&program, "interrupted", 1, true, NEGOTIATED_MS);
        for end in [server.transcript(), client.transcript()] {
            assert!(!end.contains("TIME LIMIT"), "{end}");
        }
    }
}

/// Each waits until the others' have failed.
#[test]
fn execs_fail_in_several_threads() {
    unnoticed("executes", &["refused"], 1);
}

/// A handler that executes, too, finds nothing half done.
#[test]
fn a_handler_executes_while_its_thread_executes() {
    unnoticed("executes", &["refused-handlers"], 1);
}

/// A number that another thread closes is not the connection's only one.
#[test]
fn numbers_are_opened_and_closed_beside_an_exec() {
    unnoticed("executes", &["refused-duplicates"], 1);
}

#[test]
fn children_are_forked_beside_an_exec() {
    if !own_network("children_are_forked_beside_an_exec") {
        return;
    }
    let program = compile("exec_children", &[]);
    let run = |preloaded: bool| {
        let breaks = u8::from(preloaded);
        Program::new(&program)
            .arg("forked")
            .env("T_BREAKS", breaks.to_string())
            .env("T_OWN_NETWORK", "1")
            .negotiation_ms(u32::from(breaks) * NEGOTIATED_MS)
            .preloaded(preloaded)
            .run()
    };
    assert_eq!(run(true).transcript(), run(false).transcript());
}

/// `/proc/self/exe` is the loader then, which has none itself, as a statically linked program has none.
#[test]
fn a_program_that_its_loader_has_started_executes_a_static_one() {
    let loader = match cfg!(target_arch = "x86_64") {
        true => "/lib64/ld-linux-x86-64.so.2",
        false => "/lib/ld-linux-aarch64.so.1",
    };
    let program = compile("exec_children", &[]);
    let next = compile("exec_children", &["-static"]);
    // The test's own descriptors count, too.
    let run = |preloaded, negotiation| {
        let run = Program::new(loader)
            .arg(&program)
            .arg("executes")
            .arg(&next);
        run.negotiation_ms(negotiation).preloaded(preloaded).run()
    };
    let (bare, got) = (run(false, 0), run(true, NEGOTIATED_MS));
    assert_eq!(got.transcript(), bare.transcript());
}

/// The library says so once, and the program runs with a new session.
#[test]
fn what_was_left_by_another_version_or_process_is_not_taken() {
    let program = compile("left", &[]);
    let own = env!("CARGO_PKG_VERSION");
    for (kind, version, says) in [
        ("damaged", own, "damaged"),
        ("cut", own, "damaged"),
        ("format", own, "another version of SLIM"),
        ("version", "0.0.0", "another version of SLIM"),
        ("child", own, ""),
    ] {
        let run = Program::new(&program).args([kind, version]);
        let outcome = run.preloaded(true).run();
        // The socket was not named in the damaged file.
        let socket = if kind == "damaged" { 0 } else { -1 };
        let want = format!(
            "fcntl(NUMBER, F_GETFD) = -1 EBADF\nthe socket: {socket}\na connection: ping, pong\n"
        );
        assert_eq!(outcome.stdout, want, "{kind}");
        assert!(outcome.ok(), "{kind}: {outcome:?}");
        let lines = usize::from(!says.is_empty());
        assert_eq!(
            outcome.stderr.lines().count(),
            lines,
            "{kind}: {}",
            outcome.stderr
        );
        assert!(outcome.stderr.contains(says), "{kind}: {}", outcome.stderr);
    }
}
