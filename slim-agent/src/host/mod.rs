//! Who we are, and where: the host's addresses and the ports that we take.

pub(crate) mod address_watch;
pub(crate) mod addresses;
pub(crate) mod identity;
pub(crate) mod ports;
