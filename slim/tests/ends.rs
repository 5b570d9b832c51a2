//! Flows that end: closed with bytes on the way, by processes that die, by a killed connection at the last moment.

mod common;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::*;
use slim::{StreamState, TransferError};

#[test]
fn what_is_owed_after_a_close_is_delivered_whatever_breaks() {
    for how in kills() {
        for n in 0..20 {
            let (session, theirs) = (session(), session());
            let endpoint = listen(&theirs);
            let (near, far) = pair(&session, &endpoint);
            let sent = vec![n; 1 << 20];
            let mut at = 0;
            // Until the kernels have no more room: some of it is on its way for as long as nobody receives.
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
            // It waits for what the closed flow owes.
            session.close(Duration::from_secs(30)).unwrap();
            let got = reader.join().unwrap();
            assert!(got == sent, "{how:?} {n}: {} bytes, {rest} late", got.len());
        }
    }
}

#[test]
fn a_flow_that_is_closed_by_the_peer_ends_and_refuses() {
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
            "bytes for nobody"
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

/// The test program again, as a process that accepts one flow.
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

/// Not a test by itself.
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
    // Its parent kills it.
    let end = flow.recv(&mut [0; 16], LIMIT);
    println!("{end:?}");
}

#[test]
fn a_peer_that_dies_is_an_error_or_an_end_and_soon() {
    for waits in [true, false] {
        let session = session();
        let (mut child, addr) = server();
        let near = session.connect(addr, LIMIT).unwrap();
        near.recv_exact(&mut [0; 5], LIMIT).unwrap();
        assert_eq!(near.wait_negotiated(LIMIT), StreamState::Protected);
        let begun = Instant::now();
        if waits {
            // It dies while a thread waits.
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
                // An orderly end is no failure: the kernel of the dead process said so.
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
