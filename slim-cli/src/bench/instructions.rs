//! Instructions of a small message. The count does not depend on the machine's load.
//!
//! Each count is the difference of a long run and a short one, so that start-up, negotiation and the
//! end cancel out. Only the application's thread is counted.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write as _;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde::Serialize;
use slim_core::event::Event;
use slim_lab::mpi::{Flavor, Job, Mpi};
use slim_lab::output::Running;
use slim_lab::{Error, Lab, artifacts};

use super::callgrind::{self, Entered, Function, Profile};
use super::section::Section;
use crate::events;
use crate::failure::CliError;
use crate::run::launcher;
use crate::table::Table;

/// Instructions that SLIM may add to one `send` and one `recv` of 8 bytes on a live flow, in the calling
/// thread and with those of libc. A test fails if it is exceeded by more than [`TOLERANCE`]. When a change of the
/// library lowers it, write the new figure here and into `docs/PERFORMANCE.md`.
pub const BUDGET: f64 = 148.0;
/// Part by which the budget may be exceeded: compilers differ slightly.
pub const TOLERANCE: f64 = 0.05;

/// Pairs in the short and in the long run. With these numbers the difference always contains the same number of
/// trims of the replay buffer.
const PAIRS: (u32, u32) = (2_000, 10_000);
/// Pairs in the short and in the long run of MPI, which starts slowly under valgrind.
const MPI_PAIRS: (u32, u32) = (200, 1_200);
const PATIENCE: Duration = Duration::from_secs(120);

/// All counts.
#[derive(Debug, Serialize)]
pub struct InstructionFigures {
    /// `send` and `recv` of 8 bytes over loopback, in C.
    pub pair: SendRecv,
    /// Calls that Open MPI makes for a message of 8 bytes and its answer.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mpi: Vec<Call>,
}

/// Instructions of one `send` and one `recv`.
#[derive(Debug, Serialize)]
pub struct SendRecv {
    /// The counter that was used.
    pub counter: Counter,
    /// Without SLIM.
    pub bare: f64,
    /// With SLIM.
    pub slim: f64,
    /// Functions whose share differs, the largest difference first.
    pub functions: Vec<Share>,
}

/// One function's share of a pair.
#[derive(Debug, Serialize)]
pub struct Share {
    /// Program or library.
    pub object: String,
    /// Name.
    pub function: String,
    /// Instructions without SLIM.
    pub bare: f64,
    /// Instructions with SLIM.
    pub slim: f64,
}

/// A call that Open MPI makes.
#[derive(Debug, Serialize)]
pub struct Call {
    /// Name.
    pub name: String,
    /// Number of calls for a pair of messages, under valgrind. The number of polls depends on the machine's speed.
    pub each_pair: f64,
    /// Instructions of one call without SLIM.
    pub bare: f64,
    /// Instructions of one call with SLIM.
    pub slim: f64,
}

/// The tool that counts instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Counter {
    /// The processor.
    Perf,
    /// Valgrind.
    Callgrind,
}

impl SendRecv {
    /// Instructions that SLIM adds.
    pub fn extra(&self) -> f64 {
        self.slim - self.bare
    }
}

/// Counts for a C program, and for Open MPI if it is installed and a lab can be made. `told` gets a line if that is left out.
pub fn measure(library: &Path, told: impl Fn(&str)) -> Result<InstructionFigures, CliError> {
    let pair = pair(library)?;
    let mpi = match Mpi::find(Flavor::OpenMpi4).and_then(|mpi| Lab::check().map(|()| mpi)) {
        Ok(mpi) => mpi_calls(&mpi, library)?,
        Err(error) => {
            told(&format!("Open MPI is left out: {error}"));
            Vec::new()
        }
    };
    Ok(InstructionFigures { pair, mpi })
}

/// Counts a pair with and without `library`.
pub fn pair(library: &Path) -> Result<SendRecv, CliError> {
    let failed = |e: Error| CliError::failed(e.to_string());
    let source = artifacts::source("slim_flows.c").map_err(failed)?;
    let program = artifacts::compile(Path::new("cc"), "cc", &source).map_err(failed)?;
    let dir = tempfile::Builder::new().prefix("slim-count-").tempdir();
    let dir = dir.map_err(|e| CliError::failed(format!("make a temporary directory: {e}")))?;
    let count = |library, pairs| ping_pong(&program, library, pairs, dir.path());
    let bare = (count(None, PAIRS.0)?, count(None, PAIRS.1)?);
    let slim = (
        count(Some(library), PAIRS.0)?,
        count(Some(library), PAIRS.1)?,
    );
    let live = events::records(dir.path())
        .iter()
        .filter(|r| r.event == Event::Live)
        .count();
    if live == 0 {
        return Err(CliError::failed(
            "the counted connection was never live: its count means nothing",
        ));
    }
    let pairs = f64::from(PAIRS.1 - PAIRS.0);
    let each = |(short, long): (u64, u64)| long.saturating_sub(short) as f64 / pairs;
    let total = |(short, long): &(RunCount, RunCount)| each((short.total, long.total));
    let own = |(short, long): &(RunCount, RunCount), f: &Function| {
        each((short.profile.own(f), long.profile.own(f)))
    };
    let names: BTreeSet<&Function> = [&bare.1, &slim.1]
        .into_iter()
        .flat_map(|c| c.profile.functions())
        .collect();
    let mut functions: Vec<Share> = names
        .into_iter()
        .map(|f| Share {
            object: f.object.clone(),
            function: f.name.clone(),
            bare: own(&bare, f),
            slim: own(&slim, f),
        })
        .filter(|share| (share.slim - share.bare).abs() >= 0.5)
        .collect();
    functions.sort_by(|a, b| (b.slim - b.bare).total_cmp(&(a.slim - a.bare)));
    Ok(SendRecv {
        counter: slim.1.counter,
        bare: total(&bare),
        slim: total(&slim),
        functions,
    })
}

