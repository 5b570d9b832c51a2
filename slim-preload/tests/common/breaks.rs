//! Programs that must not notice that their connections break: run bare on unbroken connections, and then under the preload while every
//! connection of their network namespace is destroyed (`SOCK_DESTROY`) again and again. Needs root.

use super::{NEGOTIATED_MS, Outcome, Program, compare, compile, own_network, pair};
use std::path::Path;

pub fn run(
    program: &Path,
    args: &str,
    breaks: u32,
    preloaded: bool,
    negotiation: u32,
) -> (Outcome, Outcome) {
    let one = || {
        Program::new(program)
            .env("T_ARGS", args)
            .env("T_BREAKS", breaks.to_string())
            .env("T_OWN_NETWORK", "1")
            .preloaded(preloaded)
            .negotiation_ms(negotiation)
    };
    pair(one(), one())
}

pub fn differences(name: &str, bare: &(Outcome, Outcome), got: &(Outcome, Outcome)) -> Vec<String> {
    [("server", &bare.0, &got.0), ("client", &bare.1, &got.1)]
        .into_iter()
        .filter_map(|(end, want, got)| compare(&format!("{name}, {end}"), want, got))
        .collect()
}

/// Asserts that the program's transcript with the preload and broken connections is the one of a bare run without breaks.
pub fn unnoticed(program: &str, args: &[&str], breaks: u32) {
    unnoticed_with(&[], program, args, breaks);
}

/// Like `unnoticed`, for a program compiled with these flags.
pub fn unnoticed_with(flags: &[&str], program: &str, args: &[&str], breaks: u32) {
    if !own_network(&format!("{program} {args:?}")) {
        return;
    }
    let binary = compile(program, flags);
    let mut bad = Vec::new();
    for args in args {
        let bare = run(&binary, args, 0, false, 0);
        let got = run(&binary, args, breaks, true, NEGOTIATED_MS);
        bad.extend(differences(&format!("{program} {args}"), &bare, &got));
    }
    assert!(bad.is_empty(), "\n{}", bad.join("\n"));
}
