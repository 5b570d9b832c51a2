//! The agent's control calls on a flow. They run on the agent's thread; `conclude` also runs in the last data call to leave the
//! stream.

use std::io;
use std::num::NonZeroU64;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use slim_agent::{FlowIo, Transport, TransportRef};
use slim_core::{Cause, Verdict};
use slim_stream::carrier::IsCarrier;
use slim_stream::{Carrier, Delivery, Drained, Probe, SendHalf, Undelivered};
use slim_sys::{AckWait, Errno, KeepAlive};

use super::core::{FlowCore, FlowCtl};
use super::transport::{Carried, FlowTransport};
use crate::event::FlowChange;
use crate::hub::bits;
use crate::socket;

/// Changes to report when the transport was replaced or is usable again: edges of the poll set may have been missed meanwhile.
const BACK: u32 = bits::CHANGED | bits::READABLE | bits::WRITABLE;

impl FlowCore {
    /// Records a suspension. With `tell` the program is told.
    pub(super) fn suspended(&self, ctl: &mut FlowCtl, errno: Option<Errno>, tell: bool) {
        if ctl.closed || ctl.verdict.is_some() {
            return;
        }
        ctl.suspended.get_or_insert_with(Instant::now);
        if tell && !std::mem::replace(&mut ctl.told, true) {
            self.hub.tell(self.id(), FlowChange::Suspended { errno });
            self.note(bits::CHANGED);
        }
    }

    /// Records the end of a suspension. Returns its length, and whether the program was told of it.
    fn end_suspension(&self, ctl: &mut FlowCtl) -> (Duration, bool) {
        let away = ctl.suspended.take().map_or(Duration::ZERO, |s| s.elapsed());
        ctl.away += away;
        (away, std::mem::take(&mut ctl.told))
    }

    /// Drains the old transport into the stash and closes it.
    fn drain_into(&self, ctl: &mut FlowCtl) {
        ctl.fault = None;
        let Some(transport) = self.unwatch(ctl) else {
            return;
        };
        let drained = match &transport {
            FlowTransport::Socket(sock) => {
                let (fd, sent) = (sock.raw(), self.stream.sent());
                ctl.receiving.shut_down(fd);
                self.stream.drain(&mut ctl.receiving, fd, sent)
            }
            FlowTransport::Carrier(carried) => {
                let carrier = &*carried.carrier;
                self.stream.drain_carrier(&mut ctl.receiving, carrier)
            }
        };
        self.stashed
            .store(!ctl.receiving.stash.is_empty(), Ordering::Release);
        let given_up = ctl.receiving.retire();
        if let (FlowTransport::Socket(sock), false) = (&transport, given_up) {
            // Stops the kernel from sending on it, and wakes waiting threads.
            slim_sys::disconnect(sock.raw());
        }
        if drained.is_err() {
            self.fail_desynchronized(ctl);
        }
    }

    /// The two ends disagree about the stream: ends the flow with an error, and has the agent tell the peer.
    fn fail_desynchronized(&self, ctl: &mut FlowCtl) {
        self.stream.bar();
        let errno = ctl.taken.unwrap_or(libc::ECONNRESET);
        ctl.given_up.get_or_insert(Verdict::Errno(errno));
        self.agent().out_of_step(self.token);
    }

    /// [`conclude`](Self::conclude), for callers that need the lock no longer. Also releases posts that have become hopeless.
    pub(super) fn conclude_unlocked(&self, mut ctl: MutexGuard<'_, FlowCtl>) {
        self.conclude(&mut ctl);
        let over = ctl.verdict.is_some();
        drop(ctl);
        if over {
            self.release_posts();
        }
    }

    /// Acts once no call is inside the stream, and not before: closes the transport of a closed flow; reports a fault to the agent; drains a
    /// flow that is given up, and sets its verdict.
    pub(super) fn conclude(&self, ctl: &mut FlowCtl) {
        self.close_parted(ctl);
        if let Some((cause, told @ false)) = &mut ctl.fault
            && self.stream.idle()
        {
            *told = true;
            let cause = *cause;
            // The agent cannot resume the flow, so it ends as it would without SLIM.
            if !self.agent().fault(self.token, cause) {
                ctl.given_up.get_or_insert(verdict(cause));
            }
        }
        if ctl.given_up.is_none() || ctl.verdict.is_some() || !self.stream.idle() {
            return;
        }
        self.drain_into(ctl);
        ctl.verdict = ctl.given_up;
        // Nothing will be replayed: release the replay buffer, posted buffers included.
        self.stream.with_half(|half| half.trim_to(0));
        self.linger_no_more(ctl);
        self.end_suspension(ctl);
        if !ctl.closed {
            let errno = match ctl.verdict {
                Some(Verdict::Errno(errno)) => Some(errno),
                _ => None,
            };
            self.hub.failed();
            self.hub.tell(self.id(), FlowChange::Escalated { errno });
        }
        self.note(BACK | bits::ENDED);
    }

