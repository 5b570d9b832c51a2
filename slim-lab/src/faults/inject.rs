//! Injects a RST or FIN that neither end sent, as a middlebox or an attacker does.
//!
//! The segment is built from sequence numbers sniffed on the wire. It is sent at the far end, so that the
//! victim receives it as if its peer had sent it. The kernel accepts a RST only if its sequence number is
//! exactly the one that the victim expects next. Under traffic that is a race, so segments are sent until
//! the kernel has accepted one.

use std::{
    fmt, io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    thread,
    time::{Duration, Instant},
};

use pnet::{
    datalink::{self, Channel, DataLinkReceiver, DataLinkSender},
    packet::{
        Packet,
        ethernet::{EtherTypes, EthernetPacket, MutableEthernetPacket},
        ip::IpNextHeaderProtocols,
        ipv4::{self, Ipv4Packet, MutableIpv4Packet},
        tcp::{self, MutableTcpPacket, TcpFlags, TcpPacket},
    },
    util::MacAddr,
};

use super::diag::{self, ESTABLISHED, OpenConnection};
use crate::{Error, Netns, Node, Result};

const ETHERNET: usize = 14;
const IPV4: usize = 20;
const TCP: usize = 20;
/// A sniffed segment may be as large as the kernel's offloads make it.
const SNIFF_BUFFER: usize = 128 * 1024;
/// How long to wait for traffic before the victim is probed for some.
const QUIET: Duration = Duration::from_millis(100);
/// How long each attempt listens for a segment.
const LISTEN: Duration = Duration::from_millis(20);

/// The kind of segment to inject.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Segment {
    /// Ends the connection at once: the victim sees `ECONNRESET`.
    Rst,
    /// The victim sees the end of the stream.
    Fin,
}

/// Report of an injection.
#[derive(Clone, Debug)]
pub struct Injected {
    /// The kind of segment.
    pub segment: Segment,
    /// The victim's connection.
    pub victim: OpenConnection,
    /// Number of segments sent until the kernel accepted one.
    pub sent: u32,
    /// A segment was accepted: the victim's socket has left the established state.
    pub accepted: bool,
    /// Time from the start to the acceptance.
    pub took: Duration,
}

/// Injects a segment into `connection`, a connection of `victim`, from the side of its peer `far`, on
/// path `path`. Tries for `limit` at most.
pub fn inject(
    segment: Segment,
    victim: &Node,
    far: &Node,
    path: usize,
    connection: &OpenConnection,
    limit: Duration,
) -> Result<Injected> {
    let interface = far.interface(path);
    let tuple = SegmentTuple::of(connection)?;
    let work = || {
        Wire::open(&interface).and_then(|wire| attempt(wire, segment, victim.net(), &tuple, limit))
    };
    let (sent, accepted, took) = far
        .net()
        .run(work)?
        .map_err(Error::io("inject a segment"))?;
    Ok(Injected {
        segment,
        victim: connection.clone(),
        sent,
        accepted,
        took,
    })
}

fn attempt(
    mut wire: Wire,
    segment: Segment,
    victim: &Netns,
    tuple: &SegmentTuple,
    limit: Duration,
) -> io::Result<(u32, bool, Duration)> {
    let (start, mut sent) = (Instant::now(), 0);
    let mut asked = Instant::now();
    let mut heard: Option<SegmentSeen> = None;
    while start.elapsed() < limit {
        if let Some(seen) = wire.newest(tuple)? {
            wire.send(&craft(segment, &seen, tuple))?;
            heard = Some(seen);
            sent += 1;
        } else if let Some(seen) = &heard {
            // No traffic: the last numbers still hold, and a probe makes the victim send them again.
            if asked.elapsed() > QUIET {
                wire.send(&question(seen, tuple))?;
                asked = Instant::now();
            }
        } else if asked.elapsed() > QUIET {
            wire.ask_blindly(victim, tuple)?;
            asked = Instant::now();
        }
        // A look-up takes far longer than a send: under traffic, look after the first sends and then after every 16th.
        if sent > 0 && (sent % 16 == 0 || sent < 4) && !established(victim, tuple)? {
            return Ok((sent, true, start.elapsed()));
        }
    }
    Ok((
        sent,
        sent > 0 && !established(victim, tuple)?,
        start.elapsed(),
    ))
}

fn established(victim: &Netns, tuple: &SegmentTuple) -> io::Result<bool> {
    let state = diag::state(victim, tuple.victim.into(), tuple.peer.into());
    Ok(state.map_err(io::Error::other)? == Some(ESTABLISHED))
}

/// A packet socket on the interface of this name. Its reads do not wait: the newest frame is needed, not the next one.
pub(super) fn packet_socket(
    name: &str,
) -> io::Result<(Box<dyn DataLinkSender>, Box<dyn DataLinkReceiver>)> {
    let all = datalink::interfaces();
    let interface = all
        .into_iter()
        .find(|i| i.name == name)
        .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, format!("no interface {name}")))?;
    let config = datalink::Config {
        read_buffer_size: SNIFF_BUFFER,
        read_timeout: Some(Duration::ZERO),
        ..Default::default()
    };
    match datalink::channel(&interface, config)? {
        Channel::Ethernet(sender, receiver) => Ok((sender, receiver)),
        _ => Err(io::Error::other("not an Ethernet interface")),
    }
}

