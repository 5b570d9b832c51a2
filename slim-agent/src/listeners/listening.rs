//! What threads of the application and the agent's share: who has the control socket of which listener, and short
//! connections.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use slim_sys::lock::Undisturbed;

use crate::commands::short::Short;

/// When a control socket that nobody has, and that cannot be bound, is looked for again.
pub(crate) const LOOK_AGAIN: Duration = Duration::from_secs(5);
/// The application wants the port for itself.
pub(crate) const NEVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// Addresses of listeners whose control socket is not ours: another process's if there is no time,
/// nobody's until that time otherwise.
pub(crate) type Elsewhere = Undisturbed<HashMap<SocketAddr, Option<Instant>>>;

/// Who needs the control socket of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Served {
    /// So many of the application's listeners. Without any it is to be closed.
    Listeners(usize),
    /// Nobody: it is being closed.
    Closing,
}

/// The addresses whose control sockets are ours.
pub(crate) type Listeners = Undisturbed<HashMap<SocketAddr, Served>>;

/// All of it.
#[derive(Clone, Default)]
pub(crate) struct Together {
    /// An entry stays until the agent thread has closed the socket: who listens again before it begins to keeps the socket,
    /// and who does later waits until a second one can be bound.
    pub(crate) listeners: Arc<Listeners>,
    pub(crate) elsewhere: Arc<Elsewhere>,
    pub(crate) short: Arc<Short>,
}
