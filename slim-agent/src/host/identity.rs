//! The identity of this process.

use std::process;

use slim_core::EndpointId;
use slim_core::auth::host_id;
use slim_sys::proc;

use crate::kernel::sys;

/// The endpoint id of this process. `incarnation` is random.
pub(crate) fn endpoint(incarnation: u64) -> EndpointId {
    EndpointId {
        host: host(),
        pid: process::id(),
        incarnation,
    }
}

/// An id that tells hosts apart: also hosts that were cloned from one image, and network namespaces of one kernel,
/// whose addresses are as different as those of two machines.
fn host() -> [u8; 16] {
    let boot = proc::read(format_args!("sys/kernel/random/boot_id")).unwrap_or_default();
    let here = sys::network_namespace().to_be_bytes();
    host_id(&boot, &[&here, sys::host_name().as_bytes()])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn the_host_id_is_stable_and_does_not_reveal_the_boot_id() {
        assert_eq!(host(), host());
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
        let boot: String = boot.chars().filter(char::is_ascii_hexdigit).collect();
        let told: String = host().iter().map(|b| format!("{b:02x}")).collect();
        for at in 0..=told.len() - 8 {
            assert!(!boot.contains(&told[at..at + 8]), "{told}");
        }
    }
}
