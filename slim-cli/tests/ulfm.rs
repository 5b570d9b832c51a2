//! Jobs that go on without failed ranks (ULFM, Open MPI 5.0) under `slim run`. Lost connections cost no rank. If ranks lose each
//! other for good, the witness of the job decides, and exactly one half goes on. A killed rank is replaced.

mod common;
#[path = "ulfm/isolated.rs"]
mod isolated;
#[path = "ulfm/killed.rs"]
mod killed;
#[path = "ulfm/lab.rs"]
mod lab;

use std::collections::{BTreeMap, BTreeSet};
use std::thread;
use std::time::Duration;

use lab::{
    Carrier, Ended, More, SHORT, Shape, UlfmLab, assert_all_kept, has_finished,
    kill_all_connections, kill_connections, lines, part, refuse, runs, silence,
};
use slim_lab::mpi::Flavor;
use slim_lab::skip::skip;

/// Asserts that one rank is left and has finished its work, and that the other one was fenced.
fn assert_one_is_left(test: &UlfmLab, ended: &Ended, reason: &str) {
    let (text, events) = (&ended.text, test.events());
    assert_eq!(lines(text, "DONE ").count(), 1, "{text}");
    assert!(text.contains(" ranks=1"), "{text}");
    assert!(
        text.contains("errs=0") && !text.contains("is wrong"),
        "{text}"
    );
    // The lost rank has not gone on by itself.
    let failed: BTreeSet<_> = lines(text, "FAILED ")
        .filter_map(|line| line.split(' ').nth(1))
        .collect();
    assert_eq!(failed.len(), 1, "{text}");
    let pid = |line: &str| {
        let rest = line.split("\"pid\":").nth(1)?;
        rest.split(',').next().map(str::to_owned)
    };
    let fenced = events.lines().filter(|line| line.contains(reason));
    let fenced: BTreeSet<_> = fenced.filter_map(pid).collect();
    assert_eq!(fenced.len(), 1, "{text}\n{events}");
    assert!(events.contains("\"reason\":\"peer_lost\""), "{events}");
}

/// All connections of four ranks are killed, again and again.
fn connections_killed(test: &str, flavor: Flavor) {
    let mut bare_kept = 0;
    for run in 0..runs() {
        let Some(bench) = UlfmLab::new(test, flavor, 2) else {
            return;
        };
        for carrier in [Carrier::Bare, Carrier::Tcp] {
            let job = bench.start(Shape {
                each: 2,
                seconds: 3,
                carrier,
                ..Shape::PAIR
            });
            job.wait_working();
            let mut killed = 0;
            for _ in 0..6 {
                killed += kill_connections(bench.lab.nodes());
                thread::sleep(Duration::from_millis(250));
            }
            assert!(killed > 0, "no connection was killed");
            let ended = job.wait_for(|| carrier == Carrier::Bare && bench.log().contains("FAILED"));
            let kept = has_finished(&ended, 4) && !ended.text.contains("FAILED");
            println!("run {run}, {carrier:?}: all ranks kept: {kept}");
            match carrier {
                Carrier::Bare => bare_kept += u32::from(kept),
                _ => assert!(kept, "{}", ended.text),
            }
        }
    }
    println!("bare: all ranks kept in {bare_kept} of {} runs", runs());
}

#[test]
fn killed_connections_cost_no_rank() {
    connections_killed("killed_connections_cost_no_rank", Flavor::OpenMpi5);
}

#[test]
fn killed_connections_cost_no_rank_with_5_0_7() {
    let test = "killed_connections_cost_no_rank_with_5_0_7";
    connections_killed(test, Flavor::OpenMpi5Components);
}

fn two_ranks_parted(test: &str, flavor: Flavor, carrier: Carrier) {
    for run in 0..runs() {
        let Some(bench) = UlfmLab::new(test, flavor, 3) else {
            return;
        };
        if carrier == Carrier::Component
            && let Err(reason) = bench.mpi.component()
        {
            return skip(test, reason);
        }
        let job = bench.start(Shape {
            carrier,
            ..Shape::PAIR
        });
        job.wait_working();
        let nodes = bench.lab.nodes();
        let _parted = part(&nodes[1..2], &nodes[2..3]);
        let ended = job.wait();
        println!("run {run}: {:?}\n{}", ended.status, ended.text);
        assert_one_is_left(&bench, &ended, "\"reason\":\"fenced\"");
        assert!(ended.status.is_some(), "mpirun did not end: {}", ended.text);
        let told = ended.text.matches("slim: witness: process").count();
        assert_eq!(told, 1, "{}", ended.text);
    }
}

