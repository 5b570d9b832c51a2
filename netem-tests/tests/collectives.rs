//! Connections that break in the middle of Open MPI's collective operations, by each of its algorithms: every word is right. The
//! ignored tests measure how long an outage stops the calls; docs/design/collectives.md has the figures and the commands.

mod common;

use std::{
    fs,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use common::{
    calls::{Calls, CallsAfter, FlowsAfter, median, now},
    events::{Events, events_dir},
    jobs::{Bench, given_up},
};
use slim_lab::{
    Error, Lab, SeededRng, artifacts,
    faults::{
        destroy::{self, Amount, Selector},
        diag::{self, DestroyOutcome, Direction, OpenConnection},
        nft,
    },
    mpi::{Flavor, Job, JobVerdict, Outcome},
    skip::skip,
};

const PROGRAM: &str = "slim_coll";
const RANKS: usize = 4;
/// Bytes of a rank's vector.
const BYTES: usize = 256 << 10;
/// Bytes of a segment, where an algorithm divides messages.
const SEGMENT: usize = 16 << 10;
const LIMIT: Duration = Duration::from_secs(60);
const MS: Duration = Duration::from_millis(1);

/// An algorithm of a collective: the collective's name, the number of the algorithm in coll/tuned (`None`: coll/han), its name.
#[derive(Clone, Copy, Debug)]
struct Algorithm(&'static str, Option<u32>, &'static str);

const ALLREDUCE_DOUBLING: Algorithm = Algorithm("allreduce", Some(3), "recursive doubling");
const ALLREDUCE_RING: Algorithm = Algorithm("allreduce", Some(4), "ring");
const BCAST_PIPELINE: Algorithm = Algorithm("bcast", Some(3), "pipeline");
const ALLTOALL_PAIRWISE: Algorithm = Algorithm("alltoall", Some(2), "pairwise");
const ALLGATHER_RING: Algorithm = Algorithm("allgather", Some(4), "ring");
const REDUCE_SCATTER_RING: Algorithm = Algorithm("reduce_scatter", Some(3), "ring");
const ALLREDUCE_HAN: Algorithm = Algorithm("allreduce", None, "han");

/// All algorithms for four ranks.
const ALL: [Algorithm; 31] = [
    Algorithm("allreduce", Some(1), "linear"),
    Algorithm("allreduce", Some(2), "nonoverlapping"),
    ALLREDUCE_DOUBLING,
    ALLREDUCE_RING,
    Algorithm("allreduce", Some(5), "segmented ring"),
    Algorithm("allreduce", Some(6), "rabenseifner"),
    ALLREDUCE_HAN,
    Algorithm("bcast", Some(1), "linear"),
    Algorithm("bcast", Some(2), "chain"),
    BCAST_PIPELINE,
    Algorithm("bcast", Some(4), "split binary tree"),
    Algorithm("bcast", Some(5), "binary tree"),
    Algorithm("bcast", Some(6), "binomial"),
    Algorithm("bcast", Some(7), "knomial"),
    Algorithm("bcast", Some(8), "scatter, allgather"),
    Algorithm("bcast", Some(9), "scatter, ring"),
    Algorithm("bcast", None, "han"),
    Algorithm("alltoall", Some(1), "linear"),
    ALLTOALL_PAIRWISE,
    Algorithm("alltoall", Some(3), "bruck"),
    Algorithm("alltoall", Some(4), "linear, sync"),
    Algorithm("allgather", Some(1), "linear"),
    Algorithm("allgather", Some(2), "bruck"),
    Algorithm("allgather", Some(3), "recursive doubling"),
    ALLGATHER_RING,
    Algorithm("allgather", Some(5), "neighbor"),
    Algorithm("allgather", None, "han"),
    Algorithm("reduce_scatter", Some(1), "nonoverlapping"),
    Algorithm("reduce_scatter", Some(2), "recursive halving"),
    REDUCE_SCATTER_RING,
    Algorithm("reduce_scatter", Some(4), "butterfly"),
];

impl Algorithm {
    fn options(self) -> Vec<String> {
        let Algorithm(collective, number, _) = self;
        let Some(number) = number else {
            return ["--mca", "coll_han_priority", "100"]
                .map(str::to_owned)
                .into();
        };
        let mut words = vec![
            ("coll_tuned_use_dynamic_rules".into(), "1".into()),
            (
                format!("coll_tuned_{collective}_algorithm"),
                number.to_string(),
            ),
        ];
        let size = format!("coll_tuned_{collective}_algorithm_segmentsize");
        if matches!(collective, "allreduce" | "bcast") {
            words.push((size, SEGMENT.to_string()));
        }
        let option = |(name, value)| ["--mca".to_owned(), name, value];
        words.into_iter().flat_map(option).collect()
    }
}

/// What carries the ranks' messages.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Carrier {
    /// `btl/tcp` without SLIM.
    Bare,
    /// The native component.
    Component,
    /// `btl/tcp` under the preload library.
    Preload,
}

