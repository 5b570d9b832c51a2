//! The 40 bytes that an adapter puts before a datagram: the packet's header of the network.
//!
//! With InfiniBand, RoCE v1, and RoCE v2 over IPv6 they are the global route header, or the header of IPv6, which has the same layout. With
//! RoCE v2 over IPv4 the last 20 of them are the header of IPv4, and the others mean nothing.

/// Bytes before a datagram, whether the packet has such a header or not.
pub(super) const GRH_LEN: usize = 40;

/// Where the header of IPv4 begins.
const IPV4: usize = 20;

/// Global identifier of the sender.
pub(super) fn source(header: &[u8; GRH_LEN]) -> [u8; 16] {
    let mut gid = [0; 16];
    let ipv4 = &header[IPV4..];
    // The address of a header of IPv6 may begin like one of IPv4, but its sum is not that of one.
    if ipv4[0] == 0x45 && sums_up(ipv4) {
        gid[10..12].fill(0xff);
        gid[12..].copy_from_slice(&ipv4[12..16]);
    } else {
        gid.copy_from_slice(&header[8..24]);
    }
    gid
}

/// Whether the checksum of a header of IPv4 is right.
fn sums_up(header: &[u8]) -> bool {
    let words = header.chunks_exact(2);
    let mut sum: u32 = words
        .map(|w| u32::from(u16::from_be_bytes([w[0], w[1]])))
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum == 0xffff
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sender_is_found_in_both_kinds_of_header() {
        // A header of IPv4 from 10.1.0.1 to 10.1.0.2, behind bytes that mean nothing.
        let mut header = [0x60; GRH_LEN];
        header[20..].copy_from_slice(&[
            0x45, 0, 0, 0x54, 0x12, 0x34, 0x40, 0, 0x40, 0x11, 0, 0, 10, 1, 0, 1, 10, 1, 0, 2,
        ]);
        let sum = {
            let words = header[20..].chunks_exact(2);
            let sum: u32 = words
                .map(|w| u32::from(u16::from_be_bytes([w[0], w[1]])))
                .sum();
            !((sum & 0xffff) + (sum >> 16)) as u16
        };
        header[30..32].copy_from_slice(&sum.to_be_bytes());
        let v4: std::net::Ipv6Addr = "::ffff:10.1.0.1".parse().unwrap();
        assert_eq!(source(&header), v4.octets());

        // With a wrong sum it is no header of IPv4.
        header[30] ^= 1;
        assert_eq!(source(&header), header[8..24]);

        // A header of IPv6 whose source has such bytes.
        let v6: std::net::Ipv6Addr = "fd00::4500:1".parse().unwrap();
        let mut header = [0; GRH_LEN];
        header[0] = 0x60;
        header[8..24].copy_from_slice(&v6.octets());
        header[20] = 0x45;
        assert_eq!(source(&header), header[8..24]);
    }
}
