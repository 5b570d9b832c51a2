//! Programs that execute other programs while their connections are broken.

mod common;

use std::{fs, path::Path, process::Command, time::Duration};

use common::{
    events::{Events, events_dir},
    eventually, lab,
};
use slim_lab::{
    Lab, SeededRng, artifacts,
    faults::{
        destroy::{self, Amount, Selector},
        nft,
    },
    output::Running,
    skip::skip,
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

fn start(lab: &Lab, node: usize, args: &[&str]) -> Running {
    let mut command: Command = lab.node(node).command("/usr/bin/python3");
    command.args(["-c", PROGRAM]).args(args);
    command.env("PROGRAM", PROGRAM);
    let library = artifacts::preload().expect("the preload library");
    command.env("LD_PRELOAD", library);
    command.env("SLIM_EVENTS", events_dir(lab).join("%h.%p.jsonl"));
    Running::start(command).expect("start a program")
}

#[test]
fn an_exec_waits_for_all_broken_connections_at_the_same_time() {
    let name = "exec-many";
    if !Path::new("/usr/bin/python3").exists() {
        return skip(name, "python3 is not installed");
    }
    let Some(lab) = lab(name, 2, 2) else {
        return;
    };
    let host = lab.node(1).address(0).to_string();
    let count = CONNECTIONS.to_string();
    let server = start(&lab, 1, &["server", &host, &count]);
    let ready = server.wait_line(Duration::from_secs(20), |l| l == "READY");
    assert!(ready, "{:?}", server.lines());
    let go = lab.node(0).tmp().join("go");
    let file = go.display().to_string();
    let client = start(&lab, 0, &["client", &host, &count, &file]);
    let live = || Events::read(&lab).count("live") == 2 * CONNECTIONS;
    assert!(eventually(Duration::from_secs(5), live), "no sessions");
    // The peers do not see the resets, so only the use of a connection shows that it is broken.
    let rule = nft::Rule::drop().path(0);
    let _silent = rule.apply_to(lab.nodes()).expect("lay the rule");
    let (net, all) = (lab.node(0).net(), Selector::between_hosts());
    let killed = destroy::destroy(net, &all, Amount::All, &mut SeededRng::new(1));
    let killed = killed.expect("destroy connections").connections.len();
    assert_eq!(killed, CONNECTIONS);
    fs::write(&go, "").expect("write the file");
    let done = client.wait_line(Duration::from_secs(30), |l| l == "DONE");
    let told = [client.lines(), server.lines()];
    assert!(done, "{told:?} {}", Events::read(&lab));
}
