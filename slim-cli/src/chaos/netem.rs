//! The options of a `netem` fault in a plan.
//!
//! ```toml
//! [[fault]]
//! kind = "netem"
//! node = "nodeA"       # the sender
//! lasts = 30
//! netem = { delay = "5ms", jitter = "1ms", loss = "2%" }
//! ```

use std::time::Duration;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _};
use slim_lab::faults::netem::{Chance, Delay, Distribution, Netem, Reorder, SendSlot};

/// Longest delay, and longest time between slots. The shortest is a microsecond.
const MAX_TIME: Duration = Duration::from_secs(60);
/// Longest jitter: the kernel takes a longer one for this.
const MAX_JITTER: Duration = Duration::from_millis(2147);
/// Fastest and slowest line, in bits a second.
const MAX_RATE: u64 = 100_000_000_000;
const MIN_RATE: u64 = 1000;
/// Smallest share of packets: the kernel counts in steps of 2⁻³².
const MIN_PERCENT: f64 = 2.4e-8;
/// Most packets that may wait.
const MAX_LIMIT: u32 = 10_000_000;

/// Reads the options of a fault.
pub fn read<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Netem>, D::Error> {
    let options = NetemOptions::deserialize(deserializer)?;
    options.netem().map(Some).map_err(D::Error::custom)
}

/// The options as they are written.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct NetemOptions {
    delay: Option<LineTime>,
    jitter: Option<LineTime>,
    distribution: Option<Distribution>,
    loss: Option<Percent>,
    loss_correlation: Option<Percent>,
    reorder: Option<Percent>,
    reorder_correlation: Option<Percent>,
    gap: Option<Count>,
    duplicate: Option<Percent>,
    duplicate_correlation: Option<Percent>,
    corrupt: Option<Percent>,
    corrupt_correlation: Option<Percent>,
    rate: Option<LineRate>,
    slot: Option<LineTimes>,
    slot_packets: Option<Count>,
    slot_bytes: Option<Count>,
    limit: Option<Count>,
}

/// A text with a unit, or a number that lacks it.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a text with a unit, such as \"5ms\"")]
enum LineValue {
    Text(String),
    Whole(i64),
    Number(f64),
}

/// A text such as `5ms`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(try_from = "LineValue")]
struct LineTime(Duration);

/// A text such as `2%`, more than 0 and at most 100.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(try_from = "LineValue")]
struct Percent(f64);

/// A text such as `10mbit`, for a second.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(try_from = "LineValue")]
struct LineRate(u64);

/// A time, or a range to choose from.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a time such as \"5ms\" (us, ms or s), or a range such as [\"5ms\", \"10ms\"]"
)]
enum LineTimes {
    One(LineTime),
    Range([LineTime; 2]),
}

/// A whole number, 1 to [`MAX_LIMIT`].
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(try_from = "i64")]
struct Count(u32);

impl LineValue {
    /// The number, in the unit whose factor is 1. `example` is for the message.
    fn value(self, example: &str, units: &[(&str, f64)]) -> Result<f64, String> {
        let names: Vec<_> = units.iter().map(|(name, _)| *name).collect();
        let want = format!("write a number and its unit ({})", names.join(", "));
        let text = match self {
            Self::Text(text) => text,
            Self::Whole(number) => return Err(format!("{number} has no unit: {want}")),
            Self::Number(number) => return Err(format!("{number} has no unit: {want}")),
        };
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic() || c == '%');
        let unit = &text[digits.len()..];
        let factor = units.iter().find(|(name, _)| *name == unit);
        let number = digits.trim_end().parse::<f64>().ok();
        match (number, factor) {
            (Some(number), Some((_, factor))) if number.is_finite() => Ok(number * factor),
            _ => Err(format!("`{text}` is not such as `{example}`: {want}")),
        }
    }
}

impl TryFrom<LineValue> for LineTime {
    type Error = String;

    fn try_from(raw: LineValue) -> Result<Self, String> {
        let units = [("us", 1.0), ("ms", 1e3), ("s", 1e6)];
        let micros = raw.value("5ms", &units)?;
        let most = MAX_TIME.as_micros() as f64;
        if (1.0..=most).contains(&micros) {
            Ok(Self(Duration::from_micros(micros.round() as u64)))
        } else {
            Err(format!("a time must be 1us to {}s", MAX_TIME.as_secs()))
        }
    }
}

impl TryFrom<LineValue> for Percent {
    type Error = String;

    fn try_from(raw: LineValue) -> Result<Self, String> {
        let percent = raw.value("2%", &[("%", 1.0)])?;
        if percent > 0.0 && percent <= 100.0 && percent < MIN_PERCENT {
            Err(format!(
                "{percent}% is less than the kernel can tell from 0% (at least {MIN_PERCENT}%)"
            ))
        } else if percent > 0.0 && percent <= 100.0 {
            Ok(Self(percent))
        } else {
            Err(format!("{percent}% is not more than 0% and at most 100%"))
        }
    }
}

