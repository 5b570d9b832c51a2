//! Measures how fast MPI moves messages. In every round there is one job of each contender, and these take turns.

use std::time::Duration;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use slim_lab::Error;
use slim_lab::faults::shape::{self, Shape};
use slim_lab::mpi::{Flavor, Mpi};
use strum::{Display, VariantArray};

use super::contender::{Contender, Ready};
use super::round::{Round, TurnPace, Turns};
use super::site::Site;
use super::stats::{self, Comparison};
use crate::failure::CliError;

/// What `slim_bench.c` can measure.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum, Display, VariantArray,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Test {
    /// Half of the round trip of a ping-pong.
    Latency,
    /// Windows of 16 messages, each answered.
    Bandwidth,
    /// Windows of 64 small messages, each answered.
    Rate,
    /// An allreduce over four ranks.
    Allreduce,
    /// An all-to-all over four ranks.
    Alltoall,
    /// The messages of the all-to-all over plain sockets: the limit that the system calls set. Only if asked for.
    Exchange,
}

impl Test {
    /// Is a smaller figure the better one?
    pub fn less_is_better(self) -> bool {
        !matches!(self, Self::Bandwidth | Self::Rate)
    }

    /// Number of ranks that take part.
    pub fn ranks(self) -> usize {
        match self {
            Self::Latency | Self::Bandwidth | Self::Rate => 2,
            Self::Allreduce | Self::Alltoall | Self::Exchange => 4,
        }
    }

    /// The tests to run if none are named.
    pub fn usual() -> Vec<Self> {
        let usual = Self::VARIANTS.iter().copied();
        usual.filter(|test| *test != Self::Exchange).collect()
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
            (Self::Exchange, _) => &[8, KIB],
        }
    }
}

/// What to do.
#[derive(Clone, Debug)]
pub struct MessagePlan {
    /// The MPI implementation.
    pub flavor: Flavor,
    /// The contenders, bare first.
    pub against: Vec<Ready>,
    /// The tests.
    pub tests: Vec<Test>,
    /// Number of jobs of each contender, one after the other.
    pub rounds: usize,
    /// Total time of all turns of one contender with one test and size, in one round.
    pub each: Duration,
    /// Use fewer sizes.
    pub quick: bool,
    /// The speed of the lab's line in kilobits a second, if it is limited.
    pub rate_kbit: Option<u64>,
    /// The adapters of this host that the ranks use; none: they run in a lab.
    pub adapters: Option<[String; 2]>,
}

/// All results.
#[derive(Debug, Serialize)]
pub struct MessageFigures {
    /// The MPI implementation.
    pub mpi: String,
    /// Description of the line and its limit.
    pub line: String,
    /// The line's limit in kilobits a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate_kbit: Option<u64>,
    /// Number of jobs of each contender.
    pub rounds: usize,
    /// The contenders, bare first.
    pub contenders: Vec<Contender>,
    /// Results by test and size.
    pub points: Vec<Point>,
}

/// One test with one size.
#[derive(Debug, Serialize)]
pub struct Point {
    /// The test.
    pub test: Test,
    /// Bytes in a message.
    pub bytes: u32,
    /// Unit of the values.
    pub unit: String,
    /// The values of each contender.
    pub runs: Vec<ContenderRun>,
}

/// The values of one contender.
#[derive(Debug, Serialize)]
pub struct ContenderRun {
    /// The contender.
    pub contender: Contender,
    /// The values by round, one for each turn.
    pub rounds: Vec<Vec<f64>>,
    /// Median of all turns.
    pub median: f64,
    /// Comparison with bare, if this is not bare itself and there were enough turns.
    pub compared: Option<Comparison>,
}

/// Approximate length of a turn. It is shorter than the scheduler's time slice, so that other load on the core disturbs few
/// turns, which do not move the median. It is long enough that the wake-up before it hardly counts.
/// docs/design/measuring.md has measurements with longer turns.
const TURN: Duration = Duration::from_millis(2);
/// On a limited line, a turn takes at least as long as the line needs for this many times the burst that passes at once after
/// a pause. The eighth of a turn before the clock starts then uses the burst up.
const BURSTS: u32 = 32;

