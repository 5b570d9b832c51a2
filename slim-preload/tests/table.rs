//! What a program can ask SLIM: `slim-c/include/slim_table.h`. The program does not link SLIM, and finds the table by name.

mod common;

use std::path::{Path, PathBuf};

use common::{NEGOTIATED_MS, Outcome, Program, compile, own_network, pair};

fn program() -> PathBuf {
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("../slim-c/include");
    compile("table", &[&format!("-I{}", include.display()), "-ldl"])
}

fn one(binary: &Path, preloaded: bool) -> Program {
    Program::new(binary)
        .env("T_OWN_NETWORK", "1")
        .preloaded(preloaded)
        .negotiation_ms(NEGOTIATED_MS)
}

fn is_done(got: &Outcome) {
    print!("{}", got.stderr);
    assert!(got.ok() && got.stdout == "done\n", "{}", got.transcript());
}

/// Runs a case as a pair of programs; returns the client's outcome.
fn watched(case: &str, settings: &[(&str, &str)]) {
    if !own_network(case) {
        return;
    }
    let binary = program();
    let one = || {
        let one = one(&binary, true).env("T_ARGS", case);
        settings
            .iter()
            .fold(one, |one, (name, value)| one.env(name, value))
    };
    is_done(&pair(one(), one()).1);
}

fn alone(case: &str, settings: &[(&str, &str)]) {
    if !own_network(case) {
        return;
    }
    let one = one(&program(), true).arg(case);
    let one = settings
        .iter()
        .fold(one, |one, (name, value)| one.env(name, value));
    is_done(&one.run());
}

#[test]
fn a_flow_is_watched_through_a_resume_and_to_the_death_of_its_peer() {
    watched("watch", &[]);
}

#[test]
fn a_flow_whose_attempts_are_used_up_has_evidence() {
    watched(
        "stopped",
        &[("SLIM_ATTEMPTS", "2"), ("SLIM_ATTEMPT_TIMEOUTS", "0.3")],
    );
}

#[test]
fn without_the_library_there_is_no_table_and_its_peer_sees_a_legacy_flow() {
    common::apart();
    let binary = program();
    let one = |preloaded| one(&binary, preloaded).env("T_ARGS", "alone");
    let (server, client) = pair(one(false), one(true));
    assert!(server.ok() && client.ok(), "{server:?} {client:?}");
    assert_eq!(
        (&*server.stdout, &*client.stdout),
        ("no table\n", "legacy\n")
    );
}

#[test]
fn wrong_arguments_are_errors_and_other_versions_are_served() {
    alone("wrong", &[]);
}

#[test]
fn a_number_that_the_program_has_taken_is_left_alone() {
    alone("taken", &[]);
}

#[test]
fn a_process_in_which_slim_is_off_says_so() {
    alone("off", &[("SLIM", "off")]);
}

#[test]
fn a_forked_child_has_a_table_of_its_own() {
    alone("fork", &[]);
}

#[test]
fn many_threads_ask_while_flows_break_and_the_process_forks() {
    let seconds = if std::env::var_os("SLIM_SOAK").is_some() {
        "40"
    } else {
        "3"
    };
    alone("storm", &[("T_SECONDS", seconds)]);
}
