//! Faults that tell packets apart by more than their direction: each has the promised effect on plain TCP connections between two nodes.

mod common;

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    time::Duration,
};

use common::{connection, lab};
use slim_lab::{
    Lab,
    faults::{
        flush::{self, Forgotten},
        link, nft,
    },
};

/// Long enough for a packet, and for one that TCP sends again.
const WHILE: Duration = Duration::from_millis(700);
const LONG: Duration = Duration::from_secs(10);

/// Sends a byte from `from`, and reads it at `to`.
fn pass(from: &mut TcpStream, to: &mut TcpStream, limit: Duration) -> Result<(), ErrorKind> {
    to.set_read_timeout(Some(limit)).unwrap();
    let sent = from.write_all(&[7]);
    let got = sent.and_then(|()| to.read_exact(&mut [0]));
    got.map_err(|e| e.kind())
}

/// Connects from the first node of the lab to `target`.
fn connect(lab: &Lab, target: SocketAddr, limit: Duration) -> io::Result<TcpStream> {
    let net = lab.node(0).net();
    net.run(|| TcpStream::connect_timeout(&target, limit))
        .unwrap()
}

/// A listener on the second node.
fn listener(lab: &Lab) -> TcpListener {
    let node = lab.node(1);
    let bind = || TcpListener::bind((node.address(0), 0));
    node.net().run(bind).unwrap().unwrap()
}

#[test]
fn one_direction_is_silent() {
    let Some(lab) = lab("one-way", 3, 1) else {
        return;
    };
    let (a, b, c) = (lab.node(0), lab.node(1), lab.node(2));
    let (mut at_a, mut at_b) = connection(a, b, 0);
    let (mut other_b, mut other_c) = connection(b, c, 0);
    let hardware = link::hardware(a, 0).unwrap();
    let rule = nft::Rule::drop().path(0).from_hardware(&hardware);
    let silent = rule.apply([b.net(), c.net()]).unwrap();
    assert_eq!(pass(&mut at_b, &mut at_a, WHILE), Ok(()));
    let lost = pass(&mut at_a, &mut at_b, WHILE);
    assert_eq!(lost, Err(ErrorKind::WouldBlock));
    assert_eq!(pass(&mut other_b, &mut other_c, WHILE), Ok(()));
    assert_eq!(pass(&mut other_c, &mut other_b, WHILE), Ok(()));
    assert!(silent.lift().unwrap().packets > 0);
    assert_eq!(pass(&mut at_a, &mut at_b, LONG), Ok(()));
}

#[test]
fn a_flushed_firewall_drops_the_connections_that_it_knew() {
    let Some(lab) = lab("flush", 2, 1) else {
        return;
    };
    let (a, b) = (lab.node(0), lab.node(1));
    let (mut at_a, mut at_b) = connection(a, b, 0);
    let (first, forgotten) = flush::flush(b.net(), None, Forgotten::Dropped).unwrap();
    assert_eq!(forgotten, 1);
    let (mut new_a, mut new_b) = connection(a, b, 0);
    assert_eq!(pass(&mut new_a, &mut new_b, WHILE), Ok(()));
    let (second, forgotten) = flush::flush(b.net(), None, Forgotten::Dropped).unwrap();
    assert_eq!(forgotten, 2);
    for (from, to) in [(&mut at_a, &mut at_b), (&mut new_a, &mut new_b)] {
        assert_eq!(pass(from, to, WHILE), Err(ErrorKind::WouldBlock));
    }
    assert_eq!(
        pass(&mut at_b, &mut at_a, WHILE),
        Err(ErrorKind::WouldBlock)
    );
    // Each ends alone.
    first.lift().unwrap();
    assert_eq!(
        pass(&mut at_a, &mut at_b, WHILE),
        Err(ErrorKind::WouldBlock)
    );
    assert!(second.lift().unwrap().packets > 0);
    assert_eq!(pass(&mut at_a, &mut at_b, LONG), Ok(()));
    assert_eq!(pass(&mut new_a, &mut new_b, LONG), Ok(()));
}

#[test]
fn a_flushed_firewall_may_answer_with_resets() {
    let Some(lab) = lab("flush-reset", 2, 1) else {
        return;
    };
    let (a, b) = (lab.node(0), lab.node(1));
    for sender in 0..2 {
        let (mut at_a, mut at_b) = connection(a, b, 0);
        let (flushed, _) = flush::flush(b.net(), None, Forgotten::Reset).unwrap();
        let (from, to) = match sender {
            0 => (&mut at_a, &mut at_b),
            _ => (&mut at_b, &mut at_a),
        };
        from.write_all(&[1]).unwrap();
        from.set_read_timeout(Some(LONG)).unwrap();
        let error = from.read(&mut [0]).unwrap_err().kind();
        assert_eq!(error, ErrorKind::ConnectionReset, "sender {sender}");
        // The other end learns it when it sends.
        let _ = to.write_all(&[1]);
        to.set_read_timeout(Some(LONG)).unwrap();
        let error = to.read(&mut [0]).unwrap_err().kind();
        assert_eq!(error, ErrorKind::ConnectionReset, "sender {sender}");
        flushed.lift().unwrap();
    }
}