/// A fault, and how long its effects are observed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// All that a kill does, but nothing is killed: the machine's own pauses.
    Sham,
    /// One connection, or all of them, destroyed at a random end.
    Kill(Amount),
    /// The network drops everything for this time.
    Silence(Duration),
    /// The network drops the segments of all present connections for ever, and lets new ones pass.
    Forgotten,
}

impl Fault {
    fn window(self) -> Duration {
        match self {
            Fault::Sham | Fault::Kill(_) => 120 * MS,
            Fault::Silence(time) => 2 * time + 1000 * MS,
            Fault::Forgotten => 5000 * MS,
        }
    }

    /// Slow calls take this many seconds more than the median: much more than the machine's own pauses, if that is possible.
    fn least(self) -> f64 {
        match self {
            Fault::Sham | Fault::Kill(_) => 0.02,
            Fault::Silence(_) | Fault::Forgotten => 0.1,
        }
    }

    /// Carries the fault out. Returns when it began, and the number of connections hit.
    fn carry_out(self, lab: &Lab, rng: &mut SeededRng) -> (f64, usize) {
        let pick = Selector::between_hosts().process(PROGRAM);
        let net = lab.node(usize::from(rng.coin())).net();
        let mut chosen = destroy::list(net, &pick).expect("list connections");
        let begin = now();
        let hit = match self {
            Fault::Sham => 0,
            Fault::Kill(amount) => {
                if amount == Amount::One && chosen.len() > 1 {
                    chosen = vec![chosen.swap_remove(rng.below(chosen.len()))];
                }
                let fates = diag::destroy(net, &chosen).expect("destroy connections");
                fates
                    .iter()
                    .filter(|f| **f == DestroyOutcome::Destroyed)
                    .count()
            }
            Fault::Silence(time) => {
                let rule = nft::Rule::drop().apply_to(lab.nodes());
                thread::sleep(time);
                let report = rule.expect("a firewall").lift();
                report.expect("lift the firewall").packets as usize
            }
            Fault::Forgotten => {
                let connector = |c: &OpenConnection| match c.direction {
                    Direction::Incoming => c.remote.port(),
                    Direction::Outgoing => c.local.port(),
                };
                let ports = chosen.iter().map(connector);
                let rule = nft::Rule::drop().only_ports(ports).apply_to(lab.nodes());
                thread::sleep(self.window());
                let report = rule.expect("a firewall").lift();
                report.expect("lift the firewall").packets as usize
            }
        };
        (begin, hit)
    }
}

/// What a fault did.
struct Effect {
    fault: Fault,
    hit: usize,
    calls: CallsAfter,
    flows: Option<FlowsAfter>,
}

/// What the jobs of this file need.
struct CollBench {
    bench: Bench,
    component: PathBuf,
    program: PathBuf,
}