#[test]
fn of_two_ranks_that_cannot_reach_each_other_one_is_lost() {
    let test = "of_two_ranks_that_cannot_reach_each_other_one_is_lost";
    two_ranks_parted(test, Flavor::OpenMpi5, Carrier::Tcp);
}

#[test]
fn of_two_ranks_that_cannot_reach_each_other_one_is_lost_with_5_0_7() {
    let test = "of_two_ranks_that_cannot_reach_each_other_one_is_lost_with_5_0_7";
    two_ranks_parted(test, Flavor::OpenMpi5Components, Carrier::Tcp);
}

/// Here both ends of the lost flow are the component's, which also reports the lost rank to Open MPI.
#[test]
fn of_two_ranks_of_the_component_that_cannot_reach_each_other_one_is_lost() {
    let test = "of_two_ranks_of_the_component_that_cannot_reach_each_other_one_is_lost";
    two_ranks_parted(test, Flavor::OpenMpi5Components, Carrier::Component);
}

/// Both ranks reach the witness, so they go on through it, and nobody is lost. `heals`: the network is well again during the job.
fn relayed(test: &str, flavor: Flavor, carrier: Carrier, heals: bool) {
    for run in 0..runs() / 2 {
        let Some(bench) = UlfmLab::new(test, flavor, 3) else {
            return;
        };
        if carrier == Carrier::Component
            && let Err(reason) = bench.mpi.component()
        {
            return skip(test, reason);
        }
        let job = bench.start(Shape {
            seconds: if heals { 14 } else { 6 },
            carrier,
            relay: true,
            ..Shape::PAIR
        });
        job.wait_working();
        let nodes = bench.lab.nodes();
        let mut parted = part(&nodes[1..2], &nodes[2..3]);
        if heals {
            thread::sleep(Duration::from_secs(4));
            parted.clear();
        }
        let ended = job.wait();
        let events = bench.events();
        println!("run {run}: {:?}\n{}", ended.status, ended.text);
        assert_all_kept(&ended, 2);
        let attempts = events
            .lines()
            .filter(|line| line.contains("\"kind\":\"attempt\""));
        let mut attempts: Vec<_> = attempts.collect();
        // Of all processes, in the order of time: each line begins with it.
        attempts.sort_unstable();
        let is_relayed = |line: &&str| line.contains("\"remote\":\"relay/");
        assert!(attempts.iter().any(is_relayed), "{events}");
        // The last attempt of each process. Both ends may have begun one at the same time, and the one through the witness gives way.
        let process = |line: &str| {
            line.split("\"pid\":")
                .nth(1)?
                .split(',')
                .next()?
                .parse()
                .ok()
        };
        let last: BTreeMap<Option<u32>, &str> =
            attempts.iter().map(|line| (process(line), *line)).collect();
        let back = last.values().any(|line| !is_relayed(line));
        assert!(!heals || back, "it has not come back: {events}");
    }
}

#[test]
fn two_ranks_that_cannot_reach_each_other_go_on_through_the_witness() {
    let test = "two_ranks_that_cannot_reach_each_other_go_on_through_the_witness";
    relayed(test, Flavor::OpenMpi5, Carrier::Tcp, false);
}

#[test]
fn two_ranks_leave_the_witness_when_the_network_is_well_again() {
    let test = "two_ranks_leave_the_witness_when_the_network_is_well_again";
    relayed(test, Flavor::OpenMpi5, Carrier::Tcp, true);
}

#[test]
fn two_ranks_of_the_component_go_on_through_the_witness() {
    let test = "two_ranks_of_the_component_go_on_through_the_witness";
    relayed(test, Flavor::OpenMpi5Components, Carrier::Component, true);
}

/// To SLIM, a firewall that refuses everything looks like the host of a process that has died. But that host would have ended the connection.
#[test]
fn a_firewall_that_refuses_for_a_moment_costs_no_rank() {
    let test = "a_firewall_that_refuses_for_a_moment_costs_no_rank";
    for run in 0..runs() / 2 {
        let Some(bench) = UlfmLab::new(test, Flavor::OpenMpi5, 3) else {
            return;
        };
        let job = bench.start(Shape {
            seconds: 4,
            ..Shape::PAIR
        });
        job.wait_working();
        let nodes = bench.lab.nodes();
        let refused = refuse(&nodes[1..2], &nodes[2..3]);
        thread::sleep(Duration::from_millis(800));
        drop(refused);
        let ended = job.wait();
        println!("run {run}: {:?}\n{}", ended.status, ended.text);
        assert_all_kept(&ended, 2);
    }
}

