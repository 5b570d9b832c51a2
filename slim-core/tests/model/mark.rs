//! States of a search, in little memory.

use std::hash::{DefaultHasher, Hash, Hasher};

/// A hash of 128 bits stands for a state: with 10^8 states, the chance that two collide is below 10^-22.
pub fn mark(world: &impl Hash) -> u128 {
    let half = |salt: u64| {
        let mut hasher = DefaultHasher::new();
        salt.hash(&mut hasher);
        world.hash(&mut hasher);
        u128::from(hasher.finish())
    };
    half(1) << 64 | half(2)
}