impl TryFrom<LineValue> for LineRate {
    type Error = String;

    fn try_from(raw: LineValue) -> Result<Self, String> {
        let units = [("bit", 1.0), ("kbit", 1e3), ("mbit", 1e6), ("gbit", 1e9)];
        let bits = raw.value("10mbit", &units)?;
        if (MIN_RATE as f64..=MAX_RATE as f64).contains(&bits) {
            Ok(Self(bits.round() as u64))
        } else {
            Err("a rate must be 1kbit to 100gbit (a second)".into())
        }
    }
}

impl TryFrom<i64> for Count {
    type Error = String;

    fn try_from(number: i64) -> Result<Self, String> {
        match u32::try_from(number) {
            Ok(number @ 1..=MAX_LIMIT) => Ok(Self(number)),
            _ => Err(format!("{number} is not between 1 and {MAX_LIMIT}")),
        }
    }
}

impl LineTimes {
    fn range(self) -> Result<(Duration, Duration), String> {
        let [from, to] = match self {
            Self::One(time) => [time, time],
            Self::Range(range) => range,
        };
        match from.0 <= to.0 {
            true => Ok((from.0, to.0)),
            false => Err("the range of `slot` is upside down".into()),
        }
    }
}

impl NetemOptions {
    fn netem(&self) -> Result<Netem, String> {
        self.check()?;
        let slot = self.slot.map(|slot| {
            let (from, to) = slot.range()?;
            Ok::<_, String>(SendSlot {
                from,
                to,
                packets: self.slot_packets.map(|count| count.0),
                bytes: self.slot_bytes.map(|count| count.0),
            })
        });
        let netem = Netem {
            delay: self.delay.map(|mean| Delay {
                mean: mean.0,
                jitter: self.jitter.map_or(Duration::ZERO, |jitter| jitter.0),
                distribution: self.distribution.unwrap_or_default(),
            }),
            loss: chance(self.loss, self.loss_correlation),
            reorder: chance(self.reorder, self.reorder_correlation).map(|chance| Reorder {
                chance,
                gap: self.gap.map(|gap| gap.0),
            }),
            duplicate: chance(self.duplicate, self.duplicate_correlation),
            corrupt: chance(self.corrupt, self.corrupt_correlation),
            rate: self.rate.map(|rate| rate.0),
            slot: slot.transpose()?,
            limit: self.limit.map(|limit| limit.0),
        };
        match netem.is_empty() {
            true => Err("netem needs an option, such as delay = \"5ms\"".into()),
            false => Ok(netem),
        }
    }

    /// Options that mean nothing without another one.
    fn check(&self) -> Result<(), String> {
        let (delay, jitter) = (self.delay.is_some(), self.jitter.is_some());
        let (reorder, slot) = (self.reorder.is_some(), self.slot.is_some());
        let (loss, corrupt) = (self.loss.is_some(), self.corrupt.is_some());
        let duplicate = self.duplicate.is_some();
        needs("jitter", &self.jitter, "delay", delay)?;
        if self.jitter.is_some_and(|jitter| jitter.0 > MAX_JITTER) {
            return Err(format!(
                "a jitter must be 1us to {}ms",
                MAX_JITTER.as_millis()
            ));
        }
        needs("distribution", &self.distribution, "jitter", jitter)?;
        needs("loss_correlation", &self.loss_correlation, "loss", loss)?;
        needs("reorder", &self.reorder, "delay", delay)?;
        needs(
            "reorder_correlation",
            &self.reorder_correlation,
            "reorder",
            reorder,
        )?;
        needs("gap", &self.gap, "reorder", reorder)?;
        needs(
            "duplicate_correlation",
            &self.duplicate_correlation,
            "duplicate",
            duplicate,
        )?;
        needs(
            "corrupt_correlation",
            &self.corrupt_correlation,
            "corrupt",
            corrupt,
        )?;
        needs("slot_packets", &self.slot_packets, "slot", slot)?;
        needs("slot_bytes", &self.slot_bytes, "slot", slot)
    }
}

fn needs<T>(name: &str, option: &Option<T>, other: &str, is_there: bool) -> Result<(), String> {
    match option.is_none() || is_there {
        true => Ok(()),
        false => Err(format!("`{name}` needs `{other}`")),
    }
}

fn chance(percent: Option<Percent>, correlation: Option<Percent>) -> Option<Chance> {
    percent.map(|percent| Chance {
        percent: percent.0,
        correlation: correlation.map_or(0.0, |share| share.0),
    })
}

#[cfg(test)]
mod tests {
    use super::super::plan::Plan;

    fn parse(options: &str) -> Result<String, String> {
        let text = format!("[[fault]]\nkind = \"netem\"\nnetem = {{ {options} }}\n");
        let plan = Plan::parse(&text)?;
        Ok(plan.faults[0].netem.as_ref().unwrap().to_string())
    }

