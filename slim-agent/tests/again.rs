//! Connections with the same addresses and ports, one after the other, while the agent is late.

mod common;

use std::io::Write;
use std::net::Shutdown;
use std::thread;
use std::time::Duration;

use common::{FlowSocket, Kill, SOON, Server, can_destroy, connect_from};
use slim_agent::Agent;
use slim_core::config::Config;
use slim_core::{Cause, FinHow, Role};

/// A connection is reset before its HELLO is answered, and the acceptor takes that HELLO for a HELLO of the next
/// connection. The connector's agent finds the answer together with the commands about the next connection, and about a
/// fault of another flow.
#[test]
fn the_answer_for_an_earlier_connection_does_not_overtake_the_command_about_the_next() {
    let server = Server::start(Config::default());
    let client = Agent::start(Config::default()).unwrap();
    let (held, _held_far) = server.pair(&client);
    let (faulty, faulty_far) = server.pair(&client);
    for flow in [&held, &faulty, &faulty_far] {
        flow.wait_live();
    }
    let first = connect_from("127.0.0.1:0".parse().unwrap(), server.addr());
    let from = first.local_addr().unwrap();
    let first = FlowSocket::new(&client, Role::Connector, first);
    // Its HELLO has arrived, and waits until the connection is accepted.
    thread::sleep(SOON);
    // The agent thread stays in a call for this flow.
    let holds = held.state();
    client.demote(held.token);
    thread::sleep(SOON);
    faulty.kill(Kill::Fin);
    client.fault(faulty.token, Cause::Errno(libc::ECONNRESET));
    first.reset();
    client.about_to_connect(from, server.addr());
    let next = connect_from(from, server.addr());
    drop(server.listener.accept());
    let far = server.listener.accept().unwrap().0;
    assert_eq!(far.peer_addr().unwrap(), from);
    let far = FlowSocket::new(&server.agent, Role::Acceptor, far);
    thread::sleep(SOON);
    let next = FlowSocket::new(&client, Role::Connector, next);
    drop(holds);
    next.wait_live();
    far.wait_live();
    for word in [b"before", b"behind"] {
        far.write(word).unwrap();
        let mut got = [0; 6];
        next.read_exact(&mut got).unwrap();
        assert_eq!(&got, word);
        next.kill(Kill::Fin);
    }
}

/// A connection is reset before its HELLO is answered, and another process uses its port for the next one. The acceptor takes
/// the HELLO for one of the next connection. The first process must not say how that ends.
#[test]
fn an_earlier_process_does_not_answer_for_the_next_one() {
    for reset in [true, false] {
        if !reset && !can_destroy() {
            continue;
        }
        let server = Server::start(Config::default());
        let client = Agent::start(Config::default()).unwrap();
        let first = connect_from("127.0.0.1:0".parse().unwrap(), server.addr());
        let from = first.local_addr().unwrap();
        let first = FlowSocket::new(&client, Role::Connector, first);
        // Its HELLO has arrived, and waits until the connection is accepted.
        thread::sleep(SOON);
        match reset {
            true => first.reset(),
            // The process has not noticed that the kernel has no connection any more.
            false => first.kill(Kill::Destroy),
        }
        // No agent hears of the next connection: it is another process's.
        let mut next = connect_from(from, server.addr());
        drop(server.listener.accept());
        let far = server.listener.accept().unwrap().0;
        assert_eq!(far.peer_addr().unwrap(), from);
        let far = FlowSocket::new(&server.agent, Role::Acceptor, far);
        next.write_all(b"whole").unwrap();
        next.shutdown(Shutdown::Write).unwrap();
        let mut got = [0; 5];
        far.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"whole");
        assert_eq!(far.read(&mut got).ok(), Some(0), "{reset}");
        far.finish(FinHow::Close);
        thread::sleep(Duration::from_millis(300));
        assert!(!far.state().live, "{reset}");
    }
}
