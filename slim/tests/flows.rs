//! Flows: states, ends of the stream, errors, plain peers.

mod common;

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::*;
use slim::{
    AcceptError, ConnectError, FlowChange, SessionError, SessionOptions, StreamState, TransferError,
};

#[test]
fn bytes_go_both_ways_and_a_half_close_ends_one_direction() {
    let session = session();
    let endpoint = listen(&session);
    let (near, far) = pair(&session, &endpoint);
    let (head, tail) = (b"vec".as_slice(), b"tored".as_slice());
    let pieces = [IoSlice::new(head), IoSlice::new(b""), IoSlice::new(tail)];
    assert_eq!(near.try_send_vectored(&pieces), Ok(8));
    let (mut a, mut b) = ([0; 3], [0; 5]);
    far.recv_exact(&mut a, LIMIT).unwrap();
    let mut into = [IoSliceMut::new(&mut []), IoSliceMut::new(&mut b)];
    assert_eq!(far.try_recv_vectored(&mut into), Ok(5));
    assert_eq!((&a[..], &b[..]), (head, tail));
    assert_eq!(far.try_recv(&mut a), Err(TransferError::WouldBlock));
    assert_eq!(
        far.recv(&mut a, Some(Duration::from_millis(20))),
        Err(TransferError::TimedOut)
    );

    near.finish().unwrap();
    assert_eq!(near.try_send(b"x"), Err(TransferError::ShutDown));
    assert_eq!(far.recv(&mut a, LIMIT), Ok(0));
    assert_eq!(far.recv(&mut a, LIMIT), Ok(0));
    far.send_all(b"on", LIMIT).unwrap();
    near.recv_exact(&mut a[..2], LIMIT).unwrap();
    far.finish().unwrap();
    assert_eq!(near.recv(&mut a, LIMIT), Ok(0));
    assert_eq!(near.recv_exact(&mut a, LIMIT), Err(TransferError::Ended));
    let stats = near.stats();
    assert_eq!((stats.sent, stats.received, stats.resumes), (8, 2, 0));
    let sums = session.stats();
    assert_eq!((sums.open, sums.flows, sums.failed), (2, 2, 0));
    assert_eq!((sums.total.sent, sums.total.received), (10, 10));
    drop((near, far));
    let sums = session.stats();
    assert_eq!((sums.open, sums.total.sent), (0, 10));
}

#[test]
fn progress_reports_updates_and_the_descriptor_is_quiet_afterwards() {
    let session = session();
    let endpoint = listen(&session);
    let mut updates = Vec::new();
    assert!(!session.progress(&mut updates));
    let near = session.try_connect(endpoint.local_addr()).unwrap();
    let accepted = Arc::new(Mutex::new(Vec::new()));
    let heard = accepted.clone();
    session.on_event(move |event| heard.lock().unwrap().push(*event));
    let mut far = None;
    let (mut writable, mut readable) = (false, false);
    let begun = Instant::now();
    while !readable {
        assert!(begun.elapsed() < LIMIT.unwrap());
        updates.clear();
        session.wait(&mut updates, LIMIT);
        for update in &updates {
            if update.acceptable {
                assert_eq!(update.id, endpoint.id());
                far = endpoint.try_accept().ok().or(far);
            }
            if update.id == near.id() && update.writable && !writable {
                writable = true;
                assert_eq!(near.try_send(b"ping"), Ok(4));
            }
            if far.as_ref().is_some_and(|far| far.id() == update.id) && update.readable {
                let mut buf = [0; 8];
                match far.as_ref().unwrap().try_recv(&mut buf) {
                    Ok(n) => readable = &buf[..n] == b"ping",
                    Err(e) => assert_eq!(e, TransferError::WouldBlock),
                }
            }
        }
    }
    let far = far.unwrap();
    near.wait_negotiated(LIMIT);
    far.wait_negotiated(LIMIT);
    let seen = |id: u64, change: FlowChange| {
        let accepted = accepted.clone();
        let session = &session;
        move || {
            session.progress(&mut Vec::new());
            let all = accepted.lock().unwrap();
            all.iter().any(|e| e.flow == id && e.change == change)
        }
    };
    wait_until("told", seen(near.id(), FlowChange::Connected));
    wait_until("told", seen(far.id(), FlowChange::Protected));
    assert!(session.events().is_empty());
    // After everything is reported, the descriptor is not readable.
    wait_until("quiet", || {
        session.progress(&mut Vec::new());
        let fd = std::os::fd::AsRawFd::as_raw_fd(&session);
        slim_sys::poll(fd, libc::POLLIN, Some(Duration::from_millis(50))) == 0
    });
}

