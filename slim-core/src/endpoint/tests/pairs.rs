//! Short connections between processes that know each other.

use std::net::SocketAddr;

use super::pair::*;
use crate::config::Config;
use crate::endpoint::{Action, MailboxState, Opened, State};
use crate::event::Event;
use crate::ids::{Cause, EndpointId, FinHow, FlowToken, Role};
use crate::wire::{self, FlowStatus, Kind, Message};

/// Both ends of the `n`th connection.
pub(super) fn ends(n: u64) -> [SocketAddr; 2] {
    let mut ends = addrs();
    ends[A].set_port(20_000 + n as u16);
    ends
}

pub(super) fn token(n: u64) -> FlowToken {
    FlowToken(n)
}

impl Pair {
    /// Opens the `n`th connection: by OPEN if there is a pair, else by HELLO.
    pub(super) fn connect(&mut self, n: u64) -> Option<Opened> {
        let [local, remote] = ends(n);
        let opened = self.ends[A].pairs().dial(self.now, local, remote);
        match &opened {
            Some(opened) => self.ends[A].open_known(self.now, token(n), local, opened),
            None => self.ends[A].open(self.now, token(n), Role::Connector, local, remote),
        }
        opened
    }

    pub(super) fn accept(&mut self, n: u64) {
        let [remote, local] = ends(n);
        self.ends[B].open(self.now, token(n), Role::Acceptor, local, remote);
        self.run();
    }

    pub(super) fn arrives(&mut self, data: &[u8]) {
        let to = SocketAddr::new(addrs()[B].ip(), MAILBOX);
        self.ends[B].pairs().receive(self.now, control(A), to, data);
        self.ends[B].take_arrivals(self.now);
        self.ends[B].send_seen(self.now);
        self.run();
    }

    fn close(&mut self, n: u64, sent: u64) {
        for end in &mut self.ends {
            end.finish(self.now, token(n), sent, FinHow::Close);
            end.gone(self.now, token(n));
        }
        self.run();
    }

    /// Two processes that have a pair.
    pub(super) fn known() -> Pair {
        Pair::known_with([Config::default(), Config::default()])
    }

    fn known_with(configs: [Config; 2]) -> Pair {
        let mut pair = Pair::with(configs);
        for n in 1..=2 {
            assert!(pair.connect(n).is_none(), "no pair yet");
            pair.accept(n);
            pair.run();
            pair.close(n, 0);
            pair.wait(ms(100));
        }
        pair.forget();
        pair
    }

    pub(super) fn states_of(&self, n: u64) -> [Option<State>; 2] {
        [A, B].map(|end| self.ends[end].state(token(n)))
    }
}

#[test]
fn one_open_makes_a_flow_live_at_the_acceptor() {
    let mut pair = Pair::known();
    let opened = pair.connect(9).expect("known");
    pair.accept(9);
    pair.arrives(&opened.data);
    assert_eq!(pair.states_of(9)[B], Some(State::Live));
    assert_eq!(pair.kinds(A), [Kind::Seen]);
    pair.wait(ms(300));
    // The connector sends QUERY once, so that the flow becomes live at its end, too.
    assert_eq!(pair.states_of(9), [Some(State::Live); 2]);
    assert_eq!(pair.kinds(A), [Kind::Seen, Kind::Status]);
}

#[test]
fn an_early_open_waits_for_its_connection() {
    let mut pair = Pair::known();
    let opened = pair.connect(9).expect("known");
    pair.arrives(&opened.data);
    pair.arrives(&opened.fin(7, FinHow::Close));
    assert!(pair.kinds(A).is_empty());
    pair.accept(9);
    assert_eq!(pair.states_of(9)[B], Some(State::Live));
    let final_of_9 = |action: &Action| matches!(action, Action::PeerFinal { token, seq: 7 } if *token == self::token(9));
    assert_eq!(pair.count(B, final_of_9), 1);
}

