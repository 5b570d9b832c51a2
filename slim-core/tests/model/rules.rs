//! What can happen next: every step of the network, of the two kernels and of the two sides.

use crate::state::{Awaiting, Msg, Stage, World};

/// The bounds of the search.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Stream bytes that side 0 and side 1 write.
    pub bytes: [u8; 2],
    /// Connections, the application's own included.
    pub conns: u8,
}

/// A rule that is broken on purpose, to check that the search notices it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// The initiator drains its old transport before RESUME_OK has come.
    DrainEarly,
    /// A suspended side goes on trimming.
    TrimSuspended,
    /// A connection that may hold CONFIRM is closed unread.
    DropAwaiting,
    /// The old connection is put back into use after a RESUME was given up.
    PutBack,
    /// A RESUME is accepted although a RESUME of our own, of the same or a higher epoch, is outstanding.
    AcceptBelowOwn,
    /// A side tells how much it has received, and goes on to read its old connection.
    CountEarly,
    /// A connection is used although a RESUME of our own, of a higher epoch, is outstanding.
    UseSuperseded,
}

pub struct Rules {
    pub bounds: Bounds,
    pub mutation: Option<Mutation>,
    /// Connections, by bit, on which only what the receiver's software has read is acknowledged (`docs/VERBS.md`). A side drains such a
    /// connection when it suspends the flow.
    pub software: u8,
}

type Step = Result<World, String>;

impl Rules {
    fn broken(&self, mutation: Mutation) -> bool {
        self.mutation == Some(mutation)
    }

    fn is_software(&self, conn: u8) -> bool {
        self.software >> conn & 1 == 1
    }

    /// Every world that can come next, or the problem with it.
    pub fn steps(&self, world: &World) -> Vec<Step> {
        let mut steps = Vec::new();
        for c in 0..world.count {
            for s in 0..2 {
                self.network(world, c, s, &mut steps);
            }
        }
        for s in 0..2 {
            self.application(world, s, &mut steps);
            self.initiator(world, s, &mut steps);
            self.messages(world, s, &mut steps);
            self.drain(world, s, &mut steps);
        }
        steps
    }

    /// A segment that side `s` has sent on connection `c` reaches the kernel of the other side. This
    /// step need not happen: a dead connection is one on which nothing arrives any more. A segment in
    /// flight may arrive even if its sender has died or has closed the connection.
    fn network(&self, world: &World, c: u8, s: usize, steps: &mut Vec<Step>) {
        let conn = &world.conns[usize::from(c)];
        if conn.dirs[s].arrived < conn.dirs[s].items() && !conn.closed[1 - s] {
            let mut next = *world;
            next.conns[usize::from(c)].dirs[s].arrived += 1;
            steps.push(Ok(next));
        }
    }

    fn application(&self, world: &World, s: usize, steps: &mut Vec<Step>) {
        let side = &world.sides[s];
        let free = side.outgoing.is_none() && side.accepted.is_none() && side.closing.is_none();
        if self.broken(Mutation::PutBack) && free && side.old.is_some() {
            let mut next = *world;
            next.sides[s].live = next.sides[s].old.take();
            steps.push(Ok(next));
        }
        if self.broken(Mutation::CountEarly)
            && let Some(old) = side.old
            && world.conns[usize::from(old)].dirs[1 - s].readable() > 0
        {
            let mut next = *world;
            steps.push(next.read(s, usize::from(old), 1).map(|()| next));
        }
        if let Some(c) = side.live {
            let c = usize::from(c);
            if side.sent < self.bounds.bytes[s] {
                let mut next = *world;
                next.sides[s].sent += 1;
                next.conns[c].dirs[s].bytes += 1;
                steps.push(Ok(next));
            }
            if world.conns[c].dirs[1 - s].readable() > 0 {
                let mut next = *world;
                steps.push(next.read(s, c, 1).map(|()| next));
            }
        }
        // The acknowledgement of everything that has arrived may come at any moment, or not at all.
        let trims = match self.broken(Mutation::TrimSuspended) {
            true => side.live.or(side.old),
            false => side.live,
        };
        if let Some(c) = trims {
            let dir = &world.conns[usize::from(c)].dirs[s];
            let acked = match self.is_software(c) {
                true => dir.recorded(),
                false => dir.acked(),
            };
            if acked > side.trimmed {
                let mut next = *world;
                next.sides[s].trimmed = acked;
                steps.push(next.nothing_lost(s).map(|()| next));
            }
        }
    }

