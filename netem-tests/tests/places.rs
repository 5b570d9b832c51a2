//! A process's control and resume sockets are bound only at the addresses that it uses.

mod common;

use std::time::Duration;

use common::python::{lab_with_python, python};
use slim_lab::{Lab, output::Running};

/// Listens at one address, or connects to several, and keeps running.
const PROGRAM: &str = r#"
import socket, sys, time
role, *hosts = sys.argv[1:]
if role == "server":
    listener = socket.create_server((hosts[0], 7300))
    print("READY", flush=True)
    kept = []
    while True:
        s, _ = listener.accept()
        kept.append(s)
        s.sendall(s.recv(1))
else:
    kept = []
    for host in hosts:
        s = socket.create_connection((host, 7300))
        s.sendall(b"x")
        assert s.recv(1) == b"x"
        kept.append(s)
        print("HAS", host, flush=True)
    time.sleep(60)
"#;

fn start(lab: &Lab, node: usize, args: &[&str]) -> Running {
    let mut command = python(lab, node, PROGRAM, true);
    command.args(args);
    Running::start(command).expect("start a program")
}

/// The local addresses of the sockets on a node, except the server's own.
fn bound(lab: &Lab, node: usize) -> Vec<String> {
    let tell = |kind: &str| {
        let told = lab.node(node).net().exec("ss", &["-Hnl", kind]);
        told.expect("ask for the sockets")
    };
    let all = [tell("-t"), tell("-u")].join("\n");
    let ends = all.lines().filter_map(|l| l.split_whitespace().nth(3));
    ends.filter_map(|end| end.rsplit_once(':'))
        .filter(|(_, port)| *port != "7300")
        .map(|(ip, _)| ip.to_owned())
        .collect()
}

#[test]
fn sockets_bound_only_at_addresses_in_use() {
    let Some(lab) = lab_with_python("places", 2, 1) else {
        return;
    };
    let limit = Duration::from_secs(20);
    // Connections within a host.
    let near = start(&lab, 0, &["server", "127.0.0.1"]);
    assert!(near.wait_line(limit, |l| l == "READY"));
    let client = start(&lab, 0, &["client", "127.0.0.1"]);
    assert!(client.wait_line(limit, |l| l.starts_with("HAS")));
    let on_loopback = |ip: &String| ip.starts_with("127.") || ip == "[::1]";
    let found = bound(&lab, 0);
    assert!(
        found.len() >= 4 && found.iter().all(on_loopback),
        "{found:?}"
    );
    // Connections with another host.
    let far = start(&lab, 1, &["server", "0.0.0.0"]);
    assert!(far.wait_line(limit, |l| l == "READY"));
    let host = lab.node(1).address(0).to_string();
    let client = start(&lab, 0, &["client", &host]);
    assert!(client.wait_line(limit, |l| l.starts_with("HAS")));
    let own = lab.node(0).address(0).to_string();
    let found = bound(&lab, 0);
    let at_own = found.iter().filter(|ip| **ip == own).count();
    assert_eq!(at_own, 2, "{found:?}");
    let wild = |ip: &String| ["*", "0.0.0.0", "[::]"].contains(&ip.as_str());
    assert!(!found.iter().any(wild), "{found:?}");
    drop((near, far));
}
