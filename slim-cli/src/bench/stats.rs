//! Repeated measurements: medians, their intervals, and comparisons.

use serde::Serialize;

/// The median; the mean of the two middle values of an even number. None without values.
pub fn median(values: &[f64]) -> Option<f64> {
    quantile(values, 0.5)
}

/// The quantile `part` (0 to 1), interpolated between neighbours. None without values.
pub fn quantile(values: &[f64], part: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let place = part * sorted.len().checked_sub(1)? as f64;
    let (low, high) = (
        *sorted.get(place.floor() as usize)?,
        *sorted.get(place.ceil() as usize)?,
    );
    Some(low + (high - low) * place.fract())
}

/// Fewer values have no 95 % interval of the median.
pub const LEAST: usize = 6;
/// Probability that the interval misses the true median.
const MISSES: f64 = 0.05;

/// The 95 % confidence interval of the median, by order statistics (Hahn and Meeker, *Statistical Intervals*). It assumes
/// no distribution: each value lies below the median with probability one half, so the number of those that do is
/// binomial. None for fewer than [`LEAST`] values.
pub fn median_interval(values: &[f64]) -> Option<(f64, f64)> {
    let outside = outside(values.len())?;
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    Some((sorted[outside], sorted[sorted.len() - 1 - outside]))
}

/// Number of values to leave out of the interval at each end, of `n` sorted ones.
fn outside(n: usize) -> Option<usize> {
    // By logarithms: 2^-n underflows for n of some thousands.
    let mut term = -(n as f64) * std::f64::consts::LN_2;
    let (mut below, mut left_out) = (0.0, None);
    for k in 0..n / 2 {
        below += term.exp();
        if 2.0 * below > MISSES {
            break;
        }
        left_out = Some(k);
        term += ((n - k) as f64 / (k + 1) as f64).ln();
    }
    left_out
}

/// A contender compared with bare, turn by turn.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Median of the ratios to the bare turn of the same cycle.
    pub ratio: f64,
    /// Lower end of its 95 % interval.
    pub low: f64,
    /// Upper end of the interval.
    pub high: f64,
    /// The conclusion.
    pub verdict: Judgement,
}

/// Conclusion of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Judgement {
    /// Better than bare, by this fraction.
    Better(f64),
    /// Worse than bare, by this fraction.
    Worse(f64),
    /// The interval contains 1: a difference, if any, is smaller than this part.
    Within(f64),
}

impl Comparison {
    /// Compares turns of the same rounds and cycles; `less_is_better` for times. None for a single round, which says
    /// nothing about other jobs, and for too few turns.
    ///
    /// All turns of a round are of the same jobs, so they share what a job has by chance (placement of its memory,
    /// hash collisions of its sockets). The interval of all turns does not include that variation. Therefore the
    /// result also covers the interval of the rounds' medians, or their range if there are fewer than [`LEAST`] rounds;
    /// the range has less than 95 % confidence.
    pub fn new(bare: &[Vec<f64>], other: &[Vec<f64>], less_is_better: bool) -> Option<Self> {
        let of_round = |(bare, other): (&Vec<f64>, &Vec<f64>)| -> Vec<f64> {
            bare.iter().zip(other).map(|(b, o)| o / b).collect()
        };
        let rounds: Vec<Vec<f64>> = bare.iter().zip(other).map(of_round).collect();
        let medians: Vec<f64> = rounds.iter().filter_map(|round| median(round)).collect();
        if medians.len() < 2 {
            return None;
        }
        let turns = rounds.concat();
        let of_turns = median_interval(&turns)?;
        let of_rounds = match median_interval(&medians) {
            Some(interval) => interval,
            None => (quantile(&medians, 0.0)?, quantile(&medians, 1.0)?),
        };
        let ratio = median(&turns)?;
        let (low, high) = (of_turns.0.min(of_rounds.0), of_turns.1.max(of_rounds.1));
        let difference = (ratio - 1.0).abs();
        Some(Self {
            ratio,
            low,
            high,
            verdict: if low <= 1.0 && 1.0 <= high {
                Judgement::Within((1.0 - low).max(high - 1.0))
            } else if (ratio < 1.0) == less_is_better {
                Judgement::Better(difference)
            } else {
                Judgement::Worse(difference)
            },
        })
    }

