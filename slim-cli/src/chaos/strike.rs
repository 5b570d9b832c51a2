//! Makes the faults.

use std::fmt::Display;
use std::net::IpAddr;
use std::time::Duration;

use slim_lab::faults::destroy::{self, Selector};
use slim_lab::faults::diag::{self, DestroyOutcome, OpenConnection};
use slim_lab::faults::flush::{self, Forgotten};
use slim_lab::faults::inject::{self, Segment};
use slim_lab::faults::roce::{self, RocePair};
use slim_lab::faults::{adapter, link, nft};
use slim_lab::{Error, Netns, Node, SeededRng};

use super::active::{ActiveFault, Ongoing};
use super::plan::{FaultKind, FlushAnswer, Hit, PlannedFault};
use super::report::Victim;
use super::scene::{Scene, descendants};

/// How long to try to inject a forged segment into a connection.
const INJECT_LIMIT: Duration = Duration::from_secs(1);

/// How long to try to break a queue pair. Those of SLIM that are silent send something once in a second. Each forged packet races with the packets of a
/// busy one, and on a busy machine loses most of the time: 64 of 64 in 3 s once.
const BREAK_LIMIT: Duration = Duration::from_secs(10);

/// Packets of more bytes do not pass an MTU black hole. Control messages of SLIM, and TCP's segments without data, do.
const HOLE: u32 = 600;

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
            FaultKind::MtuHole => {
                if let Self::Lab(lab) = self {
                    lab.send_single_segments()?;
                }
                self.firewall(fault, &nft::Rule::drop().longer_than(HOLE), rng)
            }
            FaultKind::SynFull => {
                self.firewall(fault, &nft::Rule::syn_full().only_ports(fault.port), rng)
            }
            FaultKind::Flush => self.flush(fault, rng),
            FaultKind::OneWay => self.one_way(fault, rng),
            FaultKind::Renumber => self.renumber(fault, rng, ongoing),
            FaultKind::Stop => self.stop(fault, rng, ongoing),
            FaultKind::Netem => self.netem(fault, rng, ongoing),
            FaultKind::PairError => self.pair_error(fault, rng),
            FaultKind::PortDown => {
                let (net, device) = self.adapter(fault)?;
                let hit = self.pairs(fault)?.len();
                let make = || adapter::port_down(net, device);
                let down = ongoing.ports.share("-", device, make)?;
                let detail = format!("port of {device} down");
                Ok(lasting("-", hit, detail, ActiveFault::Port(down)))
            }
            FaultKind::AdapterGone => {
                let (net, device) = self.adapter(fault)?;
                let hit = self.pairs(fault)?.len();
                let mut free = true;
                let make = || {
                    let deleted = adapter::delete(net, device)?;
                    free = deleted.was_free();
                    Ok::<_, Error>(deleted)
                };
                let deleted = ongoing.adapters.share("-", device, make)?;
                let detail = match free {
                    true => format!("{device} deleted"),
                    false => format!("{device} hidden from new processes"),
                };
                Ok(lasting("-", hit, detail, ActiveFault::Adapter(deleted)))
            }
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

    /// The adapter of a fault, and the namespace that it is in.
    fn adapter<'a>(&'a self, fault: &'a PlannedFault) -> Result<(&'a Netns, &'a str), Error> {
        match (self, &fault.adapter) {
            (Self::Job { net, .. } | Self::Namespace { net, .. }, Some(device)) => {
                Ok((net, device))
            }
            _ => Err(Error::Invalid("a lab has no adapter".into())),
        }
    }

    /// The working queue pairs of the adapter that `fault` may hit.
    fn pairs(&self, fault: &PlannedFault) -> Result<Vec<RocePair>, Error> {
        let (net, device) = self.adapter(fault)?;
        let mut found = roce::working_pairs(net)?;
        found.retain(|pair| {
            let named = |name: &String| *name == pair.comm;
            pair.device == device
                && fault.process.as_ref().is_none_or(named)
                && !fault.not_process.iter().any(named)
        });
        if let Self::Job { pid, .. } = self {
            let family = descendants(*pid);
            found.retain(|pair| pair.pid.is_some_and(|pid| family.contains(&pid)));
        }
        Ok(found)
    }

    fn pair_error(&self, fault: &PlannedFault, rng: &mut SeededRng) -> Result<Strike, Error> {
        let (net, device) = self.adapter(fault)?;
        let interface = adapter::interface_of(net, device)?;
        let mut chosen = self.pairs(fault)?;
        if fault.hit() == Hit::One && chosen.len() > 1 {
            chosen = vec![chosen.swap_remove(rng.below(chosen.len()))];
        }
        let mut strike = Strike {
            node: "-".to_owned(),
            hit: 0,
            detail: "no queue pair to break".into(),
            victim: None,
            guard: None,
        };
        let mut told = Vec::new();
        for pair in chosen {
            let broken = roce::break_pair(net, &interface, &pair, BREAK_LIMIT)?;
            strike.hit += usize::from(broken.accepted);
            told.push(broken.to_string());
        }
        if !told.is_empty() {
            strike.detail = told.join("; ");
        }
        Ok(strike)
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
            Self::Job { net, .. } | Self::Namespace { net, .. } => match &fault.adapter {
                Some(device) => ("-", net, vec![adapter::interface_of(net, device)?]),
                None => ("-", net, net.interfaces()?),
            },
        };
        let hit = match self {
            _ if fault.adapter.is_some() => self.pairs(fault)?.len(),
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
