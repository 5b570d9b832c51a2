//! The kernel's list of TCP sockets, through netlink `sock_diag`.

use std::{collections::HashMap, fmt, io, net::SocketAddr};

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkDeserializable, NetlinkHeader, NetlinkMessage,
    NetlinkPayload, NetlinkSerializable,
};
use netlink_packet_sock_diag::{
    SockDiagDestroy, SockDiagMessage,
    constants::{AF_INET, AF_INET6, IPPROTO_TCP, TCP_LISTEN},
    inet::{ExtensionFlags, InetRequest, InetResponse, SocketId, StateFlags},
};
use netlink_sys::{Socket, SocketAddr as NetlinkAddr, protocols::NETLINK_SOCK_DIAG};
use procfs::process::FDTarget;

use crate::{Error, Netns, Process, Result};

/// A TCP socket of a namespace.
#[derive(Clone, Debug)]
pub struct OpenConnection {
    /// This end.
    pub local: SocketAddr,
    /// The other end.
    pub remote: SocketAddr,
    /// The kernel's number of the state (1 is established, 8 is close-wait, 10 is listening).
    pub state: u8,
    /// Processes of the namespace that hold the socket open.
    pub owners: Vec<Process>,
    /// Which end connected.
    pub direction: Direction,
    id: SocketId,
}

/// Which end made a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The other end connected; this end's port is a listening one.
    Incoming,
    /// This end connected.
    Outgoing,
}

/// State number of an established connection.
pub const ESTABLISHED: u8 = 1;

/// Outcome of a request to destroy a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DestroyOutcome {
    /// The kernel has given it up.
    Destroyed,
    /// It had ended before.
    Vanished,
}

impl fmt::Display for OpenConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let arrow = match self.direction {
            Direction::Incoming => "<-",
            Direction::Outgoing => "->",
        };
        write!(f, "{} {arrow} {}", self.local, self.remote)?;
        for owner in &self.owners {
            write!(f, " {}[{}]", owner.name, owner.pid)?;
        }
        Ok(())
    }
}

/// Connections of `net` that are neither listening nor in TIME_WAIT, with their owners.
pub fn connections(net: &Netns) -> Result<Vec<OpenConnection>> {
    let states = StateFlags::all() - StateFlags::TIME_WAIT;
    let sockets = net
        .run(|| dump(&states))?
        .map_err(Error::io("list TCP sockets"))?;
    let listening: Vec<u16> = sockets
        .iter()
        .filter(|s| s.header.state == TCP_LISTEN)
        .map(|s| s.header.socket_id.source_port)
        .collect();
    let mut owners = owners(net);
    let mut found = Vec::new();
    for socket in sockets.into_iter().filter(|s| s.header.state != TCP_LISTEN) {
        let id = socket.header.socket_id;
        let direction = if listening.contains(&id.source_port) {
            Direction::Incoming
        } else {
            Direction::Outgoing
        };
        found.push(OpenConnection {
            local: SocketAddr::new(id.source_address.to_canonical(), id.source_port),
            remote: SocketAddr::new(id.destination_address.to_canonical(), id.destination_port),
            state: socket.header.state,
            owners: owners
                .remove(&u64::from(socket.header.inode))
                .unwrap_or_default(),
            direction,
            id,
        });
    }
    Ok(found)
}

/// Listening ports of `net`.
pub fn listening(net: &Netns) -> Result<Vec<u16>> {
    let sockets = net
        .run(|| dump(&StateFlags::LISTEN))?
        .map_err(Error::io("list TCP sockets"))?;
    Ok(sockets
        .iter()
        .map(|s| s.header.socket_id.source_port)
        .collect())
}

/// State of the socket of `net` with these two ends; `None` if there is no such socket (any more).
pub fn state(net: &Netns, local: SocketAddr, remote: SocketAddr) -> Result<Option<u8>> {
    let sockets = net
        .run(|| dump(&StateFlags::all()))?
        .map_err(Error::io("list TCP sockets"))?;
    let ends = |id: &SocketId| {
        (
            SocketAddr::new(id.source_address.to_canonical(), id.source_port),
            SocketAddr::new(id.destination_address.to_canonical(), id.destination_port),
        )
    };
    let found = sockets
        .iter()
        .find(|s| ends(&s.header.socket_id) == (local, remote));
    Ok(found.map(|s| s.header.state))
}

