//! Peers without SLIM, and peers that die, are recognised fast.

mod common;

use std::env;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use common::{FlowSocket, Kill, Server, config};
use slim_agent::Agent;
use slim_agent::table::types::SLIM_TABLE_EVIDENCE_PROCESS_GONE;
use slim_core::config::Config;
use slim_core::{Role, Verdict};

const ROLE: &str = "AGENT_TEST_PEER";

#[test]
fn a_peer_without_slim_is_recognised_at_once() {
    let agent = Agent::start(Config::default()).unwrap();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let near = FlowSocket::new(&agent, Role::Connector, near);
    let took = near.wait("legacy", Duration::from_secs(2), |s| s.legacy.is_some());
    assert!(took < Duration::from_millis(200), "took {took:?}");
    assert_eq!(near.state().legacy, Some(false));
    // Plain TCP from here on.
    let mut far = listener.accept().unwrap().0;
    near.write(b"hello").unwrap();
    let mut buf = [0; 5];
    far.read_exact(&mut buf).unwrap();
    assert_eq!(&buf, b"hello");
}

#[test]
fn the_required_policy_refuses_a_peer_without_slim() {
    let agent = Agent::start(config(&[("SLIM", "required")])).unwrap();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let near = FlowSocket::new(&agent, Role::Connector, near);
    near.wait("refused", Duration::from_secs(2), |s| {
        s.legacy == Some(true)
    });
}

#[test]
fn one_refusal_does_not_hit_other_peers() {
    let client = Agent::start(Config::default()).unwrap();
    let server = Server::start(Config::default());
    let plain = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    for _ in 0..50 {
        let other = TcpStream::connect(plain.local_addr().unwrap()).unwrap();
        let other = FlowSocket::new(&client, Role::Connector, other);
        let (near, far) = server.pair(&client);
        near.wait_live();
        far.wait_live();
        other.wait("legacy", Duration::from_secs(2), |s| {
            s.legacy == Some(false)
        });
    }
}

#[test]
fn a_silent_peer_is_taken_for_one_without_slim_after_the_timeout() {
    let agent = Agent::start(config(&[("SLIM_HELLO_TIMEOUT", "0.5")])).unwrap();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    // Something else has the UDP port.
    let _silent = UdpSocket::bind(listener.local_addr().unwrap()).unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let near = FlowSocket::new(&agent, Role::Connector, near);
    let took = near.wait("legacy", Duration::from_secs(3), |s| s.legacy.is_some());
    let range = Duration::from_millis(400)..Duration::from_millis(900);
    assert!(range.contains(&took), "took {took:?}");
}

#[test]
fn a_listeners_udp_port_can_be_released() {
    let server = Server::start(Config::default());
    assert!(UdpSocket::bind(server.addr()).is_err(), "the agent has it");
    server.agent.release(server.addr());
    assert_bound_soon(server.addr());
}

