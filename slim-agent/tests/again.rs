//! Connections with the same addresses and ports, one after the other, while the agent is late.

mod common;

use std::thread;

use common::{FlowSocket, Kill, SOON, Server, connect_from};
use slim_agent::Agent;
use slim_core::config::Config;
use slim_core::{Cause, Role};

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
