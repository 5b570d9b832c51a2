//! Seeded random choices, so that a run can be repeated.

/// A random sequence that is the same on every machine.
#[derive(Clone, Debug)]
pub struct SeededRng(fastrand::Rng);

impl SeededRng {
    /// The sequence that belongs to `seed`.
    pub fn new(seed: u64) -> Self {
        SeededRng(fastrand::Rng::with_seed(seed))
    }

    /// A seed from `SLIM_LAB_SEED` if it is set, else from the clock. Print it, so that a failure
    /// can be repeated.
    pub fn seed_from_env() -> u64 {
        if let Some(seed) = std::env::var("SLIM_LAB_SEED")
            .ok()
            .and_then(|s| s.parse().ok())
        {
            return seed;
        }
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        since.map_or(1, |d| d.as_micros() as u64 % 1_000_000_007)
    }

    /// A sequence of its own; which one depends on what was drawn before.
    pub fn fork(&mut self) -> Self {
        SeededRng(self.0.fork())
    }

    /// The next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0.u64(..)
    }

    /// A number in `0..bound`. `bound` must not be 0.
    pub fn below(&mut self, bound: usize) -> usize {
        assert!(bound > 0, "the bound must not be 0");
        self.0.usize(..bound)
    }

    /// True with probability one half.
    pub fn coin(&mut self) -> bool {
        self.0.bool()
    }

    /// A duration in `from..to`.
    pub fn between(
        &mut self,
        from: std::time::Duration,
        to: std::time::Duration,
    ) -> std::time::Duration {
        let span = to.saturating_sub(from).as_micros() as usize;
        if span == 0 {
            from
        } else {
            from + std::time::Duration::from_micros(self.below(span) as u64)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn the_same_seed_gives_the_same_choices() {
        let draw = |seed| {
            (0..50)
                .map(move |_| 0)
                .scan(SeededRng::new(seed), |r, _| Some(r.below(7)))
                .collect::<Vec<_>>()
        };
        assert_eq!(draw(3), draw(3));
        assert_ne!(draw(3), draw(4));
        assert!(draw(3).iter().all(|n| *n < 7));
        assert!(
            (0..7).all(|n| draw(3).contains(&n)),
            "every choice comes up"
        );
    }

    #[test]
    fn durations_stay_in_their_range() {
        let mut rng = SeededRng::new(1);
        let (from, to) = (Duration::from_millis(10), Duration::from_millis(20));
        assert!(
            (0..100)
                .map(|_| rng.between(from, to))
                .all(|d| d >= from && d < to)
        );
        assert_eq!(rng.between(to, to), to);
    }
}
