//! Builds mpirun's command line, and runs the job.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use super::{Flavor, Mpi, Outcome, Progress};
use crate::{Lab, Node, Process, Result, artifacts, launch, output::Running, standstill};

/// How long a launcher on this host may take to end its ranks.
const END: Duration = Duration::from_secs(15);

/// A job to be run on a lab.
#[derive(Clone, Debug)]
pub struct Job<'a> {
    lab: &'a Lab,
    mpi: &'a Mpi,
    program: PathBuf,
    args: Vec<OsString>,
    ranks: usize,
    /// Number of nodes with ranks.
    nodes: usize,
    preload: Option<PathBuf>,
    component: Option<PathBuf>,
    networks: Option<String>,
    bare_nodes: bool,
    options: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
}

/// Arguments for Open MPI's mpirun: spreads `ranks` evenly over the nodes of the lab, and makes them communicate
/// by TCP on its first path.
pub fn placement(lab: &Lab, ranks: usize) -> Vec<String> {
    let how = by_tcp(&lab.subnet(0));
    on_nodes(lab.nodes(), ranks)
        .into_iter()
        .chain(how)
        .collect()
}

/// The same for `slim run --btl`, which makes ranks communicate by the native component, on all paths.
pub fn component_placement(lab: &Lab, ranks: usize) -> Vec<String> {
    let unbound = ["--bind-to", "none"].map(str::to_owned);
    on_nodes(lab.nodes(), ranks)
        .into_iter()
        .chain(unbound)
        .collect()
}

fn on_nodes(nodes: &[Node], ranks: usize) -> Vec<String> {
    ["-H", &hosts(nodes, ranks), "-np", &ranks.to_string()]
        .map(str::to_owned)
        .into()
}

/// Arguments for Open MPI's mpirun: makes ranks communicate by TCP only, on this network or interface.
pub fn by_tcp(network: &str) -> Vec<String> {
    by("tcp", network)
}

/// Ranks that talk by this byte-transfer component and nothing else, on this network or interface.
fn by(component: &str, network: &str) -> Vec<String> {
    // No binding: all nodes share this machine's cores, and would bind their first rank to the same one.
    let how = ["--bind-to", "none", "--mca", "pml", "ob1"];
    let list = format!("{component},self");
    let include = format!("btl_{component}_if_include");
    let path = ["--mca", "btl", &list, "--mca", &include, network];
    how.into_iter().chain(path).map(str::to_owned).collect()
}

/// What Open MPI 5.0 needs to go on without failed ranks (ULFM), in a lab whose ranks share the processors: docs/ULFM.md says why.
pub const ULFM_OPTIONS: [&str; 14] = [
    "--with-ft",
    "ulfm",
    "--mca",
    "async_mpi_finalize",
    "1",
    "--mca",
    "mpi_add_procs_cutoff",
    "1024",
    "--mca",
    "coll",
    "^han",
    "--mca",
    "mpi_yield_when_idle",
    "1",
];

/// Variables that make ranks of this MPI communicate by TCP only, on the first path, whichever launcher starts them.
pub fn tcp_environment(lab: &Lab, mpi: &Mpi) -> Vec<(String, String)> {
    if mpi.flavor().is_mpich() {
        let device = ("UCX_NET_DEVICES".to_owned(), lab.node(0).interface(0));
        let all = BY_TCP.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let all = all.into_iter().chain([device]);
        return all.chain(intel_environment(mpi)).collect();
    }
    let options = by_tcp(&lab.subnet(0));
    let parameters = options.windows(3).filter(|words| words[0] == "--mca");
    let variable = |words: &[String]| (format!("OMPI_MCA_{}", words[1]), words[2].clone());
    parameters.map(variable).collect()
}

