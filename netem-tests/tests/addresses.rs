//! Connections from and to addresses that a host would not choose by itself: aliases, addresses with their own routes, and
//! link-local addresses. They have sessions, and are resumed.

mod common;

use std::time::Duration;

use common::{
    events::Events,
    eventually,
    python::{lab_with_python, python},
};
use slim_lab::{
    Lab, SeededRng,
    faults::{
        destroy::{self, Amount, Selector},
        link,
    },
    output::Running,
};

/// Both ends of a connection: `server HOST PORT` and `client HOST PORT OWN-ADDRESS`. The ends send increasing numbers to each
/// other in turn, and check what they receive. They stop at 300.
const PROGRAM: &str = r#"
import errno, socket, sys, time
role, host, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
s = socket.socket(address[0], socket.SOCK_STREAM)
if role == "server":
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(address[4])
    s.listen()
    print("READY", flush=True)
    s, _ = s.accept()
else:
    s.bind(socket.getaddrinfo(sys.argv[4], 0, type=socket.SOCK_STREAM)[0][4])
    s.connect(address[4])
s.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5000)
print("BEGUN", flush=True)
try:
    for n in range(300):
        if role == "client":
            s.sendall(n.to_bytes(4, "big"))
        assert int.from_bytes(s.recv(4, socket.MSG_WAITALL), "big") == n
        if role == "server":
            s.sendall(n.to_bytes(4, "big"))
        time.sleep(0.01)
    print("DONE", flush=True)
except OSError as e:
    print(errno.errorcode[e.errno], flush=True)
"#;

fn start(lab: &Lab, node: usize, args: &[&str]) -> Running {
    let mut command = python(lab, node, PROGRAM, true);
    command.args(args).env("SLIM_ATTEMPTS", "2");
    command.env("SLIM_ATTEMPT_TIMEOUTS", "2,3");
    Running::start(command).expect("start a program")
}

fn ip(lab: &Lab, node: usize, args: &str) {
    let args: Vec<_> = args.split_whitespace().collect();
    lab.node(node).net().exec("ip", &args).expect("ip");
}

/// Asserts that a server at `there` and a client at `here` survive a killed connection.
fn is_protected(lab: &Lab, there: &str, here: &str) {
    let server = start(lab, 1, &["server", there, "7000"]);
    let ready = server.wait_line(Duration::from_secs(20), |l| l == "READY");
    assert!(ready, "{:?}", server.lines());
    let client = start(lab, 0, &["client", there, "7000", here]);
    let count = |kind: &str| Events::read(lab).of_kind(kind).count();
    let told = || {
        format!(
            "{:?} {:?} {}",
            server.lines(),
            client.lines(),
            Events::read(lab)
        )
    };
    let live = eventually(Duration::from_secs(2), || count("live") == 2);
    assert!(live, "no session: {}", told());
    let killed = destroy::destroy(
        lab.node(1).net(),
        &Selector::between_hosts(),
        Amount::All,
        &mut SeededRng::new(1),
    );
    assert!(!killed.expect("destroy connections").connections.is_empty());
    for program in [&server, &client] {
        let done = program.wait_line(Duration::from_secs(20), |l| l == "DONE");
        assert!(done, "{}", told());
    }
    assert_eq!(count("resume"), 2, "{}", told());
}

#[test]
fn an_alias_is_an_address_like_any_other() {
    let Some(lab) = lab_with_python("alias", 2, 1) else {
        return;
    };
    ip(&lab, 0, "addr add 10.77.0.101/24 dev path0");
    ip(&lab, 1, "addr add 10.77.0.102/24 dev path0");
    is_protected(&lab, "10.77.0.102", "10.77.0.101");
}

/// The host has two routes to the peer. The default one is a black hole. Policy rules send packets from the second address
/// over the second route.
#[test]
fn an_address_with_routes_of_its_own() {
    let Some(lab) = lab_with_python("policy", 2, 2) else {
        return;
    };
    ip(&lab, 1, "addr add 10.99.0.2/32 dev lo");
    ip(&lab, 0, "route add blackhole 10.99.0.2/32");
    ip(&lab, 0, "rule add from 10.78.0.1 lookup 100");
    ip(&lab, 0, "route add 10.99.0.2/32 via 10.78.0.2 table 100");
    is_protected(&lab, "10.99.0.2", "10.78.0.1");
}

#[test]
fn addresses_of_one_link() {
    let Some(lab) = lab_with_python("link-local", 2, 2) else {
        return;
    };
    // On the second link, so that an address used without its scope ends up on the wrong link.
    for node in 0..2 {
        ip(
            &lab,
            node,
            &format!("addr add fe80::7{node}/64 dev path1 nodad"),
        );
    }
    is_protected(&lab, "fe80::71%path1", "fe80::70%path1");
}

/// Starts a server and a client, and waits until their connection has a session.
fn begun(lab: &Lab, there: &str, here: &str) -> [Running; 2] {
    let server = start(lab, 1, &["server", there, "7000"]);
    let ready = server.wait_line(Duration::from_secs(20), |l| l == "READY");
    assert!(ready, "{:?}", server.lines());
    let client = start(lab, 0, &["client", there, "7000", here]);
    let live = || Events::read(lab).of_kind("live").count() == 2;
    assert!(eventually(Duration::from_secs(2), live), "no session");
    [server, client]
}

