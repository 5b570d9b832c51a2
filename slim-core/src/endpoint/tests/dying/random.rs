//! The same with random events.

use super::*;
use crate::endpoint::timer::TimerOwner;

/// Random deaths, and living processes behind firewalls that have reset their connections and refuse new ones.
#[test]
fn the_dead_are_found_soon_and_the_living_never() {
    for seed in 0..400 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let (survivors, victims) = (rng.usize(1..=4), rng.usize(2..=9));
        let mut hosts = Hosts::live(survivors, victims);
        let dead: Vec<usize> = (0..victims).filter(|_| rng.u8(..4) > 0).collect();
        let broken = seed % 2 == 0;
        for v in 0..victims {
            let at = ms(rng.u64(0..60));
            if dead.contains(&v) {
                hosts.victims[v].endpoint = None;
            } else {
                hosts.victims[v].tcp = [Net::Works, Net::Refuses, Net::Silent][rng.usize(..3)];
                hosts.victims[v].busy = hosts.now + at + ms(rng.u64(0..80));
            }
            for s in 0..survivors {
                let cause = match rng.bool() {
                    true => Cause::Eof { received: 0 },
                    false => Cause::Errno(RESET),
                };
                if broken || dead.contains(&v) {
                    hosts.fault_after(at + ms(rng.u64(0..20)), s, v, cause);
                }
            }
        }
        hosts.wait(ms(2500));
        for (flow, broke) in &hosts.broke {
            let took = hosts.given_up.get(flow).map(|(at, _)| at.since(*broke));
            match dead.contains(&flow.1) {
                false => assert_eq!(took, None, "seed {seed}: {flow:?} lives"),
                // Where a living process has answered, all others are asked by QUERY.
                true if broken => {}
                true => assert!(
                    took.is_some_and(|t| t <= SOON),
                    "seed {seed}: {flow:?} {took:?}"
                ),
            }
        }
    }
}

impl Hosts {
    /// Every open inquiry has a timer, so that it ends.
    fn assert_timed(&self, seed: u64) {
        for survivor in &self.survivors {
            for peer in survivor.inquiries.open.keys() {
                let timer = survivor.timers.get(TimerOwner::Peer(*peer));
                assert!(timer.is_some(), "seed {seed}: {peer:?} has no timer");
            }
        }
    }
}

/// Deaths, faults, firewalls and closed flows in any order. A process may begin to refuse connections or to be silent, but not both, and
/// a new one may take the ports of a dead one.
#[test]
fn inquiries_end_and_no_living_process_is_dead() {
    let mut given_up = 0;
    for seed in 0..400 {
        let mut rng = fastrand::Rng::with_seed(seed ^ 0x5eed);
        let (survivors, victims) = (rng.usize(1..=3), rng.usize(2..=8));
        let mut hosts = Hosts::live(survivors, victims);
        hosts.burst = rng.u32(0..=6);
        let refuses: Vec<bool> = (0..victims).map(|_| rng.bool()).collect();
        let mut dead = vec![false; victims];
        for _ in 0..rng.usize(5..40) {
            let (s, v) = (rng.usize(..survivors), rng.usize(..victims));
            match rng.u8(..8) {
                0 if !dead[v] => {
                    dead[v] = true;
                    hosts.victims[v].endpoint = None;
                    if rng.bool() {
                        for s in 0..survivors {
                            hosts.fault_after(Duration::ZERO, s, v, Cause::Eof { received: 0 });
                        }
                    }
                }
                1 if dead[v] => hosts.victims[v].endpoint = Some(endpoint(DYING, v + 100)),
                2 if !dead[v] => {
                    let victim = &mut hosts.victims[v];
                    match refuses[v] {
                        true => {
                            victim.tcp = [Net::Works, Net::Refuses, Net::Silent][rng.usize(..3)];
                            victim.busy = hosts.now + ms(rng.u64(0..45));
                        }
                        false => {
                            victim.udp = [Net::Works, Net::Silent][rng.usize(..2)];
                            victim.tcp = [Net::Works, Net::Silent][rng.usize(..2)];
                        }
                    }
                }
                3 if rng.u8(..4) == 0 => hosts.survivors[s].gone(hosts.now, flow(s, v)),
                4 | 5 => {
                    let cause = match rng.bool() {
                        true => Cause::Eof { received: 0 },
                        false => Cause::Errno(RESET),
                    };
                    if hosts.survivors[s].state(flow(s, v)).is_some() {
                        hosts.fault_after(Duration::ZERO, s, v, cause);
                    }
                }
                _ => {
                    let time = [1, 6, 21, 60, 160, 700][rng.usize(..6)];
                    hosts.wait(ms(rng.u64(0..time)));
                }
            }
            hosts.assert_timed(seed);
        }
        for _ in 0..600 {
            hosts.wait(ms(100));
            hosts.assert_timed(seed);
        }
        for (flow, (_, reason)) in &hosts.given_up {
            given_up += 1;
            let gone = *reason == EscalateReason::PeerGone;
            assert!(!gone || dead[flow.1], "seed {seed}: {flow:?} lives");
        }
    }
    assert!(given_up > 400, "{given_up}");
}