/// Variables by which Intel MPI finds itself and its transports, and without which it uses shared memory. They go to the other nodes
/// with all variables of the launcher.
fn intel_environment(mpi: &Mpi) -> Vec<(String, String)> {
    let Some(prefix) = mpi
        .prefix
        .as_ref()
        .filter(|_| mpi.flavor() == Flavor::Intel)
    else {
        return Vec::new();
    };
    let lib = prefix.join("lib").display().to_string();
    [
        ("I_MPI_ROOT", prefix.display().to_string()),
        ("I_MPI_FABRICS", "ofi".into()),
        ("FI_PROVIDER_PATH", lib.clone()),
        ("LD_LIBRARY_PATH", lib),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into()
}

/// [`placement`] for MPICH's launcher, hydra. Intel's takes no number of slots after the name of a host.
fn hydra_placement(nodes: &[Node], ranks: usize) -> Vec<String> {
    let slots = ranks.div_ceil(nodes.len());
    let hosts = hosts(nodes, ranks);
    let words = [
        "-hosts",
        &hosts,
        "-ppn",
        &slots.to_string(),
        "-n",
        &ranks.to_string(),
    ];
    words.map(str::to_owned).to_vec()
}

/// The list of nodes for a launcher, each with its number of slots.
fn hosts(nodes: &[Node], ranks: usize) -> String {
    let slots = ranks.div_ceil(nodes.len());
    let hosts: Vec<_> = nodes
        .iter()
        .map(|n| format!("{}:{slots}", n.name()))
        .collect();
    hosts.join(",")
}

/// Variables that make MPICH communicate by TCP only, with any of the devices that it may be built for.
const BY_TCP: [(&str, &str); 4] = [
    // Not about TCP: ranks that have this do not ask their daemon for a file in /tmp, which is left there if the job is killed.
    ("HWLOC_XMLFILE", "/nonexistent"),
    ("UCX_TLS", "tcp,self"),
    ("FI_PROVIDER", "tcp"),
    ("MPIR_CVAR_NOLOCAL", "1"),
];

/// What `mca_base_component_path` has to be: this directory before the MPI's own components. (Those of Open MPI 5.0 are in its
/// libraries.)
pub fn component_path(mpi: &Mpi, dir: &Path) -> OsString {
    let mut path = OsString::from(dir);
    if mpi.flavor() == Flavor::OpenMpi4 {
        path.push(":/usr/lib/x86_64-linux-gnu/openmpi/lib/openmpi3");
    }
    path
}

/// Options by which mpirun's ranks find the component in `dir`.
pub fn component_arguments(mpi: &Mpi, dir: &Path) -> Vec<OsString> {
    let mut words: Vec<OsString> = ["--mca", "mca_base_component_path"].map(Into::into).into();
    words.push(component_path(mpi, dir));
    if mpi.flavor() == Flavor::OpenMpi5Components {
        // PMIx has a parameter of this name, too, and warns of components that are not its own.
        words.extend(["--pmixmca", "mca_base_component_path"].map(Into::into));
        words.push(dir.join("none").into());
    }
    words
}

impl<'a> Job<'a> {
    /// A job that runs `program` on two ranks, without SLIM.
    pub fn new(lab: &'a Lab, mpi: &'a Mpi, program: impl Into<PathBuf>) -> Self {
        Job {
            lab,
            mpi,
            program: program.into(),
            args: Vec::new(),
            ranks: 2,
            nodes: lab.nodes().len(),
            preload: None,
            component: None,
            networks: None,
            bare_nodes: false,
            options: Vec::new(),
            env: Vec::new(),
        }
    }

    /// Adds an argument for the program.
    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }

    /// Number of ranks, spread evenly over the nodes.
    pub fn ranks(mut self, ranks: usize) -> Self {
        self.ranks = ranks;
        self
    }

    /// Places ranks only on the first `nodes` nodes.
    pub fn nodes(mut self, nodes: usize) -> Self {
        self.nodes = nodes;
        self
    }

    /// Runs mpirun, its daemons and the ranks under this preload library.
    pub fn preload(mut self, library: impl Into<PathBuf>) -> Self {
        self.preload = Some(library.into());
        self
    }

    /// Makes the ranks use `mca_btl_slim.so` in this directory, on all paths of the lab, and no other component.
    pub fn component(mut self, dir: impl Into<PathBuf>) -> Self {
        self.component = Some(dir.into());
        self
    }

    /// Makes the component use these interfaces and networks, with commas between, and not the networks of all paths.
    pub fn networks(mut self, networks: impl Into<String>) -> Self {
        self.networks = Some(networks.into());
        self
    }

    /// Limits the preload to the node of mpirun. Daemons and ranks on the other nodes run without it.
    pub fn first_node_only(mut self) -> Self {
        self.bare_nodes = true;
        self
    }

    /// Sets a variable for mpirun. It is carried to the other nodes if its name is `SLIM` or begins with `SLIM_`.
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// Adds a word to mpirun's command line, before the program.
    pub fn option(mut self, word: impl Into<OsString>) -> Self {
        self.options.push(word.into());
        self
    }

    /// The networks of all paths, with commas between.
    fn subnets(&self) -> String {
        let all = (0..self.lab.paths()).map(|path| self.lab.subnet(path));
        all.collect::<Vec<_>>().join(",")
    }

    /// The mpirun command, to be run on the first node.
    pub fn command(&self) -> Result<Command> {
        let agent = artifacts::program("slim-lab-agent")?;
        let nodes = self.lab.nodes();
        let mut command = nodes[0].command(self.mpi.mpirun());
        match self.mpi.flavor() {
            flavor if flavor.is_mpich() => {
                command
                    .args(["-launcher", "ssh", "-launcher-exec"])
                    .arg(agent)
                    .args(hydra_placement(&nodes[..self.nodes], self.ranks))
                    .envs(tcp_environment(self.lab, self.mpi));
            }
            flavor => {
                if let Some(prefix) = &self.mpi.prefix {
                    command.arg("--prefix").arg(prefix);
                }
                command.args(match flavor {
                    Flavor::OpenMpi4 => ["--mca", "plm_rsh_agent"],
                    _ => ["--prtemca", "plm_ssh_agent"],
                });
                command
                    .arg(agent)
                    .arg("--allow-run-as-root")
                    .args(on_nodes(&nodes[..self.nodes], self.ranks));
                match &self.component {
                    None => command.args(by_tcp(&self.subnets())),
                    Some(dir) => command.args(component_arguments(self.mpi, dir)).args(by(
                        "slim",
                        self.networks.as_ref().unwrap_or(&self.subnets()),
                    )),
                };
            }
        }
        command
            .args(&self.options)
            .arg(&self.program)
            .args(&self.args);
        command.envs(launch::environment(self.lab));
        command.env_remove("LD_PRELOAD");
        // Settings of the tests, which a job must not inherit.
        command
            .env_remove("SLIM_SOAK")
            .env_remove("SLIM_SOAK_JOBS")
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
        Started::of(self.lab, self.command()?)
    }
}

