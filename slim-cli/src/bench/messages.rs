//! How fast MPI moves messages: every contender in every round, one after the other.

use std::fmt;
use std::fs;
use std::time::Duration;

use clap::ValueEnum;
use netem_tests::faults::shape::{self, Shape};
use netem_tests::mpi::{Flavor, Job, Mpi};
use netem_tests::{Error, Lab};
use serde::{Deserialize, Serialize};

use super::contender::{self, Contender, Ready};
use super::stats::{self, Comparison};
use crate::failure::Failure;

/// What `slim_bench.c` can measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Test {
    /// Half of the round trip of a ping-pong.
    Latency,
    /// Windows of 16 messages, each answered.
    Bandwidth,
    /// Windows of 64 small messages, each answered.
    Rate,
    /// A sum over four ranks.
    Allreduce,
    /// Everybody to everybody, four ranks.
    Alltoall,
}

impl Test {
    /// All of them.
    pub const ALL: [Test; 5] = [
        Test::Latency,
        Test::Bandwidth,
        Test::Rate,
        Test::Allreduce,
        Test::Alltoall,
    ];

    /// Is a smaller figure the better one?
    pub fn less_is_better(self) -> bool {
        !matches!(self, Self::Bandwidth | Self::Rate)
    }

    /// Ranks that take part.
    pub fn ranks(self) -> usize {
        match self {
            Self::Latency | Self::Bandwidth | Self::Rate => 2,
            Self::Allreduce | Self::Alltoall => 4,
        }
    }

    /// Message sizes in bytes.
    fn sizes(self, quick: bool) -> &'static [u32] {
        const KIB: u32 = 1 << 10;
        const MIB: u32 = 1 << 20;
        match (self, quick) {
            (Self::Latency, false) => &[8, 64, 512, 4 * KIB, 32 * KIB, 256 * KIB, MIB, 4 * MIB],
            (Self::Latency, true) => &[8, 32 * KIB],
            (Self::Bandwidth, false) => &[
                4 * KIB,
                16 * KIB,
                64 * KIB,
                256 * KIB,
                MIB,
                4 * MIB,
                16 * MIB,
            ],
            (Self::Bandwidth, true) => &[64 * KIB, MIB],
            (Self::Rate, _) => &[64],
            (Self::Allreduce | Self::Alltoall, false) => &[8, KIB, 64 * KIB],
            (Self::Allreduce | Self::Alltoall, true) => &[8],
        }
    }
}

impl fmt::Display for Test {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Latency => "latency",
            Self::Bandwidth => "bandwidth",
            Self::Rate => "rate",
            Self::Allreduce => "allreduce",
            Self::Alltoall => "alltoall",
        })
    }
}

/// What to do.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Which MPI.
    pub flavor: Flavor,
    /// What is measured against bare.
    pub against: Vec<Ready>,
    /// Which tests.
    pub tests: Vec<Test>,
    /// How often each contender runs.
    pub rounds: usize,
    /// How long one figure is measured.
    pub each: Duration,
    /// Fewer sizes.
    pub quick: bool,
    /// The line's speed in kilobits a second, if it is to be limited.
    pub rate_kbit: Option<u64>,
}

/// Everything that was measured.
#[derive(Debug, Serialize)]
pub struct Measured {
    /// Which MPI.
    pub mpi: String,
    /// What limits the line.
    pub line: String,
    /// To how many kilobits a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate_kbit: Option<u64>,
    /// How often each contender ran.
    pub rounds: usize,
    /// The contenders, bare first.
    pub contenders: Vec<Contender>,
    /// By test and size.
    pub points: Vec<Point>,
}

/// One test with one size.
#[derive(Debug, Serialize)]
pub struct Point {
    /// The test.
    pub test: Test,
    /// Bytes in a message.
    pub bytes: u32,
    /// Unit of the figures.
    pub unit: String,
    /// The contenders' figures, one for each round.
    pub runs: Vec<Run>,
}

/// The figures of one contender.
#[derive(Debug, Serialize)]
pub struct Run {
    /// Whose.
    pub contender: Contender,
    /// One for each round.
    pub values: Vec<f64>,
    /// In the middle.
    pub median: f64,
    /// Against bare, if this is not bare itself and there was more than one round.
    pub compared: Option<Comparison>,
}

/// A line that `slim_bench` prints.
#[derive(Debug, Deserialize)]
struct Figure {
    test: Test,
    bytes: u32,
    value: f64,
    unit: String,
}

