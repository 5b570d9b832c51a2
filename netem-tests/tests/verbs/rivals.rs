//! SLIM over queue pairs of soft RoCE against others that use them, on the same line, by turns: flows of sessions against rsockets, and the component of
//! Open MPI against UCX.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

use slim::Flow;
use slim_lab::{
    Error, artifacts,
    mpi::{Flavor, Mpi},
    skip::skip,
};
use slim_verbs::VerbsPort;

use super::{
    common::soak,
    openmpi::{SOON, component, queue_pairs},
    rxe,
    session_speed::{PolledEnds, ROUND_TRIPS},
    sessions::round_trip,
    shell,
    speed::{Kind, TOTAL, bare_latency, bare_stream, measure},
    two_sessions::{LIMIT, TwoSessions, of_port},
    wait,
    waiting_jobs::{OVER_VERBS, WaitingJob, in_turns},
};

/// Said instead of a measurement.
pub(super) const NOT_NOW: &str =
    "a measurement, for which nothing else may run: SLIM_SOAK=1 runs it";

/// The process with both ends of a connection of rsockets.
struct Rsockets {
    process: Child,
    pipes: Mutex<(ChildStdin, BufReader<ChildStdout>)>,
}

impl Rsockets {
    /// `None`: there is no librdmacm.
    fn start(program: &Path, port: u16, buffers: Option<u32>) -> Option<Self> {
        let mut process = Command::new(program)
            .args(["10.1.0.1", "10.1.0.2", &port.to_string()])
            .args(buffers.map(|bytes| bytes.to_string()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let pipes = (
            process.stdin.take().unwrap(),
            BufReader::new(process.stdout.take().unwrap()),
        );
        let started = Rsockets {
            process,
            pipes: Mutex::new(pipes),
        };
        if started.ask("latency", 8, 1).is_some() {
            return Some(started);
        }
        let status = started.end();
        assert_eq!(status, Some(3), "not for want of a library");
        None
    }

    /// How long it took.
    fn ask(&self, what: &str, bytes: usize, times: usize) -> Option<Duration> {
        let (input, output) = &mut *self.pipes.lock().unwrap();
        writeln!(input, "{what} {bytes} {times}").ok()?;
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        Some(Duration::from_secs_f64(line.trim().parse().ok()?))
    }

    fn run(&self, what: &str, bytes: usize, times: usize) -> Duration {
        self.ask(what, bytes, times).expect("it goes on")
    }

    /// Half a round trip of 8 bytes.
    fn latency(&self) -> Duration {
        self.run("latency", 8, ROUND_TRIPS as usize) / ROUND_TRIPS / 2
    }

    fn end(self) -> Option<i32> {
        let Rsockets { mut process, pipes } = self;
        drop(pipes);
        process.wait().unwrap().code()
    }
}

/// Time for [`TOTAL`] bytes in pieces of `len`, between threads that sleep.
fn sleeping_stream(near: &Flow, far: &Flow, len: usize) -> Duration {
    let data = vec![1; len];
    let begun = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut buf = vec![0; len];
            for _ in 0..TOTAL / len {
                far.recv_exact(&mut buf, LIMIT).unwrap();
            }
        });
        for _ in 0..TOTAL / len {
            near.send_all(&data, LIMIT).unwrap();
        }
    });
    begun.elapsed()
}

