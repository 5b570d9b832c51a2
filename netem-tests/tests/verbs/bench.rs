//! `slim bench` with the adapters of this host.

use std::{
    fs,
    process::{Command, Output},
};

use slim_lab::{
    Error, artifacts,
    mpi::{Flavor, Mpi},
    skip::skip,
};

use super::{common::soak, openmpi::component, rxe, shell};

/// A short run compares Open MPI over verbs with the same component over TCP and with `btl/tcp`. If the flows do not get to queue pairs there are no figures.
#[test]
fn open_mpi_over_verbs_is_a_contender() {
    let test = "bench::open_mpi_over_verbs_is_a_contender";
    let found = Mpi::find(Flavor::OpenMpi4).and_then(|mpi| {
        mpi.build_program("slim_bench.c")?;
        Ok((component(&mpi)?, artifacts::program("slim")?))
    });
    let (component, slim) = match found {
        Ok(found) => found,
        Err(error @ Error::Missing { .. }) => return skip(test, error),
        Err(error) => panic!("{error}"),
    };
    let Some(_rxe) = rxe(test) else {
        return;
    };
    shell("hostname guest");
    let json = "/run/tmp/bench.json";
    // With SLIM_SOAK=1 it is a measurement, for which nothing else may run.
    let how: &[&str] = match soak() {
        true => &["--rounds", "7", "--only", "latency,bandwidth"],
        false => &["--quick", "--rounds", "1", "--only", "latency"],
    };
    let bench = |adapters: &str| -> (Output, String) {
        let output = Command::new(&slim)
            .arg("bench")
            .args(how)
            .args(["--json", json, "--adapters", adapters, "--component"])
            .arg(&component)
            .output()
            .unwrap();
        let text = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
        let text = text.concat();
        println!("{text}");
        (output, text)
    };
    let (output, text) = bench("rx1,rx2");
    assert!(output.status.success(), "{text}");
    let report: serde_json::Value = serde_json::from_slice(&fs::read(json).unwrap()).unwrap();
    let measured = &report["messages"][0];
    let names = serde_json::json!(["bare", "component", "verbs"]);
    assert_eq!(measured["contenders"], names);
    for run in measured["points"][0]["runs"].as_array().unwrap() {
        assert!(run["median"].as_f64().unwrap() > 0.0, "{run}");
    }
    let (output, text) = bench("rx1,rx9");
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("no adapter rx9 (rx1, rx2)"), "{text}");

    // Nothing of RoCE passes. TCP does.
    shell(
        "nft add table inet no; nft add chain inet no in '{ type filter hook input priority 0; }'; nft add rule inet no in udp dport 4791 drop",
    );
    let (output, text) = bench("rx1,rx2");
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("does not get to queue pairs"), "{text}");
}
