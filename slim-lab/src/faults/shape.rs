//! A slow, long or lossy line.

use std::fmt;

use strum::Display;

use crate::{Error, Netns, Node, Result};

/// Bytes that a line of so many kilobits a second, limited by `tbf`, lets pass at once after a rest. The other
/// disciplines let less pass. Room for a whole offloaded segment, and on fast lines for what falls into the time
/// that a virtual machine may need to come back from a timer; else it is the timer that limits the line.
pub fn burst(rate_kbit: u64) -> u32 {
    const SEGMENT: u64 = 64 << 10;
    let late = rate_kbit.saturating_mul(1000) / 8 * TIMER_US / 1_000_000;
    u32::try_from(late.max(SEGMENT)).unwrap_or(u32::MAX)
}

/// How late a timer may be, in microseconds.
const TIMER_US: u64 = 400;

/// What the line is to be like, in the sending direction of one node.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Shape {
    rate_kbit: Option<u64>,
    delay_ms: Option<u64>,
    loss_percent: Option<f64>,
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

/// A shape in force. Dropping it takes it away.
#[derive(Debug)]
pub struct ShapeGuard {
    net: Netns,
    interface: String,
    discipline: Discipline,
    missing: Vec<&'static str>,
}

impl Shape {
    /// A line as it is.
    pub fn new() -> Self {
        Shape::default()
    }

    /// At most so many kilobits in a second.
    pub fn rate_kbit(mut self, rate: u64) -> Self {
        self.rate_kbit = Some(rate);
        self
    }

    /// Every packet arrives so many milliseconds later.
    pub fn delay_ms(mut self, delay: u64) -> Self {
        self.delay_ms = Some(delay);
        self
    }

    /// So many packets of a hundred are lost, at random.
    pub fn loss_percent(mut self, loss: f64) -> Self {
        self.loss_percent = Some(loss);
        self
    }

    /// Shapes what `node` sends on path `path`, with what this kernel has: `netem`, else `tbf`, else
    /// `htb`. The last two can only limit the rate; the guard says what is missing. If none of
    /// what was asked for can be had, this is an error that says so.
    pub fn apply(&self, node: &Node, path: usize) -> Result<ShapeGuard> {
        self.apply_to(node.net(), &node.interface(path))
    }

    /// The same for an interface of any network namespace.
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
            "this kernel can not shape {interface} so ({})",
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
                let burst = burst(self.rate_kbit.unwrap_or_default()).to_string();
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
    /// What shapes the line.
    pub fn discipline(&self) -> Discipline {
        self.discipline
    }

    /// What was asked for and this kernel cannot do (`delay`, `loss`).
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
