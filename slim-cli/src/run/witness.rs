//! The witness of a job: a process that `slim run` leaves beside `mpirun`, and that decides who is lost when two ranks cannot reach each other
//! (`docs/PROTOCOL.md`, section "The witness").
//!
//! It is a process of its own, and not a part of `mpirun`, so that it works with any launcher and goes on while `mpirun` is busy. It ends with
//! `mpirun`. Only ranks know of it: a daemon that is lost would take the job with it.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use slim_core::Time;
use slim_core::wire::{MAX_ADDRS, MAX_LEN};
use slim_core::witness::Witness;

use super::beside;
use super::entry::OpenMpi;
use super::relay;
use crate::failure::CliError;
use crate::settings::Settings;

/// How often the witness looks whether `mpirun` has ended.
const LOOK: Duration = Duration::from_millis(200);

/// Decide who is lost when two ranks cannot reach each other, and tell processes whose addresses have changed where their peers are. `slim run`
/// starts a witness, with a UDP socket as standard input, where a job needs one.
#[derive(Args, Debug)]
pub struct WitnessOptions {
    /// Process id of the process with which the witness ends (mpirun); without it, it goes on until it is ended.
    pub launcher: Option<u32>,
    /// The address and port where the witness is; without it, the socket is the standard input.
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: Option<SocketAddr>,
}

/// Whether the job runs with recovery (`mpirun --with-ft`), so that it goes on without a lost rank.
pub fn is_wanted(version: OpenMpi, args: &[OsString]) -> bool {
    let words: Vec<_> = args.iter().map(|arg| arg.to_string_lossy()).collect();
    let value = words.iter().enumerate().find_map(|(n, word)| {
        let rest = word.trim_start_matches('-').strip_prefix("with-ft")?;
        match rest.strip_prefix('=') {
            Some(value) => Some(value.to_owned()),
            None if rest.is_empty() => words.get(n + 1).map(|value| value.to_string()),
            None => None,
        }
    });
    let off = |value: &str| ["0", "false", "no", "off", "none"].contains(&value);
    // Whoever names a witness has one.
    let named = words.iter().any(|word| word.starts_with("SLIM_WITNESS"));
    version == OpenMpi::V5 && !named && value.is_some_and(|value| !off(&value))
}

/// Why a job that is to have a witness gets none.
pub const NO_KEY: &str = "--with-ft: there is no job key (SLIM_JOB_KEY_FILE), so the job gets no witness: if two ranks cannot reach each other for good, each may take the other for failed";

/// What Open MPI sets for ranks, spawned ones as well, and not for its daemons.
const RANK_VARIABLE: &str = "PMIX_RANK";

/// Settings for the ranks of a job that goes on without lost ones. Daemons get them, too, because spawned ranks on other hosts inherit the
/// environment of their daemon and get no variable of `-x`.
pub fn settings_of_ranks(witness: Option<String>) -> impl Iterator<Item = (&'static str, String)> {
    let all = [
        ("SLIM_WITNESS", witness),
        ("SLIM_LOST_IF", Some(RANK_VARIABLE.to_owned())),
        ("SLIM_WHEN_LOST", Some("exit".to_owned())),
    ];
    all.into_iter()
        .filter_map(|(name, value)| Some((name, value?)))
}

/// Starts the witness as a child of this process, which becomes `mpirun`: the value of `SLIM_WITNESS`.
pub fn start(settings: &Settings) -> io::Result<String> {
    let socket = UdpSocket::bind(&beside::any_port()[..])?;
    let port = socket.local_addr()?.port();
    let mut command = beside::command("witness", socket.into())?;
    // Signals of the terminal are for mpirun, with which the witness ends.
    command.process_group(0);
    for (name, value) in settings.iter() {
        command.env(name, value);
    }
    command.spawn()?;
    let at = beside::addresses().into_iter().take(MAX_ADDRS);
    let at: Vec<String> = at.map(|ip| SocketAddr::new(ip, port).to_string()).collect();
    Ok(at.join(","))
}

/// The witness: decides until `mpirun` has ended.
pub fn main(options: &WitnessOptions) -> Result<ExitCode, CliError> {
    let failed = |e: io::Error| CliError::failed(format!("the witness of the job: {e}"));
    let (_, config) = Settings::from_env()?.checked()?;
    let Some(key) = config.job_key else {
        return Err(CliError::input("the witness of the job needs a job key"));
    };
    let socket = match options.listen {
        Some(at) => UdpSocket::bind(at).map_err(failed)?,
        None => io::stdin()
            .as_fd()
            .try_clone_to_owned()
            .map_err(failed)?
            .into(),
    };
    socket.set_nonblocking(true).map_err(failed)?;
    let at = socket.local_addr().map_err(failed)?;
    let is_v6 = at.is_ipv6();
    if config.relay
        && let Err(e) = relay::start(key.clone(), at)
    {
        eprintln!("slim: witness: no connections through the witness: {e}");
    }
    let start = Instant::now();
    let mut witness = Witness::new(key, beside::random().map_err(failed)?);
    let mut told = BTreeSet::new();
    while !options.launcher.is_some_and(beside::is_over) {
        let now = time(start);
        let mut buffer = [0; MAX_LEN];
        while let Ok((len, from)) = socket.recv_from(&mut buffer) {
            witness.handle_datagram(now, from, &buffer[..len]);
        }
        witness.handle_timeout(now);
        while let Some((to, data)) = witness.poll_datagram() {
            // A datagram that cannot be sent is as good as a lost one.
            let _ = socket.send_to(&data, if is_v6 { mapped(to) } else { to });
        }
        for (lost, at) in witness.lost() {
            if told.insert(lost) {
                let host = at
                    .first()
                    .map_or("a host unknown".into(), |at| at.ip().to_string());
                eprintln!(
                    "slim: witness: process {} at {host} is lost: another rank could not reach it",
                    lost.pid
                );
            }
        }
        let due = witness.poll_timeout().map(|at| at.since(time(start)));
        let wait = due.unwrap_or(LOOK).clamp(Duration::from_millis(1), LOOK);
        let wait = Timespec::try_from(wait).unwrap_or_default();
        // An interrupted wait is as good as a short one.
        let _ = poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&wait));
    }
    Ok(ExitCode::SUCCESS)
}

fn time(start: Instant) -> Time {
    Time(start.elapsed().as_micros() as u64)
}

/// The address as an IPv6 socket takes it.
fn mapped(to: SocketAddr) -> SocketAddr {
    match to {
        SocketAddr::V4(v4) => SocketAddr::new(v4.ip().to_ipv6_mapped().into(), v4.port()),
        v6 => v6,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_of_open_mpi_5_with_recovery_get_a_witness() {
        let wanted = |version, args: &[&str]| {
            let args: Vec<OsString> = args.iter().map(OsString::from).collect();
            is_wanted(version, &args)
        };
        assert!(wanted(OpenMpi::V5, &["--with-ft", "ulfm", "-n", "2", "a"]));
        assert!(wanted(OpenMpi::V5, &["--with-ft=ulfm", "a"]));
        assert!(!wanted(OpenMpi::V5, &["-n", "2", "a"]));
        assert!(!wanted(OpenMpi::V5, &["--with-ft", "false", "a"]));
        let by_hand = ["--with-ft", "ulfm", "-x", "SLIM_WITNESS=192.0.2.1:4", "a"];
        assert!(!wanted(OpenMpi::V5, &by_hand));
        assert!(!wanted(OpenMpi::V4, &["--with-ft", "ulfm", "a"]));
    }
}