/// A third rank reaches both of the others. It is kept, and goes on with the one that is not lost.
#[test]
fn a_rank_that_is_not_concerned_is_kept() {
    let test = "a_rank_that_is_not_concerned_is_kept";
    for run in 0..runs() {
        let Some(bench) = UlfmLab::new(test, Flavor::OpenMpi5, 4) else {
            return;
        };
        let job = bench.start(Shape {
            nodes: 3,
            seconds: 5,
            words: SHORT,
            ..Shape::PAIR
        });
        job.wait_working();
        let nodes = bench.lab.nodes();
        let _parted = part(&nodes[1..2], &nodes[2..3]);
        let ended = job.wait();
        println!("run {run}: {:?}\n{}", ended.status, ended.text);
        assert!(has_finished(&ended, 2), "{}", ended.text);
    }
}

/// The spawned rank gets no variable of `-x`, so it knows the witness from its daemon.
#[test]
fn of_a_spawned_rank_and_its_parent_that_cannot_reach_each_other_one_is_lost() {
    let test = "of_a_spawned_rank_and_its_parent_that_cannot_reach_each_other_one_is_lost";
    for run in 0..runs() {
        let Some(bench) = UlfmLab::new(test, Flavor::OpenMpi5, 3) else {
            return;
        };
        let job = bench.start(Shape {
            words: SHORT,
            more: More::Spawn,
            ..Shape::PAIR
        });
        job.wait_working();
        let nodes = bench.lab.nodes();
        let _parted = part(&nodes[1..2], &nodes[2..3]);
        let ended = job.wait();
        println!("run {run}: {:?}\n{}", ended.status, ended.text);
        // `mpirun` tells of the lost rank by its status: it belongs to another job than that of the others.
        assert!(ended.status.is_some(), "mpirun did not end: {}", ended.text);
        assert_one_is_left(&bench, &ended, "\"reason\":\"fenced\"");
    }
}

/// The daemon of a rank's host and `mpirun` do not reach each other for 15 s. Without SLIM, the loss of a daemon ends the job.
#[test]
fn a_daemon_that_is_cut_off_for_15_s_costs_nothing() {
    let test = "a_daemon_that_is_cut_off_for_15_s_costs_nothing";
    for run in 0..runs() / 2 {
        let Some(bench) = UlfmLab::new(test, Flavor::OpenMpi5, 3) else {
            return;
        };
        let job = bench.start(Shape {
            seconds: 20,
            words: SHORT,
            relay: true,
            ..Shape::PAIR
        });
        job.wait_working();
        let nodes = bench.lab.nodes();
        let cut = silence(&nodes[..1], &nodes[2..3]);
        let killed = kill_all_connections(&nodes[0]);
        assert!(killed > 0, "the daemons have no connections");
        thread::sleep(Duration::from_secs(15));
        drop(cut);
        let ended = job.wait();
        println!(
            "run {run}: {killed} killed, {:?}\n{}",
            ended.status, ended.text
        );
        assert_all_kept(&ended, 2);
    }
}

/// The half with the witness goes on. The other half reaches nobody, and ends itself. `mpirun` itself does not end: it waits for its daemon
/// in the other half, as without SLIM.
#[test]
fn of_two_halves_that_are_parted_the_one_with_the_witness_goes_on() {
    let test = "of_two_halves_that_are_parted_the_one_with_the_witness_goes_on";
    for run in 0..runs() / 2 {
        let Some(bench) = UlfmLab::new(test, Flavor::OpenMpi5, 2) else {
            return;
        };
        let job = bench.start(Shape::PAIR);
        job.wait_working();
        let nodes = bench.lab.nodes();
        let _parted = part(&nodes[..1], &nodes[1..]);
        let reason = "\"reason\":\"no_witness\"";
        let ended =
            job.wait_for(|| bench.log().contains("DONE ") && bench.events().contains(reason));
        println!("run {run}:\n{}", ended.text);
        assert_one_is_left(&bench, &ended, reason);
    }
}
