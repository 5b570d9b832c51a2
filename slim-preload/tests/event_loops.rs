//! Event loops that register descriptors with epoll where no hook sees it: libuv does so through io_uring (Node.js, uvloop).
//! Their connections are destroyed again and again, and no program is left waiting.
//!
//! scripts/setup installs both. `SLIM_KILLS` is the number of connections to destroy for each pair of programs.

mod common;

use common::events::Events;
use common::{Outcome, Program, Running, compile, own_network, ports};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The path of a program that scripts/setup has installed from the Python package index.
fn installed(test: &str, name: &str) -> Option<PathBuf> {
    let cache = std::env::var_os("SLIM_CACHE").map(PathBuf::from);
    let home = std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache/slim"));
    let bin = cache.or(home)?.join("loops/bin").join(name);
    if !bin.exists() {
        println!(
            "skip: {test}: {} is not installed (scripts/setup)",
            bin.display()
        );
        return None;
    }
    Some(bin)
}

/// How to run a program: the interpreter, and the script.
type Run = (PathBuf, PathBuf);

fn script(what: &str, name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests")
        .join(what)
        .join(name)
}

/// Runs both programs until `meanwhile` returns, then ends the client and after it the server. `meanwhile` gets the client.
/// Returns the outcomes of the server and the client.
fn meet(
    (server, client): (&Run, &Run),
    events: Option<&Path>,
    meanwhile: impl FnOnce(&mut Running),
) -> (Outcome, Outcome) {
    let start = |(runs, program): &Run, role: &str| {
        let program = Program::new(runs)
            .arg(program)
            .args([role, "7007"])
            .preloaded(true);
        match events {
            Some(log) => program.env("SLIM_EVENTS", log).start(),
            None => program.start(),
        }
    };
    let mut server = start(server, "server");
    // Interpreters start slowly. The port is looked up in /proc: a test connection would not be managed by SLIM, and would be
    // broken like the others.
    while !ports("tcp", "0A").contains(&7007) {
        assert!(server.alive(), "the server ended");
        std::thread::sleep(Duration::from_millis(50));
    }
    let mut client = start(client, "client");
    meanwhile(&mut client);
    client.signal(libc::SIGTERM);
    let client = client.finish_within(Duration::from_secs(400));
    server.signal(libc::SIGTERM);
    let server = server.finish_within(Duration::from_secs(60));
    let said = format!(
        "server:\n{}client:\n{}",
        server.transcript(),
        client.transcript()
    );
    println!("{said}");
    assert!(client.ok() && server.ok(), "{said}");
    assert_eq!(client.stdout, "all right\n", "{said}");
    assert_eq!(server.stdout, "", "{said}");
    assert!(
        !server.stderr.contains("slim") && !client.stderr.contains("slim"),
        "{said}"
    );
    (server, client)
}

fn survive(test: &str, server: &Run, client: &Run) {
    if !own_network(test) {
        return;
    }
    let kills: u32 = std::env::var("SLIM_KILLS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(200);
    let rings = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
    if rings.trim() != "0" {
        println!(
            "io_uring is disabled here ({}): libuv uses epoll_ctl",
            rings.trim()
        );
    }
    let breaker = compile("breaker", &[]);
    meet((server, client), None, |client| {
        let mut breaker = Program::new(&breaker)
            .args([kills.to_string(), "200".into()])
            .env("T_OWN_NETWORK", "1")
            .start();
        // The breaker needs connections, so it runs no longer than the client.
        while client.alive() && breaker.alive() {
            std::thread::sleep(Duration::from_millis(20));
        }
        if breaker.alive() {
            breaker.signal(libc::SIGTERM);
        }
        let broken = breaker.finish_within(Duration::from_secs(400));
        assert!(broken.ok(), "{}", broken.transcript());
    });
}

/// All connections end in order, the half-closed ones of Node.js too, and SLIM takes none of the ends for a fault.
fn end_cleanly(test: &str, server: &Run, client: &Run) {
    if !own_network(test) {
        return;
    }
    let events = common::scratch(test);
    meet((server, client), Some(&events), |client| {
        let begun = Instant::now();
        while Events::read(&events).count("live") < 16 {
            assert!(client.alive(), "the client ended");
            assert!(begun.elapsed() < Duration::from_secs(60), "no connections");
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    let events = Events::read(&events);
    assert_eq!(events.count("closed"), 16, "{events}");
    assert_eq!(events.count("suspend"), 0, "{events}");
}

fn node(test: &str) -> Option<Run> {
    Some((installed(test, "node")?, script("js", "echo.js")))
}

fn uvloop(test: &str) -> Option<Run> {
    Some((installed(test, "python")?, script("py", "echo_uvloop.py")))
}

#[test]
fn node_asks_uvloop() {
    if let (Some(node), Some(uvloop)) = (node("node_asks_uvloop"), uvloop("node_asks_uvloop")) {
        survive("node_asks_uvloop", &uvloop, &node);
    }
}

#[test]
fn uvloop_asks_node() {
    if let (Some(node), Some(uvloop)) = (node("uvloop_asks_node"), uvloop("uvloop_asks_node")) {
        survive("uvloop_asks_node", &node, &uvloop);
    }
}

#[test]
fn node_and_uvloop_end_cleanly() {
    let test = "node_and_uvloop_end_cleanly";
    if let (Some(node), Some(uvloop)) = (node(test), uvloop(test)) {
        for (server, client) in [(&node, &uvloop), (&uvloop, &node), (&uvloop, &uvloop)] {
            end_cleanly(test, server, client);
        }
    }
}