    #[test]
    fn every_option_is_read_with_its_unit() {
        for (options, tc) in [
            ("delay = \"5ms\"", "delay 5000us"),
            ("delay = \"0.25 ms\"", "delay 250us"),
            (
                "delay = \"1s\", jitter = \"20us\", distribution = \"normal\"",
                "delay 1000000us 20us distribution normal",
            ),
            (
                "delay = \"1ms\", jitter = \"1ms\", distribution = \"uniform\"",
                "delay 1000us 1000us",
            ),
            ("loss = \"2%\"", "loss 2%"),
            (
                "loss = \"0.5%\", loss_correlation = \"30%\"",
                "loss 0.5% 30%",
            ),
            (
                "delay = \"1ms\", reorder = \"5%\", reorder_correlation = \"50%\", gap = 4",
                "delay 1000us reorder 5% 50% gap 4",
            ),
            (
                "duplicate = \"1%\", duplicate_correlation = \"10%\", corrupt = \"1%\", corrupt_correlation = \"10%\"",
                "duplicate 1% 10% corrupt 1% 10%",
            ),
            ("rate = \"10mbit\"", "rate 10000000bit"),
            (
                "rate = \"2.5gbit\", limit = 1000",
                "rate 2500000000bit limit 1000",
            ),
            ("slot = \"10ms\"", "slot 10000us 10000us"),
            (
                "slot = [\"5ms\", \"10ms\"], slot_packets = 16, slot_bytes = 64000",
                "slot 5000us 10000us packets 16 bytes 64000",
            ),
        ] {
            assert_eq!(parse(options).as_deref(), Ok(tc), "{options}");
        }
    }

    #[test]
    fn the_options_may_be_a_table_of_their_own() {
        let text = "[[fault]]\nkind = \"netem\"\nlasts = 3\n[fault.netem]\nloss = \"2%\"\n";
        assert!(Plan::parse(text).unwrap().faults[0].netem.is_some());
    }

    /// Each mistake with the words that its one line must have.
    #[test]
    fn mistakes_are_reported_in_one_line_with_their_place() {
        for (options, words) in [
            ("", "needs an option"),
            (
                "delay = 5",
                "5 has no unit: write a number and its unit (us, ms, s)",
            ),
            ("delay = 0.5", "0.5 has no unit"),
            ("delay = \"5\"", "`5` is not such as `5ms`"),
            ("delay = \"5min\"", "`5min` is not such as `5ms`"),
            ("delay = \"ms\"", "is not such as"),
            ("delay = \"-1ms\"", "1us to 60s"),
            ("delay = \"61s\"", "1us to 60s"),
            ("delay = \"nanms\"", "is not such as"),
            ("delay = [1]", "a text with a unit"),
            ("loss = \"2\"", "`2` is not such as `2%`"),
            ("loss = \"101%\"", "at most 100%"),
            ("loss = \"0%\"", "more than 0%"),
            ("loss = \"0.00000001%\"", "than the kernel can tell from 0%"),
            ("rate = \"10mb\"", "(bit, kbit, mbit, gbit)"),
            ("rate = \"1bit\"", "1kbit to 100gbit"),
            ("slot = \"0s\"", "such as \"5ms\""),
            ("slot = [\"2ms\", \"1ms\"]", "upside down"),
            ("slot = 5", "such as \"5ms\""),
            ("loss = \"1%\", limit = 0", "between 1 and"),
            ("delay = \"1ms\", distribution = \"gauss\"", "gauss"),
            ("jitter = \"1ms\"", "`jitter` needs `delay`"),
            ("delay = \"9s\", jitter = \"3s\"", "1us to 2147ms"),
            (
                "delay = \"1ms\", distribution = \"normal\"",
                "`distribution` needs `jitter`",
            ),
            (
                "loss_correlation = \"1%\"",
                "`loss_correlation` needs `loss`",
            ),
            ("reorder = \"1%\"", "`reorder` needs `delay`"),
            ("delay = \"1ms\", gap = 3", "`gap` needs `reorder`"),
            (
                "delay = \"1ms\", slot_packets = 3",
                "`slot_packets` needs `slot`",
            ),
            ("dealy = \"1ms\"", "dealy"),
        ] {
            let line = parse(options).unwrap_err();
            assert!(
                line.contains(words) && line.starts_with("line 3: ") && !line.contains('\n'),
                "{options:?} gave {line:?}"
            );
        }
    }

    #[test]
    fn the_options_belong_to_the_kind() {
        let missing = Plan::parse("[[fault]]\nkind = \"netem\"\n").unwrap_err();
        assert!(missing.contains("needs options"), "{missing}");
        let other = "[[fault]]\nkind = \"kill\"\nnetem = { loss = \"2%\" }\n";
        assert!(
            Plan::parse(other)
                .unwrap_err()
                .contains("for the kind netem only")
        );
        let selects = "[[fault]]\nkind = \"netem\"\nport = 80\nnetem = { loss = \"2%\" }\n";
        assert!(Plan::parse(selects).unwrap_err().contains("whole node"));
    }
}