/// Binds within a second: the control socket is closed by its own task, and a process that another test is just
/// starting may hold a copy for a moment.
fn assert_bound_soon(addr: SocketAddr) {
    let begun = Instant::now();
    while let Err(e) = UdpSocket::bind(addr) {
        assert!(
            begun.elapsed() < Duration::from_secs(1),
            "not released: {e}"
        );
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn listening_twice_shares_the_control_socket() {
    use std::os::fd::AsFd;
    let client = Agent::start(Config::default()).unwrap();
    let server = Server::start(Config::default());
    // A second listener on the address, as with SO_REUSEPORT; then the first one goes.
    server.agent.listen(server.listener.as_fd(), server.addr());
    server.agent.unlisten(server.addr());
    assert!(server.agent.flush(common::LIMIT));
    let (near, far) = server.pair(&client);
    near.wait_live();
    far.wait_live();
    // Closed and opened again without a pause.
    server.agent.unlisten(server.addr());
    server.agent.listen(server.listener.as_fd(), server.addr());
    let (near, far) = server.pair(&client);
    near.wait_live();
    far.wait_live();
}

#[test]
fn different_job_keys_mean_plain_tcp() {
    let key = |key| ("SLIM_JOB_KEY", key);
    let short = ("SLIM_HELLO_TIMEOUT", "0.5");
    let keyless: &[_] = &[short];
    for (ours, theirs) in [
        (
            &[key("one job's own key"), short][..],
            &[key("another job's key"), short][..],
        ),
        (&[key("one job's own key"), short], keyless),
        (keyless, &[key("one job's own key"), short]),
    ] {
        let client = Agent::start(config(ours)).unwrap();
        let server = Server::start(config(theirs));
        let (near, far) = server.pair(&client);
        let took = near.wait("legacy", Duration::from_secs(2), |s| s.legacy.is_some());
        assert!(took < Duration::from_millis(300), "took {took:?}");
        far.wait("legacy", Duration::from_secs(2), |s| {
            s.legacy == Some(false)
        });
        near.write(b"hello").unwrap();
        let mut buf = [0; 5];
        far.read_exact(&mut buf).unwrap();
        assert_eq!((&buf, near.state().legacy), (b"hello", Some(false)));

        let strict = config(&[ours, &[("SLIM", "required")]].concat());
        let (near, _far) = server.pair(&Agent::start(strict).unwrap());
        near.wait("refused", Duration::from_secs(2), |s| {
            s.legacy == Some(true)
        });
    }
    let same = config(&[key("one job's own key"), ("SLIM", "required")]);
    let server = Server::start(same.clone());
    let (near, far) = server.pair(&Agent::start(same).unwrap());
    near.wait_live();
    far.wait_live();
    near.kill(Kill::Fin);
    near.write(b"x").unwrap();
    far.read_exact(&mut [0]).unwrap();
}

#[test]
fn a_connection_not_accepted_before_the_listener_closes_gets_its_error_at_once() {
    let client = Agent::start(Config::default()).unwrap();
    let server = Server::start(Config::default());
    // An accepted connection, so that the control socket has work to do.
    let (near, far) = server.pair(&client);
    near.wait_live();
    far.wait_live();
    let addr = server.addr();
    let waiting = TcpStream::connect(addr).unwrap();
    let waiting = FlowSocket::new(&client, Role::Connector, waiting);
    thread::sleep(Duration::from_millis(150));
    assert!(!waiting.state().live && waiting.state().legacy.is_none());
    let Server { agent, listener } = server;
    let begun = Instant::now();
    drop(listener);
    agent.unlisten(addr);
    let error = waiting.read(&mut [0]).unwrap_err();
    let took = begun.elapsed();
    assert_eq!(error.raw_os_error(), Some(libc::ECONNRESET));
    assert!(took < Duration::from_millis(100), "took {took:?}");
    // The port is free, too.
    assert_bound_soon(addr);
    near.kill(Kill::Fin);
    near.write(b"x").unwrap();
    far.read_exact(&mut [0]).unwrap();
}

#[test]
fn hello_may_come_after_the_listener_is_closed() {
    let client = Agent::start(Config::default()).unwrap();
    let server = Server::start(Config::default());
    let addr = server.addr();
    let near = TcpStream::connect(addr).unwrap();
    let far = server.listener.accept().unwrap().0;
    let far = FlowSocket::new(&server.agent, Role::Acceptor, far);
    // This one is accepted from a copy of the listener, as by a child process.
    let later_near = TcpStream::connect(addr).unwrap();
    let copy = server.listener.try_clone().unwrap();
    let Server { agent, listener } = server;
    drop(listener);
    agent.unlisten(addr);
    assert!(agent.flush(common::LIMIT));
    let near = FlowSocket::new(&client, Role::Connector, near);
    near.wait_live();
    far.wait_live();
    thread::sleep(Duration::from_millis(300));
    let later_near = FlowSocket::new(&client, Role::Connector, later_near);
    thread::sleep(Duration::from_millis(50));
    let later_far = copy.accept().unwrap().0;
    let later_far = FlowSocket::new(&agent, Role::Acceptor, later_far);
    later_near.wait_live();
    later_far.wait_live();
}

/// A process with one flow, which can be killed.
struct Peer {
    process: Child,
    stream: std::sync::Arc<FlowSocket>,
}

impl Peer {
    fn start(agent: &Agent) -> Peer {
        let mut process = Command::new(env::current_exe().unwrap())
            .args(["--exact", "the_peer_process", "--nocapture", "--ignored"])
            .env(ROLE, "1")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let addr: SocketAddr = lines
            .find_map(|l| Some(l.unwrap().split_once("listening on ")?.1.parse().unwrap()))
            .expect("the peer tells its address");
        let stream = TcpStream::connect(addr).unwrap();
        let stream = FlowSocket::new(agent, Role::Connector, stream);
        stream.wait_live();
        Peer { process, stream }
    }

    /// Stops the process, and returns when all its threads have stopped.
    fn stop(&self) {
        let pid = self.process.id();
        // SAFETY: a signal to our own child.
        unsafe { libc::kill(pid as i32, libc::SIGSTOP) };
        let is_stopped = |task: std::fs::DirEntry| {
            let stat = std::fs::read_to_string(task.path().join("stat")).unwrap();
            stat.rsplit_once(") ").unwrap().1.starts_with('T')
        };
        let tasks = || std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        while !tasks().all(|task| is_stopped(task.unwrap())) {
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Not a test: this runs in the peer process.
#[test]
#[ignore = "runs in a process of its own, started by other tests"]
fn the_peer_process() {
    if env::var_os(ROLE).is_none() {
        return;
    }
    let server = Server::start(Config::default());
    println!("\nlistening on {}", server.addr());
    std::io::stdout().flush().unwrap();
    let far = FlowSocket::new(
        &server.agent,
        Role::Acceptor,
        server.listener.accept().unwrap().0,
    );
    far.wait_live();
    thread::sleep(Duration::from_secs(60));
}

#[test]
fn the_end_of_a_killed_peer_is_passed_on_fast() {
    let agent = Agent::start(Config::default()).unwrap();
    for unread in [false, true] {
        let mut peer = Peer::start(&agent);
        if unread {
            // The kernel then resets the connection instead of ending it.
            peer.stream.write(b"never read").unwrap();
            thread::sleep(Duration::from_millis(50));
        }
        peer.kill();
        let begun = Instant::now();
        let outcome = peer.stream.read(&mut [0]);
        let took = begun.elapsed();
        assert!(
            took < Duration::from_millis(500),
            "unread {unread}: took {took:?}"
        );
        match unread {
            false => assert_eq!(outcome.unwrap(), 0),
            true => assert_eq!(outcome.unwrap_err().raw_os_error(), Some(libc::ECONNRESET)),
        }
    }
}

#[test]
fn a_peer_killed_while_a_flow_is_suspended_costs_no_attempts() {
    let agent = Agent::start(Config::default()).unwrap();
    let mut peer = Peer::start(&agent);
    peer.kill();
    // The connection is found dead only now, by a write that the peer's host answers with a reset.
    thread::sleep(Duration::from_millis(20));
    let begun = Instant::now();
    let error = loop {
        if let Err(e) = peer.stream.write(b"x") {
            break e;
        }
        assert!(begun.elapsed() < Duration::from_secs(5), "never told");
        thread::sleep(Duration::from_millis(5));
    };
    let took = begun.elapsed();
    assert!(took < Duration::from_millis(500), "took {took:?}: {error}");
    let verdict = peer.stream.state().verdict;
    assert!(matches!(verdict, Some(Verdict::Errno(_))), "{verdict:?}");
    // Layers above can ask why before the flow has its error.
    let evidence = (SLIM_TABLE_EVIDENCE_PROCESS_GONE, peer.process.id());
    assert_eq!(peer.stream.state().evidence, Some(evidence));
}

#[test]
fn a_stopped_peer_costs_all_attempts_and_then_the_error_is_the_kernels() {
    // The peer does not answer at all, like a host that is gone for good.
    let agent = Agent::start(config(&[("SLIM_ATTEMPT_TIMEOUTS", "0.2,0.3,0.4")])).unwrap();
    let peer = Peer::start(&agent);
    peer.stop();
    peer.stream.kill(common::Kill::Fin);
    let begun = Instant::now();
    let outcome = loop {
        match peer.stream.write(b"x") {
            Ok(()) => thread::sleep(Duration::from_millis(5)),
            Err(e) => break e,
        }
    };
    let took = begun.elapsed();
    let range = Duration::from_millis(850)..Duration::from_millis(2500);
    assert!(range.contains(&took), "took {took:?}: {outcome}");
    assert_eq!(outcome.raw_os_error(), Some(libc::EPIPE));
}
