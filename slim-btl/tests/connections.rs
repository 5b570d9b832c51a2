//! The handshake of two components when connections break in the middle of it.

mod played;

use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use played::{
    LIMIT, Listening, address, control, data, frame, heard, hello, module, nobody_is_lost, open,
    read, reset, turn, until,
};
use slim_btl::hdr::FrameKind;
use slim_btl::proc::ProcName;

#[test]
fn a_connection_that_breaks_before_it_is_accepted_is_made_anew() {
    let _turn = turn();
    let module = module(LIMIT);
    let peer = Listening::new(9);
    peer.send(&module);
    for _ in 0..5 {
        reset(peer.accept(&module));
    }
    let mut stream = peer.accept_and_get_data(&module);
    nobody_is_lost();
    stream.write_all(&control(FrameKind::Goodbye)).unwrap();
    module.close();
}

#[test]
fn a_peer_that_refuses_connections_is_lost() {
    let _turn = turn();
    let module = module(LIMIT);
    let peer = Listening::new(9);
    peer.send(&module);
    reset(peer.accept(&module));
    drop(peer);
    until(&module, || {
        heard(|heard| (!heard.lost.is_empty()).then_some(()))
    });
    assert_eq!(heard(|heard| heard.lost.clone()), [9]);
    module.close();
}

/// The connector has not heard of the acceptance, and connects anew.
#[test]
fn an_accepted_connection_that_breaks_before_it_is_used_is_replaced() {
    let _turn = turn();
    let module = module(LIMIT);
    for wait in [true, false] {
        let mut first = hello(&module, ProcName(3));
        if wait {
            assert_eq!(frame(&module, &mut first).unwrap().0, FrameKind::Accept);
        }
        let mut second = hello(&module, ProcName(3));
        reset(first);
        assert_eq!(frame(&module, &mut second).unwrap().0, FrameKind::Accept);
        if wait {
            reset(second);
            continue;
        }
        second.write_all(&control(FrameKind::Confirm)).unwrap();
        second.write_all(&data(b"whatever")).unwrap();
        until(&module, || heard(|heard| heard.delivered.pop()));
        second.write_all(&control(FrameKind::Goodbye)).unwrap();
    }
    nobody_is_lost();
    module.close();
}

/// The session has not negotiated yet when the peer accepts, so it could not resume the connection.
#[test]
fn a_connection_that_breaks_after_it_is_accepted_and_before_it_is_protected_loses_no_fragment() {
    let _turn = turn();
    let module = open(LIMIT, LIMIT, false);
    let peer = Listening::new(9);
    let _silent = peer.control_socket();
    peer.send(&module);
    let mut first = peer.accept(&module);
    first.write_all(&control(FrameKind::Accept)).unwrap();
    let begun = Instant::now();
    until(&module, || {
        (begun.elapsed() > Duration::from_millis(20)).then_some(())
    });
    reset(first);
    // The negotiation goes on for longer than the module waits.
    let mut second = peer.accept_and_get_data(&module);
    nobody_is_lost();
    second.write_all(&control(FrameKind::Goodbye)).unwrap();
    module.close();
}

/// The module reads the hello of a connection that the peer has given up after the hello of its replacement.
#[test]
fn a_confirmed_connection_is_used_although_an_older_hello_comes_after_its_own() {
    let _turn = turn();
    for older_ends_first in [false, true] {
        let module = module(LIMIT);
        // The lower name: it refuses connections of the module.
        let peer = Listening::new(3);
        let mut newer = hello(&module, peer.name);
        assert_eq!(frame(&module, &mut newer).unwrap().0, FrameKind::Accept);
        let mut older = hello(&module, peer.name);
        assert_eq!(frame(&module, &mut older).unwrap().0, FrameKind::Accept);
        peer.send(&module);
        let mut rejected = None;
        if older_ends_first {
            reset(older);
            let mut own = peer.accept(&module);
            own.write_all(&control(FrameKind::Reject)).unwrap();
            rejected = Some(own);
        } else {
            drop(older);
        }
        newer.write_all(&control(FrameKind::Confirm)).unwrap();
        newer.write_all(&data(b"whatever")).unwrap();
        let got = until(&module, || heard(|heard| heard.delivered.pop()));
        assert_eq!(got, b"whatever");
        // What has waited for a connection comes by this one.
        assert_eq!(frame(&module, &mut newer).unwrap().0, FrameKind::Data);
        if let Some(mut own) = rejected {
            assert_eq!(frame(&module, &mut own), None);
        }
        nobody_is_lost();
        newer.write_all(&control(FrameKind::Goodbye)).unwrap();
        module.close();
    }
}

/// Two connections cross, and the one that was chosen breaks before it is confirmed.
#[test]
fn a_crossing_connection_that_breaks_loses_no_fragment() {
    let _turn = turn();
    let module = module(LIMIT);
    // The lower name: its connection is the one that is used.
    let peer = Listening::new(3);
    peer.send(&module);
    let mut ours = peer.accept(&module);
    let mut theirs = hello(&module, peer.name);
    assert_eq!(frame(&module, &mut theirs).unwrap().0, FrameKind::Accept);
    ours.write_all(&control(FrameKind::Reject)).unwrap();
    assert_eq!(frame(&module, &mut ours), None);
    reset(theirs);
    let mut again = peer.accept_and_get_data(&module);
    nobody_is_lost();
    again.write_all(&control(FrameKind::Goodbye)).unwrap();
    module.close();
}

/// The peer has rejected the connection in favour of its own, which never comes.
#[test]
fn a_rejected_connector_does_not_wait_for_ever() {
    let _turn = turn();
    let module = module(LIMIT);
    let peer = Listening::new(3);
    peer.send(&module);
    let mut first = peer.accept(&module);
    first.write_all(&control(FrameKind::Reject)).unwrap();
    let mut second = peer.accept_and_get_data(&module);
    nobody_is_lost();
    second.write_all(&control(FrameKind::Goodbye)).unwrap();
    module.close();
}

/// A peer that has said goodbye, and connects again.
#[test]
fn a_peer_that_has_left_in_order_may_come_back() {
    let _turn = turn();
    let module = module(LIMIT);
    for _ in 0..2 {
        let mut stream = hello(&module, ProcName(3));
        assert_eq!(frame(&module, &mut stream).unwrap().0, FrameKind::Accept);
        stream.write_all(&control(FrameKind::Confirm)).unwrap();
        stream.write_all(&data(b"whatever")).unwrap();
        until(&module, || heard(|heard| heard.delivered.pop()));
        stream.write_all(&control(FrameKind::Goodbye)).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        while frame(&module, &mut stream).is_some() {}
    }
    nobody_is_lost();
    module.close();
}

#[test]
fn a_stranger_that_says_nothing_is_disconnected() {
    let _turn = turn();
    let module = module(Duration::from_millis(300));
    let mut stream = TcpStream::connect(address(&module).0).unwrap();
    let begun = Instant::now();
    assert_eq!(read(&module, &mut stream, 1), None);
    assert!(begun.elapsed() > Duration::from_millis(250));
    nobody_is_lost();
    module.close();
}
