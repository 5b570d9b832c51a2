//! A port's locator as the core carries it.

use slim_core::transport::{Locator, OtherLocator, TransportKind};
use slim_rdma::in_memory::Fabric;
use slim_rdma::{Datagrams, LOCATOR_LEN, PortLocator};

#[test]
fn a_ports_locator_is_one_of_kind_1() {
    let own = Fabric::new(1).adapter(1).datagrams().locator();
    let other = OtherLocator::new(TransportKind::VERBS, &own.encode()).unwrap();
    assert_eq!(
        (other.kind().number(), other.bytes().len()),
        (1, LOCATOR_LEN)
    );
    let text = Locator::Other(other).to_string();
    let Ok(Locator::Other(read)) = text.parse::<Locator>() else {
        panic!("{text}");
    };
    assert_eq!(PortLocator::decode(read.bytes()), Some(own));
}