/// The addresses and ports of the connection, as in its packets.
#[derive(Clone, Copy, Debug)]
struct SegmentTuple {
    victim: (Ipv4Addr, u16),
    peer: (Ipv4Addr, u16),
}

impl SegmentTuple {
    fn of(connection: &OpenConnection) -> Result<Self> {
        let v4 = |a: SocketAddr| match a.ip() {
            IpAddr::V4(ip) => Ok((ip, a.port())),
            IpAddr::V6(_) => Err(Error::Invalid("injection is for IPv4 connections".into())),
        };
        Ok(SegmentTuple {
            victim: v4(connection.local)?,
            peer: v4(connection.remote)?,
        })
    }

    /// The same connection with its ends swapped.
    fn turned(self) -> Self {
        SegmentTuple {
            victim: self.peer,
            peer: self.victim,
        }
    }
}

/// The numbers and addresses in a segment that the victim has sent.
#[derive(Clone, Copy, Debug)]
struct SegmentSeen {
    victim_mac: MacAddr,
    peer_mac: MacAddr,
    /// The sequence number that the victim expects next.
    expects: u32,
    /// A number that the peer may acknowledge.
    acknowledges: u32,
}

/// A packet socket on one interface.
struct Wire {
    interface: String,
    /// The number that the peer itself acknowledged last. A forged segment must not acknowledge more: the victim would discard
    /// bytes that the peer still needs.
    acknowledged: Option<u32>,
    sender: Box<dyn DataLinkSender>,
    receiver: Box<dyn DataLinkReceiver>,
}

impl Wire {
    fn open(name: &str) -> io::Result<Self> {
        let (sender, receiver) = packet_socket(name)?;
        Ok(Wire {
            interface: name.into(),
            acknowledged: None,
            sender,
            receiver,
        })
    }

    /// The newest segment that the victim has sent on this connection; `None` if it sends none for [`LISTEN`].
    /// Older segments are skipped, because their numbers are outdated.
    fn newest(&mut self, tuple: &SegmentTuple) -> io::Result<Option<SegmentSeen>> {
        let until = Instant::now() + LISTEN;
        let mut newest = None;
        loop {
            match self.receiver.next() {
                Ok(frame) => {
                    if let Some(seen) = read(frame, &tuple.turned()) {
                        self.acknowledged = Some(seen.expects);
                    }
                    newest = read(frame, tuple).or(newest);
                }
                Err(e) if e.kind() != io::ErrorKind::TimedOut => return Err(e),
                Err(_) if newest.is_some() || Instant::now() > until => {
                    return Ok(newest.map(|seen| SegmentSeen {
                        acknowledges: self.acknowledged.unwrap_or(seen.acknowledges),
                        ..seen
                    }));
                }
                // Do not sleep: meanwhile the peer's traffic would outdate the numbers.
                Err(_) => thread::yield_now(),
            }
        }
    }

    fn send(&mut self, frame: &[u8]) -> io::Result<()> {
        match self.sender.send_to(frame, None) {
            Some(result) => result,
            None => Err(io::Error::other("the packet socket takes no more")),
        }
    }

    /// Makes the victim send a segment on a silent connection of which no segment was seen yet: the victim
    /// answers a segment out of the window with the right numbers (RFC 9293, 3.10.7.4).
    fn ask_blindly(&mut self, victim: &Netns, tuple: &SegmentTuple) -> io::Result<()> {
        let unknown = |what: &str| io::Error::other(format!("no Ethernet address of the {what}"));
        let own = datalink::interfaces()
            .into_iter()
            .find(|i| i.name == self.interface);
        let peer_mac = own.and_then(|i| i.mac).ok_or_else(|| unknown("peer"))?;
        let theirs = victim.run(datalink::interfaces).map_err(io::Error::other)?;
        let victim_mac = theirs
            .into_iter()
            .find(|i| i.ips.iter().any(|ip| ip.ip() == IpAddr::V4(tuple.victim.0)))
            .and_then(|i| i.mac)
            .ok_or_else(|| unknown("victim"))?;
        self.send(&question(
            &SegmentSeen {
                victim_mac,
                peer_mac,
                expects: 0,
                acknowledges: 0,
            },
            tuple,
        ))
    }
}

/// Parses a frame; `None` unless the victim has sent it on this connection.
fn read(frame: &[u8], tuple: &SegmentTuple) -> Option<SegmentSeen> {
    let ethernet = EthernetPacket::new(frame)?;
    if ethernet.get_ethertype() != EtherTypes::Ipv4 {
        return None;
    }
    let ip = Ipv4Packet::new(ethernet.payload())?;
    if ip.get_next_level_protocol() != IpNextHeaderProtocols::Tcp {
        return None;
    }
    let segment = TcpPacket::new(ip.payload())?;
    let from = (ip.get_source(), segment.get_source());
    let to = (ip.get_destination(), segment.get_destination());
    let flags = segment.get_flags();
    if from != tuple.victim
        || to != tuple.peer
        || flags & TcpFlags::ACK == 0
        || flags & TcpFlags::RST != 0
    {
        return None;
    }
    Some(SegmentSeen {
        victim_mac: ethernet.get_source(),
        peer_mac: ethernet.get_destination(),
        expects: segment.get_acknowledgement(),
        acknowledges: segment.get_sequence(),
    })
}

