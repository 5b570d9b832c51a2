//! Programs that execute other programs while their connections are broken.

mod common;

use std::{fs, thread, time::Duration};

use common::{
    events::Events,
    eventually,
    python::{lab_with_python, python},
};
use slim_lab::{
    Lab, Node, SeededRng,
    faults::{
        destroy::{self, Amount, Selector},
        nft,
    },
    output::Running,
};

/// So many that they cannot be resumed one after the other within the time for which an exec waits: each takes 0.4 s.
const CONNECTIONS: usize = 24;

/// `server HOST COUNT` answers each byte. `client HOST COUNT FILE` connects, waits until FILE exists, and executes itself. The next program
/// uses each connection.
const PROGRAM: &str = r#"
import errno, os, selectors, socket, sys, time
role, host, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
if role == "server":
    listener = socket.create_server((host, 7000), backlog=100)
    print("READY", flush=True)
    loop = selectors.DefaultSelector()
    for n in range(count):
        loop.register(listener.accept()[0], selectors.EVENT_READ)
    while True:
        for key, _ in loop.select():
            try:
                key.fileobj.sendall(key.fileobj.recv(1) or sys.exit())
            except OSError as e:
                print(errno.errorcode[e.errno], flush=True)
                sys.exit()
elif role == "client":
    all = [socket.create_connection((host, 7000)) for n in range(count)]
    [s.set_inheritable(True) for s in all]
    while not os.path.exists(sys.argv[4]):
        time.sleep(0.01)
    numbers = [str(s.detach()) for s in all]
    os.execv(sys.executable, [sys.executable, "-c", os.environ["PROGRAM"], "next", host, "0", *numbers])
try:
    for s in [socket.socket(fileno=int(number)) for number in sys.argv[4:]]:
        s.sendall(b"x")
        assert s.recv(1) == b"x"
    print("DONE", flush=True)
except OSError as e:
    print(errno.errorcode[e.errno], flush=True)
"#;

/// `giver HOST FILE` sends 50 bytes on each of ten connections, waits until FILE exists, and ends. `taker HOST FILE` connects, waits until FILE
/// exists, and executes itself. The next program reads.
const GIFT: &str = r#"
import errno, os, socket, sys, time
role, host, file = sys.argv[1:4]
def wait():
    while not os.path.exists(file):
        time.sleep(0.01)
if role == "giver":
    listener = socket.create_server((host, 7000), backlog=100)
    print("READY", flush=True)
    all = [listener.accept()[0] for n in range(10)]
    [s.sendall(bytes(range(50))) for s in all]
    wait()
    [s.close() for s in all]
elif role == "taker":
    all = [socket.create_connection((host, 7000)) for n in range(10)]
    [s.set_inheritable(True) for s in all]
    wait()
    numbers = [str(s.detach()) for s in all]
    os.execv(sys.executable, [sys.executable, "-c", os.environ["PROGRAM"], "next", host, "", *numbers])
else:
    try:
        for s in [socket.socket(fileno=int(number)) for number in sys.argv[4:]]:
            assert s.recv(50, socket.MSG_WAITALL) == bytes(range(50))
        print("DONE", flush=True)
    except OSError as e:
        print(errno.errorcode[e.errno], flush=True)
"#;

fn start(lab: &Lab, node: usize, program: &str, args: &[&str]) -> Running {
    let mut command = python(lab, node, program, true);
    command.args(args).env("PROGRAM", program);
    Running::start(command).expect("start a program")
}

/// Starts the program on the second node and then on the first one, and waits until so many connections have sessions.
fn start_both(lab: &Lab, program: &str, args: [&[&str]; 2], connections: usize) -> [Running; 2] {
    let server = start(lab, 1, program, args[0]);
    let ready = server.wait_line(Duration::from_secs(20), |l| l == "READY");
    assert!(ready, "{:?}", server.lines());
    let client = start(lab, 0, program, args[1]);
    let live = || Events::read(lab).count("live") == 2 * connections;
    assert!(eventually(Duration::from_secs(5), live), "no sessions");
    [server, client]
}

/// Waits until the next program has used all connections.
fn assert_done(lab: &Lab, [server, client]: &[Running; 2]) {
    let done = client.wait_line(Duration::from_secs(30), |l| l == "DONE");
    let told = [client.lines(), server.lines()];
    assert!(done, "{told:?} {}", Events::read(lab));
}

/// Destroys all connections of a node. Returns their number.
fn kill_all(node: &Node) -> usize {
    let all = Selector::between_hosts();
    let killed = destroy::destroy(node.net(), &all, Amount::All, &mut SeededRng::new(1));
    killed.expect("destroy connections").connections.len()
}

fn file(lab: &Lab, name: &str) -> String {
    lab.node(0).tmp().join(name).display().to_string()
}

#[test]
fn an_exec_waits_for_all_broken_connections_at_the_same_time() {
    let Some(lab) = lab_with_python("exec-many", 2, 2) else {
        return;
    };
    let host = lab.node(1).address(0).to_string();
    let (count, go) = (CONNECTIONS.to_string(), file(&lab, "go"));
    let server: &[&str] = &["server", &host, &count];
    let both = start_both(
        &lab,
        PROGRAM,
        [server, &["client", &host, &count, &go]],
        CONNECTIONS,
    );
    // The peers do not see the resets, so only the use of a connection shows that it is broken.
    let rule = nft::Rule::drop().path(0);
    let _silent = rule.apply_to(lab.nodes()).expect("lay the rule");
    assert_eq!(kill_all(lab.node(0)), CONNECTIONS);
    fs::write(&go, "").expect("write the file");
    assert_done(&lab, &both);
}

/// The peer has closed broken connections and ended. What it had sent before they broke is there for the next program.
#[test]
fn bytes_from_before_a_break_outlive_an_exec() {
    let Some(lab) = lab_with_python("exec-unread", 2, 1) else {
        return;
    };
    let host = lab.node(1).address(0).to_string();
    let [end, go] = ["end", "go"].map(|name| file(&lab, name));
    let args: [&[&str]; 2] = [&["giver", &host, &end], &["taker", &host, &go]];
    let both = start_both(&lab, GIFT, args, 10);
    // Their bytes are on the way, or have arrived.
    thread::sleep(Duration::from_millis(200));
    for node in lab.nodes() {
        kill_all(node);
    }
    fs::write(&end, "").expect("write the file");
    thread::sleep(Duration::from_millis(700));
    fs::write(&go, "").expect("write the file");
    assert_done(&lab, &both);
}
