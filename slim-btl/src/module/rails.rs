//! Adding and retiring rails.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::BtlModule;
use super::link::{BtlLink, LinkStage};
use super::progress::ProgressState;
use crate::endpoint::{BtlEndpoint, RailChanges};
use crate::frag::SUCCESS;

/// Interval at which the rails of all peers are tended: a line that works again gets its rail back.
const INTERVAL: Duration = Duration::from_secs(1);
/// The same for a second after a rail was suspected: a line that works nevertheless gets its rail back soon.
const SOON: Duration = Duration::from_millis(100);

/// Interval at which they are watched.
const WATCH: Duration = Duration::from_millis(5);

/// When the rails of all peers were last looked after.
pub(super) struct RailTimes {
    watched: Instant,
    tended: Instant,
    suspected: Option<Instant>,
}

impl Default for RailTimes {
    fn default() -> Self {
        let now = Instant::now();
        Self {
            watched: now,
            tended: now,
            suspected: None,
        }
    }
}

impl RailTimes {
    /// Whether the rails are to be tended now.
    fn is_tending_due(&self, now: Instant) -> bool {
        let since = |at| now.saturating_duration_since(at);
        let suspicious = self.suspected.is_some_and(|at| since(at) <= INTERVAL);
        since(self.tended) >= if suspicious { SOON } else { INTERVAL }
    }
}

impl BtlModule {
    /// Finds rails that stand still; adds missing rails and retires superfluous ones.
    pub(super) fn watch_rails(&self, state: &mut ProgressState, now: Instant) {
        let times = &mut state.rail_times;
        if now.saturating_duration_since(times.watched) < WATCH {
            return;
        }
        times.watched = now;
        // Each peer once: by the link of its first rail.
        let first = state.links.values().filter(|link| !link.is_rail);
        let suspects = first
            .flat_map(|link| &link.endpoint)
            .filter(|endpoint| endpoint.watch_rails(now));
        if suspects.count() > 0 {
            times.suspected = Some(now);
        }
        if times.is_tending_due(now) {
            times.tended = now;
            self.tend_all_rails(state, now);
        }
    }

    /// Connects the rails that a new link needs.
    pub(super) fn add_rails(&self, endpoint: &Arc<BtlEndpoint>) {
        let now = Instant::now();
        let changes = endpoint.tend_rails(now, |_| true);
        self.connect_rails(endpoint, &changes, now);
    }

    fn tend_all_rails(&self, state: &mut ProgressState, now: Instant) {
        self.tend_handshakes(state, now);
        let peers: Vec<_> = self.peers().values().cloned().collect();
        for peer in peers {
            let links = &state.links;
            let has_met = |id: u64| {
                links
                    .get(&id)
                    .is_some_and(|link| link.stage != LinkStage::Connecting)
            };
            let changes = peer.tend_rails(now, has_met);
            for flow in &changes.give_up {
                state.links.remove(flow);
            }
            self.connect_rails(&peer, &changes, now);
            let mut done = Vec::new();
            peer.flush(&mut done);
            self.complete(&peer, done, SUCCESS);
        }
    }

    fn connect_rails(&self, endpoint: &Arc<BtlEndpoint>, changes: &RailChanges, now: Instant) {
        for line in &changes.connect {
            let Some(addr) = line.addrs.first() else {
                continue;
            };
            match self.session.try_connect(*addr) {
                Ok(flow) => {
                    self.log(2, || format!("adds a rail to {} at {addr}", endpoint.name));
                    endpoint.adding_rail(line.line, flow.id(), now);
                    let token = changes.token;
                    self.announce(BtlLink::connecting(flow, endpoint.clone(), token, true));
                }
                Err(e) => self.log(1, || format!("{} at {addr}: {e}", endpoint.name)),
            }
        }
    }
}
