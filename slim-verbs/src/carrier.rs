//! A queue pair as the transport of a flow.

use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;

use slim_rdma::{Break, PairError, Pieces, Verbs};
use slim_stream::Carrier;
use slim_sys::{Errno, OwnFd};

use crate::pair::{InUse, SharedPair};

/// A send takes no more room that comes meanwhile after so many bytes. The agent's thread, and calls of the other direction, wait for its end.
const ENOUGH: usize = 512 << 10;

/// A queue pair with an event counter.
pub(crate) struct PairCarrier<V: Verbs>(Arc<SharedPair<V>>);

impl<V: Verbs> PairCarrier<V> {
    /// `None` if it has no event counter.
    pub(crate) fn new(pair: Arc<SharedPair<V>>) -> Option<Self> {
        pair.event()?;
        Some(PairCarrier(pair))
    }

    pub(crate) fn pair(&self) -> &Arc<SharedPair<V>> {
        &self.0
    }
}

/// The error of a call that has moved no bytes.
pub(crate) fn errno(e: PairError) -> Errno {
    match e {
        PairError::WouldBlock => libc::EAGAIN,
        PairError::Ended => libc::EPIPE,
        PairError::Broken(_) => libc::ECONNRESET,
    }
}

impl<V: Verbs + Send + 'static> Carrier for PairCarrier<V> {
    fn send(&self, data: &[IoSlice<'_>]) -> Result<usize, Errno> {
        let send = |used: &mut InUse<'_, V>| {
            let mut rest = Pieces::new(data);
            let all = rest.left();
            while rest.left() > 0 && all - rest.left() < ENOUGH {
                match used.pair.send_pieces(used.verbs, &mut rest) {
                    Ok(_) => {}
                    // Room that has come meanwhile is used; if none has, the caller waits for it now.
                    Err(PairError::WouldBlock) if used.has_room() => {}
                    Err(_) if rest.left() < all => break,
                    Err(e) => return Err(errno(e)),
                }
            }
            Ok(all - rest.left())
        };
        self.0.with(send)
    }

    fn recv(&self, into: &mut [IoSliceMut<'_>]) -> Result<usize, Errno> {
        let recv = |used: &mut InUse<'_, V>| {
            let mut taken = 0;
            for piece in into.iter_mut().filter(|piece| !piece.is_empty()) {
                let n = match used.pair.recv(used.verbs, piece) {
                    Ok(n) => n,
                    Err(_) if taken > 0 => 0,
                    // No fault: this side has given it up.
                    Err(PairError::Broken(Break::Suspended)) => return Err(libc::EAGAIN),
                    Err(e) => return Err(errno(e)),
                };
                taken += n;
                if n < piece.len() {
                    break;
                }
            }
            Ok(taken)
        };
        self.0.with(recv)
    }

    fn unread(&self) -> u64 {
        self.0.with(|used| {
            used.pair.progress(used.verbs);
            used.pair.unread()
        })
    }

    fn has_room(&self) -> bool {
        self.0.with(|used| used.has_room())
    }

    fn unacked(&self) -> u64 {
        self.0.with(|used| {
            used.pair.progress(used.verbs);
            used.pair.sent() - used.pair.recorded_by_peer()
        })
    }

    fn is_over(&self) -> bool {
        self.0.is_broken()
    }

    fn end(&self) {
        self.0.with(|used| used.pair.end(used.verbs));
    }

    fn suspend(&self) {
        self.0.suspend();
    }

    fn descriptor(&self) -> &OwnFd {
        self.0.event().expect("made before the carrier")
    }

    fn reset(&self) {
        self.0.with(|used| used.reset());
    }
}

#[cfg(test)]
mod tests;
