//! `slim bench` runs, and a small message stays within its budget of instructions. No test here depends
//! on time.

mod common;

use std::time::Duration;

use common::{Scratch, assert_refused, output, slim};
use slim_cli::bench::contender::{self, Contender};
use slim_cli::bench::messages::Test;
use slim_cli::bench::round::{Round, TurnPace};
use slim_cli::bench::site::Site;
use slim_cli::bench::{callgrind, instructions};
use slim_lab::mpi::{Flavor, Job, JobVerdict, Mpi};
use slim_lab::skip::skip;
use slim_lab::{Lab, artifacts};

/// Counts the instructions that SLIM adds to a `send` and a `recv` of 8 bytes.
#[test]
fn a_small_message_stays_within_its_budget() {
    let test = "a_small_message_stays_within_its_budget";
    if let Err(reason) = callgrind::valgrind() {
        return skip(test, reason);
    }
    let library = match artifacts::preload() {
        Ok(library) => library,
        Err(reason) => return skip(test, reason),
    };
    if library.parent().is_some_and(|dir| dir.ends_with("debug")) {
        return skip(test, "the library is not optimised: cargo build --release");
    }
    let pair = instructions::pair(&library).unwrap_or_else(|e| panic!("{e}"));
    let extra = pair.extra();
    println!(
        "{extra:.1} instructions more than the {:.1} of a bare pair, the budget is {}",
        pair.bare,
        instructions::BUDGET
    );
    let limit = instructions::BUDGET * (1.0 + instructions::TOLERANCE);
    let shares: Vec<_> = pair.functions.iter().take(12).collect();
    assert!(
        extra > 0.0 && extra <= limit,
        "{extra:.1} instructions a pair, at most {limit:.1}: {shares:#?}"
    );
}

/// `--quick --all`: messages, interruptions, memory, instructions, and the files with the results.
#[test]
fn a_quick_run_of_all_parts_succeeds() {
    let test = "a_quick_run_of_all_parts_succeeds";
    if let Err(reason) = Lab::check() {
        return skip(test, reason);
    }
    if let Err(reason) = Mpi::find(Flavor::OpenMpi4) {
        return skip(test, reason);
    }
    let library = match artifacts::preload() {
        Ok(library) => library,
        Err(reason) => return skip(test, reason),
    };
    let scratch = Scratch::new("bench");
    let directory = scratch.path("out");
    let mut command = slim();
    command
        .env("SLIM_PRELOAD", &library)
        .args(["bench", "--quick", "--against", "slim,framed"])
        .args(["--flows", "1,20", "--kills", "4", "--all"])
        .arg(&directory);
    let (status, out, err) = output(&mut command);
    assert_eq!(status, 0, "{out}{err}");
    assert!(err.contains("this takes about"), "{err}");
    for word in ["Goals", "latency", "alltoall", "SLIM", "framed"] {
        assert!(out.contains(word), "{word}: {out}");
    }

    let read = |name: &str| std::fs::read_to_string(directory.join(name)).unwrap();
    let json: serde_json::Value = serde_json::from_str(&read("bench.json")).unwrap();
    let messages = json["messages"].as_array().unwrap();
    assert_eq!(messages.len(), 2, "{json:#}");
    assert_eq!(messages[1]["rate_kbit"].as_u64(), Some(10_000_000));
    let points = messages
        .iter()
        .flat_map(|m| m["points"].as_array().unwrap());
    for point in points {
        let runs = point["runs"].as_array().unwrap();
        assert_eq!(runs.len(), 3, "{point:#}");
        for run in runs {
            let rounds = run["rounds"].as_array().unwrap();
            assert_eq!(rounds.len(), 2, "{point:#}");
            for turns in rounds {
                let turns = turns.as_array().unwrap();
                assert!(turns.len() >= 4, "{point:#}");
                assert!(turns.iter().all(|v| v.as_f64() > Some(0.0)), "{point:#}");
            }
            let bare = run["contender"] == "bare";
            let (low, high) = (&run["compared"]["low"], &run["compared"]["high"]);
            assert!(bare || (low.as_f64() > Some(0.0) && high.as_f64() >= low.as_f64()));
        }
    }
    let resume = &json["resume"];
    let kills = resume["kills"].as_array().unwrap();
    assert_eq!(kills.len(), 2, "{resume:#}");
    assert!(kills.iter().all(|k| k["last_ms"].as_f64() > Some(0.0)));
    let full = |what: &str| resume["full"][what][0].as_f64().unwrap();
    assert!(
        0.0 < full("replayed") && full("replayed") <= full("written"),
        "{resume:#}"
    );
    let hole = &resume["holes"][0]["first_byte"]["slim_ms"];
    assert_eq!(hole.as_array().map(Vec::len), Some(1), "{resume:#}");
    assert_eq!(json["memory"]["idle_flows"].as_u64(), Some(1000));
    if callgrind::valgrind().is_ok() {
        assert!(json["instructions"]["pair"]["slim"].as_f64() > Some(0.0));
    }

    let html = read("bench.html");
    // Plots of latency and bandwidth, on two lines.
    assert_eq!(html.matches("<svg").count(), 4);
    assert!(html.ends_with("</html>\n") && html.contains("<code>"));
    assert_eq!(
        html.matches("http").count(),
        html.matches("http://www.w3.org/").count()
    );
}

