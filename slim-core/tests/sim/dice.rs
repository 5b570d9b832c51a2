//! Random numbers of the simulator: one seed, one run.

pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Dice(seed)
    }

    pub fn next(&mut self) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// From `low` to `high`, both included.
    pub fn pick(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low + 1)
    }

    /// True in `percent` of 100 cases.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.next() % 100 < percent
    }

    /// From `low` to `high`, small ones as likely as large ones.
    pub fn spread(&mut self, low: u64, high: u64) -> u64 {
        let (a, b) = ((low.max(1) as f64).ln(), (high as f64).ln());
        let x = (self.next() >> 11) as f64 / (1u64 << 53) as f64;
        ((a + (b - a) * x).exp() as u64).clamp(low, high)
    }
}

pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