#[test]
fn flows_of_sessions_and_rsockets() {
    let test = "rivals::flows_of_sessions_and_rsockets";
    if !soak() {
        println!("{NOT_NOW}");
        return;
    }
    let source = artifacts::source("slim_rsockets.c").unwrap();
    let program = artifacts::compile(Path::new("cc"), "cc", &source).unwrap();
    let Some(rxe) = rxe(test) else {
        return;
    };
    shell("ip link set lo up");
    let mut adapters = rxe.open();
    let ports = adapters
        .each_ref()
        .map(|adapter| VerbsPort::new(adapter.clone()).unwrap());
    let two = TwoSessions::open(ports.map(of_port));
    let slim = PolledEnds::new(two.pair());
    // The second one has buffers of the size of a flow's rings.
    let started = [(7471, None), (7472, Some(256 << 10))]
        .map(|(port, buffers)| Rsockets::start(&program, port, buffers));
    let [Some(own), Some(equal)] = started else {
        return skip(test, "no librdmacm.so.1 (package librdmacm1)");
    };
    println!("half a round trip of 8 bytes, polled:");
    let kinds: [Kind<'_>; 4] = [
        ("bare", &|a| bare_latency(a, ROUND_TRIPS)),
        ("slim", &|_| slim.latency()),
        ("rsockets", &|_| own.latency()),
        ("rsockets, 256 KiB", &|_| equal.latency()),
    ];
    measure(&mut adapters, kinds);
    for len in [64 << 10, 1 << 20] {
        println!(
            "{} MiB in pieces of {} KiB, polled:",
            TOTAL >> 20,
            len >> 10
        );
        let kinds: [Kind<'_>; 5] = [
            ("bare, no copy", &|a| bare_stream(a, len, false)),
            ("bare, two copies", &|a| bare_stream(a, len, true)),
            ("slim", &|_| slim.stream(len)),
            ("rsockets", &|_| own.run("stream", len, TOTAL)),
            ("rsockets, 256 KiB", &|_| equal.run("stream", len, TOTAL)),
        ];
        measure(&mut adapters, kinds);
    }
    println!("a round trip of 8 bytes between threads that sleep:");
    let trips = 1000;
    let kinds: [Kind<'_>; 3] = [
        ("slim", &|_| round_trip(&slim.near, &slim.far)),
        ("rsockets", &|_| {
            own.run("latency-sleep", 8, trips) / trips as u32
        }),
        ("rsockets, 256 KiB", &|_| {
            equal.run("latency-sleep", 8, trips) / trips as u32
        }),
    ];
    measure(&mut adapters, kinds);
    for len in [64 << 10, 1 << 20] {
        println!(
            "{} MiB in pieces of {} KiB, between threads that sleep:",
            TOTAL >> 20,
            len >> 10
        );
        let kinds: [Kind<'_>; 3] = [
            ("slim", &|_| sleeping_stream(&slim.near, &slim.far, len)),
            ("rsockets", &|_| own.run("stream-sleep", len, TOTAL)),
            ("rsockets, 256 KiB", &|_| {
                equal.run("stream-sleep", len, TOTAL)
            }),
        ];
        measure(&mut adapters, kinds);
    }
    assert!(slim.near.connection().is_none() && slim.far.connection().is_none());
    assert_eq!([own, equal].map(Rsockets::end), [Some(0); 2]);
}

/// UCX makes its reliable queue pairs with the help of datagrams. On soft RoCE over IPv4 it takes each of them for one with a wrong address, unless it does not
/// look. A rank that waits for its turn answers none, so answers may take long.
const UCX: [&str; 3] = [
    "--mca pml ucx --mca btl self",
    "-x UCX_TLS=rc,self -x UCX_UD_VERBS_ETH_DGID_CHECK=n",
    "-x UCX_UD_TIMEOUT=10m",
];

#[test]
fn open_mpi_by_slim_and_by_ucx() {
    let test = "rivals::open_mpi_by_slim_and_by_ucx";
    if !soak() {
        println!("{NOT_NOW}");
        return;
    }
    let found = Mpi::find(Flavor::OpenMpi4).and_then(|mpi| {
        component(&mpi)?;
        Ok((mpi.build_program("slim_bench.c")?, mpi))
    });
    let (program, mpi) = match found {
        Ok(found) => found,
        Err(error @ Error::Missing { .. }) => return skip(test, error),
        Err(error) => panic!("{error}"),
    };
    let Some(_rxe) = rxe(test) else {
        return;
    };
    shell("hostname guest");
    fs::create_dir_all("/run/tmp").unwrap();
    let mut ucx = WaitingJob::start("UCX", &mpi, &program, &UCX);
    // Its queue pairs are there after its first message, those of flows some time later.
    ucx.turn("latency", 8, 1);
    assert_eq!(queue_pairs(), 2, "UCX uses a queue pair at each end");
    let slim = WaitingJob::start("slim", &mpi, &program, &OVER_VERBS);
    let sends = [&OVER_VERBS[..], &["--mca btl_slim_verbs_get_size 0"]].concat();
    let sends = WaitingJob::start("slim without READs", &mpi, &program, &sends);
    let mut jobs = [slim, sends, ucx];
    let mut most = 0;
    wait("on queue pairs", SOON, || {
        jobs[0].turn("latency", 8, 10);
        jobs[1].turn("latency", 8, 10);
        most = most.max(queue_pairs());
        (most == 6).then_some(())
    });
    in_turns(&mut jobs);
    assert_eq!(queue_pairs(), 6, "still on queue pairs");
    let [slim, sends, ucx] = jobs;
    slim.end();
    sends.end();
    // The end of its queue for datagrams may wait for as long as an answer may take.
    ucx.stop();
}
