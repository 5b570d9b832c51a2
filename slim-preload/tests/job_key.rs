//! The job key is read once, when the program begins, and only from a file that nobody but its owner can read.

mod common;

use common::{Outcome, Program, compile, scratch};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

/// A file with this key and these permissions.
fn key_file(name: &str, key: &str, mode: u32) -> PathBuf {
    let path = scratch(name);
    fs::write(&path, key).expect("a file");
    fs::set_permissions(&path, Permissions::from_mode(mode)).expect("its permissions");
    path
}

fn run(key: &PathBuf) -> Outcome {
    Program::new(compile("drops", &[]))
        .preloaded(true)
        .env("SLIM_JOB_KEY_FILE", key)
        .env("SLIM_LOG", "debug")
        .run()
}

fn live(outcome: &Outcome) -> usize {
    outcome
        .stderr
        .lines()
        .filter(|l| l.ends_with(": live"))
        .count()
}

#[test]
fn a_program_that_drops_its_privileges_keeps_the_key() {
    let key = key_file("key", "0123456789abcdef\n", 0o600);
    let outcome = run(&key);
    fs::remove_file(&key).expect("it was there");
    assert!(outcome.ok(), "{}", outcome.transcript());
    assert_eq!(live(&outcome), 2, "{}", outcome.transcript());
}

#[test]
fn a_key_file_that_is_a_fifo_does_not_block() {
    let fifo = scratch("fifo-key");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status();
    assert!(made.expect("mkfifo runs").success());
    let outcome = run(&fifo);
    fs::remove_file(&fifo).expect("it was there");
    assert!(outcome.ok(), "{}", outcome.transcript());
    let said = outcome.stderr.matches("not a regular file").count();
    assert_eq!(said, 1, "{}", outcome.transcript());
}

#[test]
fn a_key_that_others_can_read_or_guess_is_refused_in_one_line() {
    for (key, mode, why) in [
        ("0123456789abcdef", 0o644, "chmod 600"),
        ("0123456789abcdef", 0o640, "chmod 600"),
        ("0123456789abcde", 0o600, "fewer than 16 bytes"),
    ] {
        let key = key_file(&format!("bad-key-{mode:o}-{}", key.len()), key, mode);
        let outcome = run(&key);
        fs::remove_file(&key).expect("it was there");
        assert!(outcome.ok(), "{}", outcome.transcript());
        let said: Vec<_> = outcome.stderr.lines().collect();
        assert_eq!(said.len(), 1, "{}", outcome.transcript());
        assert!(said[0].contains(why), "{}", outcome.transcript());
    }
}