/// The framed contender does not change MPI's messages: every word is compared.
#[test]
fn frames_carry_the_bytes_exactly() {
    let test = "frames_carry_the_bytes_exactly";
    if let Err(reason) = Lab::check() {
        return skip(test, reason);
    }
    // Jobs of MPICH with more ranks do not always end, with or without a library.
    for (flavor, ranks) in [
        (Flavor::OpenMpi4, 4),
        (Flavor::OpenMpi5, 4),
        (Flavor::Mpich, 2),
    ] {
        let mpi = match Mpi::find(flavor) {
            Ok(mpi) => mpi,
            Err(reason) => {
                skip(test, reason);
                continue;
            }
        };
        let framed = Contender::Framed.ready(Flavor::OpenMpi4, None).unwrap();
        let lab = Lab::builder().nodes(2).name("framed").build().unwrap();
        let job = Job::new(&lab, &mpi, mpi.build_program("slim_pp.c").unwrap())
            .ranks(ranks)
            .preload(framed.library.unwrap())
            .env("SLIM_FRAMED_LOG", contender::frames_log(lab.dir()))
            .arg("3");
        let outcome = job.start().unwrap().wait(Duration::from_secs(120));
        let verdict = outcome.verdict();
        assert!(
            matches!(verdict, JobVerdict::Finished(_)),
            "{flavor}: {verdict}\n{}",
            outcome.tail(20)
        );
        let (done, frames) = (outcome.done().unwrap(), contender::frames(lab.dir()));
        assert!(
            done.rounds > 0 && frames > done.rounds,
            "{flavor}: {frames} frames"
        );
    }
}

/// A killed rank ends the round at once and all of its jobs, and the error names the job.
#[test]
fn a_job_that_dies_in_its_turn_ends_the_round() {
    let test = "a_job_that_dies_in_its_turn_ends_the_round";
    if let Err(reason) = Lab::check() {
        return skip(test, reason);
    }
    let mpi = match Mpi::find(Flavor::OpenMpi4) {
        Ok(mpi) => mpi,
        Err(reason) => return skip(test, reason),
    };
    let site = Site::make(None).unwrap();
    let Site::Lab(lab) = &site else {
        panic!("{site:?}");
    };
    let program = mpi.build_program("slim_bench.c").unwrap();
    let contenders =
        [Contender::Bare, Contender::Framed].map(|c| c.ready(Flavor::OpenMpi4, None).unwrap());
    let start = || Round::start(&site, &mpi, &program, 1, 2, &contenders);
    let pace = TurnPace {
        turn: Duration::from_millis(2),
        each: Duration::from_millis(20),
        least: 2,
    };
    let mut round = start().unwrap();
    let turns = round.measure(Test::Latency, 8, pace).unwrap();
    assert_eq!(turns.values.len(), 2);

    let library = contenders[1].library.as_ref().unwrap();
    let library = library.file_name().unwrap().to_str().unwrap();
    let rank = lab.node(1).processes().into_iter().find(|process| {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", process.pid));
        process.name == "slim_bench" && maps.is_ok_and(|maps| maps.contains(library))
    });
    let rank = rank.expect("a framed rank on the second node").pid;
    let killed = std::process::Command::new("kill")
        .args(["-9", &rank.to_string()])
        .status();
    assert!(killed.unwrap().success());
    let failure = round.measure(Test::Latency, 8, pace).unwrap_err();
    let told = failure.to_string();
    assert!(told.contains("the job of framed failed"), "{told}");
    assert!(told.contains("has ended in the middle"), "{told}");
    for node in lab.nodes() {
        let left = node.processes();
        assert!(left.is_empty(), "{left:?}");
    }
}