    /// Is the whole interval on the good side of `goal`? None if it contains the goal.
    pub fn reaches(&self, goal: f64, less_is_better: bool) -> Option<bool> {
        let (good, bad) = match less_is_better {
            true => (self.high <= goal, self.low > goal),
            false => (self.low >= goal, self.high < goal),
        };
        (good || bad).then_some(good)
    }
}

impl std::fmt::Display for Judgement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Better(by) => write!(f, "{:.1} % better", by * 100.0),
            Self::Worse(by) => write!(f, "{:.1} % worse", by * 100.0),
            Self::Within(by) => write!(f, "no difference beyond {:.1} %", by * 100.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use slim_lab::SeededRng;

    use super::*;

    /// A number in 0..1.
    fn uniform(rng: &mut SeededRng) -> f64 {
        rng.next_u64() as f64 / u64::MAX as f64
    }

    /// Distributed like timings: most near the minimum, a few far above it. The median is 1 + `scale`.
    fn timing(rng: &mut SeededRng, scale: f64) -> f64 {
        1.0 - scale * (1.0 - uniform(rng)).max(1e-12).log2()
    }

    #[test]
    fn quantiles_are_interpolated() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0]), Some(2.5));
        assert_eq!(median(&[]), None);
        assert_eq!(quantile(&[0.0, 10.0], 0.99), Some(9.9));
    }

    #[test]
    fn intervals_agree_with_published_tables() {
        // Hahn and Meeker: two-sided 95 % interval of the median.
        for (n, left_out) in [
            (0, None),
            (LEAST - 1, None),
            (LEAST, Some(0)),
            (8, Some(0)),
            (9, Some(1)),
            (20, Some(5)),
            (100, Some(39)),
        ] {
            assert_eq!(outside(n), left_out, "{n}");
        }
        // Normal approximation: half of n, less 0.98 times its square root.
        let many = outside(100_000).unwrap();
        assert!((many as i64 - 49_690).abs() <= 2, "{many}");
        let values = [9.0, 1.0, 5.0, 3.0, 2.0, 4.0, 8.0, 7.0, 6.0];
        assert_eq!(median_interval(&values), Some((2.0, 8.0)));
    }

    #[test]
    fn an_interval_misses_the_median_once_in_twenty_at_most() {
        let mut rng = SeededRng::new(1);
        for n in [6, 9, 20, 60, 200] {
            let covered = (0..4000).filter(|_| {
                let sample: Vec<f64> = (0..n).map(|_| timing(&mut rng, 0.2)).collect();
                let (low, high) = median_interval(&sample).unwrap();
                low <= 1.2 && 1.2 <= high
            });
            let part = covered.count() as f64 / 4000.0;
            // Three standard errors of 4,000 trials are 0.01.
            assert!(part > 0.94, "{n}: {part}");
        }
    }

    /// Turns on a machine whose speed drifts by half, with occasional disturbances.
    fn drifting(seed: u64, rounds: usize, ratio: f64, jobs: f64) -> [Vec<Vec<f64>>; 2] {
        let mut rng = SeededRng::new(seed);
        let (mut bare, mut other) = (Vec::new(), Vec::new());
        for round in 0..rounds {
            // Symmetric: chance makes a job faster as often as slower.
            let luck = 1.0 + jobs * (uniform(&mut rng) - 0.5);
            let mut turn = |cycle: usize, ratio: f64| {
                let wanders = 1.0 + 0.5 * (round as f64 + cycle as f64 / 12.0).sin().abs();
                ratio * wanders * timing(&mut rng, 0.01)
            };
            bare.push((0..12).map(|cycle| turn(cycle, 1.0)).collect());
            other.push((0..12).map(|cycle| turn(cycle, ratio * luck)).collect());
        }
        [bare, other]
    }

    #[test]
    fn one_per_cent_is_found_on_a_machine_whose_speed_varies_by_half() {
        let [bare, other] = drifting(7, 9, 1.01, 0.0);
        let compared = Comparison::new(&bare, &other, true).unwrap();
        assert!(
            matches!(compared.verdict, Judgement::Worse(_)),
            "{compared:?}"
        );
        assert!((compared.ratio - 1.01).abs() < 0.005, "{compared:?}");
        let less = Comparison::new(&bare, &other, false).unwrap();
        assert!(matches!(less.verdict, Judgement::Better(_)), "{less:?}");
    }

    #[test]
    fn equal_contenders_are_called_different_once_in_twenty_at_most() {
        for (rounds, jobs) in [(6, 0.0), (6, 0.1), (9, 0.0), (9, 0.1)] {
            let wrong = (0..1000).filter(|seed| {
                let [bare, other] = drifting(*seed, rounds, 1.0, jobs);
                let verdict = Comparison::new(&bare, &other, true).unwrap().verdict;
                !matches!(verdict, Judgement::Within(_))
            });
            let part = wrong.count() as f64 / 1000.0;
            // Three standard errors of 1,000 trials are 0.02.
            assert!(part < 0.07, "{rounds} rounds, jobs {jobs}: {part}");
        }
    }

    #[test]
    fn jobs_that_differ_widen_the_interval() {
        let bare = vec![vec![1.0; 50]; 9];
        let lucky = |round: usize| 0.9 + 0.03 * round as f64;
        let other: Vec<_> = (0..9).map(|round| vec![lucky(round); 50]).collect();
        let compared = Comparison::new(&bare, &other, true).unwrap();
        let near = |a: f64, b: f64| (a - b).abs() < 1e-9;
        assert!(near(compared.low, lucky(1)) && near(compared.high, lucky(7)));
        assert_eq!(compared.verdict.to_string(), "no difference beyond 11.0 %");
        // With few rounds, the range of all medians counts.
        let few = Comparison::new(&bare[..3], &other[..3], true).unwrap();
        assert!(near(few.low, lucky(0)) && near(few.high, lucky(2)));
    }

    #[test]
    fn less_time_and_more_bandwidth_are_better() {
        let (bare, less) = (vec![vec![10.0; 4]; 2], vec![vec![8.0; 4]; 2]);
        let time = Comparison::new(&bare, &less, true).unwrap().verdict;
        let rate = Comparison::new(&bare, &less, false).unwrap().verdict;
        assert_eq!(time.to_string(), "20.0 % better");
        assert_eq!(rate.to_string(), "20.0 % worse");
    }

    #[test]
    fn one_round_or_too_few_turns_are_no_comparison() {
        let turns = |rounds: usize, each: usize| vec![vec![1.0; each]; rounds];
        let new = |turns: &[Vec<f64>]| Comparison::new(turns, turns, true);
        assert_eq!(new(&turns(1, 100)), None);
        assert_eq!(new(&turns(2, 2)), None);
        assert!(new(&turns(2, 3)).is_some());
    }

    #[test]
    fn a_goal_is_reached_or_missed_by_the_whole_interval() {
        let compared = Comparison {
            ratio: 1.0,
            low: 0.98,
            high: 1.02,
            verdict: Judgement::Within(0.02),
        };
        let reaches = |goal| (compared.reaches(goal, true), compared.reaches(goal, false));
        assert_eq!(reaches(1.02), (Some(true), None));
        assert_eq!(reaches(1.03), (Some(true), Some(false)));
        assert_eq!(reaches(1.0), (None, None));
        assert_eq!(reaches(0.98), (None, Some(true)));
        assert_eq!(reaches(0.97), (Some(false), Some(true)));
    }
}
