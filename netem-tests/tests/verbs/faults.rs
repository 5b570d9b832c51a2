//! Faults of each kind while a flow that prefers queue pairs carries bytes both ways. Every byte must be right, and in the end the flow must be on queue pairs
//! again. How long the receivers got nothing is measured. `SLIM_SOAK=1`: fifty runs of each kind.

use std::{
    collections::BTreeMap,
    env, fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    process::{Child, Command, Stdio},
    sync::{Mutex, atomic::AtomicBool},
    thread,
    time::{Duration, Instant},
};

use slim::{Flow, FlowChange};
use slim_rdma::ibverbs::{PortSettings, VerbsAdapter};
use slim_verbs::{VerbsPort, VerbsSettings, in_memory::MemoryNet};

use super::{
    DETECTION,
    common::{
        rxe::{DEVICES, Rxe, shell},
        soak,
    },
    fragile::{FragileAdapter, LivePairs},
    rxe,
    traffic::{Arrival, receive, send_until, while_streaming},
    two_sessions::{LIMIT, TwoSessions, by_pair, of_port, open},
    wait,
};

const MS: Duration = Duration::from_millis(1);
/// The flow stays on queue pairs for so long: what has failed before is noticed by then.
const SETTLED: Duration = Duration::from_millis(300);
/// Pauses between trials grow up to a minute.
const BACK: Duration = Duration::from_secs(100);
/// Receivers are looked at so long before and after a moment.
const AROUND: Duration = Duration::from_millis(3);

/// A flow under way.
struct Run<'a> {
    two: &'a TwoSessions,
    /// The queue pairs of each side.
    live: &'a [LivePairs; 2],
    flows: [&'a Flow; 2],
    random: fastrand::Rng,
    began: Instant,
    /// What has happened to each end of the flow since then.
    seen: [Vec<FlowChange>; 2],
    /// The longest sleep of a millisecond since then: the machine may be busy.
    slept: Duration,
}

impl Run<'_> {
    fn look(&mut self) {
        for (session, seen) in self.two.sessions.iter().zip(&mut self.seen) {
            seen.extend(session.events().into_iter().map(|event| event.change));
        }
    }

    fn rest(&mut self, time: Duration) {
        let begun = Instant::now();
        while begun.elapsed() < time {
            self.look();
            let slept = Instant::now();
            thread::sleep(MS);
            self.slept = self.slept.max(slept.elapsed());
        }
    }

    /// A time at random, up to this one.
    fn some(&mut self, most: Duration) -> Duration {
        most.mul_f64(self.random.f64())
    }

    fn begin(&mut self) {
        self.look();
        self.seen = Default::default();
        self.slept = Duration::ZERO;
        self.began = Instant::now();
    }

    fn are_by_pair(&self, wanted: bool) -> bool {
        self.flows.map(by_pair) == [Some(wanted); 2]
    }

    fn resumes(&self) -> u64 {
        self.flows[0].stats().resumes
    }

    fn until(&mut self, what: &str, done: impl Fn(&Self) -> bool) {
        let begun = Instant::now();
        while !done(self) {
            let states = self.flows.map(|flow| (flow.state(), flow.connection()));
            assert!(begun.elapsed() < BACK, "not {what}: {states:?}");
            self.rest(MS);
        }
    }

    /// The fault has passed: waits until the flow is on queue pairs, and stays there.
    fn until_back(&mut self) {
        loop {
            self.until("back", |run| run.are_by_pair(true));
            let before = self.resumes();
            self.rest(SETTLED);
            if self.are_by_pair(true) && self.resumes() == before {
                return;
            }
        }
    }

    fn fail(&self, side: usize) -> usize {
        self.live[side].fail()
    }

    /// Kills all TCP connections.
    fn kill_tcp(&self) {
        shell("ss -KHtn state connected > /dev/null");
    }
}

/// The longest time within this part of the stream in which nothing came.
fn gap(arrivals: &[Arrival], from: Instant, to: Instant) -> Duration {
    let pairs = arrivals.windows(2);
    let inside = pairs.filter(|pair| pair[1].at > from && pair[0].at < to);
    let gaps = inside.map(|pair| pair[1].at - pair[0].at.max(from));
    gaps.max().unwrap_or_default()
}

fn gap_around(arrivals: &[Arrival], at: Instant) -> Duration {
    let pairs = arrivals.windows(2);
    let inside = pairs.filter(|pair| pair[1].at + AROUND > at && pair[0].at < at + AROUND);
    let gaps = inside.map(|pair| pair[1].at - pair[0].at);
    gaps.max().unwrap_or_default()
}