#[test]
fn a_full_flow_is_writable_again_when_the_peer_reads() {
    let session = session();
    let endpoint = listen(&session);
    let (near, far) = pair(&session, &endpoint);
    session.progress(&mut Vec::new());
    let block = vec![7; 1 << 20];
    let mut sent = 0;
    loop {
        match near.try_send(&block) {
            Ok(n) => sent += n,
            Err(e) => {
                assert_eq!(e, TransferError::WouldBlock);
                break;
            }
        }
    }
    let reader = std::thread::spawn(move || {
        let mut got = vec![0; sent];
        far.recv_exact(&mut got, LIMIT).unwrap();
        assert!(got.iter().all(|b| *b == 7));
        far
    });
    let mut updates = Vec::new();
    let writable = |u: &slim::Update| u.id == near.id() && u.writable;
    while !updates.iter().any(writable) {
        updates.clear();
        assert!(session.wait(&mut updates, LIMIT), "never writable again");
    }
    assert!(near.try_send(b"more").is_ok());
    drop(reader.join().unwrap());
}

#[test]
fn flows_with_a_plain_server_and_a_plain_client() {
    let session = session_with(&[("SLIM_HELLO_TIMEOUT", "0.1")]);
    let listener = TcpListener::bind(loopback()).unwrap();
    let near = session
        .connect(listener.local_addr().unwrap(), LIMIT)
        .unwrap();
    let mut far = listener.accept().unwrap().0;
    near.send_all(b"hello", LIMIT).unwrap();
    let mut buf = [0; 5];
    far.read_exact(&mut buf).unwrap();
    assert_eq!(near.wait_negotiated(LIMIT), StreamState::Plain);
    far.write_all(b"there").unwrap();
    near.recv_exact(&mut buf, LIMIT).unwrap();
    drop(far);
    assert_eq!(near.recv(&mut buf, LIMIT), Ok(0));
    assert_eq!(near.recv(&mut buf, LIMIT), Ok(0));
    near.close();

    let endpoint = listen(&session);
    let mut near = TcpStream::connect(endpoint.local_addr()).unwrap();
    let far = endpoint.accept(LIMIT).unwrap();
    near.write_all(b"again").unwrap();
    far.recv_exact(&mut buf, LIMIT).unwrap();
    assert_eq!(&buf, b"again");
    assert_eq!(far.wait_negotiated(LIMIT), StreamState::Plain);
    far.send_all(b"reply", LIMIT).unwrap();
    near.read_exact(&mut buf).unwrap();
    // A broken plain flow is not resumed: the program gets the kernel's error. Bytes that came before may still be received.
    near.write_all(b"last!").unwrap();
    wait_until("there", || far.stats().received == 5);
    socket_linger_0(&near);
    drop(near);
    let last = far.recv(&mut buf, LIMIT);
    assert!(
        matches!(last, Ok(5) | Err(TransferError::Lost(libc::ECONNRESET))),
        "{last:?}"
    );
    let lost = far.recv(&mut buf, LIMIT);
    assert_eq!(lost, Err(TransferError::Lost(libc::ECONNRESET)));
    assert_eq!(far.state(), StreamState::Failed(Some(libc::ECONNRESET)));
    assert_eq!(
        far.try_send(b"x"),
        Err(TransferError::Lost(libc::ECONNRESET))
    );
}

fn socket_linger_0(sock: &TcpStream) {
    let fd = std::os::fd::AsRawFd::as_raw_fd(sock);
    slim_sys::set_option(fd, libc::SOL_SOCKET, libc::SO_LINGER, &slim_sys::AT_ONCE);
}

#[test]
fn a_plain_peer_is_refused_if_slim_is_required() {
    let session = session_with(&[("SLIM", "required"), ("SLIM_HELLO_TIMEOUT", "0.1")]);
    let listener = TcpListener::bind(loopback()).unwrap();
    // The refusal may come before the connection is seen to stand.
    let near = session.try_connect(listener.local_addr().unwrap()).unwrap();
    let refused = Err(ConnectError::Kernel(libc::ECONNREFUSED));
    let connected = near.wait_connected(LIMIT);
    assert!(connected.is_ok() || connected == refused, "{connected:?}");
    let state = near.wait_negotiated(LIMIT);
    assert_eq!(state, StreamState::Failed(Some(libc::ECONNREFUSED)));
    let refused = near.recv(&mut [0], LIMIT);
    assert_eq!(refused, Err(TransferError::Lost(libc::ECONNREFUSED)));
}

