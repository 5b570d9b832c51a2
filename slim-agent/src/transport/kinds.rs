//! Connections of each kind, for tests: TCP, and pipes in memory, which have no descriptors.

#[path = "../../tests/common/memory.rs"]
mod memory;

use std::net::{Ipv4Addr, TcpListener, TcpStream};

use slim_sys::OwnFd;
use tokio::runtime;

use super::tcp::TcpConnection;
use super::{Connection, readable};

pub(crate) type KindEnds = (Box<dyn Connection>, Box<dyn Connection>);

fn tcp() -> KindEnds {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let addr = listener.local_addr().unwrap();
    let near = OwnFd::make(|| TcpStream::connect(addr)).unwrap();
    let far = OwnFd::make(|| Ok(listener.accept()?.0)).unwrap();
    let connection = |fd| Box::new(TcpConnection::new(fd, false).unwrap());
    (connection(near), connection(far))
}

fn in_memory() -> KindEnds {
    let (near, far) = memory::pipe(None);
    (Box::new(near), Box::new(far))
}

/// Runs a test for each kind of connection. It passes the test a function that makes a pair of connected ends.
pub(crate) fn over_each_kind(test: impl AsyncFn(fn() -> KindEnds)) {
    for (name, ends) in [("TCP", tcp as fn() -> KindEnds), ("in memory", in_memory)] {
        println!("{name}");
        let runtime = runtime::Builder::new_current_thread().enable_all().build();
        runtime.unwrap().block_on(test(ends));
    }
}

/// Sends all of `data`.
pub(crate) fn send_all(connection: &dyn Connection, data: &[u8]) {
    assert_eq!(connection.send(data).unwrap(), data.len());
}

/// Waits for the next bytes; returns at most `most`.
pub(crate) async fn next(connection: &dyn Connection, most: usize) -> Vec<u8> {
    let mut buf = vec![0; most];
    loop {
        match connection.recv(&mut buf) {
            Ok(n) => {
                buf.truncate(n);
                return buf;
            }
            Err(_) => readable(connection).await.unwrap(),
        }
    }
}
