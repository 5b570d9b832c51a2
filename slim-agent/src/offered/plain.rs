//! Values as C sees them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::time::Duration;

use slim_core::endpoint::{Agreed, Announcement, MailboxState};
use slim_core::ids::{EndpointId, FlowId};
use slim_core::transport::{OtherLocator, TransportKind};
use slim_core::{Cause, FinHow, Verdict};
use slim_stream::Probe;
use slim_sys::AckWait;

/// Bits of the third number of a probe.
const STUCK: u64 = 1;
const RELAYED: u64 = 2;
const FULL: u64 = 4;

pub(crate) fn probe(probe: Probe) -> [u64; 3] {
    let bit = |is: bool, bit: u64| if is { bit } else { 0 };
    let bits = bit(probe.stuck, STUCK) | bit(probe.relayed, RELAYED) | bit(probe.full, FULL);
    [probe.unacked, probe.acked, bits]
}

pub(crate) fn as_probe([unacked, acked, bits]: [u64; 3]) -> Probe {
    Probe {
        unacked,
        acked,
        stuck: bits & STUCK != 0,
        relayed: bits & RELAYED != 0,
        full: bits & FULL != 0,
    }
}

pub(crate) fn ack_wait(wait: Option<AckWait>) -> [u64; 3] {
    wait.map_or([0; 3], |wait| {
        let trip = nanos(wait.round_trip).saturating_add(1);
        [wait.acked, nanos(wait.waited), trip]
    })
}

pub(crate) fn as_ack_wait([acked, waited, trip]: [u64; 3]) -> Option<AckWait> {
    Some(AckWait {
        acked,
        waited: Duration::from_nanos(waited),
        round_trip: Duration::from_nanos(trip.checked_sub(1)?),
    })
}

/// An IP address and a port.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PlainAddr {
    ip: [u8; 16],
    port: u16,
    /// An IPv6 address; otherwise the first four bytes are the IPv4 address.
    is_v6: bool,
    flow: u32,
    scope: u32,
}

impl From<SocketAddr> for PlainAddr {
    fn from(addr: SocketAddr) -> Self {
        match addr {
            SocketAddr::V4(v4) => {
                let mut ip = [0; 16];
                ip[..4].copy_from_slice(&v4.ip().octets());
                Self {
                    ip,
                    port: v4.port(),
                    ..Self::default()
                }
            }
            SocketAddr::V6(v6) => Self {
                ip: v6.ip().octets(),
                port: v6.port(),
                is_v6: true,
                flow: v6.flowinfo(),
                scope: v6.scope_id(),
            },
        }
    }
}

impl From<PlainAddr> for SocketAddr {
    fn from(plain: PlainAddr) -> Self {
        let [a, b, c, d, ..] = plain.ip;
        match plain.is_v6 {
            true => SocketAddrV6::new(plain.ip.into(), plain.port, plain.flow, plain.scope).into(),
            false => (Ipv4Addr::new(a, b, c, d), plain.port).into(),
        }
    }
}

pub(crate) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

pub(crate) fn option(value: Option<u64>) -> [u64; 3] {
    value.map_or([0; 3], |value| [1, value, 0])
}

pub(crate) fn as_option([is_some, value, _]: [u64; 3]) -> Option<u64> {
    (is_some != 0).then_some(value)
}

fn errno(number: i32) -> u64 {
    u64::from(number.cast_unsigned())
}

pub(crate) fn as_errno(number: u64) -> i32 {
    (number as u32).cast_signed()
}

pub(crate) fn cause(cause: Cause) -> [u64; 2] {
    match cause {
        Cause::Errno(number) => [0, errno(number)],
        Cause::Eof { received } => [1, received],
        Cause::Stall => [2, 0],
        Cause::PeerAsked => [3, 0],
    }
}

pub(crate) fn as_cause([kind, value]: [u64; 2]) -> Option<Cause> {
    match kind {
        0 => Some(Cause::Errno(as_errno(value))),
        1 => Some(Cause::Eof { received: value }),
        2 => Some(Cause::Stall),
        3 => Some(Cause::PeerAsked),
        _ => None,
    }
}

pub(crate) fn verdict(verdict: Verdict) -> [u64; 3] {
    match verdict {
        Verdict::Errno(number) => option(Some(errno(number))),
        Verdict::Eof => option(None),
    }
}

pub(crate) fn as_verdict(numbers: [u64; 3]) -> Verdict {
    as_option(numbers).map_or(Verdict::Eof, |number| Verdict::Errno(as_errno(number)))
}

pub(crate) fn how(how: FinHow) -> u64 {
    match how {
        FinHow::HalfClose => 0,
        FinHow::Close => 1,
        FinHow::Reset => 2,
    }
}

pub(crate) fn as_how(number: u64) -> Option<FinHow> {
    match number {
        0 => Some(FinHow::HalfClose),
        1 => Some(FinHow::Close),
        2 => Some(FinHow::Reset),
        _ => None,
    }
}

pub(crate) fn mailbox(state: MailboxState) -> [u64; 2] {
    match state {
        MailboxState::Nothing => [0, 0],
        MailboxState::Open => [1, 0],
        MailboxState::Closed(end) => [2, end],
    }
}

pub(crate) fn as_mailbox([kind, end]: [u64; 2]) -> MailboxState {
    match kind {
        1 => MailboxState::Open,
        2 => MailboxState::Closed(end),
        _ => MailboxState::Nothing,
    }
}