/// How long receivers got nothing, and how long the flow was suspended.
#[derive(Clone, Copy, Debug, Default)]
struct Stalls {
    /// The longest time after the fault without a byte, until the flow came back.
    fault: Duration,
    /// The longest suspension, at either end: it begins when the fault is noticed.
    suspended: Option<Duration>,
    /// The longest time without a byte when the flow came back from TCP.
    back: Option<Duration>,
    /// The suspension then.
    moving: Option<Duration>,
    /// The longest sleep of a millisecond, which is what the machine itself adds.
    slept: Duration,
}

impl Stalls {
    fn of(run: &Run<'_>, all: &[Vec<Arrival>; 2]) -> Self {
        let mut stalls = Stalls {
            slept: run.slept,
            ..Stalls::default()
        };
        for (arrivals, seen) in all.iter().zip(&run.seen) {
            let returns: Vec<Instant> = arrivals
                .windows(2)
                .filter(|pair| pair[1].at > run.began && !pair[0].by_pair && pair[1].by_pair)
                .map(|pair| pair[1].at)
                .collect();
            // The last return has its own column.
            let last = arrivals.last().expect("bytes").at;
            let end = returns.last().map_or(last, |at| *at - AROUND);
            stalls.fault = stalls.fault.max(gap(arrivals, run.began, end));
            let mut away: Vec<Duration> = seen.iter().filter_map(away).collect();
            if let Some(at) = returns.last() {
                stalls.back = stalls.back.max(Some(gap_around(arrivals, *at)));
                stalls.moving = stalls.moving.max(away.pop());
            }
            stalls.suspended = stalls.suspended.max(away.into_iter().max());
        }
        stalls
    }
}

fn away(change: &FlowChange) -> Option<Duration> {
    match change {
        FlowChange::Resumed { away, .. } => Some(*away),
        _ => None,
    }
}

/// Median and largest.
struct Times(Vec<Duration>);

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut sorted = self.0.clone();
        sorted.sort();
        let ms = |at: usize| sorted[at].as_secs_f64() * 1000.0;
        match sorted.len() {
            0 => write!(f, "-"),
            n => write!(f, "{:.1} ({:.1})", ms(n / 2), ms(n - 1)),
        }
    }
}

/// Runs of a kind of fault, of which those that are wrong do not end the others.
struct FaultTable {
    kind: &'static str,
    runs: usize,
    right: Vec<Stalls>,
}

impl FaultTable {
    fn print(&self) {
        let times =
            |of: fn(&Stalls) -> Option<Duration>| Times(self.right.iter().filter_map(of).collect());
        println!(
            "| kind | runs | right | no byte, ms: median (largest) | suspended | no byte at the return | suspended then | sleep of 1 ms |"
        );
        println!(
            "| {} | {} | {} | {} | {} | {} | {} | {} |",
            self.kind,
            self.runs,
            self.right.len(),
            times(|s| Some(s.fault)),
            times(|s| s.suspended),
            times(|s| s.back),
            times(|s| s.moving),
            times(|s| Some(s.slept)),
        );
        // `scripts/soak` makes a table of these lines.
        println!(
            "tally: verbs: {}: {} of {} runs right",
            self.kind,
            self.right.len(),
            self.runs
        );
    }
}

/// One run of a flow of these sessions.
fn run(
    two: &TwoSessions,
    live: &[LivePairs; 2],
    seed: u64,
    fault: impl FnOnce(&mut Run<'_>),
) -> Stalls {
    let (near, far) = two.pair();
    let mut run = Run {
        two,
        live,
        flows: [&near, &far],
        random: fastrand::Rng::with_seed(seed),
        began: Instant::now(),
        seen: Default::default(),
        slept: Duration::ZERO,
    };
    let ((), arrivals) = while_streaming(run.flows, || {
        run.rest(100 * MS);
        let moment = run.some(100 * MS);
        run.rest(moment);
        run.begin();
        fault(&mut run);
        run.until_back();
        run.rest(50 * MS);
    });
    for of_side in &arrivals {
        assert!(of_side.last().is_some_and(|last| last.by_pair));
    }
    Stalls::of(&run, &arrivals)
}

/// So many runs, or fifty. All must be right.
fn runs(test: &str, kind: &'static str, few: usize, fault: impl Fn(&mut Run<'_>, &Rxe)) {
    runs_and(test, kind, [few, 50], fault, |_| ());
}

