//! Every interleaving of a few threads. Run by
//! `RUSTFLAGS="--cfg loom" cargo test -p slim-core --release --lib loom`.
//!
//! The data behind the gate are relaxed atomics. On their own they order nothing, and loom lets a
//! load return any value that the memory model allows. So a test passes only if the gate itself
//! keeps the two sides apart and makes the writes of each side visible to the other.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::AtomicU32;
use loom::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use loom::thread;

use super::pass::{Passed, Purpose};
use super::*;

const CALLERS: usize = 2;

struct Flow {
    gate: Gate,
    marks: Marks,
    /// Per caller: whether it is inside, and how much it has accounted.
    busy: [AtomicU32; CALLERS],
    counted: [AtomicU32; CALLERS],
    /// Whether control is at work, and on which transport the flow is.
    owned: AtomicU32,
    epoch: AtomicU32,
    /// The lock of the sending half, and what is behind it.
    lock: AtomicU32,
    half: UnsafeCell<()>,
    sent: AtomicU32,
}

impl Default for Flow {
    fn default() -> Self {
        Self {
            gate: Gate::new(),
            marks: Marks::new(),
            busy: Default::default(),
            counted: Default::default(),
            owned: AtomicU32::new(0),
            epoch: AtomicU32::new(0),
            lock: AtomicU32::new(0),
            half: UnsafeCell::new(()),
            sent: AtomicU32::new(0),
        }
    }
}

#[derive(Default)]
struct Calls {
    got_in: u32,
    was_last: u32,
}

impl Flow {
    fn call(&self, me: usize, times: usize) -> Calls {
        let mut calls = Calls::default();
        let mut epoch = 0;
        for _ in 0..times {
            if !self.gate.enter() {
                continue;
            }
            self.busy[me].store(1, Relaxed);
            assert_eq!(self.owned.load(Relaxed), 0, "control is at work");
            let now = self.epoch.load(Relaxed);
            assert!(now >= epoch, "back on an old transport");
            epoch = now;
            calls.got_in += 1;
            self.counted[me].store(calls.got_in, Relaxed);
            self.busy[me].store(0, Relaxed);
            calls.was_last += u32::from(self.gate.leave().last_and_barred);
        }
        calls
    }

    /// As [`call`](Self::call), but by the pass while that is valid.
    fn call_with_pass(&self, me: usize, times: usize) -> Calls {
        let mut calls = Calls::default();
        for _ in 0..times {
            let Some(passed) = self.pass(me, Purpose::Receive, &mut calls) else {
                continue;
            };
            self.busy[me].store(1, Relaxed);
            assert_eq!(self.owned.load(Relaxed), 0, "control is at work");
            calls.got_in += 1;
            self.counted[me].store(calls.got_in, Relaxed);
            self.busy[me].store(0, Relaxed);
            calls.was_last += u32::from(self.leave_by_pass(me, passed).last_and_barred);
        }
        calls
    }

