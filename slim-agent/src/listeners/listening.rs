//! What application threads and the agent thread share: which process has the control socket of each listener, and
//! short connections.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use slim_sys::lock::SignalSafeMutex;

use crate::commands::short::Short;

/// When to look again for a control socket that no SLIM process has, and that cannot be bound.
pub(crate) const LOOK_AGAIN: Duration = Duration::from_secs(5);
/// The same for a port that was released to the application or to another process.
pub(crate) const NEVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// Addresses of listeners whose control socket is not ours. Without a time, another process has it; with a time, no
/// SLIM process has it, and it is not looked for until then.
pub(crate) type Elsewhere = SignalSafeMutex<HashMap<SocketAddr, Option<Instant>>>;

/// The use of an address's control socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Served {
    /// The number of the application's listeners that need it. At 0 it is to be closed.
    Listeners(usize),
    /// It is being closed.
    Closing,
}

/// The addresses whose control sockets are ours.
pub(crate) type Listeners = SignalSafeMutex<HashMap<SocketAddr, Served>>;

/// Everything that is shared.
#[derive(Clone, Default)]
pub(crate) struct Together {
    /// An entry stays until the agent thread has closed the socket. A thread that listens again before closing begins
    /// keeps the socket; one that does so later waits until a new socket can be bound.
    pub(crate) listeners: Arc<Listeners>,
    pub(crate) elsewhere: Arc<Elsewhere>,
    pub(crate) short: Arc<Short>,
}
