//! The kernel's list of an epoll instance's registrations (proc(5), fdinfo), and whether it may have more of them than the mirrors.

use crate::{rings, sys};
use libc::c_int;
use std::sync::atomic::{AtomicBool, Ordering};

/// A registration was found that no hook had seen.
static FOUND: AtomicBool = AtomicBool::new(false);

/// Whether there may be registrations that no hook has seen.
pub fn any_unseen() -> bool {
    FOUND.load(Ordering::SeqCst) || rings::any()
}

/// Notes that a registration was found that no hook had seen.
pub fn found_unseen() {
    FOUND.store(true, Ordering::SeqCst);
}

/// A registration that the kernel has.
pub struct Registered {
    /// The number by which it was registered.
    pub fd: c_int,
    /// The events that would be reported: none for an EPOLLONESHOT registration that has fired.
    pub events: u32,
    pub data: u64,
    pub inode: u64,
}

/// All registrations of the instance that has the number `epfd`. `None` if they cannot be read, perhaps for lack of a
/// descriptor.
pub fn registered(epfd: c_int) -> Option<Vec<Registered>> {
    let text = sys::proc::read(format_args!("self/fdinfo/{epfd}"))?;
    let text = String::from_utf8(text).ok()?;
    Some(text.lines().filter_map(parse).collect())
}

/// Parses a line like `tfd: 8 events: 19 data: 8  pos:0 ino:1a2b sdev:9`; the number of spaces varies.
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
    fn registrations_are_read_back_from_the_kernel() {
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