    /// Reports bytes in the stash, which a suspended flow's calls can receive.
    fn note_stashed(&self) {
        if self.stashed.load(Ordering::Acquire) {
            self.note(bits::READABLE);
        }
    }

    fn linger_no_more(&self, ctl: &mut FlowCtl) {
        if std::mem::take(&mut ctl.lingers) {
            self.hub.lingers(false);
        }
    }

    /// Lets data calls use the present transport again, whether the flow is protected or plain.
    fn reopen(&self, ctl: &FlowCtl) {
        if self.stream.local_final().is_some() {
            ctl.transport.iter().for_each(FlowTransport::end);
        }
        self.stream.open();
    }

    /// Whether no data call is inside the stream. Then a carrier is suspended, before the peer hears of the suspension: it takes nothing
    /// more from it, so the number of received bytes is final.
    fn rests(&self, ctl: &FlowCtl) -> bool {
        let idle = self.stream.idle();
        if let (true, Some(FlowTransport::Carrier(carried))) = (idle, &ctl.transport) {
            carried.carrier.suspend();
        }
        idle
    }

    /// Whether the present transport cannot be used again.
    fn has_lost_it(ctl: &FlowCtl) -> bool {
        match &ctl.transport {
            None => true,
            Some(FlowTransport::Socket(_)) => false,
            Some(FlowTransport::Carrier(carried)) => carried.carrier.is_over(),
        }
    }

    /// Restores the keepalive settings of the transport, with which the kernel questioned the peer's kernel.
    fn stop_asking(ctl: &mut FlowCtl) {
        if let (Some(as_it_was), Some(sock)) = (ctl.asking.take(), ctl.socket()) {
            as_it_was.set(sock.raw());
        }
    }
}

/// The verdict for a transport that is lost and not replaced.
fn verdict(cause: Cause) -> Verdict {
    match cause {
        Cause::Errno(errno) => Verdict::Errno(errno),
        Cause::Eof { .. } => Verdict::Eof,
        Cause::PeerAsked | Cause::Stall => Verdict::Errno(libc::ECONNRESET),
    }
}

impl FlowIo for FlowCore {
    fn sent(&self) -> u64 {
        self.stream.sent()
    }

    fn trim(&self, peer_received: u64) {
        self.stream.trim(peer_received);
    }

    fn local_final(&self) -> Option<u64> {
        self.stream.local_final()
    }

    fn live(&self) {
        self.live.store(true, Ordering::Release);
        self.hub.tell(self.id(), FlowChange::Protected);
        self.note(bits::CHANGED);
    }

    fn legacy(&self, refused: bool) {
        let mut ctl = self.ctl();
        if ctl.verdict.is_some() {
            return;
        }
        self.plain.store(true, Ordering::Release);
        self.stream.with_half(|half| *half = SendHalf::new());
        self.linger_no_more(&mut ctl);
        let taken = match ctl.fault.take() {
            Some((Cause::Errno(errno), _)) => Some(errno),
            _ => ctl.taken.take(),
        };
        if refused {
            self.stream.bar();
            ctl.given_up = Some(Verdict::Errno(libc::ECONNREFUSED));
        } else if let Some(errno) = taken.or(Self::has_lost_it(&ctl).then_some(libc::ECONNRESET)) {
            self.stream.bar();
            ctl.given_up.get_or_insert(Verdict::Errno(errno));
        } else if ctl.given_up.is_none() {
            self.end_suspension(&mut ctl);
            self.reopen(&ctl);
            self.hub.tell(self.id(), FlowChange::Plain);
        }
        self.note(BACK);
        self.conclude_unlocked(ctl);
    }

    fn suspend(&self) -> bool {
        let mut ctl = self.ctl();
        self.stream.bar();
        self.suspended(&mut ctl, None, false);
        self.rests(&ctl)
    }

    fn idle(&self) -> bool {
        self.rests(&self.ctl())
    }

    fn connection_exists(&self) -> bool {
        let ctl = self.ctl();
        let transport = ctl.transport.as_ref();
        transport.is_some_and(|transport| !transport.is_over())
    }

    fn connection(&self) -> Option<u64> {
        self.ctl().accepted?.1.map(NonZeroU64::get)
    }

    fn age(&self) -> Option<Duration> {
        Some(self.ctl().accepted?.0.elapsed())
    }