/// The same; `after` puts right what a run leaves, when its sessions are closed.
fn runs_and(
    test: &str,
    kind: &'static str,
    [few, many]: [usize; 2],
    fault: impl Fn(&mut Run<'_>, &Rxe),
    after: impl Fn(&Rxe),
) {
    let Some(rxe) = rxe(test) else {
        return;
    };
    let seed = std::env::var("SLIM_LAB_SEED").map_or(1, |seed| seed.parse().unwrap());
    let mut table = FaultTable {
        kind,
        runs: if soak() { many } else { few },
        right: Vec::new(),
    };
    for n in 0..table.runs {
        let seed = seed * 1000 + n as u64;
        // What sessions know of the adapters does not last.
        let one = || {
            let [(a, of_a), (b, of_b)] = rxe.open().map(FragileAdapter::port);
            let two = TwoSessions::open([a, b].map(of_port));
            run(&two, &[of_a, of_b], seed, |run| fault(run, &rxe))
        };
        match catch_unwind(AssertUnwindSafe(one)) {
            Ok(stalls) => table.right.push(stalls),
            Err(_) => {
                println!("{kind}: run {n} is wrong (seed {seed})");
                rxe.heal();
            }
        }
        after(&rxe);
    }
    table.print();
    assert_eq!(table.right.len(), table.runs);
}

#[test]
fn a_queue_pair_fails() {
    let test = "faults::a_queue_pair_fails";
    runs(test, "queue pair fails at one end", 3, |run, _| {
        let side = run.random.usize(0..2);
        assert!(run.fail(side) > 0);
    });
}

/// Again and again, at one end or both, wherever the flow is then.
#[test]
fn queue_pairs_fail_at_random_moments() {
    let test = "faults::queue_pairs_fail_at_random_moments";
    let fails = if soak() { 100 } else { 5 };
    let fault = |run: &mut Run<'_>, _: &Rxe| {
        let mut failed = 0;
        while failed < fails {
            let which = run.random.usize(0..3);
            let hit: usize = (0..2).filter(|s| *s != which).map(|s| run.fail(s)).sum();
            failed += usize::from(hit > 0);
            let moment = run.some(300 * MS);
            run.rest(moment);
        }
        println!("{fails} failures, {} resumes", run.resumes());
    };
    let kind = "queue pairs fail again and again";
    runs_and(test, kind, [1, 5], fault, |_| ());
}

fn hole(run: &mut Run<'_>, rxe: &Rxe, time: Duration) {
    rxe.line("loss 100%");
    run.rest(time);
    rxe.plain();
}

#[test]
fn the_line_is_silent_for_a_third_of_a_second() {
    let test = "faults::the_line_is_silent_for_a_third_of_a_second";
    runs(test, "silence of 0.3 s", 1, |run, rxe| {
        hole(run, rxe, 300 * MS)
    });
}

#[test]
fn the_line_is_silent_for_three_seconds() {
    let test = "faults::the_line_is_silent_for_three_seconds";
    runs(test, "silence of 3 s", 1, |run, rxe| {
        hole(run, rxe, 3000 * MS)
    });
}

/// The flow stays on TCP for so long, and the pauses between trials grow.
#[test]
fn the_line_is_silent_for_half_a_minute() {
    let test = "faults::the_line_is_silent_for_half_a_minute";
    if soak() {
        let fault = |run: &mut Run<'_>, rxe: &Rxe| hole(run, rxe, 30_000 * MS);
        runs_and(test, "silence of 30 s", [0, 10], fault, |_| ());
    }
}

/// Nothing passes at all, for less time than the flow's attempts take (a minute).
#[test]
fn tcp_is_silent_too() {
    let test = "faults::tcp_is_silent_too";
    runs(
        test,
        "silence of 3 s, TCP's from its middle on",
        1,
        |run, rxe| {
            rxe.line("loss 100%");
            let half = run.some(1500 * MS);
            run.rest(half);
            shell("tc qdisc replace dev lo root netem loss 100%");
            run.rest(3000 * MS - half);
            rxe.plain();
            shell("tc qdisc del dev lo root");
        },
    );
}

#[test]
fn a_link_goes_down_and_comes_up() {
    let test = "faults::a_link_goes_down_and_comes_up";
    runs(test, "link down for up to 1 s", 2, |run, rxe| {
        let side = run.random.usize(0..2);
        rxe.down(side);
        let time = run.some(1000 * MS);
        run.rest(time);
        rxe.up(side);
    });
}