/// IPv6 is forgotten as well; the connections of another address are not.
#[test]
fn a_firewall_forgets_the_connections_of_an_address() {
    let Some(lab) = lab("flush-v6", 2, 2) else {
        return;
    };
    let (a, b) = (lab.node(0), lab.node(1));
    for (n, node) in lab.nodes().iter().enumerate() {
        let address = format!("fd77::{}/64", n + 1);
        let words = ["addr", "add", &address, "dev", "path0", "nodad"];
        node.net().exec("ip", &words).unwrap();
    }
    let bind = || TcpListener::bind("[fd77::2]:0");
    let listener = b.net().run(bind).unwrap().unwrap();
    let mut at_a = connect(&lab, listener.local_addr().unwrap(), LONG).unwrap();
    let (mut at_b, _) = listener.accept().unwrap();
    let (mut other_a, mut other_b) = connection(a, b, 1);
    let own = ["fd77::2".parse().unwrap()];
    let (flushed, forgotten) = flush::flush(b.net(), Some(&own), Forgotten::Dropped).unwrap();
    assert_eq!(forgotten, 1);
    assert_eq!(
        pass(&mut at_a, &mut at_b, WHILE),
        Err(ErrorKind::WouldBlock)
    );
    assert_eq!(pass(&mut other_a, &mut other_b, WHILE), Ok(()));
    flushed.lift().unwrap();
    assert_eq!(pass(&mut at_a, &mut at_b, LONG), Ok(()));
}

#[test]
fn full_queues_accept_no_new_connection() {
    let Some(lab) = lab("syn-full", 2, 1) else {
        return;
    };
    let b = lab.node(1);
    let (mut at_a, mut at_b) = connection(lab.node(0), b, 0);
    let listeners = [listener(&lab), listener(&lab)];
    let [full, free] = listeners.each_ref().map(|l| l.local_addr().unwrap());
    let one = nft::Rule::syn_full().path(0).only_ports([full.port()]);
    let one = one.apply([b.net()]).unwrap();
    let late = |target| connect(&lab, target, WHILE).unwrap_err().kind();
    assert_eq!(late(full), ErrorKind::TimedOut);
    connect(&lab, free, WHILE).unwrap();
    let all = nft::Rule::syn_full().path(0).apply([b.net()]).unwrap();
    assert!(one.lift().unwrap().packets > 0);
    assert_eq!(late(free), ErrorKind::TimedOut);
    assert_eq!(pass(&mut at_a, &mut at_b, WHILE), Ok(()));
    all.lift().unwrap();
    connect(&lab, full, LONG).unwrap();
}

/// The old address is gone, the routes are those of before, and another change is possible.
#[test]
fn a_node_gets_another_address() {
    let Some(lab) = lab("renumber", 2, 1) else {
        return;
    };
    let b = lab.node(1);
    let words = ["route", "add", "10.9.0.0/24", "via", "10.77.0.1"];
    b.net().exec("ip", &words).unwrap();
    let (mut at_a, mut at_b) = connection(lab.node(0), b, 0);
    for n in 0..2 {
        let new = lab.spare_address(0, n).unwrap();
        let old = link::addresses(b, 0).unwrap();
        let gone = link::renumber(b, 0, new).unwrap();
        assert_eq!(gone, [format!("{}/24", old[0])]);
        assert_eq!(link::addresses(b, 0).unwrap(), [new]);
        let routes = b.net().exec("ip", &["route"]).unwrap();
        assert!(routes.contains("10.9.0.0/24 via 10.77.0.1"), "{routes}");
        let bind = || TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0));
        let open = b.net().run(bind).unwrap().unwrap();
        let port = open.local_addr().unwrap().port();
        connect(&lab, (new, port).into(), LONG).unwrap();
        assert!(connect(&lab, (old[0], port).into(), WHILE).is_err());
    }
    assert!(pass(&mut at_a, &mut at_b, WHILE).is_err());
    assert_eq!(lab.spare_address(0, 154), Some([10, 77, 0, 254].into()));
    assert_eq!(lab.spare_address(0, 155), None);
}
