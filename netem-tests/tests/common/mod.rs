//! Helpers for all tests in the lab.
#![allow(dead_code, reason = "each test program uses only some of these items")]

pub mod calls;
pub mod component;
pub mod events;
pub mod framework;
pub mod guest;
pub mod jobs;
pub mod kills;
pub mod launcher;
pub mod python;
pub mod rxe;
pub mod slurm;
pub mod streams;

use std::{
    net::{TcpListener, TcpStream},
    time::{Duration, Instant},
};

use slim_lab::{Lab, Netns, Node, skip::skip};

/// Whether to run the long versions of tests (`SLIM_SOAK=1`).
pub fn soak() -> bool {
    std::env::var("SLIM_SOAK").is_ok_and(|v| v == "1")
}

/// A lab for `test`, or `None` with the skip and its reason printed.
pub fn lab(test: &str, nodes: usize, paths: usize) -> Option<Lab> {
    if let Err(error) = Lab::check() {
        skip(test, error);
        return None;
    }
    Some(
        Lab::builder()
            .nodes(nodes)
            .paths(paths)
            .name(test)
            .build()
            .expect("make a lab"),
    )
}

/// A TCP connection made by `from`, accepted by `to`, over `path`: (connector's end, acceptor's end).
pub fn connection(from: &Node, to: &Node, path: usize) -> (TcpStream, TcpStream) {
    let address = (to.address(path), 0);
    let listener = to
        .net()
        .run(|| TcpListener::bind(address))
        .unwrap()
        .expect("listen");
    let target = listener.local_addr().unwrap();
    let connector = from
        .net()
        .run(|| TcpStream::connect(target))
        .unwrap()
        .expect("connect");
    let (acceptor, _) = listener.accept().expect("accept");
    for stream in [&connector, &acceptor] {
        stream
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        stream.set_nodelay(true).unwrap();
    }
    (connector, acceptor)
}

/// Waits until `condition` holds, for at most `limit`. Returns whether it does.
pub fn eventually(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while start.elapsed() < limit {
        if condition() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    condition()
}

/// The network namespaces of the first two nodes, for faults on both.
pub fn both(lab: &Lab) -> [&Netns; 2] {
    [lab.node(0).net(), lab.node(1).net()]
}
