//! Random numbers from a seed: nonces, ids, key material and jitter.
//!
//! The creator of an endpoint provides the seed. A driver provides entropy; a simulation provides a fixed number, and repeats
//! the same run with it. The generator is ChaCha20, which is suitable for keys.

use chacha20::ChaCha20Rng;
use chacha20::rand_core::{Rng as _, SeedableRng};

use crate::ids::Nonce;

pub(super) struct Rng(ChaCha20Rng);

impl Rng {
    pub(super) fn new(seed: [u8; 32]) -> Self {
        Self(ChaCha20Rng::from_seed(seed))
    }

    /// 32 fresh bytes.
    pub(super) fn block(&mut self) -> [u8; 32] {
        self.bytes()
    }

    /// 16 fresh bytes.
    pub(super) fn half(&mut self) -> [u8; 16] {
        self.bytes()
    }

    pub(super) fn nonce(&mut self) -> Nonce {
        Nonce(self.half())
    }

    /// A number from 0 to `most`, both included.
    pub(super) fn up_to(&mut self, most: u64) -> u64 {
        let wide = u128::from_be_bytes(self.half());
        // The bias of the remainder is below 2^-64.
        (wide % (u128::from(most) + 1)) as u64
    }

    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.0.fill_bytes(&mut bytes);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_seeds_give_equal_numbers_and_other_seeds_other_numbers() {
        let draw = |seed: u8| {
            let mut rng = Rng::new([seed; 32]);
            [rng.block(), rng.block()]
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        assert_ne!(draw(1)[0], draw(1)[1]);
    }

    #[test]
    fn drawn_numbers_include_both_bounds_and_stay_within_them() {
        let mut rng = Rng::new([0; 32]);
        let drawn: Vec<u64> = (0..200).map(|_| rng.up_to(3)).collect();
        assert_eq!(drawn.iter().max(), Some(&3));
        assert_eq!(drawn.iter().min(), Some(&0));
        assert_eq!(rng.up_to(0), 0);
    }
}