#[test]
fn the_end_of_a_stream_can_be_read_from_the_mailbox_without_the_endpoint() {
    let mut pair = Pair::known();
    let opened = pair.connect(9).expect("known");
    let [remote, local] = ends(9);
    let (now, from) = (pair.now, control(A));
    let pairs = pair.ends[B].pairs().clone();
    let at = SocketAddr::new(local.ip(), MAILBOX);
    assert_eq!(
        pairs.read_mailboxes(now, local, remote),
        MailboxState::Nothing
    );
    pairs.receive(now, from, at, &opened.data);
    assert_eq!(pairs.read_mailboxes(now, local, remote), MailboxState::Open);
    pairs.receive(now, from, at, &opened.fin(3, FinHow::Close));
    assert_eq!(
        pairs.read_mailboxes(now, local, remote),
        MailboxState::Closed(3)
    );
    pair.accept(9);
    pair.ends[B].take_arrivals(now);
    assert_eq!(pair.states_of(9)[B], Some(State::Live));
    pair.ends[B].gone(now, token(9));
    assert_eq!(
        pairs.read_mailboxes(now, local, remote),
        MailboxState::Nothing
    );
}

#[test]
fn after_a_lost_open_the_flow_is_negotiated_by_hello() {
    let mut pair = Pair::known();
    pair.connect(9).expect("known");
    pair.accept(9);
    pair.wait(ms(500));
    assert_eq!(pair.states_of(9), [Some(State::Live); 2]);
    assert_eq!(
        pair.kinds(B)[..3],
        [Kind::Query, Kind::Hello, Kind::HelloDone]
    );
    assert_eq!(pair.kinds(A)[..2], [Kind::Unknown, Kind::HelloAck]);
}

#[test]
fn a_connection_that_breaks_before_its_open_is_answered_is_resumed() {
    for lost in [false, true] {
        let mut pair = Pair::known();
        let opened = pair.connect(9).expect("known");
        pair.accept(9);
        if !lost {
            pair.arrives(&opened.data);
        }
        for end in &mut pair.ends {
            end.fault(pair.now, token(9), Cause::Errno(RESET));
        }
        pair.wait(ms(1000));
        assert_eq!(pair.states_of(9), [Some(State::Live); 2], "lost: {lost}");
        let resumed = |event: &Event| matches!(event, Event::Resume { .. });
        assert!(pair.events[A].iter().any(resumed));
    }
}

#[test]
fn a_flow_closed_before_any_query_still_answers_a_late_one() {
    let mut pair = Pair::known();
    let opened = pair.connect(9).expect("known");
    pair.ends[A].finish(pair.now, token(9), 5, FinHow::Close);
    pair.ends[A].gone(pair.now, token(9));
    pair.accept(9);
    pair.arrives(&opened.data);
    // FIN was lost, and the stream has ended.
    pair.forget();
    let cause = Cause::Eof { received: 5 };
    pair.ends[B].fault(pair.now, token(9), cause);
    pair.wait(ms(100));
    let closed = pair.messages(B).into_iter().find_map(|m| match m {
        Message::Status(status) => Some(status.state),
        _ => None,
    });
    assert_eq!(closed, Some(FlowStatus::Closed(5)));
    assert_eq!(pair.states_of(9)[B], Some(State::Live));
    assert_eq!(pair.ends[A].tables().timers, 0);
}

#[test]
fn a_repeated_open_or_fin_has_no_effect() {
    let mut pair = Pair::known();
    let opened = pair.connect(9).expect("known");
    pair.accept(9);
    pair.arrives(&opened.data);
    pair.arrives(&opened.fin(0, FinHow::Close));
    pair.close(9, 0);
    // The same ports are used again, and the recorded messages are repeated.
    let [remote, local] = ends(9);
    let token = token(10);
    pair.ends[B].open(pair.now, token, Role::Acceptor, local, remote);
    pair.arrives(&opened.data);
    pair.arrives(&opened.fin(0, FinHow::Close));
    assert_eq!(pair.ends[B].state(token), Some(State::Negotiating));
    assert_eq!(
        pair.ends[B].pairs().read_mailboxes(pair.now, local, remote),
        MailboxState::Nothing
    );
}

#[test]
fn a_forged_open_or_one_from_another_host_does_nothing() {
    let mut pair = Pair::known();
    let opened = pair.connect(9).expect("known");
    pair.accept(9);
    for at in 8..opened.data.len() {
        let mut forged = opened.data.clone();
        forged[at] ^= 1;
        pair.arrives(&forged);
    }
    let to = SocketAddr::new(addrs()[B].ip(), MAILBOX);
    let stranger = "10.0.0.66:701".parse().unwrap();
    let pairs = pair.ends[B].pairs().clone();
    pairs.receive(pair.now, stranger, to, &opened.data);
    pair.ends[B].take_arrivals(pair.now);
    assert_eq!(pair.states_of(9)[B], Some(State::Negotiating));
    pair.arrives(&opened.data);
    assert_eq!(pair.states_of(9)[B], Some(State::Live));
    let Ok(parsed) = wire::parse(&opened.data) else {
        panic!()
    };
    assert_eq!(parsed.message.kind(), Kind::Open);
}