/// Gives these hosts other addresses on the first path, all at the same moment and for good.
fn renumber(lab: &Lab, nodes: &[usize]) {
    for node in nodes {
        let (own, last) = (lab.node(*node).address(0), node + 1);
        ip(lab, *node, "link set path0 down");
        ip(lab, *node, &format!("addr add 10.99.7.{last}/24 dev path0"));
        ip(lab, *node, &format!("addr del {own}/24 dev path0"));
    }
    for node in nodes {
        ip(lab, *node, "link set path0 up");
    }
}

fn finish(lab: &Lab, programs: &[Running], how: &str) {
    for program in programs {
        let done = program.wait_line(Duration::from_secs(20), |l| l == how);
        assert!(done, "{:?} {}", program.lines(), Events::read(lab));
    }
}

/// Each peer has announced its address on the second path, and that address stays.
#[test]
fn both_hosts_renumbered_with_a_second_path() {
    let Some(lab) = lab_with_python("rails", 2, 2) else {
        return;
    };
    let programs = begun(&lab, "10.77.0.2", "10.77.0.1");
    renumber(&lab, &[0, 1]);
    finish(&lab, &programs, "DONE");
    assert!(Events::read(&lab).of_kind("resume").count() >= 2);
}

/// The other host keeps its address, which is known.
#[test]
fn one_host_renumbered() {
    let Some(lab) = lab_with_python("renumbered", 2, 1) else {
        return;
    };
    ip(&lab, 1, "addr add 10.99.7.9/24 dev path0");
    let programs = begun(&lab, "10.77.0.2", "10.77.0.1");
    renumber(&lab, &[0]);
    ip(&lab, 0, "route add 10.77.0.2/32 dev path0");
    finish(&lab, &programs, "DONE");
}

/// Neither end can know the other's new address. The program gets the kernel's error, within the timeout that it has set.
#[test]
fn both_hosts_renumbered_at_once() {
    let Some(lab) = lab_with_python("both", 2, 1) else {
        return;
    };
    let programs = begun(&lab, "10.77.0.2", "10.77.0.1");
    renumber(&lab, &[0, 1]);
    // The end that waits for the other's number has no unacknowledged data. Like plain TCP, it does not notice the loss.
    let error = |p: &Running| p.lines().iter().any(|l| l.text.starts_with('E'));
    let told = eventually(Duration::from_secs(20), || programs.iter().any(error));
    let said = programs.each_ref().map(Running::lines);
    assert!(told, "{said:?} {}", Events::read(&lab));
}

/// Sends once to `server`, and again when the file exists, and prints how long the answer takes.
const LATER: &str = r#"
import os, socket, sys, time
s = socket.create_connection((sys.argv[1], 7000), source_address=(sys.argv[2], 0))
s.sendall(b"a")
assert s.recv(1) == b"a"
print("BEGUN", flush=True)
while not os.path.exists(sys.argv[3]):
    time.sleep(0.01)
begun = time.time()
s.sendall(b"b")
assert s.recv(1) == b"b"
print("TOOK", time.time() - begun, flush=True)
"#;

/// What LATER connects to.
const ECHO: &str = r#"
import socket, sys
l = socket.create_server((sys.argv[1], 7000))
print("READY", flush=True)
s, _ = l.accept()
while data := s.recv(1):
    s.sendall(data)
"#;

/// The second host echoes what the first one sends: a byte, and another one after `trouble`. `ends` are the addresses of the first and of the
/// second host.
fn goes_on_after(lab: &Lab, ends: [&str; 2], trouble: impl FnOnce()) {
    let run = |node: usize, program: &str, args: &[&str]| {
        let mut command = python(lab, node, program, true);
        command.args(args);
        Running::start(command).expect("start a program")
    };
    let [near, far] = ends;
    let server = run(1, ECHO, &[far]);
    assert!(server.wait_line(Duration::from_secs(20), |l| l == "READY"));
    let go_on = lab.dir().join("go-on");
    let client = run(0, LATER, &[far, near, go_on.to_str().expect("a path")]);
    assert!(client.wait_line(Duration::from_secs(20), |l| l == "BEGUN"));
    let live = || Events::read(lab).of_kind("live").count() == 2;
    assert!(eventually(Duration::from_secs(2), live), "no session");
    trouble();
    std::fs::write(&go_on, "").expect("write a file");
    let took = client.wait_line(Duration::from_secs(15), |l| l.starts_with("TOOK"));
    assert!(took, "{:?} {}", client.lines(), Events::read(lab));
    println!("{:?}", client.lines().last().map(|l| l.text.clone()));
}

/// The kernel sends no packet then, so that none is lost or sent again.
#[test]
fn an_idle_connection_whose_address_has_gone_is_moved_when_it_is_used() {
    let Some(lab) = lab_with_python("gone", 2, 2) else {
        return;
    };
    goes_on_after(&lab, ["10.78.0.1", "10.78.0.2"], || {
        ip(&lab, 0, "addr del 10.78.0.1/24 dev path1");
    });
}

/// The host that has got another address only waits for the other one, which cannot know the new address.
#[test]
fn a_renumbered_host_that_only_waits_is_found() {
    let Some(lab) = lab_with_python("waits", 2, 1) else {
        return;
    };
    goes_on_after(&lab, ["10.77.0.1", "10.77.0.2"], || {
        let new = lab.spare_address(0, 0).expect("an address");
        link::renumber(lab.node(1), 0, new).expect("renumber");
    });
}
