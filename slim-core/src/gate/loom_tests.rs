//! Every interleaving of a few threads. Run by
//! `RUSTFLAGS="--cfg loom" cargo test -p slim-core --release --lib loom`.
//!
//! What lies behind the gate is relaxed atomics: on their own they order nothing, and loom lets a
//! load return any value that the memory model allows. So a test passes only if the gate itself
//! keeps the two sides apart and shows each what the other did.

use loom::sync::Arc;
use loom::sync::atomic::Ordering::Relaxed;
use loom::thread;

use super::*;

const CALLERS: usize = 2;

#[derive(Default)]
struct Flow {
    gate: Gate,
    /// Per caller: whether it is inside, and how much it has accounted.
    busy: [AtomicU32; CALLERS],
    counted: [AtomicU32; CALLERS],
    /// Whether control is at work, and on which transport the flow is.
    owned: AtomicU32,
    epoch: AtomicU32,
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

    fn assert_nobody_inside(&self) {
        for busy in &self.busy {
            assert_eq!(busy.load(Relaxed), 0, "a call is inside");
        }
    }

    fn total(&self) -> u32 {
        self.counted.iter().map(|n| n.load(Relaxed)).sum()
    }
}

fn spawn(flow: &Arc<Flow>, me: usize, times: usize) -> thread::JoinHandle<Calls> {
    let flow = flow.clone();
    thread::spawn(move || flow.call(me, times))
}

#[test]
fn loom_nobody_is_inside_a_barred_idle_gate_and_every_count_is_seen() {
    loom::model(|| {
        let flow = Arc::new(Flow::default());
        let callers = [spawn(&flow, 0, 1), spawn(&flow, 1, 1)];
        flow.gate.bar();
        let seen = flow.gate.idle().then(|| {
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
fn loom_the_last_one_out_knows_it() {
    loom::model(|| {
        let flow = Arc::new(Flow::default());
        let callers = [spawn(&flow, 0, 1), spawn(&flow, 1, 1)];
        flow.gate.bar();
        let idle_at_once = flow.gate.idle();
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
        if flow.gate.idle() {
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
        let seen = flow.gate.idle().then(|| flow.total());
        assert!(!flow.gate.enter());
        let got_in = caller.join().unwrap().got_in;
        assert!(seen.is_none_or(|seen| seen == got_in));
    });
}
