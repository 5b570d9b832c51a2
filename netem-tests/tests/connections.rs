//! Programs without MPI that know nothing of SLIM: many connections at once, a peer without SLIM, a peer that dies, a host
//! that is gone.

mod common;

use std::{
    thread,
    time::{Duration, Instant},
};

use common::{
    lab,
    streams::{End, Pair, Streams},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use slim_lab::{
    Lab, SeededRng, artifacts,
    faults::{
        destroy::{self, Amount, Selector},
        inject::{self, Segment},
        nft,
    },
};

fn kill_all(lab: &Lab, node: usize) -> usize {
    let pick = Selector::between_hosts();
    let report = destroy::destroy(
        lab.node(node).net(),
        &pick,
        Amount::All,
        &mut SeededRng::new(1),
    );
    report.expect("destroy connections").connections.len()
}

#[test]
fn a_thousand_connections_killed_at_once_all_resume() {
    let Some(lab) = lab("thousand", 2, 1) else {
        return;
    };
    let streams = Streams::bare(1000, 8.0, 64).slim();
    let pair = streams.start(&lab);
    thread::sleep(Duration::from_secs(2));
    assert_eq!(kill_all(&lab, 0), 1000);
    thread::sleep(Duration::from_secs(3));
    let again = kill_all(&lab, 1);
    let (server, client) = pair.wait(Duration::from_secs(60));
    println!(
        "1000 and {again} connections killed; {}",
        client.lines.last().unwrap()
    );
    server.assert_whole("server", &streams);
    client.assert_whole("client", &streams);
    assert!(again >= 1000, "only {again} of 1000 were back after 3 s");
}

#[test]
fn without_slim_the_same_kill_ends_them_all() {
    let Some(lab) = lab("thousand-bare", 2, 1) else {
        return;
    };
    let pair = Streams::bare(1000, 4.0, 16).start(&lab);
    thread::sleep(Duration::from_secs(1));
    assert_eq!(kill_all(&lab, 0), 1000);
    let (server, client) = pair.wait(Duration::from_secs(20));
    assert_eq!(
        (server.number("failed"), client.number("failed")),
        (Some(1000), Some(1000))
    );
}

/// The errors that a program reported, each once: `connection 3: OpenConnection reset by peer (os error 104)`.
fn errors(end: &End) -> Vec<String> {
    let text = |line: &String| {
        Some(
            line.strip_prefix("connection ")?
                .split_once(": ")?
                .1
                .to_owned(),
        )
    };
    let mut found: Vec<_> = end.lines.iter().filter_map(text).collect();
    // The position in the stream differs from run to run.
    found
        .iter_mut()
        .for_each(|e| e.truncate(e.find(" at ").unwrap_or(e.len())));
    found.sort();
    found.dedup();
    found
}

/// Waits until a program reports an error. Returns the time from `start` to the error.
fn error_after(
    program: &slim_lab::output::Running,
    start: Instant,
    limit: Duration,
) -> Option<Duration> {
    program
        .wait_line(limit, |line| line.starts_with("connection "))
        .then(|| start.elapsed())
}

fn variants() -> [(&'static str, [bool; 2]); 4] {
    [
        ("bare", [false, false]),
        ("server only", [true, false]),
        ("client only", [false, true]),
        ("both", [true, true]),
    ]
}

fn with_preload(mut streams: Streams, at: [bool; 2]) -> Streams {
    streams.preload = at.map(|yes| yes.then(|| artifacts::preload().expect("the preload library")));
    streams
}

#[test]
fn a_peer_without_slim_notices_nothing() {
    let Some(lab) = lab("one-sided", 2, 1) else {
        return;
    };
    let mut medians = Vec::new();
    for (name, at) in variants() {
        let streams = with_preload(Streams::bare(200, 2.0, 256), at);
        let (server, client) = streams.start(&lab).wait(Duration::from_secs(30));
        server.assert_whole(name, &streams);
        client.assert_whole(name, &streams);
        let connected = client
            .lines
            .iter()
            .find_map(|l| l.strip_prefix("CONNECTED median_us="));
        let median: u64 = connected
            .unwrap()
            .split(' ')
            .next()
            .unwrap()
            .parse()
            .unwrap();
        println!("{name}: connect takes {median} us (median)");
        medians.push((name, median));
    }
    // A connect that waited for an answer from a peer without SLIM would take milliseconds.
    let bare = medians[0].1;
    for (name, median) in &medians[1..] {
        assert!(
            *median <= bare + 2_000,
            "{name}: {median} us, bare {bare} us"
        );
    }
}

#[test]
fn with_slim_on_one_side_errors_are_as_without() {
    let Some(lab) = lab("one-sided-errors", 2, 1) else {
        return;
    };
    let mut seen = Vec::new();
    for (name, at) in variants().into_iter().take(3) {
        let streams = with_preload(Streams::bare(20, 6.0, 64), at).env("SLIM_HELLO_TIMEOUT", "0.5");
        let Pair { server, client } = streams.start(&lab);
        thread::sleep(Duration::from_secs(1));
        assert_eq!(kill_all(&lab, 0), 20);
        let start = Instant::now();
        let took = error_after(&server, start, Duration::from_secs(5));
        let (server, client) = Pair { server, client }.wait(Duration::from_secs(15));
        println!(
            "{name}: server {:?}, client {:?}, after {took:?}",
            errors(&server),
            errors(&client)
        );
        seen.push((errors(&server), errors(&client)));
        assert!(
            took.is_some_and(|t| t < Duration::from_secs(1)),
            "{name}: {took:?}"
        );
    }
    assert_eq!(seen[0], seen[1], "SLIM at the server changes an error");
    assert_eq!(seen[0], seen[2], "SLIM at the client changes an error");
}

#[test]
fn a_killed_peer_is_noticed_at_once_and_with_the_same_error() {
    let Some(lab) = lab("killed-peer", 2, 1) else {
        return;
    };
    let mut seen = Vec::new();
    for (name, streams) in [
        ("bare", Streams::bare(10, 8.0, 64)),
        ("under SLIM", Streams::bare(10, 8.0, 64).slim()),
    ] {
        let mut pair = streams.start(&lab);
        thread::sleep(Duration::from_millis(1500));
        kill(Pid::from_raw(pair.server.id() as i32), Signal::SIGKILL).expect("kill the server");
        let start = Instant::now();
        let took = error_after(&pair.client, start, Duration::from_secs(30));
        let client = common::streams::end(&mut pair.client, Duration::from_secs(30));
        println!("{name}: {:?} after {took:?}", errors(&client));
        let failed = client.number("failed");
        seen.push((took.expect("the death is noticed"), errors(&client), failed));
    }
    let (bare, slim) = (&seen[0], &seen[1]);
    assert!(
        slim.0 <= bare.0 + Duration::from_millis(500),
        "{:?}, bare {:?}",
        slim.0,
        bare.0
    );
    // Which of the two errors a connection gets is a race between the peer's FIN and RST.
    let usual = |error: &String| {
        bare.1.contains(error) || error.contains("reset") || error.contains("ended")
    };
    assert!(slim.1.iter().all(usual), "{:?}, bare {:?}", slim.1, bare.1);
    assert_eq!(slim.2, Some(10));
}

#[test]
fn a_host_gone_for_good_is_given_up_within_the_deadline() {
    let Some(lab) = lab("host-gone", 2, 1) else {
        return;
    };
    let streams = Streams::bare(20, 60.0, 1024)
        .slim()
        .env("SLIM_ATTEMPT_TIMEOUTS", "0.5,1,1.5");
    let mut pair = streams.start(&lab);
    thread::sleep(Duration::from_millis(1500));
    let reset = nft::Rule::reset()
        .apply_to(lab.nodes())
        .expect("lay the rule");
    thread::sleep(Duration::from_millis(300));
    let _silence = nft::Rule::drop()
        .apply_to(lab.nodes())
        .expect("lay the rule");
    drop(reset);
    let start = Instant::now();
    let ends = [&mut pair.server, &mut pair.client].map(|program| {
        let took = error_after(program, start, Duration::from_secs(30));
        (took, common::streams::end(program, Duration::from_secs(30)))
    });
    for (name, (took, end)) in ["server", "client"].into_iter().zip(ends) {
        println!("{name}: {:?} after {took:?}", errors(&end));
        assert_eq!(end.number("failed"), Some(20), "{name}: nothing hangs");
        let errors = errors(&end);
        assert!(
            errors.iter().all(|e| e.contains("os error 104")),
            "{name}: the reset's errno: {errors:?}"
        );
        // The three attempts may take 3 s together, and a second more to notice the loss.
        let took = took.expect("it is given up");
        assert!(
            took > Duration::from_secs(2),
            "{name}: after {took:?}, before the attempts were made"
        );
        assert!(took < Duration::from_secs(5), "{name}: after {took:?}");
    }
}

/// Silence is no error. No flow is escalated while bare TCP would still wait, and when packets pass again all data arrives.
#[test]
fn a_stall_is_never_given_up() {
    let Some(lab) = lab("stall", 2, 1) else {
        return;
    };
    let streams = Streams::bare(20, 4.0, 256)
        .slim()
        .env("SLIM_ATTEMPT_TIMEOUTS", "0.3,0.3,0.4");
    let pair = streams.start(&lab);
    thread::sleep(Duration::from_millis(1500));
    let silence = nft::Rule::drop()
        .apply_to(lab.nodes())
        .expect("lay the rule");
    // Much longer than all attempts together.
    thread::sleep(Duration::from_secs(6));
    silence.lift().expect("lift the rule");
    let (server, client) = pair.wait(Duration::from_secs(60));
    server.assert_whole("server", &streams);
    client.assert_whole("client", &streams);
}

/// A forged FIN takes the sequence number of a byte that is in flight. The victim acknowledges the FIN, and its peer takes
/// that for an acknowledgement of the byte.
#[test]
fn a_forged_fin_in_place_of_a_byte_on_its_way_loses_nothing() {
    let Some(lab) = lab("fin-for-byte", 2, 1) else {
        return;
    };
    let streams = Streams::bare(1, 4.0, 4096).slim();
    let pair = streams.start(&lab);
    thread::sleep(Duration::from_secs(1));
    let (client, server) = (lab.node(0), lab.node(1));
    // The rule drops the client's data, and SYN-ACKs, so that a resume must wait. Pure acknowledgements and a FIN pass.
    let stuck = nft::Rule::drop().longer_than(56).apply([server.net()]);
    let stuck = stuck.expect("lay the rule");
    thread::sleep(Duration::from_millis(200));
    let victim = destroy::list(server.net(), &Selector::between_hosts()).expect("list connections");
    let limit = Duration::from_secs(5);
    let report = inject::inject(Segment::Fin, server, client, 0, &victim[0], limit);
    let report = report.expect("inject a FIN");
    println!("{report}");
    assert!(report.accepted, "{report}");
    // Until the client trims its replay buffer: its agent sweeps once a second.
    thread::sleep(Duration::from_millis(1500));
    stuck.lift().expect("lift the rule");
    let (server, client) = pair.wait(Duration::from_secs(60));
    server.assert_whole("server", &streams);
    client.assert_whole("client", &streams);
}
