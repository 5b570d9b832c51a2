//! Where processes of a job find each other after their addresses have changed: `docs/PROTOCOL.md`, section "Held flows". It is a part of the
//! [witness](crate::witness).
//!
//! A process that holds flows says where it is, and asks for its peer. It is answered as soon as the peer has said where it is, too. Nothing is
//! decided here: whoever answers at that place has to show the key of the flow.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;

use crate::ids::EndpointId;
use crate::wire::{Here, ProcessPlace, Where};

/// Most processes that are remembered. The one that was heard least recently makes room for a new one.
const MEETERS: usize = 1 << 16;

/// The places of processes.
#[derive(Default)]
pub(crate) struct Meeting {
    known: BTreeMap<EndpointId, Meeter>,
    /// Counts messages: the order in which processes were heard.
    clock: u64,
    by_age: BTreeMap<u64, EndpointId>,
}

struct Meeter {
    place: ProcessPlace,
    /// Where its messages come from.
    from: SocketAddr,
    heard: u64,
    /// Which processes were told of this place without having asked.
    told: BTreeSet<EndpointId>,
}

impl Meeting {
    /// The answers to WHERE, whose code the caller has verified, and where they go to.
    pub(crate) fn on_where(
        &mut self,
        from: SocketAddr,
        message: &Where,
        out: &mut VecDeque<(SocketAddr, Here)>,
    ) {
        let (sender, wanted) = (message.sender, message.wanted);
        if !self.note(from, sender, message.place) {
            // A recorded message.
            return;
        }
        let here = |to, endpoint, place| Here {
            to,
            endpoint,
            place,
        };
        let Some(other) = self.known.get(&wanted) else {
            return;
        };
        let at = other.from;
        if other.place.serial > message.known {
            out.push_back((from, here(sender, wanted, other.place)));
        }
        if wanted == sender {
            // It only wants to know that it was heard.
            return;
        }
        if let Some(own) = self.known.get_mut(&sender)
            && own.told.insert(wanted)
        {
            out.push_back((at, here(wanted, sender, own.place)));
        }
    }

    /// A process is at this place. False if it has been at a later one.
    fn note(&mut self, from: SocketAddr, sender: EndpointId, place: ProcessPlace) -> bool {
        self.clock += 1;
        let mut told = BTreeSet::new();
        if let Some(old) = self.known.get_mut(&sender) {
            if old.place.serial > place.serial {
                return false;
            }
            if old.place == place {
                told = std::mem::take(&mut old.told);
            }
            self.by_age.remove(&old.heard);
        } else if self.known.len() >= MEETERS
            && let Some((_, oldest)) = self.by_age.pop_first()
        {
            self.known.remove(&oldest);
        }
        let heard = self.clock;
        self.by_age.insert(heard, sender);
        self.known.insert(
            sender,
            Meeter {
                place,
                from,
                heard,
                told,
            },
        );
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::AddrList;

    fn id(n: u8) -> EndpointId {
        EndpointId {
            host: [n; 16],
            pid: 1,
            incarnation: 2,
        }
    }

    fn at(n: u8) -> SocketAddr {
        SocketAddr::new([10, 0, 0, n].into(), 9)
    }

    fn place(n: u8, serial: u64) -> ProcessPlace {
        ProcessPlace {
            serial,
            resume_port: 8,
            control_port: 9,
            addrs: AddrList::new([at(n).ip()]),
        }
    }

    /// The answers when `who` asks for `whom`, of which it knows the place `known`: where to, for whom, about whom, serial number.
    fn ask(
        meeting: &mut Meeting,
        (who, serial): (u8, u64),
        whom: u8,
        known: u64,
    ) -> Vec<(SocketAddr, EndpointId, EndpointId, u64)> {
        let mut out = VecDeque::new();
        let message = Where {
            sender: id(who),
            wanted: id(whom),
            known,
            place: place(who, serial),
        };
        meeting.on_where(at(who), &message, &mut out);
        let answers = out.into_iter();
        answers
            .map(|(to, here)| (to, here.to, here.endpoint, here.place.serial))
            .collect()
    }

    #[test]
    fn two_that_look_for_each_other_are_told_once_both_have_come() {
        let mut meeting = Meeting::default();
        assert_eq!(ask(&mut meeting, (1, 5), 2, 0), []);
        let both = [(at(2), id(2), id(1), 5), (at(1), id(1), id(2), 7)];
        assert_eq!(ask(&mut meeting, (2, 7), 1, 0), both);
        // What each knows is not said again.
        assert_eq!(ask(&mut meeting, (2, 7), 1, 5), []);
        assert_eq!(ask(&mut meeting, (1, 5), 2, 7), [(at(2), id(2), id(1), 5)]);
        assert_eq!(ask(&mut meeting, (1, 5), 2, 7), []);
        // One moves again.
        assert_eq!(ask(&mut meeting, (1, 6), 2, 7), [(at(2), id(2), id(1), 6)]);
    }

    #[test]
    fn a_recorded_message_brings_no_old_place_back() {
        let mut meeting = Meeting::default();
        ask(&mut meeting, (1, 6), 2, 0);
        assert_eq!(ask(&mut meeting, (1, 5), 2, 0), []);
        assert_eq!(ask(&mut meeting, (2, 1), 1, 0)[0].3, 6);
    }

    #[test]
    fn a_process_that_asks_for_itself_learns_that_it_was_heard() {
        let mut meeting = Meeting::default();
        let heard = [(at(1), id(1), id(1), 4)];
        assert_eq!(ask(&mut meeting, (1, 4), 1, 0), heard);
    }

    #[test]
    fn the_process_that_was_heard_least_recently_makes_room() {
        let mut meeting = Meeting::default();
        for n in 0..=MEETERS as u32 {
            let sender = EndpointId { pid: n, ..id(1) };
            assert!(meeting.note(at(1), sender, place(1, 1)));
            // This one is heard all the time.
            meeting.note(at(2), id(2), place(2, 1));
        }
        assert_eq!(
            (meeting.known.len(), meeting.by_age.len()),
            (MEETERS, MEETERS)
        );
        assert!(meeting.known.contains_key(&id(2)));
        assert!(!meeting.known.contains_key(&EndpointId { pid: 0, ..id(1) }));
    }
}