/// The line is like this for two seconds. The adapters send again, or the queue pairs fail.
fn bad_line(run: &mut Run<'_>, rxe: &Rxe, netem: &str) {
    rxe.line(netem);
    run.rest(2000 * MS);
    rxe.plain();
}

#[test]
fn one_packet_in_a_hundred_gets_lost() {
    let test = "faults::one_packet_in_a_hundred_gets_lost";
    runs(test, "1 % of packets lost for 2 s", 1, |run, rxe| {
        bad_line(run, rxe, "loss 1%");
    });
}

#[test]
fn one_packet_in_twenty_gets_lost() {
    let test = "faults::one_packet_in_twenty_gets_lost";
    runs(test, "5 % of packets lost for 2 s", 1, |run, rxe| {
        bad_line(run, rxe, "loss 5%");
    });
}

#[test]
fn packets_overtake_each_other() {
    let test = "faults::packets_overtake_each_other";
    runs(test, "packets out of order for 2 s", 1, |run, rxe| {
        bad_line(run, rxe, "delay 2ms reorder 30% 50%");
    });
}

#[test]
fn tcp_is_killed_while_the_flow_is_on_queue_pairs() {
    let test = "faults::tcp_is_killed_while_the_flow_is_on_queue_pairs";
    runs(test, "TCP killed, flow on queue pairs", 1, |run, _| {
        let before = run.resumes();
        for _ in 0..20 {
            run.kill_tcp();
            let time = run.some(50 * MS);
            run.rest(time);
        }
        assert_eq!(run.resumes(), before);
    });
}

#[test]
fn tcp_is_killed_while_the_flow_moves() {
    let test = "faults::tcp_is_killed_while_the_flow_moves";
    runs(test, "TCP killed, flow moving", 1, |run, rxe| {
        rxe.line("loss 100%");
        let begun = Instant::now();
        let mut silent = true;
        while silent || !run.are_by_pair(true) {
            run.kill_tcp();
            let time = run.some(100 * MS);
            run.rest(time);
            assert!(begun.elapsed() < BACK, "never back");
            if silent && begun.elapsed() > 1500 * MS {
                silent = false;
                rxe.plain();
            }
        }
    });
}

/// Deleting it waits until nobody has it open, so nothing happens to the flow. New queue pairs can be made on it still.
#[test]
fn an_adapter_is_deleted_and_added_again() {
    let test = "faults::an_adapter_is_deleted_and_added_again";
    let [device, _] = DEVICES;
    let deletion = Mutex::new(None::<Child>);
    let delete = |run: &mut Run<'_>, _: &Rxe| {
        let words = ["link", "delete", device];
        let child = Command::new("rdma").args(words).spawn().unwrap();
        *deletion.lock().unwrap() = Some(child);
        run.rest(500 * MS);
        assert_eq!(run.seen, [[], []]);
        run.fail(0);
    };
    let kind = "adapter deleted, and added when closed";
    runs_and(test, kind, [2, 50], delete, |rxe| {
        let mut child = deletion.lock().unwrap().take().expect("a run");
        let status = wait("the end of its deletion", DETECTION, || {
            child.try_wait().unwrap()
        });
        assert!(status.success());
        rxe.add(0);
    });
}

/// Set in the peer's process: where it connects to, and whether it sends.
const PEER: [&str; 2] = ["TEST_CONNECTS_TO", "TEST_SENDS"];

/// The process that is killed.
fn peer(to: &str, sends: bool) {
    let settings = PortSettings {
        device: Some(DEVICES[1].into()),
        ..PortSettings::default()
    };
    let adapter = VerbsAdapter::open(&settings).unwrap();
    let session = open(of_port(VerbsPort::new(adapter).unwrap()));
    let flow = session.connect(to.parse().unwrap(), LIMIT).unwrap();
    let never = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| receive(&flow, 1));
        if sends {
            scope.spawn(|| send_until(&flow, 1, &never));
        }
    });
}

