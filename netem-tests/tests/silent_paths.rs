//! Paths that drop everything and report nothing: how long a program without MPI waits.

mod common;

use std::{
    process::{Child, Command},
    thread,
    time::{Duration, Instant},
};

use common::{
    events::Events,
    lab,
    python::{lab_with_python, python},
    soak,
    streams::{End, Pair, Streams},
};
use slim_lab::{Lab, faults::nft, output::Running};

/// Both directions of a path are silent.
fn silence(lab: &Lab, path: usize) -> nft::RuleGuard {
    let rule = nft::Rule::drop().path(path);
    rule.apply_to(lab.nodes()).expect("lay the rule")
}

/// One connection with some bytes every few milliseconds in both directions.
fn stream(seconds: f64) -> Streams {
    Streams::bare(1, seconds, 4096).slim()
}

/// The times of 20 ms or more without bytes, in seconds.
fn stalls(end: &End) -> Vec<f64> {
    let stall = |line: &String| line.strip_prefix("STALL ")?.parse().ok();
    end.lines.iter().filter_map(stall).collect()
}

/// The kernel alone would send again after 0.2 s, and then over the same path.
const LIMIT: f64 = 0.15;

/// Waits for both programs, checks them, and returns all stalls.
fn checked(lab: &Lab, streams: &Streams, pair: Pair) -> Vec<f64> {
    let limit = Duration::from_secs_f64(streams.seconds + 60.0);
    let (server, client) = pair.wait(limit);
    server.assert_whole("server", streams);
    client.assert_whole("client", streams);
    let mut all = [stalls(&server), stalls(&client)].concat();
    all.sort_by(f64::total_cmp);
    let longest = &all[all.len().saturating_sub(20)..];
    println!(
        "{} stalls of 20 ms or more, the longest {longest:.3?}; {}",
        all.len(),
        Events::read(lab)
    );
    all
}

#[test]
fn a_flow_leaves_a_silent_path_within_some_milliseconds() {
    let Some(lab) = lab("silent-path", 2, 2) else {
        return;
    };
    let times = if soak() { 300 } else { 8 };
    let streams = stream(f64::from(times) * 0.6 + 2.0);
    let pair = streams.start(&lab);
    thread::sleep(Duration::from_secs(1));
    for n in 0..times {
        let silent = silence(&lab, n as usize % 2);
        thread::sleep(Duration::from_millis(500));
        silent.lift().expect("lift the rule");
    }
    let all = checked(&lab, &streams, pair);
    let moved = Events::read(&lab).count("resume");
    assert!(moved >= 2 * times as usize, "{moved} resumes at both ends");
    let longest = all.last().expect("no fault had an effect");
    assert!(*longest < LIMIT, "{longest} s");
}

#[test]
fn bytes_flow_again_as_soon_as_the_only_path_works() {
    let Some(lab) = lab("silent-hole", 2, 1) else {
        return;
    };
    let holes = [50, 150, 300, 600, 1200, 3000];
    let rounds = if soak() { 20 } else { 1 };
    let streams = stream(f64::from(rounds) * 7.5 + 2.0);
    let pair = streams.start(&lab);
    thread::sleep(Duration::from_secs(1));
    let mut longest = Vec::new();
    for hole in holes.repeat(rounds as usize) {
        let begun = Instant::now();
        let silent = silence(&lab, 0);
        thread::sleep(Duration::from_millis(hole));
        silent.lift().expect("lift the rule");
        longest.push(begun.elapsed().as_secs_f64());
        thread::sleep(Duration::from_millis(300));
    }
    longest.sort_by(f64::total_cmp);
    let all = checked(&lab, &streams, pair);
    // A stall follows each hole at one end at least, so the longest stall belongs to the longest hole.
    println!("holes: {longest:.3?}");
    let (hole, stall) = (longest.last().unwrap(), all.last().expect("no hole"));
    assert!(*stall >= 3.0, "{stall} s");
    assert!(stall - hole < LIMIT, "{stall} s after {hole} s");
    // In the shorter holes the kernel alone would wait for up to as long again.
    let short = |limit: f64| move |s: &&f64| **s < limit;
    let (hole, stall) = (
        longest.iter().rfind(short(2.0)),
        all.iter().rfind(short(2.0)),
    );
    let (hole, stall) = (hole.unwrap(), stall.unwrap());
    assert!(stall - hole < LIMIT, "{stall} s after {hole} s");
}

