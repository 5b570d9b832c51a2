//! Flows that are opened by an endpoint's blob, without negotiation.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::*;
use hmac::{Hmac, KeyInit, Mac as _};
use sha2::Sha256;
use slim::{AcceptError, BlobError, ConnectError, Endpoint, Flow, Session, StreamState};
use slim::{SessionOptions, TransferError};

/// Both ends of a flow that is opened by the endpoint's blob.
fn pair_by_blob(session: &Session, endpoint: &Endpoint) -> (Flow, Flow) {
    let blob = endpoint.blob().unwrap();
    std::thread::scope(|scope| {
        let near = scope.spawn(|| session.connect_blob(&blob, LIMIT).unwrap());
        let far = endpoint.accept(LIMIT).unwrap();
        (near.join().unwrap(), far)
    })
}

#[test]
fn a_flow_by_blob_is_protected_at_once_and_survives_kills() {
    for how in kills() {
        // Leaves hardly any time for an answer to HELLO: the flow must be protected without one.
        let session = session_with(&[
            ("SLIM_HELLO_TIMEOUT", "0.05"),
            ("SLIM_JOB_KEY", "a key for all of the job"),
        ]);
        let endpoint = listen(&session);
        let (near, far) = pair_by_blob(&session, &endpoint);
        assert_eq!(near.state(), StreamState::Protected);
        assert_eq!(far.state(), StreamState::Protected);
        std::thread::sleep(Duration::from_millis(100));
        let server = std::thread::spawn(move || {
            let mut buf = [0; 1000];
            loop {
                match far.recv(&mut buf, LIMIT).unwrap() {
                    0 => return far.stats().resumes,
                    n => far.send_all(&buf[..n], LIMIT).unwrap(),
                }
            }
        });
        let mut rng = fastrand::Rng::with_seed(11);
        let mut got = vec![0; 20_000];
        for n in 1..=20 {
            let sent: Vec<u8> = (0..20_000).map(|_| rng.u8(..)).collect();
            near.send_all(&sent[..7000], LIMIT).unwrap();
            let before = near.stats().resumes;
            wait_until("killed", || {
                session.progress(&mut Vec::new());
                kill(&near, how)
            });
            near.send_all(&sent[7000..], LIMIT).unwrap();
            near.recv_exact(&mut got, LIMIT).unwrap();
            assert!(got == sent, "{how:?} {n}");
            wait_resumed(&session, &near, before);
        }
        near.finish().unwrap();
        assert_eq!(near.recv(&mut got, LIMIT), Ok(0));
        assert!(server.join().unwrap() >= 20);
    }
}

#[test]
fn one_endpoint_accepts_flows_by_address_and_by_blob() {
    let session = session();
    for addr in ["127.0.0.1:0", "0.0.0.0:0", "[::]:0", "[::1]:0"] {
        let Ok(endpoint) = session.listen(addr.parse().unwrap()) else {
            println!("skip: no IPv6 here");
            continue;
        };
        assert_eq!(endpoint.blob().unwrap(), endpoint.blob().unwrap());
        let (near, far) = pair_by_blob(&session, &endpoint);
        near.send_all(b"named", LIMIT).unwrap();
        let mut buf = [0; 5];
        far.recv_exact(&mut buf, LIMIT).unwrap();
        let mut to = endpoint.local_addr();
        if to.ip().is_unspecified() {
            to.set_ip([127, 0, 0, 1].into());
        }
        let near = session.connect(to, LIMIT).unwrap();
        let far = endpoint.accept(LIMIT).unwrap();
        near.send_all(b"asked", LIMIT).unwrap();
        far.recv_exact(&mut buf, LIMIT).unwrap();
        assert_eq!(&buf, b"asked");
    }
}

#[test]
fn progress_reports_when_a_flow_by_blob_is_open_at_both_ends() {
    let session = session();
    let endpoint = listen(&session);
    let blob = endpoint.blob().unwrap();
    let near = session.try_connect_blob(&blob).unwrap();
    assert_eq!(near.try_send(b"x"), Err(TransferError::WouldBlock));
    let (mut far, mut updates) = (None, Vec::new());
    let begun = Instant::now();
    while far.is_none() || near.state() != StreamState::Protected {
        assert!(begun.elapsed() < LIMIT.unwrap());
        updates.clear();
        session.wait(&mut updates, LIMIT);
        if updates
            .iter()
            .any(|u| u.id == endpoint.id() && u.acceptable)
        {
            match endpoint.try_accept() {
                Ok(flow) => far = Some(flow),
                Err(e) => assert_eq!(e, AcceptError::WouldBlock),
            }
        }
    }
    // The first bytes of the stream, directly after the messages of the introduction.
    near.post(vec![5; 100_000].into()).unwrap();
    let mut got = vec![0; 100_000];
    std::thread::scope(|scope| {
        scope.spawn(|| near.wait_completed(LIMIT).unwrap());
        far.unwrap().recv_exact(&mut got, LIMIT).unwrap();
    });
    assert!(got.iter().all(|b| *b == 5));
}

