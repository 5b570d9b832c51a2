//! The native component under many things at once: eight ranks, two lines, small socket buffers, kills.

mod common;

use std::{fs, time::Duration};

use common::{
    component::{ComponentBench, KINDS, judge},
    kills::{Killed, Kills, Tally},
    soak,
};
use slim_lab::{
    Lab, SeededRng,
    faults::destroy::{Amount, Selector},
    mpi::Flavor,
};

const LIMIT: Duration = Duration::from_secs(150);
const RANKS: usize = 8;

/// Socket buffers of a few kilobytes: each fragment is sent and received in many parts.
const SMALL: [&str; 2] = [
    "net.ipv4.tcp_rmem=4096 8192 16384",
    "net.ipv4.tcp_wmem=4096 8192 16384",
];

fn set(lab: &Lab, settings: &[&str]) {
    for node in lab.nodes() {
        for setting in settings {
            node.exec("sysctl", &["-qw", setting])
                .expect("set a limit of the kernel");
        }
    }
}

fn survives(flavor: Flavor, test: &str, settings: &[&str], lines: usize) {
    let Some(bench) = ComponentBench::new(test, flavor) else {
        return;
    };
    let kills = Kills {
        pick: Selector::between_hosts().process(KINDS),
        amount: Amount::All,
        times: 10,
        ..Kills::one_by_one()
    };
    let mut tally = Tally::new(&bench.bench.test);
    for run in 0..if soak() { 20 } else { 1 } {
        let seed = SeededRng::seed_from_env() + run;
        let lab = bench.bench.lab(lines);
        set(&lab, settings);
        let go_on = lab.dir().join("go-on");
        fs::write(&go_on, "").expect("write a file");
        // Four ranks share a core: one that waits must let others run.
        let job = ["--mca", "mpi_yield_when_idle", "1"]
            .into_iter()
            .fold(bench.job(&lab, KINDS, RANKS), |job, word| job.option(word));
        let job = job.arg("sizes").arg("2").arg(&go_on);
        let mut killed = Killed::default();
        let outcome = bench.bench.run(&lab, &job, LIMIT, |job| {
            killed = kills.carry_out(&lab, job, &mut SeededRng::new(seed));
            fs::remove_file(&go_on).expect("remove a file");
            format!("SLIM_LAB_SEED={seed}, {killed}")
        });
        let result = judge(&lab, &outcome, killed, &kills);
        tally.add(lab, &outcome, killed, result);
    }
    tally.assert_all_right();
}

#[test]
fn eight_ranks_on_two_lines_survive_kills() {
    survives(Flavor::OpenMpi4, "eight", &[], 2);
}

#[test]
fn eight_ranks_with_small_buffers_on_two_lines_survive_kills() {
    survives(Flavor::OpenMpi4, "eight-small", &SMALL, 2);
}
