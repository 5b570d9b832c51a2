//! A program in C that links the library, under the preload library: it has one agent, and both kinds of connections survive kills.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use common::*;

/// Enough that both kinds of connections get some twenty.
const KILLS: u64 = 60;

/// The preload library: `SLIM_PRELOAD`, or one built here.
fn preload() -> PathBuf {
    if let Some(path) = std::env::var_os("SLIM_PRELOAD") {
        return path.into();
    }
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--profile", "fast", "--lib", "-p", "slim-preload"]);
    build.arg("--target-dir").arg(target).current_dir(root());
    succeed(&mut build);
    target.join("fast/libslim_preload.so")
}

#[test]
fn a_session_and_the_preload_library_share_one_agent() {
    if !can_kill("a_session_and_the_preload_library_share_one_agent") {
        return;
    }
    let dir = scratch();
    let program = compile(installed(), "slim-c/tests/c/beside.c", dir.path(), &[]);
    let log = dir.path().join("events");
    let mut command = Command::new(program);
    command
        .env("LD_PRELOAD", preload())
        .env("SLIM_EVENTS", &log);
    let (mut running, agents) = serve(&mut command);
    assert_eq!(agents, "1", "agent threads");
    let count = |kind: &str| {
        let log = fs::read_to_string(&log).unwrap_or_default();
        let kind = format!("\"kind\":\"{kind}\"");
        log.lines().filter(|line| line.contains(&kind)).count() as u64
    };
    // The log of the process has the flows of both. A connection that breaks before it is live ends with its error.
    while count("live") < 4 {
        assert!(running.is_running(), "{}", running.wait().1);
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(running.kill_often(KILLS, Duration::from_millis(5)), KILLS);
    let of_session = running.resumes();
    let all = count("resume");
    println!("{of_session} resumes at both ends of the flow, {all} with the program's connection");
    assert!(of_session >= 20 && all - of_session >= 20);
    assert_eq!(
        count("live"),
        4,
        "each connection is managed once at each end"
    );
    assert_eq!(count("escalate"), 0);
}
