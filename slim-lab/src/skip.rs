//! Skipped tests name their reason, in a form that a summary can count.

/// Says that `test` was not run and why: `SKIPPED: reason` for people, and a line
/// `skip: <test>: <reason>` on standard output for the closing summary.
pub fn skip(test: &str, reason: impl std::fmt::Display) {
    eprintln!("SKIPPED: {reason}");
    println!("skip: {test}: {reason}");
}
