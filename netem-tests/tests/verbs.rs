//! The data half of a queue pair (`slim-rdma`) on libibverbs, with two adapters of soft RoCE. Runs in a guest.

#[path = "verbs/agreements.rs"]
mod agreements;
#[path = "verbs/bench.rs"]
mod bench;
#[path = "verbs/breaks.rs"]
mod breaks;
#[path = "verbs/c_programs.rs"]
mod c_programs;
#[path = "verbs/chaos.rs"]
mod chaos;
#[path = "../../slim/tests/common/streams.rs"]
mod checked;
#[path = "verbs/children.rs"]
mod children;
mod common;
#[path = "verbs/descriptors.rs"]
mod descriptors;
#[path = "verbs/faults.rs"]
mod faults;
#[path = "verbs/fences.rs"]
mod fences;
#[path = "verbs/fragile.rs"]
mod fragile;
#[path = "verbs/hosts.rs"]
mod hosts;
#[path = "verbs/neighbours.rs"]
mod neighbours;
#[path = "verbs/openmpi.rs"]
mod openmpi;
#[path = "verbs/openmpi_soak.rs"]
mod openmpi_soak;
#[path = "verbs/rails.rs"]
mod rails;
#[path = "verbs/resumes.rs"]
mod resumes;
#[path = "verbs/rivals.rs"]
mod rivals;
#[path = "verbs/rough.rs"]
mod rough;
#[path = "verbs/rough_mpi.rs"]
mod rough_mpi;
#[path = "verbs/session_speed.rs"]
mod session_speed;
#[path = "verbs/sessions.rs"]
mod sessions;
#[path = "verbs/speed.rs"]
mod speed;
#[path = "../../slim-rdma/tests/common/mod.rs"]
mod streams;
#[path = "verbs/traffic.rs"]
mod traffic;
#[path = "verbs/two_hosts.rs"]
mod two_hosts;
#[path = "verbs/two_sessions.rs"]
mod two_sessions;
#[path = "../../slim-verbs/tests/sessions/usage.rs"]
mod usage;
#[path = "verbs/waiting_jobs.rs"]
mod waiting_jobs;

use std::{
    os::fd::BorrowedFd,
    process::Child,
    thread,
    time::{Duration, Instant},
};

use common::{
    guest::only_there,
    rxe::{DEVICES, Rxe, shell},
};
use nix::poll::{PollFd, PollFlags, poll};
use slim_rdma::{
    PairSizes, PathMtu, QueuePair, RingShape, Verbs,
    ibverbs::{GidKind, PortSettings, VerbsAdapter, devices},
};
use streams::{ALL, Call, bytes, connect, stream};

/// What an adapter needs at most to notice that nobody answers: four times 67 ms, if the machine is not busy.
const DETECTION: Duration = Duration::from_secs(1);

fn sizes(ring: u64, slots: u64) -> PairSizes {
    PairSizes {
        shape: RingShape::new(ring, slots).unwrap(),
        depth: 64,
        staging: ring,
        inline: 64,
        message: ring,
    }
}

/// The two adapters for `test`, in the guest. `None`: it runs there, or is skipped.
fn rxe(test: &str) -> Option<Rxe> {
    only_there(test).then(|| Rxe::make(test)).flatten()
}

/// Waits until `found` has something.
fn wait<T>(what: &str, limit: Duration, mut found: impl FnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(begin.elapsed() < limit, "{what}: not after {limit:?}");
        thread::yield_now();
    }
}

/// Waits for the end of a program, which must succeed. Returns its output and what it has said on its standard error.
fn succeeds(running: Child) -> [String; 2] {
    let output = running.wait_with_output().unwrap();
    let text = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    println!("{}{}", text[0], text[1]);
    assert!(output.status.success(), "{:?}", output.status);
    text
}

/// Destroys both queue pairs, and so all that the adapters have made.
fn release(pairs: [QueuePair; 2], adapters: &mut [VerbsAdapter; 2]) {
    for (pair, adapter) in pairs.into_iter().zip(adapters) {
        pair.release(adapter);
        assert!(adapter.is_empty());
    }
}