fn craft(segment: Segment, seen: &SegmentSeen, tuple: &SegmentTuple) -> Vec<u8> {
    let flags = match segment {
        Segment::Rst => TcpFlags::RST | TcpFlags::ACK,
        Segment::Fin => TcpFlags::FIN | TcpFlags::ACK,
    };
    frame(seen, tuple, seen.expects, flags)
}

/// A bare acknowledgement from just before the window. It is harmless, and the victim must answer it.
fn question(seen: &SegmentSeen, tuple: &SegmentTuple) -> Vec<u8> {
    frame(seen, tuple, seen.expects.wrapping_sub(1), TcpFlags::ACK)
}

/// Builds a segment from the peer to the victim, checksums included.
fn frame(seen: &SegmentSeen, tuple: &SegmentTuple, sequence: u32, flags: u8) -> Vec<u8> {
    let mut bytes = vec![0; ETHERNET + IPV4 + TCP];
    let mut ethernet = MutableEthernetPacket::new(&mut bytes).expect("the buffer holds the header");
    ethernet.set_destination(seen.victim_mac);
    ethernet.set_source(seen.peer_mac);
    ethernet.set_ethertype(EtherTypes::Ipv4);
    let mut ip =
        MutableIpv4Packet::new(&mut bytes[ETHERNET..]).expect("the buffer holds the header");
    ip.set_version(4);
    ip.set_header_length((IPV4 / 4) as u8);
    ip.set_total_length((IPV4 + TCP) as u16);
    ip.set_ttl(64);
    ip.set_next_level_protocol(IpNextHeaderProtocols::Tcp);
    ip.set_source(tuple.peer.0);
    ip.set_destination(tuple.victim.0);
    let checksum = ipv4::checksum(&ip.to_immutable());
    ip.set_checksum(checksum);
    let mut segment =
        MutableTcpPacket::new(&mut bytes[ETHERNET + IPV4..]).expect("the buffer holds the header");
    segment.set_source(tuple.peer.1);
    segment.set_destination(tuple.victim.1);
    segment.set_sequence(sequence);
    segment.set_acknowledgement(seen.acknowledges);
    segment.set_data_offset((TCP / 4) as u8);
    segment.set_flags(flags);
    segment.set_window(512);
    let checksum = tcp::ipv4_checksum(&segment.to_immutable(), &tuple.peer.0, &tuple.victim.0);
    segment.set_checksum(checksum);
    bytes
}

impl fmt::Display for Injected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.segment {
            Segment::Rst => "RST",
            Segment::Fin => "FIN",
        };
        let end = if self.accepted {
            "accepted"
        } else {
            "not accepted"
        };
        let ms = self.took.as_millis();
        write!(
            f,
            "{name} into {}: {} sent, {end} after {ms} ms",
            self.victim, self.sent
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crafted_segment_has_right_checksums_and_numbers() {
        let tuple = SegmentTuple {
            victim: ([10, 0, 0, 1].into(), 80),
            peer: ([10, 0, 0, 2].into(), 4000),
        };
        let seen = SegmentSeen {
            victim_mac: MacAddr::new(1, 2, 3, 4, 5, 6),
            peer_mac: MacAddr::zero(),
            expects: 7,
            acknowledges: 9,
        };
        let bytes = craft(Segment::Rst, &seen, &tuple);
        let ip = Ipv4Packet::new(&bytes[ETHERNET..]).unwrap();
        assert_eq!(ip.get_checksum(), ipv4::checksum(&ip));
        let segment = TcpPacket::new(ip.payload()).unwrap();
        assert_eq!(
            segment.get_checksum(),
            tcp::ipv4_checksum(&segment, &tuple.peer.0, &tuple.victim.0)
        );
        assert_eq!(
            (segment.get_sequence(), segment.get_acknowledgement()),
            (7, 9)
        );
        assert_eq!(segment.get_flags(), TcpFlags::RST | TcpFlags::ACK);
    }

    #[test]
    fn only_the_victims_segments_are_read() {
        let tuple = SegmentTuple {
            victim: ([10, 0, 0, 1].into(), 80),
            peer: ([10, 0, 0, 2].into(), 4000),
        };
        let seen = SegmentSeen {
            victim_mac: MacAddr::zero(),
            peer_mac: MacAddr::zero(),
            expects: 7,
            acknowledges: 9,
        };
        let from_peer = craft(Segment::Fin, &seen, &tuple);
        assert!(read(&from_peer, &tuple).is_none());
        let turned = tuple.turned();
        let read = read(&from_peer, &turned).unwrap();
        assert_eq!((read.expects, read.acknowledges), (9, 7));
        assert!(super::read(&from_peer[..20], &turned).is_none());
    }
}
