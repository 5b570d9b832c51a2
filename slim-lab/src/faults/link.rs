//! Takes a link down, or removes the addresses of an interface.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr},
};

use super::watcher::{Watcher, quoted};
use crate::{Error, Netns, Node, Result, netns::checked};

/// Guard of an interface that was taken down. Dropping it brings the interface up again.
#[derive(Debug)]
pub struct Down {
    net: Netns,
    interface: String,
    /// What is lost when it goes down: the kind for `ip`, and the rest of the command.
    lost: Vec<(&'static str, String)>,
    lifted: bool,
}

/// Takes the interface of `node` on path `path` down; the other end loses its carrier.
pub fn down(node: &Node, path: usize) -> Result<Down> {
    interface_down(node.net(), &node.interface(path))
}

/// Takes an interface of `net` down.
pub fn interface_down(net: &Netns, interface: &str) -> Result<Down> {
    let mut down = Down::prepare(net, interface)?;
    down.take(None)?;
    Ok(down)
}

impl Down {
    /// Looks what the interface will lose. It stays up.
    pub(super) fn prepare(net: &Netns, interface: &str) -> Result<Self> {
        let all = |kind, of: Vec<String>| of.into_iter().map(move |one| (kind, one));
        let lost = all("-6 addr", own_addresses6(net, interface)?)
            .chain(all("-4 route", own_routes(net, "-4", interface)?))
            .chain(all("-6 route", own_routes(net, "-6", interface)?))
            .chain(all("neigh", own_neighbours(net, interface)?));
        Ok(Down {
            net: net.clone(),
            interface: interface.to_owned(),
            lost: lost.collect(),
            lifted: true,
        })
    }

    /// Takes it down. The watcher acts after that, whatever happens.
    pub(super) fn take(&mut self, watcher: Option<&Watcher>) -> Result<()> {
        let mut command = self.net.command("ip");
        command.args(["link", "set", &self.interface, "down"]);
        if let Some(watcher) = watcher {
            watcher.outlives(&mut command)?;
        }
        let line = format!("ip link set {} down", self.interface);
        let output = command.output().map_err(Error::io(line.clone()))?;
        self.lifted = !output.status.success();
        checked(line, output).map(drop)
    }

    /// Brings the link up again, and restores the addresses, routes and neighbours that were lost with it.
    pub fn lift(mut self) -> Result<()> {
        self.up()
    }

    /// What a shell has to do for that.
    pub(super) fn commands(&self) -> String {
        let interface = quoted(&self.interface);
        let mut commands = format!("inside ip link set {interface} up\n");
        // Twice: a route may need one that comes later in the list.
        for (kind, one) in self.lost.iter().chain(&self.lost) {
            commands.push_str(&format!("inside ip {kind} replace {one} dev {interface}\n"));
        }
        commands
    }

    fn up(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.lifted, true) {
            return Ok(());
        }
        self.net
            .exec("ip", &["link", "set", &self.interface, "up"])?;
        // A route may need one that comes later in the list.
        let mut left: Vec<_> = self.lost.iter().collect();
        loop {
            let (all, mut first) = (left.len(), None);
            left.retain(|(kind, one)| {
                let restored = restore(&self.net, &self.interface, kind, one);
                restored
                    .map_err(|e| first.get_or_insert(e).to_string())
                    .is_err()
            });
            match first {
                None => return Ok(()),
                Some(error) if left.len() == all => return Err(error),
                Some(_) => {}
            }
        }
    }
}

impl Drop for Down {
    fn drop(&mut self) {
        // The node may be gone already.
        let _ = self.up();
    }
}

/// Guard of addresses that were removed from an interface. Dropping it restores them.
#[derive(Debug)]
pub struct Removed {
    net: Netns,
    interface: String,
    addresses: Vec<String>,
    routes: Vec<String>,
    lifted: bool,
}

/// Removes the IPv4 addresses of `node` on path `path`, and with them every route that uses them.
pub fn remove_address(node: &Node, path: usize) -> Result<Removed> {
    let interface = node.interface(path);
    let net = node.net().clone();
    let addresses = listed(&net, &interface)?;
    let routes = own_routes(&net, "-4", &interface)?;
    let mut removed = Removed {
        net,
        interface,
        addresses: Vec::new(),
        routes,
        lifted: false,
    };
    for address in addresses {
        removed
            .net
            .exec("ip", &["addr", "del", &address, "dev", &removed.interface])?;
        removed.addresses.push(address);
    }
    Ok(removed)
}

impl Removed {
    /// The removed addresses, as `ADDRESS/BITS`.
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// Restores the addresses and the routes.
    pub fn lift(mut self) -> Result<()> {
        self.restore()
    }

    fn restore(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.lifted, true) {
            return Ok(());
        }
        for address in &self.addresses {
            self.net
                .exec("ip", &["addr", "add", address, "dev", &self.interface])?;
        }
        for route in &self.routes {
            restore(&self.net, &self.interface, "-4 route", route)?;
        }
        Ok(())
    }
}

impl Drop for Removed {
    fn drop(&mut self) {
        // The node may be gone already.
        let _ = self.restore();
    }
}

impl fmt::Display for Removed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} removed from {}",
            self.addresses.join(", "),
            self.interface
        )
    }
}

