//! Programs on two hosts that reach each other only through the witness: however one of them ends, the other one has all bytes and then the end
//! of the stream. Not MPI, so that the ends are the programs' own.

mod common;

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::thread;
use std::time::Duration;

use common::Scratch;
use slim_lab::faults::destroy::{self, Amount, Selector};
use slim_lab::faults::nft::Rule;
use slim_lab::output::Running;
use slim_lab::{Lab, Node, SeededRng, artifacts, skip::skip};

/// One end. Both exchange hellos, and again as soon as the file is there, unless the sender is to leave "late". Then the sender sends, and ends
/// in the given way; "late" is an exit when the file is gone again. The reader pauses, reads to the end, and says what it got.
const PROGRAM: &str = r#"
import os, socket, struct, sys, time
role, host, how, pause, amount, go = sys.argv[1:]
amount = int(amount)
if role == "reader":
    listener = socket.create_server((host, 7000))
    print("READY", flush=True)
    s, _ = listener.accept()
else:
    s = socket.create_connection((host, 7000))
def hello():
    s.sendall(b"hello")
    assert s.recv(5, socket.MSG_WAITALL) == b"hello"
hello()
print("RUNNING", flush=True)
# The file is soon gone again if the sender is to leave "late".
while (role == "sender" or how != "late") and not os.path.exists(go):
    time.sleep(0.01)
if how != "late":
    hello()
block = bytes(range(251)) * 400
if role == "sender":
    if how == "linger":
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 20))
    while amount > 0:
        amount -= s.send(block[-(amount % len(block)) or -len(block):])
    print("SENT", flush=True)
    while how == "late" and os.path.exists(go):
        time.sleep(0.01)
    if how in ("exit", "late"):
        s.detach()
    elif how == "shut":
        s.shutdown(socket.SHUT_WR)
        assert s.recv(1) == b""
        s.close()
    else:
        s.close()
    print("LEFT", flush=True)
    if how == "linger":
        os._exit(0)
else:
    time.sleep(float(pause))
    n, end = 0, "end"
    try:
        while data := s.recv(65536):
            n += len(data)
            rest = -(amount - n + len(data)) % len(block)
            right = (block + block)[rest:rest + len(data)]
            assert data == right, n
    except OSError as e:
        end = e
    if pause == "0":
        s.close()
    print("GOT", n, end, flush=True)
"#;

/// The witness, which takes this test for the launcher. Ends when dropped.
struct Witness(Child);

