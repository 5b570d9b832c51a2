//! A connection for which both OPEN and HELLO have come.

use super::off_path::forged;
use super::pair::*;
use super::pairs::{ends, token};
use crate::auth::seal_with_job;
use crate::endpoint::candidates::CANDIDATES;
use crate::endpoint::{Action, State};
use crate::event::Event;
use crate::ids::Cause;
use crate::wire::{self, Hello, Kind, Message};

impl Pair {
    /// B gets a HELLO for the connection 9 that A has not sent.
    fn forge_hello(&mut self, n: u8) {
        let [connector, acceptor] = ends(9);
        let hello = Message::Hello(Hello {
            connector,
            acceptor,
            ..forged(n)
        });
        let from = (connector.ip(), 9).into();
        let data = seal_with_job(None, &hello);
        self.ends[B].handle_datagram(self.now, from, acceptor, &data);
        self.run();
    }

    /// Takes the datagrams that an end wants to send now.
    fn take_sent(&mut self, n: usize) -> Vec<(Kind, Vec<u8>)> {
        let mut all = Vec::new();
        while let Some(action) = self.ends[n].poll_action() {
            if let Action::Datagram { data, .. } = action {
                let kind = wire::parse(&data).unwrap().message.kind();
                all.push((kind, data));
            }
        }
        all
    }

    /// An end gets a datagram that the other one has sent.
    fn give(&mut self, n: usize, data: &[u8]) {
        let (from, to) = (control(1 - n), control(n));
        self.ends[n].handle_datagram(self.now, from, to, data);
    }

    /// The connection 9 breaks, and is resumed.
    fn breaks_and_resumes(&mut self) {
        for end in &mut self.ends {
            end.fault(self.now, token(9), Cause::Errno(RESET));
        }
        self.wait(ms(1000));
        assert_eq!(self.states_of(9), [Some(State::Live); 2]);
        let resumed = |event: &Event| matches!(event, Event::Resume { .. });
        assert!(self.events.iter().flatten().any(resumed));
    }
}

/// The messages of a kind.
fn of(kind: Kind, sent: &[(Kind, Vec<u8>)]) -> Vec<Vec<u8>> {
    let these = sent.iter().filter(|(k, _)| *k == kind);
    these.map(|(_, data)| data.clone()).collect()
}

#[test]
fn forged_hellos_do_not_displace_an_open() {
    for early in [false, true] {
        let mut pair = Pair::known();
        let opened = pair.connect(9).expect("known");
        pair.forge_hello(1);
        if early {
            pair.arrives(&opened.data);
        } else {
            pair.accept(9);
            pair.arrives(&opened.data);
        }
        for n in 2..4 + CANDIDATES as u8 {
            pair.forge_hello(n);
        }
        if early {
            pair.accept(9);
        }
        pair.wait(ms(300));
        assert_eq!(pair.states_of(9), [Some(State::Live); 2], "early: {early}");
        pair.breaks_and_resumes();
    }
}

#[test]
fn both_ends_give_the_flow_the_same_id_if_hello_ack_and_the_query_about_open_cross() {
    let mut pair = Pair::known();
    let opened = pair.connect(9).expect("known");
    // OPEN and two QUERYs are late, and A sends HELLO.
    pair.udp[B] = Net::Silent;
    pair.wait(ms(450));
    let mut sent = Vec::new();
    while of(Kind::Hello, &sent).is_empty() {
        pair.now = pair.ends[A].poll_timeout().unwrap();
        pair.ends[A].handle_timeout(pair.now);
        sent.extend(pair.take_sent(A));
    }
    let query = of(Kind::Query, &sent).remove(0);
    let hello = of(Kind::Hello, &sent).remove(0);
    // B's application accepts. HELLO comes first, then OPEN, then QUERY. HELLO_ACK is on its way meanwhile.
    pair.udp[B] = Net::Works;
    pair.accept(9);
    pair.give(B, &hello);
    let ack = of(Kind::HelloAck, &pair.take_sent(B)).remove(0);
    let mailbox = (ends(9)[B].ip(), MAILBOX).into();
    let pairs = pair.ends[B].pairs().clone();
    pairs.receive(pair.now, control(A), mailbox, &opened.data);
    pair.ends[B].take_arrivals(pair.now);
    pair.give(B, &query);
    let answers = pair.take_sent(B);
    pair.give(A, &ack);
    for (_, data) in answers {
        pair.give(A, &data);
    }
    pair.run();
    assert_eq!(pair.states_of(9), [Some(State::Live); 2]);
    pair.breaks_and_resumes();
}
