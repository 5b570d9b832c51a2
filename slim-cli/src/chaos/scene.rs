//! The place of the faults: a lab, or a job that runs already.

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use procfs::process::all_processes;
use slim_lab::faults::{adapter, lines};
use slim_lab::{Error, Lab, Netns, Node};

use super::plan::{FaultKind, Plan, PlannedFault};

/// The place of the faults.
#[derive(Debug)]
pub enum Scene {
    /// A lab: every kind of fault, on any node.
    Lab(Box<Lab>),
    /// The connections of a process and its descendants.
    Job {
        /// The process.
        pid: u32,
        /// Its network namespace.
        net: Netns,
    },
    /// All connections in the network namespace of a process.
    Namespace {
        /// The process.
        pid: u32,
        /// The namespace.
        net: Netns,
        /// Whether it is that of this process.
        is_own: bool,
    },
}

impl Scene {
    /// The scene of a running process: its own connections, or with `whole_namespace` all
    /// connections of its network namespace.
    pub fn of_process(pid: u32, whole_namespace: bool) -> Result<Self, Error> {
        if !Path::new(&format!("/proc/{pid}")).exists() {
            return Err(Error::Invalid(format!("there is no process {pid}")));
        }
        let net = Netns::of_process(pid)?;
        if !whole_namespace {
            return Ok(Self::Job { pid, net });
        }
        let namespace = |who: &str| fs::read_link(format!("/proc/{who}/ns/net")).ok();
        let is_own = namespace(&pid.to_string()) == namespace("self");
        Ok(Self::Namespace { pid, net, is_own })
    }

    /// Checks that every fault of `plan` can be made here. The error is one line about the first that cannot.
    pub fn admits(&self, plan: &Plan) -> Result<(), String> {
        for (n, fault) in plan.faults.iter().enumerate() {
            self.admits_fault(fault)
                .map_err(|what| format!("fault {} ({}): {what}", n + 1, fault.kind.name()))?;
        }
        Ok(())
    }

    fn admits_fault(&self, fault: &PlannedFault) -> Result<(), String> {
        match self {
            Self::Lab(lab) => {
                let names: Vec<_> = lab.nodes().iter().map(Node::name).collect();
                if fault.node != "any" && !names.contains(&fault.node.as_str()) {
                    return Err(format!(
                        "no node `{}` in the lab ({})",
                        fault.node,
                        names.join(", ")
                    ));
                }
                if fault.path() >= lab.paths() {
                    return Err(format!(
                        "no path {} in the lab, which has {}",
                        fault.path(),
                        lab.paths()
                    ));
                }
                match fault.adapter {
                Some(_) => Err(
                    "a lab has no adapter: start the command yourself, and give its --pid".into(),
                ),
                None => Ok(()),
            }
            }
            _ if fault.node != "any" => Err("`node` is for the lab only".into()),
            _ if fault.path.is_some() => Err("`path` is for the lab only".into()),
            Self::Job { net, .. } | Self::Namespace { net, .. } if fault.adapter.is_some() => {
                admits_adapter(net, fault).map_err(|e| e.to_string())
            }
            Self::Job { .. } if fault.kind != FaultKind::Kill => {
                Err("on a running job only `kill` and faults of an adapter are possible".into())
            }
            Self::Namespace { is_own: true, .. } if fault.kind != FaultKind::Kill => Err(
                "it would hit the whole host: only `kill` and faults of an adapter are possible in our own namespace".into(),
            ),
            Self::Namespace { net, .. } => match fault.kind {
                FaultKind::Kill
                | FaultKind::Drop
                | FaultKind::Flush
                | FaultKind::Reset
                | FaultKind::SynFull => Ok(()),
                FaultKind::Netem => {
                    let names = net.interfaces().map_err(|e| e.to_string())?;
                    let free = |name: &String| lines::check_free(net, name);
                    names.iter().try_for_each(free).map_err(|e| e.to_string())
                }
                _ => Err("this kind is for the lab only".into()),
            },
            Self::Job { .. } => Ok(()),
        }
    }