impl Plan {
    /// Runs all of it. `told` gets a line for each job.
    pub fn measure(&self, told: impl Fn(&str)) -> Result<Measured, Failure> {
        let input = |e: Error| Failure::input(e.to_string());
        let mpi = Mpi::find(self.flavor).map_err(input)?;
        let program = mpi.build_program("slim_bench.c").map_err(input)?;
        let lab = Lab::builder().nodes(2).name("bench").build();
        let lab = lab.map_err(input)?;
        let guards = self.shape(&lab)?;
        let mut points: Vec<Point> = Vec::new();
        for round in 1..=self.rounds {
            for ranks in [2, 4] {
                let tests = self.arguments(ranks);
                if tests.is_empty() {
                    continue;
                }
                for ready in &self.against {
                    let job = self.job(&lab, &mpi, &program, ready, ranks, &tests);
                    let figures = run(job, &lab, ready, tests.len())?;
                    self.check_line(&figures)?;
                    told(&format!(
                        "round {round}/{}: {ranks} ranks, {}",
                        self.rounds, ready.contender
                    ));
                    figures
                        .into_iter()
                        .for_each(|figure| add(&mut points, ready.contender, figure));
                }
            }
        }
        points.iter_mut().for_each(Point::compare);
        Ok(Measured {
            mpi: self.flavor.to_string(),
            line: match (guards.first(), self.rate_kbit) {
                (Some(guard), Some(rate)) => {
                    format!("{} Gb/s ({})", rate as f64 / 1e6, guard.discipline())
                }
                _ => "veth, not limited".into(),
            },
            rate_kbit: self.rate_kbit,
            rounds: self.rounds,
            contenders: self.against.iter().map(|r| r.contender).collect(),
            points,
        })
    }

    fn shape(&self, lab: &Lab) -> Result<Vec<shape::Guard>, Failure> {
        let Some(rate) = self.rate_kbit else {
            return Ok(Vec::new());
        };
        lab.nodes()
            .iter()
            .map(|node| Shape::new().rate_kbit(rate).apply(node, 0))
            .collect::<Result<_, _>>()
            .map_err(|e| Failure::failed(e.to_string()))
    }

    /// Figures of a limited line that exceed its limit would be of another line.
    fn check_line(&self, figures: &[Figure]) -> Result<(), Failure> {
        let Some(rate) = self.rate_kbit else {
            return Ok(());
        };
        // Megabytes a second; short measurements see the burst that passes at once.
        let limit = 1.25 * rate as f64 / 8e3;
        let mut bandwidths = figures.iter().filter(|f| f.test == Test::Bandwidth);
        match bandwidths.find(|f| f.value > limit) {
            None => Ok(()),
            Some(figure) => Err(Failure::failed(format!(
                "{:.0} MB/s went over a line that was limited to {:.0}",
                figure.value,
                rate as f64 / 8e3
            ))),
        }
    }

    /// What is measured, in a few words.
    pub fn name(&self) -> String {
        match self.rate_kbit {
            Some(rate) => format!("{}, {} Gb/s", self.flavor, rate as f64 / 1e6),
            None => self.flavor.to_string(),
        }
    }

    /// About how long it will take.
    pub fn estimate(&self) -> Duration {
        // Bits a second; lines without a limit here do about as much for one pair of ranks.
        let speed = self.rate_kbit.unwrap_or(8_000_000) as f64 * 1e3;
        let mut run = Duration::ZERO;
        for test in &self.tests {
            let window = if *test == Test::Bandwidth { 16.0 } else { 2.0 };
            for bytes in test.sizes(self.quick) {
                // Finding out how often to repeat takes as long again; a part is one repetition at least.
                let least = 6.0 * window * 8.0 * f64::from(*bytes) / speed;
                run += (self.each * 2).max(Duration::from_secs_f64(least));
            }
        }
        // To start a job and end it, for two ranks and for four.
        run += Duration::from_secs(3);
        run * self.rounds as u32 * self.against.len() as u32
    }

    fn arguments(&self, ranks: usize) -> Vec<String> {
        let tests = self.tests.iter().filter(|test| test.ranks() == ranks);
        tests
            .flat_map(|test| {
                let sizes = test.sizes(self.quick).iter();
                sizes.map(move |bytes| format!("{test}:{bytes}"))
            })
            .collect()
    }

