//! MPI jobs without any fault: SLIM takes nothing for a fault, and the jobs print what they print without SLIM.

mod common;

use std::{collections::BTreeMap, time::Duration};

use common::{
    events::{Events, kind},
    jobs::{Bench, Slim, assert_finished},
};
use slim_lab::mpi::Flavor;

const LIMIT: Duration = Duration::from_secs(60);

/// The number of jobs of each kind: the variable `JOBS`, or a few.
fn jobs() -> usize {
    let jobs = std::env::var("JOBS").ok();
    jobs.and_then(|jobs| jobs.parse().ok()).unwrap_or(4)
}

/// Lines of a job's output that report no progress (warnings), and how often each was printed.
type Said = BTreeMap<String, usize>;

/// The text without digits, in which otherwise equal warnings differ.
fn plain(text: &str) -> String {
    let letters = text.chars().filter(|c| !c.is_ascii_digit());
    letters.collect::<String>().trim().to_owned()
}

fn quiet(flavor: Flavor) {
    let Some(bench) = Bench::new("quiet", flavor) else {
        return;
    };
    let (mut bare, mut slim) = (Said::new(), Said::new());
    let mut wrong = Vec::new();
    for n in 0..jobs() {
        for (with, said) in [(Slim::Bare, &mut bare), (Slim::Everywhere, &mut slim)] {
            let lab = bench.lab(1);
            let job = bench.job(&lab, with, 4, 1);
            let outcome = bench.run(&lab, &job, LIMIT, |_| format!("job {n}, {with:?}"));
            assert_finished(&bench.test, &lab, &outcome);
            for line in &outcome.lines {
                let text = plain(&line.text);
                if !text.starts_with("t= it=") && !text.starts_with("DONE") && !text.is_empty() {
                    *said.entry(text).or_default() += 1;
                }
            }
            for event in Events::read(&lab).lines {
                if ["suspend", "attempt"].contains(&kind(&event)) {
                    wrong.push(format!("job {n}: {event}"));
                }
            }
        }
    }
    println!("{}: bare says {bare:#?}, under SLIM {slim:#?}", bench.test);
    assert!(
        wrong.is_empty(),
        "{}: {}\n{}",
        bench.test,
        wrong.len(),
        wrong.join("\n")
    );
}

#[test]
fn open_mpi_4_is_quiet() {
    quiet(Flavor::OpenMpi4);
}

#[test]
fn open_mpi_5_is_quiet() {
    quiet(Flavor::OpenMpi5);
}
