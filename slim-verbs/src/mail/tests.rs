use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use slim_rdma::in_memory::{Fabric, MemoryDatagrams};

use super::*;

/// How long a silent neighbour keeps whoever looks for the way to it.
const SILENT: Duration = Duration::from_millis(400);
/// Much less.
const AT_ONCE: Duration = Duration::from_millis(100);
const LIMIT: Duration = Duration::from_secs(20);

/// The ports with these keys are silent neighbours.
struct SomeSilent {
    silent: Vec<u32>,
    looked: Arc<AtomicUsize>,
    is_own: Arc<AtomicBool>,
}

impl FindWays for SomeSilent {
    type Way = PortLocator;

    fn may_wait(&self) -> bool {
        true
    }

    fn is_own(&self) -> bool {
        self.is_own.load(Ordering::SeqCst)
    }

    fn find(&self, to: &PortLocator) -> Result<PortLocator, VerbsError> {
        self.looked.fetch_add(1, Ordering::SeqCst);
        if self.silent.contains(&to.queue_key) {
            thread::sleep(SILENT);
            return Err(VerbsError::new("find", libc::ETIMEDOUT));
        }
        Ok(*to)
    }
}

impl SendBy<PortLocator> for MemoryDatagrams {
    fn send_by(&mut self, way: PortLocator, bytes: &[u8]) -> Result<(), VerbsError> {
        self.send(&way, bytes)
    }
}

struct Post {
    mail: PatientMail<SomeSilent, MemoryDatagrams>,
    fabric: Fabric,
    looked: Arc<AtomicUsize>,
    is_own: Arc<AtomicBool>,
    /// The neighbours that answer.
    others: Vec<MemoryDatagrams>,
    silent: Vec<PortLocator>,
}

/// A queue with so many neighbours that answer, and that do not.
fn post(answering: usize, silent: usize) -> Post {
    let fabric = Fabric::new(2);
    let others: Vec<_> = (0..answering)
        .map(|_| fabric.adapter(1).datagrams())
        .collect();
    let queue = fabric.adapter(0).datagrams();
    let silent: Vec<_> = (0..silent)
        .map(|n| PortLocator {
            gid: [n as u8 + 100; 16],
            queue_key: n as u32,
            ..queue.locator()
        })
        .collect();
    let (looked, is_own) = (Arc::default(), Arc::new(AtomicBool::new(true)));
    let ways = SomeSilent {
        silent: silent.iter().map(|to| to.queue_key).collect(),
        looked: Arc::clone(&looked),
        is_own: is_own.clone(),
    };
    Post {
        mail: PatientMail::of(ways, queue),
        fabric,
        looked,
        is_own,
        others,
        silent,
    }
}

impl Post {
    /// What arrives at this neighbour next.
    fn arrives(&mut self, other: usize) -> Vec<u8> {
        let begun = Instant::now();
        while begun.elapsed() < LIMIT {
            self.fabric.run();
            if let Some(datagram) = self.others[other].receive() {
                return datagram.bytes;
            }
            thread::sleep(Duration::from_millis(1));
        }
        panic!("nothing has arrived")
    }
}

#[test]
fn a_silent_neighbour_keeps_neither_the_sender_nor_the_others() {
    let mut post = post(1, 2);
    let begun = Instant::now();
    for to in post.silent.clone() {
        post.mail.send(&to, b"to nobody").unwrap();
    }
    let to = post.others[0].locator();
    post.mail.send(&to, b"a word").unwrap();
    assert_eq!(post.mail.receive().map(|d| d.bytes), None);
    assert_eq!(post.arrives(0), b"a word");
    assert!(begun.elapsed() < SILENT, "{:?}", begun.elapsed());
}

#[test]
fn datagrams_to_a_port_keep_their_order() {
    let mut post = post(2, 0);
    let to = [0, 1].map(|n| post.others[n].locator());
    for n in 0..10_u8 {
        for to in &to {
            post.mail.send(to, &[n]).unwrap();
        }
    }
    for n in 0..10_u8 {
        assert_eq!((post.arrives(0), post.arrives(1)), (vec![n], vec![n]));
    }
}

#[test]
fn the_next_sender_hears_that_there_is_no_way_and_then_it_is_looked_for_again() {
    let mut post = post(0, 1);
    let to = post.silent[0];
    let begun = Instant::now();
    // The same question, sent again and again.
    let told = loop {
        match post.mail.send(&to, b"a question") {
            Ok(()) => assert!(begun.elapsed() < LIMIT),
            Err(e) => break e,
        }
        thread::sleep(Duration::from_millis(5));
    };
    assert_eq!(told.errno, libc::ETIMEDOUT);
    assert!(begun.elapsed() >= SILENT);
    assert_eq!(post.looked.load(Ordering::SeqCst), 1, "it waited once");
    post.mail.send(&to, b"a question").unwrap();
    // An old failure says nothing about now.
    thread::sleep(SILENT + FAILURE_AGE + AT_ONCE);
    post.mail.send(&to, b"a question").unwrap();
}

