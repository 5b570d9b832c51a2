//! A firewall that drops packets, resets connections, or lets only connections pass that the host itself has begun.

use std::{
    fmt,
    net::Ipv4Addr,
    sync::atomic::{AtomicU32, Ordering},
};

use serde_json::Value;

use super::watcher::Watcher;
use crate::{Error, Netns, Node, Result, netns::checked};

/// What the firewall does with the packets that it stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockAction {
    /// Drops packets silently.
    Drop,
    /// Drops TCP and UDP packets, and tells the sender (ICMP port unreachable).
    Refuse,
    /// Resets TCP connections. RSTs themselves pass, or the other end would never learn of the reset.
    /// Other protocols are left alone.
    Reset,
    /// Lets packets pass that belong to a connection which the host has begun. Drops all others.
    Guard,
    /// As `Guard`, but the sender is told (ICMP port unreachable).
    GuardAndTell,
    /// Drops the first segments of connections to the host.
    Overflow,
}

/// A firewall rule for hosts: an action and the packets that it applies to.
#[derive(Clone, Debug)]
pub struct Rule {
    action: BlockAction,
    interfaces: String,
    sources: Vec<Ipv4Addr>,
    hardware: Option<String>,
    longer_than: Option<u32>,
    only: Vec<u16>,
    except: Vec<u16>,
}

impl Rule {
    /// Drop every packet (not only TCP) that arrives on any path.
    pub fn drop() -> Self {
        Rule::new(BlockAction::Drop)
    }

    /// Refuse every packet of TCP and UDP that arrives on any path, as the host does for ports at which nobody listens.
    pub fn refuse() -> Self {
        Rule::new(BlockAction::Refuse)
    }

    /// Reset every TCP connection of which a segment arrives on any path.
    pub fn reset() -> Self {
        Rule::new(BlockAction::Reset)
    }

    /// The usual firewall of a host: drops packets that belong to no connection which the host has begun, on any path. The ports
    /// given with [`except_ports`](Self::except_ports) are open, for TCP and UDP.
    pub fn guard() -> Self {
        Rule::new(BlockAction::Guard)
    }

    /// [`guard`](Self::guard), with an ICMP answer to stopped packets.
    pub fn guard_and_tell() -> Self {
        Rule::new(BlockAction::GuardAndTell)
    }

    /// Drop the first segment (SYN) of every connection to the host, as the kernel does when the queue of a listener is full. With
    /// [`only_ports`](Self::only_ports), only for these listeners.
    pub fn syn_full() -> Self {
        Rule::new(BlockAction::Overflow)
    }

    fn new(action: BlockAction) -> Self {
        Rule {
            action,
            interfaces: "path*".into(),
            sources: Vec::new(),
            hardware: None,
            longer_than: None,
            only: Vec::new(),
            except: Vec::new(),
        }
    }

    /// Only packets that arrive on this path (0 is the first).
    pub fn path(mut self, path: usize) -> Self {
        self.interfaces = crate::lab::interface(path);
        self
    }

    /// Only packets that arrive on this interface; a `*` at the end matches any rest of the name.
    pub fn interface(mut self, name: &str) -> Self {
        self.interfaces = name.to_owned();
        self
    }

    /// Only packets from these addresses.
    pub fn from_addresses(mut self, sources: impl IntoIterator<Item = Ipv4Addr>) -> Self {
        self.sources.extend(sources);
        self
    }

    /// Only packets from the interface with this hardware address, whatever their IP addresses.
    pub fn from_hardware(mut self, address: &str) -> Self {
        self.hardware = Some(address.to_owned());
        self
    }

    /// Only packets of more than this many bytes, headers included. With [`drop`](Self::drop) this is a path MTU black hole.
    pub fn longer_than(mut self, bytes: u32) -> Self {
        self.longer_than = Some(bytes);
        self
    }

    /// Only TCP segments with one of these ports on either end.
    pub fn only_ports(mut self, ports: impl IntoIterator<Item = u16>) -> Self {
        self.only.extend(ports);
        self
    }

    /// TCP segments with one of these ports on either end pass.
    pub fn except_ports(mut self, ports: impl IntoIterator<Item = u16>) -> Self {
        self.except.extend(ports);
        self
    }