#[test]
fn an_endpoint_without_pairs_is_never_offered_one() {
    for old in [A, B] {
        let mut pair = Pair::new();
        pair.ends[old].set_features(0);
        for n in 1..=5 {
            assert!(pair.connect(n).is_none());
            pair.accept(n);
            pair.run();
            assert_eq!(pair.states_of(n), [Some(State::Live); 2]);
            pair.close(n, 0);
            pair.wait(ms(100));
        }
        assert!(!pair.kinds(A).contains(&Kind::Pair), "old: {old}");
    }
}

#[test]
fn a_process_that_shares_a_listener_offers_no_pair() {
    let mut pair = Pair::known();
    let opened = pair.connect(9).expect("known");
    pair.ends[B].share_listeners();
    pair.accept(9);
    pair.arrives(&opened.data);
    assert_eq!(pair.states_of(9)[B], Some(State::Negotiating));
    pair.wait(ms(3500));
    assert_eq!(pair.states_of(9), [Some(State::Live); 2], "by HELLO");
    // No SEEN has come for more than three seconds.
    assert!(pair.connect(10).is_none());
    assert!(!pair.kinds(A).contains(&Kind::Pair));
}

#[test]
fn a_new_process_on_the_same_port_is_asked_by_hello() {
    let mut pair = Pair::known();
    let life = EndpointId {
        incarnation: 99,
        ..id(B)
    };
    let at = vec![addrs()[B].ip()];
    pair.ends[B] = endpoint_at(life, at, Config::default(), 77);
    let opened = pair.connect(9).expect("known");
    pair.accept(9);
    pair.arrives(&opened.data);
    assert_eq!(pair.states_of(9)[B], Some(State::Negotiating));
    pair.wait(ms(1500));
    assert_eq!(pair.states_of(9), [Some(State::Live); 2]);
}

#[test]
fn a_refused_mailbox_is_not_used_again() {
    let mut pair = Pair::known();
    let opened = pair.connect(9).expect("known");
    let mut forged = opened.data.clone();
    forged[8..24].fill(9);
    let mailbox = opened.mailbox;
    pair.ends[A].handle_refused(pair.now, mailbox, &forged);
    assert!(pair.connect(10).is_some(), "names no known flow");
    pair.ends[A].handle_refused(pair.now, mailbox, &opened.data);
    assert!(pair.connect(11).is_none());
}

#[test]
fn a_mailbox_that_cannot_be_reached_is_never_used() {
    let mut pair = Pair::new();
    for n in 1..=3 {
        assert!(pair.connect(n).is_none());
        let [remote, local] = ends(n);
        pair.ends[B].open(pair.now, token(n), Role::Acceptor, local, remote);
        // All datagrams arrive except those to the mailbox.
        while let Some(action) = pair.ends[A].poll_action() {
            if !matches!(&action, Action::Datagram { to, .. } if to.port() == MAILBOX) {
                pair.act(A, action);
            }
            while let Some(action) = pair.ends[B].poll_action() {
                pair.act(B, action);
            }
        }
        for end in &mut pair.ends {
            end.gone(pair.now, token(n));
        }
        pair.now = pair.now + ms(100);
    }
    assert!(pair.connect(4).is_none());
}

#[test]
fn an_unused_pair_expires() {
    let mut pair = Pair::known();
    pair.wait(ms(121_000));
    assert!(pair.connect(9).is_none());
}

#[test]
fn a_pair_in_use_does_not_expire() {
    let mut pair = Pair::known();
    for n in 1..20 {
        let opened = pair.connect(100 + n);
        let opened = opened.unwrap_or_else(|| panic!("no pair after {n} minutes"));
        pair.accept(100 + n);
        pair.arrives(&opened.data);
        assert_eq!(pair.states_of(100 + n)[B], Some(State::Live));
        pair.close(100 + n, 0);
        pair.wait(ms(60_000));
    }
    assert!(!pair.kinds(A).contains(&Kind::Pair), "no new pair");
    assert!(!pair.kinds(B).contains(&Kind::Hello));
}

#[test]
fn a_pair_without_seen_is_used_again_after_seen() {
    let mut pair = Pair::known();
    pair.udp[B] = Net::Silent;
    let opened = pair.connect(9).expect("known");
    pair.wait(ms(3100));
    assert!(pair.connect(10).is_none(), "no SEEN has come");
    pair.udp[B] = Net::Works;
    pair.accept(9);
    pair.arrives(&opened.data);
    assert!(pair.kinds(A).contains(&Kind::Seen));
    assert!(pair.connect(11).is_some());
}

