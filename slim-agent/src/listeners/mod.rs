//! The application's listeners, from which several processes may accept.
//!
//! | module | what it holds |
//! | --- | --- |
//! | `links` | tasks: connections with processes that share a listener |
//! | `claims` | which process owns a listener's control socket, and which claims a connection |
//! | `give_way` | UDP ports that another program wants |
//! | `listened` | which listeners exist |
//! | `listening` | what application threads and the agent thread share about them |
//! | `neighbour`, `notes` | a connection to another process, and the notes on it |
//! | `connection_at` | which connection has two given addresses |

pub(crate) mod claims;
pub(crate) mod connection_at;
pub(crate) mod give_way;
pub(crate) mod links;
pub(crate) mod listened;
pub(crate) mod listening;
pub(crate) mod neighbour;
pub(crate) mod notes;