    /// Installs the rule on each of `hosts`. Dropping the guard removes it; it also ends with the host.
    pub fn apply<'a>(&self, hosts: impl IntoIterator<Item = &'a Netns>) -> Result<RuleGuard> {
        let mut guard = RuleGuard::new();
        let text = self.text(&guard.table);
        for host in hosts {
            guard.load(host, &[&text])?;
        }
        Ok(guard)
    }

    /// Installs the rule on each of `nodes`.
    pub fn apply_to(&self, nodes: &[Node]) -> Result<RuleGuard> {
        self.apply(nodes.iter().map(Node::net))
    }

    /// Installs the rule between these nodes, in both directions.
    pub fn apply_between(&self, one: &[Node], other: &[Node]) -> Result<Vec<RuleGuard>> {
        let from = |nodes: &[Node]| {
            let all = nodes.iter().flat_map(Node::addresses).copied();
            self.clone().from_addresses(all)
        };
        Ok(vec![from(one).apply_to(other)?, from(other).apply_to(one)?])
    }

    fn text(&self, table: &str) -> String {
        let mut from = format!("iifname \"{}\"", self.interfaces);
        if !self.sources.is_empty() {
            let sources: Vec<_> = self.sources.iter().map(Ipv4Addr::to_string).collect();
            from += &format!(" ip saddr {{ {} }}", sources.join(", "));
        }
        if let Some(address) = &self.hardware {
            from += &format!(" ether saddr {address}");
        }
        if let Some(bytes) = self.longer_than {
            from += &format!(" meta length > {bytes}");
        }
        let mut rules = Vec::new();
        let guards = matches!(self.action, BlockAction::Guard | BlockAction::GuardAndTell);
        for port in &self.except {
            if guards {
                rules.push(format!("udp dport {port} accept"));
            } else {
                rules.push(format!("tcp sport {port} accept"));
            }
            rules.push(format!("tcp dport {port} accept"));
        }
        let verdict = match self.action {
            BlockAction::Drop | BlockAction::Overflow => "drop",
            BlockAction::Refuse => "reject",
            BlockAction::Reset => {
                rules.push("tcp flags & rst == rst accept".into());
                "reject with tcp reset"
            }
            BlockAction::Guard | BlockAction::GuardAndTell => {
                rules.push("ct state established,related accept".into());
                match self.action {
                    BlockAction::Guard => "drop",
                    _ => "reject",
                }
            }
        };
        match (self.only.as_slice(), self.action) {
            (ports, BlockAction::Overflow) => {
                let ports: Vec<_> = ports.iter().map(u16::to_string).collect();
                if !ports.is_empty() {
                    from += &format!(" tcp dport {{ {} }}", ports.join(", "));
                }
                let first = "tcp flags & (fin | syn | rst | ack) == syn";
                rules.push(format!("{from} {first} counter {verdict}"));
            }
            ([], BlockAction::Drop | BlockAction::Guard | BlockAction::GuardAndTell) => {
                rules.push(format!("{from} counter {verdict}"));
            }
            ([], BlockAction::Refuse) => {
                rules.push(format!(
                    "{from} meta l4proto {{ tcp, udp }} counter {verdict}"
                ));
            }
            ([], BlockAction::Reset) => {
                rules.push(format!("{from} meta l4proto tcp counter {verdict}"))
            }
            (ports, _) => {
                for port in ports {
                    rules.push(format!("{from} tcp sport {port} counter {verdict}"));
                    rules.push(format!("{from} tcp dport {port} counter {verdict}"));
                }
            }
        }
        // Priority -100: before the usual filters, and before the sockets.
        format!(
            "table inet {table} {{\n chain in {{\n  type filter hook input priority -100;\n  {}\n }}\n}}\n",
            rules.join("\n  ")
        )
    }
}

/// Rules in force. Dropping this removes them, and so does a [`Watcher`] if the program is killed.
#[derive(Debug)]
pub struct RuleGuard {
    table: String,
    hosts: Vec<(Netns, Watcher)>,
}

/// Counters of a rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Packets that the rule stopped, on all hosts.
    pub packets: u64,
    /// Bytes of these packets.
    pub bytes: u64,
}

