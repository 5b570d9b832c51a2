//! The agent's interface to the preload's flows: an implementation of [`FlowIo`].

use crate::addr::Name;
use crate::flow::{Flow, Mode};
use crate::{options, sys, transport};
use slim_agent::{FlowIo, Transport, TransportRef};
use slim_core::{Cause, FlowToken, Verdict};
use slim_stream::{Delivery, DrainError, Drained, Probe, Undelivered};
use slim_sys::AckWait;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The agent's reference to one life of a flow.
pub struct Handle {
    flow: &'static Flow,
    /// Boxed and usually `None`, so that an idle flow stays small. Only the agent's thread uses it.
    transient: Mutex<Option<Box<Transient>>>,
}

// The heap has separate segments for sizes that are freed soon (`heap.rs`). A `Handle` with the counters of its `Arc` is smaller than
// those sizes; `Transient` is one of them.
const _: () = assert!(size_of::<Handle>() <= 24 && size_of::<Transient>() == 48);

/// State that a flow needs only for a while.
#[derive(Default)]
#[repr(align(16))]
struct Transient {
    /// The first connection, until the flow is live and has no unacknowledged bytes.
    first: Option<FirstConnection>,
    /// The application's keepalive settings, while SLIM's own settings make the kernel probe the peer on the old transport.
    asking: Option<sys::KeepAlive>,
}

/// Identifies the connection that a flow begins with.
#[derive(Clone, Copy)]
pub struct FirstConnection {
    /// When it was established, if it was accepted.
    since: Option<Instant>,
    /// The kernel's cookie of the socket.
    number: Option<u64>,
}

impl FirstConnection {
    /// `fd` has just been accepted, and nothing has been sent on it.
    pub fn accepted(fd: RawFd) -> Self {
        let age = sys::age_of_accepted(fd);
        Self {
            since: age.and_then(|age| Instant::now().checked_sub(age)),
            number: sys::cookie(fd),
        }
    }

    /// `fd` connects, or has connected.
    pub fn dialled(fd: RawFd) -> Self {
        Self {
            since: None,
            number: sys::cookie(fd),
        }
    }
}

impl Handle {
    /// Takes over the agent's reference that the flow was created with.
    pub fn new(flow: &'static Flow) -> Self {
        Self {
            flow,
            transient: Mutex::new(None),
        }
    }

    /// The connection that the flow begins with. To be called before the agent knows the flow.
    pub fn begins_with(&self, first: FirstConnection) {
        let mut transient = self.transient();
        transient.get_or_insert_default().first = Some(first);
    }

    /// The agent's name for this life of the flow.
    pub fn token(&self) -> FlowToken {
        self.flow.token()
    }
}

impl Handle {
    fn transient(&self) -> MutexGuard<'_, Option<Box<Transient>>> {
        self.transient
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn first(&self) -> Option<FirstConnection> {
        self.transient().as_ref()?.first
    }

    fn copy_options(
        &self,
        to: TransportRef<'_>,
        copy: impl FnOnce(RawFd, RawFd, &mut options::Receives) -> Result<(), sys::Errno>,
    ) -> io::Result<()> {
        // A transport without a descriptor cannot be put under a number.
        let to = to.socket()?.as_raw_fd();
        let Some(mut ctl) = self.flow.own() else {
            return Ok(());
        };
        let from = ctl.probe_fd();
        let copied = from.map_or(Ok(()), |from| copy(from, to, &mut ctl.receives));
        copied.map_err(io::Error::from_raw_os_error)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.flow.forget_copy();
        self.flow.drop_ref();
    }
}

impl FlowIo for Handle {
    fn sent(&self) -> u64 {
        self.flow.stream.sent()
    }

    fn trim(&self, peer_received: u64) {
        self.flow.stream.trim(peer_received);
    }

    fn local_final(&self) -> Option<u64> {
        self.flow.stream.local_final()
    }

