//! The state of the model: two sides, a few connections, and what their kernels hold.

/// Most connections a bound can have, the application's own included.
pub const MOST_CONNS: usize = 4;

/// A message in front of the stream bytes in one direction of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Msg {
    Resume { epoch: u8 },
    Ok { epoch: u8, received: u8 },
    Confirm { received: u8 },
}

/// One direction: messages, then stream bytes. They are counted together, because they are in one queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Dir {
    pub messages: [Option<Msg>; 2],
    /// Position in the stream of the first byte.
    pub base: u8,
    pub bytes: u8,
    /// Messages and bytes that the receiver's kernel has got.
    pub arrived: u8,
    pub read: u8,
}

impl Dir {
    pub fn heads(&self) -> u8 {
        self.messages.iter().flatten().count() as u8
    }

    pub fn items(&self) -> u8 {
        self.heads() + self.bytes
    }

    pub fn send(&mut self, message: Msg) {
        let place = self.messages.iter_mut().find(|place| place.is_none());
        *place.expect("two messages are sent at most") = Some(message);
    }

    /// The message to be read next, if it has arrived.
    pub fn next(&self) -> Option<Msg> {
        let at = usize::from(self.read);
        if self.read < self.arrived && self.read < self.heads() {
            self.messages[at]
        } else {
            None
        }
    }

    /// Stream bytes that can be read now.
    pub fn readable(&self) -> u8 {
        self.arrived - self.read.max(self.heads()).min(self.arrived)
    }

    /// Position in the stream up to which the receiver's software has read.
    pub fn recorded(&self) -> u8 {
        self.base + self.read.saturating_sub(self.heads())
    }

    /// Position in the stream up to which the receiver's kernel has acknowledged.
    pub fn acked(&self) -> u8 {
        self.base + self.arrived.saturating_sub(self.heads())
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Conn {
    /// Sides that have closed it.
    pub closed: [bool; 2],
    /// Directions, by sender.
    pub dirs: [Dir; 2],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    Requested { epoch: u8 },
    Agreed { epoch: u8, received: u8 },
}

/// A connection on which RESUME_OK was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Awaiting {
    pub conn: u8,
    pub epoch: u8,
    /// `received` of CONFIRM, if it was read when the connection could not be used any more.
    pub confirm: Option<u8>,
}

/// One side of the flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Side {
    /// Transport in use.
    pub live: Option<u8>,
    /// Transport out of use, not drained.
    pub old: Option<u8>,
    /// Drained transport, to be closed next. Segments can arrive in between.
    pub closing: Option<u8>,
    pub sent: u8,
    pub received: u8,
    /// Everything before this position has been trimmed.
    pub trimmed: u8,
    pub seen: u8,
    pub asked: u8,
    pub answered: u8,
    pub committed: u8,
    pub outgoing: Option<(u8, Stage)>,
    pub accepted: Option<(u8, u8)>,
    pub awaiting: Option<Awaiting>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct World {
    pub conns: [Conn; MOST_CONNS],
    pub count: u8,
    pub sides: [Side; 2],
}

impl World {
    /// Both sides are live on the connection of the application.
    pub fn start() -> World {
        let mut world = World {
            count: 1,
            ..World::default()
        };
        for side in &mut world.sides {
            side.live = Some(0);
        }
        world
    }

    /// How far side `s` can still read with what its kernel holds for it.
    pub fn reach(&self, s: usize) -> u8 {
        let side = &self.sides[s];
        let held = |conn: u8| {
            let conn = &self.conns[usize::from(conn)];
            match conn.closed[s] {
                true => 0,
                false => conn.dirs[1 - s].readable(),
            }
        };
        let transport = side.live.or(side.old).map_or(0, held);
        // Stream bytes behind CONFIRM, whether that has been read or not.
        let awaiting = side.awaiting.map_or(0, |awaiting| held(awaiting.conn));
        side.received + transport.max(awaiting)
    }

    /// Clears what makes no difference any more, so that worlds with equal futures are one state.
    pub fn tidy(&mut self) {
        for (c, conn) in self.conns.iter_mut().enumerate() {
            for s in 0..2 {
                let trims = [self.sides[s].live, self.sides[s].old].contains(&Some(c as u8));
                if conn.closed[1 - s] && !trims {
                    conn.dirs[s] = Dir::default();
                }
                let dir = &mut conn.dirs[s];
                for message in dir
                    .messages
                    .iter_mut()
                    .take(usize::from(dir.read))
                    .flatten()
                {
                    *message = Msg::Confirm { received: 0 };
                }
            }
        }
    }
}
