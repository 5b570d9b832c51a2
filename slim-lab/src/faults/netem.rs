//! A bad line: the kernel's queueing discipline netem delays, loses, reorders, repeats and damages the packets that an interface sends.
//!
//! [`super::lines`] puts it on an interface.

use std::{
    fmt, io,
    os::unix::process::CommandExt,
    process::{Command, Output},
    time::Duration,
};

use nix::sched::{CloneFlags, unshare};
use serde::Deserialize;
use strum::Display;

use crate::{Error, Result, netns::checked, node::SYSTEM_PATH};

/// Packets that may wait on the line, unless [`Netem::limit`] says otherwise. So many that only [`Netem::loss`] loses any: netem's own
/// default, 1000, loses packets of a fast line with a delay.
pub const LIMIT: u32 = 100_000;

/// What happens to the packets. Each part that is absent leaves them alone.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Netem {
    /// Packets arrive late.
    pub delay: Option<Delay>,
    /// Packets are lost.
    pub loss: Option<Chance>,
    /// Packets overtake the delayed ones.
    pub reorder: Option<Reorder>,
    /// Packets arrive twice.
    pub duplicate: Option<Chance>,
    /// One bit of a packet is wrong.
    pub corrupt: Option<Chance>,
    /// The line takes so many bits a second.
    pub rate: Option<u64>,
    /// Packets come in bunches.
    pub slot: Option<SendSlot>,
    /// Packets that may wait on the line; those beyond are lost.
    pub limit: Option<u32>,
}

/// How likely something is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Chance {
    /// In percent of the packets.
    pub percent: f64,
    /// How much each choice depends on the one before, in percent.
    pub correlation: f64,
}

/// How late packets arrive.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Delay {
    /// On average.
    pub mean: Duration,
    /// How much it varies. (netem's correlation of delays is not offered: the kernel takes the correlated number modulo the range, so the
    /// delays are not correlated.)
    pub jitter: Duration,
    /// How it is distributed.
    pub distribution: Distribution,
}

/// How delays are distributed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Display)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum Distribution {
    /// All delays within the jitter are equally likely.
    #[default]
    Uniform,
    /// The jitter is the standard deviation.
    Normal,
    /// A few are much longer.
    Pareto,
    /// A mixture of the two.
    ParetoNormal,
}

/// Which packets are not delayed, and so overtake others.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Reorder {
    /// How likely a packet is one of them.
    pub chance: Chance,
    /// Only every so many-th packet can be one.
    pub gap: Option<u32>,
}

/// When packets may leave: in slots, as on a radio line.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SendSlot {
    /// Shortest time from one slot to the next.
    pub from: Duration,
    /// Longest time.
    pub to: Duration,
    /// Most packets in a slot.
    pub packets: Option<u32>,
    /// Most bytes in a slot.
    pub bytes: Option<u32>,
}

impl Netem {
    /// Whether it leaves all packets alone.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Both: what `newer` does not say stays as it is here.
    pub fn with(&self, newer: &Self) -> Self {
        Self {
            delay: newer.delay.or(self.delay),
            loss: newer.loss.or(self.loss),
            reorder: newer.reorder.or(self.reorder),
            duplicate: newer.duplicate.or(self.duplicate),
            corrupt: newer.corrupt.or(self.corrupt),
            rate: newer.rate.or(self.rate),
            slot: newer.slot.or(self.slot),
            limit: newer.limit.or(self.limit),
        }
    }

    /// The arguments of `tc qdisc add … netem`, without the limit.
    fn effects(&self) -> Vec<String> {
        let mut words = Vec::new();
        let mut add = |part: &[String]| words.extend_from_slice(part);
        if let Some(delay) = &self.delay {
            add(&["delay".into(), micros(delay.mean)]);
            if !delay.jitter.is_zero() {
                add(&[micros(delay.jitter)]);
                // tc has no word for the uniform one.
                if delay.distribution != Distribution::Uniform {
                    add(&["distribution".into(), delay.distribution.to_string()]);
                }
            }
        }
        for (word, chance) in [
            ("loss", self.loss),
            ("reorder", self.reorder.map(|reorder| reorder.chance)),
            ("duplicate", self.duplicate),
            ("corrupt", self.corrupt),
        ] {
            if let Some(chance) = chance {
                add(&[word.into(), percent(chance.percent)]);
                if chance.correlation > 0.0 {
                    add(&[percent(chance.correlation)]);
                }
            }
        }
        if let Some(gap) = self.reorder.and_then(|reorder| reorder.gap) {
            add(&["gap".into(), gap.to_string()]);
        }
        if let Some(rate) = self.rate {
            add(&["rate".into(), format!("{rate}bit")]);
        }
        if let Some(slot) = &self.slot {
            add(&["slot".into(), micros(slot.from), micros(slot.to)]);
            for (word, most) in [("packets", slot.packets), ("bytes", slot.bytes)] {
                if let Some(most) = most {
                    add(&[word.into(), most.to_string()]);
                }
            }
        }
        words
    }