#[test]
fn blobs_of_other_jobs_and_garbage_are_refused() {
    let session = session();
    let endpoint = listen(&session);
    let blob = endpoint.blob().unwrap();
    let refused = |session: &Session, blob: &[u8]| match session.try_connect_blob(blob) {
        Err(ConnectError::Blob(e)) => e,
        other => panic!("{other:?}"),
    };
    let keyed = session_with(&[("SLIM_JOB_KEY", "a key of another job")]);
    assert_eq!(refused(&keyed, &blob), BlobError::OtherJob);
    let other = Session::open(SessionOptions::new("another job")).unwrap();
    assert_eq!(refused(&other, &blob), BlobError::OtherJob);
    assert_eq!(refused(&session, b""), BlobError::Garbage);
    assert_eq!(refused(&session, &blob[1..]), BlobError::Garbage);
    let mut changed = blob.clone();
    changed[30] ^= 1;
    assert_eq!(refused(&session, &changed), BlobError::OtherJob);
    drop(endpoint);
    let gone = session.connect_blob(&blob, LIMIT).unwrap_err();
    // The agent may hold the listener for a moment: then the kernel accepts the connection, and resets it.
    let refused = [libc::ECONNREFUSED, libc::ECONNRESET].map(ConnectError::Kernel);
    assert!(refused.contains(&gone), "{gone:?}");
}

#[test]
fn peers_without_the_blob_are_refused_and_do_not_block_others() {
    let session = session();
    let endpoint = listen(&session);
    let blob = endpoint.blob().unwrap();
    // More than the door's limit of guests.
    let silent: Vec<TcpStream> = (0..150)
        .map(|_| TcpStream::connect(door(&blob)).unwrap())
        .collect();
    let mut noisy = TcpStream::connect(door(&blob)).unwrap();
    noisy.write_all(&[7; 500]).unwrap();
    assert_eq!(endpoint.try_accept().unwrap_err(), AcceptError::WouldBlock);
    let (near, far) = pair_by_blob(&session, &endpoint);
    near.send_all(b"x", LIMIT).unwrap();
    far.recv_exact(&mut [0], LIMIT).unwrap();
    noisy.set_read_timeout(LIMIT).unwrap();
    let end = noisy.read(&mut [0; 1]);
    assert!(matches!(end, Ok(0) | Err(_)), "{end:?}");
    drop(silent);
    assert_eq!(endpoint.try_accept().unwrap_err(), AcceptError::WouldBlock);
}

/// The same blob with other addresses of the door. Without a job key, anyone with a blob can make such a blob.
fn with_doors_at(blob: &[u8], doors: &[std::net::SocketAddr]) -> Vec<u8> {
    let mut bytes = blob[..8].to_vec();
    bytes.push(doors.len() as u8);
    for at in doors {
        let std::net::IpAddr::V4(ip) = at.ip() else {
            panic!("{at}");
        };
        bytes.extend(ip.to_ipv6_mapped().octets());
        bytes.extend(at.port().to_be_bytes());
    }
    let secret = 9 + 18 * usize::from(blob[8]);
    bytes.extend(&blob[secret..secret + 32]);
    let mut code = Hmac::<Sha256>::new_from_slice(&[]).unwrap();
    code.update(b"slim blob v1");
    code.update(b"test");
    code.update(&bytes);
    bytes.extend(code.finalize().into_bytes());
    bytes
}

#[test]
fn all_addresses_of_a_blob_are_tried_in_order_without_blocking() {
    let session = session();
    let endpoint = listen(&session);
    let blob = endpoint.blob().unwrap();
    // One address refuses connections, and one accepts them and never answers.
    let closed = TcpListener::bind(loopback()).unwrap().local_addr().unwrap();
    let silent = TcpListener::bind(loopback()).unwrap();
    let doors = [closed, silent.local_addr().unwrap(), door(&blob)];
    for (doors, least) in [(&doors[..], 3), (&[closed, doors[2]], 0)] {
        let begun = Instant::now();
        let near = session
            .try_connect_blob(&with_doors_at(&blob, doors))
            .unwrap();
        assert!(begun.elapsed() < Duration::from_secs(1));
        let (mut far, mut updates) = (None, Vec::new());
        // Only updates make the program look.
        while far.is_none() || near.state() != StreamState::Protected {
            assert!(begun.elapsed() < Duration::from_secs(least + 2));
            updates.clear();
            session.wait(&mut updates, LIMIT);
            far = endpoint.try_accept().ok().or(far);
        }
        assert!(begun.elapsed() >= Duration::from_secs(least));
        assert_eq!(near.remote_addr(), door(&blob));
        let far = far.unwrap();
        near.send_all(b"x", LIMIT).unwrap();
        far.recv_exact(&mut [0], LIMIT).unwrap();
    }
    // All fail: so does the flow, with the last error.
    let near = session.try_connect_blob(&with_doors_at(&blob, &[closed, closed]));
    let failed = near.and_then(|near| near.wait_connected(LIMIT));
    assert_eq!(failed, Err(ConnectError::Kernel(libc::ECONNREFUSED)));
}

