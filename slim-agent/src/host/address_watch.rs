//! Watches for changes of the own addresses.

use std::collections::HashMap;
use std::rc::Rc;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task::yield_now;

use crate::host::addresses;
use crate::kernel::netlink::{attribute, first, ip, u32_at};
use crate::kernel::readiness;
use crate::kernel::sys;
use crate::kernel::task;
use crate::shared::Shared;
use slim_sys::OwnFd;

/// Tells the endpoint of changes from now on. Without the netlink socket (in a sandbox, for example) the addresses
/// found at the start stay.
pub(crate) fn watch(shared: &Rc<Shared>) {
    let opened = sys::rtnetlink_watch().and_then(|fd| readiness::watch(fd, Interest::READABLE));
    match opened {
        Ok(fd) => {
            task::spawn(follow(fd, shared.clone()));
        }
        Err(e) => shared.with(|d, _| {
            d.log
                .info(|| format!("changes of addresses are not noticed: {e}"));
        }),
    }
}

async fn follow(fd: AsyncFd<OwnFd>, shared: Rc<Shared>) {
    let mut buf = vec![0; 8192];
    let mut news = News::default();
    while let Ok(mut guard) = fd.readable().await {
        let mut changed = false;
        loop {
            match sys::recv(fd.get_ref().raw(), &mut buf) {
                Ok(n) if n > 0 => changed |= news.hear(buf.get(..n).unwrap_or_default()),
                // The socket has overrun: messages were lost.
                Err(e) if e.raw_os_error() == Some(libc::ENOBUFS) => changed = true,
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => break,
                _ => return,
            }
        }
        guard.clear_ready();
        drop(guard);
        if changed {
            shared.with(|d, _| d.set_addresses(addresses::now(d.log)));
        }
        yield_now().await;
    }
}

/// Recognises messages of the kernel that may mean a change of our addresses. Only then is the whole list asked for:
/// hosts report links often (each container, each change of a wireless signal), and they report them to every process
/// that has an agent.
#[derive(Default)]
struct News {
    /// Whether a link was up when it was last reported.
    up: HashMap<u32, bool>,
}

impl News {
    /// Takes the messages of one read; true if an address under which others can reach this host may be new or gone.
    fn hear(&mut self, mut bytes: &[u8]) -> bool {
        let mut changed = false;
        while let Some((kind, body, next)) = first(bytes) {
            changed |= match kind {
                libc::RTM_NEWADDR | libc::RTM_DELADDR => is_of_use(body),
                libc::RTM_NEWLINK => self.link(body, false),
                libc::RTM_DELLINK => self.link(body, true),
                _ => false,
            };
            bytes = next;
        }
        // A truncated message may have been anything.
        changed || !bytes.is_empty()
    }

    /// `ifinfomsg`: index at 4, flags at 8. Returns whether the link goes up or down, as far as is known.
    fn link(&mut self, body: &[u8], gone: bool) -> bool {
        let (Some(index), Some(flags)) = (u32_at(body, 4), u32_at(body, 8)) else {
            return true;
        };
        let up = flags & libc::IFF_UP as u32 != 0 && !gone;
        let before = if gone {
            self.up.remove(&index)
        } else {
            self.up.insert(index, up)
        };
        // The earlier state of a link that was not reported before is not known.
        before != Some(up)
    }
}

/// `ifaddrmsg`: family at 0, attributes from 8. Returns whether others can reach this host under the address; other
/// addresses are ignored.
fn is_of_use(body: &[u8]) -> bool {
    let mut rest = body.get(8..).unwrap_or_default();
    let mut found = false;
    while let Some((kind, value, next)) = attribute(rest) {
        if kind == libc::IFA_ADDRESS || kind == libc::IFA_LOCAL {
            found |= ip(value).is_none_or(|ip| addresses::is_reachable(&ip));
        }
        rest = next;
    }
    found || !rest.is_empty()
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;
    use crate::kernel::netlink::HEADER;

    fn message(kind: u16, body: &[u8]) -> Vec<u8> {
        let mut m = ((HEADER + body.len()) as u32).to_ne_bytes().to_vec();
        m.extend(kind.to_ne_bytes());
        m.resize(HEADER, 0);
        m.extend(body);
        m
    }

    fn link(index: u32, flags: i32) -> Vec<u8> {
        let mut body = vec![0; 4];
        body.extend(index.to_ne_bytes());
        body.extend(flags.to_ne_bytes());
        body.extend([0; 4]);
        body
    }

    fn addr(ip: IpAddr) -> Vec<u8> {
        let ip = match ip {
            IpAddr::V4(ip) => ip.octets().to_vec(),
            IpAddr::V6(ip) => ip.octets().to_vec(),
        };
        let mut body = vec![0; 8];
        body.extend((4 + ip.len() as u16).to_ne_bytes());
        body.extend(libc::IFA_ADDRESS.to_ne_bytes());
        body.extend(ip);
        body
    }

    #[test]
    fn only_changes_of_usable_addresses_are_news() {
        let (new, gone) = (libc::RTM_NEWLINK, libc::RTM_DELLINK);
        let up = libc::IFF_UP;
        let mut news = News::default();
        assert!(news.hear(&message(new, &link(3, up))), "up");
        assert!(!news.hear(&message(new, &link(3, up | libc::IFF_RUNNING))));
        let twice = [message(new, &link(3, up)), message(new, &link(3, 0))];
        assert!(news.hear(&twice.concat()), "down");
        assert!(!news.hear(&message(gone, &link(3, 0))));
        assert!(!news.hear(&message(libc::RTM_NEWNEIGH, &[])));
        for (ip, is_news) in [("10.0.0.1", true), ("fd00::1", true), ("fe80::1", false)] {
            let ip = ip.parse().unwrap();
            assert_eq!(news.hear(&message(libc::RTM_NEWADDR, &addr(ip))), is_news);
            assert_eq!(news.hear(&message(libc::RTM_DELADDR, &addr(ip))), is_news);
        }
        // A message that cannot be parsed may be anything, and ends the loop.
        assert!(news.hear(&message(new, &[])));
        assert!(news.hear(&message(libc::RTM_NEWADDR, &link(1, -1))[..20]));
    }
}