/// Numbers are big-endian.
pub(crate) fn announcement(told: &Announcement) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(told.id.host);
    bytes.extend(told.id.pid.to_be_bytes());
    for number in [told.id.incarnation, told.features, told.serial] {
        bytes.extend(number.to_be_bytes());
    }
    for number in [told.resume_port, told.control_port, told.addrs.len() as u16] {
        bytes.extend(number.to_be_bytes());
    }
    for ip in &told.addrs {
        let addr = PlainAddr::from(SocketAddr::new(*ip, 0));
        bytes.push(addr.is_v6.into());
        bytes.extend(addr.ip);
    }
    bytes.extend((told.locators.len() as u16).to_be_bytes());
    for locator in &told.locators {
        // A locator has fewer than 256 bytes.
        bytes.extend([locator.kind().number(), locator.bytes().len() as u8]);
        bytes.extend(locator.bytes());
    }
    bytes
}

pub(crate) fn as_announcement(bytes: &[u8]) -> Option<Announcement> {
    let mut rest = PlainBytes(bytes);
    let id = EndpointId {
        host: rest.take()?,
        pid: u32::from_be_bytes(rest.take()?),
        incarnation: rest.number()?,
    };
    let (features, serial) = (rest.number()?, rest.number()?);
    let (resume_port, control_port) = (rest.short()?, rest.short()?);
    let addrs = (0..rest.short()?).map(|_| rest.ip());
    let addrs = addrs.collect::<Option<_>>()?;
    let locators = (0..rest.short()?).map(|_| rest.locator());
    let locators = locators.collect::<Option<_>>()?;
    rest.0.is_empty().then_some(Announcement {
        id,
        features,
        addrs,
        resume_port,
        control_port,
        serial,
        locators,
    })
}

pub(crate) fn agreed(agreed: &Agreed) -> Vec<u8> {
    let [first, second] = agreed.secrets;
    let head = [&agreed.flow.0[..], &first, &second].concat();
    [head, announcement(&agreed.peer)].concat()
}

pub(crate) fn as_agreed(bytes: &[u8]) -> Option<Agreed> {
    let mut rest = PlainBytes(bytes);
    Some(Agreed {
        flow: FlowId(rest.take()?),
        secrets: [rest.take()?, rest.take()?],
        peer: as_announcement(rest.0)?,
    })
}

/// The bytes that are left to read.
struct PlainBytes<'a>(&'a [u8]);

impl PlainBytes<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }

    fn number(&mut self) -> Option<u64> {
        self.take().map(u64::from_be_bytes)
    }

    fn short(&mut self) -> Option<u16> {
        self.take().map(u16::from_be_bytes)
    }

    fn ip(&mut self) -> Option<IpAddr> {
        let [is_v6] = self.take()?;
        let ip: [u8; 16] = self.take()?;
        let [a, b, c, d, ..] = ip;
        Some(match is_v6 {
            0 => Ipv4Addr::new(a, b, c, d).into(),
            _ => Ipv6Addr::from(ip).into(),
        })
    }

    fn locator(&mut self) -> Option<OtherLocator> {
        let [kind, len] = self.take()?;
        let (bytes, rest) = self.0.split_at_checked(len.into())?;
        self.0 = rest;
        OtherLocator::new(TransportKind::new(kind), bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told() -> Announcement {
        Announcement {
            id: EndpointId {
                host: [7; 16],
                pid: 77,
                incarnation: 1 << 60,
            },
            features: 5,
            addrs: vec!["192.0.2.1".parse().unwrap(), "fd00::1".parse().unwrap()],
            resume_port: 1,
            control_port: u16::MAX,
            serial: 9,
            locators: vec![OtherLocator::new(TransportKind::TEST, b"abc").unwrap()],
        }
    }

    #[test]
    fn what_crosses_comes_out_as_it_went_in() {
        for text in [
            "192.0.2.1:80",
            "[::ffff:192.0.2.1]:80",
            "[fe80::1%3]:65535",
            "[::]:0",
        ] {
            let addr: SocketAddr = text.parse().unwrap();
            assert_eq!(SocketAddr::from(PlainAddr::from(addr)), addr);
        }
        for one in [
            Cause::Errno(-1),
            Cause::Eof { received: 1 << 40 },
            Cause::Stall,
            Cause::PeerAsked,
        ] {
            assert_eq!(as_cause(cause(one)), Some(one));
        }
        for one in [Verdict::Errno(libc::ECONNRESET), Verdict::Eof] {
            assert_eq!(as_verdict(verdict(one)), one);
        }
        for one in [FinHow::HalfClose, FinHow::Close, FinHow::Reset] {
            assert_eq!(as_how(how(one)), Some(one));
        }
        for one in [
            MailboxState::Nothing,
            MailboxState::Open,
            MailboxState::Closed(3),
        ] {
            assert_eq!(as_mailbox(mailbox(one)), one);
        }
        let one = Agreed {
            flow: FlowId([3; 16]),
            secrets: [[4; 32], [5; 32]],
            peer: told(),
        };
        assert_eq!(as_agreed(&agreed(&one)), Some(one));
    }

    #[test]
    fn cut_bytes_are_no_announcement() {
        let whole = announcement(&told());
        for len in 0..whole.len() {
            assert_eq!(as_announcement(&whole[..len]), None, "{len}");
        }
        assert_eq!(as_announcement(&whole), Some(told()));
    }
}
