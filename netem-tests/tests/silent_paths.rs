//! Paths that drop everything and report nothing: how long a program without MPI waits.

mod common;

use std::{
    process::{Child, Command},
    thread,
    time::{Duration, Instant},
};

use common::{
    events::Events,
    lab, soak,
    streams::{End, Pair, Streams},
};
use slim_lab::{Lab, faults::nft};

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