/// A running job. Dropping it kills its launcher, and its processes on all nodes of the lab.
#[derive(Debug)]
pub struct Started<'a> {
    /// None: the job runs on this host.
    lab: Option<&'a Lab>,
    running: Running,
}

impl<'a> Started<'a> {
    /// A job on `lab` that this command starts.
    pub fn of(lab: &'a Lab, command: Command) -> Result<Self> {
        Ok(Started {
            lab: Some(lab),
            running: Running::start(command)?,
        })
    }

    /// A job on this host, in no lab.
    pub fn here(command: Command) -> Result<Self> {
        Ok(Started {
            lab: None,
            running: Running::start(command)?,
        })
    }

    /// Kills the launcher, and all processes of the lab, which it returns. Without a lab only the launcher knows its ranks: it is asked to end first.
    fn kill(&mut self) -> Vec<Process> {
        if self.lab.is_none() {
            self.running.terminate(END);
        }
        self.running.kill();
        let nodes = self.lab.iter().flat_map(|lab| lab.nodes());
        nodes.flat_map(Node::kill_all).collect()
    }

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

    /// Waits for the end. A job that still runs after `limit` is killed and counts as hung; its last state is then recorded in
    /// the lab's directory.
    pub fn wait(mut self, limit: Duration) -> Outcome {
        let status = self.running.wait(limit);
        let took = self.running.elapsed();
        if status.is_none()
            && let Some(Err(error)) = self.lab.map(standstill::record)
        {
            eprintln!("cannot record the state of the hung job: {error}");
        }
        let left = self.kill().into_iter().map(|p| p.name).collect();
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
        self.kill();
    }
}
