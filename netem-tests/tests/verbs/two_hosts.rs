//! Two guests, which are two hosts with a kernel and an adapter each: a flow of the library between them, over one line for queue pairs and TCP.

use std::{
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use slim::{Config, Endpoint, Flow, Session, SessionOptions, StreamState};
use slim_rdma::ibverbs::PortSettings;
use slim_verbs::{HostPorts, PortNames, VerbsSettings};

use super::{
    common::guest::{LINE, crash_peer, two_hosts},
    openmpi::SOON,
    shell,
    two_sessions::{LIMIT, by_pair},
};

/// Where the second host listens.
const THERE: &str = "10.2.0.1:7001";

/// The address, the adapter and the session of a host.
fn host(number: usize) -> Session {
    shell(&format!(
        "ip addr add 10.2.0.{number}/24 dev {LINE}
        ip link set {LINE} mtu 4200 up
        rdma link add rx0 type rxe netdev {LINE}"
    ));
    let begun = Instant::now();
    let ports = loop {
        let (names, how) = (PortNames::default(), PortSettings::default());
        match HostPorts::open(&names, &how, VerbsSettings::default()) {
            Ok(ports) => break ports,
            // The interface's address takes some moments to become an identifier.
            Err(_) if begun.elapsed() < Duration::from_secs(5) => {}
            Err(e) => panic!("{e}"),
        }
        thread::sleep(Duration::from_millis(5));
    };
    let options = SessionOptions {
        config: Config {
            attempt_timeouts: vec![Duration::from_secs(1)],
            ..Config::default()
        },
        ..SessionOptions::new("two hosts")
    };
    Session::open_with(options, vec![Box::new(ports.provider)]).unwrap()
}

/// Sends all that comes back, until the flow ends.
fn echo(listener: &Endpoint) {
    let flow = listener.accept(LIMIT).unwrap();
    let mut buf = vec![0; 64 << 10];
    while let Ok(n @ 1..) = flow.recv(&mut buf, LIMIT) {
        if flow.send_all(&buf[..n], LIMIT).is_err() {
            return;
        }
    }
    let _ = flow.finish();
}

/// The first host's end of the flow.
struct Near {
    flow: Flow,
    sent: u64,
    random: fastrand::Rng,
}

impl Near {
    fn byte(at: u64) -> u8 {
        (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
    }

    /// Sends a piece, and checks what comes back.
    fn pass(&mut self) -> Result<(), slim::TransferError> {
        let len = self.random.usize(1..20_000);
        let piece: Vec<u8> = (self.sent..).take(len).map(Self::byte).collect();
        let mut back = vec![0; len];
        self.flow.send_all(&piece, LIMIT)?;
        self.flow.recv_exact(&mut back, LIMIT)?;
        assert!(back == piece, "wrong bytes behind {}", self.sent);
        self.sent += len as u64;
        Ok(())
    }

    /// Passes bytes until the flow is on a queue pair, or on TCP.
    fn pass_until(&mut self, by: bool) -> Duration {
        let begun = Instant::now();
        while by_pair(&self.flow) != Some(by) {
            assert!(begun.elapsed() < SOON, "never there: {by}");
            self.pass().unwrap();
            thread::sleep(Duration::from_millis(1));
        }
        begun.elapsed()
    }

    /// Passes bytes while the line is silent for this time. Returns the longest time that a piece has taken.
    fn pass_through_silence(&mut self, silence: Duration) -> Duration {
        thread::scope(|scope| {
            scope.spawn(|| {
                shell(&format!("tc qdisc add dev {LINE} root netem loss 100%"));
                thread::sleep(silence);
                shell(&format!("tc qdisc del dev {LINE} root"));
            });
            let (begun, mut longest) = (Instant::now(), Duration::ZERO);
            while begun.elapsed() < silence + Duration::from_secs(1) {
                let piece = Instant::now();
                self.pass().unwrap();
                longest = longest.max(piece.elapsed());
            }
            longest
        })
    }
}

/// The flow survives silences of the only line, and the crash of the other host is an error after the attempts.
#[test]
fn a_flow_between_hosts_survives_silences_and_notices_a_crash() {
    let test = "two_hosts::a_flow_between_hosts_survives_silences_and_notices_a_crash";
    let Some(number) = two_hosts(test) else {
        return;
    };
    let there: SocketAddr = THERE.parse().unwrap();
    if number == 1 {
        let session = host(1);
        echo(&session.listen(there).unwrap());
        return;
    }
    let session = host(2);
    let begun = Instant::now();
    let flow = loop {
        // The other host is not there yet.
        match session.connect(there, LIMIT) {
            Ok(flow) => break flow,
            Err(e) => assert!(begun.elapsed() < SOON, "{e}"),
        }
        thread::sleep(Duration::from_millis(50));
    };
    assert_eq!(flow.wait_negotiated(LIMIT), StreamState::Protected);
    let mut near = Near {
        flow,
        sent: 0,
        random: fastrand::Rng::with_seed(1),
    };
    println!("on queue pairs after {:?}", near.pass_until(true));
    for silence in [300, 1000, 2000].map(Duration::from_millis) {
        let longest = near.pass_through_silence(silence);
        let back = near.pass_until(true);
        println!(
            "silence of {silence:?}: the longest piece took {longest:?}, on queue pairs after {back:?} more"
        );
        assert!(longest < silence + Duration::from_secs(4), "{longest:?}");
    }
    println!("{} bytes came back right", near.sent);
    crash_peer();
    let crashed = Instant::now();
    let error = loop {
        if let Err(error) = near.pass() {
            break error;
        }
        assert!(crashed.elapsed() < SOON);
    };
    println!("the crash: {error}, after {:?}", crashed.elapsed());
    // Three attempts of one second, and what notices the silence before.
    assert!(
        crashed.elapsed() < Duration::from_secs(8),
        "{:?}",
        crashed.elapsed()
    );
}
