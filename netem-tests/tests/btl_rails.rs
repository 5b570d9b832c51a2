//! Rails of the native component: two lines between two nodes carry more than one, and a broken line's share moves to the other line.
//! The figures that the tests print are better on a quiet machine; docs/OPENMPI.md has them.

mod common;

use std::{fs, path::PathBuf, thread, time::Duration};

use common::{
    events::{Events, events_dir},
    jobs::{Bench, assert_finished},
    kills::Kills,
};
use slim_lab::{
    Error, Lab, SeededRng,
    faults::{
        destroy::Selector,
        nft,
        shape::{Shape, ShapeGuard},
    },
    mpi::{Flavor, Job, Outcome, Started},
    skip::skip,
};

const STREAM: &str = "slim_stream";
const LIMIT: Duration = Duration::from_secs(90);
const GIGABIT: u64 = 1_000_000;

/// A job of `slim_stream` needs these.
struct RailBench {
    bench: Bench,
    dir: PathBuf,
    stream: PathBuf,
}

impl RailBench {
    fn new(test: &str) -> Option<Self> {
        let bench = Bench::new(&format!("btl-rails-{test}"), Flavor::OpenMpi4)?;
        let dir = match bench.mpi.component() {
            Ok(dir) => dir,
            Err(error @ Error::Missing { .. }) => {
                skip(test, error);
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        let stream = bench.mpi.build_program("slim_stream.c");
        Some(Self {
            bench,
            dir,
            stream: stream.expect("build a test program"),
        })
    }

    /// Runs a job of at least `seconds` on two lines. `fault` runs while the job works.
    fn run(&self, lab: &Lab, seconds: u32, fault: impl FnOnce(&mut Started<'_>)) -> Outcome {
        let go_on = lab.dir().join("go-on");
        fs::write(&go_on, "").expect("write a file");
        let job = Job::new(lab, &self.bench.mpi, &self.stream)
            .component(&self.dir)
            .arg(seconds.to_string())
            .arg(&go_on)
            .env("SLIM_EVENTS", events_dir(lab).join("%h.%p.jsonl"));
        let outcome = self.bench.run(lab, &job, LIMIT, |job| {
            fault(job);
            fs::remove_file(&go_on).expect("remove a file");
            "streams".into()
        });
        assert_finished(&self.bench.test, lab, &outcome);
        outcome
    }
}

/// Limits each path to its rate, in both directions.
fn limit(lab: &Lab, rates: &[u64]) -> Vec<ShapeGuard> {
    let mut guards = Vec::new();
    for (path, rate) in rates.iter().enumerate() {
        for node in lab.nodes() {
            let shape = Shape::new().rate_kbit(*rate).late_timers();
            guards.push(shape.apply(node, path).expect("limit a line"));
        }
    }
    guards
}

/// The throughputs of the seconds of a job, in MB/s.
fn rates(outcome: &Outcome) -> Vec<f64> {
    let rate = |text: &str| {
        let mut words = text.split_whitespace();
        words.find_map(|w| w.strip_prefix("rate=")?.parse().ok())
    };
    let lines = outcome.lines.iter();
    let seconds = lines.filter(|l| l.text.starts_with("t="));
    seconds.filter_map(|l| rate(&l.text)).collect()
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    *all.get(all.len() / 2).expect("a second of throughput")
}

/// The median throughput of a job on lines with these rates, in kilobits a second.
fn throughput(bench: &RailBench, lines: &[u64]) -> f64 {
    let lab = bench.bench.lab(lines.len());
    let _guards = limit(&lab, lines);
    let outcome = bench.run(&lab, 4, |_| {});
    median(rates(&outcome))
}

#[test]
fn two_lines_carry_more_than_one() {
    let Some(bench) = RailBench::new("two") else {
        return;
    };
    let one = throughput(&bench, &[GIGABIT]);
    let two = throughput(&bench, &[GIGABIT, GIGABIT]);
    println!(
        "one line {one:.1} MB/s, two lines {two:.1} MB/s: {:.3}",
        two / one
    );
    assert!(two >= 1.6 * one, "one {one:.1} MB/s, two {two:.1} MB/s");
}

#[test]
fn the_share_of_a_slow_line_follows_its_throughput() {
    let Some(bench) = RailBench::new("slow") else {
        return;
    };
    let one = throughput(&bench, &[GIGABIT]);
    let both = throughput(&bench, &[GIGABIT, GIGABIT / 4]);
    println!(
        "1 Gb/s {one:.1} MB/s, with 0.25 Gb/s more {both:.1} MB/s: {:.3}",
        both / one
    );
    // Half of the fragments on each line would give half of what the fast line carries.
    assert!(both >= 0.9 * one, "one {one:.1} MB/s, both {both:.1} MB/s");
}

#[test]
fn a_killed_rail_is_resumed() {
    let Some(bench) = RailBench::new("kills") else {
        return;
    };
    let lab = bench.bench.lab(2);
    let kills = Kills {
        pick: Selector::between_hosts().process(STREAM),
        ..Kills::one_by_one()
    };
    let mut killed = None;
    let outcome = bench.run(&lab, 1, |job| {
        killed = Some(kills.carry_out(&lab, job, &mut SeededRng::new(1)));
    });
    let stall = outcome.done().expect("a closing line").max_stall;
    println!("{:?}, longest stall {stall} s", killed.unwrap());
    assert_eq!(killed.unwrap().times, kills.times);
    assert!(Events::read(&lab).count("resume") >= kills.times);
}

/// One of two lines drops everything for 3 s, and then works again.
#[test]
fn a_silent_lines_share_moves_to_the_other_line_and_comes_back() {
    let Some(bench) = RailBench::new("silent") else {
        return;
    };
    let lab = bench.bench.lab(2);
    let _guards = limit(&lab, &[GIGABIT, GIGABIT]);
    let outcome = bench.run(&lab, 1, |_| {
        thread::sleep(Duration::from_secs(2));
        let rule = nft::Rule::drop().path(1).apply_to(lab.nodes());
        thread::sleep(Duration::from_secs(3));
        rule.expect("a firewall").lift().expect("lift the firewall");
        thread::sleep(Duration::from_secs(6));
    });
    let stall = outcome.done().expect("a closing line").max_stall;
    let rates = rates(&outcome);
    println!("longest stall {stall} s, MB/s {rates:?}");
    // Without the component's own suspicion the session notices after a second.
    assert!(stall < 0.5, "{stall} s");
    let (last, least) = (rates.last(), rates.iter().copied().reduce(f64::min));
    assert!(*last.unwrap() > 1.2 * least.unwrap(), "{rates:?}");
}

/// One of two lines loses its address at one end and gets it back, several times; the other line is untouched.
#[test]
fn a_line_that_comes_and_goes_does_not_hold_up_the_job() {
    let Some(bench) = RailBench::new("flapping") else {
        return;
    };
    let lab = bench.bench.lab(2);
    let _guards = limit(&lab, &[GIGABIT, GIGABIT]);
    let node = &lab.nodes()[1];
    let (address, interface) = (format!("{}/24", node.address(1)), node.interface(1));
    let outcome = bench.run(&lab, 1, |_| {
        thread::sleep(Duration::from_secs(2));
        let mut rng = SeededRng::new(7);
        for _ in 0..12 {
            for what in ["del", "add"] {
                let args = ["addr", what, &address, "dev", &interface];
                node.exec("ip", &args).expect("change an address");
                thread::sleep(Duration::from_millis(100 + rng.below(600) as u64));
            }
        }
    });
    let stall = outcome.done().expect("a closing line").max_stall;
    println!("longest stall {stall} s, MB/s {:?}", rates(&outcome));
    assert!(stall < 1.0, "{stall} s");
}
