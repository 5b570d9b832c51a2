//! Values as bytes, for another image of this process: `ARCHITECTURE.md`, section "Fork and exec".
//!
//! Writer and reader are the same version of this code, on the same processor. So the format has no tags, and numbers have the
//! processor's byte order. Reading still checks every length: a damaged file gives `None`, never a panic.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

use crate::ids::{EndpointId, FinHow, FlowId, FlowToken, Role};

/// A value that can be written as bytes and read back.
pub trait Saved: Sized {
    /// Appends the value.
    fn save(&self, out: &mut Vec<u8>);

    /// Takes the value from the front of the bytes.
    fn load(from: &mut &[u8]) -> Option<Self>;
}

macro_rules! numbers {
    ($($kind:ty),*) => {$(
        impl Saved for $kind {
            fn save(&self, out: &mut Vec<u8>) {
                out.extend(self.to_ne_bytes());
            }

            fn load(from: &mut &[u8]) -> Option<Self> {
                <[u8; size_of::<$kind>()]>::load(from).map(Self::from_ne_bytes)
            }
        }
    )*};
}

numbers!(u8, u16, u32, u64, i32);

impl<const N: usize> Saved for [u8; N] {
    fn save(&self, out: &mut Vec<u8>) {
        out.extend(self);
    }

    fn load(from: &mut &[u8]) -> Option<Self> {
        let (taken, rest) = from.split_first_chunk()?;
        *from = rest;
        Some(*taken)
    }
}

impl Saved for bool {
    fn save(&self, out: &mut Vec<u8>) {
        out.push(u8::from(*self));
    }

    fn load(from: &mut &[u8]) -> Option<Self> {
        match u8::load(from)? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }
}

impl<T: Saved> Saved for Option<T> {
    fn save(&self, out: &mut Vec<u8>) {
        self.is_some().save(out);
        if let Some(value) = self {
            value.save(out);
        }
    }

    fn load(from: &mut &[u8]) -> Option<Self> {
        match bool::load(from)? {
            true => T::load(from).map(Some),
            false => Some(None),
        }
    }
}

impl<T: Saved> Saved for Vec<T> {
    fn save(&self, out: &mut Vec<u8>) {
        (self.len() as u64).save(out);
        self.iter().for_each(|item| item.save(out));
    }

    fn load(from: &mut &[u8]) -> Option<Self> {
        // Each item takes a byte at least, so a wrong length ends soon.
        let len = u64::load(from)?;
        (0..len).map(|_| T::load(from)).collect()
    }
}

impl<A: Saved, B: Saved> Saved for (A, B) {
    fn save(&self, out: &mut Vec<u8>) {
        self.0.save(out);
        self.1.save(out);
    }

    fn load(from: &mut &[u8]) -> Option<Self> {
        Some((A::load(from)?, B::load(from)?))
    }
}

impl Saved for IpAddr {
    fn save(&self, out: &mut Vec<u8>) {
        match self {
            IpAddr::V4(ip) => (4u8, u32::from(*ip)).save(out),
            IpAddr::V6(ip) => (6u8, ip.octets()).save(out),
        }
    }

    fn load(from: &mut &[u8]) -> Option<Self> {
        match u8::load(from)? {
            4 => Some(Ipv4Addr::from(u32::load(from)?).into()),
            6 => Some(Ipv6Addr::from(<[u8; 16]>::load(from)?).into()),
            _ => None,
        }
    }
}

impl Saved for SocketAddr {
    fn save(&self, out: &mut Vec<u8>) {
        self.ip().save(out);
        self.port().save(out);
        if let SocketAddr::V6(addr) = self {
            (addr.flowinfo(), addr.scope_id()).save(out);
        }
    }

    fn load(from: &mut &[u8]) -> Option<Self> {
        let (ip, port) = <(IpAddr, u16)>::load(from)?;
        Some(match ip {
            IpAddr::V4(ip) => SocketAddrV4::new(ip, port).into(),
            IpAddr::V6(ip) => {
                let (info, scope) = <(u32, u32)>::load(from)?;
                SocketAddrV6::new(ip, port, info, scope).into()
            }
        })
    }
}

impl Saved for EndpointId {
    fn save(&self, out: &mut Vec<u8>) {
        self.host.save(out);
        (self.pid, self.incarnation).save(out);
    }

    fn load(from: &mut &[u8]) -> Option<Self> {
        Some(EndpointId {
            host: Saved::load(from)?,
            pid: Saved::load(from)?,
            incarnation: Saved::load(from)?,
        })
    }
}

impl Saved for FlowId {
    fn save(&self, out: &mut Vec<u8>) {
        self.0.save(out);
    }

    fn load(from: &mut &[u8]) -> Option<Self> {
        Saved::load(from).map(FlowId)
    }
}

impl Saved for FlowToken {
    fn save(&self, out: &mut Vec<u8>) {
        self.0.save(out);
    }

    fn load(from: &mut &[u8]) -> Option<Self> {
        Saved::load(from).map(FlowToken)
    }
}

impl Saved for Role {
    fn save(&self, out: &mut Vec<u8>) {
        (*self == Role::Connector).save(out);
    }

    fn load(from: &mut &[u8]) -> Option<Self> {
        Some(match bool::load(from)? {
            true => Role::Connector,
            false => Role::Acceptor,
        })
    }
}

impl Saved for FinHow {
    fn save(&self, out: &mut Vec<u8>) {
        let number: u8 = match self {
            FinHow::HalfClose => 0,
            FinHow::Close => 1,
            FinHow::Reset => 2,
        };
        number.save(out);
    }

    fn load(from: &mut &[u8]) -> Option<Self> {
        match u8::load(from)? {
            0 => Some(FinHow::HalfClose),
            1 => Some(FinHow::Close),
            2 => Some(FinHow::Reset),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Debug;

    use super::*;

    fn comes_back<T: Saved + PartialEq + Debug>(value: T) {
        let mut bytes = Vec::new();
        value.save(&mut bytes);
        for len in 0..bytes.len() {
            assert_eq!(T::load(&mut &bytes[..len]), None, "cut to {len}");
        }
        bytes.push(7);
        let mut rest = &bytes[..];
        assert_eq!(T::load(&mut rest), Some(value));
        assert_eq!(rest, [7]);
    }

    #[test]
    fn values_come_back_and_cut_ones_do_not() {
        comes_back((1u8, 0xabcd_u16));
        comes_back((-5i32, u64::MAX));
        comes_back(vec![Some(true), None, Some(false)]);
        for addr in ["10.0.0.1:80", "[fe80::1%3]:5000"] {
            comes_back(addr.parse::<SocketAddr>().unwrap());
        }
        comes_back(EndpointId {
            host: [1; 16],
            pid: 2,
            incarnation: 3,
        });
        comes_back((FlowId([9; 16]), FlowToken(4)));
        for role in [Role::Connector, Role::Acceptor] {
            comes_back(role);
        }
        for how in [FinHow::HalfClose, FinHow::Close, FinHow::Reset] {
            comes_back(how);
        }
    }

    #[test]
    fn a_wrong_length_is_found() {
        let mut bytes = Vec::new();
        vec![1u8, 2, 3].save(&mut bytes);
        bytes[0] = 200;
        assert_eq!(Vec::<u8>::load(&mut &bytes[..]), None);
        assert_eq!(bool::load(&mut &[2][..]), None);
    }
}
