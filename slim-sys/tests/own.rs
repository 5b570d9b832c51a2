//! SLIM's own descriptors. One test: no other thread of its process may take a number that it has just released.

use std::fs::File;
use std::os::fd::AsRawFd;

use slim_sys::OwnFd;
use slim_sys::fds::{floor, is_internal};

#[test]
fn our_descriptors_are_above_the_floor_and_registered_while_owned() {
    let make = || OwnFd::make(|| File::open("/dev/null")).unwrap();
    let own = make();
    let number = own.raw();
    assert!(number >= floor(), "{number} is below {}", floor());
    assert!(is_internal(number));
    let given_away = own.into_owned();
    assert_eq!(given_away.as_raw_fd(), number);
    assert!(!is_internal(number));
    let own = make();
    let number = own.raw();
    assert!(is_internal(number));
    drop(own);
    assert!(!is_internal(number));
}
