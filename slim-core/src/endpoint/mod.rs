//! All flows of one process: the session state machine.

mod action;
mod flow;

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};

use crate::config::Config;
use crate::event::Event;
use crate::ids::{Cause, ConnId, EndpointId, FinHow, FlowId, FlowToken, Role, Time};

pub use action::Action;
pub use flow::State;

/// All flows of one process.
pub struct Endpoint {
    actions: VecDeque<Action>,
    events: VecDeque<(FlowToken, FlowId, Event)>,
}

impl Endpoint {
    /// An endpoint without flows.
    pub fn new(
        config: Config,
        id: EndpointId,
        addrs: Vec<IpAddr>,
        resume_port: u16,
        control_port: u16,
        seed: [u8; 32],
    ) -> Self {
        let _ = (config, id, addrs, resume_port, control_port, seed);
        Endpoint {
            actions: VecDeque::new(),
            events: VecDeque::new(),
        }
    }
    /// Open.
    pub fn open(
        &mut self,
        now: Time,
        token: FlowToken,
        role: Role,
        local: SocketAddr,
        remote: SocketAddr,
    ) {
        let _ = (now, token, role, local, remote);
    }
    /// Fault.
    pub fn fault(&mut self, now: Time, token: FlowToken, cause: Cause) {
        let _ = (now, token, cause);
    }
    /// Finish.
    pub fn finish(&mut self, now: Time, token: FlowToken, final_seq: u64, how: FinHow) {
        let _ = (now, token, final_seq, how);
    }
    /// Gone.
    pub fn gone(&mut self, now: Time, token: FlowToken) {
        let _ = (now, token);
    }
    /// Demote.
    pub fn demote(&mut self, now: Time, token: FlowToken) {
        let _ = (now, token);
    }
    /// New addresses.
    pub fn set_addrs(&mut self, addrs: Vec<IpAddr>) {
        let _ = addrs;
    }
    /// A datagram came.
    pub fn handle_datagram(&mut self, now: Time, from: SocketAddr, local: SocketAddr, data: &[u8]) {
        let _ = (now, from, local, data);
    }
    /// ICMP port unreachable.
    pub fn handle_refused(&mut self, now: Time, to: SocketAddr) {
        let _ = (now, to);
    }
    /// Answer to `Suspend`.
    pub fn handle_suspended(&mut self, now: Time, token: FlowToken) {
        let _ = (now, token);
    }
    /// Answer to `Drain`.
    pub fn handle_drained(&mut self, now: Time, token: FlowToken, received: u64, sent: u64) {
        let _ = (now, token, received, sent);
    }
    /// Accepted on the resume listener.
    pub fn handle_incoming(&mut self, now: Time, conn: ConnId, from: SocketAddr) {
        let _ = (now, conn, from);
    }
    /// Connected.
    pub fn handle_connected(&mut self, now: Time, conn: ConnId) {
        let _ = (now, conn);
    }
    /// One whole message.
    pub fn handle_message(&mut self, now: Time, conn: ConnId, data: &[u8]) {
        let _ = (now, conn, data);
    }
    /// Connection lost; errno 0 is an end of stream.
    pub fn handle_conn_lost(&mut self, now: Time, conn: ConnId, errno: i32) {
        let _ = (now, conn, errno);
    }
    /// Answer to `Flush`.
    pub fn handle_flushed(&mut self, now: Time, conn: ConnId) {
        let _ = (now, conn);
    }
    /// Replay written.
    pub fn handle_installed(&mut self, now: Time, token: FlowToken, replayed: u64) {
        let _ = (now, token, replayed);
    }
    /// Time has come.
    pub fn handle_timeout(&mut self, now: Time) {
        let _ = now;
    }
    /// Next action.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }
    /// When to call `handle_timeout`.
    pub fn poll_timeout(&self) -> Option<Time> {
        None
    }
    /// Next event.
    pub fn poll_event(&mut self) -> Option<(FlowToken, FlowId, Event)> {
        self.events.pop_front()
    }
    /// State of a flow.
    pub fn state(&self, token: FlowToken) -> Option<State> {
        let _ = token;
        None
    }
}
