//! Hosts whose firewalls let in only replies to their own packets. When a program ends, its peer sees the end of the stream,
//! as without SLIM.

mod common;

use std::{fs, net::SocketAddr, process::Command, time::Duration};

use common::{
    events::Events,
    python::{lab_with_python, under_slim},
};
use slim_lab::{
    Lab,
    faults::{
        destroy::{self, Selector},
        inject::{self, Segment},
        nft::{self, Rule},
    },
    output::Running,
};

/// One end of a connection, server or client. It exchanges hellos with the other end, and then either ends in the given way
/// or waits for the end of the stream. Its last line says what happened, and when.
const PROGRAM: &str = r#"
import os, signal, socket, sys, time
role, host, port, how = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
if role == "server":
    listener = socket.create_server((host, port))
    print("READY", flush=True)
    s, _ = listener.accept()
else:
    s = socket.create_connection((host, port))
s.sendall(b"hello")
assert s.recv(5, socket.MSG_WAITALL) == b"hello"
time.sleep(3.5)
if how == "wait":
    try:
        what = "end" if s.recv(1) == b"" else "byte"
    except OSError as e:
        what = str(e)
    print("SAW", time.time(), what, flush=True)
else:
    print("LEFT", time.time(), flush=True)
    if how == "close":
        s.close()
    elif how == "exit":
        s.detach()
    elif how == "_exit":
        os._exit(0)
    else:
        os.kill(os.getpid(), signal.SIGKILL)
"#;

const WAYS: [&str; 4] = ["close", "exit", "_exit", "kill"];
/// One port for each way in which each side ends.
const PORTS: std::ops::Range<u16> = 7100..7108;

fn start(lab: &Lab, node: usize, args: [&str; 4], slim: bool) -> Running {
    let mut command: Command = lab.node(node).command("/usr/bin/python3");
    command.arg(lab.dir().join("ends.py")).args(args);
    command.env_remove("LD_PRELOAD");
    if slim {
        under_slim(&mut command, lab);
    }
    Running::start(command).expect("start a program")
}

/// The time in the line that begins with `word`, and the rest of that line.
fn said(program: &Running, word: &str) -> Option<(f64, String)> {
    let lines = program.lines();
    let line = lines.iter().find_map(|l| l.text.strip_prefix(word))?;
    let (time, rest) = line.trim().split_once(' ').unwrap_or((line.trim(), ""));
    Some((time.parse().ok()?, rest.to_owned()))
}

/// Ends the server's and the client's program in every way. For each case: its name, how long it took the other program to see
/// the end, and what that program saw.
fn ends(lab: &Lab, slim: bool) -> Vec<(String, f64, String)> {
    let host = lab.node(1).address(0).to_string();
    let cases = ["server", "client"]
        .into_iter()
        .flat_map(|who| WAYS.map(|how| (who, how)));
    let started: Vec<_> = cases
        .zip(PORTS)
        .map(|((who, how), port)| {
            let port = port.to_string();
            let ways = if who == "server" {
                [how, "wait"]
            } else {
                ["wait", how]
            };
            let server = start(lab, 1, ["server", &host, &port, ways[0]], slim);
            assert!(server.wait_line(Duration::from_secs(20), |l| l == "READY"));
            let client = start(lab, 0, ["client", &host, &port, ways[1]], slim);
            (format!("{who}: {how}"), who == "server", [server, client])
        })
        .collect();
    let outcome = |(name, by_server, [server, client]): (String, bool, [Running; 2])| {
        let (leaves, stays) = if by_server {
            (server, client)
        } else {
            (client, server)
        };
        let seen = stays.wait_line(Duration::from_secs(75), |l| l.starts_with("SAW"))
            && leaves.wait_line(Duration::from_secs(5), |l| l.starts_with("LEFT"));
        let told = || format!("{:?} {:?}", leaves.lines(), stays.lines());
        assert!(seen, "{name}: {}", told());
        let (left, saw) = (said(&leaves, "LEFT"), said(&stays, "SAW"));
        let (left, saw) = left
            .zip(saw)
            .unwrap_or_else(|| panic!("{name}: {}", told()));
        (name, saw.0 - left.0, saw.1)
    };
    started.into_iter().map(outcome).collect()
}

