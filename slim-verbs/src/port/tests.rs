//! Queue pairs of two ports whose tasks run in threads of the test.

use std::future::poll_fn;
use std::io::{IoSlice, IoSliceMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use slim_agent::transport::{Connection, Listener};
use slim_rdma::agreement::PairAttempt;
use slim_rdma::in_memory::MemoryAdapter;
use slim_stream::Carrier;
use tokio::sync::Notify;

use super::{PortShared, StrangersPair};
use crate::carrier::PairCarrier;
use crate::connection::PairConnection;
use crate::in_memory::MemoryNet;
use crate::listener::PortListener;
use crate::pair::SharedPair;
use crate::settings::VerbsSettings;

type MemoryPair = Arc<SharedPair<MemoryAdapter>>;

/// Far longer than anything should take.
const LIMIT: Duration = Duration::from_secs(20);

/// What the task of a port has accepted, and how often it has run.
#[derive(Default)]
struct Served {
    accepted: Mutex<Vec<(MemoryPair, StrangersPair)>>,
    runs: AtomicU64,
    notify: Notify,
}

struct TwoPorts {
    net: MemoryNet,
    ports: [Arc<PortShared<MemoryAdapter>>; 2],
    served: [Arc<Served>; 2],
    tasks: Vec<JoinHandle<()>>,
}

impl TwoPorts {
    fn start(settings: VerbsSettings) -> Self {
        let net = MemoryNet::start();
        let served: [Arc<Served>; 2] = Default::default();
        let mut tasks = Vec::new();
        let ports = [0, 1].map(|host| {
            let port = net.port(host);
            let reports = port.reports;
            let shared = PortShared::new(port.verbs, port.mail, settings).unwrap();
            let shared = Arc::new(shared);
            let (same, served) = (shared.clone(), served[host].clone());
            tasks.push(thread::spawn(move || {
                let mut builder = tokio::runtime::Builder::new_current_thread();
                let runtime = builder.enable_io().build().unwrap();
                runtime.block_on(async {
                    let listener = PortListener::new(same.clone(), reports).unwrap();
                    let serve = poll_fn(|context| {
                        served.runs.fetch_add(1, Ordering::SeqCst);
                        while listener.poll_acceptable(context).is_ready() {
                            let (pair, _, stranger) = same.accept().unwrap();
                            served.accepted.lock().unwrap().push((pair, stranger));
                        }
                        Poll::<()>::Pending
                    });
                    tokio::select! {
                        () = serve => {}
                        () = served.notify.notified() => {}
                    }
                });
            }));
            shared
        });
        TwoPorts {
            net,
            ports,
            served,
            tasks,
        }
    }

    /// Two carriers that are connected to each other.
    fn carriers(&self) -> [PairCarrier<MemoryAdapter>; 2] {
        let near = self.answer(self.ask()).expect("an answer");
        wait_until("accepted", || self.accepted() == 1);
        let (far, _) = self.served[1].accepted.lock().unwrap().remove(0);
        [near, far].map(|pair| {
            pair.make_event().unwrap();
            PairCarrier::new(pair).unwrap()
        })
    }

    /// The first port asks the second one for a queue pair.
    fn ask(&self) -> PairAttempt {
        let there = self.ports[1].locator().unwrap();
        self.ports[0].ask(&there).unwrap()
    }

    fn answer(&self, attempt: PairAttempt) -> Option<MemoryPair> {
        let begun = Instant::now();
        let context = Context::from_waker(Waker::noop());
        loop {
            if let Poll::Ready(answer) = self.ports[0].poll_answer(attempt, &context) {
                return answer.ok();
            }
            assert!(begun.elapsed() < LIMIT);
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Number of queue pairs that the second port has accepted.
    fn accepted(&self) -> usize {
        self.served[1].accepted.lock().unwrap().len()
    }

    fn pairs_of(&self, host: usize) -> usize {
        let pairs = self.net.fabric.pairs();
        pairs.iter().filter(|(of, _)| *of == host).count()
    }
}

impl Drop for TwoPorts {
    fn drop(&mut self) {
        for served in &self.served {
            served.notify.notify_one();
        }
        self.tasks.drain(..).for_each(|task| drop(task.join()));
    }
}

fn without_pings() -> VerbsSettings {
    VerbsSettings {
        ping_every: Duration::from_secs(3600),
        ..VerbsSettings::default()
    }
}

/// The timer of a port helps nobody.
fn without_timer() -> VerbsSettings {
    VerbsSettings {
        tell_after: Duration::from_secs(3600),
        ..without_pings()
    }
}

fn wait_until(what: &str, f: impl Fn() -> bool) {
    let begun = Instant::now();
    while !f() {
        assert!(begun.elapsed() < LIMIT, "not {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Sleeps until the descriptor is readable, and resets it.
fn sleep(carrier: &dyn Carrier) {
    let fd = carrier.descriptor().raw();
    let slept = slim_sys::poll(fd, libc::POLLIN, Some(LIMIT));
    assert!(
        slim_sys::ready(fd, libc::POLLIN) != 0,
        "not woken: {slept:?}"
    );
    carrier.reset();
}

/// Sends these bytes. Whenever there is no room, sleeps on the descriptor.
fn send_all(carrier: &dyn Carrier, mut data: &[u8]) {
    while !data.is_empty() {
        match carrier.send(&[IoSlice::new(data)]) {
            Ok(n) => data = &data[n..],
            Err(libc::EAGAIN) => sleep(carrier),
            Err(e) => panic!("{e}"),
        }
    }
}

fn recv_exact(carrier: &dyn Carrier, mut buf: &mut [u8]) {
    while !buf.is_empty() {
        match carrier.recv(&mut [IoSliceMut::new(buf)]) {
            Ok(0) => panic!("the end"),
            Ok(n) => buf = &mut buf[n..],
            Err(libc::EAGAIN) => sleep(carrier),
            Err(e) => panic!("{e}"),
        }
    }
}

/// A side's thread sleeps on the descriptor, and others make calls that take completions in its place. No timer makes up for an event that is lost.
#[test]
fn no_event_is_lost() {
    let two = TwoPorts::start(without_timer());
    let carriers = two.carriers();
    let [near, far] = &carriers;
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for carrier in &carriers {
            let done = &done;
            scope.spawn(move || {
                let mut rng = fastrand::Rng::with_seed(1);
                while !done.load(Ordering::SeqCst) {
                    match rng.u8(..4) {
                        0 => drop(carrier.unread()),
                        1 => drop(carrier.unacked()),
                        2 => drop(carrier.has_room()),
                        _ => thread::sleep(Duration::from_micros(rng.u64(..100))),
                    }
                }
            });
        }
        // Also after a panic.
        let _done = Done(&done);
        let begun = Instant::now();
        let mut rounds = 0;
        scope.spawn(|| {
            let mut rng = fastrand::Rng::with_seed(2);
            let mut piece = [0; 4];
            loop {
                recv_exact(far, &mut piece);
                let n = u32::from_le_bytes(piece) as usize;
                recv_exact(far, &mut vec![0; n]);
                if rng.u8(..8) == 0 {
                    thread::sleep(Duration::from_micros(rng.u64(..50)));
                }
                send_all(far, &piece);
                if n == 1 {
                    return;
                }
            }
        });
        let mut rng = fastrand::Rng::with_seed(3);
        while begun.elapsed() < Duration::from_secs(3) {
            // Now and then more than there is room for.
            let n = match rng.u8(..50) {
                0 => 1_000_000,
                _ => 10 + rng.u32(..100),
            };
            send_all(near, &n.to_le_bytes());
            send_all(near, &vec![7; n as usize]);
            recv_exact(near, &mut [0; 4]);
            rounds += 1;
        }
        send_all(near, &1u32.to_le_bytes());
        send_all(near, &[7]);
        recv_exact(near, &mut [0; 4]);
        println!("{rounds} rounds");
    });
}

struct Done<'a>(&'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// One call sends several pieces. When the first of them is taken in part, nothing of the next one is sent before its rest, although there may be room again
/// by then.
#[test]
fn pieces_of_a_send_stay_in_order() {
    let two = TwoPorts::start(without_pings());
    let [near, far] = &two.carriers();
    let len = 40_000_000;
    let byte = |at: usize| (at % 251) as u8;
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut rng = fastrand::Rng::with_seed(5);
            let mut at = 0;
            while at < len {
                let lens = [1 + rng.usize(..100), rng.usize(..9000), rng.usize(..300)];
                let mut from = at;
                let pieces = lens.map(|len| {
                    from += len;
                    (from - len..from).map(byte).collect::<Vec<_>>()
                });
                let pieces: Vec<_> = pieces.iter().map(|piece| IoSlice::new(piece)).collect();
                match near.send(&pieces) {
                    Ok(n) => at += n,
                    Err(libc::EAGAIN) => sleep(near),
                    Err(e) => panic!("{e}"),
                }
            }
        });
        let mut at = 0;
        let mut buf = vec![0; 20_000];
        while at < len {
            match far.recv(&mut [IoSliceMut::new(&mut buf)]) {
                Ok(n) => {
                    let right = buf[..n].iter().enumerate().all(|(i, b)| *b == byte(at + i));
                    assert!(right, "wrong bytes behind {at}");
                    at += n;
                }
                Err(libc::EAGAIN) => sleep(far),
                Err(e) => panic!("{e}"),
            }
        }
    });
}

