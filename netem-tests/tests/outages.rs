//! Outages that are longer than all attempts take, in which both hosts change their addresses. `SLIM_SOAK=1`: for an hour.

mod common;

use std::{
    fs, os::unix::fs::PermissionsExt, path::PathBuf, thread::sleep, time::Duration, time::Instant,
};

use common::{
    events::Events,
    eventually,
    python::{lab_with_python, python},
    soak,
};
use slim_lab::{
    Lab, artifacts,
    faults::{
        link,
        nft::{Rule, RuleGuard},
    },
    output::Running,
};

/// Both ends of a connection: `server HOST PORT` and `client HOST PORT`. Each end sends 400 blocks and checks each byte of those that it
/// receives. Its kernel gives a connection up after 5 s of silence.
const PROGRAM: &str = r#"
import errno, hashlib, socket, sys, threading, time
role, host, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
if role == "server":
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen()
    print("READY", flush=True)
    s, _ = listener.accept()
else:
    s = socket.create_connection((host, port))
s.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5000)
SIZE, BLOCKS = 40000, 400
def block(side, n):
    return hashlib.shake_128(f"{side} {n}".encode()).digest(SIZE)
other = {"server": "client", "client": "server"}[role]
failed = []
def send():
    try:
        for n in range(BLOCKS):
            s.sendall(block(role, n))
            time.sleep(0.02)
    except OSError as e:
        failed.append(e)
sender = threading.Thread(target=send, daemon=True)
sender.start()
try:
    for n in range(BLOCKS):
        want = block(other, n)
        got = s.recv(SIZE, socket.MSG_WAITALL)
        if got != want:
            # A kernel reports an error once: the other thread may have got it, and this one the end.
            sender.join(5)
            if failed and want.startswith(got):
                raise failed[0]
            print("WRONG", n, len(got), flush=True)
            sys.exit(4)
        if n == 20:
            print("BEGUN", flush=True)
    sender.join()
    if failed:
        raise failed[0]
    print("DONE", flush=True)
except OSError as e:
    print("FAILED", errno.errorcode[e.errno], flush=True)
    sys.exit(3)
"#;

const LONG: Duration = Duration::from_secs(30);
/// The witness is on this node.
const WITNESS: usize = 2;

/// A lab with a server, a client, and a witness at which they find each other.
struct Outage {
    lab: Lab,
    ends: [Running; 2],
    _witness: Running,
}

impl Outage {
    /// `None` if it cannot be made here. `hold`: the value of `SLIM_HOLD`.
    fn begin(test: &str, hold: &str) -> Option<Outage> {
        let lab = lab_with_python(test, 3, 1)?;
        let key = lab.dir().join("key");
        fs::write(&key, "a key of more than sixteen bytes").expect("write a key");
        fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).expect("protect the key");
        let meet = format!("{}:4000", lab.node(WITNESS).address(0));

        let mut witness = lab
            .node(WITNESS)
            .command(artifacts::program("slim").expect("slim"));
        witness.args(["witness", "--listen", &meet]);
        witness.env("SLIM_JOB_KEY_FILE", &key);
        let witness = Running::start(witness).expect("start a witness");

        let host = lab.node(0).address(0).to_string();
        let start = |node: usize, role: &str| {
            let mut command = python(&lab, node, PROGRAM, true);
            command.args([role, &host, "7000"]);
            command.env("SLIM_ATTEMPTS", "1");
            command.env("SLIM_ATTEMPT_TIMEOUTS", "2");
            command.env("SLIM_HOLD", hold);
            command.env("SLIM_MEET", &meet);
            command.env("SLIM_JOB_KEY_FILE", &key);
            Running::start(command).expect("start a program")
        };
        let server = start(0, "server");
        assert!(
            server.wait_line(LONG, |l| l == "READY"),
            "{:?}",
            server.lines()
        );
        let ends = [server, start(1, "client")];
        for end in &ends {
            assert!(end.wait_line(LONG, |l| l == "BEGUN"), "{:?}", end.lines());
        }
        Some(Outage {
            lab,
            ends,
            _witness: witness,
        })
    }

    /// Nothing passes between the two hosts.
    fn cut(&self) -> RuleGuard {
        let rule = Rule::drop().path(0);
        let rule = rule.apply_to(&self.lab.nodes()[..2]);
        rule.expect("cut the network")
    }

    fn wait_until_held(&self) {
        let held = eventually(LONG, || self.held() == 2);
        assert!(held, "{}", self.tell());
    }

    /// The program at this end gets an error within that time.
    fn assert_fails(&mut self, end: usize, within: Duration) {
        let status = self.ends[end].wait(within);
        assert_eq!(status.and_then(|s| s.code()), Some(3), "{}", self.tell());
    }

    /// Both hosts change their addresses.
    fn renumber(&self) {
        for node in 0..2 {
            let new = self.lab.spare_address(0, node).expect("a spare address");
            link::renumber(self.lab.node(node), 0, new).expect("renumber");
        }
    }

    fn tell(&self) -> String {
        let lines = self.ends.each_ref().map(Running::lines);
        format!("{lines:?} {}", Events::read(&self.lab))
    }

    fn held(&self) -> usize {
        Events::read(&self.lab).count("hold")
    }
}

