//! Each fault has the promised effect on a plain TCP connection between two nodes.

mod common;

use std::{
    io::{ErrorKind, Read, Write},
    net::TcpStream,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use common::{both, connection, eventually, lab};
use slim_lab::{
    Lab, SeededRng,
    faults::{
        destroy::{self, Amount, Selector},
        diag::Direction,
        inject::{self, Segment},
        link, nft,
        shape::{Discipline, Shape},
    },
    lab::operstate,
};

const SECOND: Duration = Duration::from_secs(1);
/// How long the kernel may take to act on a change of carrier. Its linkwatch work runs in the background, once a second for
/// the whole machine, which may be busy.
const LINKWATCH: Duration = Duration::from_secs(5);

/// Sends a byte from `from`. Returns the result of reading it at `to`, and the time that took.
fn pass(
    from: &mut TcpStream,
    to: &mut TcpStream,
    limit: Duration,
) -> (Result<(), ErrorKind>, Duration) {
    let start = Instant::now();
    to.set_read_timeout(Some(limit)).unwrap();
    let sent = from.write_all(&[7]);
    let got = sent.and_then(|()| to.read_exact(&mut [0]));
    (got.map_err(|e| e.kind()), start.elapsed())
}

/// Reads until an error or the end of the stream, for which it returns `None`.
fn read_out(stream: &mut TcpStream) -> Option<ErrorKind> {
    stream
        .set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return None,
            Ok(_) => {}
            Err(error) => return Some(error.kind()),
        }
    }
}

#[test]
fn destroy_takes_the_chosen_connections_and_no_other() {
    let Some(lab) = lab("destroy", 2, 1) else {
        return;
    };
    let (a, b) = (lab.node(0), lab.node(1));
    let mut out: Vec<_> = (0..5).map(|_| connection(a, b, 0)).collect();
    // `connection` has closed its listener. This one stays open, so that the direction of a connection can be told.
    let listener = a
        .net()
        .run(|| std::net::TcpListener::bind((a.address(0), 0)))
        .unwrap()
        .unwrap();
    let port = listener.local_addr().unwrap().port();
    let target = listener.local_addr().unwrap();
    let mut back = b.net().run(|| TcpStream::connect(target)).unwrap().unwrap();
    let (mut back_here, _) = listener.accept().unwrap();

    let all = destroy::list(a.net(), &Selector::between_hosts()).unwrap();
    assert_eq!(all.len(), 6, "{all:?}");
    let mut rng = SeededRng::new(1);

    let none = Selector::between_hosts().process("no-such");
    assert!(
        destroy::destroy(a.net(), &none, Amount::All, &mut rng)
            .unwrap()
            .connections
            .is_empty()
    );
    let none = Selector::between_hosts().peer([10, 77, 0, 9]);
    assert!(
        destroy::destroy(a.net(), &none, Amount::All, &mut rng)
            .unwrap()
            .connections
            .is_empty()
    );

    let incoming = Selector::between_hosts().direction(Direction::Incoming);
    let report = destroy::destroy(a.net(), &incoming, Amount::All, &mut rng).unwrap();
    assert_eq!(report.connections.len(), 1, "{report}");
    assert_eq!(report.connections[0].local.port(), port);
    assert_eq!(read_out(&mut back_here), Some(ErrorKind::ConnectionAborted));
    assert_eq!(read_out(&mut back), Some(ErrorKind::ConnectionReset));

    let pick = Selector::between_hosts().peer(b.address(0));
    let report = destroy::destroy(a.net(), &pick, Amount::One, &mut rng).unwrap();
    assert_eq!(report.connections.len(), 1, "{report}");
    let dead = report.connections[0].local;
    let position = out
        .iter()
        .position(|(s, _)| s.local_addr().is_ok_and(|l| l == dead));
    let (mut one, mut other) = out.swap_remove(position.expect("one of ours"));
    assert_eq!(read_out(&mut one), Some(ErrorKind::ConnectionAborted));
    assert_eq!(read_out(&mut other), Some(ErrorKind::ConnectionReset));
    for (here, there) in &mut out {
        assert_eq!(pass(here, there, SECOND).0, Ok(()), "the others live");
    }

    let report =
        destroy::destroy(b.net(), &Selector::between_hosts(), Amount::All, &mut rng).unwrap();
    assert_eq!(report.connections.len(), 4, "{report}");
    for (here, there) in &mut out {
        assert_eq!(read_out(there), Some(ErrorKind::ConnectionAborted));
        assert_eq!(read_out(here), Some(ErrorKind::ConnectionReset));
    }
}