    /// The lab.
    pub fn lab(&self) -> Result<&Lab, Error> {
        match self {
            Self::Lab(lab) => Ok(lab),
            _ => Err(Error::Invalid("there is no lab".into())),
        }
    }

    /// Does the process of `--pid` still run? Always true of a lab.
    pub fn is_alive(&self) -> bool {
        match self {
            Self::Job { pid, .. } | Self::Namespace { pid, .. } => has_threads(*pid),
            Self::Lab(_) => true,
        }
    }
}

/// Whether a thread of the process runs still. The first one may have ended before the others.
fn has_threads(pid: u32) -> bool {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"));
    // A thread that has ended has no namespaces any more.
    let runs = |task: fs::DirEntry| fs::metadata(task.path().join("ns/net")).is_ok();
    tasks.is_ok_and(|tasks| tasks.flatten().any(runs))
}

/// Checks that a fault of an adapter can be made.
fn admits_adapter(net: &Netns, fault: &PlannedFault) -> Result<(), Error> {
    let device = fault.adapter.as_deref().unwrap_or_default();
    let interface = adapter::interface_of(net, device)?;
    match fault.kind {
        FaultKind::AdapterGone => adapter::check_soft(device),
        FaultKind::Netem => lines::check_free(net, &interface),
        _ => Ok(()),
    }
}

/// `root` and its present descendants.
pub fn descendants(root: u32) -> HashSet<u32> {
    let processes = all_processes().into_iter().flatten().flatten();
    let parents: Vec<(u32, u32)> = processes
        .filter_map(|process| process.stat().ok())
        .map(|stat| (stat.pid as u32, stat.ppid as u32))
        .collect();
    let mut family = HashSet::from([root]);
    loop {
        let before = family.len();
        family.extend(
            parents
                .iter()
                .filter(|(_, p)| family.contains(p))
                .map(|(pid, _)| *pid)
                .collect::<Vec<_>>(),
        );
        if family.len() == before {
            return family;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;
    use std::time::Duration;

    use rustix::process::{Pid, Signal, kill_process};

    #[test]
    fn descendants_include_grandchildren() {
        // The shell forks a child because another command follows.
        let mut child = Command::new("sh")
            .args(["-c", "sleep 20; true"])
            .spawn()
            .unwrap();
        let start = std::time::Instant::now();
        let mut family = descendants(child.id());
        while family.len() < 2 && start.elapsed() < Duration::from_secs(5) {
            family = descendants(child.id());
        }
        let mine = descendants(std::process::id());
        assert!(
            family.len() == 2 && family.is_subset(&mine),
            "{family:?} of {mine:?}"
        );
        for pid in family.iter().filter(|pid| **pid != child.id()) {
            kill_process(Pid::from_raw(*pid as i32).unwrap(), Signal::KILL).unwrap();
        }
        child.wait().unwrap();
    }

    #[test]
    fn a_running_job_admits_only_kills() {
        let scene = Scene::of_process(std::process::id(), false).unwrap();
        let plan = |kind: &str| Plan::parse(&format!("[[fault]]\nkind = \"{kind}\"\n")).unwrap();
        scene.admits(&plan("kill")).unwrap();
        for kind in ["drop", "rst", "link-down"] {
            assert!(
                scene
                    .admits(&plan(kind))
                    .unwrap_err()
                    .contains("only `kill`"),
                "{kind}"
            );
        }
        let own = Scene::of_process(std::process::id(), true).unwrap();
        assert!(
            own.admits(&plan("drop"))
                .unwrap_err()
                .contains("the whole host")
        );
    }

    #[test]
    fn an_ended_job_is_noticed() {
        let mut child = Command::new("sleep").arg("20").spawn().unwrap();
        let scene = Scene::of_process(child.id(), false).unwrap();
        assert!(scene.is_alive());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!scene.is_alive());
    }
}