    fn job<'a>(
        &self,
        lab: &'a Lab,
        mpi: &'a Mpi,
        program: &std::path::Path,
        ready: &Ready,
        ranks: usize,
        tests: &[String],
    ) -> Job<'a> {
        let mut job = Job::new(lab, mpi, program).ranks(ranks);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        if ranks > cores {
            // Ranks that share a core must not spin while they wait for each other.
            job = match self.flavor {
                Flavor::Mpich => job.env("MPIR_CVAR_POLLS_BEFORE_YIELD", "1"),
                Flavor::OpenMpi4 | Flavor::OpenMpi5 => job
                    .option("--mca")
                    .option("mpi_yield_when_idle")
                    .option("1"),
            };
        }
        if let Some(library) = &ready.library {
            job = job.preload(library);
        }
        job = match ready.contender {
            Contender::Bare | Contender::Mptcp => job,
            Contender::Slim => job.env("SLIM_EVENTS", lab.dir().join("%h.%p.jsonl")),
            Contender::Framed => job.env("SLIM_FRAMED_LOG", contender::frames_log(lab.dir())),
        };
        tests
            .iter()
            .fold(job.arg(self.each.as_millis().to_string()), Job::arg)
    }
}

/// Runs one job to its end and reads its figures.
fn run(job: Job<'_>, lab: &Lab, ready: &Ready, expected: usize) -> Result<Vec<Figure>, Failure> {
    // Of the last job: whether this one used what it should must be seen from its own.
    for old in fs::read_dir(lab.dir()).into_iter().flatten().flatten() {
        let path = old.path();
        if path
            .extension()
            .is_some_and(|e| e == "jsonl" || e == "json")
        {
            let _ = fs::remove_file(path);
        }
    }
    let limit = Duration::from_secs(60) + Duration::from_secs(30) * expected as u32;
    let started = job.start().map_err(|e| Failure::failed(e.to_string()))?;
    let outcome = started.wait(limit);
    let figures: Vec<Figure> = outcome
        .lines
        .iter()
        .filter_map(|line| serde_json::from_str(&line.text).ok())
        .collect();
    if !outcome.status.is_some_and(|s| s.success()) || figures.len() != expected {
        return Err(Failure::failed(format!(
            "a job of {} gave {} of {expected} figures ({}); it said:\n{}",
            ready.contender,
            figures.len(),
            outcome
                .status
                .map_or("not ended in time".into(), |s| s.to_string()),
            outcome.tail(20)
        )));
    }
    ready.contender.was_used(lab, lab.dir())?;
    Ok(figures)
}

fn add(points: &mut Vec<Point>, contender: Contender, figure: Figure) {
    let known = |p: &Point| p.test == figure.test && p.bytes == figure.bytes;
    let at = points.iter().position(known).unwrap_or_else(|| {
        points.push(Point {
            test: figure.test,
            bytes: figure.bytes,
            unit: figure.unit.clone(),
            runs: Vec::new(),
        });
        points.len() - 1
    });
    let runs = &mut points[at].runs;
    match runs.iter_mut().find(|run| run.contender == contender) {
        Some(run) => run.values.push(figure.value),
        None => runs.push(Run {
            contender,
            values: vec![figure.value],
            median: 0.0,
            compared: None,
        }),
    }
}

impl Point {
    fn compare(&mut self) {
        let bare = self.runs.iter().find(|r| r.contender == Contender::Bare);
        let bare = bare.map(|r| r.values.clone()).unwrap_or_default();
        for run in &mut self.runs {
            run.median = stats::median(&run.values).unwrap_or(0.0);
            if run.contender != Contender::Bare {
                run.compared = Comparison::new(&bare, &run.values, self.test.less_is_better());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_the_same_point_come_together() {
        let mut points = Vec::new();
        let line = |value| {
            let text = format!(
                "{{\"test\":\"latency\",\"bytes\":8,\"value\":{value},\"unit\":\"us\",\"iterations\":9}}"
            );
            serde_json::from_str(&text).unwrap()
        };
        for (bare, slim) in [(5.0, 5.1), (5.0, 5.2)] {
            add(&mut points, Contender::Bare, line(bare));
            add(&mut points, Contender::Slim, line(slim));
        }
        points.iter_mut().for_each(Point::compare);
        assert_eq!(points.len(), 1);
        let [bare, slim] = &points[0].runs[..] else {
            panic!("{points:?}")
        };
        assert_eq!((bare.median, bare.compared.is_none()), (5.0, true));
        let compared = slim.compared.as_ref().unwrap();
        assert!((compared.ratio - 1.03).abs() < 1e-9, "{compared:?}");
        assert!(compared.verdict.to_string().contains("worse"));
    }

    #[test]
    fn every_size_is_a_multiple_of_a_double() {
        for test in Test::ALL {
            for quick in [false, true] {
                assert!(test.sizes(quick).iter().all(|bytes| bytes % 8 == 0));
            }
        }
    }
}
