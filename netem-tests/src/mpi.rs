//! Real MPI jobs on a lab: build a program with an MPI's own compiler, run it over the nodes, read
//! what it says.
//!
//! mpirun's exit status is not to be trusted alone (some versions give 0 for a job that fell
//! apart): [`Outcome::verdict`] also asks for the program's own closing line.

use std::sync::atomic::{AtomicU32, Ordering};
use std::{
    env,
    ffi::OsString,
    fmt, fs,
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
    time::Duration,
};

use crate::{
    Error, Lab, Result, artifacts, launch,
    output::{Line, Running},
};

/// An MPI that the lab knows how to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Flavor {
    /// The distribution's Open MPI 4.1.
    OpenMpi4,
    /// Open MPI 5.0, from the wheel that `scripts/setup` installs.
    OpenMpi5,
}

impl Flavor {
    /// All of them.
    pub const ALL: [Flavor; 2] = [Flavor::OpenMpi4, Flavor::OpenMpi5];

    /// A short word for file names.
    pub fn word(self) -> &'static str {
        match self {
            Flavor::OpenMpi4 => "ompi4",
            Flavor::OpenMpi5 => "ompi5",
        }
    }
}

impl fmt::Display for Flavor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Flavor::OpenMpi4 => "Open MPI 4.1",
            Flavor::OpenMpi5 => "Open MPI 5.0",
        })
    }
}

/// An MPI as installed here.
#[derive(Clone, Debug)]
pub struct Mpi {
    flavor: Flavor,
    mpicc: PathBuf,
    mpirun: PathBuf,
    /// Given to mpirun so that it finds its daemon on the other nodes.
    prefix: Option<PathBuf>,
}

impl Mpi {
    /// Finds the MPI, or says what to install.
    pub fn find(flavor: Flavor) -> Result<Self> {
        let hint = "run scripts/setup";
        match flavor {
            Flavor::OpenMpi4 => {
                let mpirun = first(
                    ["mpirun.openmpi", "orterun"].map(|n| Path::new("/usr/bin").join(n)),
                    hint,
                )?;
                let mpicc = first([PathBuf::from("/usr/bin/mpicc.openmpi")], hint)?;
                Ok(Mpi {
                    flavor,
                    mpicc,
                    mpirun,
                    prefix: None,
                })
            }
            Flavor::OpenMpi5 => {
                let prefix = cache_dir().join("ompi5");
                let mpirun = first([prefix.join("bin/mpirun")], hint)?;
                let mpicc = first([prefix.join("bin/mpicc")], hint)?;
                Ok(Mpi {
                    flavor,
                    mpicc,
                    mpirun,
                    prefix: Some(prefix),
                })
            }
        }
    }

    /// Which one this is.
    pub fn flavor(&self) -> Flavor {
        self.flavor
    }

    /// The program that starts jobs.
    pub fn mpirun(&self) -> &Path {
        &self.mpirun
    }

    /// Builds a C program with this MPI's compiler, unless that was done since it was changed.
    /// Gives the path of the program.
    pub fn build(&self, source: &Path) -> Result<PathBuf> {
        let name = source
            .file_stem()
            .ok_or_else(|| Error::Invalid(format!("no file name: {}", source.display())))?;
        let program = artifacts::scratch(self.flavor.word())?.join(name);
        let changed = |path: &Path| fs::metadata(path).and_then(|m| m.modified());
        if let (Ok(built), Ok(written)) = (changed(&program), changed(source))
            && built > written
        {
            return Ok(program);
        }
        // Several may build it at the same time: each to a name of its own, then moved over.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let own = program.with_extension(format!("new{}.{n}", std::process::id()));
        let mut command = Command::new(&self.mpicc);
        command.args(["-O2", "-o"]).arg(&own).arg(source);
        let line = format!("{} -O2 {}", self.mpicc.display(), source.display());
        let output = command.output().map_err(Error::io(line.clone()))?;
        if !output.status.success() {
            return Err(Error::command(line, &output));
        }
        fs::rename(&own, &program).map_err(Error::io(program.display().to_string()))?;
        Ok(program)
    }

    /// Builds a program of the repository's `programs/`.
    pub fn build_program(&self, name: &str) -> Result<PathBuf> {
        self.build(&artifacts::source(name)?)
    }
}

/// Where `scripts/setup` puts what it downloads: `SLIM_CACHE`, else `~/.cache/slim`.
pub fn cache_dir() -> PathBuf {
    match env::var_os("SLIM_CACHE").filter(|v| !v.is_empty()) {
        Some(dir) => dir.into(),
        None => {
            PathBuf::from(env::var_os("HOME").unwrap_or_else(|| "/root".into())).join(".cache/slim")
        }
    }
}

fn first(candidates: impl IntoIterator<Item = PathBuf>, hint: &str) -> Result<PathBuf> {
    let tried: Vec<_> = candidates.into_iter().collect();
    match tried.iter().find(|path| path.exists()) {
        Some(path) => Ok(path.clone()),
        None => {
            let what = tried
                .last()
                .map(|p| p.display().to_string())
                .unwrap_or_default();
            Err(Error::Missing {
                what,
                tried: Vec::new(),
                hint: hint.into(),
            })
        }
    }
}

