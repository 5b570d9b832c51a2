//! Socket addresses as applications and the kernel exchange them.

use crate::sys;
use libc::{c_int, c_long};
use slim_core::saved::Saved;
use std::net::{IpAddr, SocketAddr};

/// A socket address as the kernel hands it out.
#[derive(Clone, Copy)]
pub struct RawAddr {
    /// The bytes.
    pub storage: libc::sockaddr_storage,
    /// How many of them are valid.
    pub len: libc::socklen_t,
}

impl RawAddr {
    /// Room for any address.
    pub fn room() -> Self {
        // SAFETY: sockaddr_storage is plain data for which all zeroes is valid.
        let storage = unsafe { std::mem::zeroed() };
        RawAddr {
            storage,
            len: size_of::<libc::sockaddr_storage>() as _,
        }
    }

    /// A pointer through which the kernel fills the address.
    pub fn as_mut_ptr(&mut self) -> *mut libc::sockaddr {
        (&raw mut self.storage).cast()
    }

    fn query(nr: c_long, fd: c_int) -> Option<Self> {
        let mut a = Self::room();
        // SAFETY: the storage has room for its length.
        unsafe { sys::name_of(nr, fd, a.as_mut_ptr(), &mut a.len) }.ok()?;
        Some(a)
    }

    /// `getsockname`.
    pub fn local(fd: c_int) -> Option<Self> {
        Self::query(libc::SYS_getsockname, fd)
    }

    /// `getpeername`.
    pub fn peer(fd: c_int) -> Option<Self> {
        Self::query(libc::SYS_getpeername, fd)
    }

    /// The internet address, if it is one. An IPv4-mapped address is given as IPv4, so that both ends name a connection alike.
    pub fn internet(&self) -> Option<SocketAddr> {
        match i32::from(self.storage.ss_family) {
            libc::AF_INET => {
                // SAFETY: the family says that a sockaddr_in is stored, which is smaller than the storage.
                let a = unsafe { &*(&raw const self.storage).cast::<libc::sockaddr_in>() };
                let ip = std::net::Ipv4Addr::from(u32::from_be(a.sin_addr.s_addr));
                Some(SocketAddr::new(ip.into(), u16::from_be(a.sin_port)))
            }
            libc::AF_INET6 => {
                // SAFETY: likewise, a sockaddr_in6.
                let a = unsafe { &*(&raw const self.storage).cast::<libc::sockaddr_in6>() };
                let ip = std::net::Ipv6Addr::from(a.sin6_addr.s6_addr);
                let port = u16::from_be(a.sin6_port);
                Some(match IpAddr::V6(ip).to_canonical() {
                    IpAddr::V4(ip) => SocketAddr::new(ip.into(), port),
                    IpAddr::V6(_) => {
                        SocketAddr::V6(std::net::SocketAddrV6::new(ip, port, 0, a.sin6_scope_id))
                    }
                })
            }
            _ => None,
        }
    }

    /// The address in a form to keep; `None` if it is no internet address.
    pub fn name(&self) -> Option<Name> {
        match i32::from(self.storage.ss_family) {
            libc::AF_INET => {
                // SAFETY: the family says that a sockaddr_in is stored, which is smaller than the storage.
                let a = unsafe { &*(&raw const self.storage).cast::<libc::sockaddr_in>() };
                Some(Name::V4(a.sin_addr.s_addr, a.sin_port))
            }
            libc::AF_INET6 => {
                // SAFETY: likewise, a sockaddr_in6.
                let a = unsafe { *(&raw const self.storage).cast::<libc::sockaddr_in6>() };
                Some(Name::V6(Box::new(a)))
            }
            _ => None,
        }
    }

    /// The address that an application passed.
    ///
    /// # Safety
    /// `len` bytes can be read at `addr`.
    pub unsafe fn copy(addr: *const libc::sockaddr, len: libc::socklen_t) -> Self {
        let mut a = Self::room();
        a.len = a.len.min(len);
        // SAFETY: the caller's contract; at most as many bytes are copied as both have.
        unsafe {
            std::ptr::copy_nonoverlapping(addr.cast::<u8>(), a.as_mut_ptr().cast(), a.len as usize)
        };
        a
    }
}

