//! Kills TCP connections in the way in which the kernel gives them up.

use std::{fmt, net::IpAddr};

use super::diag::{self, DestroyOutcome, Direction, ESTABLISHED, OpenConnection};
use crate::{Netns, Result, SeededRng};

/// Selects connections. Every condition that is set must hold. Only established connections
/// are ever selected.
#[derive(Clone, Debug, Default)]
pub struct Selector {
    process: Option<String>,
    not_process: Vec<String>,
    pid: Option<u32>,
    peer: Option<IpAddr>,
    port: Option<u16>,
    direction: Option<Direction>,
    local_too: bool,
}

/// How many of the selected connections to destroy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// Every one.
    All,
    /// One, chosen at random.
    One,
}

/// Report of a kill.
#[derive(Clone, Debug, Default)]
pub struct Destroyed {
    /// The connections that we destroyed.
    pub connections: Vec<OpenConnection>,
    /// Number of connections that ended by themselves after they were listed.
    pub vanished: usize,
}

impl Selector {
    /// Selects connections between different hosts (not those of a host with itself).
    pub fn between_hosts() -> Self {
        Selector::default()
    }

    /// Selects connections of a host with itself as well.
    pub fn and_local(mut self) -> Self {
        self.local_too = true;
        self
    }

    /// Only connections held by a process of this name (the kernel keeps 15 bytes of it).
    pub fn process(mut self, name: &str) -> Self {
        self.process = Some(name.chars().take(15).collect());
        self
    }

    /// Only connections not held by a process of this name. May be called several times.
    pub fn not_process(mut self, name: &str) -> Self {
        self.not_process.push(name.chars().take(15).collect());
        self
    }

    /// Only connections held by process `pid`.
    pub fn pid(mut self, pid: u32) -> Self {
        self.pid = Some(pid);
        self
    }

    /// Only connections with the host that has this address.
    pub fn peer(mut self, address: impl Into<IpAddr>) -> Self {
        self.peer = Some(address.into());
        self
    }

    /// Only connections with this port on either end.
    pub fn port(mut self, port: u16) -> Self {
        self.port = Some(port);
        self
    }

    /// Only connections of this direction.
    pub fn direction(mut self, direction: Direction) -> Self {
        self.direction = Some(direction);
        self
    }

    /// Whether `connection` is selected.
    pub fn matches(&self, connection: &OpenConnection) -> bool {
        let c = connection;
        let held_by = |name: &String| c.owners.iter().any(|o| o.name == *name);
        let local = c.remote.ip().is_loopback() || c.local.ip() == c.remote.ip();
        c.state == ESTABLISHED
            && (self.local_too || !local)
            && self.process.as_ref().is_none_or(held_by)
            && !self.not_process.iter().any(held_by)
            && self
                .pid
                .is_none_or(|pid| c.owners.iter().any(|o| o.pid == pid))
            && self.peer.is_none_or(|peer| c.remote.ip() == peer)
            && self
                .port
                .is_none_or(|port| c.local.port() == port || c.remote.port() == port)
            && self
                .direction
                .is_none_or(|direction| c.direction == direction)
    }
}

/// The connections of `net` that `pick` selects.
pub fn list(net: &Netns, pick: &Selector) -> Result<Vec<OpenConnection>> {
    let mut found = diag::connections(net)?;
    found.retain(|c| pick.matches(c));
    Ok(found)
}

/// Destroys connections of `net`. If there are none, the report is empty; that is no error.
pub fn destroy(
    net: &Netns,
    pick: &Selector,
    amount: Amount,
    rng: &mut SeededRng,
) -> Result<Destroyed> {
    let mut chosen = list(net, pick)?;
    if amount == Amount::One && chosen.len() > 1 {
        chosen = vec![chosen.swap_remove(rng.below(chosen.len()))];
    }
    let fates = diag::destroy(net, &chosen)?;
    let mut report = Destroyed::default();
    for (connection, fate) in chosen.into_iter().zip(fates) {
        match fate {
            DestroyOutcome::Destroyed => report.connections.push(connection),
            DestroyOutcome::Vanished => report.vanished += 1,
        }
    }
    Ok(report)
}

impl fmt::Display for Destroyed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} connection(s) destroyed", self.connections.len())?;
        for (n, connection) in self.connections.iter().enumerate() {
            write!(f, "{} {connection}", if n == 0 { ":" } else { "," })?;
        }
        if self.vanished > 0 {
            write!(f, "; {} had ended before", self.vanished)?;
        }
        Ok(())
    }
}
