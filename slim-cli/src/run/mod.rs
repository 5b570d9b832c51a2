//! `slim run`: runs a command under the preload library, on this and on other hosts.

pub mod beside;
pub mod budgets;
mod carry;
pub mod component;
pub mod entry;
mod export_list;
pub mod hosts;
mod hydra;
mod intel;
pub mod launcher;
mod line;
mod means;
pub mod mpis;
mod openmpi;
mod option_file;
pub mod preload;
mod relay;
mod srun;
pub mod watch;
pub mod witness;

use std::env;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, exit};

use clap::Args;
use slim_core::config::{Config, TOOL_VARIABLES};

use crate::agent;
use crate::failure::{CliError, NOT_EXECUTABLE};
use crate::settings::{self, Settings};
use crate::shell;
use entry::OpenMpi;
use launcher::Launcher;
use line::GivenLine;
use means::Means;

/// Run a command, for instance mpirun or srun, under SLIM.
///
/// The command replaces this program, so the exit status is that of the command.
/// Status 2 means that the input was wrong and nothing was started. For an MPI job
/// give mpirun itself, not a script that calls it: daemons on other hosts are
/// reached through its options. With Slurm, put `slim run` before srun, mpirun or
/// mpiexec, not before sbatch or salloc; with a standing machine of PRRTE, before
/// prte and before prun. Launchers that are not supported yet are refused.
#[derive(Args, Debug, Default)]
pub struct RunOptions {
    /// The preload library (default: next to this program, or ../lib; or SLIM_PRELOAD).
    #[arg(long, value_name = "FILE")]
    pub preload: Option<PathBuf>,
    /// Event log, one JSON object a line (%p: process id, %h: host name).
    #[arg(long, value_name = "FILE")]
    pub events: Option<PathBuf>,
    /// Log level on stderr: off, error, warn, info, debug or trace.
    #[arg(long, value_name = "LEVEL")]
    pub log: Option<String>,
    /// Use SLIM: off, preferred (with peers that have it) or required.
    #[arg(long, value_name = "POLICY")]
    pub policy: Option<String>,
    /// Any other setting, as SLIM_NAME=VALUE; may be repeated.
    #[arg(long = "set", value_name = "NAME=VALUE")]
    pub set: Vec<String>,
    /// Have the ranks of Open MPI 4.1 or 5.0 talk by the native component (slim-btl) instead of btl/tcp; the library stays under
    /// everything. Where that cannot be, a line says why, and the job, or the ranks that it concerns, run without the component.
    #[arg(long)]
    pub btl: bool,
    /// Print the command with its environment instead of running it.
    #[arg(long)]
    pub print: bool,
    /// The command and its arguments.
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// A checked command, ready to be executed.
#[derive(Debug)]
pub struct RunPlan {
    program: PathBuf,
    args: Vec<OsString>,
    set: Vec<(String, OsString)>,
    unset: Vec<String>,
    /// Lines for the user.
    notes: Vec<String>,
    /// Ranks are to report that they use the component.
    is_watched: bool,
    /// The settings of a job that gets a witness.
    witnessed: Option<Settings>,
}

/// Runs the command. Returns only on failure.
pub fn main(options: &RunOptions) -> CliError {
    let mut plan = match RunPlan::new(options) {
        Ok(plan) => plan,
        Err(failure) => return failure,
    };
    for note in &plan.notes {
        eprintln!("slim: {note}");
    }
    if options.print {
        if plan.witnessed.is_some() {
            eprintln!(
                "slim: --with-ft: a run has a witness beside mpirun, which this command has not"
            );
        }
        println!("{}", plan.line());
        exit(0);
    }
    if plan.is_watched {
        match watch::start() {
            Ok(value) => plan.set.push((watch::WATCH_VARIABLE.into(), value.into())),
            Err(e) => eprintln!("slim: --btl: the ranks are not watched: {e}"),
        }
    }
    if let Some(settings) = &plan.witnessed {
        let at = witness::start(settings)
            .inspect_err(|e| eprintln!("slim: --with-ft: the job gets no witness: {e}"));
        for (name, value) in witness::settings_of_ranks(at.ok()) {
            plan.args.splice(0..0, ["-x".into(), name.into()]);
            plan.set.push((name.into(), value.into()));
        }
    }
    let error = plan.command().exec();
    CliError::new(
        NOT_EXECUTABLE,
        format!("{}: {error}", plan.program.display()),
    )
}

impl RunPlan {
    /// Checks everything that can be checked before the command starts.
    pub fn new(options: &RunOptions) -> Result<Self, CliError> {
        let (mut settings, config) = settings_of(options)?.checked()?;
        let library = preload::find(options.preload.as_deref())?;
        let name = options.command[0].to_string_lossy().into_owned();
        let program = launcher::resolve(&name)?;
        let args = &options.command[1..];

        let joined = preload::joined(&library, env::var_os("LD_PRELOAD").as_deref());
        let mut plan = Self {
            program,
            args: args.to_vec(),
            set: vec![("LD_PRELOAD".into(), joined.clone().into())],
            unset: TOOL_VARIABLES.map(String::from).to_vec(),
            notes: Vec::new(),
            is_watched: false,
            witnessed: None,
        };
        match launcher::classify(&plan.program) {
            Launcher::Plain if options.btl => {
                plan.notes.push(without_component("this is no mpirun"));
            }
            Launcher::Plain => {}
            Launcher::NotYet(what) => {
                let library = library.display().to_string();
                return Err(CliError::input(launcher::not_yet(what, &name, &library)));
            }
            Launcher::Of(mpi) => {
                refuse_visible_key(&settings)?;
                let variable = |name: &str| env::var_os(name);
                let given = GivenLine {
                    syntax: &mpi.syntax,
                    args,
                    in_file: mpi.options_in_file(&plan.program, args, &variable),
                };
                hosts::make_peers(&mut settings, hosts::of_job(&given, mpi.host_files));
                let mut exported = vec![("LD_PRELOAD", joined.as_str())];
                exported.extend(settings.iter());
                let means = Means {
                    launcher: &plan.program,
                    library: &library,
                    wrapper: &wrapper()?,
                    variable: &variable,
                };
                let ready = carry::prepare(mpi, &given, &exported, &means)?;
                plan.args = ready.args;
                plan.set.extend(ready.set);
                plan.unset.extend(ready.unset);
                match mpi.open_mpi {
                    Some(version) => {
                        let own = mpi.syntax.own(args);
                        plan.open_mpi(version, &own, options, &settings, &config);
                    }
                    None if options.btl => {
                        let why = format!("this is {}", mpi.name);
                        plan.notes.push(without_component(&why));
                    }
                    None => {}
                }
            }
        }
        plan.set
            .extend(settings.iter().map(|(n, v)| (n.to_owned(), v.into())));
        Ok(plan)
    }

