//! Lists the open descriptors, the threads, and the processes.

use crate::descriptors::{close_unregistered, is_open};
use crate::{fds, numbers, proc};
use libc::c_int;
use rustix::fs::{OFlags, RawDir};
use rustix::io::Errno;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};

/// Open descriptors have numbers below this, unless the limit was higher before.
fn numbers_at_most() -> c_int {
    // The kernel's default of fs.nr_open.
    let most = 1 << 20;
    fds::soft_limit().min(most) as c_int
}

/// Calls `f` with each open number, except the one that the listing itself uses. Uses no heap.
pub fn for_each_open(mut f: impl FnMut(c_int)) {
    numbers::make(|| {
        let Ok(dir) = proc::open(format_args!("self/fd"), OFlags::DIRECTORY) else {
            // /proc is missing, after a chroot for example. Try every number.
            return (0..numbers_at_most())
                .filter(|fd| is_open(*fd))
                .for_each(&mut f);
        };
        let own = dir.as_raw_fd();
        for_each_number_in(&dir, |fd| {
            if fd != own {
                f(fd);
            }
        });
        close_unregistered(dir);
    });
}

/// Calls `f` with the id of each thread of this process, if there is `/proc`. Uses no heap. `f` must not create descriptors.
pub(crate) fn for_each_thread(f: impl FnMut(c_int)) {
    numbers::make(|| {
        if let Ok(dir) = proc::open(format_args!("self/task"), OFlags::DIRECTORY) {
            for_each_number_in(&dir, f);
            close_unregistered(dir);
        }
    });
}

/// Calls `f` with the id of each process, if there is `/proc`. Uses no heap.
pub fn for_each_process(f: impl FnMut(c_int)) {
    numbers::make(|| {
        if let Ok(dir) = proc::open(format_args!("."), OFlags::DIRECTORY) {
            for_each_number_in(&dir, f);
            close_unregistered(dir);
        }
    });
}

/// Whether `found` holds for a number of a process that may be a descendant, because it has begun after this one: it gets the process's id and
/// the number. Also true if the numbers of such a process may not be listed, or if `/proc` is missing. Uses no heap. Slow: it looks at all
/// processes of the host.
pub fn any_number_of_later_processes(mut found: impl FnMut(c_int, c_int) -> bool) -> bool {
    let own = crate::pid();
    let (mut any, mut is_listed) = (false, false);
    let mut begun = None;
    for_each_process(|pid| {
        is_listed |= pid == own;
        let since = *begun.get_or_insert_with(|| proc::begun(own));
        if any || pid == own || proc::begun(pid) < since {
            return;
        }
        match proc::open(format_args!("{pid}/fd"), OFlags::DIRECTORY) {
            Ok(dir) => {
                for_each_number_in(&dir, |number| any = any || found(pid, number));
                close_unregistered(dir);
            }
            Err(Errno::ACCESS | Errno::PERM) => any = true,
            // It has ended.
            Err(_) => {}
        }
    });
    any || !is_listed
}

/// Calls `f` with each file name of a directory that is a number.
fn for_each_number_in(dir: &OwnedFd, mut f: impl FnMut(c_int)) {
    let mut space = [MaybeUninit::uninit(); 2048];
    let mut entries = RawDir::new(dir, &mut space);
    while let Some(Ok(entry)) = entries.next() {
        if let Some(number) = entry.file_name().to_str().ok().and_then(|n| n.parse().ok()) {
            f(number);
        }
    }
}