impl MessagePlan {
    /// Runs all measurements. `told` gets a line for the jobs of each round.
    pub fn measure(&self, told: impl Fn(&str)) -> Result<MessageFigures, CliError> {
        let input = |e: Error| CliError::input(e.to_string());
        let mpi = Mpi::find(self.flavor).map_err(input)?;
        let program = mpi.build_program("slim_bench.c").map_err(input)?;
        let site = Site::make(self.adapters.as_ref())?;
        let guards = self.shape(&site)?;
        let mut points: Vec<Point> = Vec::new();
        for round in 1..=self.rounds {
            for ranks in [2, 4] {
                let tests = self.tests.iter().filter(|test| test.ranks() == ranks);
                let tests: Vec<_> = tests.collect();
                if tests.is_empty() {
                    continue;
                }
                let mut jobs = Round::start(&site, &mpi, &program, round, ranks, &self.against)?;
                for test in tests {
                    for bytes in test.sizes(self.quick) {
                        let turns = jobs.measure(*test, *bytes, self.pace())?;
                        self.check_line(*test, &turns)?;
                        self.add(&mut points, *test, *bytes, turns);
                    }
                }
                jobs.end()?;
                told(&format!("round {round}/{}: {ranks} ranks", self.rounds));
            }
        }
        points.iter_mut().for_each(Point::compare);
        Ok(MessageFigures {
            mpi: self.flavor.to_string(),
            line: match (guards.first(), self.rate_kbit) {
                (Some(guard), Some(rate)) => {
                    format!("{} Gb/s ({})", rate as f64 / 1e6, guard.discipline())
                }
                _ => site.line(),
            },
            rate_kbit: self.rate_kbit,
            rounds: self.rounds,
            contenders: self.against.iter().map(|r| r.contender).collect(),
            points,
        })
    }

    fn shape(&self, site: &Site) -> Result<Vec<shape::ShapeGuard>, CliError> {
        let (Some(rate), Site::Lab(lab)) = (self.rate_kbit, site) else {
            return Ok(Vec::new());
        };
        lab.nodes()
            .iter()
            .map(|node| Shape::new().rate_kbit(rate).apply(node, 0))
            .collect::<Result<_, _>>()
            .map_err(|e| CliError::failed(e.to_string()))
    }

    /// Checks that no value exceeds the limit of the line: otherwise the limit is not in force.
    fn check_line(&self, test: Test, turns: &Turns) -> Result<(), CliError> {
        let Some(rate) = self.rate_kbit.filter(|_| test == Test::Bandwidth) else {
            return Ok(());
        };
        // Megabytes a second.
        let limit = rate as f64 / 8e3;
        let mut medians = turns.values.iter().filter_map(|v| stats::median(v));
        // The margin is for short measurements, which include the burst that passes at once.
        match medians.find(|median| *median > 1.25 * limit) {
            None => Ok(()),
            Some(median) => Err(CliError::failed(format!(
                "{median:.0} MB/s went over a line that was limited to {limit:.0}"
            ))),
        }
    }

    /// Length and number of the turns.
    fn pace(&self) -> TurnPace {
        let burst = self.rate_kbit.map_or(Duration::ZERO, |rate| {
            Duration::from_secs_f64(f64::from(shape::burst(rate)) * 8.0 / (rate as f64 * 1e3))
        });
        let turn = TURN.max(burst * BURSTS);
        TurnPace {
            turn: turn.min(self.each / 4),
            each: self.each,
            // All rounds together have enough turns for an interval.
            least: stats::LEAST
                .div_ceil(self.rounds.max(1))
                .next_multiple_of(2),
        }
    }

    fn add(&self, points: &mut Vec<Point>, test: Test, bytes: u32, turns: Turns) {
        let known = |p: &Point| p.test == test && p.bytes == bytes;
        let at = points.iter().position(known).unwrap_or_else(|| {
            let run = |ready: &Ready| ContenderRun {
                contender: ready.contender,
                rounds: Vec::new(),
                median: 0.0,
                compared: None,
            };
            points.push(Point {
                test,
                bytes,
                unit: turns.unit,
                runs: self.against.iter().map(run).collect(),
            });
            points.len() - 1
        });
        for (run, values) in points[at].runs.iter_mut().zip(turns.values) {
            run.rounds.push(values);
        }
    }

    /// A short name of the measurement.
    pub fn name(&self) -> String {
        match self.rate_kbit {
            Some(rate) => format!("{}, {} Gb/s", self.flavor, rate as f64 / 1e6),
            None => self.flavor.to_string(),
        }
    }

