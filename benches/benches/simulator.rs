//! Schedules per second of slim-core's simulator.

#![allow(dead_code, reason = "the simulator's tests use more of it")]

#[path = "../../slim-core/tests/sim/app.rs"]
mod app;
#[path = "../../slim-core/tests/sim/dice.rs"]
mod dice;
#[path = "../../slim-core/tests/sim/event.rs"]
mod event;
#[path = "../../slim-core/tests/sim/front.rs"]
mod front;
#[path = "../../slim-core/tests/sim/harm.rs"]
mod harm;
#[path = "../../slim-core/tests/sim/kinds.rs"]
mod kinds;
#[path = "../../slim-core/tests/sim/net.rs"]
mod net;
#[path = "../../slim-core/tests/sim/node.rs"]
mod node;
#[path = "../../slim-core/tests/sim/offset.rs"]
mod offset;
#[path = "../../slim-core/tests/sim/outage.rs"]
mod outage;
#[path = "../../slim-core/tests/sim/stats.rs"]
mod stats;
#[path = "../../slim-core/tests/sim/tcp.rs"]
mod tcp;
#[path = "../../slim-core/tests/sim/world.rs"]
mod world;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};

use kinds::Kinds;
use world::World;

/// The seeds are always the same, so that a difference comes from the code.
const SEEDS: u64 = 50;

fn schedules(c: &mut Criterion) {
    let mut group = c.benchmark_group("simulator");
    group.throughput(Throughput::Elements(SEEDS));
    group.sample_size(10);
    group.bench_function("schedules", |b| {
        b.iter(|| {
            for seed in 0..SEEDS {
                let mut world = World::new(seed, None, Kinds::tcp());
                world.run().expect("a right schedule");
            }
        });
    });
    group.finish();
}

criterion_group!(benches, schedules);
criterion_main!(benches);