    fn drain(&self) -> Drained {
        let mut ctl = self.ctl();
        Self::stop_asking(&mut ctl);
        // Only now is it certain that the flow has lost its transport.
        let errno = match ctl.fault {
            Some((Cause::Errno(errno), _)) => Some(errno),
            _ => ctl.taken,
        };
        self.suspended(&mut ctl, errno, true);
        self.drain_into(&mut ctl);
        ctl.replaying = 0;
        self.note_stashed();
        self.conclude_unlocked(ctl);
        self.stream.drained()
    }

    fn stash(&self, data: &[u8]) {
        let mut ctl = self.ctl();
        if ctl.closed || ctl.verdict.is_some() {
            // The program will not read these bytes: only count them.
            return self.stream.add_received(data.len() as u64);
        }
        if self.stream.stash(&mut ctl.receiving, data).is_err() {
            self.fail_desynchronized(&mut ctl);
            return self.conclude_unlocked(ctl);
        }
        self.stashed
            .store(!ctl.receiving.stash.is_empty(), Ordering::Release);
        drop(ctl);
        self.note_stashed();
    }

    fn replay(&self, from: u64, f: &mut dyn FnMut(&[u8]) -> usize) -> Option<u64> {
        let reached = self.stream.replay(from, f).ok();
        let mut ctl = self.ctl();
        match reached {
            Some(at) => {
                ctl.replayed += at - from;
                ctl.replaying += at - from;
            }
            None => {
                self.fail_desynchronized(&mut ctl);
                self.conclude_unlocked(ctl);
            }
        }
        reached
    }

    fn maps_v4(&self) -> bool {
        match self.remote() {
            std::net::SocketAddr::V6(addr) => addr.ip().to_ipv4_mapped().is_some(),
            std::net::SocketAddr::V4(_) => false,
        }
    }

    fn before_connect(&self, transport: TransportRef<'_>) -> io::Result<()> {
        self.prepare(transport)
    }

