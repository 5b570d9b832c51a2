//! The application's listeners, of which several processes may accept.
//!
//! | module | what it holds |
//! | --- | --- |
//! | `links` | tasks: other processes at our listeners, and we at theirs |
//! | `claims` | who owns a listener's control socket, and who claims a connection |
//! | `give_way` | UDP ports that another program wants |
//! | `listened` | which listeners there are |
//! | `listening` | what application threads know of them |
//! | `neighbour`, `notes` | a connection to another process, and what is said on it |
//! | `connection_at` | which connection has two addresses |

pub(crate) mod claims;
pub(crate) mod connection_at;
pub(crate) mod give_way;
pub(crate) mod links;
pub(crate) mod listened;
pub(crate) mod listening;
pub(crate) mod neighbour;
pub(crate) mod notes;
