//! What the kernel tells of an epoll instance (proc(5), fdinfo), and whether it may know more than the mirrors.

use crate::{rings, sys};
use libc::c_int;
use std::sync::atomic::{AtomicBool, Ordering};

/// A registration was found that no hook had seen.
static FOUND: AtomicBool = AtomicBool::new(false);

/// Whether there may be registrations that no hook has seen.
pub fn any_unseen() -> bool {
    FOUND.load(Ordering::SeqCst) || rings::any()
}

/// Such a registration was found.
pub fn found_unseen() {
    FOUND.store(true, Ordering::SeqCst);
}

/// What the kernel has registered.
pub struct Registered {
    /// The number that it was registered by.
    pub fd: c_int,
    /// What would be reported: of one that fires once and has, nothing.
    pub events: u32,
    pub data: u64,
    pub inode: u64,
}

/// Everything that is registered with an instance, by one of its numbers; `None` if that cannot be told, for want of a
/// descriptor perhaps.
pub fn registered(epfd: c_int) -> Option<Vec<Registered>> {
    let text = sys::proc::read(format_args!("self/fdinfo/{epfd}"))?;
    let text = String::from_utf8(text).ok()?;
    Some(text.lines().filter_map(parse).collect())
}

/// `tfd: 8 events: 19 data: 8  pos:0 ino:1a2b sdev:9`, with spaces in between.
fn parse(line: &str) -> Option<Registered> {
    let mut words = line.split_whitespace();
    let mut after = |name: &str| (words.next()? == name).then(|| words.next())?;
    let fd = after("tfd:")?.parse().ok()?;
    let events = u32::from_str_radix(after("events:")?, 16).ok()?;
    let data = u64::from_str_radix(after("data:")?, 16).ok()?;
    let inode = words.find_map(|word| word.strip_prefix("ino:"))?;
    let inode = u64::from_str_radix(inode, 16).ok()?;
    Some(Registered {
        fd,
        events,
        data,
        inode,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_tells_what_is_registered() {
        let [a, b] = sys::socketpair(libc::SOCK_STREAM).unwrap();
        // SAFETY: no memory is passed.
        let epfd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        for (fd, data) in [(a, u64::MAX), (b, 7)] {
            let events = (libc::EPOLLIN | libc::EPOLLET) as u32;
            let event = libc::epoll_event { events, u64: data };
            sys::epoll_ctl(epfd, libc::EPOLL_CTL_ADD, fd, &event).unwrap();
        }
        let mut all = registered(epfd).unwrap();
        all.sort_by_key(|r| r.data);
        for (r, (fd, data)) in all.iter().zip([(b, 7), (a, u64::MAX)]) {
            assert_eq!((r.fd, r.data), (fd, data));
            assert_eq!(
                r.events & !(libc::EPOLLERR | libc::EPOLLHUP) as u32,
                (libc::EPOLLIN | libc::EPOLLET) as u32
            );
            assert_eq!(
                Some(r.inode),
                sys::identity(fd).map(|i| i & u64::from(u32::MAX))
            );
        }
        assert_eq!(all.len(), 2);
        [a, b, epfd].into_iter().for_each(sys::close);
    }
}