impl Drop for Witness {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const KEY: (&str, &str) = ("SLIM_JOB_KEY", "0123456789abcdefghij");
const SOON: Duration = Duration::from_secs(20);
/// Short attempts: a test is not to take a minute.
const ATTEMPTS: (&str, &str) = ("SLIM_ATTEMPT_TIMEOUTS", "0.5,1,3");

fn witness(node: &Node) -> Witness {
    let program = r#"
import os, socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind((sys.argv[2], 7100))
os.dup2(s.fileno(), 0)
os.execv(sys.argv[1], ["slim", "witness", str(os.getppid())])
"#;
    let mut command = node.command("/usr/bin/python3");
    command.args(["-c", program, env!("CARGO_BIN_EXE_slim")]);
    command.arg(node.address(0).to_string()).envs([KEY]);
    command.env_remove("LD_PRELOAD").stdin(Stdio::null());
    Witness(command.spawn().expect("start the witness"))
}

fn start(lab: &Lab, scratch: &Scratch, node: usize, args: [&str; 4]) -> Running {
    let mut command = lab.node(node).command("/usr/bin/python3");
    command.arg("-c").arg(PROGRAM).arg(args[0]);
    command.arg(lab.node(1).address(0).to_string());
    command.args(&args[1..]).arg(go(scratch));
    let library = artifacts::preload().expect("the preload library");
    let witness = format!("{}:7100", lab.node(2).address(0));
    command.env("LD_PRELOAD", library).envs([KEY, ATTEMPTS]);
    command.env("SLIM_WITNESS", witness);
    command.env("SLIM_EVENTS", events(scratch, node));
    Running::start(command).expect("start a program")
}

/// The file that lets the programs go on.
fn go(scratch: &Scratch) -> PathBuf {
    scratch.path("go")
}

fn events(scratch: &Scratch, node: usize) -> PathBuf {
    scratch.path(&format!("events.{node}"))
}

/// Both kernels forget the connection between the first two nodes.
fn kill_connection(lab: &Lab) {
    for node in &lab.nodes()[..2] {
        let pick = Selector::between_hosts().port(7000);
        destroy::destroy(node.net(), &pick, Amount::All, &mut SeededRng::new(1)).unwrap();
    }
}

/// What the reader says about a sender that sends so many bytes and ends `how`, while the reader pauses for `pause` seconds first.
fn ends(test: &str, how: &str, amount: usize, pause: &str) {
    if let Err(reason) = Lab::check() {
        return skip(test, reason);
    }
    let lab = Lab::builder().nodes(3).name("cli-relay").build().unwrap();
    let scratch = Scratch::new(test);
    let _witness = witness(lab.node(2));
    let bytes = amount.to_string();
    let mut reader = start(&lab, &scratch, 1, ["reader", how, pause, &bytes]);
    assert!(
        reader.wait_line(SOON, |l| l == "READY"),
        "{:?}",
        reader.lines()
    );
    let mut sender = start(&lab, &scratch, 0, ["sender", how, pause, &bytes]);
    for program in [&reader, &sender] {
        assert!(
            program.wait_line(SOON, |l| l == "RUNNING"),
            "{:?}",
            program.lines()
        );
    }
    // The ends tell each other how to reach them through the witness.
    thread::sleep(Duration::from_millis(500));
    let (one, other) = lab.nodes()[..2].split_at(1);
    let _guards = Rule::drop().apply_between(one, other).unwrap();
    let is_late = how == "late";
    if !is_late {
        kill_connection(&lab);
    }
    fs::write(go(&scratch), "").unwrap();
    if is_late {
        assert!(
            sender.wait_line(SOON, |l| l == "SENT"),
            "{:?}",
            sender.lines()
        );
        kill_connection(&lab);
        fs::remove_file(go(&scratch)).unwrap();
    }
    let status = sender.wait(SOON);
    assert_eq!(
        status.and_then(|s| s.code()),
        Some(0),
        "{:?}",
        sender.lines()
    );
    reader.wait(SOON);
    let said: Vec<String> = reader.lines().into_iter().map(|l| l.text).collect();
    let logs = [0, 1].map(|node| fs::read_to_string(events(&scratch, node)).unwrap());
    let got = said.iter().find(|l| l.starts_with("GOT"));
    let wanted = format!("GOT {amount} end");
    assert_eq!(got, Some(&wanted), "{said:?} {logs:#?}");
    assert!(!logs.concat().contains("accuse"), "{logs:#?}");
    assert!(logs[0].contains(r#""remote":"relay/"#), "{logs:#?}");
}

#[test]
fn a_program_that_closes_and_exits() {
    ends("a_program_that_closes_and_exits", "close", 0, "0");
    ends("a_program_that_closes_and_exits", "close", 2_000_000, "0");
    ends("a_program_that_closes_and_exits", "close", 2_000_000, "2");
}

#[test]
fn a_program_that_exits_without_closing() {
    ends("a_program_that_exits_without_closing", "exit", 0, "1");
    ends(
        "a_program_that_exits_without_closing",
        "exit",
        2_000_000,
        "1",
    );
}

/// The connection breaks after the last bytes, and nobody has noticed when the program exits.
#[test]
fn a_program_that_exits_before_the_flow_goes_through_the_witness() {
    let test = "a_program_that_exits_before_the_flow_goes_through_the_witness";
    ends(test, "late", 20_000, "0");
    ends(test, "late", 0, "0");
}

#[test]
fn a_program_that_shuts_its_direction_and_waits_for_the_other_end() {
    let test = "a_program_that_shuts_its_direction_and_waits_for_the_other_end";
    ends(test, "shut", 2_000_000, "0");
}

/// It leaves by `_exit`, so only the close itself can wait.
#[test]
fn a_close_with_so_linger_waits_until_the_peer_has_everything() {
    let test = "a_close_with_so_linger_waits_until_the_peer_has_everything";
    ends(test, "linger", 2_000_000, "1");
}
