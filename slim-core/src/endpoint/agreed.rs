//! Flows that both ends know without having asked each other: `docs/PROTOCOL.md`, section "Flows agreed on by other means".

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

/// What a process tells others of itself, by whatever means, so that flows with it can be opened as agreed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Announcement {
    /// Who it is.
    pub id: EndpointId,
    /// Optional parts of the protocol that it speaks, as bits of [`feature`].
    pub features: u64,
    /// Its addresses.
    pub addrs: Vec<IpAddr>,
    /// TCP port of its resume listener.
    pub resume_port: u16,
    /// UDP port of its control socket.
    pub control_port: u16,
    /// Number of what it says of other kinds of transport.
    pub serial: u64,
    /// How it is reached by them.
    pub locators: Vec<OtherLocator>,
}

/// What the two ends of a flow have agreed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// Its name, which no other flow between the two has, or has had.
    pub flow: FlowId,
    /// Two secrets that both ends know, and nobody else: one of the connector's choice, and one of the acceptor's.
    pub secrets: [[u8; 32]; 2],
    /// The other end.
    pub peer: Announcement,
}

impl Endpoint {
    /// What the other end of an [`Agreed`] flow is to know of this process.
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

    /// As [`open`](Endpoint::open), of a flow that both ends know: it is live at once. `ends` are our and their end of its
    /// first connection. If that is no TCP connection, they only say at which address of the peer it is asked, and where
    /// its resume listener is tried first; a flow may also begin without any connection, with a
    /// [`fault`](Endpoint::fault).
    ///
    /// Both ends must have opened the flow before either looks for a transport: who does not know a flow says so, and then
    /// it is given up.
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
        if self.config.policy == Policy::Off {
            return self.become_legacy(now, token, LegacyReason::Policy);
        }
        let peer = self.agreed_peer(role, at, agreed);
        self.agree(now, token, id, peer, None);
    }

    /// Who is at the other end, with the address `at`.
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
        });
        if self.features & told.features & feature::TRANSPORTS != 0 {
            let told = ToldLocators {
                serial: told.serial,
                heard: 0,
                locators: self.of_use(&told.locators),
            };
            // If it has told something newer since, that holds.
            self.processes.tell(process.id, at, told);
        }
        Peer {
            process,
            key,
            // Not to be told to anybody.
            random_s: [0; 32],
        }
    }
}
