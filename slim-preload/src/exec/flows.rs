//! Flows as the next program gets them, and how it goes on with them.

use crate::addr::{Name, RawAddr};
use crate::flow::{Flow, Mode, Then};
use crate::front::Handle;
use crate::{sys, table, transport};
use libc::c_int;
use slim_agent::FlowIo;
use slim_core::FlowToken;
use slim_core::endpoint::HandedFlow;
use slim_core::saved::Saved;
use slim_stream::HandedStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A flow in this process.
pub struct Front {
    /// The agent's name for it in the program that hands it over.
    pub token: FlowToken,
    /// The file under its numbers.
    file: u64,
    numbers: Vec<c_int>,
    /// The transport, while the stash is read: a descriptor that must survive the exec, and its socket.
    waiting: Option<(c_int, u64)>,
    /// The addresses of the first transport, as the application knows them.
    ends: (Option<Name>, Option<Name>),
    /// Whether the connection was established, the application has shut its reading side, and has seen an end of the stream.
    marks: [bool; 3],
    receives: c_int,
    stream: HandedStream,
}

impl Front {
    /// The flow, with those of its numbers that survive the exec now. `None` if there is none, its transport is away, or a call is
    /// sending on it. Otherwise calls of other threads wait that send ([`HandedStream::of`]), read the stash, or change the flow, until
    /// [`take_back`].
    pub fn of(flow: &'static Flow) -> Option<Self> {
        let mut ctl = flow.own()?;
        let numbers = ctl.fds.iter().copied();
        let numbers: Vec<_> = numbers.filter(|fd| sys::survives_exec(*fd)).collect();
        if numbers.is_empty() {
            return None;
        }
        let waiting = match ctl.mode() {
            Mode::Open if !flow.used_by_child() => None,
            Mode::Stashed { then: Then::Open } if !ctl.is_plain() => {
                let waiting = ctl.transport()?;
                Some((waiting, sys::identity(waiting)?))
            }
            _ => return None,
        };
        let stream = HandedStream::of(&flow.stream, &ctl.receiving)?;
        ctl.handed_by = sys::tid();
        Some(Front {
            token: flow.token(),
            file: flow.file(),
            numbers,
            waiting,
            ends: (ctl.local.clone(), ctl.peer.clone()),
            marks: [&flow.established, &flow.read_shut, &flow.end_shown]
                .map(|mark| mark.load(Ordering::SeqCst)),
            receives: ctl.receives,
            stream,
        })
    }

    /// The descriptor that must survive the exec besides the application's own.
    pub fn waiting(&self) -> Option<c_int> {
        self.waiting.map(|(fd, _)| fd)
    }

    /// Goes on with the flow, in the next program. Returns what the agent is to know of it.
    pub fn open(self, known: HandedFlow) -> Option<(FlowToken, Arc<dyn FlowIo>, HandedFlow)> {
        // Another thread of the program before may have been in `with_file`, which puts the waiting transport under a number for a moment.
        let files = [Some(self.file), self.waiting.map(|(_, socket)| socket)];
        let is_there = |fd: &c_int| {
            let file = sys::identity(*fd);
            file.is_some() && files.contains(&file)
        };
        let numbers: Vec<_> = self.numbers.iter().copied().filter(is_there).collect();
        let waiting = self
            .waiting
            .filter(|(fd, socket)| sys::identity(*fd) == Some(*socket));
        // SAFETY: the program before has left this socket for us.
        let waiting = waiting.map(|(fd, _)| unsafe { sys::OwnFd::inherited(fd) });
        let (&first, others) = numbers.split_first()?;
        for other in others {
            if sys::identity(*other) != sys::identity(first) {
                let _ = sys::replace(first, *other);
            }
        }
        let [established, read_shut, end_shown] = self.marks;
        let flow = Flow::create(first, known.role, established, &RawAddr::room(), None)?;
        flow.read_shut.store(read_shut, Ordering::SeqCst);
        flow.end_shown.store(end_shown, Ordering::SeqCst);
        flow.live.store(true, Ordering::SeqCst);
        let mut ctl = flow.ctl();
        ctl.receiving = self.stream.restore(&flow.stream);
        (ctl.local, ctl.peer) = self.ends;
        ctl.receives = self.receives;
        let transport = waiting.as_ref().map_or(first, sys::OwnFd::raw);
        flow.stream.catch_up(&ctl.receiving, transport);
        others.iter().for_each(|fd| ctl.add_number(*fd));
        if let Some(waiting) = waiting {
            transport::show_handed(flow, &mut ctl, waiting.leak());
            flow.set_never_waits(ctl.is_nonblocking(first));
        }
        drop(ctl);
        for fd in numbers {
            table::set_flow(fd, flow);
        }
        Some((flow.token(), Arc::new(Handle::new(flow)), known))
    }
}

/// The exec after [`Front::of`] has failed. For the same thread.
pub fn take_back(flow: &Flow) {
    flow.stream.take_back();
    flow.ctl().handed_by = 0;
    flow.stream.wake();
}

impl Saved for Front {
    fn save(&self, out: &mut Vec<u8>) {
        (self.token, self.file).save(out);
        self.numbers.save(out);
        self.waiting.save(out);
        let (local, peer) = &self.ends;
        local.save(out);
        peer.save(out);
        self.marks.map(u8::from).save(out);
        self.receives.save(out);
        self.stream.save(out);
    }

    fn load(from: &mut &[u8]) -> Option<Self> {
        let (token, file) = Saved::load(from)?;
        Some(Front {
            token,
            file,
            numbers: Saved::load(from)?,
            waiting: Saved::load(from)?,
            ends: Saved::load(from)?,
            marks: <[u8; 3]>::load(from)?.map(|mark| mark != 0),
            receives: Saved::load(from)?,
            stream: Saved::load(from)?,
        })
    }
}
