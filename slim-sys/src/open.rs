//! Which descriptors are open.

use crate::descriptors::{close_unregistered, is_open};
use crate::{fds, numbers, proc};
use libc::c_int;
use rustix::fs::{OFlags, RawDir};
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;

/// No number beyond is open, unless the limit was higher before.
fn numbers_at_most() -> c_int {
    // As many as the kernel has by default (fs.nr_open).
    let most = 1 << 20;
    fds::soft_limit().min(most) as c_int
}

/// Calls `f` with the numbers that are open, but for the one that it takes to find out. Uses no heap.
pub fn for_each_open(mut f: impl FnMut(c_int)) {
    numbers::make(|| {
        let Ok(dir) = proc::open(format_args!("self/fd"), OFlags::DIRECTORY) else {
            // There is no /proc, after a chroot for example: every number is tried.
            return (0..numbers_at_most())
                .filter(|fd| is_open(*fd))
                .for_each(&mut f);
        };
        let mut space = [MaybeUninit::uninit(); 2048];
        let mut entries = RawDir::new(&dir, &mut space);
        while let Some(Ok(entry)) = entries.next() {
            let number = entry.file_name().to_str().ok().and_then(|n| n.parse().ok());
            if let Some(number) = number.filter(|n| *n != dir.as_raw_fd()) {
                f(number);
            }
        }
        close_unregistered(dir);
    });
}
