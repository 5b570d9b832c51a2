//! Several processes accept from one listener: their flows are as good as those of a single process.
//!
//! One test, because the process forks.

mod common;

use std::net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use common::{FlowSocket, SOON, Server, connect_from};
use slim_agent::Agent;
use slim_core::Role;
use slim_core::auth::{FlowKey, Fresh, KeyInputs, seal_with_job};
use slim_core::config::Config;
use slim_core::wire::{self, Hello, HelloDone, MAX_LEN, Message};

/// An address that no other program of the host connects from, so that its ports are free again when a connection is over.
const OWN: (Ipv4Addr, u16) = (Ipv4Addr::new(127, 83, 0, 1), 0);
/// Most connections that a worker serves.
const CONNECTIONS: usize = 64;

/// Sends back what it reads, as a worker does.
fn echo(stream: &FlowSocket) {
    let mut buf = [0; 64];
    while let Ok(n @ 1..) = stream.read(&mut buf) {
        if stream.write(&buf[..n]).is_err() {
            break;
        }
    }
    stream.close();
}

/// Starts a worker process, which serves until it is killed.
fn worker(server: &Server, give_up_rights: bool) -> libc::pid_t {
    // SAFETY: the child calls what works with a heap that the C library keeps usable after a fork;
    // it is killed in the end.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid > 0 {
        return pid;
    }
    Agent::after_fork_child();
    if give_up_rights {
        // SAFETY: no memory is passed.
        let done = unsafe { libc::setgid(65534) == 0 && libc::setuid(65534) == 0 };
        assert!(done);
    }
    // SAFETY: no memory is passed. It must not outlive a test that fails.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let agent = Agent::start(Config::default()).unwrap();
    for _ in 0..CONNECTIONS {
        let sock = server.listener.accept().unwrap().0;
        let stream = FlowSocket::new(&agent, Role::Acceptor, sock);
        thread::spawn(move || echo(&stream));
    }
    loop {
        thread::sleep(Duration::from_secs(60));
    }
}

fn connect(client: &Agent, server: &Server) -> Arc<FlowSocket> {
    let sock = TcpStream::connect(server.addr()).unwrap();
    FlowSocket::new(client, Role::Connector, sock)
}

fn is_served(stream: &FlowSocket, text: &[u8; 5]) {
    stream.write(text).unwrap();
    let mut back = [0; 5];
    stream.read_exact(&mut back).unwrap();
    assert_eq!(&back, text);
}

fn is_plain(stream: &FlowSocket) {
    stream.wait("plain", Duration::from_millis(500), |s| s.legacy.is_some());
}

fn survives_kills(stream: &FlowSocket) {
    is_served(stream, b"hello");
    for kind in common::kills() {
        stream.kill(kind);
        is_served(stream, b"again");
    }
    assert!(stream.state().resumed > 0);
}

fn end(pid: libc::pid_t) {
    // SAFETY: our own child; the status is not wanted.
    unsafe {
        libc::kill(pid, libc::SIGKILL);
        libc::waitpid(pid, std::ptr::null_mut(), 0);
    }
}

/// A worker accepts a connection and resets it before the owner has the HELLO for it.
fn a_late_hello_is_answered(client: &Agent) {
    let server = Server::start(Config::default());
    let worker = Agent::start(Config::default()).unwrap();
    let near = TcpStream::connect(server.addr()).unwrap();
    let far = server.listener.accept().unwrap().0;
    // Keeps the connection open until the client has an agent, too.
    let _stands = far.try_clone().unwrap();
    FlowSocket::new(&worker, Role::Acceptor, far).reset();
    thread::sleep(Duration::from_millis(100));
    let near = FlowSocket::new(client, Role::Connector, near);
    is_plain(&near);
}

/// As above, but another process has had a connection with the same addresses, which another worker has accepted.
fn a_late_hello_for_addresses_used_before_is_answered(client: &Agent) {
    let server = Server::start(Config::default());
    let worker = Agent::start(Config::default()).unwrap();
    let near = connect_from(OWN.into(), server.addr());
    let from = near.local_addr().unwrap();
    let far = server.listener.accept().unwrap().0;
    let stands = far.try_clone().unwrap();
    FlowSocket::new(&worker, Role::Acceptor, far).reset();
    thread::sleep(SOON);
    let near = FlowSocket::new(client, Role::Connector, near);
    is_plain(&near);
    near.reset();
    drop(stands);
    is_answered_after_a_late_claim(&server, from);
}

