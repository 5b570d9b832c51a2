//! A rank is killed (SIGKILL). The others hear of it as soon as without SLIM, go on without it, and replace it by a new one.

use std::time::Duration;

use slim_lab::mpi::Flavor;

use super::lab::{Carrier, More, SHORT, Shape, UlfmLab, is_done, lines, runs};

/// Longer than such a job takes.
const LIMIT: Duration = Duration::from_secs(20);

/// How much later than without SLIM the ranks may hear of a death, in seconds. SLIM asks the host of the dead rank twice, 5 ms apart, and is
/// some 7 ms later on a machine that does nothing else. If the second question came as late as in other jobs, it would be 150 ms.
const MORE: f64 = 0.02;

/// What became of a job.
struct Outcome {
    /// Time in seconds until both ranks that were left had heard of the death, and had a communicator without the failed rank.
    heard: Option<f64>,
    /// They have gone on with a new rank to the end of their work.
    is_replaced: bool,
    /// They have not, and a daemon has crashed.
    is_crash: bool,
    /// Open MPI itself has failed, in a way that is known.
    is_fault: bool,
}

/// Whether Open MPI itself has failed in one of the ways in which it does now and then when a rank has died (docs/ULFM.md): the shrink leaves one
/// rank alone, a collective of its own meets the death once more, or a send ends after its request.
fn is_own_fault(text: &str) -> bool {
    let is_alone = lines(text, "SHRUNK ").any(|line| line.contains(" ranks=1 "));
    let complaints = [
        "NBC_Progress: an error 75 was found",
        "An error occurred in Send error after request freed",
    ];
    is_alone || complaints.iter().any(|words| text.contains(words))
}

/// When a line of the program says that something happened, in seconds since 1970.
fn at(line: &str) -> Option<f64> {
    let rest = line.split(" at=").nth(1)?;
    rest.split(' ').next()?.parse().ok()
}

fn kill_one(bench: &UlfmLab, carrier: Carrier) -> Outcome {
    let job = bench.start(Shape {
        nodes: 3,
        seconds: 3,
        words: SHORT,
        carrier,
        more: More::Replace,
        ..Shape::PAIR
    });
    job.wait_working();
    let killed = job.kill_a_rank(&bench.lab.nodes()[2]);
    let begun = std::time::Instant::now();
    let ended = job.wait_for(|| begun.elapsed() > LIMIT);
    let count = |start| lines(&ended.text, start).count();
    let failed = lines(&ended.text, "FAILED ").filter_map(at);
    let last = failed.fold(0.0, f64::max);
    let shrunk = count("SHRUNK ") >= 2 && !ended.text.contains("is wrong");
    // They, and the new one.
    let is_replaced = is_done(&ended, 3) && count("GROWN ") == 3;
    let outcome = Outcome {
        heard: (shrunk && count("FAILED ") >= 2).then_some(last - killed),
        is_replaced,
        is_crash: !is_replaced && bench.a_daemon_crashed(),
        is_fault: is_own_fault(&ended.text),
    };
    if !is_replaced {
        let (crash, events) = (outcome.is_crash, bench.events());
        let given_up = events.lines().filter(|line| line.contains("\"escalate\""));
        println!(
            "{carrier:?}: {:?}, killed at {killed:.6}, a daemon crashed: {crash}\n{}\n{}",
            ended.status,
            ended.text,
            given_up.collect::<Vec<_>>().join("\n")
        );
    }
    outcome
}

/// In turns with bare jobs. The best time of each: the machine may be busy with something else. Not every job can replace the rank, or
/// end with status 0: PRRTE's daemons corrupt their memory when a rank is spawned after another one has died, and crash then or later, with
/// and without SLIM (docs/ULFM.md). How many do depends on their heaps, so the numbers with and without SLIM say nothing about each other.
/// A job whose daemons have not crashed replaces the rank. The exception is a job in which Open MPI itself fails, with and without SLIM
/// (docs/ULFM.md: 2 of 100 jobs, and 2 of 80). That may happen in one of ten jobs, or in one if there are fewer.
fn a_killed_rank(test: &str, flavor: Flavor) {
    let mut all = [Carrier::Bare, Carrier::Tcp].map(|carrier| (carrier, Vec::new()));
    for _ in 0..runs().max(3) {
        // `mpirun` is on a host of its own.
        let Some(bench) = UlfmLab::new(test, flavor, 4) else {
            return;
        };
        for (carrier, outcomes) in &mut all {
            outcomes.push(kill_one(&bench, *carrier));
        }
    }
    let [bare, slim] = all.map(|(carrier, outcomes)| {
        let replaced = outcomes.iter().filter(|outcome| outcome.is_replaced);
        let crashes = outcomes.iter().filter(|outcome| outcome.is_crash);
        let (replaced, crashes) = (replaced.count(), crashes.count());
        let mut heard: Vec<f64> = outcomes.iter().filter_map(|one| one.heard).collect();
        heard.sort_by(f64::total_cmp);
        println!(
            "{carrier:?}: of {} jobs {} went on without the rank, after {heard:.4?} s, {replaced} replaced it, \
             and in {crashes} others a daemon crashed",
            outcomes.len(),
            heard.len(),
        );
        let is_bad = |one: &&Outcome| one.heard.is_none() || !(one.is_replaced || one.is_crash);
        let bad = outcomes.iter().filter(is_bad);
        let (faults, unexplained) = bad.partition::<Vec<_>, _>(|one| one.is_fault);
        (heard, faults.len(), unexplained.len())
    });
    let (bare_heard, ..) = bare;
    let (heard, faults, unexplained) = slim;
    assert_eq!(
        unexplained, 0,
        "the death was not heard of, or a rank was not replaced by daemons that are well"
    );
    assert!(faults <= runs().div_ceil(10) as usize, "{faults} faults");
    if let Some(best) = bare_heard.first() {
        assert!(heard[0] <= best + MORE, "{heard:?}, bare {bare_heard:?}");
    }
}

#[test]
fn a_killed_rank_is_reported_as_soon_as_without_slim() {
    let test = "a_killed_rank_is_reported_as_soon_as_without_slim";
    a_killed_rank(test, Flavor::OpenMpi5);
}

#[test]
fn a_killed_rank_is_reported_as_soon_as_without_slim_with_5_0_7() {
    let test = "a_killed_rank_is_reported_as_soon_as_without_slim_with_5_0_7";
    a_killed_rank(test, Flavor::OpenMpi5Components);
}
