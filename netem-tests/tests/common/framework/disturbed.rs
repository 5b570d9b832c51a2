//! Jobs whose connections are killed all the time: their results, and how long the outages last.

use std::{collections::BTreeSet, ops::Range, time::Duration};

use slim_lab::Lab;

use super::{
    super::{
        events::{Events, Outage, word},
        lab,
    },
    How, Outcome,
    jobs::{Extent, Job},
};

/// Time limit for a run whose result is wanted, and for a long one that is measured.
const LIMIT: Duration = Duration::from_secs(120);
const LONG_LIMIT: Duration = Duration::from_secs(300);
/// Time limit for a run without SLIM whose connections are killed: some programs hang.
const BARE_LIMIT: Duration = Duration::from_secs(20);

/// Lengths of outages in which the acceptor has made the connection, when the connector's head start was over, in seconds.
const HEAD_START: Range<f64> = 0.005..0.0075;

/// Longest outages, in milliseconds: of the shorter half, and of 9 in 10. An idle machine keeps them to a millisecond, and where the
/// acceptor waits for the connector, to seven. On a machine with five runnable threads for each processor, half have lasted 2 ms, and 99 of
/// 100 less than 40. A resume whose first attempt fails takes longer than the first limit.
const HALF: f64 = 25.0;
const MOST: f64 = 150.0;

const QUIET: How = How {
    slim: false,
    kills: false,
    haste: 1,
    limit: LIMIT,
};
const DISTURBED: How = How {
    slim: true,
    kills: true,
    ..QUIET
};

/// The kills of some runs, and the outages that followed.
#[derive(Default)]
pub struct Disturbances {
    pub kills: usize,
    /// Lengths of the outages, in seconds ([`Outage`]).
    pub outages: Vec<f64>,
    /// Their part in which both programs could have waited for the connection ([`Outage::pause`]).
    pub pauses: Vec<f64>,
    /// How many of them lasted as long as the acceptor waits for the connector, which did not use the connection and had to be told.
    pub head_starts: usize,
    /// From the kill until both ends have another connection, in seconds. Longer than the outage if no program used the connection
    /// for a while.
    pub since_kill: Vec<f64>,
}

impl Disturbances {
    /// Adds a run.
    fn add(&mut self, kills: &[f64], outages: &[Outage]) {
        self.kills += kills.len();
        for outage in outages {
            self.outages.push(outage.length());
            self.pauses.push(outage.pause());
            self.head_starts += usize::from(outage.told && HEAD_START.contains(&outage.length()));
            let before = kills.partition_point(|kill| *kill <= outage.begin);
            let kill = before.checked_sub(1).map(|last| kills[last]);
            self.since_kill.extend(kill.map(|kill| outage.end - kill));
        }
        for all in [&mut self.outages, &mut self.pauses, &mut self.since_kill] {
            all.sort_by(f64::total_cmp);
        }
    }
}

/// Of sorted times in seconds, the one that so many of 100 do not exceed, in milliseconds.
pub fn within(sorted: &[f64], of_100: usize) -> f64 {
    let n = (sorted.len() * of_100).div_ceil(100);
    sorted.get(n.saturating_sub(1)).unwrap_or(&0.0) * 1e3
}

/// Runs a job. A lab for each run: some frameworks cannot listen at a port that the last run has used a moment ago.
fn run(job: &Job, way: &str, extent: Extent, how: How) -> Option<(Outcome, Lab)> {
    let framework = &job.framework;
    let lab = lab(&format!("{}-{way}", framework.name), 2, 1)?;
    let parts = (job.parts)(&lab, &framework.python(), extent);
    Some((framework.run(&lab, parts, how), lab))
}

/// The result of an undisturbed run. `None` if there can be no lab.
fn right_result(
    job: &Job,
    extent: Extent,
    limit: Duration,
) -> Option<(BTreeSet<String>, Duration)> {
    let name = job.framework.name;
    let (undisturbed, _) = run(job, "quiet", extent, How { limit, ..QUIET })?;
    let digests = undisturbed.digests.expect("an undisturbed run");
    assert_eq!(digests.len(), 1, "{name}: {digests:?}");
    Some((digests, undisturbed.took))
}

/// The test of one framework.
pub fn rides_through(test: &str, job: &Job) {
    let framework = &job.framework;
    if !framework.is_there(test) {
        return;
    }
    let name = framework.name;
    let extent = Extent {
        per_node: 2,
        steps: job.steps,
        in_turns: false,
    };
    let Some((digests, took)) = right_result(job, extent, LIMIT) else {
        return;
    };
    let (slim, lab) = run(job, "killed", extent, DISTURBED).expect("a second lab");
    let events = Events::read(&lab);
    let resumed: BTreeSet<_> = events.of_kind("resume").map(|e| word(e, "host")).collect();
    let mut disturbances = Disturbances::default();
    disturbances.add(&slim.kills, &events.outages());
    let [half, most, longest] = [50, 90, 100].map(|n| within(&disturbances.outages, n));
    println!(
        "{name}: {took:.1?} undisturbed; {:.1?} under SLIM with {} connections killed; {events}; outages of {half:.2} ms (half), \
         {most:.2} ms (9 of 10), {longest:.2} ms (longest)",
        slim.took,
        slim.kills.len(),
    );
    let killed = slim.kills.len();
    assert_eq!(slim.digests, Ok(digests.clone()), "{killed} killed");
    assert!(killed >= 10, "{name}: only {killed} killed");
    assert_eq!(resumed.len(), 2, "{name}: resumed on {resumed:?}");
    let wrong = events.wrongly_given_up(slim.done);
    assert!(wrong.is_empty(), "{name}: {wrong:#?}");
    assert!(half <= HALF && most <= MOST, "{name}: {half} and {most} ms");

    if !framework.repeats {
        let bare = How {
            slim: false,
            limit: BARE_LIMIT,
            ..DISTURBED
        };
        let (bare, _) = run(job, "bare", extent, bare).expect("a third lab");
        let killed = bare.kills.len();
        println!("{name}: bare, {killed} killed: {:?}", bare.digests);
        assert!(bare.digests != Ok(digests), "{name}: {killed} killed");
    }
}

/// Runs a long job until so many connections have been killed, checks its results, and prints what happened in outages with a pause
/// longer than `long`. `None` if there can be no lab.
pub fn measure(
    job: &Job,
    per_node: usize,
    (kills, haste): (usize, u32),
    long: Duration,
) -> Option<Disturbances> {
    let name = job.framework.name;
    let extent = Extent {
        per_node,
        steps: 4 * job.steps,
        in_turns: false,
    };
    let (digests, _) = right_result(job, extent, LONG_LIMIT)?;
    let mut all = Disturbances::default();
    while all.kills < kills {
        let how = How {
            haste,
            limit: LONG_LIMIT,
            ..DISTURBED
        };
        let (outcome, lab) = run(job, "killed", extent, how)?;
        let events = Events::read(&lab);
        assert_eq!(outcome.digests, Ok(digests.clone()), "{name}");
        let wrong = events.wrongly_given_up(outcome.done);
        assert!(wrong.is_empty(), "{name}: {wrong:#?}");
        let outages = events.outages();
        for outage in outages.iter().filter(|o| o.pause() > long.as_secs_f64()) {
            println!(
                "{name}: {:.2} ms:\n{}",
                outage.pause() * 1e3,
                events.during(outage)
            );
        }
        all.add(&outcome.kills, &outages);
    }
    Some(all)
}
