//! libibverbs on any host: what is missing is said in one line. With adapters: `netem-tests/tests/verbs.rs`.

use slim_rdma::ibverbs::{AdapterError, PortSettings, VerbsAdapter, devices};

#[test]
fn a_host_without_the_adapter_says_so_in_one_line() {
    let settings = PortSettings {
        device: Some("no-such-adapter".into()),
        ..PortSettings::default()
    };
    let error = VerbsAdapter::open(&settings).unwrap_err();
    let text = error.to_string();
    assert!(text.starts_with("verbs cannot be used: ") && !text.contains('\n'));
    match error {
        AdapterError::Library(_) | AdapterError::Symbol(..) => {
            println!("skip: a_host_without_the_adapter_says_so_in_one_line: {text}");
        }
        _ => assert!(text.contains("this host has no adapter"), "{text}"),
    }
    // Whether there are any is another matter.
    match devices() {
        Ok(all) => assert!(all.iter().all(|device| device.name != "no-such-adapter")),
        Err(e) => assert!(!e.to_string().contains('\n')),
    }
}