#[test]
fn with_slim_off_a_flow_is_plain_at_once() {
    let session = session_with(&[("SLIM", "off")]);
    let endpoint = listen(&session);
    let near = session.connect(endpoint.local_addr(), LIMIT).unwrap();
    let far = endpoint.accept(LIMIT).unwrap();
    assert_eq!(near.wait_negotiated(LIMIT), StreamState::Plain);
    near.send_all(b"x", LIMIT).unwrap();
    assert_eq!(far.recv(&mut [0], LIMIT), Ok(1));
    assert!(far.try_send(b"").is_ok());
}

#[test]
fn kernel_errors_are_reported_with_their_number() {
    let session = session();
    // Bound but not listening: connections are refused, and no other process can listen there.
    use rustix::net::{AddressFamily, SocketType, bind, getsockname, socket};
    let taken = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&taken, &loopback()).unwrap();
    let closed = getsockname(&taken).unwrap().try_into().unwrap();
    let refused = session.connect(closed, LIMIT).unwrap_err();
    assert_eq!(refused, ConnectError::Kernel(libc::ECONNREFUSED));
    assert_eq!(
        io::Error::from(refused).kind(),
        io::ErrorKind::ConnectionRefused
    );
    let endpoint = listen(&session);
    let taken = session.listen(endpoint.local_addr()).unwrap_err();
    assert!(
        matches!(
            taken,
            SessionError::Kernel("bind" | "listen", libc::EADDRINUSE)
        ),
        "{taken}"
    );
    assert_eq!(endpoint.try_accept().unwrap_err(), AcceptError::WouldBlock);
    let short = Some(Duration::from_millis(10));
    assert_eq!(endpoint.accept(short).unwrap_err(), AcceptError::TimedOut);
}

#[test]
fn a_reset_gives_the_peer_econnreset() {
    let session = session();
    let endpoint = listen(&session);
    let (near, far) = pair(&session, &endpoint);
    near.send_all(b"x", LIMIT).unwrap();
    near.reset();
    let mut got = [0; 4];
    let first = far.recv(&mut got, LIMIT);
    assert!(
        matches!(first, Ok(1) | Err(TransferError::Lost(libc::ECONNRESET))),
        "{first:?}"
    );
    assert_eq!(
        far.recv(&mut got, LIMIT),
        Err(TransferError::Lost(libc::ECONNRESET))
    );
    assert_eq!(far.state(), StreamState::Failed(Some(libc::ECONNRESET)));
    assert_eq!(session.stats().failed, 1);
}

#[test]
fn two_sessions_with_different_job_keys_in_one_process() {
    let key = |key: &str| session_with(&[("SLIM_JOB_KEY", key)]);
    let (one, other) = (key("the first job's key"), key("the other job's key"));
    let (at_one, at_other) = (listen(&one), listen(&other));
    drop(pair(&one, &at_one));
    drop(pair(&other, &at_other));
    // Between different jobs a flow is plain TCP.
    let near = one.connect(at_other.local_addr(), LIMIT).unwrap();
    let far = at_other.accept(LIMIT).unwrap();
    assert_eq!(near.wait_negotiated(LIMIT), StreamState::Plain);
    near.send_all(b"plain", LIMIT).unwrap();
    far.recv_exact(&mut [0; 5], LIMIT).unwrap();
    drop((near, far));
    one.close(Duration::from_secs(10)).unwrap();
    drop(pair(&other, &at_other));
    let after = at_one.try_accept().unwrap_err();
    assert_eq!(after, AcceptError::Closed);
    other.close(Duration::from_secs(10)).unwrap();
}

#[test]
fn closing_a_session_closes_its_flows_and_endpoints() {
    let session = session();
    let endpoint = listen(&session);
    let (near, far) = pair(&session, &endpoint);
    session.close(Duration::from_secs(10)).unwrap();
    for flow in [&near, &far] {
        assert_eq!(flow.state(), StreamState::Closed);
        assert_eq!(flow.try_recv(&mut [0]), Err(TransferError::Closed));
        assert_eq!(flow.try_send(&[0]), Err(TransferError::Closed));
        assert_eq!(flow.finish(), Err(TransferError::Closed));
    }
    assert!(endpoint.accept(LIMIT).is_err());
    assert_eq!(SessionOptions::new("x").config.log, slim::LogLevel::Off);
}
