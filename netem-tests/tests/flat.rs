//! A job whose connections are killed again and again needs no more memory and no more descriptors as time goes by.

mod common;

use std::{collections::BTreeMap, fs, thread, time::Duration};

use common::{
    events::Events,
    jobs::{Bench, PROGRAM, Slim, assert_finished, given_up},
    soak,
};
use slim_lab::{
    Lab, SeededRng,
    faults::destroy::{self, Amount, Selector},
    mpi::{Flavor, Progress},
};

const RANKS: usize = 4;
/// Number of lengths of messages; a round has one of them.
const LENGTHS: u64 = 8;
const LIMIT: Duration = Duration::from_secs(90);
/// Growth of a rank's memory that is no leak: Open MPI makes buffers late, in steps of up to 3 MiB, without any kill, too.
const LATE_KIB: u64 = 4096;
/// Descriptors of a resume under way.
const UNDER_WAY: u64 = 4;

/// What a rank uses.
#[derive(Clone, Copy, Debug)]
struct Usage {
    /// Resident anonymous memory.
    kib: u64,
    descriptors: u64,
}

fn usage(pid: u32) -> Option<Usage> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("RssAnon:"))?;
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count();
    Some(Usage {
        kib: line.trim().trim_end_matches(" kB").parse().ok()?,
        descriptors: descriptors as u64,
    })
}

/// The usage of each rank, measurement by measurement.
type Course = BTreeMap<u32, Vec<Usage>>;

fn measure(lab: &Lab, course: &mut Course) {
    let all = lab.nodes().iter().flat_map(|node| node.processes());
    for rank in all.filter(|p| p.name == PROGRAM) {
        course.entry(rank.pid).or_default().extend(usage(rank.pid));
    }
}

/// The largest value in the second and in the last quarter.
fn quarters(course: &[Usage], value: impl Fn(&Usage) -> u64) -> [u64; 2] {
    let n = course.len() / 4;
    [&course[n..2 * n], &course[course.len() - n..]]
        .map(|part| part.iter().map(&value).max().expect("a measurement"))
}

#[test]
fn memory_and_descriptors_do_not_grow_with_the_number_of_kills() {
    let Some(bench) = Bench::shared("flat", Flavor::OpenMpi5) else {
        return;
    };
    // A kill a second for ten minutes, or five a second for eight seconds.
    let (kills, gap) = match soak() {
        true => (600, Duration::from_secs(1)),
        false => (40, Duration::from_millis(200)),
    };
    let lab = bench.lab(1);
    let go_on = lab.dir().join("go-on");
    fs::write(&go_on, "").expect("write a file");
    let job = bench.job(&lab, Slim::Everywhere, RANKS, 1).arg(&go_on);
    let mut course = Course::new();
    let outcome = bench.run(&lab, &job, LIMIT, |job| {
        // Until then, Open MPI makes buffers for ever longer messages.
        let all_lengths = |line: &str| Progress::parse(line).is_some_and(|p| p.rounds > LENGTHS);
        assert!(
            job.running().wait_line(LIMIT, all_lengths),
            "the job is slow"
        );
        let mut rng = SeededRng::new(SeededRng::seed_from_env());
        let pick = Selector::between_hosts().process(PROGRAM);
        for n in 0..kills {
            let end = lab.node(n % 2).net();
            destroy::destroy(end, &pick, Amount::One, &mut rng).expect("destroy a connection");
            thread::sleep(gap);
            measure(&lab, &mut course);
        }
        fs::remove_file(&go_on).expect("remove a file");
        format!("{kills} kills")
    });
    assert_finished(&bench.test, &lab, &outcome);
    given_up(&lab, &outcome).expect("no flow is given up");
    let resumed = Events::read(&lab).count("resume");
    assert!(resumed >= kills, "{resumed} resumes");
    assert_eq!(course.len(), RANKS);
    for (pid, course) in course {
        let [kib, late_kib] = quarters(&course, |usage| usage.kib);
        let [open, late_open] = quarters(&course, |usage| usage.descriptors);
        println!(
            "rank {pid}: {kib} KiB, then {late_kib} KiB; {open} descriptors, then {late_open}"
        );
        assert!(late_kib <= kib + LATE_KIB, "{course:?}");
        assert!(late_open <= open + UNDER_WAY, "{course:?}");
    }
}
