//! Reports skipped tests with their reason, in a form that `scripts/summary` can count.

/// Reports that `test` was not run, and why: `SKIPPED: reason` on standard error for people, and a line
/// `skip: <test>: <reason>` on standard output for the summary.
pub fn skip(test: &str, reason: impl std::fmt::Display) {
    eprintln!("SKIPPED: {reason}");
    println!("skip: {test}: {reason}");
}