/// Gives `node` the address `new` on path `path`, for good: its old ones there are gone, and its own routes are those of before.
pub fn renumber(node: &Node, path: usize, new: Ipv4Addr) -> Result<Vec<String>> {
    let mut removed = remove_address(node, path)?;
    let old = std::mem::take(&mut removed.addresses);
    let address = format!("{new}/24");
    let add = ["addr", "add", &address, "dev", &removed.interface];
    removed.net.exec("ip", &add)?;
    // Restores the routes.
    removed.lift()?;
    Ok(old)
}

/// The present IPv4 addresses of `node` on path `path`.
pub fn addresses(node: &Node, path: usize) -> Result<Vec<IpAddr>> {
    let all = listed(node.net(), &node.interface(path))?;
    let parsed = all.iter().filter_map(|a| a.split('/').next()?.parse().ok());
    Ok(parsed.collect())
}

/// The IPv4 addresses of an interface, as `ADDRESS/BITS`.
fn listed(net: &Netns, interface: &str) -> Result<Vec<String>> {
    let listing = net.exec("ip", &["-4", "-o", "addr", "show", "dev", interface])?;
    let all = listing.lines().filter_map(|line| address_of(line, "inet"));
    let all = all.map(str::to_owned);
    Ok(all.collect())
}

/// The hardware address of the interface of `node` on path `path`.
pub fn hardware(node: &Node, path: usize) -> Result<String> {
    let interface = node.interface(path);
    let text = node
        .net()
        .exec("ip", &["-o", "link", "show", "dev", &interface])?;
    let mut words = text.split_whitespace().skip_while(|w| *w != "link/ether");
    match words.nth(1) {
        Some(address) => Ok(address.to_owned()),
        None => Err(Error::Invalid(format!(
            "{interface} has no hardware address: {text}"
        ))),
    }
}

/// Routes over an interface, in all tables, except those that the kernel makes by itself, and will make again.
fn own_routes(net: &Netns, family: &str, interface: &str) -> Result<Vec<String>> {
    let words = [family, "route", "show", "table", "all", "dev", interface];
    let listing = net.exec("ip", &words)?;
    Ok(listing
        .lines()
        .filter(|l| !l.contains("proto kernel") && !l.contains("proto ra"))
        .map(without_flags)
        .collect())
}

/// The neighbours that somebody has set for good.
fn own_neighbours(net: &Netns, interface: &str) -> Result<Vec<String>> {
    let words = ["neigh", "show", "nud", "permanent", "dev", interface];
    let listing = net.exec("ip", &words)?;
    let words = |line: &str| without_flags(line).replace(" PERMANENT", " nud permanent");
    Ok(listing.lines().map(words).collect())
}

/// Makes an address, a route or a neighbour of an interface again.
fn restore(net: &Netns, interface: &str, kind: &str, one: &str) -> Result<()> {
    let words = kind.split(' ').chain(["replace"]);
    let words = words
        .chain(one.split_whitespace())
        .chain(["dev", interface]);
    net.exec("ip", &words.collect::<Vec<_>>()).map(drop)
}

/// The IPv6 addresses that somebody has given an interface: the kernel removes them when it goes down.
fn own_addresses6(net: &Netns, interface: &str) -> Result<Vec<String>> {
    let words = [
        "-6", "-o", "addr", "show", "dev", interface, "scope", "global",
    ];
    let listing = net.exec("ip", &words)?;
    let own = listing.lines().filter(|line| !line.contains("dynamic"));
    // Nobody has taken the address meanwhile.
    let again = |line| Some(format!("{} nodad", address_of(line, "inet6")?));
    Ok(own.filter_map(again).collect())
}

/// The route or neighbour without the flags that `ip` prints but does not accept.
fn without_flags(line: &str) -> String {
    let flags = ["linkdown", "dead"];
    let words = line.split_whitespace();
    let behind = std::iter::once("").chain(words.clone());
    // How long it is valid still is printed in a form of its own.
    words
        .zip(behind)
        .filter(|(word, before)| *word != "expires" && *before != "expires")
        .map(|(word, _)| word)
        .filter(|word| !flags.contains(word))
        .collect::<Vec<_>>()
        .join(" ")
}

/// The address of this family (`inet` or `inet6`) in a line of `ip -o addr`.
fn address_of<'a>(line: &'a str, family: &str) -> Option<&'a str> {
    let mut words = line.split_whitespace().skip_while(|w| *w != family);
    words.nth(1)
}

/// Whether somebody has set the interface up.
pub(super) fn is_up(net: &Netns, interface: &str) -> Result<bool> {
    let text = net.exec("ip", &["-o", "link", "show", "dev", interface])?;
    let flags = text.split(['<', '>']).nth(1).unwrap_or_default();
    Ok(flags.split(',').any(|flag| flag == "UP"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_routes_are_parsed_from_the_output_of_ip() {
        let line = "2: path0    inet 10.77.0.1/24 scope global path0\\       valid_lft forever";
        assert_eq!(address_of(line, "inet"), Some("10.77.0.1/24"));
        let line = "2: path0    inet6 fe80::1/64 scope link";
        assert_eq!(address_of(line, "inet"), None);
        assert_eq!(address_of(line, "inet6"), Some("fe80::1/64"));
        assert_eq!(
            without_flags("10.9.0.0/24 via 10.77.0.2 linkdown "),
            "10.9.0.0/24 via 10.77.0.2"
        );
        assert_eq!(
            without_flags("fd02::/64 metric 1024 expires 100sec pref medium"),
            "fd02::/64 metric 1024 pref medium"
        );
    }
}
