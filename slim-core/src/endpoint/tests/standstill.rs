//! Paths that carry the messages of a resume, but none of the bytes that follow: `docs/PROTOCOL.md`, section "Attempts".

use std::time::Duration;

use super::pair::*;
use crate::config::Config;
use crate::endpoint::State;
use crate::event::{EscalateReason, Event};
use crate::ids::{Cause, Verdict};

const MINUTE: Duration = Duration::from_secs(60);

/// A flow with bytes to send again, which has just lost its transport.
fn broken(config: Config, cause: Cause) -> Pair {
    let mut pair = Pair::live_with(config);
    pair.counts[A].sent = 5000;
    pair.ends[A].fault(pair.now, FLOW, cause);
    pair.run();
    pair
}

/// Each transport is given up `lasts` after it was installed, and the peer then has received `more` bytes more. Returns how long it took until the
/// flow was given up, unless it is still there after `most`.
fn resumes(pair: &mut Pair, lasts: Duration, more: u64, most: Duration) -> Option<Duration> {
    let begun = pair.now;
    while pair.now.since(begun) < most {
        match pair.state(A) {
            Some(State::Live) => pair.ends[A].fault(pair.now, FLOW, Cause::Stall),
            // The replay does not fit the kernel's buffer.
            Some(State::Resuming) => pair.ends[A].replay_stalled(pair.now, FLOW),
            _ => {}
        }
        pair.run();
        if pair.state(A) == Some(State::Escalated) {
            return Some(pair.now.since(begun));
        }
        pair.wait(lasts);
        pair.counts[B].received += more;
    }
    None
}

#[test]
fn resumes_after_which_nothing_arrives_use_up_the_attempts() {
    // Whether or not the replay fits the kernel's buffer.
    for installs in [true, false] {
        for lasts in [ms(10), ms(300), ms(900)] {
            let mut pair = broken(Config::default(), Cause::Errno(RESET));
            pair.replays = installs;
            let took = resumes(&mut pair, lasts, 0, MINUTE * 2).expect("given up");
            assert!((MINUTE..MINUTE + lasts * 2).contains(&took), "{took:?}");
            let verdict = pair.verdict(A);
            assert!(matches!(verdict, Some(Verdict::Errno(_))), "{verdict:?}");
            let reason = pair.events[A].iter().find_map(|event| match event {
                Event::Escalate { reason, .. } => Some(*reason),
                _ => None,
            });
            assert_eq!(reason, Some(EscalateReason::Attempts));
            assert_eq!(pair.state(B), Some(State::Escalated), "B is told");
        }
    }
}

#[test]
fn resumes_after_which_something_arrives_do_not() {
    let mut pair = broken(Config::default(), Cause::Errno(RESET));
    assert_eq!(resumes(&mut pair, ms(300), 1, MINUTE * 10), None);
}

#[test]
fn a_flow_without_bytes_to_send_again_is_resumed_as_often_as_needed() {
    let mut pair = broken(Config::default(), Cause::Errno(RESET));
    pair.counts[B].received = 5000;
    assert_eq!(resumes(&mut pair, ms(300), 0, MINUTE * 10), None);
}

/// Few resumes, far apart: the flow has waited meanwhile, or nothing has passed.
#[test]
fn the_time_between_resumes_that_are_far_apart_does_not_count() {
    let mut pair = broken(Config::default(), Cause::Errno(RESET));
    assert_eq!(resumes(&mut pair, MINUTE, 0, MINUTE * 30), None);
}

/// The kernel would have waited longer for the first transport.
#[test]
fn a_stall_is_not_given_up_before_the_kernel_would() {
    let mut pair = broken(Config::default(), Cause::Stall);
    let took = resumes(&mut pair, ms(300), 0, MINUTE * 20).expect("given up");
    assert!((MINUTE * 15..MINUTE * 16).contains(&took), "{took:?}");
}

#[test]
fn a_hold_makes_it_longer() {
    let config = Config {
        hold: Some(MINUTE * 4),
        ..Config::default()
    };
    let mut pair = broken(config, Cause::Errno(RESET));
    let took = resumes(&mut pair, ms(300), 0, MINUTE * 10).expect("given up");
    assert!((MINUTE * 5..MINUTE * 6).contains(&took), "{took:?}");
}