/// The header and the bytes of a frame go in one message.
#[test]
fn pieces_of_a_send_share_a_message() {
    let two = TwoPorts::start(without_timer());
    let [near, far] = &two.carriers();
    let tallies = two.net.fabric.tallies();
    let frame = [&[1; 24][..], &[2; 3000]].map(IoSlice::new);
    assert_eq!(near.send(&frame), Ok(3024));
    let after = two.net.fabric.tallies();
    let messages = (after.inline - tallies.inline, after.staged - tallies.staged);
    assert_eq!(messages, (0, 1));
    let mut buf = [0; 3024];
    recv_exact(far, &mut buf);
    assert!(buf[..24] == [1; 24] && buf[24..] == [2; 3000]);
}

/// Half a ring of room, which the peer tells by two credits, wakes a thread that sends, although there is nothing else to be told.
#[test]
fn room_alone_wakes_a_sender() {
    let two = TwoPorts::start(without_pings());
    let [near, far] = &two.carriers();
    let full = || near.send(&[IoSlice::new(&[1; 4096])]) == Err(libc::EAGAIN);
    wait_until("full", full);
    // The completions of these sends have been reported, and a turn of the timer has come.
    thread::sleep(Duration::from_millis(100));
    near.reset();
    assert!(!near.has_room());
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(100));
            recv_exact(far, &mut [0; 128 << 10]);
        });
        send_all(near, &[1; 4096]);
    });
}

