//! Makes a line slow, long or lossy.

use std::fmt;

use strum::Display;

use crate::{Error, Netns, Node, Result};

/// Bytes that a line of `rate_kbit` kilobits a second, limited by `tbf`, lets pass at once after a pause. The other
/// disciplines let less pass. The burst has room for one offloaded segment, and on fast lines for the bytes of the time by
/// which a timer of a virtual machine may be late; otherwise the timer would limit the line.
pub fn burst(rate_kbit: u64) -> u32 {
    burst_for(rate_kbit, TIMER_US)
}

fn burst_for(rate_kbit: u64, timer_us: u64) -> u32 {
    const SEGMENT: u64 = 64 << 10;
    let late = rate_kbit.saturating_mul(1000) / 8 * timer_us / 1_000_000;
    u32::try_from(late.max(SEGMENT)).unwrap_or(u32::MAX)
}

/// How late a timer may be, in microseconds.
const TIMER_US: u64 = 400;
/// The same if processes poll without a pause on every processor, and several lines are limited.
const LATE_TIMER_US: u64 = 2000;

/// The properties of the line, in the sending direction of one node.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Shape {
    rate_kbit: Option<u64>,
    delay_ms: Option<u64>,
    loss_percent: Option<f64>,
    late_timers: bool,
}

/// Which of the kernel's queueing disciplines does the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Display)]
#[strum(serialize_all = "lowercase")]
pub enum Discipline {
    /// `netem`: rate, delay and loss.
    Netem,
    /// `tbf`: rate only.
    Tbf,
    /// `htb`: rate only.
    Htb,
}

/// A shape in force. Dropping it removes the shape.
#[derive(Debug)]
pub struct ShapeGuard {
    net: Netns,
    interface: String,
    discipline: Discipline,
    missing: Vec<&'static str>,
}

impl Shape {
    /// A line without limits.
    pub fn new() -> Self {
        Shape::default()
    }

    /// Limits the line to `rate` kilobits a second.
    pub fn rate_kbit(mut self, rate: u64) -> Self {
        self.rate_kbit = Some(rate);
        self
    }

    /// Delays every packet by `delay` milliseconds.
    pub fn delay_ms(mut self, delay: u64) -> Self {
        self.delay_ms = Some(delay);
        self
    }

    /// Loses `loss` percent of the packets, at random.
    pub fn loss_percent(mut self, loss: f64) -> Self {
        self.loss_percent = Some(loss);
        self
    }

    /// Lets a burst pass that covers timers which are 2 ms late. Processes that poll without a pause on every processor delay timers that
    /// much; with the usual burst, two limited lines then carry less than twice what one carries.
    pub fn late_timers(mut self) -> Self {
        self.late_timers = true;
        self
    }

    /// Shapes the packets that `node` sends on path `path`, by the first of `netem`, `tbf` and `htb` that this kernel has.
    /// The last two can only limit the rate; [`ShapeGuard::missing`] names the rest.
    ///
    /// # Errors
    /// This kernel can do nothing of what was asked for.
    pub fn apply(&self, node: &Node, path: usize) -> Result<ShapeGuard> {
        self.apply_to(node.net(), &node.interface(path))
    }

    /// [`Shape::apply`] for an interface of any network namespace.
    pub fn apply_to(&self, net: &Netns, interface: &str) -> Result<ShapeGuard> {
        let mut refused = Vec::new();
        for discipline in [Discipline::Netem, Discipline::Tbf, Discipline::Htb] {
            let missing = self.missing(discipline);
            if self.rate_kbit.is_none() && discipline != Discipline::Netem {
                continue;
            }
            match self.add(net, interface, discipline) {
                Ok(()) => {
                    return Ok(ShapeGuard {
                        net: net.clone(),
                        interface: interface.into(),
                        discipline,
                        missing,
                    });
                }
                Err(error) => refused.push(format!("{discipline}: {error}")),
            }
        }
        Err(Error::Invalid(format!(
            "this kernel cannot shape {interface} like this ({})",
            refused.join("; ")
        )))
    }

    fn missing(&self, discipline: Discipline) -> Vec<&'static str> {
        let mut missing = Vec::new();
        if discipline != Discipline::Netem {
            missing.extend(self.delay_ms.map(|_| "delay"));
            missing.extend(self.loss_percent.map(|_| "loss"));
        }
        missing
    }

    fn add(&self, net: &Netns, interface: &str, discipline: Discipline) -> Result<()> {
        let rate = self.rate_kbit.map(|r| format!("{r}kbit"));
        let mut args = vec!["qdisc", "replace", "dev", interface, "root"];
        let (delay, loss);
        match discipline {
            Discipline::Netem => {
                args.push("netem");
                if let Some(ms) = self.delay_ms {
                    delay = format!("{ms}ms");
                    args.extend(["delay", &delay]);
                }
                if let Some(percent) = self.loss_percent {
                    loss = format!("{percent}%");
                    args.extend(["loss", &loss]);
                }
                if let Some(rate) = &rate {
                    args.extend(["rate", rate]);
                }
                net.exec("tc", &args).map(drop)
            }
            Discipline::Tbf => {
                let rate = rate.as_deref().unwrap_or("1gbit");
                let timer = if self.late_timers {
                    LATE_TIMER_US
                } else {
                    TIMER_US
                };
                let burst = burst_for(self.rate_kbit.unwrap_or_default(), timer).to_string();
                args.extend(["tbf", "rate", rate, "burst", &burst, "latency", "200ms"]);
                net.exec("tc", &args).map(drop)
            }
            Discipline::Htb => {
                let rate = rate.as_deref().unwrap_or("1gbit");
                args.extend(["handle", "1:", "htb", "default", "1"]);
                net.exec("tc", &args)?;
                let class = [
                    "class", "add", "dev", interface, "parent", "1:", "classid", "1:1", "htb",
                    "rate", rate,
                ];
                net.exec("tc", &class).map(drop)
            }
        }
    }
}

impl ShapeGuard {
    /// The discipline that shapes the line.
    pub fn discipline(&self) -> Discipline {
        self.discipline
    }

    /// The properties that were asked for and that this kernel cannot give (`delay`, `loss`).
    pub fn missing(&self) -> &[&'static str] {
        &self.missing
    }
}

impl Drop for ShapeGuard {
    fn drop(&mut self) {
        // The node may be gone already.
        let _ = self
            .net
            .exec("tc", &["qdisc", "del", "dev", &self.interface, "root"]);
    }
}

impl fmt::Display for ShapeGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} shaped by {}", self.interface, self.discipline)?;
        if !self.missing.is_empty() {
            write!(
                f,
                " (this kernel has no netem: no {})",
                self.missing.join(", no ")
            )?;
        }
        Ok(())
    }
}
