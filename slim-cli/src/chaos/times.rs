//! The times of a plan.

use std::time::Duration;

use serde::Deserialize;

/// Longest time in a plan, in seconds: a day. A longer time is taken for a mistake.
const MAX_SECONDS: f64 = 86_400.0;

/// Seconds, 0 to a day.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(try_from = "f64")]
pub struct Seconds(f64);

/// A time or a range of times to choose from.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(try_from = "Raw")]
pub struct Span {
    /// Shortest.
    pub from: Duration,
    /// Longest.
    pub to: Duration,
}

/// How long faults of a plan last.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(try_from = "RawLasts")]
pub enum Lasts {
    /// To the end of the run.
    Forever,
    /// A time, or a range of times to choose from.
    Within(Span),
}

/// How long one fault lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lasting {
    /// So long.
    For(Duration),
    /// To the end of the run.
    Forever,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected seconds, or a range such as [0.5, 2]")]
enum Raw {
    One(f64),
    Range([f64; 2]),
}

#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "expected seconds, a range such as [0.5, 2], or \"forever\""
)]
enum RawLasts {
    Time(Raw),
    Word(Forever),
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Forever {
    Forever,
}

/// The default of several keys.
pub const ONE_SECOND: Span = Span {
    from: Duration::from_secs(1),
    to: Duration::from_secs(1),
};

/// [`ONE_SECOND`], for serde.
pub fn one_second() -> Span {
    ONE_SECOND
}

fn duration(seconds: f64) -> Result<Duration, String> {
    if (0.0..=MAX_SECONDS).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err(format!(
            "{seconds} is not between 0 and {MAX_SECONDS} seconds"
        ))
    }
}

impl TryFrom<f64> for Seconds {
    type Error = String;

    fn try_from(seconds: f64) -> Result<Self, String> {
        duration(seconds).map(|_| Self(seconds))
    }
}

impl Seconds {
    /// So many seconds.
    pub fn whole(seconds: u32) -> Self {
        Self(seconds.into())
    }

    /// The time as a duration.
    pub fn duration(self) -> Duration {
        Duration::from_secs_f64(self.0)
    }
}

impl TryFrom<Raw> for Span {
    type Error = String;

    fn try_from(raw: Raw) -> Result<Self, String> {
        let [from, to] = match raw {
            Raw::One(seconds) => [seconds, seconds],
            Raw::Range(range) => range,
        };
        let (from, to) = (duration(from)?, duration(to)?);
        if from > to {
            return Err(format!(
                "the range [{}, {}] is upside down",
                from.as_secs_f64(),
                to.as_secs_f64()
            ));
        }
        Ok(Self { from, to })
    }
}

impl TryFrom<RawLasts> for Lasts {
    type Error = String;

    fn try_from(raw: RawLasts) -> Result<Self, String> {
        match raw {
            RawLasts::Time(time) => time.try_into().map(Self::Within),
            RawLasts::Word(Forever::Forever) => Ok(Self::Forever),
        }
    }
}
