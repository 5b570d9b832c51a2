//! `slim bench`: that it runs, and that a small message costs no more instructions than it may.
//! Nothing here depends on time.

mod common;

use common::{Scratch, assert_refused, output, slim};
use netem_tests::mpi::{Flavor, Mpi};
use netem_tests::skip::skip;
use netem_tests::{Lab, artifacts};
use slim_cli::bench::{callgrind, instructions};

/// The instructions that SLIM adds to a `send` and a `recv` of 8 bytes.
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

/// The short form of it, with all that it writes.
#[test]
fn the_short_form_runs() {
    let test = "the_short_form_runs";
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
    let (json, html) = (scratch.path("out.json"), scratch.path("out.html"));
    let mut command = slim();
    command
        .env("SLIM_PRELOAD", &library)
        .args(["bench", "--quick", "--each", "20", "--against", "slim"])
        .args(["--only", "latency,bandwidth", "--json"])
        .arg(&json)
        .arg("--html")
        .arg(&html);
    let (status, out, err) = output(&mut command);
    assert_eq!(status, 0, "{out}{err}");
    assert!(out.contains("latency") && out.contains("SLIM"), "{out}");
    let json: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(json).unwrap()).unwrap();
    let points = json["messages"]["points"].as_array().unwrap();
    assert_eq!(points.len(), 4, "{json:#}");
    for point in points {
        let runs = point["runs"].as_array().unwrap();
        assert_eq!(runs.len(), 2, "{point:#}");
        for run in runs {
            let values = run["values"].as_array().unwrap();
            assert_eq!(values.len(), 2, "{point:#}");
            assert!(values.iter().all(|v| v.as_f64() > Some(0.0)), "{point:#}");
        }
    }
    let html = std::fs::read_to_string(html).unwrap();
    assert!(html.matches("<svg").count() == 2 && html.ends_with("</html>\n"));
    assert!(!html.contains("http://") || html.matches("http://www.w3.org/").count() == 2);
}

/// Interruptions and memory in their short forms.
#[test]
fn the_other_parts_run() {
    let test = "the_other_parts_run";
    if let Err(reason) = Lab::check() {
        return skip(test, reason);
    }
    let library = match artifacts::preload() {
        Ok(library) => library,
        Err(reason) => return skip(test, reason),
    };
    let scratch = Scratch::new("bench-parts");
    let json = scratch.path("out.json");
    let mut command = slim();
    command
        .env("SLIM_PRELOAD", &library)
        .args(["bench", "--quick", "--resume", "--memory"])
        .args(["--flows", "1,20", "--kills", "4", "--json"])
        .arg(&json);
    let (status, out, err) = output(&mut command);
    assert_eq!(status, 0, "{out}{err}");
    let json: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(json).unwrap()).unwrap();
    let kills = json["resume"]["kills"].as_array().unwrap();
    assert_eq!(kills.len(), 2, "{json:#}");
    assert!(kills.iter().all(|k| k["last_ms"].as_f64() > Some(0.0)));
    assert_eq!(json["memory"]["idle_flows"].as_u64(), Some(1000));
}

#[test]
fn wrong_options_are_refused() {
    for wrong in [
        ["--rate", "2gbit"],
        ["--mpi", "lam"],
        ["--only", "speed"],
        ["--rounds", "0"],
    ] {
        let (status, _, err) = output(slim().arg("bench").args(wrong));
        assert_eq!(status, 2, "{wrong:?}: {err}");
    }
    if let Ok(library) = artifacts::preload() {
        assert_refused(
            slim()
                .args(["bench", "--mpi", "mpich"])
                .env("SLIM_PRELOAD", library),
            &["MPICH is not measured yet"],
        );
    }
    assert_refused(
        slim()
            .args(["bench", "--quick"])
            .env("SLIM_PRELOAD", "/no/such/library.so"),
        &["/no/such/library.so"],
    );
}
