//! Many processes of one host die in one moment. The host's kernel tells of few of them (`icmp_ratelimit`), but all their peers
//! see the end at once.

mod common;

use std::{
    path::Path,
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use common::{
    events::{Events, word},
    lab,
    python::python,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use slim_lab::{Lab, output::Running, skip::skip};

/// `victim HOST PORT CONNECTIONS` echoes what it receives. `survivor HOST PORT...` connects to all these ports, and sends a byte on
/// each connection every few milliseconds. When all its connections have ended, it says for each one when it ended, and what the
/// longest time between two rounds was.
const PROGRAM: &str = r#"
import select, socket, sys, time
role, host = sys.argv[1], sys.argv[2]
if role == "victim":
    listener = socket.create_server((host, int(sys.argv[3])))
    print("READY", flush=True)
    conns = [listener.accept()[0] for _ in range(int(sys.argv[4]))]
else:
    conns = [socket.create_connection((host, int(port))) for port in sys.argv[3:]]
print("RUNNING", flush=True)
for s in conns:
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    s.setblocking(False)
ended, rounds, longest = [], time.time(), 0
while conns:
    longest, rounds = max(longest, time.time() - rounds), time.time()
    for s in select.select(conns, [], [], 0.005)[0] if role == "victim" else conns[:]:
        try:
            if role == "survivor":
                s.send(b"x")
            got = s.recv(4096)
            if role == "victim":
                s.send(got)
            why = None if got else "end"
        except BlockingIOError:
            why = None
        except OSError as e:
            why = str(e)
        if why:
            conns.remove(s)
            ended.append((time.time(), why))
    if role == "survivor":
        time.sleep(0.003)
for when, why in ended:
    print("ENDED", when, why, flush=True)
print("DONE", longest, flush=True)
"#;

const VICTIMS: u16 = 8;
const FIRST_PORT: u16 = 7200;
/// No survivor may wait longer for an end than this.
const LIMIT: f64 = 0.5;
/// The survivors share the ICMP messages of the dead host, so they must notice the deaths within 100 ms of each other. On a machine that
/// holds up one of them for this long, the limit does not hold.
const HELD_UP: f64 = 0.05;
const RUNS: usize = 5;

fn start(lab: &Lab, node: usize, args: &[String], slim: bool) -> Running {
    let mut command = python(lab, node, PROGRAM, slim);
    command.args(args);
    Running::start(command).expect("start a program")
}

/// Kills all victims at once. Returns how long after that each connection of the survivors ended, in ascending order, and for how long a
/// survivor was held up.
fn kill_all_victims(lab: &Lab, survivors: usize, slim: bool) -> (Vec<f64>, f64) {
    let host = lab.node(1).address(0).to_string();
    let ports = (FIRST_PORT..FIRST_PORT + VICTIMS).map(|port| port.to_string());
    let ports: Vec<String> = ports.collect();
    let victim = |port: &String| {
        let args = [
            "victim".into(),
            host.clone(),
            port.clone(),
            survivors.to_string(),
        ];
        let victim = start(lab, 1, &args, slim);
        assert!(victim.wait_line(Duration::from_secs(20), |l| l == "READY"));
        victim
    };
    let victims: Vec<Running> = ports.iter().map(victim).collect();
    let args: Vec<String> = ["survivor".into(), host.clone()]
        .into_iter()
        .chain(ports)
        .collect();
    let survivors: Vec<Running> = (0..survivors).map(|_| start(lab, 0, &args, slim)).collect();
    for program in victims.iter().chain(&survivors) {
        assert!(program.wait_line(Duration::from_secs(20), |l| l == "RUNNING"));
    }
    // Until each process has been asked whether it can be reached.
    thread::sleep(Duration::from_secs(2));
    let killed = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("the time");
    for victim in &victims {
        kill(Pid::from_raw(victim.id() as i32), Signal::SIGKILL).expect("kill a victim");
    }
    let (mut ended, mut held_up) = (Vec::new(), 0.0_f64);
    for survivor in &survivors {
        assert!(survivor.wait_line(Duration::from_secs(60), |l| l.starts_with("DONE")));
        let number = |line: &str, word: &str| {
            let rest = line.strip_prefix(word)?.split(' ').next()?;
            rest.parse::<f64>().ok()
        };
        for line in survivor.lines() {
            ended.extend(number(&line.text, "ENDED ").map(|at| at - killed.as_secs_f64()));
            held_up = held_up.max(number(&line.text, "DONE ").unwrap_or(0.0));
        }
    }
    ended.sort_by(f64::total_cmp);
    (ended, held_up)
}

/// The longest time from the deaths to an end that a survivor sees. Each lab has new namespaces, so that the kernel's limit is as if no
/// ICMP message had been sent before.
fn longest(name: &str, lab: &Lab, survivors: usize, slim: bool) -> Option<f64> {
    let (took, held_up) = kill_all_victims(lab, survivors, slim);
    assert_eq!(took.len(), survivors * usize::from(VICTIMS));
    let (first, last) = (took[0], took[took.len() - 1]);
    println!("{name}, slim {slim}: ends after {first:.3} to {last:.3} s, held up {held_up:.3} s");
    if held_up > HELD_UP {
        println!("{name}: the machine is too busy");
        return None;
    }
    Some(last)
}

fn eight_die(name: &str, survivors: usize) {
    if !Path::new("/usr/bin/python3").exists() {
        return skip(name, "python3 is not installed");
    }
    let Some(bare) = lab(name, 2, 1) else {
        return;
    };
    longest(name, &bare, survivors, false);
    drop(bare);
    for _ in 0..RUNS {
        let lab = lab(name, 2, 1).expect("the first one could be made");
        let took = longest(name, &lab, survivors, true);
        let events = Events::read(&lab);
        let given_up: Vec<_> = events.of_kind("escalate").collect();
        assert!(!given_up.is_empty());
        for event in &given_up {
            assert_eq!(word(event, "reason"), "peer_gone", "{event}");
            assert_eq!(word(event, "evidence"), "process_gone", "{event}");
        }
        if let Some(took) = took {
            assert!(took < LIMIT, "after {took:.3} s: {:#?}", events.lines);
            return;
        }
    }
    skip(name, "the machine is too busy");
}

#[test]
fn eight_processes_of_a_host_die_and_one_survivor_notices_soon() {
    eight_die("eight-die-for-one", 1);
}

#[test]
fn eight_processes_of_a_host_die_and_four_survivors_notice_soon() {
    eight_die("eight-die-for-four", 4);
}
