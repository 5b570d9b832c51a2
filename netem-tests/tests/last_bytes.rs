//! A process sends its last bytes on a connection that a firewall has forgotten, and ends at once.

mod common;

use std::{fs, path::PathBuf, thread, time::Duration};

use common::{
    events::Events,
    python::{lab_with_python, python},
};
use slim_lab::{
    Lab,
    faults::{
        flush::{self, Forgotten},
        nft,
    },
    output::Running,
};

/// The sender exchanges hellos with the receiver, makes a child that does what `child` says, waits for the file `go`, sends its last bytes,
/// and ends as `how` says. The receiver prints how many bytes come until the end of the stream.
const PROGRAM: &str = r#"
import os, socket, subprocess, sys, time
role, host, port, how, child, go = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5], sys.argv[6]
if role == "receiver":
    listener = socket.create_server((host, port))
    print("READY", flush=True)
    s, _ = listener.accept()
    s.sendall(b"hello")
    total = 0
    try:
        while data := s.recv(65536):
            assert data == bytes((total + n) % 251 for n in range(len(data))), total
            total += len(data)
        print("END", total, flush=True)
    except OSError as e:
        print("ERROR", total, e, flush=True)
    sys.exit()
s = socket.create_connection((host, port))
assert s.recv(5, socket.MSG_WAITALL) == b"hello"
if child == "gone":
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
elif child == "program":
    subprocess.Popen(["sleep", "6"])
elif child == "holds":
    parent = os.getpid()
    if os.fork() == 0:
        number = os.dup2(s.fileno(), 50)
        s.close()
        while os.getppid() == parent:
            time.sleep(0.01)
        # The parent has ended.
        time.sleep(0.2)
        os.write(number, bytes((3000 + n) % 251 for n in range(1000)))
        os._exit(0)
time.sleep(0.5)
print("READY", flush=True)
while not os.path.exists(go):
    time.sleep(0.01)
s.sendall(bytes(n % 251 for n in range(3000)))
if how == "close":
    s.close()
else:
    s.detach()
"#;

/// How the sender ends, and what its child does.
const CASES: [(&str, &str); 6] = [
    ("exit", "none"),
    ("close", "none"),
    ("exit", "gone"),
    ("close", "gone"),
    ("exit", "program"),
    ("close", "program"),
];

fn start(lab: &Lab, node: usize, args: &[&str], slim: bool) -> Running {
    let mut command = python(lab, node, PROGRAM, slim);
    command.args(args).arg(go(lab));
    Running::start(command).expect("start a program")
}

fn go(lab: &Lab) -> PathBuf {
    lab.dir().join("go")
}

/// Starts a receiver and a sender for each case, and waits until their connections stand.
fn pairs(lab: &Lab, cases: &[(&str, &str)], slim: bool) -> Vec<(Running, Running)> {
    let host = lab.node(1).address(0).to_string();
    let limit = Duration::from_secs(20);
    let pair = |(n, (how, child)): (usize, &(&str, &str))| {
        let port = (7200 + n).to_string();
        let args = |role| [role, host.as_str(), port.as_str(), *how, *child];
        let receiver = start(lab, 1, &args("receiver"), slim);
        assert!(receiver.wait_line(limit, |l| l == "READY"));
        let sender = start(lab, 0, &args("sender"), slim);
        assert!(sender.wait_line(limit, |l| l == "READY"));
        (receiver, sender)
    };
    cases.iter().enumerate().map(pair).collect()
}

/// Tells all senders to send and end.
fn send(lab: &Lab) {
    fs::write(go(lab), "").expect("write a file");
}

