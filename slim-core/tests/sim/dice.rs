//! Random numbers of the simulators: one seed, one run.

pub struct Dice(fastrand::Rng);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Dice(fastrand::Rng::with_seed(seed))
    }

    pub fn next(&mut self) -> u64 {
        self.0.u64(..)
    }

    /// From `low` to `high`, both included.
    pub fn pick(&mut self, low: u64, high: u64) -> u64 {
        self.0.u64(low..=high)
    }

    /// True in `percent` of 100 cases.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.0.u64(..100) < percent
    }

    /// From `low` to `high`, each order of magnitude equally likely.
    pub fn spread(&mut self, low: u64, high: u64) -> u64 {
        let (a, b) = ((low.max(1) as f64).ln(), (high as f64).ln());
        ((a + (b - a) * self.0.f64()).exp() as u64).clamp(low, high)
    }
}

pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