#[test]
fn a_pair_message_is_accepted_when_its_flow_is_over() {
    for before_ack in [false, true] {
        let mut pair = Pair::new();
        assert!(pair.connect(1).is_none());
        pair.accept(1);
        pair.close(1, 0);
        assert!(pair.connect(2).is_none());
        let step = |pair: &mut Pair, end: usize| {
            while let Some(action) = pair.ends[end].poll_action() {
                pair.act(end, action);
            }
        };
        if !before_ack {
            let [remote, local] = ends(2);
            pair.ends[B].open(pair.now, token(2), Role::Acceptor, local, remote);
            // HELLO, HELLO_ACK, HELLO_DONE; then PAIR.
            [A, B, A].into_iter().for_each(|end| step(&mut pair, end));
        }
        pair.ends[A].finish(pair.now, token(2), 5, FinHow::Close);
        pair.ends[A].gone(pair.now, token(2));
        if before_ack {
            pair.accept(2);
        }
        pair.run();
        assert!(pair.kinds(A).contains(&Kind::Pair));
        assert!(pair.connect(3).is_some(), "closed before ACK: {before_ack}");
    }
}

#[test]
fn a_demoted_flow_that_began_with_open_still_answers_query() {
    let mut pair = Pair::known();
    let opened = pair.connect(9).expect("known");
    pair.accept(9);
    pair.arrives(&opened.data);
    pair.forget();
    // DEMOTE is lost.
    pair.udp[B] = Net::Silent;
    pair.ends[A].demote(pair.now, token(9));
    pair.run();
    pair.ends[A].gone(pair.now, token(9));
    pair.udp[B] = Net::Works;
    pair.ends[B].fault(pair.now, token(9), Cause::Eof { received: 0 });
    pair.run();
    assert_eq!(pair.kinds(A), [Kind::Query]);
    assert_eq!(pair.kinds(B), [Kind::Status]);
    assert_eq!(pair.states_of(9)[B], Some(State::Legacy));
}

/// The acceptor could take an OPEN of the earlier connection for one of the later.
#[test]
fn no_open_is_made_for_a_recently_used_port() {
    let mut pair = Pair::known();
    let [local, remote] = ends(9);
    let dial = |pair: &mut Pair, n: u16| {
        let mut local = local;
        local.set_port(n);
        pair.ends[A].pairs().dial(pair.now, local, remote)
    };
    let opened = dial(&mut pair, 9).expect("known");
    assert!(dial(&mut pair, 9).is_none());
    pair.arrives(&opened.data);
    assert!(dial(&mut pair, 9).is_none());
    for n in 10_000..11_024 {
        let opened = dial(&mut pair, n).expect("another port");
        pair.arrives(&opened.data);
        pair.ends[B].open(pair.now, FlowToken(n.into()), Role::Acceptor, remote, {
            let mut local = local;
            local.set_port(n);
            local
        });
        pair.run();
        pair.ends[B].send_seen(pair.now);
        pair.run();
    }
    assert!(dial(&mut pair, 9).is_some());
}

/// An application thread of the acceptor has read the OPEN, while its endpoint answers UNKNOWN: the end of the stream is not
/// passed on yet.
#[test]
fn an_end_of_stream_after_a_refused_open_waits_for_hello() {
    let mut pair = Pair::known();
    let opened = pair.connect(9).expect("known");
    pair.arrives(&opened.data);
    // The connection breaks before it is accepted.
    pair.ends[A].fault(pair.now, token(9), Cause::Errno(RESET));
    let question = std::iter::from_fn(|| pair.ends[A].poll_action()).find_map(|a| match a {
        Action::Datagram { data, .. } => Some(data),
        _ => None,
    });
    let at = control(B);
    pair.ends[B].handle_datagram(pair.now, control(A), at, &question.expect("QUERY"));
    pair.udp[B] = Net::Silent;
    pair.accept(9);
    pair.ends[B].fault(pair.now, token(9), Cause::Eof { received: 0 });
    pair.run();
    assert_eq!(pair.states_of(9)[B], Some(State::Negotiating));
    pair.udp[B] = Net::Works;
    pair.wait(ms(200));
    assert_eq!(pair.states_of(9), [Some(State::Live); 2]);
}
