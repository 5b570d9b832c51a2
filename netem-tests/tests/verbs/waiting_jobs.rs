//! Jobs of Open MPI whose ranks, one at each end of a line with soft RoCE, wait for their turns: to compare what `slim bench` has not.

use std::{
    io::{BufRead, BufReader, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    process::{Child, Command, Stdio},
};

use slim_lab::mpi::{Mpi, component_arguments};

use super::{
    openmpi::{SOON, component},
    wait,
};

/// Turns of each job with each message size; the median counts.
const TURNS: usize = 5;

/// Each rank has its end of the line, and the adapter there.
const OWN_END: &str = r#"
n=$((OMPI_COMM_WORLD_RANK + 1))
export OMPI_MCA_btl_tcp_if_include=v$n OMPI_MCA_btl_slim_if_include=v$n OMPI_MCA_btl_slim_verbs_ports=rx$n
export UCX_NET_DEVICES=rx$n:1
exec "$0" "$@""#;

/// The arguments of a job with the component.
pub(super) const OVER_VERBS: [&str; 2] = [
    "--mca pml ob1 --mca btl slim,self",
    "--mca btl_slim_transports verbs,tcp",
];

/// A job whose ranks wait for their turn.
pub(super) struct WaitingJob {
    name: &'static str,
    mpirun: Child,
    ranks: [BufReader<UnixStream>; 2],
}

impl WaitingJob {
    pub(super) fn start(name: &'static str, mpi: &Mpi, program: &Path, arguments: &[&str]) -> Self {
        let place = format!("/run/tmp/turns-{}", name.replace([' ', '/'], "-"));
        let listener = UnixListener::bind(&place).unwrap();
        listener.set_nonblocking(true).unwrap();
        let component = component(mpi).unwrap();
        let mpirun = Command::new(mpi.mpirun())
            .args(["--allow-run-as-root", "--oversubscribe", "-np", "2"])
            .args(["--bind-to", "none"])
            .args(arguments.iter().flat_map(|words| words.split(' ')))
            .args(component_arguments(mpi, &component))
            .args(["sh", "-c", OWN_END])
            .arg(program)
            .args(["--turns", &place])
            .stdin(Stdio::null())
            .spawn();
        let mut ranks = [0, 1].map(|_| {
            let stream = wait(name, SOON, || listener.accept().ok()).0;
            stream.set_nonblocking(false).unwrap();
            stream.set_read_timeout(Some(SOON)).unwrap();
            let mut rank = BufReader::new(stream);
            (line(&mut rank), rank)
        });
        ranks.sort_by(|a, b| a.0.cmp(&b.0));
        WaitingJob {
            name,
            mpirun: mpirun.unwrap(),
            ranks: ranks.map(|(_, rank)| rank),
        }
    }

    /// One turn: what the first rank has measured.
    pub(super) fn turn(&mut self, test: &str, bytes: usize, times: u32) -> f64 {
        for rank in &mut self.ranks {
            let lead = times / 10 + 1;
            writeln!(rank.get_mut(), "{test} {bytes} {lead} {times}").unwrap();
        }
        let answers = self.ranks.each_mut().map(line);
        let value = answers[0].split("\"value\":").nth(1);
        let value = value.and_then(|rest| rest.split(',').next());
        value
            .unwrap_or_else(|| panic!("{answers:?}"))
            .parse()
            .unwrap()
    }

    /// Ends it without the help of its MPI.
    pub(super) fn stop(mut self) {
        self.mpirun.kill().unwrap();
        self.mpirun.wait().unwrap();
    }

    pub(super) fn end(mut self) {
        drop(self.ranks);
        let status = self.mpirun.wait().unwrap();
        assert!(status.success(), "{}: {status}", self.name);
    }
}

/// Measures the jobs by turns, and prints what came of it.
pub(super) fn in_turns<const N: usize>(jobs: &mut [WaitingJob; N]) {
    for (measured, bytes, times, unit) in [
        ("latency", 8, 200, "µs, half a round trip"),
        ("bandwidth", 64 << 10, 8, "MB/s"),
        ("bandwidth", 128 << 10, 4, "MB/s"),
        ("bandwidth", 256 << 10, 2, "MB/s"),
        ("bandwidth", 1 << 20, 1, "MB/s"),
    ] {
        println!("{bytes} bytes:");
        let mut values = [const { Vec::new() }; N];
        for _ in 0..TURNS {
            for (job, values) in jobs.iter_mut().zip(&mut values) {
                values.push(job.turn(measured, bytes, times));
            }
        }
        for (job, values) in jobs.iter().zip(&mut values) {
            values.sort_by(f64::total_cmp);
            let [first, median, last] = [0, TURNS / 2, TURNS - 1].map(|n| values[n]);
            println!(
                "  {}: {median:.1} {unit} ({first:.1} to {last:.1})",
                job.name
            );
        }
    }
}

fn line(rank: &mut BufReader<UnixStream>) -> String {
    let mut line = String::new();
    rank.read_line(&mut line).unwrap();
    assert!(line.ends_with('\n'), "a rank has ended: {line:?}");
    line.trim().to_owned()
}
