//! The door of an endpoint under connections that do not say who they are.

mod common;

use std::io::Read;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use common::*;
use slim::{AcceptError, Endpoint, Flow, Session, StreamState};

/// More than the door's limit of guests.
const SILENT: usize = 150;

fn silent(blob: &[u8]) -> Vec<TcpStream> {
    let connect = |_| TcpStream::connect(door(blob)).unwrap();
    (0..SILENT).map(connect).collect()
}

/// Goes on with both ends until the endpoint has admitted the connector.
fn admit(endpoint: &Endpoint, near: &Flow) -> Flow {
    let begun = Instant::now();
    loop {
        assert_eq!(near.state(), StreamState::Connecting);
        match endpoint.try_accept() {
            Ok(far) => return far,
            Err(e) => assert_eq!(e, AcceptError::WouldBlock),
        }
        assert!(begun.elapsed() < LIMIT.unwrap(), "not admitted");
    }
}

fn is_open(session: &Session, near: &Flow, far: &Flow) {
    near.wait_connected(LIMIT).unwrap();
    near.send_all(b"x", LIMIT).unwrap();
    far.recv_exact(&mut [0], LIMIT).unwrap();
    session.progress(&mut Vec::new());
}

#[test]
fn silent_connections_do_not_push_out_a_connector_that_has_introduced_itself() {
    let session = session();
    let endpoint = listen(&session);
    let blob = endpoint.blob().unwrap();
    // The introduction has arrived before the endpoint looks at any connection.
    let near = session.try_connect_blob(&blob).unwrap();
    let crowd = silent(&blob);
    let far = admit(&endpoint, &near);
    is_open(&session, &near, &far);
    // The endpoint has answered the introduction before the silent connections come.
    let near = session.try_connect_blob(&blob).unwrap();
    assert_eq!(endpoint.try_accept().unwrap_err(), AcceptError::WouldBlock);
    let more = silent(&blob);
    let far = admit(&endpoint, &near);
    is_open(&session, &near, &far);
    drop((crowd, more));
}

#[test]
fn a_silent_connection_is_closed_after_its_time_although_nobody_accepts() {
    let session = session();
    let endpoint = listen(&session);
    let blob = endpoint.blob().unwrap();
    let mut crowd = TcpStream::connect(door(&blob)).unwrap();
    assert_eq!(endpoint.try_accept().unwrap_err(), AcceptError::WouldBlock);
    let begun = Instant::now();
    crowd.set_nonblocking(true).unwrap();
    loop {
        // Makes progress, and does not accept.
        session.wait(&mut Vec::new(), Some(Duration::from_secs(1)));
        match crowd.read(&mut [0]) {
            Ok(0) => break,
            end => assert!(end.is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock)),
        }
        let age = begun.elapsed();
        assert!(age < Duration::from_secs(15), "open for {age:?}");
    }
    let age = begun.elapsed();
    assert!(age > Duration::from_secs(9), "closed after {age:?}");
}
