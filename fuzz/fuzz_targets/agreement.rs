//! Messages of the agreement on a queue pair, and locators, under libFuzzer: what is read encodes to the same bytes again.

#![no_main]

use libfuzzer_sys::fuzz_target;
use slim_rdma::PortLocator;
use slim_rdma::agreement::AgreementMessage;

fuzz_target!(|data: &[u8]| {
    if let Some(message) = AgreementMessage::decode(data) {
        assert_eq!(message.encode(), data);
    }
    if let Some(locator) = PortLocator::decode(data) {
        assert_eq!(locator.encode()[..], *data);
    }
});