/// The count of one run.
struct RunCount {
    counter: Counter,
    total: u64,
    profile: Profile,
}

fn ping_pong(
    program: &Path,
    library: Option<&Path>,
    pairs: u32,
    dir: &Path,
) -> Result<RunCount, CliError> {
    let failed = |e: Error| CliError::failed(e.to_string());
    let port = free_port()?.to_string();
    let mut server = Command::new(program);
    server.args(["serve", "127.0.0.1", &port]);
    preloaded(&mut server, library, dir);
    let server = Running::start(server).map_err(failed)?;
    if !server.wait_line(PATIENCE, |line| line == "READY") {
        return Err(CliError::failed("the server of the ping-pong does not run"));
    }
    let client = || {
        let count = pairs.to_string();
        ["pairs", "127.0.0.1", &port, &count].map(str::to_owned)
    };
    let out = dir.join("callgrind");
    let mut command = Command::new(callgrind::valgrind()?);
    command.args(callgrind::arguments(&out)).arg(program);
    finish(command.args(client()), library, dir)?;
    let profile = Profile::read(&callgrind::first_thread(&out))?;
    let mut counted = RunCount {
        counter: Counter::Callgrind,
        total: profile.total(),
        profile,
    };
    if let Some(perf) = perf() {
        let out = dir.join("perf");
        let mut command = Command::new(perf);
        // -i: other threads do not inherit the counter, so the agent's thread is not counted.
        command
            .args(["stat", "-i", "-x,", "-e", "instructions:u", "-o"])
            .arg(&out);
        finish(command.arg("--").arg(program).args(client()), library, dir)?;
        let text = fs::read_to_string(&out).unwrap_or_default();
        if let Some(total) = perf_count(&text) {
            (counted.counter, counted.total) = (Counter::Perf, total);
        }
    }
    Ok(counted)
}

fn finish(command: &mut Command, library: Option<&Path>, dir: &Path) -> Result<(), CliError> {
    preloaded(command, library, dir);
    let line = format!("{command:?}");
    let output = command
        .output()
        .map_err(|e| CliError::failed(format!("{line}: {e}")))?;
    if !output.status.success() {
        return Err(CliError::failed(Error::command(line, &output).to_string()));
    }
    Ok(())
}

fn preloaded(command: &mut Command, library: Option<&Path>, dir: &Path) {
    command.env_remove("LD_PRELOAD");
    if let Some(library) = library {
        command
            .env("LD_PRELOAD", library)
            .env("SLIM", "preferred")
            .env("SLIM_EVENTS", dir.join("%p.jsonl"));
    }
}

fn free_port() -> Result<u16, CliError> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .and_then(|listener| listener.local_addr())
        .map(|at| at.port())
        .map_err(|e| CliError::failed(format!("find a free port: {e}")))
}

/// The path of `perf`, if it can count instructions here; virtual machines often do not support that.
fn perf() -> Option<PathBuf> {
    let perf = launcher::resolve("perf").ok()?;
    let output = Command::new(&perf)
        .args(["stat", "-x,", "-e", "instructions:u", "true"])
        .output()
        .ok()?;
    perf_count(&String::from_utf8_lossy(&output.stderr)).map(|_| perf)
}

/// The count in the output of `perf stat -x,`: `1234,,instructions:u,…`.
fn perf_count(text: &str) -> Option<u64> {
    let line = text.lines().find(|l| l.contains("instructions"))?;
    line.split(',').next()?.parse().ok()
}

