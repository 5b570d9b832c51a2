//! A firewall that forgets its table of connections.
//!
//! A firewall with such a table lets a segment pass that belongs to a connection in the table, or begins a new one. When it is restarted,
//! fails over, or forgets connections that were idle for too long, the segments of established connections do not pass any more: they are
//! dropped, or answered with a reset. New connections do.
//!
//! The firewall here has no table of its own. It stops the connections that exist when the fault begins, by their addresses and ports, in
//! both directions.

use std::net::{IpAddr, SocketAddr};

use super::{
    diag::{self, OpenConnection},
    nft::RuleGuard,
};
use crate::{Netns, Result};

/// Connections in one command of nft.
const BUNCH: usize = 500;

/// What the firewall does with segments of connections that it has forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forgotten {
    /// It drops them.
    Dropped,
    /// It answers with a reset.
    Reset,
}

/// Makes the firewall of `host` forget its connections with other hosts: those of the local addresses `own`, or all. Returns their number, too.
pub fn flush(
    host: &Netns,
    own: Option<&[IpAddr]>,
    answer: Forgotten,
) -> Result<(RuleGuard, usize)> {
    let far = |c: &OpenConnection| {
        let (here, there) = (c.local.ip(), c.remote.ip());
        here != there && !there.is_loopback() && own.is_none_or(|own| own.contains(&here))
    };
    let mut found = diag::connections(host)?;
    found.retain(far);
    let mut guard = RuleGuard::new();
    let texts = texts(guard.table(), &found, answer);
    let texts: Vec<_> = texts.iter().map(String::as_str).collect();
    guard.load(host, &texts)?;
    Ok((guard, found.len()))
}

/// Commands of nft: the sets of connections, and then the rules.
fn texts(table: &str, connections: &[OpenConnection], answer: Forgotten) -> Vec<String> {
    let mut texts = vec![format!(
        "table inet {table} {{\n\
         \x20set v4 {{ type ipv4_addr . inet_service . ipv4_addr . inet_service; }}\n\
         \x20set v6 {{ type ipv6_addr . inet_service . ipv6_addr . inet_service; }}\n}}\n"
    )];
    for (set, is_v4) in [("v4", true), ("v6", false)] {
        let of_kind = connections.iter().filter(|c| c.local.is_ipv4() == is_v4);
        let elements: Vec<_> = of_kind
            .map(|c| format!("{} . {}", end(c.local), end(c.remote)))
            .collect();
        for bunch in elements.chunks(BUNCH) {
            let list = bunch.join(", ");
            texts.push(format!("add element inet {table} {set} {{ {list} }}\n"));
        }
    }
    let verdict = match answer {
        Forgotten::Dropped => "counter drop",
        Forgotten::Reset => "counter reject with tcp reset",
    };
    let mut chains = String::new();
    for (hook, own, other) in [("input", "d", "s"), ("output", "s", "d")] {
        let rule = |ip: &str, set: &str| {
            format!(
                "{ip} {own}addr . tcp {own}port . {ip} {other}addr . tcp {other}port @{set} {verdict}"
            )
        };
        // Resets pass: they are the answers.
        chains += &format!(
            " chain {hook} {{\n  type filter hook {hook} priority -100;\n  tcp flags & rst == rst accept\n  {}\n  {}\n }}\n",
            rule("ip", "v4"),
            rule("ip6", "v6")
        );
    }
    texts.push(format!("table inet {table} {{\n{chains}}}\n"));
    texts
}

/// Address and port as nft writes them.
fn end(address: SocketAddr) -> String {
    format!("{} . {}", address.ip(), address.port())
}