#[test]
fn a_path_that_drops_long_packets_carries_the_flow() {
    let Some(lab) = lab("long-packets", 2, 1) else {
        return;
    };
    lab.send_single_segments().expect("set up the interfaces");
    let streams = stream(8.0);
    let pair = streams.start(&lab);
    thread::sleep(Duration::from_secs(1));
    let hole = nft::Rule::drop().longer_than(600);
    let hole = hole.apply_to(lab.nodes()).expect("lay the rule");
    let all = checked(&lab, &streams, pair);
    let report = hole.report().expect("count the packets");
    assert!(report.packets > 0, "nothing was stopped");
    // A new connection after 0.3 s, which does not help, and one with small segments after as long again.
    let longest = all.last().expect("no fault had an effect");
    assert!((0.3..1.5).contains(longest), "{longest} s");
}

/// `echo HOST PORT FLOWS`, or `ask HOST PORT FLOWS IDLE`: sends on each connection in turn, waits for the echo, and says how long that took;
/// twice, with so many seconds between.
const IN_TURN: &str = r#"
import socket, sys, time
role, host, port, flows = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
if role == "echo":
    listener = socket.create_server((host, port), backlog=flows)
    print("READY", flush=True)
    conns = [listener.accept()[0] for _ in range(flows)]
    for _ in range(2):
        for s in conns:
            s.sendall(s.recv(100, socket.MSG_WAITALL))
else:
    conns = [socket.create_connection((host, port)) for _ in range(flows)]
    for s in conns:
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for n in range(2):
        times = []
        for i, s in enumerate(conns):
            ask, begun = bytes([i]) * 100, time.time()
            s.sendall(ask)
            assert s.recv(100, socket.MSG_WAITALL) == ask
            times.append(time.time() - begun)
        print("TIMES", *times, flush=True)
        if n == 0:
            time.sleep(float(sys.argv[5]))
"#;

/// Connections that are used in turn, the first time after the path has become silent.
#[test]
fn flows_used_in_turn_leave_a_silent_path() {
    let Some(lab) = lab_with_python("in-turn", 2, 2) else {
        return;
    };
    const FLOWS: usize = 30;
    for (n, idle) in [1.0, 4.0].into_iter().enumerate() {
        let port = 7300 + n;
        let start = |node: usize, role: &str| {
            let mut command = python(&lab, node, IN_TURN, true);
            let host = lab.node(1).address(0).to_string();
            command.args([role, &host, &port.to_string(), &FLOWS.to_string()]);
            command.arg(idle.to_string());
            Running::start(command).expect("start a program")
        };
        let limit = Duration::from_secs(60);
        let mut echo = start(1, "echo");
        assert!(echo.wait_line(limit, |line| line == "READY"), "{echo:?}");
        let mut ask = start(0, "ask");
        let has_begun = |line: &str| line.starts_with("TIMES");
        assert!(ask.wait_line(limit, has_begun), "{ask:?}");
        // All connections have a session by then.
        thread::sleep(Duration::from_millis(500));
        let silent = silence(&lab, 0);
        for program in [&mut ask, &mut echo] {
            let status = program.wait(limit);
            assert!(
                status.is_some_and(|s| s.success()),
                "{program:?} {}",
                Events::read(&lab)
            );
        }
        silent.lift().expect("lift the rule");
        let said = ask.lines();
        let last = said.last().and_then(|line| line.text.strip_prefix("TIMES"));
        let times = last.expect("the second times").split_whitespace();
        let mut times: Vec<f64> = times.map(|t| t.parse().expect("a time")).collect();
        times.sort_by(f64::total_cmp);
        println!("after {idle} s: {times:.3?}");
        assert!(times[0] > 0.005, "the silence had no effect: {times:?}");
        assert!(times[FLOWS - 1] < LIMIT, "{times:.3?}");
    }
}

/// Processes that take all processor time they get. They end with this object.
struct Hogs(Vec<Child>);

impl Hogs {
    fn start(number: usize) -> Hogs {
        let hog = || {
            let mut hog = Command::new("sh");
            hog.args(["-c", "while :; do :; done"]).spawn()
        };
        Hogs((0..number).map(|_| hog().expect("start sh")).collect())
    }
}

impl Drop for Hogs {
    fn drop(&mut self) {
        for hog in &mut self.0 {
            let _ = hog.kill();
            let _ = hog.wait();
        }
    }
}

#[test]
fn no_connection_is_replaced_because_hosts_are_busy() {
    let Some(lab) = lab("busy-paths", 2, 2) else {
        return;
    };
    let _hogs = Hogs::start(4);
    let streams = Streams::bare(20, if soak() { 600.0 } else { 6.0 }, 8192).slim();
    let pair = streams.start(&lab);
    let all = checked(&lab, &streams, pair);
    assert_eq!(Events::read(&lab).count("suspend"), 0, "{all:?}");
}
