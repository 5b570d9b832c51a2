//! `slim chaos` with faults of adapters, on this process, a flow of which is on queue pairs of soft RoCE. Every byte must be right, and nothing is left behind.

use std::{
    fs,
    path::PathBuf,
    process::{Command, Output, Stdio},
    thread,
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use slim_lab::{
    Netns, artifacts,
    faults::{adapter, roce},
    skip::skip,
};
use slim_verbs::VerbsPort;

use super::{
    common::rxe::{DEVICES, Rxe, shell},
    rxe,
    traffic::while_streaming,
    two_sessions::{LIMIT, TwoSessions, by_pair, of_port, wait_for},
    wait,
};

const SOON: Duration = Duration::from_secs(30);

/// The program, if it is built, and the adapters.
fn made(test: &str) -> Option<(PathBuf, Rxe)> {
    let slim = match artifacts::program("slim") {
        Ok(slim) => slim,
        Err(missing) => {
            skip(test, missing);
            return None;
        }
    };
    Some((slim, rxe(test)?))
}

/// The command that makes the faults of a plan on a process.
fn chaos(slim: &PathBuf, plan: &str, pid: u32) -> Command {
    let file = "/run/tmp/plan.toml";
    fs::write(file, plan).unwrap();
    let mut command = Command::new(slim);
    command.args(["chaos", file, "--json", "--pid", &pid.to_string()]);
    command
}

fn said(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    format!("{}: {out}{err}", output.status)
}

/// The rows of the report. No fault has failed.
fn faults(output: &Output) -> Vec<serde_json::Value> {
    assert!(output.status.success(), "{}", said(output));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = report["faults"].as_array().unwrap().clone();
    for row in &rows {
        println!("{} {}", row["kind"], row["detail"]);
        assert!(row["failed"] == false && row["effect"] == true, "{row}");
    }
    rows
}

/// What faults of the line change.
fn line() -> String {
    let all = [
        "tc qdisc show",
        "ip -br link show",
        "ip route show table all",
        "ip neigh show nud permanent",
    ];
    let of = |words: &str| {
        let output = Command::new("sh").args(["-c", words]).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        // The kernel's own ones of IPv6 come and go.
        let lines = text
            .lines()
            .filter(|line| !line.contains("fe80") && !line.contains("ff00::"));
        let mut lines: Vec<_> = lines.map(str::to_owned).collect();
        lines.sort();
        lines.join("\n")
    };
    all.map(of).join("\n")
}

fn adapters() -> Vec<String> {
    let all = adapter::ports(&Netns::current().unwrap()).unwrap();
    all.into_iter().map(|port| port.device).collect()
}

const BREAK: &str = "[[fault]]\nkind = \"pair-error\"\nadapter = \"rx1\"\n";
const PLANS: [&str; 6] = [
    BREAK,
    BREAK,
    "[[fault]]\nkind = \"port-down\"\nadapter = \"rx2\"\nlasts = 0.7\n",
    "[[fault]]\nkind = \"netem\"\nadapter = \"rx1\"\nlasts = 2\nnetem = { loss = \"3%\", delay = \"1ms\" }\n",
    BREAK,
    "[[fault]]\nkind = \"netem\"\nadapter = \"rx2\"\nlasts = 1\nnetem = { loss = \"100%\" }\n",
];

/// Both ends of the flow are on queue pairs: there is something to break.
fn wait_for_pairs() {
    let net = Netns::current().unwrap();
    wait("on queue pairs", SOON, || {
        (roce::working_pairs(&net).unwrap().len() == 2).then_some(())
    });
}

/// While the flow carries bytes both ways, and once while it is silent.
#[test]
fn a_flow_survives_faults_of_adapters() {
    let test = "chaos::a_flow_survives_faults_of_adapters";
    let Some((slim, rxe)) = made(test) else {
        return;
    };
    let own = std::process::id();
    let two = TwoSessions::open(
        rxe.open()
            .map(|adapter| of_port(VerbsPort::new(adapter).unwrap())),
    );
    let before = line();
    for plan in PLANS {
        while_streaming_again(&two, || {
            wait_for_pairs();
            let output = chaos(&slim, plan, own).output().unwrap();
            assert_eq!(faults(&output).len(), 1);
            assert_eq!(line(), before, "{plan}");
        });
    }
    let (near, far) = two.pair();
    wait_for_pairs();
    let resumes = near.stats().resumes;
    let silent = "[[fault]]\nkind = \"pair-error\"\nadapter = \"rx2\"\nhit = \"all\"\n";
    let rows = faults(&chaos(&slim, silent, own).output().unwrap());
    assert_eq!(rows[0]["hit"], 1);
    near.send_all(b"?", LIMIT).unwrap();
    far.recv_exact(&mut [0], LIMIT).unwrap();
    far.send_all(b"!", LIMIT).unwrap();
    near.recv_exact(&mut [0], LIMIT).unwrap();
    assert!(near.stats().resumes > resumes);
    wait_for(&near, &far, true);
}

/// The kernel deletes an adapter when nobody has it open. Until then flows go on.
#[test]
fn an_adapter_is_gone_for_a_time() {
    let test = "chaos::an_adapter_is_gone_for_a_time";
    let Some((slim, rxe)) = made(test) else {
        return;
    };
    let plan = "[[fault]]\nkind = \"adapter-gone\"\nadapter = \"rx1\"\nstart = 0\nlasts = 1\n";
    let mut other = Command::new("sleep").arg("60").spawn().unwrap();
    let running = chaos(&slim, plan, other.id())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    wait("gone", SOON, || (adapters() == DEVICES[1..]).then_some(()));
    let output = running.wait_with_output().unwrap();
    let text = said(&output);
    assert!(
        output.status.success() && text.contains("rx1 deleted"),
        "{text}"
    );
    wait("back", SOON, || (adapters().len() == 2).then_some(()));
    other.kill().unwrap();
    other.wait().unwrap();

    rxe.wait_for_addresses();
    let two = TwoSessions::open(
        rxe.open()
            .map(|adapter| of_port(VerbsPort::new(adapter).unwrap())),
    );
    while_streaming_again(&two, || {
        let output = chaos(&slim, plan, std::process::id()).output().unwrap();
        let rows = faults(&output);
        let detail = rows[0]["detail"].as_str().unwrap();
        assert!(detail.contains("in use still"), "{detail}");
        assert_eq!(adapters(), DEVICES[1..]);
    });
    drop(two);
    wait("back", SOON, || (adapters().len() == 2).then_some(()));
}

/// Runs `f` while a new flow carries bytes. In the end it is on queue pairs.
fn while_streaming_again(two: &TwoSessions, f: impl FnOnce()) {
    let (near, far) = two.pair();
    while_streaming([&near, &far], || {
        f();
        wait("on queue pairs", 2 * SOON, || {
            thread::sleep(Duration::from_millis(5));
            ([&near, &far].map(by_pair) == [Some(true); 2]).then_some(())
        });
    });
}

/// A port goes up, and an adapter comes back, also if `slim` is killed.
#[test]
fn a_killed_slim_leaves_no_fault_of_adapters() {
    let test = "chaos::a_killed_slim_leaves_no_fault_of_adapters";
    let Some((slim, _rxe)) = made(test) else {
        return;
    };
    let before = line();
    let plan = "[[fault]]\nkind = \"port-down\"\nadapter = \"rx1\"\nstart = 0\nlasts = 60\n\
                [[fault]]\nkind = \"adapter-gone\"\nadapter = \"rx2\"\nstart = 0\nlasts = 60\n\
                [[fault]]\nkind = \"netem\"\nadapter = \"rx1\"\nstart = 0\nlasts = 60\nnetem = { loss = \"1%\" }\n";
    for signal in [Signal::SIGINT, Signal::SIGKILL] {
        let mut running = chaos(&slim, plan, std::process::id())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        wait("the faults", SOON, || {
            let all = line().contains("loss 1%") && line() != before;
            (all && adapters() == DEVICES[..1]).then_some(())
        });
        kill(Pid::from_raw(running.id().cast_signed()), signal).unwrap();
        running.wait().unwrap();
        wait("the end of the faults", SOON, || {
            (line() == before && adapters().len() == 2).then_some(())
        });
    }
}

/// One clear line, and nothing is made.
#[test]
fn plans_that_no_adapter_can_carry_out_are_refused() {
    let test = "chaos::plans_that_no_adapter_can_carry_out_are_refused";
    let Some((slim, _rxe)) = made(test) else {
        return;
    };
    shell("rdma link add sw1 type siw netdev v1; tc qdisc add dev v2 root pfifo limit 100");
    for (kind, adapter, why) in [
        ("pair-error", "rx9", "no adapter rx9 (rx1, rx2, sw1)"),
        ("adapter-gone", "sw1", "sw1 is not a soft adapter of RoCE"),
        (
            "netem\"\nnetem = { loss = \"1%\" }\nnode = \"any",
            "rx2",
            "v2 has a queueing discipline of its own",
        ),
    ] {
        let plan = format!("[[fault]]\nkind = \"{kind}\"\nadapter = \"{adapter}\"\n");
        let output = chaos(&slim, &plan, std::process::id()).output().unwrap();
        let text = said(&output);
        assert!(
            output.status.code() == Some(2) && text.contains(why),
            "{text}"
        );
        assert_eq!(text.trim().lines().count(), 1, "{text}");
    }
    let mut lab = Command::new(&slim);
    fs::write("/run/tmp/lab.toml", BREAK).unwrap();
    let output = lab
        .args(["chaos", "/run/tmp/lab.toml", "--", "true"])
        .output();
    let text = said(&output.unwrap());
    assert!(text.contains("a lab has no adapter"), "{text}");
}

/// What a port had before is there afterwards: addresses and routes of IPv6.
#[test]
fn a_port_that_was_down_has_its_addresses_of_ipv6() {
    let test = "chaos::a_port_that_was_down_has_its_addresses_of_ipv6";
    let Some((slim, _rxe)) = made(test) else {
        return;
    };
    shell("ip -6 addr add fd00::1/64 dev v1 nodad; ip -6 route add fd01::/64 dev v1");
    let all = || {
        let words =
            "ip -6 addr show dev v1 scope global | grep inet6; ip -6 route show dev v1 | grep fd";
        let output = Command::new("sh").args(["-c", words]).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let before = all();
    assert!(
        before.contains("fd00::1") && before.contains("fd01::"),
        "{before}"
    );
    let plan = "[[fault]]\nkind = \"port-down\"\nadapter = \"rx1\"\nstart = 0\nlasts = 0.3\n";
    let output = chaos(&slim, plan, std::process::id()).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(all(), before);
}

/// Whether somebody has set the first interface up.
fn is_up() -> bool {
    let flags = fs::read_to_string("/sys/class/net/v1/flags").unwrap();
    u32::from_str_radix(flags.trim().trim_start_matches("0x"), 16).unwrap() & 1 == 1
}

/// A port that is down already is not brought up.
#[test]
fn a_port_that_is_down_stays_down() {
    let test = "chaos::a_port_that_is_down_stays_down";
    let Some((slim, _rxe)) = made(test) else {
        return;
    };
    shell("ip link set v1 down");
    let plan = "[[fault]]\nkind = \"port-down\"\nadapter = \"rx1\"\nstart = 0\nlasts = 0.3\n";
    let text = said(&chaos(&slim, plan, std::process::id()).output().unwrap());
    assert!(text.contains("down already"), "{text}");
    assert!(!is_up(), "{text}");
}

/// `slim` is killed as soon as the interface is down.
#[test]
fn a_port_goes_up_however_early_slim_is_killed() {
    let test = "chaos::a_port_goes_up_however_early_slim_is_killed";
    let Some((slim, _rxe)) = made(test) else {
        return;
    };
    let plan = "[[fault]]\nkind = \"port-down\"\nadapter = \"rx1\"\nstart = 0\nlasts = 60\n";
    for _ in 0..8 {
        let mut running = chaos(&slim, plan, std::process::id())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        wait("down", SOON, || (!is_up()).then_some(()));
        running.kill().unwrap();
        running.wait().unwrap();
        wait("up", SOON, || is_up().then_some(()));
    }
}

/// An adapter that is deleted already, and in use still, is named so.
#[test]
fn an_adapter_in_use_is_deleted_again() {
    let test = "chaos::an_adapter_in_use_is_deleted_again";
    let Some((slim, rxe)) = made(test) else {
        return;
    };
    let held = rxe.open();
    let plan = "[[fault]]\nkind = \"adapter-gone\"\nadapter = \"rx1\"\nstart = 0\nevery = 1\ntimes = 2\nlasts = 0.2\n";
    let text = said(&chaos(&slim, plan, std::process::id()).output().unwrap());
    assert!(text.contains("in use still"), "{text}");
    assert!(!text.contains("not a soft adapter"), "{text}");
    drop(held);
    wait("back", SOON, || (adapters().len() == 2).then_some(()));
}
