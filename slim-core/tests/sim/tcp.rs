//! A TCP connection as two kernels see it, byte for byte.
//!
//! Each direction has the bytes that were written, and counts how many the receiver's kernel has got,
//! how many the sender's kernel knows to be acknowledged, and how many were read. A side can die at
//! any moment. Then the bytes in its kernel stay readable, and the acknowledged count stays known, as
//! on Linux.

pub const ECONNABORTED: i32 = 103;
pub const ECONNRESET: i32 = 104;
pub const ETIMEDOUT: i32 = 110;
pub const ECONNREFUSED: i32 = 111;

#[derive(Default)]
pub struct Dir {
    data: Vec<u8>,
    arrived: usize,
    acked: usize,
    read: usize,
    /// The sender has ended it.
    fin: bool,
    /// The receiver's kernel has seen an end, genuine or injected.
    ended: bool,
    /// A transmission is scheduled.
    pub armed: bool,
    /// Since when no transmission has been answered.
    pub silent_since: Option<u64>,
}

#[derive(Default)]
pub struct Side {
    pub dead: Option<i32>,
    pub closed: bool,
}

pub struct Tcp {
    pub path: usize,
    pub sides: [Side; 2],
    pub dirs: [Dir; 2],
    /// The connection is killed when so many bytes of this side have arrived.
    pub fatal: Option<(usize, usize)>,
    /// It is a queue pair: what has arrived, and was not read, can get lost at the receiver's end, too.
    pub by_software: bool,
    send_room: usize,
    receive_room: usize,
}

pub enum Read {
    Bytes(Vec<u8>),
    Nothing,
    End,
    Error(i32),
}

/// The result of a transmission.
pub enum Arrival {
    /// The receiver's kernel acknowledges this many bytes.
    Ack(usize),
    /// The receiver refuses the segment.
    Reset,
    Nothing,
}

impl Tcp {
    pub fn new(path: usize, send_room: usize, receive_room: usize) -> Self {
        Tcp {
            path,
            sides: Default::default(),
            dirs: Default::default(),
            fatal: None,
            by_software: false,
            send_room,
            receive_room,
        }
    }

    /// Bytes that `side` may read now.
    pub fn readable(&self, side: usize) -> usize {
        let dir = &self.dirs[1 - side];
        dir.arrived - dir.read
    }

    pub fn read(&mut self, side: usize, most: usize) -> Read {
        assert!(!self.sides[side].closed, "read from a closed socket");
        let dir = &mut self.dirs[1 - side];
        let n = most.min(dir.arrived - dir.read);
        if n > 0 {
            dir.read += n;
            return Read::Bytes(dir.data[dir.read - n..dir.read].to_vec());
        }
        match self.sides[side].dead {
            Some(errno) => Read::Error(errno),
            None if dir.ended => Read::End,
            None => Read::Nothing,
        }
    }

    pub fn write(&mut self, side: usize, data: &[u8]) -> Result<usize, i32> {
        assert!(!self.sides[side].closed, "write to a closed socket");
        if let Some(errno) = self.sides[side].dead {
            return Err(errno);
        }
        let dir = &mut self.dirs[side];
        assert!(!dir.fin, "write after shutdown");
        let room = self.send_room - (dir.data.len() - dir.acked).min(self.send_room);
        let n = room.min(data.len());
        dir.data.extend_from_slice(&data[..n]);
        Ok(n)
    }

    /// Bytes written so far.
    pub fn written(&self, side: usize) -> usize {
        self.dirs[side].data.len()
    }

    /// Bytes that the peer's kernel is known to have acknowledged. The count can be read also after death.
    pub fn acked(&self, side: usize) -> usize {
        self.dirs[side].acked
    }

    pub fn shutdown(&mut self, side: usize) {
        self.dirs[side].fin = true;
    }

