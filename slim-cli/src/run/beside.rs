//! Processes that `slim run` leaves beside `mpirun`: this program again, with a socket as standard input. They end with `mpirun`.

use std::env;
use std::fs::File;
use std::io::{self, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio, id};

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use rustix::process::{Pid, getppid};

/// The command that starts such a process, by its hidden name, from this process, which becomes `mpirun`.
pub fn command(name: &str, socket: OwnedFd) -> io::Result<Command> {
    let mut command = Command::new(env::current_exe()?);
    command
        .arg(name)
        .arg(id().to_string())
        .env_remove("LD_PRELOAD")
        .stdin(Stdio::from(socket))
        .stdout(Stdio::null());
    Ok(command)
}

/// Whether `mpirun` has ended: it is the parent of such a process until then.
pub fn is_over(launcher: u32) -> bool {
    getppid() != Pid::from_raw(launcher as i32)
}

/// Addresses to bind such a socket to, the preferred one first: any address, and a port that the kernel chooses.
pub fn any_port() -> [SocketAddr; 2] {
    let any = [
        IpAddr::from(Ipv6Addr::UNSPECIFIED),
        Ipv4Addr::UNSPECIFIED.into(),
    ];
    any.map(|ip| SocketAddr::new(ip, 0))
}

/// Bytes that nobody can predict.
pub fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// This host's addresses that others can reach; loopback if there is none.
pub fn addresses() -> Vec<IpAddr> {
    let all = getifaddrs().into_iter().flatten();
    let up = all.filter(|a| a.flags.contains(InterfaceFlags::IFF_UP));
    let ips: Vec<IpAddr> = up
        .filter_map(|a| {
            let address = a.address?;
            let v4 = address.as_sockaddr_in().map(|a| IpAddr::from(a.ip()));
            v4.or_else(|| address.as_sockaddr_in6().map(|a| a.ip().into()))
        })
        .collect();
    let is_near = |ip: &&IpAddr| match ip {
        IpAddr::V4(ip) => ip.is_loopback() || ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_loopback() || ip.is_unicast_link_local(),
    };
    let far: Vec<IpAddr> = ips.iter().filter(|ip| !is_near(ip)).copied().collect();
    match far.is_empty() {
        true => vec![Ipv4Addr::LOCALHOST.into()],
        false => far,
    }
}
