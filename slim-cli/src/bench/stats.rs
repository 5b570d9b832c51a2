//! Figures of several rounds: their middle, their spread, and what a comparison can say.

use serde::Serialize;

/// The value in the middle; the mean of the two in the middle. None of nothing.
pub fn median(values: &[f64]) -> Option<f64> {
    quantile(values, 0.5)
}

/// The value below which `part` of them lie, between two neighbours in proportion.
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

/// Fewer rounds than this have no outliers: every one of them counts for the spread.
const FEW: usize = 5;

/// How far rounds of the same kind lie apart: the middle half of them, or all if they are few, as a part
/// of the median. A single round says nothing of that.
pub fn spread(values: &[f64]) -> Option<f64> {
    let (low, high) = match values.len() {
        0 | 1 => return None,
        n if n < FEW => (0.0, 1.0),
        _ => (0.25, 0.75),
    };
    let middle = median(values).filter(|m| *m != 0.0)?;
    Some((quantile(values, high)? - quantile(values, low)?) / middle)
}

/// One kind of runs against bare ones, round by round.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Median of the rounds' ratios to bare.
    pub ratio: f64,
    /// The smallest ratio of a round.
    pub lowest: f64,
    /// The largest.
    pub highest: f64,
    /// The largest of the spreads of the two kinds and of their ratios.
    pub noise: f64,
    /// What can be said.
    pub verdict: Verdict,
}

/// What a comparison says.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Better than bare, by this part.
    Better(f64),
    /// Worse than bare, by this part.
    Worse(f64),
    /// Rounds of the same kind differ more than the two kinds do.
    TooNoisy,
}

impl Comparison {
    /// Compares figures of the same rounds; `less_is_better` for times. None without two rounds.
    pub fn new(bare: &[f64], other: &[f64], less_is_better: bool) -> Option<Self> {
        let ratios: Vec<f64> = bare.iter().zip(other).map(|(b, o)| o / b).collect();
        let ratio = median(&ratios)?;
        let noise = spread(bare)?.max(spread(other)?).max(spread(&ratios)?);
        let difference = (ratio - 1.0).abs();
        Some(Self {
            ratio,
            lowest: quantile(&ratios, 0.0)?,
            highest: quantile(&ratios, 1.0)?,
            noise,
            verdict: if noise >= difference {
                Verdict::TooNoisy
            } else if (ratio < 1.0) == less_is_better {
                Verdict::Better(difference)
            } else {
                Verdict::Worse(difference)
            },
        })
    }
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Better(by) => write!(f, "{:.1} % better", by * 100.0),
            Self::Worse(by) => write!(f, "{:.1} % worse", by * 100.0),
            Self::TooNoisy => f.write_str("too noisy to tell"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_is_between_neighbours() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0]), Some(2.5));
        assert_eq!(median(&[]), None);
        assert_eq!(quantile(&[0.0, 10.0], 0.99), Some(9.9));
    }

    #[test]
    fn one_wild_round_of_five_is_no_spread() {
        let spread = spread(&[10.0, 10.0, 10.1, 10.1, 50.0]).unwrap();
        assert!(spread < 0.011, "{spread}");
    }

    #[test]
    fn a_difference_within_the_noise_is_no_verdict() {
        let bare = [10.0, 10.5, 11.0, 11.5, 12.0];
        let slim = [10.1, 10.7, 11.0, 11.6, 12.2];
        let compared = Comparison::new(&bare, &slim, true).unwrap();
        assert_eq!(compared.verdict, Verdict::TooNoisy);
        assert!(compared.ratio > 1.0 && compared.ratio < 1.02);
    }

    #[test]
    fn two_rounds_that_contradict_each_other_are_no_verdict() {
        let compared = Comparison::new(&[1.0, 2.0], &[2.0, 2.1], false).unwrap();
        assert_eq!(compared.verdict, Verdict::TooNoisy);
    }

    #[test]
    fn less_time_and_more_bandwidth_are_better() {
        let (bare, less) = ([10.0; 3], [8.0; 3]);
        let time = Comparison::new(&bare, &less, true).unwrap().verdict;
        let rate = Comparison::new(&bare, &less, false).unwrap().verdict;
        assert_eq!(time.to_string(), "20.0 % better");
        assert_eq!(rate.to_string(), "20.0 % worse");
    }

    #[test]
    fn one_round_is_no_comparison() {
        assert_eq!(Comparison::new(&[1.0], &[2.0], true), None);
    }
}