/// Whether the descriptor is readable within this time.
fn readable(fd: BorrowedFd<'_>, milliseconds: u16) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::POLLIN)];
    poll(&mut fds, milliseconds).unwrap() == 1
}

#[test]
fn adapters_are_listed_and_chosen() {
    let Some(rxe) = rxe("adapters_are_listed_and_chosen") else {
        return;
    };
    shell("rdma link add sw1 type siw netdev v1");
    let all = devices().unwrap();
    for name in DEVICES {
        let device = all.iter().find(|device| device.name == name).unwrap();
        assert_eq!(device.unfit, None);
        let [port] = &device.ports[..] else {
            panic!("{device:?}")
        };
        assert!(port.active && port.ethernet && port.lid == 0, "{port:?}");
        assert_eq!(port.mtu, PathMtu::Mtu4096);
        assert_eq!(port.partitions, [(0, 0xffff)]);
        let best = port.preferred_gid().unwrap();
        assert_eq!(
            (best.kind, &best.gid[10..15]),
            (GidKind::RoceV2, &[255, 255, 10, 1, 0][..])
        );
    }
    // Soft iWARP has adapters, too, but not the write that is needed.
    let iwarp = all.iter().find(|device| device.name == "sw1").unwrap();
    assert!(
        iwarp.unfit.is_some_and(|why| why.contains("iWARP")),
        "{iwarp:?}"
    );
    let refused = |settings: PortSettings| VerbsAdapter::open(&settings).unwrap_err().to_string();
    let of = |device: &str| PortSettings {
        device: Some(device.into()),
        ..PortSettings::default()
    };
    for (settings, why) in [
        (
            of("sw1"),
            "no adapter sw1 with a port that can be used (sw1: iWARP has no RDMA WRITE with immediate data)",
        ),
        (of("rx9"), "no adapter rx9 with a port that can be used"),
        (
            PortSettings {
                port: Some(2),
                ..of("rx1")
            },
            "no adapter rx1 with a port",
        ),
        (
            PortSettings {
                gid_index: Some(200),
                ..of("rx1")
            },
            "rx1 port 1: no global identifier 200",
        ),
        (
            PortSettings {
                partition: Some(0x8001),
                ..of("rx1")
            },
            "rx1 port 1: no partition 0x8001",
        ),
        (
            PortSettings {
                retries: 7,
                ..of("rx1")
            },
            "the number of retries must be 0 to 6",
        ),
    ] {
        let text = refused(settings);
        assert!(text.contains(why) && !text.contains('\n'), "{text}");
    }
    let first = VerbsAdapter::open(&PortSettings::default()).unwrap();
    assert_eq!((first.port(), first.is_up()), (1, true));
    // A port without a link is not taken.
    rxe.down(0);
    let text = refused(of("rx1"));
    assert!(text.contains("rx1 port 1: no link"), "{text}");
}

/// What happens in the network while nobody looks.
fn pause(steps: usize) {
    match steps {
        ALL => thread::sleep(Duration::from_millis(1)),
        _ => thread::yield_now(),
    }
}

fn calls(random: &mut fastrand::Rng) -> Vec<Call> {
    let one = |random: &mut fastrand::Rng| {
        let (side, n) = (random.usize(0..2), random.usize(0..300));
        match random.u32(0..19) {
            0..4 => Call::Send(side, n),
            4..8 => Call::Recv(side, n),
            8..10 => Call::Progress(side),
            10 => Call::Tell(side),
            11 => Call::Ping(side),
            12 => Call::End(n % 40),
            _ => Call::Steps(n % 60),
        }
    };
    (0..random.u32(1..300)).map(|_| one(random)).collect()
}

/// Sends `total` bytes each way, in pieces of `piece`.
fn transfer(
    adapters: &mut [VerbsAdapter; 2],
    pairs: &mut [QueuePair; 2],
    total: u64,
    piece: usize,
) {
    let (mut sent, mut read) = ([0; 2], [0; 2]);
    let mut buf = vec![0; piece];
    let begin = Instant::now();
    while read != [total; 2] {
        for s in [0, 1] {
            let len = (total - sent[s]).min(piece as u64) as usize;
            if let Ok(n) = pairs[s].send(&mut adapters[s], &bytes(s, sent[s], len)) {
                sent[s] += n as u64;
            }
            if let Ok(n) = pairs[s].recv(&mut adapters[s], &mut buf) {
                assert!(buf[..n] == bytes(1 - s, read[s], n), "at {}", read[s]);
                read[s] += n as u64;
            }
            assert_eq!(pairs[s].broken(), None);
        }
        assert!(
            begin.elapsed() < Duration::from_secs(30),
            "{sent:?} {read:?}"
        );
    }
}