#[test]
fn no_more_than_so_many_datagrams_wait() {
    let mut post = post(0, 1);
    let to = post.silent[0];
    let sent = (0..1000_u32).map(|n| post.mail.send(&to, &n.to_be_bytes()));
    let refused = sent.filter_map(Result::err).collect::<Vec<_>>();
    assert_eq!(refused.len(), 1000 - MOST_WAITING / 2);
    assert!(refused.iter().all(|e| e.errno == libc::ENOBUFS));
}

#[test]
fn many_silent_neighbours_take_only_some_threads() {
    let mut post = post(0, 20);
    for to in post.silent.clone() {
        post.mail.send(&to, b"to nobody").unwrap();
    }
    assert_eq!(post.mail.threads.len(), FINDERS);
    // The threads end with what they do now.
    let begun = Instant::now();
    drop(post.mail);
    assert!(begun.elapsed() < 3 * SILENT, "{:?}", begun.elapsed());
    assert!(post.looked.load(Ordering::SeqCst) <= 2 * FINDERS);
}

#[test]
fn without_threads_the_sender_waits() {
    let mut post = post(1, 1);
    post.mail.most = 0;
    let to = post.others[0].locator();
    post.mail.send(&to, b"a word").unwrap();
    assert_eq!(post.arrives(0), b"a word");
    let e = post.mail.send(&post.silent[0], b"to nobody").unwrap_err();
    assert_eq!(e.errno, libc::ETIMEDOUT);
    post.mail.send(&to, b"a word").unwrap();
    assert_eq!(post.arrives(0), b"a word");
}

/// The adapter is slow: the way is there all the same.
#[test]
fn a_full_queue_says_nothing_about_a_neighbour() {
    let mut errands = Errands::default();
    let to = post(1, 0).others[0].locator();
    assert!(errands.add(&to, b"first") && errands.add(&to, b"second"));
    errands.note(neighbour(&to), Err(VerbsError::new("queue", libc::ENOBUFS)));
    assert_eq!(errands.letters[&neighbour(&to)].len(), 1);
    assert!(errands.failure(&to).is_none());
    errands.note(neighbour(&to), Err(VerbsError::new("way", libc::ETIMEDOUT)));
    assert!(errands.letters.is_empty() && errands.failure(&to).is_some());
}

/// A lock that a thread of the parent held is held for ever in the child.
#[test]
fn a_child_of_a_fork_touches_no_lock() {
    let mut post = post(0, 1);
    let to = post.silent[0];
    post.mail.send(&to, b"to nobody").unwrap();
    post.is_own.store(false, Ordering::SeqCst);
    let shared = post.mail.shared.clone();
    let (_queue, _errands) = (locked(&shared.queue), locked(&shared.errands));
    assert!(post.mail.is_broken() && post.mail.arm().is_err());
    assert_eq!(post.mail.receive().map(|d| d.bytes), None);
    assert!(post.mail.send(&to, b"a word").is_err());
    assert_eq!(post.mail.locator().number, post.silent[0].number);
    drop(post.mail);
}

/// Flows that ask one dead peer, each with its own question, take no room from those to others.
#[test]
fn many_datagrams_to_a_silent_neighbour_leave_room_for_others() {
    let mut post = post(1, 1);
    for n in 0..1000_u32 {
        let _ = post.mail.send(&post.silent[0], &n.to_be_bytes());
    }
    let to = post.others[0].locator();
    let begun = Instant::now();
    post.mail.send(&to, b"a word").unwrap();
    assert_eq!(post.arrives(0), b"a word");
    assert!(begun.elapsed() < SILENT, "{:?}", begun.elapsed());
}

/// A rack is dead, and a neighbour that has answered lives.
#[test]
fn a_neighbour_that_is_known_does_not_wait_for_many_silent_ones() {
    let mut post = post(1, 4 * FINDERS);
    let to = post.others[0].locator();
    post.mail.send(&to, b"hello").unwrap();
    assert_eq!(post.arrives(0), b"hello");
    for to in post.silent.clone() {
        post.mail.send(&to, b"to nobody").unwrap();
    }
    let begun = Instant::now();
    post.mail.send(&to, b"a word").unwrap();
    assert_eq!(post.arrives(0), b"a word");
    assert!(begun.elapsed() < SILENT, "{:?}", begun.elapsed());
}