    fn live(&self) {
        // OPEN serves short connections only. From here on the agent announces the end, with FIN.
        self.flow.ctl().opened = None;
        self.flow.live.store(true, Ordering::Release);
        self.flow.stream.wake();
    }

    fn legacy(&self, refused: bool) {
        let open = self.flow.ctl().mode() == Mode::Open;
        if refused && open {
            transport::escalate(self.flow, Verdict::Errno(libc::ECONNREFUSED));
        } else {
            transport::become_plain(self.flow);
        }
    }

    fn suspend(&self) -> bool {
        let Some(mut ctl) = self.flow.own() else {
            return true;
        };
        if ctl.mode() == Mode::Open && self.flow.used_by_child() {
            // The peer is told that this is the last transport. Until it hears that, it must not conclude that
            // we lack the bytes that the child has read.
            if let Some(all) = ctl
                .fds
                .first()
                .and_then(|fd| ctl.receiving.start().all_received(*fd))
            {
                self.flow.stream.set_received(all);
            }
            let token = self.token();
            transport::unmanage(self.flow, ctl);
            crate::runtime::with_agent(|a| a.demote(token));
            return true;
        }
        transport::suspend(self.flow, &mut ctl);
        // A flow that the application has closed has no numbers, so `transport::suspend` has not barred it.
        if !self.flow.stream.is_suspended() {
            self.flow.stream.bar();
        }
        transport::shut_down(&mut ctl);
        // The flow is plain TCP by now: calls inside the gate stay there.
        let is_plain = ctl.mode() == Mode::Lingering && ctl.transport().is_none();
        drop(ctl);
        is_plain || self.flow.stream.idle()
    }

    fn idle(&self) -> bool {
        self.flow.stream.idle()
    }

    fn is_exclusive(&self) -> bool {
        let Some(ctl) = self.flow.own() else {
            return false;
        };
        // A forked child has used the connection, and may have ended it. The peer must believe its kernel.
        let used = ctl.mode() == Mode::Open && self.flow.used_by_child();
        if used {
            transport::unmanage(self.flow, ctl);
        }
        !used
    }

    fn connection_exists(&self) -> bool {
        let ctl = self.flow.own();
        let state = ctl.and_then(|ctl| sys::tcp_state(ctl.probe_fd()?));
        state.is_some_and(|state| state != sys::TCP_CLOSE)
    }

    fn age(&self) -> Option<Duration> {
        Some(self.first()?.since?.elapsed())
    }

    fn connection(&self) -> Option<u64> {
        self.first()?.number
    }

    fn drain(&self) -> Drained {
        let sent = transport::drain(self.flow);
        Drained {
            received: self.flow.stream.received(),
            sent,
        }
    }

    fn stash(&self, data: &[u8]) {
        let mut ctl = self.flow.ctl();
        let kept = match ctl.mode() {
            Mode::Suspended => self.flow.stream.stash(&mut ctl.receiving, data),
            // No call will read these bytes: the flow is closed, or it was given up and they would follow a gap.
            _ => {
                self.flow.stream.add_received(data.len() as u64);
                Ok(())
            }
        };
        drop(ctl);
        if kept.is_err() {
            transport::give_up(self.flow, &DrainError::NoMemory);
        }
    }

    fn replay(&self, from: u64, f: &mut dyn FnMut(&[u8]) -> usize) -> Option<u64> {
        let is_lost = self.flow.own().is_none_or(|ctl| ctl.is_lost());
        // Bytes are missing if there was no memory for them, or if the peer asks for bytes that it has acknowledged, because a forked
        // child of it has read them.
        let reached = match is_lost {
            true => None,
            false => self.flow.stream.replay(from, f).ok(),
        };
        if reached.is_none() {
            transport::out_of_step(self.flow);
        }
        reached
    }

    fn install(&self, transport: Transport) {
        match transport.into_socket() {
            Some((fd, relayed)) => transport::install(self.flow, fd.leak(), relayed),
            // `before_connect` and `prepare` have refused such a transport.
            None => transport::out_of_step(self.flow),
        }
    }