#[test]
fn destroy_knows_the_processes() {
    let Some(lab) = lab("owners", 2, 1) else {
        return;
    };
    let (a, b) = (lab.node(0), lab.node(1));
    let listener = b
        .net()
        .run(|| std::net::TcpListener::bind((b.address(0), 0)))
        .unwrap()
        .unwrap();
    let target = listener.local_addr().unwrap();
    let script = format!(
        "exec 3<>/dev/tcp/{}/{}; read -u 3 x; sleep 1000",
        target.ip(),
        target.port()
    );
    let mut client = a.command("bash").args(["-c", &script]).spawn().unwrap();
    let (mut here, _) = listener.accept().unwrap();
    let listed = destroy::list(a.net(), &Selector::between_hosts().process("bash")).unwrap();
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].owners[0].pid, client.id());
    assert_eq!(listed[0].direction, Direction::Outgoing);
    let pick = Selector::between_hosts().not_process("bash");
    assert!(destroy::list(a.net(), &pick).unwrap().is_empty());
    let pick = Selector::between_hosts().pid(client.id());
    let report = destroy::destroy(a.net(), &pick, Amount::All, &mut SeededRng::new(1)).unwrap();
    assert_eq!(report.connections.len(), 1, "{report}");
    assert_eq!(read_out(&mut here), Some(ErrorKind::ConnectionReset));
    client.kill().unwrap();
    client.wait().unwrap();
}

#[test]
fn drop_stops_packets_until_it_is_lifted() {
    let Some(lab) = lab("drop", 2, 1) else { return };
    let (mut a, mut b) = connection(lab.node(0), lab.node(1), 0);
    let guard = nft::Rule::drop().apply(both(&lab)).unwrap();
    let (result, _) = pass(&mut a, &mut b, SECOND);
    assert!(
        matches!(result, Err(ErrorKind::WouldBlock | ErrorKind::TimedOut)),
        "{result:?}"
    );
    let report = guard.lift().unwrap();
    assert!(report.packets > 0, "{report}");
    b.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    b.read_exact(&mut [0]).expect("it arrives after all");
    assert_eq!(pass(&mut b, &mut a, SECOND).0, Ok(()));
}

#[test]
fn drop_of_a_port_leaves_the_others_alone() {
    let Some(lab) = lab("ports", 2, 1) else {
        return;
    };
    let (mut a, mut b) = connection(lab.node(0), lab.node(1), 0);
    let (mut c, mut d) = connection(lab.node(0), lab.node(1), 0);
    let port = b.local_addr().unwrap().port();
    {
        let _guard = nft::Rule::drop()
            .only_ports([port])
            .apply_to(lab.nodes())
            .unwrap();
        assert!(pass(&mut a, &mut b, SECOND).0.is_err());
        assert_eq!(pass(&mut c, &mut d, SECOND).0, Ok(()));
    }
    b.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    b.read_exact(&mut [0])
        .expect("the dropped guard has taken its rule away");
    let _guard = nft::Rule::drop()
        .except_ports([port])
        .apply_to(lab.nodes())
        .unwrap();
    assert_eq!(pass(&mut a, &mut b, SECOND).0, Ok(()));
    assert!(pass(&mut c, &mut d, SECOND).0.is_err());
}

#[test]
fn reset_ends_connections_at_both_ends() {
    let Some(lab) = lab("reset", 2, 1) else {
        return;
    };
    let (mut a, mut b) = connection(lab.node(0), lab.node(1), 0);
    let guard = nft::Rule::reset().apply(both(&lab)).unwrap();
    // The firewall sends a reset only in answer to a packet.
    a.write_all(&[1]).unwrap();
    assert_eq!(read_out(&mut a), Some(ErrorKind::ConnectionReset));
    let _ = b.write_all(&[1]);
    assert_eq!(read_out(&mut b), Some(ErrorKind::ConnectionReset));
    assert!(guard.lift().unwrap().packets >= 1);
    let (mut a, mut b) = connection(lab.node(0), lab.node(1), 0);
    assert_eq!(
        pass(&mut a, &mut b, SECOND).0,
        Ok(()),
        "after the rule is lifted connections work again"
    );
}

