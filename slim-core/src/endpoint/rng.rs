//! Random numbers from a seed: nonces, flow names and jitter.
//!
//! A hash generator in the manner of HMAC-DRBG: every block of output is HMAC(key, "out"), after
//! which the key moves on to HMAC(key, "next"), so that who learns the key later cannot compute
//! what was drawn before. Whoever makes an endpoint brings the entropy; a simulation brings a
//! number and gets the same run again.

use hmac::{Hmac, KeyInit, Mac as _};
use sha2::Sha256;

use crate::ids::Nonce;

pub(super) struct Rng {
    key: [u8; 32],
    /// The half of a block that has not been drawn yet.
    rest: Option<[u8; 16]>,
}

impl Rng {
    pub(super) fn new(seed: [u8; 32]) -> Self {
        let mut rng = Rng {
            key: seed,
            rest: None,
        };
        // The seed may be used elsewhere, too: never hand out anything made of it directly.
        rng.key = drawn(rng.keyed(), b"slim endpoint rng v1");
        rng
    }

    /// 32 fresh bytes.
    pub(super) fn block(&mut self) -> [u8; 32] {
        let keyed = self.keyed();
        self.key = drawn(keyed.clone(), b"next");
        drawn(keyed, b"out")
    }

    /// 16 fresh bytes.
    pub(super) fn half(&mut self) -> [u8; 16] {
        if let Some(rest) = self.rest.take() {
            return rest;
        }
        let block = self.block();
        let halves = "32 bytes have two halves";
        self.rest = Some(*block.last_chunk().expect(halves));
        *block.first_chunk().expect(halves)
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

    fn keyed(&self) -> Hmac<Sha256> {
        Hmac::new_from_slice(&self.key).expect("HMAC takes keys of any length")
    }
}

fn drawn(mut hmac: Hmac<Sha256>, label: &[u8]) -> [u8; 32] {
    hmac.update(label);
    hmac.finalize().into_bytes().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_seed_same_numbers_other_seed_other_numbers() {
        let draw = |seed: u8| {
            let mut rng = Rng::new([seed; 32]);
            [rng.block(), rng.block()]
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        assert_ne!(draw(1)[0], draw(1)[1]);
    }

    #[test]
    fn both_halves_of_a_block_are_drawn_once() {
        let mut rng = Rng::new([0; 32]);
        let drawn: Vec<_> = (0..4).map(|_| rng.half()).collect();
        assert!((0..4).all(|i| !drawn[..i].contains(&drawn[i])), "{drawn:?}");
    }

    #[test]
    fn numbers_reach_both_ends_and_stay_inside() {
        let mut rng = Rng::new([0; 32]);
        let drawn: Vec<u64> = (0..200).map(|_| rng.up_to(3)).collect();
        assert_eq!(drawn.iter().max(), Some(&3));
        assert_eq!(drawn.iter().min(), Some(&0));
        assert_eq!(rng.up_to(0), 0);
    }
}