/// How often the agent's thread of this process has slept.
fn wakes(process: &Running) -> u64 {
    let tasks = fs::read_dir(format!("/proc/{}/task", process.id())).expect("threads");
    let mut all = tasks.map(|task| task.expect("a thread").path());
    let is_agent = |task: &PathBuf| {
        fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.trim() == "slim-agent")
    };
    let agent = all.find(is_agent).expect("the agent's thread");
    let status = fs::read_to_string(agent.join("status")).expect("its status");
    let mut lines = status.lines();
    let count = lines.find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    count.and_then(|n| n.trim().parse().ok()).expect("a number")
}

#[test]
fn a_program_survives_an_outage_in_which_both_hosts_change_their_addresses() {
    let Some(mut outage) = Outage::begin("outage", "86400") else {
        return;
    };
    let cut = outage.cut();
    outage.wait_until_held();
    // The kernels report their errors meanwhile.
    sleep(Duration::from_secs(8));

    let minutes = if soak() { 60 } else { 1 };
    let (begun, before) = (Instant::now(), outage.ends.each_ref().map(wakes));
    sleep(Duration::from_secs(60 * minutes + 10));
    let after = outage.ends.each_ref().map(wakes);
    let woken = [0, 1].map(|n| after[n] - before[n]);
    println!("wake-ups in {:?}: {woken:?}", begun.elapsed());
    for n in woken {
        assert!(n <= minutes + 1, "{woken:?} in {:?}", begun.elapsed());
    }
    assert!(woken.iter().all(|n| *n > 0), "nobody looks: {woken:?}");

    outage.renumber();
    sleep(Duration::from_secs(1));
    let resumes = Events::read(&outage.lab).count("resume");
    cut.lift().expect("the network is back");
    let back = Instant::now();
    for n in 0..2 {
        // Each end looks once in some 63 s. The second one to look finds the first one.
        let status = outage.ends[n].wait(Duration::from_secs(150));
        let done = outage.ends[n]
            .lines()
            .iter()
            .any(|line| line.text == "DONE");
        assert!(
            done && status.is_some_and(|s| s.success()),
            "{}",
            outage.tell()
        );
    }
    println!("done {:?} after the network was back", back.elapsed());
    let events = Events::read(&outage.lab);
    assert!(events.count("resume") >= resumes + 2, "{events}");
    assert_eq!(events.count("escalate"), 0, "{events}");
}

#[test]
fn the_same_outage_ends_a_program_that_does_not_hold_on() {
    let Some(mut outage) = Outage::begin("no-hold", "0") else {
        return;
    };
    let cut = outage.cut();
    outage.renumber();
    for n in 0..2 {
        outage.assert_fails(n, LONG);
    }
    cut.lift().expect("the network is back");
}

#[test]
fn the_process_that_has_ended_meanwhile_is_given_up_when_the_network_is_back() {
    let Some(mut outage) = Outage::begin("hold-death", "86400") else {
        return;
    };
    let cut = outage.cut();
    outage.wait_until_held();
    outage.ends[1].kill();
    cut.lift().expect("the network is back");
    outage.assert_fails(0, Duration::from_secs(90));
}

#[test]
fn a_flow_is_held_no_longer_than_the_user_wants() {
    let Some(mut outage) = Outage::begin("hold-over", "5") else {
        return;
    };
    let _cut = outage.cut();
    for n in 0..2 {
        outage.assert_fails(n, LONG);
    }
    assert_eq!(outage.held(), 2, "{}", outage.tell());
}