    /// Adds what only Open MPI has: the native component, and a witness. `own` are the options before the programs; parameters
    /// count wherever they are.
    fn open_mpi(
        &mut self,
        version: OpenMpi,
        own: &[OsString],
        options: &RunOptions,
        settings: &Settings,
        config: &Config,
    ) {
        let args = &options.command[1..];
        if options.btl {
            match component::arguments(version, &self.program, args) {
                Ok(mut front) => {
                    front.extend(["-x", watch::WATCH_VARIABLE].map(Into::into));
                    self.args.splice(0..0, front);
                    self.is_watched = true;
                }
                Err(why) => self.notes.push(without_component(&why)),
            }
        }
        if witness::is_wanted(version, own) && config.witness.is_empty() {
            match config.job_key {
                Some(_) => self.witnessed = Some(settings.clone()),
                None => self.notes.push(witness::NO_KEY.into()),
            }
        }
        let witnessed = self.witnessed.is_some() || !config.witness.is_empty();
        self.notes.extend(budgets::note(config, witnessed, args));
    }

    /// The command, with this process's environment and the changes to it.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.args);
        for name in &self.unset {
            command.env_remove(name);
        }
        for (name, value) in &self.set {
            command.env(name, value);
        }
        command
    }

    /// The command as a line for a shell.
    fn line(&self) -> String {
        let mut words = vec!["env".to_owned()];
        for name in self.unset.iter().filter(|n| env::var_os(n).is_some()) {
            words.push(format!("-u {name}"));
        }
        for (name, value) in &self.set {
            words.push(format!("{name}={}", shell::quote(&value.to_string_lossy())));
        }
        words.push(shell::quote(&self.program.to_string_lossy()));
        words.extend(self.args.iter().map(|a| shell::quote(&a.to_string_lossy())));
        words.join(" ")
    }
}

fn settings_of(options: &RunOptions) -> Result<Settings, CliError> {
    let mut settings = Settings::from_env()?;
    for pair in &options.set {
        settings.set_pair(pair)?;
    }
    if let Some(policy) = &options.policy {
        settings.set("SLIM", policy.as_str());
    }
    if let Some(level) = &options.log {
        settings.set("SLIM_LOG", level.as_str());
    }
    if let Some(path) = &options.events {
        let path = settings::absolute(path)?;
        let text = path
            .to_str()
            .ok_or_else(|| CliError::input(format!("--events {}: not UTF-8", path.display())))?;
        settings.set("SLIM_EVENTS", text);
    }
    Ok(settings)
}

/// Refuses a key in the environment: the agent's command line would show it in the process list of every host, and Slurm sends the
/// environment unencrypted.
fn refuse_visible_key(settings: &Settings) -> Result<(), CliError> {
    match settings.get("SLIM_JOB_KEY") {
        Some(_) => Err(CliError::input(
            "SLIM_JOB_KEY would be visible on its way to other hosts, in the process list or in messages of a batch system: put the key into a file and set SLIM_JOB_KEY_FILE",
        )),
        None => Ok(()),
    }
}

fn without_component(why: &str) -> String {
    format!("--btl: the native component is not used: {why}")
}

/// The path of the agent wrapper, next to this program.
fn wrapper() -> Result<PathBuf, CliError> {
    let here = env::current_exe()
        .map_err(|e| CliError::input(format!("cannot find this program: {e}")))?;
    let path = here.parent().unwrap_or(Path::new("/")).join(agent::PROGRAM);
    if !path.is_file() {
        return Err(CliError::input(format!(
            "{} is missing: install it next to slim",
            path.display()
        )));
    }
    // Launchers split the agent at blanks (arguments), Open MPI also at colons (alternatives).
    if path.to_string_lossy().contains([' ', ':', '\t', '"']) {
        return Err(CliError::input(format!(
            "{} has a blank, colon or quote in its path, which mpirun would split",
            path.display()
        )));
    }
    Ok(path)
}