/// Arbitrary calls and sizes, as over adapters in memory; and long streams.
#[test]
fn streams_are_exact() {
    let Some(rxe) = rxe("streams_are_exact") else {
        return;
    };
    let mut adapters = rxe.open();
    let begin = Instant::now();
    for seed in 0..40 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut side = || {
            let shape = RingShape::new(1 << random.u32(6..=12), 1 << random.u32(2..=6)).unwrap();
            PairSizes {
                shape,
                depth: random.u32(1..40),
                staging: 1 << random.u32(6..12),
                inline: random.usize(0..100),
                message: random.u64(1..500),
            }
        };
        let sizes = [side(), side()];
        stream(&mut adapters, sizes, calls(&mut random), pause);
        assert!(adapters.iter().all(VerbsAdapter::is_empty));
    }
    println!("40 streams in {:.1?}", begin.elapsed());
    for (sizes, total, piece) in [
        (sizes(64, 4), 20_000, 100),
        (sizes(4096, 16), 1 << 20, 5000),
        (sizes(1 << 20, 512), 16 << 20, 1 << 20),
        (
            PairSizes {
                message: 8192,
                ..sizes(1 << 16, 64)
            },
            8 << 20,
            30_000,
        ),
    ] {
        let begin = Instant::now();
        let mut pairs = connect(&mut adapters, [sizes; 2]);
        transfer(&mut adapters, &mut pairs, total, piece);
        println!(
            "{total} bytes each way through {} bytes in {:.1?}",
            sizes.shape.ring(),
            begin.elapsed()
        );
        release(pairs, &mut adapters);
    }
    // A lossy line: the adapters send again, and the stream does not notice.
    rxe.line("loss 1% delay 1ms");
    let mut pairs = connect(&mut adapters, [sizes(1 << 16, 64); 2]);
    transfer(&mut adapters, &mut pairs, 1 << 19, 10_000);
    release(pairs, &mut adapters);
    for adapter in &mut adapters {
        assert_eq!(adapter.event(), None);
    }
}

/// A side that waits is woken by its descriptor, and only if it has asked for that.
#[test]
fn completions_are_reported_to_those_that_wait() {
    let Some(rxe) = rxe("completions_are_reported_to_those_that_wait") else {
        return;
    };
    let mut adapters = rxe.open();
    let mut pairs = connect(&mut adapters, [sizes(4096, 16); 2]);
    let [here, there] = &mut adapters;
    let [near, far] = &mut pairs;
    for round in 0..20 {
        assert!(far.arm(there), "nothing has come");
        assert!(!readable(there.completion_descriptor(), 5));
        near.send(here, &[round]).unwrap();
        assert!(readable(there.completion_descriptor(), 1000));
        assert_eq!(
            (there.reported(), there.reported()),
            (Some(far.number()), None)
        );
        let mut buf = [0; 2];
        assert_eq!(far.recv(there, &mut buf), Ok(1));
        assert_eq!(buf[0], round);
        // Not asked for: a completion comes, and no report.
        near.send(here, &[round]).unwrap();
        assert!(!readable(there.completion_descriptor(), 5));
        assert!(!far.arm(there), "something has come before");
        assert_eq!(far.recv(there, &mut buf), Ok(1));
        // That report may have come all the same.
        while there.reported().is_some() {}
    }
    // A failed queue pair wakes its side, too.
    while !far.arm(there) {}
    there.fail(far.number());
    assert!(readable(there.completion_descriptor(), 1000));
    assert_eq!(there.reported(), Some(far.number()));
    far.progress(there);
    assert!(far.broken().is_some());
    release(pairs, &mut adapters);
}