/// Forwards all bytes until the end of the stream. Returns them.
fn pass_on(mut from: TcpStream, mut to: TcpStream) -> Vec<u8> {
    let (mut all, mut buf) = (Vec::new(), [0; 4096]);
    while let Ok(n @ 1..) = from.read(&mut buf) {
        all.extend(&buf[..n]);
        if to.write_all(&buf[..n]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(std::net::Shutdown::Write);
    all
}

#[test]
fn recorded_messages_of_an_introduction_admit_nobody() {
    let session = session();
    let endpoint = listen(&session);
    let blob = endpoint.blob().unwrap();
    // A proxy on the path records the connector's bytes.
    let tap = TcpListener::bind(loopback()).unwrap();
    let tapped = with_doors_at(&blob, &[tap.local_addr().unwrap()]);
    let at = door(&blob);
    let tap = std::thread::spawn(move || {
        let near = tap.accept().unwrap().0;
        let far = TcpStream::connect(at).unwrap();
        let (a, b) = (near.try_clone().unwrap(), far.try_clone().unwrap());
        let back = std::thread::spawn(move || pass_on(b, a));
        let said = pass_on(near, far);
        back.join().unwrap();
        said
    });
    let (near, far) = std::thread::scope(|scope| {
        let near = scope.spawn(|| session.connect_blob(&tapped, LIMIT).unwrap());
        let far = endpoint.accept(LIMIT).unwrap();
        (near.join().unwrap(), far)
    });
    near.send_all(b"secret", LIMIT).unwrap();
    far.recv_exact(&mut [0; 6], LIMIT).unwrap();
    near.close();
    assert_eq!(far.recv(&mut [0], LIMIT), Ok(0));
    far.close();
    let said = tap.join().unwrap();
    assert!(said.starts_with(b"SLIMINT1") && said.ends_with(b"secret"));
    // The recorded bytes are sent again. The door may answer with WELCOME, but the recorded proof is for another WELCOME.
    let mut again = TcpStream::connect(at).unwrap();
    again.write_all(&said).unwrap();
    again.set_read_timeout(LIMIT).unwrap();
    let answer = std::thread::spawn(move || {
        let mut answer = Vec::new();
        let end = again.read_to_end(&mut answer);
        (answer, end)
    });
    let begun = Instant::now();
    while !answer.is_finished() {
        assert!(begun.elapsed() < LIMIT.unwrap());
        assert_eq!(endpoint.try_accept().unwrap_err(), AcceptError::WouldBlock);
    }
    let (answer, end) = answer.join().unwrap();
    assert!(
        answer.is_empty() || answer.starts_with(b"SLIMWEL1"),
        "{end:?}"
    );
}

/// Entry point of the child process; in a normal test run it does nothing.
#[test]
fn as_a_child() {
    if std::env::var_os("SLIM_LAB_CHILD").is_none() {
        return;
    }
    let session = session();
    let endpoint = listen(&session);
    let hex: String = endpoint
        .blob()
        .unwrap()
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect();
    println!("blob {hex}");
    let flow = endpoint.accept(LIMIT).unwrap();
    let mut buf = [0; 5];
    flow.recv_exact(&mut buf, LIMIT).unwrap();
    flow.send_all(&buf, LIMIT).unwrap();
    // The parent kills this process during the receive.
    let end = flow.recv(&mut buf, LIMIT);
    println!("{end:?}");
}

#[test]
fn a_flow_to_another_process_is_resumed_and_ends_with_the_process() {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "as_a_child", "--nocapture"])
        .env("SLIM_LAB_CHILD", "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let hex = lines
        .map_while(Result::ok)
        .find_map(|line| Some(line.split_once("blob ")?.1.trim().to_owned()))
        .expect("the child prints its blob");
    let blob: Vec<u8> = (0..hex.len() / 2)
        .map(|n| u8::from_str_radix(&hex[2 * n..2 * n + 2], 16).unwrap())
        .collect();
    let session = session();
    let near = session.connect_blob(&blob, LIMIT).unwrap();
    assert_eq!(near.state(), StreamState::Protected);
    for how in kills() {
        let before = near.stats().resumes;
        wait_until("killed", || {
            session.progress(&mut Vec::new());
            kill(&near, how)
        });
        wait_resumed(&session, &near, before);
    }
    near.send_all(b"there", LIMIT).unwrap();
    let mut buf = [0; 5];
    near.recv_exact(&mut buf, LIMIT).unwrap();
    assert_eq!(&buf, b"there");
    child.kill().unwrap();
    let begun = Instant::now();
    let end = near.recv(&mut buf, LIMIT);
    assert!(
        matches!(end, Ok(0) | Err(TransferError::Lost(_))),
        "{end:?}"
    );
    assert!(begun.elapsed() < Duration::from_secs(5));
    child.wait().unwrap();
}