    /// A side sends RESUME on a new connection at any moment, and gives it up at any moment.
    fn initiator(&self, world: &World, s: usize, steps: &mut Vec<Step>) {
        let side = &world.sides[s];
        let mut next = *world;
        match side.outgoing {
            None if side.accepted.is_none() && world.count < self.bounds.conns => {
                let c = world.count;
                next.count += 1;
                next.suspend(s);
                let side = &mut next.sides[s];
                side.seen += 1;
                side.asked = side.seen;
                let epoch = side.seen;
                side.outgoing = Some((c, Stage::Requested { epoch }));
                next.conns[usize::from(c)].dirs[s].send(Msg::Resume { epoch });
                let mut early = Ok(());
                if let Some(old) = next.sides[s].old
                    && (self.broken(Mutation::DrainEarly) || self.is_software(old))
                    && next.sides[s].closing.is_none()
                {
                    early = next.read_all(s, old);
                }
                steps.push(early.map(|()| next));
            }
            // A connection on which RESUME_OK has come is not given up unless it breaks. Then
            // nothing is left to be read on it.
            Some((c, _)) => {
                next.close(s, c);
                next.sides[s].outgoing = None;
                steps.push(Ok(next));
            }
            None => {}
        }
    }

    /// A side reads a message on any connection that holds one.
    fn messages(&self, world: &World, s: usize, steps: &mut Vec<Step>) {
        let side = &world.sides[s];
        for c in 1..world.count {
            let conn = &world.conns[usize::from(c)];
            if conn.closed[s] {
                continue;
            }
            let mut next = *world;
            let Some(message) = conn.dirs[1 - s].next() else {
                // A connection breaks that holds no more messages: the side gives it up.
                if side.accepted.is_some_and(|(conn, _)| conn == c) {
                    next.close(s, c);
                    next.sides[s].accepted = None;
                    steps.push(Ok(next));
                } else if side
                    .awaiting
                    .is_some_and(|a| a.conn == c && a.confirm.is_none())
                {
                    next.close(s, c);
                    next.sides[s].awaiting = None;
                    steps.push(Ok(next));
                }
                continue;
            };
            next.conns[usize::from(c)].dirs[1 - s].read += 1;
            match message {
                Msg::Resume { epoch } => {
                    self.handle_resume(&mut next, s, c, epoch);
                    steps.push(Ok(next));
                }
                Msg::Ok { epoch, received } => {
                    if side.outgoing == Some((c, Stage::Requested { epoch })) {
                        next.sides[s].outgoing = Some((c, Stage::Agreed { epoch, received }));
                        steps.push(Ok(next));
                    }
                }
                Msg::Confirm { received } => {
                    if let Some(awaiting) = side.awaiting.filter(|a| a.conn == c) {
                        steps.push(
                            self.handle_confirm(&mut next, s, awaiting, received)
                                .map(|()| next),
                        );
                    }
                }
            }
        }
    }

    fn handle_resume(&self, next: &mut World, s: usize, c: u8, epoch: u8) {
        let side = &next.sides[s];
        // Side 0 is the original connector, so it has precedence.
        let mut beaten = if s == 0 {
            epoch <= side.asked
        } else {
            epoch < side.asked
        };
        if self.broken(Mutation::AcceptBelowOwn) {
            beaten = false;
        }
        if epoch <= side.answered || epoch <= side.committed || beaten {
            return next.close(s, c);
        }
        if let Some((older, _)) = side.accepted {
            next.close(s, older);
        }
        if let Some((own, _)) = next.sides[s].outgoing.take() {
            next.close(s, own);
        }
        next.suspend(s);
        let side = &mut next.sides[s];
        side.seen = side.seen.max(epoch);
        side.answered = epoch;
        side.accepted = Some((c, epoch));
    }

    fn handle_confirm(
        &self,
        next: &mut World,
        s: usize,
        awaiting: Awaiting,
        received: u8,
    ) -> Result<(), String> {
        let side = &mut next.sides[s];
        let superseded = side.accepted.is_some() || side.asked > awaiting.epoch;
        if superseded && !self.broken(Mutation::UseSuperseded) {
            side.awaiting = Some(Awaiting {
                confirm: Some(received),
                ..awaiting
            });
            return Ok(());
        }
        side.awaiting = None;
        if let Some((own, _)) = side.outgoing.take() {
            next.close(s, own);
        }
        next.install(s, awaiting.conn, awaiting.epoch, received)
    }