/// The kernel keeps a neighbour that is silent from failing anew, so the questions to it come last.
#[test]
fn neighbours_that_were_silent_come_behind_new_ones() {
    let mut post = post(1, 4 * FINDERS);
    let dead = post.silent.clone();
    for to in &dead {
        post.mail.send(to, b"to nobody").unwrap();
    }
    thread::sleep(4 * SILENT + 2 * AT_ONCE);
    for _ in 0..2 {
        for to in &dead {
            let _ = post.mail.send(to, b"to nobody");
        }
    }
    thread::sleep(AT_ONCE / 2);
    let to = post.others[0].locator();
    let begun = Instant::now();
    post.mail.send(&to, b"a word").unwrap();
    assert_eq!(post.arrives(0), b"a word");
    assert!(begun.elapsed() < 2 * SILENT, "{:?}", begun.elapsed());
}

struct Whims(std::sync::atomic::AtomicU64);

impl Whims {
    fn next(&self) -> u64 {
        let n = self.0.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::SeqCst);
        (n ^ (n >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 33
    }
}

impl FindWays for Arc<Whims> {
    type Way = PortLocator;

    fn may_wait(&self) -> bool {
        true
    }

    fn is_own(&self) -> bool {
        true
    }

    fn find(&self, to: &PortLocator) -> Result<PortLocator, VerbsError> {
        let n = self.next();
        match n % 8 {
            0 => thread::sleep(Duration::from_micros(n / 8 % 500)),
            1 => thread::yield_now(),
            2 => return Err(VerbsError::new("find", libc::ETIMEDOUT)),
            _ => {}
        }
        Ok(*to)
    }
}

#[test]
fn nothing_is_left_without_a_thread() {
    for round in 0..40_u64 {
        let fabric = Fabric::new(2);
        let queue = fabric.adapter(0).datagrams();
        let whims = Arc::new(Whims(round.wrapping_mul(0x1234_5678_9abc_def1).into()));
        let own = queue.locator();
        let mut mail = PatientMail::of(whims.clone(), queue);
        for n in 0..2000_u64 {
            let to = PortLocator {
                queue_key: (whims.next() % 12) as u32,
                ..own
            };
            let _ = mail.send(&to, &(n % 50).to_be_bytes());
            if whims.next().is_multiple_of(64) {
                thread::sleep(Duration::from_micros(whims.next() % 2000));
            }
        }
        let begun = Instant::now();
        loop {
            let errands = locked(&mail.shared.errands);
            if errands.letters.is_empty() {
                assert!(errands.unattended.iter().all(VecDeque::is_empty));
                assert_eq!(errands.with_strangers, 0);
                if errands.idle == mail.threads.len() {
                    break;
                }
            }
            assert!(
                begun.elapsed() < LIMIT,
                "{:?} {:?}",
                errands.letters,
                errands.unattended
            );
            drop(errands);
            thread::sleep(Duration::from_millis(1));
        }
    }
}

struct Panics(AtomicBool);

impl FindWays for Panics {
    type Way = PortLocator;

    fn may_wait(&self) -> bool {
        true
    }

    fn is_own(&self) -> bool {
        true
    }

    fn find(&self, to: &PortLocator) -> Result<PortLocator, VerbsError> {
        assert!(!self.0.swap(false, Ordering::SeqCst), "on purpose");
        Ok(*to)
    }
}

#[test]
fn a_panic_does_not_keep_a_port_for_ever() {
    let fabric = Fabric::new(2);
    let mut other = fabric.adapter(1).datagrams();
    let to = other.locator();
    let queue = fabric.adapter(0).datagrams();
    let mut mail = PatientMail::of(Panics(AtomicBool::new(true)), queue);
    for _ in 0..20 {
        let _ = mail.send(&to, b"a word");
        thread::sleep(Duration::from_millis(20));
        fabric.run();
        if other.receive().is_some() {
            return;
        }
    }
    panic!("the thread that took care of the port is gone, and nobody else does");
}

/// Its processes have a queue each, but their neighbour is one.
#[test]
fn many_processes_of_a_silent_host_take_one_thread() {
    let mut post = post(1, 1);
    for n in 0..64 {
        let to = PortLocator {
            number: slim_rdma::QpNumber(n),
            ..post.silent[0]
        };
        post.mail.send(&to, b"to nobody").unwrap();
    }
    let to = post.others[0].locator();
    let begun = Instant::now();
    post.mail.send(&to, b"a word").unwrap();
    assert_eq!(post.arrives(0), b"a word");
    assert!(begun.elapsed() < SILENT, "{:?}", begun.elapsed());
    thread::sleep(SILENT + AT_ONCE);
    assert_eq!(post.looked.load(Ordering::SeqCst), 2);
}
