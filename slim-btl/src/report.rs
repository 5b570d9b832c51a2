//! Tells `slim run --btl` that this rank uses the component (`slim-cli/src/run/watch.rs`).

use std::env;
use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use nix::sys::signal::SigSet;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SendFlags, SocketFlags, SocketType};

use crate::proc::ProcName;

/// Where the watcher is: token, then addresses, with blanks between.
const VARIABLE: &str = "_SLIM_BTL_WATCH";
/// Number of ranks of the job, from both series of Open MPI.
const TOTAL: &str = "OMPI_COMM_WORLD_SIZE";
/// How long one address is tried.
const LIMIT: Duration = Duration::from_secs(3);

/// Reports, in a thread of its own, if there is a watcher. Nothing depends on whether the report arrives.
pub(crate) fn report(me: ProcName) {
    let (Ok(watcher), Ok(total)) = (env::var(VARIABLE), env::var(TOTAL)) else {
        return;
    };
    let mut words = watcher.split(' ').map(str::to_owned);
    let token = words.next().unwrap_or_default();
    let addresses: Vec<SocketAddr> = words.filter_map(|w| w.parse().ok()).collect();
    let host = nix::unistd::gethostname().unwrap_or_default();
    let host = host.to_string_lossy();
    let (job, rank) = (me.0 >> 32, me.0 & 0xffff_ffff);
    let line = format!("{token} {job} {rank} {total} {host}\n");
    // The program's signals are not for this thread, which inherits the mask.
    let before = SigSet::all().thread_swap_mask(nix::sys::signal::SigmaskHow::SIG_BLOCK);
    let spawned = thread::Builder::new()
        .name("slim-btl-report".into())
        .spawn(move || {
            addresses
                .iter()
                .any(|to| send(*to, line.as_bytes()).is_ok())
        });
    drop(spawned);
    if let Ok(before) = before {
        let _ = before.thread_set_mask();
    }
}

/// By system calls without libc: under the preload library, this connection is not to be one of SLIM's.
fn send(to: SocketAddr, line: &[u8]) -> Result<(), Errno> {
    let family = match to {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(family, SocketType::STREAM, flags, None)?;
    match net::connect(&socket, &to) {
        Ok(()) | Err(Errno::INPROGRESS) => {}
        Err(e) => return Err(e),
    }
    let limit = Timespec::try_from(LIMIT).map_err(|_| Errno::INVAL)?;
    if poll(&mut [PollFd::new(&socket, PollFlags::OUT)], Some(&limit))? == 0 {
        return Err(Errno::TIMEDOUT);
    }
    net::sockopt::socket_error(&socket)??;
    // The first bytes of a connection: the kernel takes them.
    net::send(&socket, line, SendFlags::NOSIGNAL)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::TcpListener;

    #[test]
    fn a_line_arrives_and_a_closed_port_is_an_error() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        send(to, b"token 1 2 3 host\n").unwrap();
        let mut got = String::new();
        listener
            .accept()
            .unwrap()
            .0
            .read_to_string(&mut got)
            .unwrap();
        assert_eq!(got, "token 1 2 3 host\n");
        drop(listener);
        assert!(send(to, b"x").is_err());
    }
}