/// Ends the first of two carriers.
type Ending = fn(&TwoPorts, &PairCarrier<MemoryAdapter>, &PairCarrier<MemoryAdapter>);

/// Whatever ends it wakes the thread that sleeps, and bytes that came before are there.
#[test]
fn an_end_of_any_kind_wakes_those_who_sleep() {
    let ends: [(&str, Ending); 5] = [
        ("failed here", |two, _, _| {
            two.net.fail_pairs(true, |host| host == 0)
        }),
        ("no link", |two, _, _| two.net.fabric.set_link(0, false)),
        ("suspended", |_, near, _| near.suspend()),
        ("the peer's end", |_, _, far| far.end()),
        ("a silent path", |two, near, _| {
            two.net.set_silent(true);
            let _ = near.send(&[IoSlice::new(b"?")]);
        }),
    ];
    for (what, end) in ends {
        let two = TwoPorts::start(without_timer());
        let [near, far] = &two.carriers();
        send_all(far, b"before");
        wait_until("there", || near.unread() == 6);
        near.reset();
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(20));
                end(&two, near, far);
            });
            let mut buf = [0; 6];
            recv_exact(near, &mut buf);
            assert_eq!(&buf, b"before");
            loop {
                let got = near.recv(&mut [IoSliceMut::new(&mut buf)]);
                if got != Err(libc::EAGAIN) || near.is_over() {
                    break assert!(
                        matches!(got, Ok(0) | Err(libc::ECONNRESET | libc::EAGAIN)),
                        "{what}"
                    );
                }
                sleep(near);
            }
        });
    }
}

