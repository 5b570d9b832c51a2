//! What a program can ask: the table has the flows of all agents of the process.

#[path = "common/beside.rs"]
mod beside;
mod common;
#[path = "common/under_preload.rs"]
mod under_preload;

use std::io::Read;
use std::net::SocketAddr;

use beside::*;
use common::*;
use slim::table::{self, SLIM_TABLE_FLOW_ACTIVE, SLIM_TABLE_FLOW_ENDED, TableFlow};
use slim::{Flow, Session};
use under_preload::*;

fn active() -> Vec<TableFlow> {
    let mut flows = table::flows().unwrap();
    flows.retain(|flow| flow.state == SLIM_TABLE_FLOW_ACTIVE);
    flows
}

/// The states of the flows with these addresses.
fn states((sock, peer): (SocketAddr, SocketAddr)) -> Vec<u32> {
    let flows = table::flows().unwrap().into_iter();
    let same = flows.filter(|flow| {
        table::text(&flow.sock) == sock.to_string() && table::text(&flow.peer) == peer.to_string()
    });
    same.map(|flow| flow.state).collect()
}

fn ends(flow: &Flow) -> (SocketAddr, SocketAddr) {
    (flow.local_addr().unwrap(), flow.remote_addr())
}

/// Ends a flow by a reset of the peer, and checks that the table has it. Then closes the session.
fn escalate(linked: Linked, count: usize) {
    let Linked {
        near,
        far,
        endpoint,
        session,
    } = linked;
    let mut news = std::fs::File::from(table::descriptor().unwrap());
    let mut byte = [0; 8];
    assert!(news.read(&mut byte).is_err());
    let at = ends(&near);
    near.send_all(b"not read", LIMIT).unwrap();
    far.reset();
    assert!(near.recv_exact(&mut byte, LIMIT).is_err());
    assert!(news.read(&mut byte).is_ok_and(|n| n > 0));
    let all = table::escalations().unwrap();
    assert_eq!(all.len(), count);
    assert_eq!(all[0].seq, count as u64);
    assert_eq!(table::text(&all[0].sock), at.0.to_string());
    assert!(states(at).contains(&SLIM_TABLE_FLOW_ENDED));
    drop((near, endpoint));
    session.close(LIMIT.unwrap()).unwrap();
}

#[test]
fn the_table_has_the_flows_of_all_agents_of_all_copies() {
    if !is_under_preload("the_table_has_the_flows_of_all_agents_of_all_copies") {
        return;
    }
    assert!(table::flows().unwrap().is_empty());
    let plain = Plain::open();
    let shared = Linked::open();
    assert_eq!(active().len(), 4);
    // An agent of the program's copy.
    let driven = Linked::open_in(Session::open(options(&[]).without_thread()).unwrap());
    assert_eq!(active().len(), 6);
    let both = [plain.ends(), ends(&shared.far), ends(&driven.near)];
    assert!(
        both.iter()
            .all(|ends| states(*ends) == [SLIM_TABLE_FLOW_ACTIVE])
    );
    assert!(table::peers().unwrap().len() >= 2);
    shared.survive(kills()[0]);
    let resumed = active().iter().map(|flow| flow.resumes).max();
    assert_eq!(resumed, Some(1));
    escalate(shared, 1);
    escalate(driven, 2);
    assert_eq!(active().len(), 2);
    drop(plain);
}

#[test]
fn a_program_without_the_preload_library_has_a_table_of_its_own() {
    if runs_alone_elsewhere("a_program_without_the_preload_library_has_a_table_of_its_own") {
        return;
    }
    assert_eq!((table::calls().state)(), table::SLIM_TABLE_OFF);
    let linked = Linked::open();
    assert_eq!((table::calls().state)(), table::SLIM_TABLE_ON);
    assert_eq!(active().len(), 2);
    escalate(linked, 1);
    assert_eq!((table::calls().state)(), table::SLIM_TABLE_OFF);
    assert!(active().is_empty());
}