/// A job to be run on a lab.
#[derive(Clone, Debug)]
pub struct Job<'a> {
    lab: &'a Lab,
    mpi: &'a Mpi,
    program: PathBuf,
    args: Vec<OsString>,
    ranks: usize,
    preload: Option<PathBuf>,
    bare_nodes: bool,
    options: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
}

impl<'a> Job<'a> {
    /// `program` on two ranks, without SLIM.
    pub fn new(lab: &'a Lab, mpi: &'a Mpi, program: impl Into<PathBuf>) -> Self {
        Job {
            lab,
            mpi,
            program: program.into(),
            args: Vec::new(),
            ranks: 2,
            preload: None,
            bare_nodes: false,
            options: Vec::new(),
            env: Vec::new(),
        }
    }

    /// One more argument for the program.
    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }

    /// Number of ranks, spread evenly over the nodes.
    pub fn ranks(mut self, ranks: usize) -> Self {
        self.ranks = ranks;
        self
    }

    /// Runs mpirun, its daemons and the ranks under this preload library.
    pub fn preload(mut self, library: impl Into<PathBuf>) -> Self {
        self.preload = Some(library.into());
        self
    }

    /// With a preload: only where mpirun runs. Daemons and ranks of the other nodes run bare.
    pub fn first_node_only(mut self) -> Self {
        self.bare_nodes = true;
        self
    }

    /// A variable for mpirun, which is carried to the other nodes if its name starts with `SLIM`.
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// One more word for mpirun's command line, before the program.
    pub fn option(mut self, word: impl Into<OsString>) -> Self {
        self.options.push(word.into());
        self
    }

    /// The mpirun command, to be run on the first node.
    pub fn command(&self) -> Result<Command> {
        let agent = artifacts::program("slim-lab-agent")?;
        let nodes = self.lab.nodes();
        let slots = self.ranks.div_ceil(nodes.len());
        let hosts: Vec<_> = nodes
            .iter()
            .map(|node| format!("{}:{slots}", node.name()))
            .collect();
        let mut command = nodes[0].command(&self.mpi.mpirun);
        if let Some(prefix) = &self.mpi.prefix {
            command.arg("--prefix").arg(prefix);
        }
        match self.mpi.flavor {
            Flavor::OpenMpi4 => command.args(["--mca", "plm_rsh_agent"]),
            Flavor::OpenMpi5 => command.args(["--prtemca", "plm_ssh_agent"]),
        };
        command.arg(agent);
        command.args([
            "--allow-run-as-root",
            "-H",
            &hosts.join(","),
            "-np",
            &self.ranks.to_string(),
        ]);
        // All nodes would bind their first rank to the same core.
        command.args([
            "--bind-to",
            "none",
            "--mca",
            "pml",
            "ob1",
            "--mca",
            "btl",
            "tcp,self",
        ]);
        command.args(["--mca", "btl_tcp_if_include", &self.lab.subnet(0)]);
        command
            .args(&self.options)
            .arg(&self.program)
            .args(&self.args);
        command.envs(launch::environment(self.lab));
        command.env_remove("LD_PRELOAD");
        // Switches of the tests, of no use to what they start.
        command
            .env_remove("SLIM_SOAK")
            .env_remove(artifacts::PRELOAD_VAR);
        if let Some(library) = &self.preload {
            command.env("LD_PRELOAD", library);
        }
        if self.bare_nodes {
            command.env(launch::DROP_VAR, "LD_PRELOAD");
        }
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        Ok(command)
    }

    /// Starts the job.
    pub fn start(&self) -> Result<Started<'a>> {
        Ok(Started {
            lab: self.lab,
            running: Running::start(self.command()?)?,
        })
    }
}

/// A job that runs. Dropping it kills what is left of it on all nodes.
#[derive(Debug)]
pub struct Started<'a> {
    lab: &'a Lab,
    running: Running,
}

impl Started<'_> {
    /// The running mpirun and its output.
    pub fn running(&mut self) -> &mut Running {
        &mut self.running
    }

    /// Waits until the program reports its first second of work; false if it ends before or does
    /// not get there within `limit`.
    pub fn wait_working(&self, limit: Duration) -> bool {
        self.running
            .wait_line(limit, |line| Progress::parse(line).is_some())
    }

    /// Waits for the end; a job that still runs after `limit` is killed and counts as hung.
    pub fn wait(mut self, limit: Duration) -> Outcome {
        let status = self.running.wait(limit);
        let took = self.running.elapsed();
        if status.is_none() {
            self.running.kill();
        }
        let left = self
            .lab
            .nodes()
            .iter()
            .flat_map(|node| node.kill_all())
            .map(|p| p.name)
            .collect();
        Outcome {
            status,
            took,
            lines: self.running.lines(),
            left,
        }
    }
}