/// What was recorded is told although nobody calls, and then the port's tasks rest.
#[test]
fn counts_are_told_and_then_nothing_runs() {
    let two = TwoPorts::start(without_pings());
    let [near, far] = &two.carriers();
    // The turn that follows a connection is over.
    thread::sleep(Duration::from_millis(50));
    send_all(near, &[1; 1000]);
    // Its own calls would take the message, too.
    thread::sleep(Duration::from_millis(200));
    assert_eq!(near.unacked(), 0);
    let runs = || [0, 1].map(|n| two.served[n].runs.load(Ordering::SeqCst));
    thread::sleep(Duration::from_millis(50));
    let before = runs();
    thread::sleep(Duration::from_millis(500));
    assert_eq!(runs(), before, "nothing happens, and nobody has read");
    assert_eq!(far.unread(), 1000);
}

/// Calls that poll take the messages themselves, and these tell the counts. So the ports' tasks run seldom.
#[test]
fn polling_calls_leave_little_to_the_ports_tasks() {
    let two = TwoPorts::start(without_pings());
    let [near, far] = &two.carriers();
    let runs = || [0, 1].map(|n| two.served[n].runs.load(Ordering::SeqCst));
    let before = runs();
    let begun = Instant::now();
    let mut passed = 0;
    while begun.elapsed() < Duration::from_secs(1) {
        for (from, to) in [(near, far), (far, near)] {
            assert_eq!(from.send(&[IoSlice::new(&[1; 8])]), Ok(8));
            let mut got = 0;
            while got < 8 {
                let mut buf = [0; 8];
                got += to.recv(&mut [IoSliceMut::new(&mut buf)]).unwrap_or(0);
                thread::yield_now();
            }
            passed += 1;
        }
    }
    let runs = [0, 1].map(|n| runs()[n] - before[n]);
    println!("{passed} messages, {runs:?} runs of the tasks");
    // A look each 40 ms, and more at first.
    assert!(runs.iter().all(|runs| *runs < 100), "{runs:?}");
    // The last count is not forgotten.
    wait_until("told", || near.unacked() + far.unacked() == 0);
}

/// Peers that ask and never come get so many queue pairs, which end after a while. One that comes is accepted.
#[test]
fn unproved_queue_pairs_are_few_and_end() {
    let settings = VerbsSettings {
        most_unproved: 3,
        proof_within: Duration::from_secs(1),
        ..VerbsSettings::default()
    };
    let two = TwoPorts::start(settings);
    two.net.set_mute(true);
    let asked: Vec<_> = (0..10).map(|_| two.ask()).collect();
    wait_until("asked", || two.pairs_of(1) == 3);
    // Each asks again and again.
    thread::sleep(Duration::from_millis(300));
    assert_eq!((two.pairs_of(0), two.pairs_of(1)), (10, 3));
    asked
        .iter()
        .for_each(|attempt| two.ports[0].forget(*attempt));
    assert_eq!(two.pairs_of(0), 0);
    wait_until("given up", || two.pairs_of(1) == 0);
    assert_eq!(two.accepted(), 0);
    two.net.set_mute(false);
    assert!(two.answer(two.ask()).is_some());
    wait_until("accepted", || two.accepted() == 1);
}

