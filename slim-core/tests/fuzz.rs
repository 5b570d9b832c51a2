//! Fuzzes the control message codec on stable Rust: damages valid messages, and runs [`codec::check`] on the results.
//!
//! `SLIM_FUZZ_SECONDS` is the duration (default 5), `SLIM_FUZZ_SEED` the seed. The seed and the
//! bytes that failed are printed, so that a failure can be reproduced.

mod codec;
#[path = "sim/number.rs"]
mod number;

use std::panic;
use std::time::{Duration, Instant, SystemTime};

use codec::{check, corpus, mutate};
use fastrand::Rng;
use number::number;

#[test]
fn damaged_messages_never_panic_and_valid_ones_encode_to_the_same_bytes() {
    let seed = number("SLIM_FUZZ_SEED").unwrap_or_else(|| {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        now.expect("later than 1970").as_nanos() as u64
    });
    let seconds = number("SLIM_FUZZ_SECONDS").unwrap_or(5);
    println!("SLIM_FUZZ_SEED={seed}");

    let corpus = corpus();
    assert!(corpus.iter().all(|bytes| check(bytes)));
    let mut random = Rng::with_seed(seed);
    let end = Instant::now() + Duration::from_secs(seconds);
    let (mut inputs, mut messages) = (0u64, 0u64);
    while Instant::now() < end {
        for _ in 0..1000 {
            let mut bytes = corpus[random.usize(..corpus.len())].clone();
            for _ in 0..=random.usize(..4) {
                mutate(&mut bytes, &corpus, &mut random);
            }
            match panic::catch_unwind(|| check(&bytes)) {
                Ok(is_message) => messages += u64::from(is_message),
                Err(_) => panic!("SLIM_FUZZ_SEED={seed}, input {inputs}: {bytes:02x?}"),
            }
            inputs += 1;
        }
    }
    println!("{inputs} inputs, {messages} of them messages");
    // Otherwise the test would cover only the dropping of garbage.
    assert!(
        messages > inputs / 100,
        "{messages} of {inputs} inputs were messages"
    );
}