#[test]
fn last_bytes_arrive_although_a_firewall_has_forgotten_the_connection() {
    let Some(lab) = lab_with_python("last-bytes", 2, 1) else {
        return;
    };
    for slim in [false, true] {
        let _ = fs::remove_file(go(&lab));
        let pairs = pairs(&lab, &CASES, slim);
        let (forgotten, number) =
            flush::flush(lab.node(1).net(), None, Forgotten::Dropped).expect("flush");
        assert!(number >= CASES.len(), "{number} connections");
        send(&lab);
        // Under SLIM an end takes less than a second.
        let limit = Duration::from_secs(if slim { 10 } else { 0 });
        if !slim {
            thread::sleep(Duration::from_secs(3));
        }
        for ((receiver, _sender), case) in pairs.iter().zip(CASES) {
            let ended = receiver.wait_line(limit, |l| l == "END 3000");
            println!("{case:?}, slim {slim}: {:?}", receiver.lines());
            assert_eq!(ended, slim, "{case:?}, slim {slim}: {}", Events::read(&lab));
        }
        forgotten.lift().expect("lift the rules");
    }
}

/// The parent has bytes under way when it ends, and a child that has the connection under another number goes on with it.
#[test]
fn a_child_goes_on_with_a_connection_that_its_parent_ends_with() {
    let Some(lab) = lab_with_python("last-bytes-child", 2, 1) else {
        return;
    };
    let cases = [("exit", "holds"), ("close", "holds")];
    let pairs = pairs(&lab, &cases, true);
    // The acknowledgement takes some time.
    let silent = nft::Rule::drop().path(0);
    let silent = silent.apply_to(lab.nodes()).expect("lay the rule");
    send(&lab);
    thread::sleep(Duration::from_millis(30));
    silent.lift().expect("lift the rule");
    for ((receiver, _sender), case) in pairs.iter().zip(cases) {
        let ended = receiver.wait_line(Duration::from_secs(10), |l| l == "END 4000");
        assert!(
            ended,
            "{case:?}: {:?}; {}",
            receiver.lines(),
            Events::read(&lab)
        );
    }
}

/// Two connections and a listener. Of the peer of one connection nothing is heard any more when its last bytes are sent.
const TWO: &str = r#"
import os, socket, sys, time
go = sys.argv[3]
far, near = [socket.create_connection((host, 7300)) for host in sys.argv[1:3]]
listener = socket.create_server(("", 7301))
for s in far, near:
    assert s.recv(5, socket.MSG_WAITALL) == b"hello"
time.sleep(0.5)
print("READY", flush=True)
while not os.path.exists(go):
    time.sleep(0.01)
for s in near, far:
    s.sendall(bytes(n % 251 for n in range(3000)))
    time.sleep(0.2)
for s in near, far, listener:
    s.detach()
"#;

/// A process that waits for a peer that does not answer lets go of everything else.
#[test]
fn others_do_not_wait_for_a_peer_that_does_not_answer() {
    let Some(lab) = lab_with_python("last-bytes-others", 3, 1) else {
        return;
    };
    let limit = Duration::from_secs(20);
    let hosts = [1, 2].map(|n| lab.node(n).address(0).to_string());
    let receivers = [1, 2].map(|n| {
        let args = ["receiver", &hosts[n - 1], "7300", "exit", "none"];
        let receiver = start(&lab, n, &args, true);
        assert!(receiver.wait_line(limit, |l| l == "READY"));
        receiver
    });
    let mut sender = python(&lab, 0, TWO, true);
    sender.args(&hosts).arg(go(&lab));
    let mut sender = Running::start(sender).expect("start a program");
    assert!(sender.wait_line(limit, |l| l == "READY"));
    let silent = nft::Rule::drop().path(0);
    let silent = silent.apply_to(&lab.nodes()[1..2]).expect("lay the rule");
    send(&lab);
    let ended = receivers[1].wait_line(Duration::from_secs(5), |l| l == "END 3000");
    assert!(ended, "{:?}", receivers[1].lines());
    assert!(sender.is_running(), "it waits for the other peer");
    let next = "import socket; socket.create_server((\"\", 7301)); print(\"FREE\")";
    let next = Running::start(python(&lab, 0, next, false)).expect("start a program");
    assert!(next.wait_line(limit, |l| l == "FREE"), "{:?}", next.lines());
    silent.lift().expect("lift the rule");
    let ended = receivers[0].wait_line(limit, |l| l == "END 3000");
    assert!(ended, "{:?}", receivers[0].lines());
}
