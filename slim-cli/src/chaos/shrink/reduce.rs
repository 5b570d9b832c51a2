//! Delta debugging: the smallest part of a list that still fails.
//!
//! The algorithm is ddmin (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", 2002).

/// Reduces `items`, which fail, until no part that was tried fails without one more of them. `fails` tries a part.
pub fn ddmin<T: Clone, E>(
    mut items: Vec<T>,
    mut fails: impl FnMut(&[T]) -> Result<bool, E>,
) -> Result<Vec<T>, E> {
    let mut parts = 2;
    'smaller: while items.len() > 1 {
        let chunks: Vec<Vec<T>> = items
            .chunks(items.len().div_ceil(parts))
            .map(<[T]>::to_vec)
            .collect();
        for chunk in &chunks {
            if fails(chunk)? {
                items = chunk.clone();
                parts = 2;
                continue 'smaller;
            }
        }
        // Of two parts, each is the rest of the other.
        for left_out in 0..if chunks.len() > 2 { chunks.len() } else { 0 } {
            let rest = chunks.iter().enumerate().filter(|(n, _)| *n != left_out);
            let rest: Vec<T> = rest.flat_map(|(_, chunk)| chunk.clone()).collect();
            if fails(&rest)? {
                items = rest;
                parts = (parts - 1).max(2);
                continue 'smaller;
            }
        }
        if parts >= items.len() {
            break;
        }
        parts = (parts * 2).min(items.len());
    }
    Ok(items)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;
    use slim_lab::SeededRng;

    /// Reduces 0 to 39 in a simulated run that fails if it has all of `needed`. Returns the number of runs, too.
    fn reduced(needed: &[u32]) -> (Vec<u32>, usize) {
        let mut runs = 0;
        let fails = |part: &[u32]| {
            runs += 1;
            Ok::<_, Infallible>(needed.iter().all(|n| part.contains(n)))
        };
        let Ok(left) = ddmin((0..40).collect(), fails);
        (left, runs)
    }

    #[test]
    fn exactly_what_is_needed_is_left() {
        for needed in [&[17][..], &[0], &[39], &[3, 17], &[0, 39], &[5, 6, 38]] {
            let (left, runs) = reduced(needed);
            assert_eq!(left, needed);
            assert!(runs < 120, "{runs} runs for {needed:?}");
        }
    }

    #[test]
    fn any_of_several_causes_will_do() {
        let fails = |part: &[u32]| Ok::<_, Infallible>(part.iter().any(|n| n % 10 == 7));
        let Ok(left) = ddmin((0..40).collect(), fails);
        assert_eq!(left.len(), 1);
        assert_eq!(left[0] % 10, 7);
    }

    /// A run that fails in two of three tries only: with three tries each, what is left still fails.
    #[test]
    fn a_run_that_does_not_always_fail_is_reduced() {
        let mut rng = SeededRng::new(4);
        for _ in 0..50 {
            let fails = |part: &[u32]| {
                let bad = part.contains(&3) && part.contains(&17);
                Ok::<_, Infallible>(bad && (0..3).any(|_| rng.below(3) > 0))
            };
            let Ok(left) = ddmin((0..40).collect(), fails);
            assert!(left.contains(&3) && left.contains(&17), "{left:?}");
        }
    }

    #[test]
    fn an_error_ends_it() {
        assert_eq!(ddmin(vec![1, 2], |_| Err("broken")), Err("broken"));
    }
}
