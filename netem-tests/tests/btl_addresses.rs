//! The native component's parameters, and strangers at its listeners.

mod common;

use std::{
    fs,
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream},
    thread,
    time::Duration,
};

use common::{
    component::{ComponentBench, KINDS},
    events::{Events, word},
    jobs::{PROGRAM, assert_finished},
};
use slim_lab::{
    Lab,
    mpi::{Flavor, Job, Started},
};

const LIMIT: Duration = Duration::from_secs(60);

fn lab(bench: &ComponentBench) -> Lab {
    let lab = bench.bench.lab(2);
    for (n, node) in lab.nodes().iter().enumerate() {
        let address = format!("fd00:77::{}/64", n + 1);
        let words = ["-6", "addr", "add", &address, "dev", "path1", "nodad"];
        node.net().exec("ip", &words).expect("add an address");
    }
    lab
}

fn finish(bench: &ComponentBench, lab: &Lab, job: &Job<'_>, work: impl FnOnce(&mut Started<'_>)) {
    let outcome = bench.bench.run(lab, job, LIMIT, |job| {
        work(job);
        String::new()
    });
    assert_finished(&bench.bench.test, lab, &outcome);
}

/// Addresses between which the ranks had protected flows, both ends of each.
fn used(lab: &Lab) -> Vec<String> {
    let events = Events::read(lab);
    let live = events.of_kind("live");
    let mut ends: Vec<String> = live
        .flat_map(|e| [word(e, "sock"), word(e, "peer")])
        .map(|end| end.rsplit_once(':').map_or(end, |(ip, _)| ip).to_owned())
        .collect();
    ends.sort();
    ends.dedup();
    ends
}

#[test]
fn an_eager_message_longer_than_a_fragment_may_be_is_whole() {
    let Some(bench) = ComponentBench::new("eager-limit", Flavor::OpenMpi4) else {
        return;
    };
    let limits = [
        (1, ["2097152", "524288"]),
        (1, ["65536", "40"]),
        // With two lines, fragments have 128 KiB at most.
        (2, ["2097152", "4194304"]),
    ];
    for (paths, [eager, most]) in limits {
        let lab = bench.bench.lab(paths);
        let words = [
            ["btl_slim_eager_limit", eager],
            ["btl_slim_rndv_eager_limit", eager],
            ["btl_slim_max_send_size", most],
        ];
        let job = bench.job(&lab, KINDS, 2).arg("sizes").arg("1");
        let job = words.iter().fold(job, |job, [name, value]| {
            job.option("--mca").option(*name).option(*value)
        });
        finish(&bench, &lab, &job, |_| ());
    }
}

#[test]
fn networks_of_ipv6_are_used() {
    let Some(bench) = ComponentBench::new("ipv6", Flavor::OpenMpi4) else {
        return;
    };
    let lab = lab(&bench);
    let job = bench.job(&lab, PROGRAM, 2).arg("1").networks("fd00::/8");
    finish(&bench, &lab, &job, |_| ());
    assert_eq!(used(&lab), ["[fd00:77::1]", "[fd00:77::2]"]);
}

#[test]
fn an_excluded_interface_is_not_used() {
    let Some(bench) = ComponentBench::new("exclude", Flavor::OpenMpi4) else {
        return;
    };
    let lab = lab(&bench);
    let job = bench.job(&lab, PROGRAM, 2).arg("1").networks("");
    let job = job.option("--mca").option("btl_slim_if_exclude");
    let job = job.option("127.0.0.0/8,::1/128,path1");
    finish(&bench, &lab, &job, |_| ());
    assert_eq!(used(&lab), ["10.77.0.1", "10.77.0.2"]);
}

/// Listeners of the ranks on `node`, on the first path.
fn listeners(lab: &Lab, node: usize) -> Vec<SocketAddr> {
    let mut command = lab.node(node).command("ss");
    let output = command.arg("-Hltnp").output().expect("run ss");
    let text = String::from_utf8_lossy(&output.stdout);
    let of_ranks = text.lines().filter(|line| line.contains(PROGRAM));
    let words = of_ranks.filter_map(|line| line.split_whitespace().nth(3)?.parse().ok());
    let first = |addr: &SocketAddr| addr.ip() == lab.node(node).address(0);
    words.filter(first).collect()
}

/// Resident memory of the rank on `node`, in MiB.
fn memory(lab: &Lab, node: usize) -> u64 {
    let ranks = lab.node(node).processes();
    let rank = ranks.iter().find(|p| p.name == PROGRAM).expect("a rank");
    let text = fs::read_to_string(format!("/proc/{}/status", rank.pid)).expect("read a status");
    let mut words = text.lines().filter_map(|l| l.strip_prefix("VmRSS:"));
    let kib = words.next().and_then(|w| w.split_whitespace().next());
    kib.and_then(|w| w.parse::<u64>().ok()).expect("a number") >> 10
}

/// What strangers send: nothing, no frame, a part of a hello, a hello without the token, a hello of 1 GiB.
fn greetings() -> [Vec<u8>; 5] {
    let header = |len: u32| [&len.to_le_bytes()[..], &[1, 0, 0, 0]].concat();
    [
        Vec::new(),
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        [header(32), b"SLBT".to_vec()].concat(),
        [header(32), vec![0; 32]].concat(),
        header(1 << 30),
    ]
}

#[test]
fn strangers_take_no_memory_and_do_not_stop_the_job() {
    let Some(bench) = ComponentBench::new("strangers", Flavor::OpenMpi4) else {
        return;
    };
    let lab = bench.lab();
    let job = bench.job(&lab, PROGRAM, 2).arg("5");
    finish(&bench, &lab, &job, |_| {
        let before = memory(&lab, 0);
        let to = listeners(&lab, 0);
        assert!(!to.is_empty());
        let connect = || {
            let mut all = Vec::new();
            // The session has a listener of its own beside the component's.
            for (greeting, to) in greetings().iter().cycle().zip(to.iter().cycle()).take(100) {
                let mut stranger = TcpStream::connect(to).expect("connect");
                stranger.write_all(greeting).expect("send");
                all.push(stranger);
            }
            all
        };
        let strangers = lab.node(1).net().run(connect).expect("enter a node");
        thread::sleep(Duration::from_secs(2));
        let during = memory(&lab, 0);
        assert!(during < before + 64, "{before} MiB, then {during} MiB");
        let is_refused = |mut stranger: TcpStream| {
            let limit = Some(Duration::from_millis(1));
            stranger.set_read_timeout(limit).expect("set a limit");
            let end = stranger.read_to_end(&mut Vec::new());
            let is_open = end.is_err_and(|e| e.kind() == ErrorKind::WouldBlock);
            (!is_open).then_some(())
        };
        let refused = strangers.into_iter().filter_map(is_refused).count();
        // Those that sent no frame, no token, or too much.
        assert!(refused >= 60, "{refused} were refused");
    });
}