    fn pass(&self, me: usize, purpose: Purpose, calls: &mut Calls) -> Option<Passed<'_>> {
        match self.gate.pass(&self.marks, name(me), purpose) {
            Ok(passed) => Some(passed),
            Err(left) => {
                calls.was_last += u32::from(left.last_and_barred);
                None
            }
        }
    }

    fn leave_by_pass(&self, me: usize, passed: Passed<'_>) -> Left {
        self.gate.leave_by_pass(name(me), passed)
    }

    fn idle(&self) -> bool {
        self.gate.idle(&self.marks)
    }

    fn bar(&self) {
        self.gate.bar();
        self.fence();
    }

    /// Stands for `membarrier(2)`.
    fn fence(&self) {
        if self.gate.has_owner() {
            loom::sync::atomic::fence(SeqCst);
        }
    }

    /// Writes as the owner of the pass does: only if the lock is free.
    fn send_with_pass(&self, me: usize) -> bool {
        let Some(passed) = self.pass(me, Purpose::Send, &mut Calls::default()) else {
            return false;
        };
        let free = self.lock.load(Acquire) == 0;
        if free {
            self.write();
        }
        let _ = self.leave_by_pass(me, passed);
        free
    }

    /// Writes as other threads do, but gives up where the product waits.
    fn send_with_lock(&self) -> bool {
        if self.lock.compare_exchange(0, 1, Acquire, Relaxed).is_err() {
            return false;
        }
        self.fence();
        let alone = !self.gate.is_owner_sending(&self.marks);
        if alone {
            self.write();
        }
        self.lock.store(0, Release);
        alone
    }

    /// loom reports two writes at once, and a write that does not see an earlier one.
    fn write(&self) {
        self.half.with_mut(|_| {
            let sent = self.sent.load(Relaxed);
            self.sent.store(sent + 1, Relaxed);
        });
    }

    fn give_pass(&self, me: usize) {
        assert!(self.gate.enter());
        self.gate.give_pass(self.marks.of(name(me)).unwrap());
        let _ = self.gate.leave();
    }

    fn assert_nobody_inside(&self) {
        for busy in &self.busy {
            assert_eq!(busy.load(Relaxed), 0, "a call is inside");
        }
    }

    fn total(&self) -> u32 {
        self.counted.iter().map(|n| n.load(Relaxed)).sum()
    }
}

fn name(me: usize) -> usize {
    me + 1
}

fn spawn_with_pass(flow: &Arc<Flow>, me: usize, times: usize) -> thread::JoinHandle<Calls> {
    flow.give_pass(me);
    let flow = flow.clone();
    thread::spawn(move || flow.call_with_pass(me, times))
}

/// The thread returns how often it has written.
fn spawn_sender(flow: &Arc<Flow>, me: usize, times: usize) -> thread::JoinHandle<usize> {
    flow.give_pass(me);
    let flow = flow.clone();
    thread::spawn(move || (0..times).filter(|_| flow.send_with_pass(me)).count())
}

fn spawn(flow: &Arc<Flow>, me: usize, times: usize) -> thread::JoinHandle<Calls> {
    let flow = flow.clone();
    thread::spawn(move || flow.call(me, times))
}

#[test]
fn loom_no_call_is_inside_a_barred_idle_gate_and_every_count_is_seen() {
    loom::model(|| {
        let flow = Arc::new(Flow::default());
        let callers = [spawn(&flow, 0, 1), spawn(&flow, 1, 1)];
        flow.gate.bar();
        let seen = flow.idle().then(|| {
            flow.assert_nobody_inside();
            flow.total()
        });
        let got_in: u32 = callers.map(|c| c.join().unwrap().got_in).into_iter().sum();
        if let Some(seen) = seen {
            assert_eq!(seen, got_in, "a call was not seen, or got in later");
        }
    });
}

#[test]
fn loom_the_last_call_to_leave_a_barred_gate_learns_it() {
    loom::model(|| {
        let flow = Arc::new(Flow::default());
        let callers = [spawn(&flow, 0, 1), spawn(&flow, 1, 1)];
        flow.gate.bar();
        let idle_at_once = flow.idle();
        let last: u32 = callers
            .map(|c| c.join().unwrap().was_last)
            .into_iter()
            .sum();
        assert!(idle_at_once || last == 1, "control would wait for ever");
        assert!(last <= 1);
    });
}

#[test]
fn loom_what_control_did_is_seen_after_opening() {
    loom::model(|| {
        let flow = Arc::new(Flow::default());
        let caller = spawn(&flow, 0, 2);
        flow.gate.bar();
        if flow.idle() {
            flow.owned.store(1, Relaxed);
            flow.assert_nobody_inside();
            flow.epoch.store(1, Relaxed);
            flow.owned.store(0, Relaxed);
            flow.gate.open();
            if flow.gate.enter() {
                assert_eq!(flow.epoch.load(Relaxed), 1);
                assert!(!flow.gate.leave().last_and_barred);
            }
        }
        caller.join().unwrap();
    });
}

