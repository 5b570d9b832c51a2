//! A process that has no descriptors left.

use std::fs::File;

use slim_rdma::{AdapterEvent, Verbs, ibverbs::VerbsAdapter};

use super::{DETECTION, only_there, readable, rxe, shell, wait};
use crate::common::rxe::Rxe;

/// Sets the soft limit. Returns the old one.
fn limit(soft: u64) -> u64 {
    let mut now = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: both calls get a live structure.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut now), 0);
        let old = std::mem::replace(&mut now.rlim_cur, soft);
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &now), 0);
        old
    }
}

/// Runs `f` while this process can make no descriptor.
fn without<T>(f: impl FnOnce() -> T) -> T {
    let old = limit(3);
    assert!(File::open("/dev/null").is_err());
    let found = f();
    limit(old);
    found
}

#[test]
fn a_first_use_without_descriptors_is_not_the_last() {
    let test = "descriptors::a_first_use_without_descriptors_is_not_the_last";
    if !only_there(test) {
        return;
    }
    let Some(rxe) = Rxe::in_kernel(test) else {
        return;
    };
    let settings = rxe.settings(0);
    let error = without(|| VerbsAdapter::open(&settings)).unwrap_err();
    println!("{error}");
    // The address takes some moments to become an identifier, too.
    wait("an adapter", DETECTION, || {
        VerbsAdapter::open(&settings).ok()
    });
}

/// The library opens a file to read a partition key.
#[test]
fn a_port_without_descriptors_is_up() {
    let Some(rxe) = rxe("descriptors::a_port_without_descriptors_is_up") else {
        return;
    };
    let [mut adapter, _] = rxe.open();
    while adapter.event().is_some() {}
    shell("ip addr add 10.9.9.9/32 dev v1");
    assert!(readable(adapter.event_descriptor(), 1000));
    let (up, event) = without(|| (adapter.is_up(), adapter.event()));
    assert_eq!((up, event), (true, Some(AdapterEvent::PortUp)));
}
