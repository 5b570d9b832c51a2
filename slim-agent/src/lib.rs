//! The I/O half of SLIM: one background thread per process that carries out what
//! [`slim_core::endpoint::Endpoint`] decides.
//!
//! The endpoint knows what a session has to do and does none of it; a front end (the preload
//! library) holds the application's descriptors and knows nothing of sessions. This crate stands
//! between them. It owns every socket that is not the application's own.
//!
//! ```text
//!   application threads             slim-agent thread                        network
//!  ┌───────────────────┐  commands ┌──────────────────────────┐
//!  │ front end         ├──────────►│ driver ◄──► Endpoint     │
//!  │  open, fault,     │  (queue + │   │    (decides)         │
//!  │  finish, dirty …  │  eventfd) │   ├── control sockets    ├──► UDP: HELLO, FIN, QUERY …
//!  │                   │           │   ├── resume listeners   │◄── TCP: CHALLENGE, RESUME,
//!  │  FlowIo per flow  │◄──────────┤   ├── resume connections ├──►      OK, CONFIRM, then the
//!  │  suspend, drain,  │   calls   │   ├── alarm (timerfd)    │         flow's own bytes
//!  │  replay, install …│           │   └── address watch      │◄── rtnetlink
//!  └───────────────────┘           └──────────────────────────┘
//! ```
//!
//! # Map
//!
//! From the top to the bottom; arrows of imports go down only, but for those between a module and its own parts.
//!
//! | module | what it holds |
//! | --- | --- |
//! | `agent` | the handle that application threads use |
//! | `thread` | starting the thread: signals, runtime, sockets |
//! | `spawn` | starting the tasks that the driver wants |
//! | `receive`, `resume_listener`, `resume_io`, `link`, `pump`, `links`, `address_watch` | tasks: control messages, resume connections (messages, then the replay), other processes at our listeners, changes of addresses |
//! | `shared` | how tasks get at the driver, one after the other, and what follows from each |
//! | `driver` | what the endpoint decides is done, and what happens is told to it: flows, resume connections, listeners, what is to be looked at again |
//! | `tasks`, `order`, `mailbox` | tasks that the driver wants, and what they are to do |
//! | `control`, `control_socket`, `udp`, `places` | UDP control sockets, ICMP refusals, the addresses where peers come to us |
//! | `reader` | messages on resume connections |
//! | [`transport`] | what resumes need of a transport, whatever kind it is of; TCP, with its listeners |
//! | `claims`, `neighbour`, `notes`, `connection_at`, `give_way`, `listened` | listeners that several processes accept from |
//! | `listening`, `short`, `command`, `queue`, `done` | what application threads share with the agent's |
//! | `panic`, `report`, `memory` | what is left to do should the thread ever panic, or memory run out |
//! | `flow_io`, `handover` | what a front end does for the agent, and gets of a transport |
//! | `identity`, `addresses`, `ports` | who we are, own addresses, which ports we take |
//! | `netlink`, `sock_diag` | what the kernel is asked by netlink(7) |
//! | `events` | event log and messages for people |
//! | [`turn`] | seeing to it that the thread runs |
//! | `sys`, `readiness` | what is asked of the kernel, and of the runtime |
//!
//! # What it is not
//!
//! It is not in the data path. While a flow is live, its bytes go from the application to the
//! kernel without a word to this thread; a process whose flows are all live, with nothing
//! unacknowledged, is never woken.
//!
//! # Threads and locks
//!
//! [`Agent`]'s methods may be called from any thread, and from inside hooked socket calls: they
//! put a command in a queue and return. Every [`FlowIo`] method is called on the agent thread.
//! While the agent's own code runs, [`slim_sys::in_agent`] is true, so that a front end that
//! interposes on socket calls can let them through.

// For the second kind of transport, which lies beside the tests.
#[cfg(test)]
extern crate self as slim_agent;

mod address_watch;
mod addresses;
mod agent;
mod claims;
mod command;
mod connection_at;
mod control;
mod control_socket;
mod done;
mod driver;
mod events;
mod flow_io;
mod give_way;
mod handover;
mod identity;
mod link;
mod links;
mod listened;
mod listening;
mod mailbox;
mod memory;
mod neighbour;
mod netlink;
mod notes;
mod order;
mod panic;
mod places;
mod ports;
mod pump;
mod queue;
mod reader;
mod readiness;
mod receive;
mod report;
mod resume_io;
mod resume_listener;
mod shared;
mod short;
mod sock_diag;
mod spawn;
mod sys;
mod tasks;
mod thread;
mod udp;

pub mod transport;
pub mod turn;

pub use agent::{Agent, read_job_key};
pub use flow_io::FlowIo;
pub use give_way::ask_for_port;
pub use handover::{Transport, TransportRef};
pub use memory::memory_is_out;
pub use slim_core::endpoint::{Heard, Opened};