#[test]
fn two_rules_are_independent() {
    let Some(lab) = lab("rules", 2, 2) else {
        return;
    };
    let one = nft::Rule::drop().path(0).apply(both(&lab)).unwrap();
    let two = nft::Rule::drop().path(1).apply(both(&lab)).unwrap();
    drop(one);
    let (mut a, mut b) = connection(lab.node(0), lab.node(1), 0);
    assert_eq!(pass(&mut a, &mut b, SECOND).0, Ok(()));
    drop(two);
    let (mut a, mut b) = connection(lab.node(0), lab.node(1), 1);
    assert_eq!(pass(&mut a, &mut b, SECOND).0, Ok(()));
}

#[test]
fn a_link_goes_down_and_comes_back_with_its_routes() {
    let Some(lab) = lab("link", 2, 1) else { return };
    let (mut a, mut b) = connection(lab.node(0), lab.node(1), 0);
    let net = lab.node(0).net();
    net.exec("ip", &["route", "add", "10.99.0.0/24", "via", "10.77.0.2"])
        .unwrap();
    let routes = net.exec("ip", &["-4", "route"]).unwrap();
    let down = link::down(lab.node(0), 0).unwrap();
    assert!(pass(&mut a, &mut b, SECOND).0.is_err());
    assert!(
        eventually(LINKWATCH, || operstate(lab.node(1), 0) != "up"),
        "the other end sees no carrier"
    );
    down.lift().unwrap();
    b.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    b.read_exact(&mut [0]).expect("TCP survives the fault");
    // TCP may be back before the routing table shows it. Packets pass as soon as there is a carrier, but only the next run of
    // linkwatch removes the mark `linkdown`.
    let listing = || sorted(&net.exec("ip", &["-4", "route"]).unwrap());
    assert!(
        eventually(LINKWATCH, || listing() == sorted(&routes)),
        "{:?}, before {routes:?}",
        listing()
    );
}

#[test]
fn an_address_goes_away_and_comes_back_with_its_routes() {
    let Some(lab) = lab("address", 2, 1) else {
        return;
    };
    let (mut a, mut b) = connection(lab.node(0), lab.node(1), 0);
    let net = lab.node(1).net();
    net.exec("ip", &["route", "add", "10.99.0.0/24", "via", "10.77.0.1"])
        .unwrap();
    let routes = net.exec("ip", &["-4", "route"]).unwrap();
    let removed = link::remove_address(lab.node(1), 0).unwrap();
    assert_eq!(removed.addresses(), ["10.77.0.2/24"]);
    assert!(net.exec("ip", &["-4", "route"]).unwrap().trim().is_empty());
    assert!(pass(&mut a, &mut b, SECOND).0.is_err());
    drop(removed);
    b.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    b.read_exact(&mut [0]).expect("TCP survives the fault");
    let listing = net.exec("ip", &["-4", "route"]).unwrap();
    assert_eq!(sorted(&listing), sorted(&routes));
}

fn sorted(text: &str) -> Vec<String> {
    let mut lines: Vec<_> = text.lines().map(|l| l.trim().to_owned()).collect();
    lines.sort();
    lines
}

fn victim_of(lab: &Lab, local: &TcpStream) -> slim_lab::faults::diag::OpenConnection {
    let all = destroy::list(lab.node(0).net(), &Selector::between_hosts()).unwrap();
    let address = local.local_addr().unwrap();
    all.into_iter()
        .find(|c| c.local == address)
        .expect("the kernel knows our connection")
}

