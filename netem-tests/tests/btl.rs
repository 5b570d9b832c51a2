//! Open MPI jobs whose ranks talk by the native component (`mca_btl_slim.so`), without the preload library: all data is right, whatever
//! happens to their connections.

mod common;

use std::{
    fs,
    time::{Duration, Instant},
};

use common::{
    component::{ComponentBench, KINDS, assert_used, judge},
    jobs::{PROGRAM, Slim, assert_finished, given_up},
    kills::{Killed, Kills, Tally},
    launcher::{LauncherHangs, with_poll},
    soak,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use slim_lab::{
    Lab, SeededRng,
    faults::{
        destroy::{self, Amount, Selector},
        nft,
    },
    mpi::{Flavor, JobVerdict, Outcome},
};

use Flavor::{OpenMpi4, OpenMpi5Components};

const LIMIT: Duration = Duration::from_secs(90);

fn undisturbed(flavor: Flavor, test: &str, program: &str, ranks: usize, args: &[&str]) {
    let Some(bench) = ComponentBench::new(test, flavor) else {
        return;
    };
    let lab = bench.lab();
    let mut job = bench.job(&lab, program, ranks);
    for arg in args {
        job = job.arg(*arg);
    }
    let what = || format!("{ranks} ranks, no fault");
    let outcome = bench.bench.run(&lab, &job, LIMIT, |_| what());
    assert_undisturbed(test, &lab, &outcome, ranks);
}

fn assert_undisturbed(test: &str, lab: &Lab, outcome: &Outcome, ranks: usize) {
    assert_finished(test, lab, outcome);
    assert_used(lab, ranks);
    assert_eq!(given_up(lab, outcome), Ok(()));
}

#[test]
fn two_ranks_use_the_component() {
    undisturbed(OpenMpi4, "two", PROGRAM, 2, &["2"]);
}

#[test]
fn four_ranks_use_the_component() {
    undisturbed(OpenMpi4, "four", PROGRAM, 4, &["2"]);
}

#[test]
fn messages_of_all_sizes_and_strided_types_arrive() {
    undisturbed(OpenMpi4, "sizes", KINDS, 2, &["sizes", "2"]);
    undisturbed(OpenMpi4, "sizes", KINDS, 4, &["sizes", "2"]);
}

#[test]
fn several_threads_use_the_component_at_the_same_time() {
    undisturbed(OpenMpi4, "threads", KINDS, 2, &["threads", "2"]);
}

/// Messages that share system calls leave although the sender makes no progress.
#[test]
fn messages_of_a_sender_that_computes_are_not_held_back() {
    undisturbed(OpenMpi4, "compute", KINDS, 2, &["compute", "2"]);
}

#[test]
fn spawned_processes_are_reached() {
    let Some(bench) = ComponentBench::new("spawn", OpenMpi4) else {
        return;
    };
    let (lab, outcome, ()) = LauncherHangs::default().replace(KINDS, || {
        let lab = bench.lab();
        let job = with_poll(bench.job(&lab, KINDS, 2));
        let job = job.arg("spawn").arg("2");
        let what = || "2 ranks that spawn, no fault".into();
        let outcome = bench.bench.run(&lab, &job, LIMIT, |_| what());
        drop(job);
        (lab, outcome, ())
    });
    assert_undisturbed("spawn", &lab, &outcome, 2);
}

#[test]
fn ompi_info_documents_the_parameters() {
    let Some(bench) = ComponentBench::new("info", OpenMpi4) else {
        return;
    };
    let lab = bench.lab();
    let info = bench.bench.mpi.mpirun().with_file_name("ompi_info");
    let mut command = lab.node(0).command(info);
    let path = slim_lab::mpi::component_path(&bench.bench.mpi, &bench.dir);
    command.env("OMPI_MCA_mca_base_component_path", path);
    command.args(["--param", "btl", "slim", "--level", "9", "--parsable"]);
    let output = command.output().expect("run ompi_info");
    let text = String::from_utf8_lossy(&output.stdout);
    for name in [
        "if_include",
        "if_exclude",
        "transports",
        "verbs_ports",
        "verbs_get_size",
        "verbs_keep_memory",
        "verbose",
        "eager_limit",
        "rndv_eager_limit",
        "max_send_size",
    ] {
        let line = format!("mca:btl:slim:param:btl_slim_{name}:help:");
        let help = text.lines().find_map(|l| l.strip_prefix(&line));
        assert!(help.is_some_and(|help| help.len() > 20), "{name}: {text}");
    }
}

/// Kills connections of the ranks while the job works; all runs must finish with all data right.
fn survives(
    flavor: Flavor,
    test: &str,
    program: &str,
    ranks: usize,
    kind: Option<&str>,
    kills: &Kills,
) {
    let Some(bench) = ComponentBench::shared(test, flavor) else {
        return;
    };
    let mut tally = Tally::new(&bench.bench.test);
    for run in 0..if soak() { 50 } else { 1 } {
        let seed = SeededRng::seed_from_env() + run;
        let lab = bench.lab();
        let go_on = lab.dir().join("go-on");
        fs::write(&go_on, "").expect("write a file");
        let mut job = bench.job(&lab, program, ranks);
        if let Some(kind) = kind {
            job = job.arg(kind);
        }
        let job = job.arg("2").arg(&go_on);
        let mut killed = Killed::default();
        let outcome = bench.bench.run(&lab, &job, LIMIT, |job| {
            killed = kills.while_working(&lab, job, &go_on, seed);
            format!("SLIM_LAB_SEED={seed}, {killed}")
        });
        let result = judge(&lab, &outcome, killed, kills);
        tally.add(lab, &outcome, killed, result);
    }
    tally.assert_all_right();
}

fn kills_of(program: &str) -> Kills {
    Kills {
        pick: Selector::between_hosts().process(program),
        times: 10,
        ..Kills::one_by_one()
    }
}

#[test]
fn two_ranks_survive_kills() {
    survives(OpenMpi4, "two-kills", PROGRAM, 2, None, &kills_of(PROGRAM));
}

#[test]
fn four_ranks_survive_kills_of_all_connections_at_once() {
    let kills = Kills {
        amount: Amount::All,
        ..kills_of(PROGRAM)
    };
    survives(OpenMpi4, "four-kills", PROGRAM, 4, None, &kills);
}

#[test]
fn two_ranks_survive_kills_while_resuming() {
    let kills = Kills {
        amount: Amount::All,
        again: 4,
        times: 30,
        ..kills_of(PROGRAM)
    };
    survives(OpenMpi4, "kills-again", PROGRAM, 2, None, &kills);
}

#[test]
fn all_sizes_survive_kills() {
    let kills = kills_of(KINDS);
    survives(OpenMpi4, "sizes-kills", KINDS, 2, Some("sizes"), &kills);
}

#[test]
fn threads_survive_kills() {
    let kills = kills_of(KINDS);
    survives(OpenMpi4, "threads-kills", KINDS, 2, Some("threads"), &kills);
}

/// The counterpart: without sessions the component's connections are plain TCP, and a job does not survive.
fn without_sessions(flavor: Flavor) {
    let Some(bench) = ComponentBench::new("off", flavor) else {
        return;
    };
    let lab = bench.lab();
    let job = bench.job(&lab, PROGRAM, 2).arg("6").env("SLIM", "off");
    let outcome = bench.bench.run(&lab, &job, Duration::from_secs(8), |job| {
        let killed = kills_of(PROGRAM).carry_out(&lab, job, &mut SeededRng::new(1));
        format!("SLIM=off, {killed}")
    });
    let verdict = outcome.verdict();
    assert!(matches!(verdict, JobVerdict::Failed(_)), "{verdict}");
}

#[test]
fn without_sessions_a_job_does_not_finish() {
    without_sessions(OpenMpi4);
}

/// How long mpirun goes on after one of two ranks was killed.
fn after_a_killed_rank(bench: &ComponentBench, slim: bool) -> Duration {
    let lab = bench.lab();
    let job = match slim {
        true => bench.job(&lab, PROGRAM, 2).arg("60"),
        false => bench.bench.job(&lab, Slim::Bare, 2, 60),
    };
    let mut took = Duration::MAX;
    let outcome = bench.bench.run(&lab, &job, Duration::from_secs(20), |job| {
        let ranks = lab.node(1).processes();
        let rank = ranks.iter().find(|p| p.name == PROGRAM).expect("a rank");
        kill(Pid::from_raw(rank.pid as i32), Signal::SIGKILL).expect("kill a rank");
        let start = Instant::now();
        job.running().wait(Duration::from_secs(20));
        took = start.elapsed();
        format!(
            "rank killed, mpirun ended {:.2} s later",
            took.as_secs_f64()
        )
    });
    let verdict = outcome.verdict();
    assert!(matches!(verdict, JobVerdict::Failed(_)), "{verdict}");
    took
}

/// The best of three: the machine may be busy with something else.
#[test]
fn a_killed_rank_ends_the_job_as_soon_as_with_tcp() {
    let Some(bench) = ComponentBench::new("killed-rank", OpenMpi4) else {
        return;
    };
    let best = |slim| (0..3).map(|_| after_a_killed_rank(&bench, slim)).min();
    let (tcp, slim) = (best(false).unwrap(), best(true).unwrap());
    assert!(
        slim <= tcp + Duration::from_secs(1),
        "{slim:?}, tcp {tcp:?}"
    );
}

/// A connection that cannot be replaced: no new one is let through.
fn lost_peer(flavor: Flavor) {
    let Some(bench) = ComponentBench::shared("lost", flavor) else {
        return;
    };
    let lab = bench.lab();
    let job = bench.job(&lab, PROGRAM, 2).arg("60");
    let job = job.env("SLIM_ATTEMPT_TIMEOUTS", "0.5,0.5");
    let mut guards = Vec::new();
    let outcome = bench.bench.run(&lab, &job, Duration::from_secs(20), |_| {
        guards.push(
            nft::Rule::guard()
                .apply_to(lab.nodes())
                .expect("a firewall"),
        );
        let (pick, rng) = (kills_of(PROGRAM).pick, &mut SeededRng::new(1));
        for node in lab.nodes() {
            destroy::destroy(node.net(), &pick, Amount::All, rng).expect("destroy connections");
        }
        "no new connections, all old ones killed".into()
    });
    let verdict = outcome.verdict();
    assert!(matches!(verdict, JobVerdict::Failed(_)), "{verdict}");
    for rank in 0..2 {
        let line = format!("slim: rank {rank} has lost rank {}", 1 - rank);
        let told = outcome.lines.iter().filter(|l| l.text.contains(&line));
        assert!(told.count() <= 1, "{}", outcome.tail(20));
    }
    let told = |l: &&slim_lab::output::Line| l.text.contains("has lost rank");
    assert!(
        outcome.lines.iter().any(|l| told(&l)),
        "{}",
        outcome.tail(20)
    );
}

#[test]
fn a_lost_peer_ends_the_job_with_one_line() {
    lost_peer(OpenMpi4);
}

mod open_mpi_5 {
    use super::*;

    #[test]
    fn four_ranks_use_the_component() {
        undisturbed(OpenMpi5Components, "four", PROGRAM, 4, &["2"]);
    }

    #[test]
    fn four_ranks_survive_kills_of_all_connections_at_once() {
        let kills = Kills {
            amount: Amount::All,
            ..kills_of(PROGRAM)
        };
        survives(OpenMpi5Components, "four-kills", PROGRAM, 4, None, &kills);
    }

    #[test]
    fn two_ranks_survive_kills_while_resuming() {
        let kills = Kills {
            amount: Amount::All,
            again: 4,
            ..kills_of(PROGRAM)
        };
        survives(OpenMpi5Components, "kills-again", PROGRAM, 2, None, &kills);
    }

    #[test]
    fn all_sizes_survive_kills() {
        let kills = kills_of(KINDS);
        let kind = Some("sizes");
        survives(OpenMpi5Components, "sizes-kills", KINDS, 2, kind, &kills);
    }

    #[test]
    fn threads_survive_kills() {
        let kills = kills_of(KINDS);
        let kind = Some("threads");
        survives(OpenMpi5Components, "threads-kills", KINDS, 2, kind, &kills);
    }

    #[test]
    fn without_sessions_a_job_does_not_finish() {
        without_sessions(OpenMpi5Components);
    }

    #[test]
    fn a_lost_peer_ends_the_job_with_one_line() {
        lost_peer(OpenMpi5Components);
    }

    /// Open MPI writes two bytes behind the first message on a communicator that was made out of a session.
    #[test]
    fn communicators_of_sessions_work_from_their_first_message_on() {
        let Some(bench) = ComponentBench::new("sessions", OpenMpi5Components) else {
            return;
        };
        let program = bench.bench.mpi.build_program("slim_sessions.c");
        let lab = bench.lab();
        let job = bench.job_of(&lab, program.expect("build a test program"), 2);
        let job = job.arg("30");
        let what = || "2 ranks, communicators of a session".into();
        let outcome = bench.bench.run(&lab, &job, LIMIT, |_| what());
        assert_undisturbed("sessions", &lab, &outcome, 2);
    }
}