/// An internet address as the kernel hands it out, in compact form: every flow has two, and nearly all are IPv4.
#[derive(Clone)]
pub enum Name {
    /// Address and port as they are in a `sockaddr_in`.
    V4(libc::in_addr_t, libc::in_port_t),
    /// The whole `sockaddr_in6`.
    V6(Box<libc::sockaddr_in6>),
}

impl Name {
    /// As [`RawAddr::internet`].
    pub fn internet(&self) -> SocketAddr {
        let (ip, port, scope) = match self {
            Name::V4(ip, port) => (IpAddr::from(ip.to_ne_bytes()), *port, 0),
            Name::V6(a) => (
                IpAddr::from(a.sin6_addr.s6_addr).to_canonical(),
                a.sin6_port,
                a.sin6_scope_id,
            ),
        };
        let port = u16::from_be(port);
        match ip {
            IpAddr::V4(_) => SocketAddr::new(ip, port),
            IpAddr::V6(ip) => std::net::SocketAddrV6::new(ip, port, 0, scope).into(),
        }
    }

    /// The address family of the socket that has this address.
    pub fn family(&self) -> c_int {
        match self {
            Name::V4(..) => libc::AF_INET,
            Name::V6(_) => libc::AF_INET6,
        }
    }

    /// Whether it is the address of an IPv6 socket with an IPv4 connection.
    pub fn is_mapped(&self) -> bool {
        matches!(self, Name::V6(_)) && self.internet().is_ipv4()
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        match self {
            Name::V4(..) => size_of::<libc::sockaddr_in>(),
            Name::V6(_) => size_of::<libc::sockaddr_in6>(),
        }
    }

    /// Writes the address for a caller of `getsockname`, `accept` and the like: truncated to the caller's room, but with
    /// the full length in `len`.
    ///
    /// # Safety
    /// As `getsockname(2)` asks of `addr` and `len`.
    pub unsafe fn give(&self, addr: *mut libc::sockaddr, len: *mut libc::socklen_t) {
        match self {
            Name::V4(ip, port) => {
                let whole = libc::sockaddr_in {
                    sin_family: libc::AF_INET as _,
                    sin_port: *port,
                    sin_addr: libc::in_addr { s_addr: *ip },
                    sin_zero: [0; 8],
                };
                // SAFETY: the caller's contract.
                unsafe { give(&whole, addr, len) }
            }
            // SAFETY: likewise.
            Name::V6(whole) => unsafe { give(&**whole, addr, len) },
        }
    }
}

impl Saved for Name {
    fn save(&self, out: &mut Vec<u8>) {
        match self {
            Name::V4(ip, port) => (4u8, (*ip, *port)).save(out),
            Name::V6(a) => {
                (6u8, a.sin6_port).save(out);
                (a.sin6_flowinfo, a.sin6_scope_id).save(out);
                a.sin6_addr.s6_addr.save(out);
            }
        }
    }

    fn load(from: &mut &[u8]) -> Option<Self> {
        match u8::load(from)? {
            4 => <(u32, u16)>::load(from).map(|(ip, port)| Name::V4(ip, port)),
            6 => {
                let sin6_port = Saved::load(from)?;
                let (sin6_flowinfo, sin6_scope_id) = Saved::load(from)?;
                let s6_addr = Saved::load(from)?;
                Some(Name::V6(Box::new(libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as _,
                    sin6_port,
                    sin6_flowinfo,
                    sin6_addr: libc::in6_addr { s6_addr },
                    sin6_scope_id,
                })))
            }
            _ => None,
        }
    }
}

/// # Safety
/// As [`Name::give`]; `A` is a kind of `sockaddr`, without padding.
unsafe fn give<A>(whole: &A, addr: *mut libc::sockaddr, len: *mut libc::socklen_t) {
    // SAFETY: the caller's contract: `len` says how much room `addr` has. `addr` may be null if there is none.
    unsafe {
        let room = (len.read_unaligned() as usize).min(size_of::<A>());
        if room > 0 {
            std::ptr::copy_nonoverlapping((&raw const *whole).cast::<u8>(), addr.cast(), room);
        }
        len.write_unaligned(size_of::<A>() as _);
    }
}