/// A peer that uses what it has asked for, and does not say who it is, gets no more than one that does not.
#[test]
fn queue_pairs_of_strangers_are_few() {
    let settings = VerbsSettings {
        most_unproved: 3,
        ..VerbsSettings::default()
    };
    let two = TwoPorts::start(settings);
    let asked: Vec<_> = (0..10).map(|_| two.ask()).collect();
    wait_until("accepted", || two.accepted() == 3);
    // Each of the others asks again and again.
    thread::sleep(Duration::from_millis(500));
    assert_eq!((two.accepted(), two.pairs_of(1)), (3, 3));
    // It is known who two of them are.
    two.served[1].accepted.lock().unwrap().truncate(1);
    wait_until("accepted", || two.accepted() == 3);
    asked
        .iter()
        .for_each(|attempt| two.ports[0].forget(*attempt));
}

/// What a flow needs of a new transport, it has before it leaves the old one.
#[test]
fn connections_have_their_event_counters_when_they_are_made() {
    let two = TwoPorts::start(without_pings());
    let near = PairConnection::asking(two.ports[0].clone(), two.ask());
    wait_until("connected", || {
        let made = near.poll_connected(&mut Context::from_waker(Waker::noop()));
        matches!(made, Poll::Ready(Ok(())))
    });
    wait_until("accepted", || two.accepted() == 1);
    let (pair, stranger) = two.served[1].accepted.lock().unwrap().remove(0);
    let far = PairConnection::accepted(two.ports[1].clone(), pair, stranger);
    for connection in [near, far] {
        assert!(connection.pair().unwrap().event().is_some());
    }
}

/// A question that nobody hears is given up after three seconds, and so is one that is refused, at once.
#[test]
fn questions_without_an_answer_end() {
    let two = TwoPorts::start(VerbsSettings::default());
    let lost = {
        two.net.set_silent(true);
        let begun = Instant::now();
        let attempt = two.ask();
        assert!(two.answer(attempt).is_none());
        begun.elapsed()
    };
    two.net.set_silent(false);
    assert!(lost >= Duration::from_secs(3), "{lost:?}");
    two.net.set_refusing(true);
    let there = two.ports[1].locator().unwrap();
    assert!(two.ports[0].ask(&there).is_err());
    two.net.set_refusing(false);
    assert_eq!((two.pairs_of(0), two.pairs_of(1)), (0, 0));
    assert!(two.answer(two.ask()).is_some());
}

/// Another port is asked next if this one has no way to the locator, or no queue pair, or if the peer finds no way to it.
#[test]
fn whatever_ends_a_question_speaks_against_the_port() {
    let two = TwoPorts::start(VerbsSettings::default());
    let there = two.ports[1].locator().unwrap();
    let none = two.ports[0].can_ask(&there).unwrap();
    let port = two.net.port(2);
    let mut mail = port.verbs.datagrams();
    mail.refuse_sends(libc::EHOSTUNREACH);
    let lame = PortShared::new(port.verbs, Box::new(mail), VerbsSettings::default()).unwrap();
    assert_eq!(lame.can_ask(&there), Some(none));
    let attempt = lame.ask(&there).unwrap();
    let context = Context::from_waker(Waker::noop());
    lame.turn(&context);
    let answer = lame.poll_answer(attempt, &context);
    assert!(matches!(answer, Poll::Ready(Err(_))));
    assert!(lame.can_ask(&there).unwrap() > none, "no way");

    two.net.set_refusing(true);
    assert!(two.ports[0].ask(&there).is_err());
    two.net.set_refusing(false);
    assert!(
        two.ports[0].can_ask(&there).unwrap() > none,
        "no queue pair"
    );
    assert!(two.answer(two.ask()).is_some());
    assert_eq!(two.ports[0].can_ask(&there), Some(none), "it works");
}