#[test]
fn loom_a_closed_gate_stays_closed() {
    loom::model(|| {
        let flow = Arc::new(Flow::default());
        let caller = spawn(&flow, 0, 2);
        flow.gate.bar();
        flow.gate.close();
        flow.gate.open();
        let seen = flow.idle().then(|| flow.total());
        assert!(!flow.gate.enter());
        let got_in = caller.join().unwrap().got_in;
        assert!(seen.is_none_or(|seen| seen == got_in));
    });
}

#[test]
fn loom_a_barred_gate_keeps_the_owner_of_the_pass_out() {
    loom::model(|| {
        let flow = Arc::new(Flow::default());
        let callers = [spawn_with_pass(&flow, 0, 1), spawn(&flow, 1, 1)];
        flow.bar();
        let seen = flow.idle().then(|| {
            flow.owned.store(1, Relaxed);
            flow.assert_nobody_inside();
            flow.total()
        });
        let calls = callers.map(|c| c.join().unwrap());
        let got_in: u32 = calls.iter().map(|c| c.got_in).sum();
        match seen {
            Some(seen) => assert_eq!(seen, got_in, "a call was not seen, or got in later"),
            None => assert!(
                calls.iter().any(|c| c.was_last > 0),
                "control would wait for ever"
            ),
        }
    });
}

#[test]
fn loom_a_call_by_the_pass_sees_what_control_did() {
    loom::model(|| {
        let flow = Arc::new(Flow::default());
        let caller = spawn_with_pass(&flow, 0, 2);
        flow.bar();
        if flow.idle() {
            flow.owned.store(1, Relaxed);
            flow.assert_nobody_inside();
            flow.owned.store(0, Relaxed);
            flow.gate.open();
        }
        caller.join().unwrap();
    });
}

#[test]
fn loom_the_owner_of_the_pass_and_the_holder_of_the_lock_never_write_at_once() {
    loom::model(|| {
        let flow = Arc::new(Flow::default());
        let owner = spawn_sender(&flow, 0, 2);
        let others = usize::from(flow.send_with_lock());
        let sent = owner.join().unwrap() + others;
        assert_eq!(flow.sent.load(Relaxed) as usize, sent);
    });
}

#[test]
fn loom_sharing_makes_the_pass_invalid() {
    loom::model(|| {
        let flow = Arc::new(Flow::default());
        let owner = spawn_sender(&flow, 0, 1);
        flow.gate.share();
        flow.fence();
        if !flow.gate.is_owner_sending(&flow.marks) {
            // The owner cannot enter by its pass any more, so the lock need not be checked.
            flow.write();
        }
        owner.join().unwrap();
    });
}

#[test]
fn loom_a_pass_from_before_a_reuse_is_invalid() {
    loom::model(|| {
        let flow = Arc::new(Flow::default());
        let former = spawn_sender(&flow, 0, 1);
        flow.gate.close();
        flow.fence();
        if flow.idle() {
            flow.write();
            flow.gate.reuse();
            flow.give_pass(1);
            flow.send_with_pass(1);
        }
        former.join().unwrap();
    });
}

#[test]
fn loom_a_pass_that_was_given_back_needs_no_fence() {
    loom::model(|| {
        let flow = Arc::new(Flow::default());
        flow.give_pass(0);
        let owner = {
            let flow = flow.clone();
            thread::spawn(move || {
                let sent = flow.send_with_pass(0);
                flow.gate.give_back(&flow.marks, name(0));
                // The thread has no pass any more.
                usize::from(sent) + usize::from(flow.send_with_pass(0))
            })
        };
        flow.bar();
        let idle = flow.idle();
        if idle {
            flow.write();
        }
        let sent = owner.join().unwrap() + usize::from(idle);
        assert_eq!(flow.sent.load(Relaxed) as usize, sent);
    });
}