    fn maps_v4(&self) -> bool {
        self.flow.ctl().peer.as_ref().is_some_and(Name::is_mapped)
    }

    fn before_connect(&self, transport: TransportRef<'_>) -> io::Result<()> {
        self.ask_kernel(false);
        self.copy_options(transport, |from, to, receives| {
            options::copy_before(from, to, *receives)
        })
    }

    fn prepare(&self, transport: TransportRef<'_>) -> io::Result<()> {
        self.ask_kernel(false);
        self.copy_options(transport, options::copy)
    }

    fn reinstate(&self, legacy: bool) {
        self.ask_kernel(false);
        transport::reinstate(self.flow, legacy);
    }

    fn peer_final(&self, seq: u64) {
        self.flow.stream.set_peer_final(seq);
        if let Some(mut ctl) = self.flow.own() {
            transport::show_end(self.flow, &mut ctl);
        }
        self.flow.stream.wake();
    }

    fn escalate(&self, verdict: Verdict) {
        self.ask_kernel(false);
        transport::escalate(self.flow, verdict);
    }

    fn probe(&self) -> Probe {
        let Some(ctl) = self.flow.own() else {
            return Probe::BUSY;
        };
        let probe = match (ctl.mode(), ctl.probe_fd()) {
            (Mode::Open | Mode::Lingering, Some(fd)) => self.flow.stream.probe(fd),
            _ => Probe::BUSY,
        };
        if probe.unacked == 0 && self.flow.live.load(Ordering::Acquire) {
            drop(
                self.transient()
                    .take_if(|transient| transient.asking.is_none()),
            );
        }
        probe
    }

    fn ack_wait(&self) -> Option<AckWait> {
        let ctl = self.flow.own()?;
        let carried = matches!(ctl.mode(), Mode::Open | Mode::Lingering);
        let fd = ctl.probe_fd().filter(|_| carried)?;
        let usable = !self.flow.stream.is_barred() && !self.flow.stream.is_relayed();
        usable.then(|| sys::ack_wait(fd))?
    }

    fn ask_kernel(&self, on: bool) {
        let Some(ctl) = self.flow.own() else { return };
        let mut transient = self.transient();
        let old = ctl.old().filter(|_| ctl.mode() == Mode::Suspended);
        if on {
            let asking = &mut transient.get_or_insert_default().asking;
            if let (Some(old), None) = (old, &asking) {
                *asking = sys::KeepAlive::of(old);
                sys::KeepAlive::SOON.set(old);
            }
        } else {
            let asked = transient.as_mut().and_then(|t| t.asking.take());
            drop(transient.take_if(|t| t.first.is_none()));
            if let (Some(old), Some(as_it_was)) = (old, asked) {
                as_it_was.set(old);
            }
        }
    }

    fn kernel_answered(&self, since: Duration) -> bool {
        let ctl = self.flow.ctl();
        let old = ctl.old().filter(|_| ctl.mode() == Mode::Suspended);
        old.is_some_and(|old| sys::answered_within(old, since))
    }

    fn undelivered(&self) -> Option<Undelivered> {
        let mut ctl = self.flow.ctl();
        let away = self.flow.stream.is_barred();
        // A transport that is kept while the flow is suspended is only drained.
        let in_use = ctl.mode() == Mode::Lingering && !away;
        let Some(fd) = ctl.transport().filter(|_| in_use) else {
            let over = ctl.mode() == Mode::Lingering && (ctl.is_lost() || !away);
            return (!over).then(|| self.flow.stream.undelivered());
        };
        match self.flow.stream.delivery(fd) {
            Delivery::Done => {
                ctl.set_transport(None);
                None
            }
            Delivery::Broken(owed) => {
                self.flow.stream.bar();
                drop(ctl);
                let token = self.token();
                crate::runtime::with_agent(|a| a.fault(token, Cause::Errno(libc::ECONNRESET)));
                Some(owed)
            }
            Delivery::Undelivered(owed) => Some(owed),
        }
    }
}
