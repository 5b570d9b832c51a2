//! Flows that both ends know without negotiation: `docs/PROTOCOL.md`, section "Flows agreed on by other means".

use std::net::{IpAddr, SocketAddr};

use super::ends::Ends;
use super::processes::{PeerProcess, ToldLocators};
use super::record::Peer;
use super::{Endpoint, plain};
use crate::auth::{FlowKey, KeyInputs};
use crate::config::Policy;
use crate::event::LegacyReason;
use crate::ids::{EndpointId, FlowId, FlowToken, Role, Time};
use crate::transport::OtherLocator;
use crate::wire::feature;

/// The description of a process that others need to open agreed flows with it. The front ends exchange it by means of their
/// own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Announcement {
    /// The endpoint id of the process.
    pub id: EndpointId,
    /// Optional parts of the protocol that it speaks, as bits of [`feature`].
    pub features: u64,
    /// Its addresses.
    pub addrs: Vec<IpAddr>,
    /// TCP port of its resume listener.
    pub resume_port: u16,
    /// UDP port of its control socket.
    pub control_port: u16,
    /// Serial number of its locators, as in OFFER.
    pub serial: u64,
    /// Its locators of other kinds of transport than TCP.
    pub locators: Vec<OtherLocator>,
}

/// The data of a flow that its two ends have agreed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// The flow id, which no other flow between the two has or has had.
    pub flow: FlowId,
    /// Two secrets that only the two ends know: the first chosen by the connector, the second by the acceptor.
    pub secrets: [[u8; 32]; 2],
    /// The other end.
    pub peer: Announcement,
}

impl Endpoint {
    /// The description of this process for the other end of an [`Agreed`] flow.
    pub fn announcement(&self) -> Announcement {
        Announcement {
            id: self.id,
            features: self.features,
            addrs: self.own.addrs.clone(),
            resume_port: self.own.resume_port,
            control_port: self.own.control_port,
            serial: self.own_serial(),
            locators: self.own.locators.clone(),
        }
    }

    /// As [`open`](Endpoint::open), for a flow that both ends know: it is live at once. `local` and `remote` are the ends of its
    /// first connection. If that is no TCP connection, they only say to which address of the peer control messages go, and
    /// where its resume listener is tried first. A flow may also begin without any connection, with a
    /// [`fault`](Endpoint::fault).
    ///
    /// Both ends must open the flow before either of them makes a transport: an end that does not know the flow answers so, and
    /// the flow is given up.
    pub fn open_agreed(
        &mut self,
        now: Time,
        token: FlowToken,
        role: Role,
        (local, remote): (SocketAddr, SocketAddr),
        agreed: &Agreed,
    ) {
        let id = agreed.flow;
        if self.by_id.contains_key(&(id, role)) {
            debug_assert!(false, "{id} is the name of another flow");
            return;
        }
        let ends = Ends::new(plain(local), plain(remote));
        let at = ends.remote().ip();
        if !self.add(now, token, role, ends) {
            return;
        }
        if self.is_fenced() {
            return self.become_legacy(now, token, LegacyReason::Fenced);
        }
        if self.config.policy == Policy::Off {
            return self.become_legacy(now, token, LegacyReason::Policy);
        }
        let peer = self.agreed_peer(role, at, agreed);
        self.agree(now, token, id, peer, None);
    }

    /// The peer of an agreed flow, at the address `at`.
    fn agreed_peer(&mut self, role: Role, at: IpAddr, agreed: &Agreed) -> Peer {
        let told = &agreed.peer;
        let (connector, acceptor) = match role {
            Role::Connector => (self.id, told.id),
            Role::Acceptor => (told.id, self.id),
        };
        let [random_c, random_s] = agreed.secrets;
        let inputs = KeyInputs {
            flow: agreed.flow,
            random_c,
            random_s,
            connector,
            acceptor,
        };
        let key = FlowKey::derive(self.config.job_key.as_ref(), &inputs);
        let process = self.processes.share(PeerProcess {
            id: told.id,
            addrs: told.addrs[..].into(),
            resume_port: told.resume_port,
            control_port: told.control_port,
            features: told.features & feature::ALL,
            moved: false,
        });
        if self.features & told.features & feature::TRANSPORTS != 0 {
            let told = ToldLocators {
                serial: told.serial,
                heard: 0,
                locators: self.usable_locators(&told.locators),
            };
            // No effect if the process has announced newer locators since.
            self.processes.tell(process.id, at, told);
        }
        Peer {
            process,
            key,
            // HELLO_ACK is never sent for an agreed flow.
            random_s: [0; 32],
        }
    }
}
