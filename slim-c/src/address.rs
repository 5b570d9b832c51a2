//! Addresses of the socket calls.

use std::net::{SocketAddr, SocketAddrV4, SocketAddrV6};
use std::{mem, ptr};

use libc::{sockaddr, socklen_t};

use crate::codes::Refusal;

/// Reads an IPv4 or IPv6 address.
///
/// # Safety
/// `addr` is NULL, or points to `len` readable bytes.
pub(crate) unsafe fn read(addr: *const sockaddr, len: socklen_t) -> Result<SocketAddr, Refusal> {
    let len = len as usize;
    if addr.is_null() || len < mem::size_of::<libc::sa_family_t>() {
        return Err(Refusal::INVALID);
    }
    // SAFETY: the family lies within the `len` bytes. Reads here need no alignment.
    let family = unsafe { ptr::read_unaligned(addr.cast::<libc::sa_family_t>()) };
    match i32::from(family) {
        libc::AF_INET if len >= mem::size_of::<libc::sockaddr_in>() => {
            // SAFETY: the length was checked, and every pattern of bytes is a `sockaddr_in`.
            let v4 = unsafe { ptr::read_unaligned(addr.cast::<libc::sockaddr_in>()) };
            let ip = u32::from_be(v4.sin_addr.s_addr).into();
            Ok(SocketAddrV4::new(ip, u16::from_be(v4.sin_port)).into())
        }
        libc::AF_INET6 if len >= mem::size_of::<libc::sockaddr_in6>() => {
            // SAFETY: as above.
            let v6 = unsafe { ptr::read_unaligned(addr.cast::<libc::sockaddr_in6>()) };
            let (ip, port) = (v6.sin6_addr.s6_addr.into(), u16::from_be(v6.sin6_port));
            Ok(SocketAddrV6::new(ip, port, v6.sin6_flowinfo, v6.sin6_scope_id).into())
        }
        _ => Err(Refusal::INVALID),
    }
}

/// Writes an address, as getsockname() does: not more than `*len` bytes, and its whole length to `*len`.
///
/// # Safety
/// `addr` and `len` are NULL, or `len` points to a length and `addr` to that many writable bytes.
pub(crate) unsafe fn write(
    from: SocketAddr,
    addr: *mut sockaddr,
    len: *mut socklen_t,
) -> Result<isize, Refusal> {
    if addr.is_null() || len.is_null() {
        return Err(Refusal::INVALID);
    }
    // SAFETY: all zero is a valid value of this structure of integers.
    let mut storage: libc::sockaddr_storage = unsafe { mem::zeroed() };
    let size = match from {
        SocketAddr::V4(from) => {
            let v4 = ptr::from_mut(&mut storage).cast::<libc::sockaddr_in>();
            // SAFETY: `sockaddr_storage` has room and alignment for every address.
            let v4 = unsafe { &mut *v4 };
            v4.sin_family = libc::AF_INET as libc::sa_family_t;
            v4.sin_port = from.port().to_be();
            v4.sin_addr.s_addr = u32::from(*from.ip()).to_be();
            mem::size_of::<libc::sockaddr_in>()
        }
        SocketAddr::V6(from) => {
            let v6 = ptr::from_mut(&mut storage).cast::<libc::sockaddr_in6>();
            // SAFETY: as above.
            let v6 = unsafe { &mut *v6 };
            v6.sin6_family = libc::AF_INET6 as libc::sa_family_t;
            v6.sin6_port = from.port().to_be();
            v6.sin6_flowinfo = from.flowinfo();
            v6.sin6_addr.s6_addr = from.ip().octets();
            v6.sin6_scope_id = from.scope_id();
            mem::size_of::<libc::sockaddr_in6>()
        }
    };
    // SAFETY: promised by the caller; the copy is not longer than the room there, and `storage` is longer than `size`.
    unsafe {
        let room = ptr::read_unaligned(len) as usize;
        let bytes = ptr::from_ref(&storage).cast::<u8>();
        ptr::copy_nonoverlapping(bytes, addr.cast::<u8>(), size.min(room));
        ptr::write_unaligned(len, size as socklen_t);
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_come_back_as_they_were() {
        for text in ["192.0.2.7:80", "[2001:db8::9%3]:65535"] {
            let addr: SocketAddr = text.parse().unwrap();
            let mut bytes = [0_u64; 4];
            let mut len = 32;
            let place = bytes.as_mut_ptr().cast::<sockaddr>();
            // SAFETY: the memory is 32 bytes long.
            let back = unsafe {
                write(addr, place, &mut len).unwrap();
                read(place, len)
            };
            assert_eq!(back.unwrap(), addr);
            // SAFETY: as above.
            let short = unsafe { read(place, len - 1) };
            assert_eq!(short.unwrap_err().code, crate::codes::SLIM_ERR_INVALID);
        }
    }

    #[test]
    fn a_small_place_gets_the_beginning_and_the_length() {
        let (mut bytes, mut len) = ([0xff_u8; 8], 4);
        let place = bytes.as_mut_ptr().cast::<sockaddr>();
        let addr = "192.0.2.7:80".parse().unwrap();
        // SAFETY: the memory is longer than the length given.
        unsafe { write(addr, place, &mut len) }.unwrap();
        assert_eq!(len as usize, mem::size_of::<libc::sockaddr_in>());
        assert_eq!(bytes[2..], [0, 80, 0xff, 0xff, 0xff, 0xff]);
    }
}
