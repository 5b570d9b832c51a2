//! The figures of one call of `slim bench`.

use std::env;
use std::process::Command;

use procfs::{CpuInfo, Current};
use rustix::system::{sysinfo, uname};
use serde::Serialize;

use super::messages::MessageFigures;
use super::{instructions, memory, resume};
use crate::shell;

/// Everything that was measured.
#[derive(Debug, Serialize)]
pub struct BenchReport {
    /// Version of SLIM.
    pub version: &'static str,
    /// Where it was measured.
    pub machine: Machine,
    /// Date and time of the call.
    pub when: String,
    /// The command line of the call.
    pub command: String,
    /// Parts that could not be measured, and why.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<String>,
    /// Speed of MPI's messages, by MPI and line.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub messages: Vec<MessageFigures>,
    /// Instructions of a small message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instructions: Option<instructions::InstructionFigures>,
    /// Interruptions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resume: Option<resume::ResumeFigures>,
    /// Cost of flows and processes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<memory::MemoryFigures>,
}

/// The properties of a machine that figures depend on.
#[derive(Debug, Serialize)]
pub struct Machine {
    /// Name of the processor.
    pub processor: String,
    /// Cores that this process may use.
    pub cores: usize,
    /// Memory, in GiB.
    pub memory_gib: f64,
    /// Version of the kernel.
    pub kernel: String,
    /// Load average of the minute before the measurement.
    pub load: f64,
}

impl Machine {
    /// This machine, now.
    pub fn here() -> Self {
        let processors = CpuInfo::current().ok();
        let processor = processors.as_ref().and_then(|cpus| cpus.model_name(0));
        let system = sysinfo();
        let bytes = system.totalram as f64 * f64::from(system.mem_unit);
        // The kernel gives the load as a fixed-point number of 16 binary digits.
        let load = system.loads[0] as f64 / f64::from(1 << 16);
        Self {
            processor: processor.unwrap_or("unknown").to_owned(),
            memory_gib: (bytes / f64::from(1 << 30) * 10.0).round() / 10.0,
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: uname().release().to_string_lossy().into_owned(),
            load: (load * 100.0).round() / 100.0,
        }
    }
}

impl std::fmt::Display for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} x {}, {:.1} GiB, Linux {}, load {:.2} before it began",
            self.cores, self.processor, self.memory_gib, self.kernel, self.load
        )
    }
}

impl BenchReport {
    /// A report without figures.
    pub fn new(machine: Machine) -> Self {
        let date = Command::new("date")
            .args(["-u", "+%Y-%m-%d %H:%M UTC"])
            .output();
        let words = env::args_os().map(|word| shell::quote(&word.to_string_lossy()));
        Self {
            version: env!("CARGO_PKG_VERSION"),
            machine,
            when: date.map_or_else(
                |_| "unknown".into(),
                |out| String::from_utf8_lossy(&out.stdout).trim().to_owned(),
            ),
            command: words.collect::<Vec<_>>().join(" "),
            missing: Vec::new(),
            messages: Vec::new(),
            instructions: None,
            resume: None,
            memory: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_is_known() {
        let here = Machine::here();
        assert!(here.cores > 0 && here.kernel.contains('.'), "{here}");
    }
}
