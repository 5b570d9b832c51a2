//! Flows of a session and connections of the standard library in one process, under the preload library.

#![allow(dead_code, reason = "each test program uses only a part")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

use slim::{Endpoint, Flow, Session};

use super::common::*;
use super::under_preload::*;

pub const KILLS: u64 = 20;

/// A session with a protected flow, and both ends of that flow.
pub struct Linked {
    pub near: Flow,
    pub far: Flow,
    pub endpoint: Endpoint,
    pub session: Session,
}

impl Linked {
    pub fn open() -> Self {
        Self::open_in(session())
    }

    pub fn open_in(session: Session) -> Self {
        let endpoint = listen(&session);
        let (near, far) = pair(&session, &endpoint);
        Self {
            near,
            far,
            endpoint,
            session,
        }
    }

    /// Kills the connection, and checks that the flow survives.
    pub fn survive(&self, how: Kill) {
        let before = self.near.stats().resumes;
        self.near.send_all(b"before", LIMIT).unwrap();
        wait_until("killed", || kill(&self.near, how));
        self.near.send_all(b"after", LIMIT).unwrap();
        let mut got = [0; 11];
        self.far.recv_exact(&mut got, LIMIT).unwrap();
        assert_eq!(&got, b"beforeafter");
        self.far.send_all(b"back", LIMIT).unwrap();
        self.near.recv_exact(&mut got[..4], LIMIT).unwrap();
        wait_resumed(&self.session, &self.near, before);
    }

    pub fn close(self) {
        drop((self.near, self.far, self.endpoint));
        self.session.close(LIMIT.unwrap()).unwrap();
    }
}

/// Both ends of a connection of the standard library, which the preload library manages.
pub struct Plain {
    pub near: TcpStream,
    pub far: TcpStream,
}

impl Plain {
    pub fn open() -> Self {
        let listener = TcpListener::bind(loopback()).unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (far, _) = listener.accept().unwrap();
        let plain = Self { near, far };
        // A connection that breaks before the peers have found each other ends with its error.
        wait_until("live", || {
            let live = |line: &Line| line.kind == "live" && plain.has(line.ends);
            logged().iter().filter(|line| live(line)).count() == 2
        });
        plain
    }

    pub fn ends(&self) -> (SocketAddr, SocketAddr) {
        (
            self.near.local_addr().unwrap(),
            self.near.peer_addr().unwrap(),
        )
    }

    pub fn has(&self, ends: (SocketAddr, SocketAddr)) -> bool {
        let (one, other) = self.ends();
        ends == (one, other) || ends == (other, one)
    }

    /// Both ends of the connection that carries the stream now. The program sees the addresses of the first one; a bare system call
    /// tells those of the present one.
    pub fn present(&self) -> Option<(SocketAddr, SocketAddr)> {
        let local = rustix::net::getsockname(&self.near).ok()?;
        let peer = rustix::net::getpeername(&self.near).ok()??;
        Some((local.try_into().ok()?, peer.try_into().ok()?))
    }

    /// Kills the connection that carries the stream, and checks that the stream survives. A shutdown by a bare system call
    /// ([`Kill::Fin`]) is not a fault for the preload library: the program itself may have made it.
    pub fn survive(&mut self, how: Kill) {
        self.near.write_all(b"before").unwrap();
        if let Kill::Destroy = how {
            wait_until("killed", || {
                self.present().is_some_and(|ends| kill_ends(ends, how))
            });
        }
        self.near.write_all(b"after").unwrap();
        let mut got = [0; 11];
        self.far.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"beforeafter");
        self.far.write_all(b"back").unwrap();
        self.near.read_exact(&mut got[..4]).unwrap();
    }
}

pub fn survive_kills(linked: &Linked, plain: &mut Plain) {
    for how in kills() {
        for _ in 0..KILLS {
            linked.survive(how);
            plain.survive(how);
        }
    }
}
