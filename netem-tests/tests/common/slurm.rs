//! A Slurm of its own for each lab: one controller, and a daemon on every node.
//!
//! All its files are in the lab's directory, and all its processes are in the lab's nodes. So it touches neither the system's
//! services nor another lab, and it ends with the lab.

use std::{
    fmt, fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use slim_lab::{Lab, artifacts, output::Running};

use super::{events::events_dir, eventually};

/// The programs, where Debian installs them.
const PROGRAMS: [&str; 5] = [
    "/usr/bin/srun",
    "/usr/bin/salloc",
    "/usr/sbin/munged",
    "/usr/sbin/slurmctld",
    "/usr/sbin/slurmd",
];
/// How long the daemons may take until all nodes are ready for jobs.
const READY: Duration = Duration::from_secs(20);

/// A running Slurm.
pub struct Slurm<'a> {
    lab: &'a Lab,
    config: PathBuf,
    daemons: Vec<(&'static str, Running)>,
}

/// The reason why there can be no Slurm here, if there is one.
pub fn missing() -> Option<String> {
    let missing = PROGRAMS.iter().find(|program| !Path::new(program).exists());
    missing.map(|program| format!("{program} not found; run scripts/setup"))
}

impl<'a> Slurm<'a> {
    /// Starts it on all nodes of `lab`. `with_slim`: the daemons that start the ranks (slurmd) have the library.
    pub fn start(lab: &'a Lab, with_slim: bool) -> Self {
        let mut slurm = Slurm {
            lab,
            config: lab.dir().join("slurm.conf"),
            daemons: Vec::new(),
        };
        slurm.configure();
        let files = |kind: &str| lab.dir().join(format!("munge.{kind}"));
        let munge = ["key", "socket", "pid", "log", "seed"].map(files);
        let [key, socket, pid, log, seed] = munge.map(|file| file.display().to_string());
        slurm.daemon(0, "munged", |command| {
            // Its other files would have to be out of reach for everyone, which /tmp is not.
            command.args(["--foreground", "--force"]);
            command.args([format!("--key-file={key}"), format!("--socket={socket}")]);
            command.args([format!("--pid-file={pid}"), format!("--log-file={log}")]);
            command.arg(format!("--seed-file={seed}"));
        });
        let ready = eventually(READY, || Path::new(&socket).exists());
        assert!(ready, "munged is not ready: {slurm}");
        let config = slurm.config.clone();
        slurm.daemon(0, "slurmctld", |command| {
            command.arg("-D").arg("-f").arg(&config);
        });
        for node in 0..lab.nodes().len() {
            slurm.daemon(node, "slurmd", |command| {
                command.arg("-D").arg("-f").arg(&config);
                if with_slim {
                    command.env(
                        "LD_PRELOAD",
                        artifacts::preload().expect("the preload library"),
                    );
                    command.env("SLIM_EVENTS", events_dir(lab).join("%h.%p.jsonl"));
                }
            });
        }
        let idle = format!("{} idle", lab.nodes().len());
        let ready = eventually(READY, || {
            let state = slurm.command("sinfo").args(["-h", "-o", "%D %t"]).output();
            state.is_ok_and(|out| String::from_utf8_lossy(&out.stdout).trim() == idle)
        });
        assert!(ready, "Slurm is not ready: {slurm}");
        slurm
    }

    /// Writes its configuration and its key.
    fn configure(&self) {
        let dir = self.lab.dir();
        let names: Vec<_> = self.lab.nodes().iter().map(|node| node.name()).collect();
        let text = CONFIG.replace("DIR", &dir.display().to_string());
        let text = text.replace("NODES", &names.join(","));
        fs::write(&self.config, text).expect("write a file");
        // The nodes show no control groups. Nothing here uses them, but slurmd asks for a kind.
        fs::write(dir.join("cgroup.conf"), "CgroupPlugin=cgroup/v1\n").expect("write a file");
        fs::create_dir(dir.join("state")).expect("make a directory");
        for node in self.lab.nodes() {
            fs::create_dir(node.tmp().join("spool")).expect("make a directory");
        }
        // Both nodes have the same key, and nobody else is to be kept out.
        let key = dir.join("munge.key");
        fs::write(&key, [7; 128]).expect("write a file");
        fs::set_permissions(key, fs::Permissions::from_mode(0o600)).expect("set permissions");
    }

    fn daemon(&mut self, node: usize, name: &'static str, complete: impl FnOnce(&mut Command)) {
        let program = Path::new("/usr/sbin").join(name);
        let mut command = self.lab.node(node).command(program);
        command.env_remove("LD_PRELOAD");
        complete(&mut command);
        let running = Running::start(command).expect("start a daemon of Slurm");
        self.daemons.push((name, running));
    }

    /// A command on the first node, which finds this Slurm.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = self.lab.node(0).command(program);
        command
            .env("SLURM_CONF", &self.config)
            .env_remove("LD_PRELOAD");
        command
    }
}

/// The last lines of all daemons, for messages.
impl fmt::Display for Slurm<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, daemon) in &self.daemons {
            let lines = daemon.lines();
            for line in &lines[lines.len().saturating_sub(8)..] {
                writeln!(f, "  {name}: {}", line.text)?;
            }
        }
        Ok(())
    }
}

/// `%n` is the name of a node. The nodes may have more processors than this machine. Temporary files of jobs are in the node's
/// own directory.
const CONFIG: &str = "\
ClusterName=lab
SlurmctldHost=nodeA
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=DIR/munge.socket
CredType=cred/munge
StateSaveLocation=DIR/state
SlurmctldPidFile=DIR/slurmctld.pid
SlurmdPidFile=DIR/%n/slurmd.pid
SlurmdSpoolDir=DIR/%n/spool
TmpFS=DIR/%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
NodeName=NODES CPUs=4 State=UNKNOWN
PartitionName=lab Nodes=ALL Default=YES State=UP
";