/// Makes the kernel give `connections` up, as after a timeout. This end sees `ECONNABORTED`; the other end gets a RST.
pub fn destroy(net: &Netns, connections: &[OpenConnection]) -> Result<Vec<DestroyOutcome>> {
    let kill = || -> io::Result<Vec<DestroyOutcome>> {
        let socket = open()?;
        connections
            .iter()
            .map(|c| destroy_one(&socket, &c.id))
            .collect()
    };
    net.run(kill)?.map_err(Error::io("destroy a TCP socket"))
}

fn destroy_one(socket: &Socket, id: &SocketId) -> io::Result<DestroyOutcome> {
    let message = SockDiagDestroy::new(SockDiagMessage::InetRequest(request(
        id.clone(),
        StateFlags::all(),
    )));
    send(socket, message, NLM_F_REQUEST | NLM_F_ACK)?;
    let mut fate = DestroyOutcome::Destroyed;
    receive::<SockDiagDestroy>(socket, |payload| match payload {
        NetlinkPayload::Error(error) => match error.code.map(|c| c.get().abs()) {
            None => Ok(true),
            Some(libc::ENOENT) => {
                fate = DestroyOutcome::Vanished;
                Ok(true)
            }
            Some(code) => Err(io::Error::from_raw_os_error(code)),
        },
        _ => Ok(false),
    })?;
    Ok(fate)
}

fn dump(states: &StateFlags) -> io::Result<Vec<InetResponse>> {
    let socket = open()?;
    let mut found = Vec::new();
    for id in [SocketId::new_v4(), SocketId::new_v6()] {
        send(
            &socket,
            SockDiagMessage::InetRequest(request(id, states.clone())),
            NLM_F_REQUEST | NLM_F_DUMP,
        )?;
        receive::<SockDiagMessage>(&socket, |payload| match payload {
            NetlinkPayload::Done(_) => Ok(true),
            NetlinkPayload::Error(error) => Err(error.to_io()),
            NetlinkPayload::InnerMessage(SockDiagMessage::InetResponse(response)) => {
                found.push(*response);
                Ok(false)
            }
            _ => Ok(false),
        })?;
    }
    Ok(found)
}

fn request(socket_id: SocketId, states: StateFlags) -> InetRequest {
    let family = if socket_id.source_address.is_ipv4() {
        AF_INET
    } else {
        AF_INET6
    };
    InetRequest {
        family,
        protocol: IPPROTO_TCP,
        extensions: ExtensionFlags::empty(),
        states,
        socket_id,
    }
}

fn open() -> io::Result<Socket> {
    let mut socket = Socket::new(NETLINK_SOCK_DIAG)?;
    socket.bind_auto()?;
    socket.connect(&NetlinkAddr::new(0, 0))?;
    Ok(socket)
}

fn send<M: NetlinkSerializable + Into<NetlinkPayload<M>>>(
    socket: &Socket,
    message: M,
    flags: u16,
) -> io::Result<()> {
    let mut header = NetlinkHeader::default();
    header.flags = flags;
    let mut packet = NetlinkMessage::new(header, message.into());
    packet.finalize();
    let mut bytes = vec![0; packet.buffer_len()];
    packet.serialize(&mut bytes);
    socket.send(&bytes, 0).map(drop)
}

/// Passes the answers to `take` until it returns true for the last.
fn receive<M: NetlinkDeserializable>(
    socket: &Socket,
    mut take: impl FnMut(NetlinkPayload<M>) -> io::Result<bool>,
) -> io::Result<()> {
    loop {
        let (bytes, _) = socket.recv_from_full()?;
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            let message = NetlinkMessage::<M>::deserialize(rest).map_err(io::Error::other)?;
            // Messages are padded to four bytes.
            let length = (message.header.length as usize)
                .next_multiple_of(4)
                .clamp(4, rest.len());
            rest = &rest[length..];
            if take(message.payload)? {
                return Ok(());
            }
        }
    }
}

/// The processes of `net` that hold each socket, by the socket's inode.
fn owners(net: &Netns) -> HashMap<u64, Vec<Process>> {
    let mut found: HashMap<u64, Vec<Process>> = HashMap::new();
    for process in net.processes() {
        let fds = procfs::process::Process::new(process.pid as i32).and_then(|p| p.fd());
        for fd in fds.into_iter().flatten().flatten() {
            let FDTarget::Socket(inode) = fd.target else {
                continue;
            };
            let holders = found.entry(inode).or_default();
            if !holders.contains(&process) {
                holders.push(process.clone());
            }
        }
    }
    found
}