/// The flow ends with an error, soon.
#[test]
fn the_peers_process_is_killed() {
    let test = "faults::the_peers_process_is_killed";
    if let [Ok(to), Ok(sends)] = PEER.map(env::var) {
        return peer(&to, sends == "1");
    }
    let Some(rxe) = rxe(test) else {
        return;
    };
    let mut random = fastrand::Rng::with_seed(1);
    for sends in [true, false] {
        let (mut times, mut errors) = (Vec::new(), BTreeMap::<String, usize>::new());
        let count = if soak() { 50 } else { 1 };
        for _ in 0..count {
            let adapter = VerbsAdapter::open(&rxe.settings(0)).unwrap();
            let session = open(of_port(VerbsPort::new(adapter).unwrap()));
            let endpoint = session.listen("127.0.0.1:0".parse().unwrap()).unwrap();
            let mut child = Command::new(env::current_exe().unwrap())
                .args(["--exact", test, "--nocapture", "--test-threads=1"])
                .env(PEER[0], endpoint.local_addr().to_string())
                .env(PEER[1], if sends { "1" } else { "0" })
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
            let flow = endpoint.accept(LIMIT).unwrap();
            let never = AtomicBool::new(false);
            thread::scope(|scope| {
                let receive = scope.spawn(|| (receive(&flow, 0).error, Instant::now()));
                let send = || (send_until(&flow, 0, &never).err(), Instant::now());
                let send = sends.then(|| scope.spawn(send));
                wait("on a queue pair", BACK, || {
                    thread::sleep(MS);
                    (by_pair(&flow) == Some(true)).then_some(())
                });
                thread::sleep(random.u32(0..300) * MS);
                let killed = Instant::now();
                child.kill().unwrap();
                let ends = [Some(receive), send].into_iter().flatten();
                let ends: Vec<_> = ends.map(|end| end.join().unwrap()).collect();
                for (error, at) in ends {
                    let error = error.expect("an error");
                    *errors.entry(format!("{error:?}")).or_default() += 1;
                    times.push(at - killed);
                }
            });
            child.wait().unwrap();
        }
        let worst = times.iter().max().copied().unwrap();
        let what = if sends { "streams both ways" } else { "silent" };
        println!(
            "| peer killed, flow {what} | {count} runs | error after ms: median (largest) {} | {errors:?} |",
            Times(times)
        );
        assert!(worst < Duration::from_secs(5), "{worst:?}");
    }
}

/// What a fallback and a return take where messages take microseconds.
#[test]
fn a_return_on_adapters_in_memory_takes_less_than_a_millisecond() {
    let mut table = FaultTable {
        kind: "queue pair fails, in memory, none can be made",
        runs: if soak() { 50 } else { 5 },
        right: Vec::new(),
    };
    for n in 0..table.runs {
        let net = MemoryNet::start();
        let provider = |host| net.provider(&[host], VerbsSettings::default());
        let two = TwoSessions::open([0, 1].map(provider));
        let stalls = run(&two, &Default::default(), n as u64, |run| {
            net.set_refusing(true);
            net.fail_pairs(true, |host| host == n % 2);
            run.until("on TCP", |run| run.are_by_pair(false));
            net.set_refusing(false);
        });
        table.right.push(stalls);
    }
    table.print();
    let mut moving: Vec<_> = table.right.iter().filter_map(|s| s.moving).collect();
    moving.sort();
    assert_eq!(moving.len(), table.runs);
    // The machine may be busy.
    assert!(moving[0] < MS, "{moving:?}");
}

/// Queue pairs of processes in this kernel.
fn in_kernel() -> usize {
    let output = Command::new("rdma").args(["res", "show", "qp"]).output();
    let text = String::from_utf8(output.unwrap().stdout).unwrap();
    text.lines().filter(|line| line.contains("pid")).count()
}

/// Sessions are closed while flows fall back, are on TCP, or try queue pairs: when that returns, the adapters are free.
#[test]
fn sessions_that_are_closed_leave_no_queue_pair() {
    let test = "faults::sessions_that_are_closed_leave_no_queue_pair";
    let Some(rxe) = rxe(test) else {
        return;
    };
    let mut random = fastrand::Rng::with_seed(1);
    let mut times = Vec::new();
    for n in 0..if soak() { 50 } else { 3 } {
        let ports = rxe.open().map(|adapter| VerbsPort::new(adapter).unwrap());
        let two = TwoSessions::open(ports.map(of_port));
        let (near, far) = two.pair();
        assert!(in_kernel() >= 4);
        let mut moment = random.u32(0..2500) * MS;
        if n % 3 > 0 {
            rxe.line("loss 100%");
        } else {
            rxe.down(n % 2);
            moment /= 5;
        }
        thread::sleep(moment);
        drop((near, far));
        let begun = Instant::now();
        drop(two);
        times.push(begun.elapsed());
        assert_eq!(
            in_kernel(),
            0,
            "{n}: after {moment:?}, {:?}",
            begun.elapsed()
        );
        rxe.heal();
    }
    println!("closed after ms: median (largest) {}", Times(times));
}