    /// Closes the descriptor. Returns whether the kernel sends a reset, because there were unread
    /// bytes.
    pub fn close(&mut self, side: usize) -> bool {
        let unread = self.readable(side) > 0;
        self.sides[side].closed = true;
        self.dirs[side].fin = true;
        if unread && self.sides[side].dead.is_none() {
            self.sides[side].dead = Some(ECONNRESET);
            return true;
        }
        false
    }

    /// Whether the sender's kernel has something to transmit in direction `side`.
    pub fn pending(&self, side: usize) -> bool {
        let dir = &self.dirs[side];
        self.sides[side].dead.is_none()
            && (dir.acked < dir.data.len()
                || (dir.fin && !dir.ended && dir.acked == dir.data.len()))
    }

    /// A segment of at most `most` bytes arrives at the other side.
    pub fn arrive(&mut self, side: usize, most: usize) -> Arrival {
        let receiver = &self.sides[1 - side];
        if receiver.dead.is_some() {
            return Arrival::Reset;
        }
        let closed = receiver.closed;
        let dir = &mut self.dirs[side];
        let room = self.receive_room - (dir.arrived - dir.read).min(self.receive_room);
        let n = most.min(dir.data.len() - dir.arrived).min(room);
        let n = match self.fatal {
            Some((of, at)) if of == side => n.min(at - dir.arrived),
            _ => n,
        };
        if n > 0 && dir.ended && !closed {
            // The bytes lie behind the end of the stream, as far as the receiver knows.
            return Arrival::Nothing;
        }
        if n > 0 && closed {
            self.sides[1 - side].dead = Some(ECONNRESET);
            return Arrival::Reset;
        }
        dir.arrived += n;
        if dir.fin && dir.arrived == dir.data.len() {
            dir.ended = true;
        }
        Arrival::Ack(dir.arrived)
    }

    /// Whether the bytes have arrived after which the connection is killed. Says so once.
    pub fn is_due(&mut self, side: usize) -> bool {
        let due = |(of, at): &mut (usize, usize)| *of == side && self.dirs[side].arrived == *at;
        self.fatal.take_if(due).is_some()
    }

    pub fn acknowledge(&mut self, side: usize, upto: usize) {
        if self.sides[side].dead.is_none() {
            let dir = &mut self.dirs[side];
            dir.acked = dir.acked.max(upto);
        }
    }

    /// A third party forges a FIN towards `side`. Returns the bytes that the kernel of `side` acknowledges then, if the other
    /// kernel believes it: the FIN takes the place of the next byte. It never takes that of the last byte: a sender that has
    /// just closed would take everything for delivered, and the other side would get an error, which is not simulated.
    pub fn inject_end(&mut self, side: usize) -> Option<usize> {
        let dir = &mut self.dirs[1 - side];
        let first = !dir.ended && self.sides[side].dead.is_none();
        dir.ended = true;
        (first && dir.arrived + 1 < dir.data.len()).then_some(dir.arrived + 1)
    }

    /// Whether the kernel at the other end of `side` answers with segments that lie behind the end that `side` has seen.
    pub fn looks_ended(&self, side: usize) -> bool {
        let dir = &self.dirs[1 - side];
        let alive = self.sides.iter().all(|side| side.dead.is_none());
        // A forged end takes the place of one byte. More bytes would be answered with a reset.
        let beyond = dir.data.len() - dir.arrived;
        alive && (beyond == 1 || dir.fin && beyond == 0)
    }

    /// Bytes that the software at the other end has read. It tells them at once, which is the worst case: they are forgotten here.
    pub fn recorded(&self, side: usize) -> usize {
        self.dirs[side].read
    }

    pub fn die(&mut self, side: usize, errno: i32) {
        if self.sides[side].dead.is_none() && self.by_software {
            let dir = &mut self.dirs[1 - side];
            dir.arrived -= (dir.arrived - dir.read).div_ceil(2);
        }
        self.sides[side].dead.get_or_insert(errno);
    }
}
