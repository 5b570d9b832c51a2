//! A flow as a member of its session's poll set.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::event::epoll::EventFlags;

use super::core::FlowCore;
use crate::event::FlowStats;
use crate::hub::{Member, Update, bits};

impl Member for FlowCore {
    fn ready(self: Arc<Self>, flags: EventFlags) {
        if let Some(carried) = self.carried() {
            return self.carrier_ready(&carried);
        }
        let connecting = self.connecting.load(Ordering::Acquire);
        self.look_at_connecting();
        if flags.intersects(EventFlags::ERR | EventFlags::HUP | EventFlags::RDHUP) {
            self.look_at_end();
        }
        let mut what = 0;
        if flags.intersects(EventFlags::IN | EventFlags::RDHUP | EventFlags::ERR | EventFlags::HUP)
        {
            what |= bits::READABLE;
        }
        if flags.intersects(EventFlags::OUT | EventFlags::ERR | EventFlags::HUP)
            && self.blocked.swap(false, Ordering::SeqCst)
        {
            what |= bits::WRITABLE;
        }
        // A suspended flow can transfer nothing, and reports when it is resumed.
        if what != 0 && !connecting && !self.stream.is_barred() {
            self.note_and(what, false);
        }
    }

    fn take_update(&self) -> Update {
        let news = self.news.swap(0, Ordering::AcqRel);
        Update {
            id: self.id(),
            acceptable: false,
            readable: news & bits::READABLE != 0,
            writable: news & bits::WRITABLE != 0,
            changed: news & bits::CHANGED != 0,
            ended: news & bits::ENDED != 0,
            completed: news & bits::COMPLETED != 0,
        }
    }

    fn close(&self, reset: bool) {
        self.close_now(reset);
    }

    fn release_posts(&self) {
        self.release_buffers();
    }

    fn id(&self) -> u64 {
        self.token.0
    }

    fn is_posting(&self) -> bool {
        self.has_posts()
    }

    fn is_queued(&self) -> bool {
        self.queued.load(Ordering::SeqCst)
    }

    fn pump(self: Arc<Self>) -> bool {
        self.pump_posts(false)
    }

    fn stats(&self) -> Option<FlowStats> {
        Some(self.counters())
    }
}
