//! Addresses of ports.

/// The partition of all ports.
pub(super) const PARTITION: u16 = u16::MAX;

/// Global identifier of a host's port.
pub(super) fn gid(host: usize) -> [u8; 16] {
    const NETWORK: u128 = 0xfd << 120;
    (NETWORK | host as u128).to_be_bytes()
}
