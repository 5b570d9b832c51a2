//! Who this process is.

use std::fs;
use std::process;

use slim_core::EndpointId;

use crate::sys;

/// The name of this life of this process. `incarnation` is random.
pub(crate) fn endpoint(incarnation: u64) -> EndpointId {
    EndpointId {
        host: host_id(),
        pid: process::id(),
        incarnation,
    }
}

/// Tells hosts apart: also those that were cloned from one image, and network namespaces of one
/// kernel, whose addresses are as different as those of two machines.
fn host_id() -> [u8; 16] {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let mut id = [0; 16];
    let digits = boot.bytes().filter_map(|b| char::from(b).to_digit(16));
    for (i, digit) in digits.take(32).enumerate() {
        if let Some(byte) = id.get_mut(i / 2) {
            *byte = *byte << 4 | digit as u8;
        }
    }
    let here = sys::network_namespace().to_be_bytes();
    let name = sys::host_name();
    // The last half is enough of the random boot id to mix the rest into.
    let mut mix = u64::from_be_bytes(here);
    for byte in name.bytes() {
        mix = (mix ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    }
    for (byte, other) in id.iter_mut().skip(8).zip(mix.to_be_bytes()) {
        *byte ^= other;
    }
    id
}
