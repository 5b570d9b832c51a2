//! A mistake in SLIM makes the agent thread panic: the program goes on, and no thread waits for ever.

mod common;

use std::env;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::{FlowSocket, Kill, Server};
use slim_agent::table::asking;
use slim_agent::table::types::{SLIM_TABLE_OFF, SLIM_TABLE_ON, TableFlow};
use slim_agent::{Agent, FlowIo, Transport, TransportRef};
use slim_core::config::Config;
use slim_core::{FlowToken, Role, Verdict};
use slim_stream::{Drained, Probe, Stream, Undelivered};

const ROLE: &str = "AGENT_TEST_PANIC";

/// A flow whose front end panics, once.
#[derive(Default)]
struct Mistake(AtomicBool, Stream);

impl FlowIo for Mistake {
    fn sent(&self) -> u64 {
        self.1.sent()
    }
    fn trim(&self, peer_received: u64) {
        self.1.trim(peer_received);
    }
    fn local_final(&self) -> Option<u64> {
        self.1.local_final()
    }
    fn live(&self) {}
    fn legacy(&self, _: bool) {
        let again = self.0.swap(true, Ordering::Relaxed);
        assert!(again, "a mistake, made for the test");
    }
    fn suspend(&self) -> bool {
        true
    }
    fn idle(&self) -> bool {
        true
    }
    fn drain(&self) -> Drained {
        Drained {
            received: 0,
            sent: 0,
        }
    }
    fn stash(&self, _: &[u8]) {}
    fn replay(&self, from: u64, _: &mut dyn FnMut(&[u8]) -> usize) -> Option<u64> {
        Some(from)
    }
    fn before_connect(&self, _: TransportRef<'_>) -> std::io::Result<()> {
        Ok(())
    }
    fn prepare(&self, _: TransportRef<'_>) -> std::io::Result<()> {
        Ok(())
    }
    fn install(&self, _: Transport) {}
    fn reinstate(&self, _: bool) {}
    fn peer_final(&self, _: u64) {}
    fn escalate(&self, _: Verdict) {}
    fn probe(&self) -> Probe {
        Probe::default()
    }
    fn undelivered(&self) -> Option<Undelivered> {
        None
    }
}

/// A connection to a peer without SLIM, so that the agent calls [`FlowIo::legacy`].
fn plain(listener: &TcpListener) -> TcpStream {
    TcpStream::connect(listener.local_addr().unwrap()).unwrap()
}

/// The agent panics in a process of its own: the test harness would wait for the panic to end.
#[test]
fn the_program_goes_on_after_the_agent_panics() {
    run("with a thread");
}

#[test]
fn the_program_goes_on_after_an_agent_without_a_thread_panics() {
    run(DRIVEN);
}

const DRIVEN: &str = "driven";

fn run(role: &str) {
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", "panicking_program", "--nocapture", "--ignored"])
        .env(ROLE, role)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}:\n{said}", output.status);
    let ours = said.lines().filter(|line| line.starts_with("slim["));
    assert_eq!(ours.count(), 1, "{said}");
    assert!(said.contains("a mistake, made for the test"), "{said}");
}

#[test]
#[ignore = "runs in a process of its own, started by another test"]
fn panicking_program() {
    let Some(role) = env::var_os(ROLE) else {
        return;
    };
    // SAFETY: ends the process if the test hangs.
    unsafe { libc::alarm(30) };
    if role == DRIVEN {
        let client = Agent::start_driven(Config::default()).unwrap();
        let (driving, over) = (client.clone(), Arc::new(AtomicBool::new(false)));
        let ended = over.clone();
        let driver = thread::spawn(move || {
            let fd = driving.descriptor().unwrap();
            while !ended.load(Ordering::Relaxed) {
                slim_sys::poll(fd, libc::POLLIN, Some(Duration::from_millis(10)));
                driving.drive();
            }
            fd
        });
        everything_goes_on(&client);
        over.store(true, Ordering::Relaxed);
        let fd = driver.join().unwrap();
        assert_eq!(slim_sys::ready(fd, libc::POLLIN), 0, "it is always ready");
        assert!(client.retire(Duration::from_secs(1)));
    } else {
        everything_goes_on(&Agent::start(Config::default()).unwrap());
    }
    // SAFETY: ends the process at once.
    unsafe { libc::_exit(0) };
}

