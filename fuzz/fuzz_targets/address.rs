//! The address of a queue pair under libFuzzer: what is read encodes to the same bytes again.

#![no_main]

use libfuzzer_sys::fuzz_target;
use slim_rdma::PairAddress;

fuzz_target!(|data: &[u8]| {
    if let Some(address) = PairAddress::decode(data) {
        assert_eq!(address.encode()[..], *data);
    }
});