    fn prepare(&self, transport: TransportRef<'_>) -> io::Result<()> {
        Self::stop_asking(&mut self.ctl());
        match transport {
            // Nothing to set: the agent's connections have `TCP_NODELAY`, the only option that the library sets.
            TransportRef::Descriptor(_) | TransportRef::Relayed(_) => Ok(()),
            TransportRef::Other(kind) if kind.is::<IsCarrier>() => Ok(()),
            TransportRef::Other(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    fn install(&self, transport: Transport) {
        let mut ctl = self.ctl();
        let (transport, relayed) = match transport {
            Transport::Descriptor(fd) => (FlowTransport::Socket(Arc::new(fd)), false),
            Transport::Relayed(fd) => (FlowTransport::Socket(Arc::new(fd)), true),
            Transport::Other(carrier) => match carrier.downcast::<Arc<dyn Carrier>>() {
                Ok(carrier) => {
                    let carried = Arc::new(Carried::new(*carrier));
                    (FlowTransport::Carrier(carried), false)
                }
                // `before_connect` and `prepare` refuse all others, so the kind is not what it said. What was replayed is lost.
                Err(_) => {
                    self.fail_desynchronized(&mut ctl);
                    return self.conclude_unlocked(ctl);
                }
            },
        };
        let ended = self.stream.ends_at(self.stream.received());
        if ctl.end_shown && !ended && !ctl.closed {
            // The program was shown an end of the stream that the peer did not send. No bytes may follow it.
            self.fail_desynchronized(&mut ctl);
        }
        if ctl.given_up.is_some() {
            if let FlowTransport::Socket(sock) = &transport {
                slim_sys::disconnect(sock.raw());
            }
            self.agent().out_of_step(self.token);
            return self.conclude_unlocked(ctl);
        }
        match &transport {
            FlowTransport::Socket(sock) => {
                self.stream.install(&mut ctl.receiving, sock.raw(), relayed);
            }
            FlowTransport::Carrier(carried) => {
                let carrier = &*carried.carrier;
                self.stream.install_carrier(&mut ctl.receiving, carrier);
            }
        }
        if let (Some(bytes), Some(sock)) = (ctl.unsent_limit, transport.socket()) {
            socket::limit_unsent(sock, bytes.get());
        }
        // Before it is watched: what the poll set reports then is a carrier's.
        let transport = self.carry_by(&mut ctl.transport, transport);
        ctl.taken = None;
        ctl.resumes += 1;
        let (away, _) = self.end_suspension(&mut ctl);
        if !ctl.closed {
            // If this fails for lack of memory, `note` below still reports the flow, and data calls find its state.
            let _ = transport.watch(&self.hub, self.id());
            let replayed = ctl.replaying;
            self.hub
                .tell(self.id(), FlowChange::Resumed { replayed, away });
        }
        self.stream.open();
        // Under the lock: a thread that finds the transport and begins to wait must find the signal changed, too.
        self.note(BACK);
    }

    fn reinstate(&self, legacy: bool) {
        let mut ctl = self.ctl();
        Self::stop_asking(&mut ctl);
        if ctl.verdict.is_some() {
            return;
        }
        let met = match ctl.fault.take() {
            Some((Cause::Errno(errno), _)) => Some(errno),
            _ => ctl.taken,
        };
        ctl.receiving.reinstate();
        if let Some(errno) = met.or(Self::has_lost_it(&ctl).then_some(libc::ECONNRESET)) {
            // A call has met an error since the agent's decision: start over with that error.
            if legacy {
                ctl.given_up.get_or_insert(Verdict::Errno(errno));
            } else {
                ctl.fault = Some((Cause::Errno(errno), false));
            }
            return self.conclude_unlocked(ctl);
        }
        let (_, told) = self.end_suspension(&mut ctl);
        if legacy {
            self.plain.store(true, Ordering::Release);
            self.stream.with_half(|half| *half = SendHalf::new());
            self.linger_no_more(&mut ctl);
            self.hub.tell(self.id(), FlowChange::Plain);
        } else if told {
            self.hub.tell(self.id(), FlowChange::Reinstated);
        }
        self.reopen(&ctl);
        self.note(BACK);
    }

    fn peer_final(&self, seq: u64) {
        self.stream.set_peer_final(seq);
        self.stream.wake();
    }

    fn escalate(&self, verdict: Verdict) {
        let mut ctl = self.ctl();
        Self::stop_asking(&mut ctl);
        self.stream.bar();
        let verdict = match (verdict, ctl.taken) {
            // The end of the stream came before the transport failed, so the error concerns the bytes that this end sent.
            (Verdict::Eof, Some(libc::EPIPE)) => Verdict::Errno(libc::EPIPE),
            (verdict, _) => verdict,
        };
        ctl.given_up.get_or_insert(verdict);
        self.conclude_unlocked(ctl);
    }

    fn probe(&self) -> Probe {
        let waits = self.stream.is_relayed() && self.awaits_posts();
        let ctl = self.ctl();
        let transport = ctl.transport.as_ref();
        let probe = match transport.filter(|_| !self.stream.is_barred()) {
            None => Probe::BUSY,
            Some(FlowTransport::Socket(sock)) => self.stream.probe(sock.raw()),
            Some(FlowTransport::Carrier(carried)) => self.stream.probe_carrier(&*carried.carrier),
        };
        Probe {
            full: probe.full || (probe.relayed && waits),
            ..probe
        }
    }

    fn ack_wait(&self) -> Option<AckWait> {
        let ctl = self.ctl();
        let usable = !self.stream.is_barred() && !self.stream.is_relayed();
        let sock = ctl.socket().filter(|_| usable)?;
        slim_sys::ack_wait(sock.raw())
    }

    fn ask_kernel(&self, on: bool) {
        let mut ctl = self.ctl();
        if !on {
            return Self::stop_asking(&mut ctl);
        }
        let sock = ctl.socket().map(|sock| sock.raw());
        if let (Some(fd), None) = (sock, &ctl.asking) {
            ctl.asking = KeepAlive::of(fd);
            KeepAlive::SOON.set(fd);
        }
    }

    fn kernel_answered(&self, since: Duration) -> bool {
        let ctl = self.ctl();
        let sock = ctl.socket();
        sock.is_some_and(|sock| slim_sys::answered_within(sock.raw(), since))
    }

    fn undelivered(&self) -> Option<Undelivered> {
        let mut ctl = self.ctl();
        let away = self.stream.is_barred();
        let undelivered = match ctl.transport.as_ref().filter(|_| ctl.verdict.is_none()) {
            _ if ctl.verdict.is_some() => None,
            _ if !ctl.closed => Some(self.stream.undelivered()),
            None => away.then(|| self.stream.undelivered()),
            Some(_) if away => Some(self.stream.undelivered()),
            Some(transport) => match transport.delivery(&self.stream) {
                Delivery::Done => None,
                Delivery::Undelivered(rest) => Some(rest),
                Delivery::Broken(rest) => {
                    self.stream.bar();
                    self.agent()
                        .fault(self.token, Cause::Errno(libc::ECONNRESET));
                    Some(rest)
                }
            },
        };
        if undelivered.is_none() {
            self.part_with_transport(&mut ctl);
            self.linger_no_more(&mut ctl);
        }
        undelivered
    }
}
