//! What the process costs.

use std::time::Duration;

/// Processor time of the process, and how often one of its threads has gone to sleep.
pub fn used() -> (Duration, i64) {
    // SAFETY: all zeros are a value of this structure, which the call fills in.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &raw mut usage);
        usage
    };
    let time = |t: libc::timeval| Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000);
    (time(usage.ru_utime) + time(usage.ru_stime), usage.ru_nvcsw)
}