    /// A side drains and closes its old transports, and then goes on with the handshake.
    fn drain(&self, world: &World, s: usize, steps: &mut Vec<Step>) {
        let side = &world.sides[s];
        let mut next = *world;
        if let Some(c) = side.closing {
            next.close(s, c);
            next.sides[s].closing = None;
            steps.push(next.nothing_lost(1 - s).map(|()| next));
            return;
        }
        let agreed = match side.outgoing {
            Some((c, Stage::Agreed { epoch, received })) => Some((c, epoch, received)),
            _ => None,
        };
        if side.live.is_some() || (side.accepted.is_none() && agreed.is_none()) {
            return;
        }
        if let Some(awaiting) = side.awaiting {
            steps.push(self.flush(&mut next, s, awaiting).map(|()| next));
        } else if let Some(old) = side.old
            && !self.broken(Mutation::CountEarly)
        {
            steps.push(next.read_all(s, old).map(|()| next));
        } else if let Some((c, epoch)) = side.accepted {
            let received = side.received;
            next.conns[usize::from(c)].dirs[s].send(Msg::Ok { epoch, received });
            next.sides[s].accepted = None;
            next.sides[s].awaiting = Some(Awaiting {
                conn: c,
                epoch,
                confirm: None,
            });
            steps.push(Ok(next));
        } else if let Some((c, epoch, peer_received)) = agreed {
            let received = side.received;
            next.conns[usize::from(c)].dirs[s].send(Msg::Confirm { received });
            next.sides[s].outgoing = None;
            steps.push(next.install(s, c, epoch, peer_received).map(|()| next));
        }
    }

    /// Looks at the connection on which RESUME_OK was sent. If CONFIRM is there, the connection counts as an old transport.
    fn flush(&self, next: &mut World, s: usize, awaiting: Awaiting) -> Result<(), String> {
        let c = usize::from(awaiting.conn);
        let mut confirm = awaiting.confirm;
        if confirm.is_none()
            && let Some(Msg::Confirm { received }) = next.conns[c].dirs[1 - s].next()
        {
            next.conns[c].dirs[1 - s].read += 1;
            confirm = Some(received);
        }
        next.sides[s].awaiting = None;
        match confirm {
            Some(received) if !self.broken(Mutation::DropAwaiting) => {
                next.sides[s].committed = awaiting.epoch;
                next.sides[s].old = Some(awaiting.conn);
                next.trim(s, received)
            }
            _ => {
                next.sides[s].closing = Some(awaiting.conn);
                next.nothing_lost(1 - s)
            }
        }
    }
}

impl World {
    fn close(&mut self, s: usize, c: u8) {
        self.conns[usize::from(c)].closed[s] = true;
    }

    fn suspend(&mut self, s: usize) {
        let side = &mut self.sides[s];
        if let Some(c) = side.live.take() {
            side.old = Some(c);
        }
    }

    /// Reads stream bytes. Each must be the one that the side needs next.
    fn read(&mut self, s: usize, c: usize, count: u8) -> Result<(), String> {
        let dir = &mut self.conns[c].dirs[1 - s];
        for _ in 0..count {
            let seq = dir.base + (dir.read - dir.heads());
            if seq != self.sides[s].received {
                let wanted = self.sides[s].received;
                return Err(format!(
                    "side {s} reads byte {seq}, but byte {wanted} is next"
                ));
            }
            dir.read += 1;
            self.sides[s].received += 1;
        }
        Ok(())
    }

    fn read_all(&mut self, s: usize, c: u8) -> Result<(), String> {
        let count = self.conns[usize::from(c)].dirs[1 - s].readable();
        self.read(s, usize::from(c), count)?;
        self.sides[s].old = None;
        self.sides[s].closing = Some(c);
        Ok(())
    }

    /// Trims everything before `received`, because the peer has it.
    fn trim(&mut self, s: usize, received: u8) -> Result<(), String> {
        let side = &mut self.sides[s];
        if received < side.trimmed || received > side.sent {
            return Err(format!(
                "side {s} holds {}..{}, the peer has {received}",
                side.trimmed, side.sent
            ));
        }
        side.trimmed = received;
        Ok(())
    }

    /// Makes a connection the transport, and writes the replay to it.
    fn install(&mut self, s: usize, c: u8, epoch: u8, received: u8) -> Result<(), String> {
        self.trim(s, received)?;
        let side = &mut self.sides[s];
        side.live = Some(c);
        side.committed = epoch;
        let dir = &mut self.conns[usize::from(c)].dirs[s];
        dir.base = received;
        dir.bytes = side.sent - received;
        Ok(())
    }

    /// Checks that the other side has every byte that side `s` has trimmed, or that its kernel holds it.
    fn nothing_lost(&self, s: usize) -> Result<(), String> {
        let (trimmed, reach) = (self.sides[s].trimmed, self.reach(1 - s));
        if trimmed > reach {
            return Err(format!(
                "side {s} has trimmed {trimmed} bytes, the other side can reach {reach}"
            ));
        }
        Ok(())
    }
}
