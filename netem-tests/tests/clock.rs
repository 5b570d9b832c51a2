//! The host's clock is set forwards and backwards while connections are resumed. Runs in a guest, whose clock is its own.

mod common;

use std::{
    process::Command,
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use common::{events::Events, guest::only_there, lab, streams::Streams};
use slim_lab::{
    SeededRng,
    faults::destroy::{self, Amount, Selector},
};

/// Changes of the clock, in seconds.
const STEPS: [i64; 4] = [3600, -7200, 86_400, -1];

/// Sets the guest's clock.
fn step(seconds: i64) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let then = now.as_secs().cast_signed() + seconds;
    let set = Command::new("date")
        .args(["-s", &format!("@{then}")])
        .output();
    assert!(set.unwrap().status.success());
    let new = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    assert!((new.as_secs().cast_signed() - then).abs() < 5);
}

#[test]
fn steps_of_the_clock_do_no_harm() {
    let test = "steps_of_the_clock_do_no_harm";
    if !only_there(test) {
        return;
    }
    let lab = lab(test, 2, 1).expect("root has been checked");
    let streams = Streams::bare(2, 5.0, 256).slim();
    let pair = streams.start(&lab);
    thread::sleep(Duration::from_millis(500));
    for (n, seconds) in STEPS.into_iter().enumerate() {
        let kill = || {
            let pick = Selector::between_hosts();
            let net = lab.node(n % 2).net();
            let report = destroy::destroy(net, &pick, Amount::All, &mut SeededRng::new(1));
            assert!(!report.unwrap().connections.is_empty());
        };
        // Before the step and after it.
        kill();
        step(seconds);
        thread::sleep(Duration::from_millis(400));
        kill();
        thread::sleep(Duration::from_millis(400));
    }
    let (server, client) = pair.wait(Duration::from_secs(60));
    server.assert_whole("server", &streams);
    client.assert_whole("client", &streams);
    let events = Events::read(&lab);
    println!("{} steps; {events}", STEPS.len());
    assert_eq!(events.count("escalate"), 0, "{events}");
    assert!(events.count("resume") >= 2 * STEPS.len(), "{events}");
}
