//! UDP ports that another process wants: `docs/PROTOCOL.md`, section "Listeners shared by several processes".
//!
//! The control socket of a listener has the UDP port with the listener's number, which another process may want to
//! bind. The kernel refuses that: a bound socket excludes others, unless both allow sharing, and then the socket that
//! is bound last would get all HELLOs, even if it belongs to another user. So a process that runs under SLIM asks the
//! owner to give way.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::str;
use std::time::{Duration, Instant};

use crate::kernel::sys;
use crate::listeners::claims::{self, NAME};
use crate::listeners::listened::overlap;
use crate::listeners::notes::Note;
use slim_core::canonical;
use slim_sys::OwnFd;
use slim_sys::as_agent;

/// How long to wait for the owners.
const LIMIT: Duration = Duration::from_millis(200);

/// Asks other processes to release the UDP port of `wanted` where the control socket of one of their TCP listeners has
/// it, and waits until they have. Returns whether one was asked.
pub fn ask_for_port(wanted: SocketAddr) -> bool {
    as_agent(|| {
        let until = Instant::now() + LIMIT;
        let mut asked = false;
        for owner in owners(canonical(wanted)) {
            if let Some(link) = claims::reach_anybody(owner) {
                asked |= sys::send(link.raw(), &Note::Release(owner).encode()).is_ok();
                // The link ends when the port is free, or when the owner does not release it.
                wait_for_end(&link, until);
            }
        }
        asked
    })
}

fn wait_for_end(link: &OwnFd, until: Instant) {
    let mut note = [0; 64];
    let left = || until.saturating_duration_since(Instant::now());
    while slim_sys::poll(link.raw(), libc::POLLIN, Some(left())) != 0 {
        match sys::recv(link.as_raw_fd(), &mut note) {
            Ok(0) => return,
            Ok(_) => {}
            Err(_) => return,
        }
    }
}

/// The addresses of all owners in this network namespace that conflict with `wanted`.
fn owners(wanted: SocketAddr) -> Vec<SocketAddr> {
    let Ok(table) = OwnFd::make(|| File::open("/proc/thread-self/net/unix")) else {
        return Vec::new();
    };
    let lines = BufReader::new(sys::Reading(&table)).split(b'\n');
    let mut owners: Vec<SocketAddr> = lines
        .map_while(Result::ok)
        .filter_map(|line| owner(str::from_utf8(&line).ok()?))
        .filter(|owner| overlap(wanted, *owner))
        .collect();
    // Sockets of connections to an owner have its name, too.
    owners.sort_unstable();
    owners.dedup();
    owners
}

/// The listener's address, if the line of the kernel's table is that of an owner's local socket.
fn owner(line: &str) -> Option<SocketAddr> {
    let name = line.split_whitespace().last()?.strip_prefix('@')?;
    name.strip_prefix(NAME)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_are_found_by_their_names() {
        let line = |name: &str| {
            format!("0000000000000000: 00000002 00000000 00010000 0005 01 4711 {name}")
        };
        let found = |name: &str| owner(&line(name)).map(|addr| addr.to_string());
        assert_eq!(found("@slim/10.0.0.1:80").as_deref(), Some("10.0.0.1:80"));
        assert_eq!(found("@slim/[::]:80").as_deref(), Some("[::]:80"));
        for other in [
            "",
            "@",
            "/run/slim/10.0.0.1:80",
            "@slim/x",
            "@other/10.0.0.1:80",
        ] {
            assert_eq!(found(other), None, "{other}");
        }
    }
}