impl Drop for Started<'_> {
    fn drop(&mut self) {
        self.running.kill();
        self.lab
            .nodes()
            .iter()
            .for_each(|node| drop(node.kill_all()));
    }
}

/// What became of a job.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// mpirun's exit status; `None` if the job hung and was killed.
    pub status: Option<ExitStatus>,
    /// How long it ran.
    pub took: Duration,
    /// Everything that was written.
    pub lines: Vec<Line>,
    /// Names of processes that were still there afterwards, and were killed.
    pub left: Vec<String>,
}

/// A line of progress: `t=3 it=120 errs=0 MB=512 maxstall=0.012`, or `DONE ...` at the end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// Rounds done.
    pub rounds: u64,
    /// Wrong words seen.
    pub errors: u64,
    /// MiB moved by rank 0.
    pub mib: u64,
    /// Longest time in seconds that one step took at rank 0.
    pub max_stall: f64,
}

impl Progress {
    /// Reads a line of progress, closing or not.
    pub fn parse(line: &str) -> Option<Self> {
        let field = |name: &str| {
            line.split_whitespace()
                .find_map(|w| w.strip_prefix(name)?.strip_prefix('='))
        };
        Some(Progress {
            rounds: field("it")?.parse().ok()?,
            errors: field("errs")?.parse().ok()?,
            mib: field("MB")?.parse().ok()?,
            max_stall: field("maxstall")?.parse().ok()?,
        })
    }
}

/// How a job ended, in one word.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// Exit status 0, the closing line is there, all data right.
    Finished(Progress),
    /// Data was wrong.
    Wrong(Progress),
    /// It ended without finishing; the text has mpirun's exit status.
    Failed(String),
    /// It neither finished nor failed in time.
    Hung,
}

impl Outcome {
    /// The closing line, if the program got there.
    pub fn done(&self) -> Option<Progress> {
        self.lines
            .iter()
            .rev()
            .find(|l| l.text.contains("DONE "))
            .and_then(|l| Progress::parse(&l.text))
    }

    /// How the job ended.
    pub fn verdict(&self) -> Verdict {
        let seen = self
            .lines
            .iter()
            .rev()
            .find_map(|l| Progress::parse(&l.text));
        match (self.status, self.done(), seen) {
            (_, _, Some(last)) if last.errors > 0 => Verdict::Wrong(last),
            (None, _, _) => Verdict::Hung,
            (Some(status), Some(done), _) if status.success() => Verdict::Finished(done),
            (Some(status), Some(_), _) => {
                Verdict::Failed(format!("finished its work, then {status}"))
            }
            (Some(status), None, _) => Verdict::Failed(status.to_string()),
        }
    }

    /// The last lines of the output, for messages.
    pub fn tail(&self, lines: usize) -> String {
        let from = self.lines.len().saturating_sub(lines);
        let text = self.lines[from..]
            .iter()
            .map(|l| format!("  {:7.2} {}\n", l.at.as_secs_f64(), l.text));
        text.collect()
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Verdict::Finished(p) => {
                write!(
                    f,
                    "finished: {} rounds, {} MiB, longest stall {:.3} s",
                    p.rounds, p.mib, p.max_stall
                )
            }
            Verdict::Wrong(p) => write!(f, "WRONG DATA: {} words", p.errors),
            Verdict::Failed(how) => write!(f, "failed: {how}"),
            Verdict::Hung => f.write_str("hung"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;

    fn outcome(status: Option<i32>, lines: &[&str]) -> Outcome {
        let line = |text: &&str| Line {
            at: Duration::ZERO,
            text: (*text).to_owned(),
        };
        let status = status.map(|code| ExitStatus::from_raw(code << 8));
        Outcome {
            status,
            took: Duration::ZERO,
            lines: lines.iter().map(line).collect(),
            left: Vec::new(),
        }
    }

    const DONE: &str = "DONE it=12 errs=0 MB=34 maxstall=0.500";

    #[test]
    fn exit_zero_without_the_closing_line_is_a_failure() {
        assert!(matches!(
            outcome(Some(0), &["t=1 it=2 errs=0 MB=1 maxstall=0.1"]).verdict(),
            Verdict::Failed(_)
        ));
        let Verdict::Finished(progress) = outcome(Some(0), &[DONE]).verdict() else {
            panic!()
        };
        assert_eq!(
            progress,
            Progress {
                rounds: 12,
                errors: 0,
                mib: 34,
                max_stall: 0.5
            }
        );
    }

    #[test]
    fn wrong_data_is_worse_than_anything_else() {
        let wrong = outcome(None, &["t=1 it=2 errs=3 MB=1 maxstall=0.1"]);
        assert!(matches!(wrong.verdict(), Verdict::Wrong(p) if p.errors == 3));
        assert_eq!(outcome(None, &[DONE]).verdict(), Verdict::Hung);
        assert!(matches!(
            outcome(Some(1), &[DONE]).verdict(),
            Verdict::Failed(_)
        ));
    }
}