    /// The arguments of `tc qdisc add … netem`.
    pub fn arguments(&self) -> Vec<String> {
        let limit = self.limit.unwrap_or(LIMIT).to_string();
        let limit = ["limit".to_owned(), limit];
        limit.into_iter().chain(self.effects()).collect()
    }

    /// Checks that this kernel and this `tc` can do it, on an interface that nobody uses: in a network namespace that ends with the check.
    /// If netem is a module of the kernel, it is loaded.
    ///
    /// # Errors
    /// A line that says what to do.
    pub fn check(&self) -> Result<()> {
        let mut command = Command::new("tc");
        command.args(["qdisc", "add", "dev", "lo", "root", "netem"]);
        command.args(self.arguments()).env("PATH", SYSTEM_PATH);
        // SAFETY: one system call between fork and exec, no allocation and no lock.
        unsafe {
            command.pre_exec(|| Ok(unshare(CloneFlags::CLONE_NEWNET)?));
        }
        let line = format!("tc qdisc add … netem {self}");
        outcome(&line, command.output())
    }
}

/// What the outcome of `tc` means.
pub(super) fn outcome(line: &str, output: io::Result<Output>) -> Result<()> {
    let output = output.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Error::Missing {
            what: "the program tc".into(),
            tried: Vec::new(),
            hint: "install the package iproute2 (scripts/setup does)".into(),
        },
        _ => Error::io(line)(error),
    })?;
    if String::from_utf8_lossy(&output.stderr).contains("qdisc kind is unknown") {
        return Err(Error::Invalid(
            "this kernel has no netem: load its module (modprobe sch_netem), or use a machine whose kernel has it"
                .into(),
        ));
    }
    checked(line, output).map(drop)
}

impl fmt::Display for Netem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limit = self.limit.map(|limit| format!("limit {limit}"));
        let words: Vec<_> = self.effects().into_iter().chain(limit).collect();
        f.write_str(&words.join(" "))
    }
}

fn micros(time: Duration) -> String {
    format!("{}us", time.as_micros())
}

fn percent(share: f64) -> String {
    format!("{share}%")
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn chance(percent: f64, correlation: f64) -> Option<Chance> {
        Some(Chance {
            percent,
            correlation,
        })
    }

    fn all() -> Netem {
        Netem {
            delay: Some(Delay {
                mean: 5 * MS,
                jitter: MS / 2,
                distribution: Distribution::ParetoNormal,
            }),
            loss: chance(2.5, 30.0),
            reorder: Some(Reorder {
                chance: chance(5.0, 50.0).unwrap(),
                gap: Some(3),
            }),
            duplicate: chance(1.0, 0.0),
            corrupt: chance(0.1, 0.0),
            rate: Some(10_000_000),
            slot: Some(SendSlot {
                from: 2 * MS,
                to: 4 * MS,
                packets: Some(16),
                bytes: Some(64_000),
            }),
            limit: Some(500),
        }
    }

    #[test]
    fn every_option_becomes_arguments_of_tc() {
        assert_eq!(
            all().arguments().join(" "),
            "limit 500 delay 5000us 500us distribution paretonormal loss 2.5% 30% reorder 5% 50% duplicate 1% \
             corrupt 0.1% gap 3 rate 10000000bit slot 2000us 4000us packets 16 bytes 64000"
        );
        let delay = Netem {
            delay: Some(Delay {
                mean: MS,
                ..Delay::default()
            }),
            ..Netem::default()
        };
        assert_eq!(delay.arguments().join(" "), "limit 100000 delay 1000us");
        assert_eq!(delay.to_string(), "delay 1000us");
        assert!(Netem::default().is_empty() && !delay.is_empty());
    }

    #[test]
    fn what_the_newer_one_does_not_say_stays() {
        let older = Netem {
            loss: chance(2.0, 0.0),
            rate: Some(1000),
            ..Netem::default()
        };
        let newer = Netem {
            loss: chance(50.0, 0.0),
            ..Netem::default()
        };
        let both = older.with(&newer);
        assert_eq!((both.loss, both.rate), (newer.loss, older.rate));
        assert_eq!(Netem::default().with(&all()), all());
        assert_eq!(all().with(&Netem::default()), all());
    }
}
