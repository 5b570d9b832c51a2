//! Thousands of short connections that end in every order, with connections killed and with one or several accepting
//! processes. Both ends check each byte and the end of the stream.

mod common;

use common::{Program, compile, own_network};
use std::path::Path;

fn run(program: &Path, args: &str, env: &[(&str, &str)]) -> Result<(), String> {
    let one = Program::new(program)
        .env("T_ARGS", args)
        .env("T_OWN_NETWORK", "1")
        .preloaded(true);
    let one = env
        .iter()
        .fold(one, |one, (name, value)| one.env(name, value));
    let got = one.run();
    println!(
        "{args} {env:?}: {}",
        got.stdout.lines().last().unwrap_or("")
    );
    match got.ok() {
        true => Ok(()),
        false => Err(format!("{args} {env:?}\n{}", got.transcript())),
    }
}

fn all(cases: &[(&str, &[(&str, &str)])]) {
    all_of("ends", cases);
}

fn all_of(name: &str, cases: &[(&str, &[(&str, &str)])]) {
    if !own_network(name) {
        return;
    }
    let program = compile(name, &[]);
    let runs = cases.iter().map(|(args, env)| run(&program, args, env));
    let bad: Vec<String> = runs.filter_map(Result::err).collect();
    assert!(bad.is_empty(), "\n{}", bad.join("\n"));
}

#[test]
fn every_order_of_ending_delivers_all_bytes() {
    all(&[
        ("count=300", &[]),
        ("count=300 workers=4", &[]),
        ("count=300 workers=4 reuse=1", &[]),
    ]);
}

/// A client whose server closes with unread bytes gets its error as soon as without SLIM.
#[test]
fn a_close_with_unread_bytes_resets_the_client_at_once() {
    all_of(
        "thrown",
        &[("workers=0 count=500", &[]), ("workers=4 count=500", &[])],
    );
}

/// There are more connections than ports, so the kernel reuses ports that the other client process has just released.
#[test]
fn connections_on_reused_ports_are_kept_apart() {
    all(&[
        ("count=2000 workers=4", &[]),
        ("count=2000 workers=4 reuse=1", &[]),
        ("count=2000 workers=4", &[("SLIM", "required")]),
    ]);
}

/// Each connection has the same addresses and ports as one that ended microseconds before.
#[test]
fn connections_with_the_same_ports_are_kept_apart() {
    all(&[
        ("count=500 ports=20000", &[]),
        ("count=500 ports=20000 workers=4", &[]),
        ("count=500 ports=20000 workers=4 reuse=1", &[]),
    ]);
}