/// Counts the calls that rank 0 makes for a ping-pong of 8 bytes.
fn mpi_calls(mpi: &Mpi, library: &Path) -> Result<Vec<Call>, CliError> {
    let failed = |e: Error| CliError::failed(e.to_string());
    let program = mpi.build_program("slim_bench.c").map_err(failed)?;
    let lab = Lab::builder().nodes(2).name("count").build();
    let lab = lab.map_err(failed)?;
    let count = |library: Option<&Path>, pairs: u32| -> Result<Profile, CliError> {
        let out = lab.dir().join("callgrind");
        let starter = starter(lab.dir(), &program, &out)?;
        let mut job = Job::new(&lab, mpi, starter)
            .arg("--count")
            .arg(pairs.to_string())
            .arg("8");
        if let Some(library) = library {
            job = job.preload(library);
        }
        let outcome = job.start().map_err(failed)?.wait(PATIENCE);
        if !outcome.status.is_some_and(|s| s.success()) {
            return Err(CliError::failed(format!(
                "the job under valgrind failed; it said:\n{}",
                outcome.tail(20)
            )));
        }
        Profile::read(&callgrind::first_thread(&out))
    };
    let pairs = f64::from(MPI_PAIRS.1 - MPI_PAIRS.0);
    let used =
        |library: Option<&Path>, object: &str| -> Result<Vec<(String, f64, f64)>, CliError> {
            let (short, long) = (count(library, MPI_PAIRS.0)?, count(library, MPI_PAIRS.1)?);
            let before = |f: &Function| {
                let found = short.entered().find(|(g, _)| *g == f);
                found.map_or(Entered::default(), |(_, e)| e)
            };
            let entered = long
                .entered()
                .filter(|(f, _)| f.object == object && DATA_CALLS.contains(&f.name.as_str()));
            Ok(entered
                .map(|(f, e)| {
                    let start = before(f);
                    let calls = e.calls.saturating_sub(start.calls) as f64;
                    let instructions = e.instructions.saturating_sub(start.instructions) as f64;
                    (f.name.clone(), calls / pairs, instructions / calls.max(1.0))
                })
                .filter(|(_, calls, _)| *calls > 0.0)
                .collect())
        };
    let name = library.file_name().unwrap_or_default().to_string_lossy();
    let (bare, slim) = (used(None, "libc.so.6")?, used(Some(library), &name)?);
    Ok(slim
        .into_iter()
        .filter(|(_, each_pair, _)| *each_pair >= 0.5)
        .map(|(name, each_pair, slim)| {
            let alone = bare.iter().find(|(n, ..)| *n == name);
            Call {
                bare: alone.map_or(0.0, |(_, _, each)| *each),
                name,
                each_pair,
                slim,
            }
        })
        .collect())
}

/// Functions that an MPI may call for every message.
const DATA_CALLS: [&str; 12] = [
    "epoll_pwait",
    "epoll_wait",
    "poll",
    "read",
    "readv",
    "recv",
    "recvmsg",
    "select",
    "send",
    "sendmsg",
    "write",
    "writev",
];

/// Writes a script that runs rank 0 under valgrind and the other ranks without it.
fn starter(dir: &Path, program: &Path, out: &Path) -> Result<PathBuf, CliError> {
    let quote = |path: &Path| crate::shell::quote(&path.to_string_lossy());
    let valgrind = callgrind::arguments(out).map(|a| crate::shell::quote(&a));
    let text = format!(
        "#!/bin/sh\n[ \"$OMPI_COMM_WORLD_RANK\" = 0 ] || exec {program} \"$@\"\nexec {} {} {program} \"$@\"\n",
        quote(&callgrind::valgrind()?),
        valgrind.join(" "),
        program = quote(program),
    );
    let path = dir.join("starter");
    let write = || -> std::io::Result<()> {
        let mut file = fs::File::create(&path)?;
        file.write_all(text.as_bytes())?;
        file.set_permissions(fs::Permissions::from_mode(0o755))
    };
    write().map_err(|e| CliError::failed(format!("{}: {e}", path.display())))?;
    Ok(path)
}

impl InstructionFigures {
    /// For the report.
    pub fn section(&self) -> Section {
        let mut table = Table::new(&["instructions of", ">calls", ">bare", ">SLIM", ">extra"]);
        let mut row = |what: String, calls: f64, bare: f64, slim: f64| {
            table.row([
                what,
                format!("{calls:.1}"),
                format!("{bare:.0}"),
                format!("{slim:.0}"),
                format!("{:.0}", slim - bare),
            ]);
        };
        let pair = &self.pair;
        row(
            "send + recv of 8 bytes, C".into(),
            1.0,
            pair.bare,
            pair.slim,
        );
        for share in &pair.functions {
            let what = format!("  {} ({})", share.function, share.object);
            row(what, 1.0, share.bare, share.slim);
        }
        for call in &self.mpi {
            let what = format!("Open MPI, 8 bytes: {}", call.name);
            row(what, call.each_pair, call.bare, call.slim);
        }
        let mut notes = vec![format!(
            "Counted by {}, in the application's thread. SLIM's budget for a pair is {BUDGET:.0} instructions.",
            match pair.counter {
                Counter::Perf => "the processor (functions by callgrind)",
                Counter::Callgrind => "callgrind",
            }
        )];
        if !self.mpi.is_empty() {
            notes.push(
                "Open MPI polls while it waits, and more often under valgrind: its numbers of calls are not comparable, the cost of one call is.".into(),
            );
        }
        Section {
            title: "Instructions of a small message".into(),
            table,
            notes,
            plots: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_of_perf_without_a_count_is_noticed() {
        assert_eq!(
            perf_count("# started\n\n4711,,instructions:u,99,100.00,,\n"),
            Some(4711)
        );
        assert_eq!(
            perf_count("<not supported>,,instructions:u,0,100.00,,\n"),
            None
        );
        assert_eq!(perf_count(""), None);
    }
}
