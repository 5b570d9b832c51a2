//! The identity of this process, the host's addresses, and the ports that the agent uses.

pub(crate) mod address_watch;
pub(crate) mod addresses;
pub(crate) mod identity;
pub(crate) mod ports;
