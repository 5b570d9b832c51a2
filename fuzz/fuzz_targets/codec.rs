//! The control message codec under libFuzzer. The checks, and half of the mutations, are those of `slim-core/tests/fuzz.rs`.

#![no_main]

use std::sync::LazyLock;

use fastrand::Rng;
use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};

#[path = "../../slim-core/tests/codec/mod.rs"]
mod codec;

static VALID: LazyLock<Vec<Vec<u8>>> = LazyLock::new(codec::corpus);

fuzz_target!(|data: &[u8]| {
    codec::check(data);
});

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    let mut rng = Rng::with_seed(seed.into());
    if rng.bool() {
        return fuzzer_mutate(data, size, max_size);
    }
    // libFuzzer begins with inputs of 0 or 1 byte: a valid message replaces them.
    let mut bytes = match size {
        0 | 1 => VALID[rng.usize(..VALID.len())].clone(),
        _ => data[..size].to_vec(),
    };
    codec::mutate(&mut bytes, &VALID, &mut rng);
    bytes.truncate(max_size);
    data[..bytes.len()].copy_from_slice(&bytes);
    bytes.len()
});