/// MPICH can be measured like the other MPIs.
#[test]
fn mpich_is_measured() {
    let test = "mpich_is_measured";
    if let Err(reason) = Lab::check() {
        return skip(test, reason);
    }
    if let Err(reason) = Mpi::find(Flavor::Mpich) {
        return skip(test, reason);
    }
    let library = match artifacts::preload() {
        Ok(library) => library,
        Err(reason) => return skip(test, reason),
    };
    let mut command = slim();
    command
        .env("SLIM_PRELOAD", &library)
        .args(["bench", "--mpi", "mpich", "--quick", "--rounds", "1"])
        .args(["--only", "latency", "--against", "slim"]);
    let (status, out, err) = output(&mut command);
    assert_eq!(status, 0, "{out}{err}");
    assert!(out.contains("MPICH") && out.contains("SLIM"), "{out}");
}

#[test]
fn wrong_options_are_refused() {
    for wrong in [
        ["--rate", "2gbit"],
        ["--mpi", "lam"],
        ["--only", "speed"],
        ["--rounds", "0"],
        ["--hole", "61"],
        ["--against", "udp"],
        // Options of other parts are refused, not silently ignored.
        ["--kills", "7"],
        ["--memory", "--rate=1gbit"],
        ["--resume", "--only=latency"],
        ["--instructions", "--mpi=ompi5"],
        ["--all=/tmp", "--json=/tmp/x"],
        ["--all=/tmp", "--memory"],
        ["--adapters=rx1", "--quick"],
        ["--adapters=rx1,", "--quick"],
        ["--adapters=rx1,rx2", "--memory"],
        ["--adapters=rx1,rx2", "--rate=1gbit"],
        ["--component=/tmp", "--memory"],
    ] {
        let (status, _, err) = output(slim().arg("bench").args(wrong));
        assert_eq!(status, 2, "{wrong:?}: {err}");
        assert!(err.contains("--"), "{wrong:?}: {err}");
    }
    if let Ok(library) = artifacts::preload() {
        for (wrong, said) in [
            (["--against", "bare"], "nothing to compare"),
            (["--mpi=mpich", "--only=alltoall"], "left out with MPICH"),
            (["--against=verbs", "--quick"], "--adapters ADAPTER,ADAPTER"),
            (["--against=slim", "--component=/tmp"], "has no effect"),
        ] {
            assert_refused(
                slim()
                    .arg("bench")
                    .args(wrong)
                    .env("SLIM_PRELOAD", &library),
                &[said],
            );
        }
    }
    if Mpi::find(Flavor::OpenMpi4).is_ok() {
        let mut command = slim();
        command.args(["bench", "--against=component", "--component=/tmp"]);
        if let Ok(library) = artifacts::preload() {
            command.env("SLIM_PRELOAD", library);
        }
        assert_refused(&mut command, &["no mca_btl_slim.so"]);
    }
    for (wrong, said) in [
        ("--against=slim", "only component and verbs"),
        ("--only=alltoall", "only latency, bandwidth and rate"),
    ] {
        let mut command = slim();
        command.args([
            "bench",
            "--quick",
            "--adapters=rx1,rx2",
            "--component=/tmp",
            wrong,
        ]);
        assert_refused(&mut command, &[said]);
    }
    assert_refused(
        slim()
            .args(["bench", "--quick"])
            .env("SLIM_PRELOAD", "/no/such/library.so"),
        &["/no/such/library.so"],
    );
}