    /// The approximate duration.
    pub fn estimate(&self) -> Duration {
        // Bits a second. A line without a limit carries about 8 Gb/s here for one pair of ranks.
        let speed = self.rate_kbit.unwrap_or(8_000_000) as f64 * 1e3;
        let pace = self.pace();
        // Start and end of a job of two ranks, and of one of four.
        let mut run = Duration::from_secs(1);
        if self.tests.iter().any(|test| test.ranks() == 4) {
            run += Duration::from_secs(2);
        }
        for test in &self.tests {
            let window = if *test == Test::Bandwidth { 16.0 } else { 2.0 };
            for bytes in test.sizes(self.quick) {
                let once = Duration::from_secs_f64(window * 8.0 * f64::from(*bytes) / speed);
                // Besides: a turn to warm up, and turns of one contender to find the number of repetitions.
                let least = once * (pace.least as u32 + 2);
                // Includes the repetitions before the clock starts, and wake-ups.
                run += (self.each * 5 / 4 + pace.turn * 2).max(least);
            }
        }
        run * self.rounds as u32 * self.against.len() as u32
    }
}

impl Point {
    fn compare(&mut self) {
        let bare = self.runs.iter().find(|r| r.contender == Contender::Bare);
        let bare = bare.map(|r| r.rounds.clone()).unwrap_or_default();
        for run in &mut self.runs {
            run.median = stats::median(&run.rounds.concat()).unwrap_or(0.0);
            if run.contender != Contender::Bare {
                run.compared = Comparison::new(&bare, &run.rounds, self.test.less_is_better());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(rate_kbit: Option<u64>, each: u64) -> MessagePlan {
        let ready = |contender| Ready {
            contender,
            library: None,
            component: None,
        };
        MessagePlan {
            flavor: Flavor::OpenMpi4,
            against: [Contender::Bare, Contender::Slim].map(ready).to_vec(),
            tests: vec![Test::Bandwidth],
            rounds: 2,
            each: Duration::from_millis(each),
            quick: false,
            rate_kbit,
            adapters: None,
        }
    }

    fn turns(values: [f64; 2]) -> Turns {
        Turns {
            unit: "MB/s".into(),
            values: values.map(|v| vec![v; 4]).to_vec(),
        }
    }

    #[test]
    fn values_of_the_same_test_and_size_are_collected_in_one_point() {
        let (plan, mut points) = (plan(None, 300), Vec::new());
        for values in [[100.0, 97.0], [50.0, 49.0]] {
            plan.add(&mut points, Test::Bandwidth, 64, turns(values));
        }
        points.iter_mut().for_each(Point::compare);
        assert_eq!(points.len(), 1);
        let [bare, slim] = &points[0].runs[..] else {
            panic!("{points:?}")
        };
        assert_eq!((bare.median, bare.compared.is_none()), (75.0, true));
        assert_eq!(slim.rounds, [vec![97.0; 4], vec![49.0; 4]]);
        let compared = slim.compared.as_ref().unwrap();
        assert!((compared.ratio - 0.975).abs() < 1e-9, "{compared:?}");
        assert!(compared.verdict.to_string().contains("worse"));
    }

    #[test]
    fn a_line_that_exceeds_its_limit_is_noticed() {
        let plan = plan(Some(1_000_000), 300);
        plan.check_line(Test::Bandwidth, &turns([119.0, 118.0]))
            .unwrap();
        let wrong = plan.check_line(Test::Bandwidth, &turns([119.0, 500.0]));
        assert!(wrong.unwrap_err().to_string().contains("limited to 125"));
        // Other tests have other units.
        plan.check_line(Test::Latency, &turns([500.0; 2])).unwrap();
    }

    #[test]
    fn turns_on_a_limited_line_are_long_enough_to_use_up_the_burst() {
        assert_eq!(plan(None, 80).pace().turn, TURN);
        let fast = plan(Some(10_000_000), 80).pace().turn;
        assert_eq!(fast.as_millis(), 12);
        let slow = plan(Some(1_000_000), 80).pace().turn;
        assert_eq!(slow.as_millis(), 16);
        // The repetitions before the clock starts send more than the burst.
        for (turn, rate) in [(slow, 1_000_000), (fast, 10_000_000)] {
            let asked = turn.as_secs_f64() / 8.0 * rate as f64 * 1e3 / 8.0;
            assert!(asked > f64::from(shape::burst(rate)));
        }
        // Turns are not so long that there are hardly any.
        assert_eq!(plan(Some(1_000_000), 20).pace().turn.as_millis(), 5);
    }

    #[test]
    fn two_rounds_have_enough_turns_for_an_interval() {
        assert_eq!(plan(None, 80).pace().least, 4);
        let many = MessagePlan {
            rounds: 25,
            ..plan(None, 80)
        };
        assert_eq!(many.pace().least, 2);
    }

    #[test]
    fn every_size_is_a_multiple_of_a_double() {
        for &test in Test::VARIANTS {
            for quick in [false, true] {
                assert!(test.sizes(quick).iter().all(|bytes| bytes % 8 == 0));
            }
        }
    }
}