/// A HELLO is repeated when its connection is over, and a later connection has the same addresses.
fn a_repeated_hello_is_not_taken_for_one_of_a_later_connection() {
    let server = Server::start(Config::default());
    let worker = Agent::start(Config::default()).unwrap();
    let near = connect_from(OWN.into(), server.addr());
    let from = near.local_addr().unwrap();
    let far = server.listener.accept().unwrap().0;
    let connector = UdpSocket::bind(OWN).unwrap();
    connector.set_read_timeout(Some(common::LIMIT)).unwrap();
    let hello = common::hello(2, from, server.addr());
    let send = || {
        let data = seal_with_job(None, &Message::Hello(hello));
        connector.send_to(&data, server.addr()).unwrap();
        thread::sleep(SOON);
    };
    send();
    let far = FlowSocket::new(&worker, Role::Acceptor, far);
    show_the_key(&connector, hello);
    far.wait_live();
    far.reset();
    drop(near);
    thread::sleep(SOON);
    send();
    is_answered_after_a_late_claim(&server, from);
}

/// Waits for the answer to this HELLO, and confirms it.
fn show_the_key(connector: &UdpSocket, hello: Hello) {
    let mut buf = [0; MAX_LEN];
    let (ack, from) = loop {
        let (n, from) = connector.recv_from(&mut buf).unwrap();
        if let Message::HelloAck(ack) = wire::parse(&buf[..n]).unwrap().message {
            break (ack, from);
        }
    };
    let inputs = KeyInputs {
        flow: hello.flow,
        random_c: hello.random_c,
        random_s: ack.random_s,
        connector: hello.endpoint,
        acceptor: ack.endpoint,
    };
    let key = FlowKey::derive(None, &inputs);
    let done = Message::HelloDone(HelloDone(hello));
    let data = key.seal(Role::Connector, Fresh::None, &done);
    connector.send_to(&data, from).unwrap();
}

/// Connects from `from` to a worker whose agent is busy until the worker has reset the connection and the HELLO for it has
/// come. When the worker has claimed the connection, the HELLO is answered.
fn is_answered_after_a_late_claim(server: &Server, from: SocketAddr) {
    let [worker, client] = [(); 2].map(|()| Agent::start(Config::default()).unwrap());
    let _near = connect(&client, server);
    let far = server.listener.accept().unwrap().0;
    let busy = FlowSocket::new(&worker, Role::Acceptor, far);
    busy.wait_live();
    let near = connect_from(from, server.addr());
    let far = server.listener.accept().unwrap().0;
    // The agent stays in a call for this flow.
    let holds = busy.state();
    worker.demote(busy.token);
    let near = FlowSocket::new(&client, Role::Connector, near);
    FlowSocket::new(&worker, Role::Acceptor, far).reset();
    thread::sleep(SOON);
    drop(holds);
    is_plain(&near);
}

#[test]
fn workers_share_a_listener() {
    let client = Agent::start(Config::default()).unwrap();
    a_late_hello_is_answered(&client);
    a_late_hello_for_addresses_used_before_is_answered(&client);
    a_repeated_hello_is_not_taken_for_one_of_a_later_connection();
    workers_share(&client, false);
    // SAFETY: always succeeds.
    if unsafe { libc::geteuid() } == 0 {
        workers_share(&client, true);
    }
}

fn workers_share(client: &Agent, give_up_rights: bool) {
    let server = Server::start(Config::default());
    // HELLO arrives before a worker accepts, and the flow must not wait for the next repetition of HELLO.
    let early: Vec<_> = (0..4).map(|_| connect(client, &server)).collect();
    thread::sleep(Duration::from_millis(300));
    let workers = [(); 2].map(|()| worker(&server, give_up_rights));
    for stream in &early {
        let took = stream.wait_live();
        assert!(took < Duration::from_millis(800), "took {took:?}");
    }
    early.iter().for_each(|stream| survives_kills(stream));

    // These are accepted right away.
    for _ in 0..10 {
        let stream = connect(client, &server);
        stream.wait_live();
        survives_kills(&stream);
        stream.close();
    }

    // The owner stops listening; the workers do not. One of them becomes the owner.
    server.agent.release(server.addr());
    let begun = Instant::now();
    loop {
        let stream = connect(client, &server);
        is_served(&stream, b"first");
        stream.wait("decided", common::LIMIT, |s| s.live || s.legacy.is_some());
        if stream.state().live {
            survives_kills(&stream);
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(10), "no new owner");
        // An address that has refused is not asked again for a while.
        thread::sleep(Duration::from_millis(200));
    }
    for _ in 0..10 {
        let stream = connect(client, &server);
        stream.wait_live();
        survives_kills(&stream);
    }
    // Flows for which the old owner forwarded HELLO are not affected.
    early.iter().for_each(|stream| survives_kills(stream));
    workers.into_iter().for_each(end);
}
