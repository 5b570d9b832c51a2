//! Ends of flows: a close with bytes in flight, with and without a killed connection; a close by the peer; the death of the peer.

mod common;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::*;
use slim::{StreamState, TransferError};

#[test]
fn sent_bytes_are_delivered_after_a_close_although_the_connection_is_killed() {
    for how in kills() {
        for n in 0..20 {
            let (session, theirs) = (session(), session());
            let endpoint = listen(&theirs);
            let (near, far) = pair(&session, &endpoint);
            let sent = vec![n; 1 << 20];
            let mut at = 0;
            // Send until the kernels have no more room. Then bytes stay in flight until the peer receives.
            while let Ok(taken) = near.try_send(&sent[at..]) {
                at += taken;
                if at == sent.len() {
                    break;
                }
            }
            let rest = sent.len() - at;
            let reader = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(u64::from(n)));
                let mut got: Vec<u8> = Vec::new();
                let mut buf = vec![0; 64 << 10];
                loop {
                    match far.recv(&mut buf, LIMIT).unwrap() {
                        0 => return got,
                        some => got.extend(&buf[..some]),
                    }
                }
            });
            near.send_all(&sent[at..], LIMIT).unwrap();
            if n % 2 == 0 {
                kill(&near, how);
                near.close();
            } else {
                let ends = near.connection();
                near.close();
                if let Some(ends) = ends {
                    kill_ends(ends, how);
                }
            }
            // Waits until the closed flow's bytes are delivered.
            session.close(Duration::from_secs(30)).unwrap();
            let got = reader.join().unwrap();
            assert!(got == sent, "{how:?} {n}: {} bytes, {rest} late", got.len());
        }
    }
}

#[test]
fn a_flow_closed_by_the_peer_ends_and_refuses_sends() {
    let session = session();
    let endpoint = listen(&session);
    let (near, far) = pair(&session, &endpoint);
    far.send_all(b"bye", LIMIT).unwrap();
    far.close();
    let mut buf = [0; 8];
    near.recv_exact(&mut buf[..3], LIMIT).unwrap();
    assert_eq!(near.recv(&mut buf, LIMIT), Ok(0));
    let begun = Instant::now();
    let refused = loop {
        match near.send(&[1; 100], LIMIT) {
            Ok(_) => std::thread::sleep(Duration::from_millis(5)),
            Err(e) => break e,
        }
        assert!(
            begun.elapsed() < Duration::from_secs(10),
            "sends still succeed after the peer has closed"
        );
    };
    let errno = refused.errno();
    assert!(
        refused == TransferError::ShutDown
            || errno == Some(libc::EPIPE)
            || errno == Some(libc::ECONNRESET),
        "{refused:?}"
    );
}

/// Starts the test program again, as a process that accepts one flow. Returns its address.
fn server() -> (Child, std::net::SocketAddr) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "as_a_child", "--nocapture"])
        .env("SLIM_LAB_CHILD", "1")
        .stdout(Stdio::piped())
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let addr = lines
        .map_while(Result::ok)
        .find_map(|line| line.split_once("at ")?.1.trim().parse().ok());
    (child, addr.expect("the child tells where it listens"))
}

/// Entry point of the child process; in a normal test run it does nothing.
#[test]
fn as_a_child() {
    if std::env::var_os("SLIM_LAB_CHILD").is_none() {
        return;
    }
    let session = session();
    let endpoint = listen(&session);
    println!("at {}", endpoint.local_addr());
    let flow = endpoint.accept(LIMIT).unwrap();
    flow.send_all(b"hello", LIMIT).unwrap();
    // The parent kills this process during the receive.
    let end = flow.recv(&mut [0; 16], LIMIT);
    println!("{end:?}");
}

#[test]
fn death_of_the_peer_is_an_error_or_an_end_within_seconds() {
    for waits in [true, false] {
        let session = session();
        let (mut child, addr) = server();
        let near = session.connect(addr, LIMIT).unwrap();
        near.recv_exact(&mut [0; 5], LIMIT).unwrap();
        assert_eq!(near.wait_negotiated(LIMIT), StreamState::Protected);
        let begun = Instant::now();
        if waits {
            // The peer dies while a thread waits in `recv`.
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| near.recv(&mut [0; 16], LIMIT));
                std::thread::sleep(Duration::from_millis(20));
                child.kill().unwrap();
                let end = waiting.join().unwrap();
                println!("{end:?} after {:?}", begun.elapsed());
                let ok = matches!(end, Ok(0) | Err(TransferError::Lost(_)));
                assert!(ok, "{end:?}");
            });
        } else {
            child.kill().unwrap();
            let mut updates = Vec::new();
            let ended = |state| matches!(state, StreamState::Failed(_));
            while !ended(near.state()) {
                session.wait(&mut updates, Some(Duration::from_millis(10)));
                // An end of the stream is also valid: the dead process's kernel may have sent a FIN.
                if near.try_recv(&mut [0; 16]) == Ok(0) {
                    break;
                }
                assert!(
                    begun.elapsed() < Duration::from_secs(10),
                    "{:?}",
                    near.state()
                );
            }
        }
        assert!(
            begun.elapsed() < Duration::from_secs(5),
            "{:?}",
            begun.elapsed()
        );
        child.wait().unwrap();
    }
}