impl RuleGuard {
    /// The name of a table, and no rules yet.
    pub(super) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        RuleGuard {
            table: format!("slim_lab_{}_{n}", std::process::id()),
            hosts: Vec::new(),
        }
    }

    /// The name of the table.
    pub(super) fn table(&self) -> &str {
        &self.table
    }

    /// Loads rules on a host, one text after the other.
    pub(super) fn load(&mut self, host: &Netns, texts: &[&str]) -> Result<()> {
        let remove = format!("inside nft delete table inet {}", self.table);
        let watcher = Watcher::start(host, &self.table, &remove)?;
        for text in texts {
            // As an argument: the standard input is for the watcher.
            let mut command = host.command("nft");
            command.arg(text);
            watcher.outlives(&mut command)?;
            let output = command
                .output()
                .map_err(Error::io("start nft (package nftables)"))?;
            checked("nft", output)?;
        }
        self.hosts.push((host.clone(), watcher));
        Ok(())
    }

    /// The counters so far.
    pub fn report(&self) -> Result<Report> {
        let mut report = Report::default();
        for (host, _) in &self.hosts {
            let text = host.exec("nft", &["-j", "list", "table", "inet", &self.table])?;
            let json: Value =
                serde_json::from_str(&text).map_err(|e| Error::Invalid(format!("nft -j: {e}")))?;
            add_counters(&json, &mut report);
        }
        Ok(report)
    }

    /// Removes the rule and returns its counters.
    pub fn lift(mut self) -> Result<Report> {
        let report = self.report()?;
        self.remove()?;
        Ok(report)
    }

    fn remove(&mut self) -> Result<()> {
        let hosts = std::mem::take(&mut self.hosts);
        let ends = hosts.into_iter().map(|(host, watcher)| {
            host.exec("nft", &["delete", "table", "inet", &self.table])?;
            watcher.over();
            Ok(())
        });
        // All are removed, also if one cannot be.
        ends.collect::<Vec<_>>().into_iter().collect()
    }
}

impl Drop for RuleGuard {
    fn drop(&mut self) {
        // The rules of a host that is gone are gone as well.
        let _ = self.remove();
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} packets ({} bytes) stopped", self.packets, self.bytes)
    }
}

fn add_counters(json: &Value, report: &mut Report) {
    match json {
        Value::Object(map) => {
            if let Some(counter) = map.get("counter") {
                report.packets += counter["packets"].as_u64().unwrap_or(0);
                report.bytes += counter["bytes"].as_u64().unwrap_or(0);
            }
            map.values().for_each(|v| add_counters(v, report));
        }
        Value::Array(list) => list.iter().for_each(|v| add_counters(v, report)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reset_rule_accepts_rsts_before_it_rejects() {
        let text = Rule::reset().text("t");
        let (pass, reject) = (
            text.find("rst == rst accept").unwrap(),
            text.find("reject").unwrap(),
        );
        assert!(pass < reject, "{text}");
    }

    #[test]
    fn a_rule_can_be_limited_to_ports() {
        let text = Rule::drop()
            .path(1)
            .only_ports([80])
            .except_ports([22])
            .text("t");
        assert!(
            text.contains("iifname \"path1\" tcp sport 80 counter drop"),
            "{text}"
        );
        assert!(
            text.find("tcp dport 22 accept") < text.find("drop"),
            "{text}"
        );
        assert!(!text.contains("iifname \"path1\" counter drop"), "{text}");
    }

    #[test]
    fn a_guard_rule_accepts_connections_that_the_host_has_begun() {
        for (rule, verdict) in [(Rule::guard(), "drop"), (Rule::guard_and_tell(), "reject")] {
            let text = rule.except_ports([80]).text("t");
            let own = text.find("ct state established,related accept").unwrap();
            let rest = text
                .find(&format!("iifname \"path*\" counter {verdict}"))
                .unwrap();
            assert!(own < rest, "{text}");
            for protocol in ["tcp", "udp"] {
                assert!(
                    text.contains(&format!("{protocol} dport 80 accept")),
                    "{text}"
                );
            }
            assert!(!text.contains("sport"), "{text}");
        }
    }

    #[test]
    fn a_rule_can_be_limited_to_long_packets() {
        let text = Rule::drop().longer_than(100).text("t");
        let narrow = "iifname \"path*\" meta length > 100 counter drop";
        assert!(text.contains(narrow), "{text}");
    }

    #[test]
    fn full_queues_drop_only_the_first_segments() {
        let text = Rule::syn_full().path(0).only_ports([80]).text("t");
        let narrow = "iifname \"path0\" tcp dport { 80 } tcp flags & (fin | syn | rst | ack) == syn counter drop";
        assert!(text.contains(narrow), "{text}");
    }

    #[test]
    fn counters_are_found_at_any_depth_of_the_listing() {
        let json = serde_json::json!({"nftables": [{"rule": {"expr": [
            {"counter": {"packets": 2, "bytes": 100}}, {"drop": null}]}},
            {"rule": {"expr": [{"counter": {"packets": 1, "bytes": 5}}]}}]});
        let mut report = Report::default();
        add_counters(&json, &mut report);
        assert_eq!(
            report,
            Report {
                packets: 3,
                bytes: 105
            }
        );
    }
}