fn under(name: &str, rule: fn() -> Rule) {
    let Some(lab) = lab_with_python(name, 2, 1) else {
        return;
    };
    fs::write(lab.dir().join("ends.py"), PROGRAM).expect("write the program");
    // A firewall lets UDP replies pass for half a minute or more after a packet. One second here has the same effect as
    // connections that last longer than that.
    for node in lab.nodes() {
        for setting in ["udp_timeout", "udp_timeout_stream"] {
            let setting = format!("net.netfilter.nf_conntrack_{setting}=1");
            let set = node.net().exec("sysctl", &["-w", &setting]);
            set.expect("set how long a firewall remembers");
        }
    }
    let guard = |node: usize| {
        let rule = if node == 1 {
            rule().except_ports(PORTS)
        } else {
            rule()
        };
        rule.apply([lab.node(node).net()])
            .expect("lay the firewall")
    };
    for guarded in [&[0][..], &[1], &[0, 1]] {
        let guards: Vec<nft::RuleGuard> = guarded.iter().map(|node| guard(*node)).collect();
        let bare = ends(&lab, false);
        for ((name, took, what), (_, bare, seen)) in ends(&lab, true).iter().zip(&bare) {
            println!(
                "firewall at {guarded:?}, {name}: {what} after {took:.3} s; bare {seen} after {bare:.3} s"
            );
            assert_eq!(what, seen, "firewall at {guarded:?}, {name}");
            // A peer behind a firewall does not answer, which SLIM knows from the beginning of the connection: it gives up after
            // eight queries in 0.2 s. A host that refuses a query refuses it again after 0.15 s. But hosts limit their ICMP
            // messages: on a host that lets queries in, and on which several programs have ended, they may come late.
            let shut_off = guarded.contains(&usize::from(name.starts_with("server")));
            let most = if shut_off { 0.5 } else { 6.0 };
            assert!(
                *took < bare + most,
                "firewall at {guarded:?}, {name}: {took} s"
            );
            // SLIM announces the end of a program that ends in order.
            let announced = name.ends_with(": close") || name.ends_with(": exit");
            let heard = guarded == [usize::from(name.starts_with("server"))];
            assert!(
                !announced || !heard || *took < bare + 0.3,
                "{name}: {took} s"
            );
        }
        let stopped: u64 = guards.iter().map(|g| g.report().unwrap().packets).sum();
        assert!(stopped > 0, "nothing was stopped at {guarded:?}");
    }
}

#[test]
fn ends_are_seen_behind_firewalls_that_drop() {
    under("guard", Rule::guard);
}

#[test]
fn ends_are_seen_behind_firewalls_that_refuse() {
    under("guard-tell", Rule::guard_and_tell);
}

/// The client sends numbered lines, which the server sends back. The client prints ALL when every line has come back.
const ECHO: &str = r#"
import socket, sys, time
role, host, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
if role == "server":
    listener = socket.create_server((host, port))
    print("READY", flush=True)
    s, _ = listener.accept()
    while (data := s.recv(65536)):
        s.sendall(data)
else:
    s = socket.create_connection((host, port))
    s.sendall(b"first\n")
    assert s.recv(6, socket.MSG_WAITALL) == b"first\n"
    time.sleep(4)
    print("QUIET", s.getsockname()[1], flush=True)
    # The forged end of the stream arrives here.
    s.settimeout(3)
    try:
        assert False, s.recv(1)
    except TimeoutError:
        s.settimeout(None)
    sent = received = b""
    for n in range(500):
        line = b"%d\n" % n
        s.sendall(line)
        assert s.recv(len(line), socket.MSG_WAITALL) == line, n
    s.shutdown(socket.SHUT_WR)
    assert s.recv(1) == b""
    print("ALL", flush=True)
"#;

/// SLIM has asked once whether the peer can be reached. It still asks about the end of the stream.
#[test]
fn a_forged_end_of_a_peer_that_can_be_reached_loses_nothing() {
    let Some(lab) = lab_with_python("forged-end", 2, 1) else {
        return;
    };
    fs::write(lab.dir().join("ends.py"), ECHO).expect("write the program");
    let host = lab.node(1).address(0);
    let (address, port) = (host.to_string(), "7120");
    let server = start(&lab, 1, ["server", &address, port, ""], true);
    assert!(server.wait_line(Duration::from_secs(20), |l| l == "READY"));
    let client = start(&lab, 0, ["client", &address, port, ""], true);
    let limit = Duration::from_secs(20);
    assert!(client.wait_line(limit, |l| l.starts_with("QUIET")));
    let (local, _) = said(&client, "QUIET").expect("its port");
    let client_end = SocketAddr::new(lab.node(0).address(0).into(), local as u16);
    let all =
        destroy::list(lab.node(0).net(), &Selector::between_hosts()).expect("the connections");
    let victim = all.into_iter().find(|c| c.local == client_end);
    let victim = victim.expect("the kernel knows the client's");
    let forged = inject::inject(
        Segment::Fin,
        lab.node(0),
        lab.node(1),
        0,
        &victim,
        Duration::from_secs(5),
    );
    assert!(forged.expect("forge a FIN").accepted);
    let told = || format!("{:?} {:?}", client.lines(), server.lines());
    assert!(client.wait_line(limit, |l| l == "ALL"), "{}", told());
    let events = Events::read(&lab);
    assert!(events.count("resume") > 0, "nothing was resumed");
}