fn everything_goes_on(client: &Agent) {
    let server = Server::start(Config::default());
    let (near, far) = server.pair(client);
    let (broken, broken_far) = server.pair(client);
    for end in [&near, &far, &broken, &broken_far] {
        end.wait_live();
    }
    // The transport of this flow is one that the agent has made.
    far.kill(Kill::Fin);
    let mut buf = [0; 4];
    near.write(b"over").unwrap();
    far.read_exact(&mut buf).unwrap();
    far.write(b"over").unwrap();
    near.read_exact(&mut buf).unwrap();
    // The peer resumes this flow, but this end is never idle: a call on it does not return.
    broken.state().pretence.busy = u32::MAX;
    broken_far.kill(Kill::Fin);
    let peer = thread::spawn(move || broken_far.read(&mut [0]));
    let deadline = Instant::now() + Duration::from_secs(5);
    while broken.state().pretence.asked == 0 {
        assert!(Instant::now() < deadline, "the peer does not resume");
        thread::sleep(Duration::from_millis(1));
    }
    let reader = thread::spawn(move || broken.read(&mut [0]));

    // A thread waits, before it ends the process, for such a flow that is closed.
    let (leaving, leaving_far) = server.pair(client);
    leaving.wait_live();
    leaving_far.wait_live();
    leaving.state().pretence.busy = u32::MAX;
    leaving_far.kill(Kill::Fin);
    let (closed, exiting) = (leaving.clone(), client.clone());
    thread::spawn(move || closed.read(&mut [0]));
    let deadline = Instant::now() + Duration::from_secs(5);
    while leaving.state().pretence.asked == 0 {
        assert!(Instant::now() < deadline, "the fault is not noticed");
        thread::sleep(Duration::from_millis(1));
    }
    leaving.close();
    let exiting = thread::spawn(move || exiting.drain_exit(Duration::from_secs(60)));
    thread::sleep(Duration::from_millis(100));
    assert!(!exiting.is_finished());

    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let victim = plain(&listener);
    let (local, remote) = (victim.local_addr().unwrap(), victim.peer_addr().unwrap());
    let (token, role) = (FlowToken(u64::MAX), Role::Connector);
    client.open(token, Arc::new(Mistake::default()), role, local, remote);

    // Flows that have a transport go on as plain TCP.
    near.wait("plain TCP", Duration::from_secs(5), |s| {
        s.legacy == Some(false)
    });
    near.write(b"ping").unwrap();
    let mut buf = [0; 4];
    far.read_exact(&mut buf).unwrap();
    far.write(&buf).unwrap();
    near.read_exact(&mut buf).unwrap();
    assert_eq!(&buf, b"ping");

    // Broken flows end, here and at the peer's end.
    let begun = Instant::now();
    let error = reader.join().unwrap().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ECONNRESET));
    peer.join().unwrap().unwrap_err();
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(2), "took {took:?}");

    assert!(exiting.join().unwrap());

    // Flows that begin later are plain TCP, and no call waits.
    let begun = Instant::now();
    let later = FlowSocket::new(client, Role::Connector, plain(&listener));
    later.wait("plain TCP", Duration::from_secs(5), |s| {
        s.legacy == Some(false)
    });
    let (near, far) = server.pair(client);
    near.write(b"later").unwrap();
    let mut buf = [0; 5];
    far.read_exact(&mut buf).unwrap();
    assert!(client.flush(Duration::from_secs(5)));
    client.drain_exit(Duration::from_secs(5));
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(1), "took {took:?}");

    // The other agent of this process is not affected.
    let other = Agent::start(Config::default()).unwrap();
    let (near, far) = server.pair(&other);
    near.wait_live();
    far.wait_live();
    let state = || (asking::table().state)();
    assert_eq!(state(), SLIM_TABLE_ON);
    for agent in [other, server.agent.clone()] {
        assert!(agent.retire(Duration::from_secs(5)));
    }
    assert_eq!(state(), SLIM_TABLE_OFF);
    assert!(asking::all::<TableFlow>().unwrap().is_empty());
}
