//! Adapters for which libibverbs has no driver, and adapters that are deleted.

use std::process::Command;

use slim_rdma::{
    Verbs,
    ibverbs::{DeviceInfo, PortSettings, VerbsAdapter, devices},
};

use super::{
    DETECTION, DEVICES, Rxe, connect, only_there, release, rxe, shell, sizes, transfer, wait,
};

fn is_not_found(device: &DeviceInfo) -> bool {
    let why = device.unfit.unwrap_or_default();
    why.contains("does not find it") && device.ports.is_empty()
}

/// Drivers are a package of their own on some systems.
#[test]
fn a_missing_driver_is_named() {
    let test = "hosts::a_missing_driver_is_named";
    if !only_there(test) || Rxe::in_kernel(test).is_none() {
        return;
    }
    shell("mount -t tmpfs none /etc/libibverbs.d");
    let all = devices().unwrap();
    assert!(all.iter().map(|device| &*device.name).eq(DEVICES));
    assert!(all.iter().all(is_not_found), "{all:?}");
    let error = VerbsAdapter::open(&PortSettings::default()).unwrap_err();
    println!("{error}");
    assert_eq!(
        error.to_string(),
        "verbs cannot be used: this host has no adapter with a port that can be used \
         (rx1: libibverbs does not find it: no driver (Debian: ibverbs-providers), or it is being deleted; \
         rx2: libibverbs does not find it: no driver (Debian: ibverbs-providers), or it is being deleted)"
    );
}

/// The kernel lets the processes that have it open go on, without any news, and removes it when the last of them has closed it.
#[test]
fn a_deleted_adapter_works_until_it_is_closed() {
    let Some(rxe) = rxe("hosts::a_deleted_adapter_works_until_it_is_closed") else {
        return;
    };
    let mut adapters = rxe.open();
    let mut pairs = connect(&mut adapters, [sizes(4096, 16); 2]);
    let mut delete = Command::new("rdma")
        .args(["link", "delete", DEVICES[0]])
        .spawn()
        .unwrap();
    wait("it is on its way out", DETECTION, || {
        let all = devices().unwrap();
        let first = all.iter().find(|device| device.name == DEVICES[0]);
        first.is_some_and(is_not_found).then_some(())
    });
    transfer(&mut adapters, &mut pairs, 100_000, 1000);
    assert_eq!((adapters[0].event(), adapters[0].is_up()), (None, true));
    assert!(delete.try_wait().unwrap().is_none(), "it waits");
    release(pairs, &mut adapters);
    drop(adapters);
    let status = wait("the end of its deletion", DETECTION, || {
        delete.try_wait().unwrap()
    });
    assert!(status.success());
    let all = devices().unwrap();
    assert!(all.iter().all(|device| device.name != DEVICES[0]));
}
