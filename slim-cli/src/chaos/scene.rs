//! The place of the faults: a lab, or a job that runs already.

use std::collections::HashSet;
use std::fmt::Display;
use std::fs;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use procfs::process::all_processes;
use slim_lab::faults::destroy::{self, Selector};
use slim_lab::faults::diag::{self, DestroyOutcome, OpenConnection};
use slim_lab::faults::flush::{self, Forgotten};
use slim_lab::faults::inject::{self, Segment};
use slim_lab::faults::{lines, link, nft};
use slim_lab::{Error, Lab, Netns, Node, SeededRng};

use super::active::{ActiveFault, Ongoing};
use super::plan::{FaultKind, FlushAnswer, Hit, Plan, PlannedFault};
use super::report::Victim;

/// How long to try to inject a forged segment into a connection.
const INJECT_LIMIT: Duration = Duration::from_secs(1);

/// Packets of more bytes do not pass an MTU black hole. Control messages of SLIM, and TCP's segments without data, do.
const HOLE: u32 = 600;

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
        /// The namespace.
        net: Netns,
        /// Whether it is that of this process.
        is_own: bool,
    },
}

/// The effect of a fault.
#[derive(Debug)]
pub struct Strike {
    /// The node, or `-` outside a lab.
    pub node: String,
    /// Connections or processes hit, as far as that is known at once.
    pub hit: usize,
    /// What was hit, if it is one connection or process, chosen at random.
    pub victim: Option<Victim>,
    /// Description.
    pub detail: String,
    /// Ends the fault when dropped; none if it is over at once.
    pub guard: Option<ActiveFault>,
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
        Ok(Self::Namespace { net, is_own })
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
                Ok(())
            }
            _ if fault.node != "any" => Err("`node` is for the lab only".into()),
            _ if fault.path.is_some() => Err("`path` is for the lab only".into()),
            Self::Job { .. } if fault.kind != FaultKind::Kill => {
                Err("on a running job only `kill` is possible".into())
            }
            Self::Namespace { is_own: true, .. } if fault.kind != FaultKind::Kill => Err(
                "it would hit the whole host: only `kill` is possible in our own namespace".into(),
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

    /// Does the job still run? Always true of a lab and of a namespace.
    pub fn is_alive(&self) -> bool {
        match self {
            Self::Job { pid, .. } => fs::metadata(format!("/proc/{pid}/ns/net")).is_ok(),
            Self::Lab(_) | Self::Namespace { .. } => true,
        }
    }

    /// Makes a fault. `ongoing` is what faults of the whole run have in common.
    pub fn strike(
        &self,
        fault: &PlannedFault,
        rng: &mut SeededRng,
        ongoing: &Ongoing,
    ) -> Result<Strike, Error> {
        match fault.kind {
            FaultKind::Kill => self.kill(fault, rng),
            FaultKind::Rst => self.inject(fault, Segment::Rst, rng, ongoing),
            FaultKind::Fin => self.inject(fault, Segment::Fin, rng, ongoing),
            FaultKind::Drop => self.firewall(fault, &nft::Rule::drop(), rng),
            FaultKind::Reset => self.firewall(fault, &nft::Rule::reset(), rng),
            FaultKind::MtuHole => self.firewall(fault, &nft::Rule::drop().longer_than(HOLE), rng),
            FaultKind::SynFull => {
                self.firewall(fault, &nft::Rule::syn_full().only_ports(fault.port), rng)
            }
            FaultKind::Flush => self.flush(fault, rng),
            FaultKind::OneWay => self.one_way(fault, rng),
            FaultKind::Renumber => self.renumber(fault, rng, ongoing),
            FaultKind::Stop => self.stop(fault, rng, ongoing),
            FaultKind::Netem => self.netem(fault, rng, ongoing),
            FaultKind::LinkDown => {
                let node = self.node(fault, rng)?;
                let (path, interface) = (fault.path(), node.interface(fault.path()));
                let hit = on_path(node, path)?.len();
                let make = || link::down(node, path);
                let down = ongoing.links.share(node.name(), &interface, make)?;
                let detail = format!("{interface} down");
                Ok(lasting(node.name(), hit, detail, ActiveFault::Link(down)))
            }
            FaultKind::AddressGone => {
                let node = self.node(fault, rng)?;
                let (path, interface) = (fault.path(), node.interface(fault.path()));
                let hit = on_path(node, path)?.len();
                let make = || link::remove_address(node, path);
                let removed = ongoing.addresses.share(node.name(), &interface, make)?;
                let detail = format!("{interface} without its address");
                Ok(lasting(
                    node.name(),
                    hit,
                    detail,
                    ActiveFault::Address(removed),
                ))
            }
        }
    }

    fn kill(&self, fault: &PlannedFault, rng: &mut SeededRng) -> Result<Strike, Error> {
        let (name, net) = match self {
            Self::Lab(_) => {
                let node = self.node(fault, rng)?;
                (node.name(), node.net())
            }
            Self::Job { net, .. } | Self::Namespace { net, .. } => ("-", net),
        };
        let chosen = self.chosen(net, fault, rng)?;
        let fates = diag::destroy(net, &chosen)?;
        let destroyed: Vec<_> = chosen
            .iter()
            .zip(&fates)
            .filter(|(_, fate)| **fate == DestroyOutcome::Destroyed)
            .collect();
        let detail = listed(
            destroyed.iter().map(|(one, _)| one),
            "no connection to kill",
        );
        let victim = match (&*destroyed, fault.hit()) {
            ([(one, _)], Hit::One) => Some(victim(one)),
            _ => None,
        };
        Ok(Strike {
            node: name.to_owned(),
            hit: destroyed.len(),
            detail,
            victim,
            guard: None,
        })
    }

    /// The connections of `net` that `fault` selects.
    fn chosen(
        &self,
        net: &Netns,
        fault: &PlannedFault,
        rng: &mut SeededRng,
    ) -> Result<Vec<OpenConnection>, Error> {
        let mut pick = Selector::between_hosts();
        if !matches!(self, Self::Lab(_)) {
            // All connections of a job on one host are local.
            pick = pick.and_local();
        }
        if let Some(name) = &fault.process {
            pick = pick.process(name);
        }
        for name in &fault.not_process {
            pick = pick.not_process(name);
        }
        if let Some(peer) = fault.peer {
            pick = pick.peer(peer);
        }
        if let Some(port) = fault.port {
            pick = pick.port(port);
        }
        let mut found = destroy::list(net, &pick)?;
        if let Self::Job { pid, .. } = self {
            let family = descendants(*pid);
            found.retain(|c| c.owners.iter().any(|owner| family.contains(&owner.pid)));
        }
        if fault.hit() == Hit::One && found.len() > 1 {
            found = vec![found.swap_remove(rng.below(found.len()))];
        }
        Ok(found)
    }

    fn stop(
        &self,
        fault: &PlannedFault,
        rng: &mut SeededRng,
        ongoing: &Ongoing,
    ) -> Result<Strike, Error> {
        let node = self.node(fault, rng)?;
        let mut chosen = node.processes();
        chosen.retain(|process| {
            let named = |name: &String| *name == process.name;
            fault.process.as_ref().is_none_or(named) && !fault.not_process.iter().any(named)
        });
        if fault.hit() == Hit::One && chosen.len() > 1 {
            chosen = vec![chosen.swap_remove(rng.below(chosen.len()))];
        }
        let stopped = ongoing.stops.stop(chosen.iter().map(|process| process.pid));
        let names = chosen
            .iter()
            .map(|one| format!("{} ({})", one.name, one.pid));
        let detail = listed(names, "no process to stop");
        let mut strike = lasting(
            node.name(),
            chosen.len(),
            detail,
            ActiveFault::Stopped(stopped),
        );
        if let ([one], Hit::One) = (&*chosen, fault.hit()) {
            strike.victim = Some(Victim {
                process: Some(one.name.clone()),
                ..Victim::default()
            });
        }
        Ok(strike)
    }

    fn inject(
        &self,
        fault: &PlannedFault,
        segment: Segment,
        rng: &mut SeededRng,
        ongoing: &Ongoing,
    ) -> Result<Strike, Error> {
        let node = self.node(fault, rng)?;
        let mut strike = Strike {
            node: node.name().to_owned(),
            hit: 0,
            detail: String::new(),
            victim: None,
            guard: None,
        };
        let mut told = Vec::new();
        for connection in self.chosen(node.net(), fault, rng)? {
            let Some((far, path)) = self.far_end(connection.remote.ip(), ongoing) else {
                continue;
            };
            let injected = inject::inject(segment, node, far, path, &connection, INJECT_LIMIT)?;
            if fault.hit() == Hit::One {
                strike.victim = Some(victim(&connection));
            }
            strike.hit += usize::from(injected.accepted);
            told.push(injected.to_string());
        }
        strike.detail = if told.is_empty() {
            "no connection to end".into()
        } else {
            told.join("; ")
        };
        Ok(strike)
    }

    fn firewall(
        &self,
        fault: &PlannedFault,
        rule: &nft::Rule,
        rng: &mut SeededRng,
    ) -> Result<Strike, Error> {
        let (name, guards) = match self {
            Self::Lab(_) => {
                let node = self.node(fault, rng)?;
                let rule = rule.clone().path(fault.path());
                (node.name(), vec![rule.apply([node.net()])?])
            }
            Self::Job { net, .. } | Self::Namespace { net, .. } => {
                let names = net.interfaces()?;
                let on = |name: &String| rule.clone().interface(name).apply([net]);
                ("-", names.iter().map(on).collect::<Result<_, _>>()?)
            }
        };
        // The firewall counts what it stops.
        let detail = "firewall in force".into();
        Ok(lasting(name, 0, detail, ActiveFault::Firewall(guards)))
    }

    fn flush(&self, fault: &PlannedFault, rng: &mut SeededRng) -> Result<Strike, Error> {
        let answer = match fault.answer.unwrap_or_default() {
            FlushAnswer::Reset => Forgotten::Reset,
            FlushAnswer::Silence => Forgotten::Dropped,
        };
        let (name, (guard, forgotten)) = match self {
            Self::Lab(_) => {
                let node = self.node(fault, rng)?;
                let own = link::addresses(node, fault.path())?;
                (node.name(), flush::flush(node.net(), Some(&own), answer)?)
            }
            Self::Job { net, .. } | Self::Namespace { net, .. } => {
                ("-", flush::flush(net, None, answer)?)
            }
        };
        let detail = format!("{forgotten} connections forgotten");
        let guard = ActiveFault::Firewall(vec![guard]);
        Ok(lasting(name, 0, detail, guard))
    }

    fn one_way(&self, fault: &PlannedFault, rng: &mut SeededRng) -> Result<Strike, Error> {
        let Self::Lab(lab) = self else {
            return Err(needs_lab(fault));
        };
        let node = self.node(fault, rng)?;
        // At the other nodes: a rule at the sender would tell its programs that it does not send.
        let rule = nft::Rule::drop()
            .path(fault.path())
            .from_hardware(&link::hardware(node, fault.path())?);
        let others = lab.nodes().iter().filter(|n| n.name() != node.name());
        let guard = rule.apply(others.map(Node::net))?;
        let detail = "firewall in force".into();
        let guard = ActiveFault::Firewall(vec![guard]);
        Ok(lasting(node.name(), 0, detail, guard))
    }

    fn renumber(
        &self,
        fault: &PlannedFault,
        rng: &mut SeededRng,
        ongoing: &Ongoing,
    ) -> Result<Strike, Error> {
        let Self::Lab(lab) = self else {
            return Err(needs_lab(fault));
        };
        let (node, path) = (self.node(fault, rng)?, fault.path());
        let mut new_addresses = ongoing.new_addresses.borrow_mut();
        let Some(new) = lab.spare_address(path, new_addresses.len()) else {
            return Err(Error::Invalid("no address is left".into()));
        };
        let hit = on_path(node, path)?.len();
        let old = link::renumber(node, path, new)?;
        new_addresses.push((new, node.name().to_owned(), path));
        Ok(Strike {
            node: node.name().to_owned(),
            hit,
            detail: format!("{} has become {new}", old.join(", ")),
            victim: None,
            guard: None,
        })
    }

    fn netem(
        &self,
        fault: &PlannedFault,
        rng: &mut SeededRng,
        ongoing: &Ongoing,
    ) -> Result<Strike, Error> {
        let netem = fault.netem.clone().unwrap_or_default();
        let (node, net, names) = match self {
            Self::Lab(_) => {
                let node = self.node(fault, rng)?;
                (node.name(), node.net(), vec![node.interface(fault.path())])
            }
            Self::Job { net, .. } | Self::Namespace { net, .. } => ("-", net, net.interfaces()?),
        };
        let hit = match self {
            Self::Lab(_) => on_path(self.named(node)?, fault.path())?.len(),
            _ => destroy::list(net, &Selector::between_hosts())?.len(),
        };
        let guards = names
            .iter()
            .map(|name| ongoing.lines.apply(net, name, &netem))
            .collect::<Result<_, _>>()?;
        let detail = format!("{}: {netem}", names.join(", "));
        Ok(lasting(node, hit, detail, ActiveFault::Netem(guards)))
    }

    fn node(&self, fault: &PlannedFault, rng: &mut SeededRng) -> Result<&Node, Error> {
        let Self::Lab(lab) = self else {
            return Err(needs_lab(fault));
        };
        match lab.nodes().iter().find(|n| n.name() == fault.node) {
            Some(node) => Ok(node),
            None => Ok(lab.node(rng.below(lab.nodes().len()))),
        }
    }

    /// The node of this name.
    fn named(&self, name: &str) -> Result<&Node, Error> {
        let nodes = match self {
            Self::Lab(lab) => lab.nodes(),
            _ => &[],
        };
        let node = nodes.iter().find(|node| node.name() == name);
        node.ok_or_else(|| Error::Invalid(format!("no node {name}")))
    }

    /// The node and the path that have `address`.
    fn far_end(&self, address: IpAddr, ongoing: &Ongoing) -> Option<(&Node, usize)> {
        let Self::Lab(lab) = self else { return None };
        let new_addresses = ongoing.new_addresses.borrow();
        let new = new_addresses.iter().find(|(new, ..)| address == *new);
        if let Some((_, name, path)) = new {
            return Some((self.named(name).ok()?, *path));
        }
        lab.nodes().iter().find_map(|node| {
            let path = node
                .addresses()
                .iter()
                .position(|a| IpAddr::V4(*a) == address)?;
            Some((node, path))
        })
    }
}

