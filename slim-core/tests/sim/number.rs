//! Settings of tests.

/// The number in an environment variable, such as a seed.
pub fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{name}={text}: not a whole number")),
    )
}