#[test]
fn an_injected_rst_resets_a_silent_connection() {
    let Some(lab) = lab("rst", 2, 1) else { return };
    let (mut a, _b) = connection(lab.node(0), lab.node(1), 0);
    let victim = victim_of(&lab, &a);
    let report = inject::inject(
        Segment::Rst,
        lab.node(0),
        lab.node(1),
        0,
        &victim,
        Duration::from_secs(5),
    )
    .unwrap();
    assert!(report.accepted, "{report}");
    assert_eq!(read_out(&mut a), Some(ErrorKind::ConnectionReset));
}

#[test]
fn an_injected_fin_ends_the_stream_after_what_was_sent() {
    let Some(lab) = lab("fin", 2, 1) else { return };
    let (mut a, mut b) = connection(lab.node(0), lab.node(1), 0);
    b.write_all(b"all that came before").unwrap();
    let victim = victim_of(&lab, &a);
    let report = inject::inject(
        Segment::Fin,
        lab.node(0),
        lab.node(1),
        0,
        &victim,
        Duration::from_secs(5),
    )
    .unwrap();
    assert!(report.accepted, "{report}");
    let mut text = String::new();
    a.read_to_string(&mut text).unwrap();
    assert_eq!(text, "all that came before");
}

#[test]
fn injection_hits_a_busy_connection() {
    let Some(lab) = lab("busy", 2, 1) else { return };
    for segment in [Segment::Rst, Segment::Fin] {
        let (mut a, mut b) = connection(lab.node(0), lab.node(1), 0);
        let victim = victim_of(&lab, &a);
        let stop = AtomicBool::new(false);
        let report = thread::scope(|scope| {
            // Ping-pong with some computation in between, until the connection ends.
            scope.spawn(|| {
                let mut buffer = [0; 1024];
                while !stop.load(Ordering::Relaxed) {
                    if b.read_exact(&mut buffer)
                        .and_then(|()| b.write_all(&buffer))
                        .is_err()
                    {
                        break;
                    }
                }
            });
            scope.spawn(|| {
                let mut buffer = [0; 1024];
                while !stop.load(Ordering::Relaxed) {
                    if a.write_all(&buffer)
                        .and_then(|()| a.read_exact(&mut buffer))
                        .is_err()
                    {
                        break;
                    }
                    thread::sleep(Duration::from_micros(500));
                }
                let _ = a.shutdown(std::net::Shutdown::Both);
            });
            thread::sleep(Duration::from_millis(50));
            let report = inject::inject(
                segment,
                lab.node(0),
                lab.node(1),
                0,
                &victim,
                Duration::from_secs(10),
            );
            stop.store(true, Ordering::Relaxed);
            report.unwrap()
        });
        assert!(report.accepted, "{report}");
    }
}

#[test]
fn shaping_slows_the_line_with_what_the_kernel_has() {
    let Some(lab) = lab("shape", 2, 1) else {
        return;
    };
    let (mut a, mut b) = connection(lab.node(0), lab.node(1), 0);
    let guard = Shape::new()
        .rate_kbit(8_000)
        .delay_ms(20)
        .apply(lab.node(0), 0)
        .unwrap();
    println!("{guard}");
    if guard.discipline() == Discipline::Netem {
        assert!(guard.missing().is_empty());
        assert!(pass(&mut a, &mut b, SECOND).1 >= Duration::from_millis(20));
    } else {
        assert_eq!(guard.missing(), ["delay"]);
        let refused = Shape::new().delay_ms(20).apply(lab.node(0), 0);
        assert!(
            refused.is_err(),
            "a delay that the kernel lacks must be an error"
        );
    }
    // At 1 MB a second 2 MB take about two seconds; without shaping they take almost no time.
    let timed = |a: &mut TcpStream, b: &mut TcpStream| {
        let start = Instant::now();
        thread::scope(|scope| {
            scope.spawn(|| a.write_all(&vec![1; 2_000_000]).unwrap());
            b.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            b.read_exact(&mut vec![0; 2_000_000]).unwrap();
        });
        start.elapsed()
    };
    let slow = timed(&mut a, &mut b);
    assert!(slow > Duration::from_millis(1200), "{slow:?}");
    drop(guard);
    let fast = timed(&mut a, &mut b);
    assert!(fast < slow / 2, "{fast:?} after {slow:?}");
}