fn needs_lab(fault: &PlannedFault) -> Error {
    Error::Invalid(format!("{} needs a lab", fault.kind.name()))
}

/// Connections of `node` with other hosts on this path.
fn on_path(node: &Node, path: usize) -> Result<Vec<OpenConnection>, Error> {
    let own = link::addresses(node, path)?;
    let mut found = destroy::list(node.net(), &Selector::between_hosts())?;
    found.retain(|connection| own.contains(&connection.local.ip()));
    Ok(found)
}

/// How to find a connection again in another run. The kernel gives out ports from 32768 on, others each time.
fn victim(connection: &OpenConnection) -> Victim {
    let ports = [connection.local.port(), connection.remote.port()];
    Victim {
        process: connection.owners.first().map(|owner| owner.name.clone()),
        peer: Some(connection.remote.ip()),
        port: ports.into_iter().find(|port| *port < 32768),
    }
}

/// The first of those hit, and how many more there are.
fn listed(mut hit: impl ExactSizeIterator<Item = impl Display>, none: &str) -> String {
    match (hit.next(), hit.len()) {
        (None, _) => none.to_owned(),
        (Some(one), 0) => one.to_string(),
        (Some(first), more) => format!("{first} and {more} more"),
    }
}

fn lasting(node: &str, hit: usize, detail: String, guard: ActiveFault) -> Strike {
    Strike {
        node: node.to_owned(),
        hit,
        detail,
        victim: None,
        guard: Some(guard),
    }
}

/// `root` and its present descendants.
fn descendants(root: u32) -> HashSet<u32> {
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