impl CollBench {
    fn new(test: &str) -> Option<Self> {
        let bench = Bench::new(&format!("coll-{test}"), Flavor::OpenMpi4)?;
        let component = match bench.mpi.component() {
            Ok(dir) => dir,
            Err(error @ Error::Missing { .. }) => {
                skip(test, error);
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        let program = bench.mpi.build_program("slim_coll.c");
        Some(Self {
            bench,
            component,
            program: program.expect("build a test program"),
        })
    }

    /// A job of this algorithm for as long as the file `go-on` exists.
    fn job<'a>(&'a self, lab: &'a Lab, algorithm: Algorithm, carrier: Carrier) -> Job<'a> {
        let go_on = lab.dir().join("go-on");
        fs::write(&go_on, "").expect("write a file");
        let mut job = Job::new(lab, &self.bench.mpi, &self.program)
            .ranks(RANKS)
            .arg(algorithm.0)
            .arg(BYTES.to_string())
            .arg("0.1")
            .arg(lab.dir())
            .arg(go_on)
            .option("--oversubscribe");
        // The nodes share this machine's cores: a rank that waits must let others run.
        let yields = ["--mca", "mpi_yield_when_idle", "1"].map(str::to_owned);
        for word in yields.into_iter().chain(algorithm.options()) {
            job = job.option(word);
        }
        match carrier {
            Carrier::Bare => return job,
            Carrier::Component => job = job.component(&self.component),
            Carrier::Preload => {
                job = job.preload(artifacts::preload().expect("the preload library"));
            }
        }
        job.env("SLIM_EVENTS", events_dir(lab).join("%h.%p.jsonl"))
    }

    /// Runs a job under these faults. The effects are those of a run with all words right.
    fn run(
        &self,
        algorithm: Algorithm,
        carrier: Carrier,
        faults: &[Fault],
        seed: u64,
    ) -> Result<(f64, Vec<Effect>), String> {
        let mut lab = self.bench.lab(1);
        let job = self.job(&lab, algorithm, carrier);
        let mut times = Vec::new();
        let rng = &mut SeededRng::new(seed);
        let outcome = self.bench.run(&lab, &job, LIMIT, |job| {
            for fault in faults {
                thread::sleep(rng.between(5 * MS, 25 * MS));
                let began = Instant::now();
                times.push((*fault, fault.carry_out(&lab, rng)));
                thread::sleep(fault.window().saturating_sub(began.elapsed()));
                if !job.running().is_running() {
                    break;
                }
            }
            fs::remove_file(lab.dir().join("go-on")).expect("remove a file");
            format!("{algorithm:?} {carrier:?} SLIM_LAB_SEED={seed}")
        });
        if let Err(error) = check(&lab, &outcome, carrier) {
            let kept = lab.keep_dir().display();
            return Err(format!("{error}\nkept {kept}"));
        }
        let (calls, events) = (Calls::read(lab.dir(), RANKS), Events::read(&lab));
        let effect = |&(fault, (begin, hit)): &(Fault, (f64, usize))| {
            let end = begin + fault.window().as_secs_f64();
            Effect {
                fault,
                hit,
                calls: calls.between(begin, end, fault.least()),
                flows: FlowsAfter::between(&events, begin, end),
            }
        };
        Ok((calls.median_ms(), times.iter().map(effect).collect()))
    }
}

fn check(lab: &Lab, outcome: &Outcome, carrier: Carrier) -> Result<(), String> {
    let verdict = outcome.verdict();
    if !matches!(verdict, JobVerdict::Finished(_)) {
        return Err(format!("{verdict}\n{}", outcome.tail(20)));
    }
    if carrier == Carrier::Bare {
        return Ok(());
    }
    given_up(lab, outcome)
}

const KILL_ONE: Fault = Fault::Kill(Amount::One);
const KILL_ALL: Fault = Fault::Kill(Amount::All);

/// A few kills in a few algorithms. All words are right, each kill hit a connection, and each was resumed.
fn survives(test: &str, carrier: Carrier, algorithms: &[Algorithm]) {
    let Some(bench) = CollBench::new(test) else {
        return;
    };
    for algorithm in algorithms {
        let faults = [KILL_ONE, KILL_ALL, KILL_ONE, KILL_ALL, KILL_ONE, KILL_ALL];
        let seed = SeededRng::seed_from_env();
        let run = bench.run(*algorithm, carrier, &faults, seed);
        let (_, effects) = run.unwrap_or_else(|e| panic!("{algorithm:?}: {e}"));
        assert_eq!(effects.len(), faults.len());
        for effect in &effects {
            // Ranks connect when they first talk: an algorithm may use only some of the pairs.
            let least = if effect.fault == KILL_ALL { 2 } else { 1 };
            assert!(effect.hit >= least, "{algorithm:?}: {} hit", effect.hit);
        }
        let resumed = effects.iter().filter_map(|e| e.flows).map(|f| f.flows);
        let resumed = resumed.sum::<usize>();
        assert!(resumed >= faults.len(), "{algorithm:?}: {resumed} resumed");
    }
}

#[test]
fn collectives_by_the_component_survive_kills() {
    let algorithms = [ALLREDUCE_RING, ALLTOALL_PAIRWISE, ALLREDUCE_HAN];
    survives("component", Carrier::Component, &algorithms);
}

#[test]
fn collectives_under_the_preload_library_survive_kills() {
    let algorithms = [ALLREDUCE_DOUBLING, BCAST_PIPELINE];
    survives("preload", Carrier::Preload, &algorithms);
}

/// The counterpart: without SLIM such a job does not finish. One kill is not enough: `btl/tcp` makes a connection anew if nothing
/// was under way on it.
#[test]
fn without_slim_a_collective_does_not_survive_kills() {
    let Some(bench) = CollBench::new("bare") else {
        return;
    };
    assert!(!bare_survives(&bench, ALLREDUCE_RING), "it finished");
}

fn bare_survives(bench: &CollBench, algorithm: Algorithm) -> bool {
    let lab = bench.bench.lab(1);
    let job = bench.job(&lab, algorithm, Carrier::Bare);
    let rng = &mut SeededRng::new(1);
    // A short limit is enough to detect a hang.
    let outcome = bench.bench.run(&lab, &job, 3000 * MS, |job| {
        let mut hit = 0;
        for _ in 0..20 {
            if !job.running().is_running() {
                break;
            }
            hit += KILL_ALL.carry_out(&lab, rng).1;
            thread::sleep(rng.between(20 * MS, 60 * MS));
        }
        fs::remove_file(lab.dir().join("go-on")).expect("remove a file");
        format!("{algorithm:?}, without SLIM, {hit} killed")
    });
    matches!(outcome.verdict(), JobVerdict::Finished(_))
}

/// A row of a table: medians over the effects of one kind of fault, the longest pause, and the most that knowledge would save.
fn row(what: &str, effects: &[Effect]) {
    let hit: Vec<&Effect> = effects.iter().collect();
    let of_calls = |of: fn(&CallsAfter) -> f64| hit.iter().map(|e| of(&e.calls)).collect();
    let flows: Vec<FlowsAfter> = hit.iter().filter_map(|e| e.flows).collect();
    let of_flows = |of: fn(&FlowsAfter) -> f64| flows.iter().map(of).collect();
    let most = |all: Vec<f64>| all.into_iter().fold(f64::NAN, f64::max);
    println!(
        "row: {what} | n {} | pause {:.1}, most {:.1} | done {:.1}, most {:.1} | finished {:.0} | \
         slow: {:.0} ranks, {:.0} calls, total {:.0}, most {:.0} | flows {:.0} | first {:.1} | last {:.1}, most {:.1} | \
         spread {:.1} | saving {:.1}, most {:.1}",
        hit.len(),
        median(of_calls(|c| c.pause)),
        most(of_calls(|c| c.pause)),
        median(of_calls(|c| c.done)),
        most(of_calls(|c| c.done)),
        median(of_calls(|c| c.finished as f64)),
        median(of_calls(|c| c.ranks as f64)),
        median(of_calls(|c| c.calls as f64)),
        median(of_calls(|c| c.total)),
        most(of_calls(|c| c.total)),
        median(of_flows(|f| f.flows as f64)),
        median(of_flows(|f| f.first)),
        median(of_flows(|f| f.last)),
        most(of_flows(|f| f.last)),
        median(of_flows(|f| f.spread)),
        median(of_flows(|f| f.saving)),
        most(of_flows(|f| f.saving)),
    );
}

/// Runs each algorithm under the faults, by each carrier in turn, and prints rows for each kind of fault.
fn measure(test: &str, algorithms: &[Algorithm], kinds: &[Fault], faults: &[Fault], turns: u64) {
    let Some(bench) = CollBench::new(test) else {
        return;
    };
    let (mut right, mut wrong) = (0, Vec::new());
    for algorithm in algorithms {
        let mut effects = [Vec::new(), Vec::new()];
        let mut medians = [Vec::new(), Vec::new()];
        for turn in 0..turns {
            for (i, carrier) in [Carrier::Component, Carrier::Preload]
                .into_iter()
                .enumerate()
            {
                match bench.run(*algorithm, carrier, faults, turn + 1) {
                    Ok((median, found)) => {
                        right += 1;
                        medians[i].push(median);
                        effects[i].extend(found);
                    }
                    Err(error) => wrong.push(format!("{algorithm:?} {carrier:?}: {error}")),
                }
            }
        }
        for (i, carrier) in ["component", "preload"].into_iter().enumerate() {
            let (mut all, call) = (
                std::mem::take(&mut effects[i]),
                median(medians[i].split_off(0)),
            );
            for kind in kinds {
                let some;
                (some, all) = all.into_iter().partition(|e| e.fault == *kind);
                let Algorithm(collective, _, name) = algorithm;
                row(
                    &format!("{collective} {name} | {carrier} | call {call:.2} | {kind:?}"),
                    &some,
                );
            }
        }
    }
    println!("{right} of {} runs right", right + wrong.len());
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Kills in every algorithm.
#[test]
#[ignore = "a measurement of some minutes"]
fn kills_in_every_algorithm() {
    let kinds = [Fault::Sham, KILL_ONE, KILL_ALL];
    let faults: Vec<Fault> = kinds.into_iter().cycle().take(15).collect();
    measure("kills", &ALL, &kinds, &faults, 1);
}

/// Outages that no kernel reports.
#[test]
#[ignore = "a measurement of some minutes"]
fn silence_in_some_algorithms() {
    let [short, long] = [300 * MS, 2000 * MS].map(Fault::Silence);
    let kinds = [short, long, Fault::Forgotten];
    let faults = [short, Fault::Forgotten, short, long, Fault::Forgotten];
    let algorithms = [
        ALLREDUCE_DOUBLING,
        ALLTOALL_PAIRWISE,
        ALLREDUCE_RING,
        ALLREDUCE_HAN,
        BCAST_PIPELINE,
        ALLGATHER_RING,
        REDUCE_SCATTER_RING,
    ];
    measure("silence", &algorithms, &kinds, &faults, 1);
}

/// Bare jobs: kills in every algorithm.
#[test]
#[ignore = "a measurement of a minute"]
fn bare_jobs_do_not_survive() {
    let Some(bench) = CollBench::new("bare-all") else {
        return;
    };
    let survivors: Vec<&Algorithm> = ALL.iter().filter(|a| bare_survives(&bench, **a)).collect();
    println!("bare: {} of {} runs right", survivors.len(), ALL.len());
    assert!(survivors.is_empty(), "{survivors:?}");
}
