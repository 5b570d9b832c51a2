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
//! | module | what it holds |
//! | --- | --- |
//! | `agent`, `command` | the handle that application threads use, and the queue behind it |
//! | `flow_io` | what a front end does for the agent |
//! | `thread` | starting the thread: signals, runtime, sockets |
//! | `panic` | what is left to do should it ever panic |
//! | `shared`, `driver` | one mutation of the endpoint after the other, and what follows from each |
//! | `flows` | suspending, draining, new transports |
//! | `watch` | flows to look at again: unacknowledged data, closed but undelivered, not idle yet |
//! | `listeners`, `listened`, `claims` | the application's listeners; those that several processes accept from |
//! | `control`, `udp` | UDP control sockets, ICMP refusals |
//! | `resume_io`, `reader`, `pump` | resume connections: messages, then the replay |
//! | `identity`, `addresses`, `address_watch`, `ports` | who we are, own addresses and their changes, which ports we take |
//! | `events` | event log and messages for people |
//! | [`turn`] | seeing to it that the thread runs |
//! | [`fds`], [`numbers`] | our descriptors, out of the application's way |
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
//! While the agent's own code runs, [`Agent::in_agent`] is true, so that a front end that
//! interposes on socket calls can let them through.

mod address_watch;
mod addresses;
mod agent;
mod claims;
mod command;
mod control;
mod done;
mod driver;
mod events;
mod flow_io;
mod flows;
mod give_way;
mod identity;
mod linger;
mod listened;
mod listeners;
mod mailbox;
mod memory;
mod netlink;
mod panic;
mod places;
mod ports;
mod pump;
mod queue;
mod reader;
mod reserve;
mod resume_io;
mod resume_listener;
mod shared;
mod short;
mod sys;
mod thread;
mod udp;
mod watch;

pub mod cancel;
pub mod fds;
pub mod limit;
pub mod numbers;
pub mod turn;

pub use agent::{Agent, as_agent, is_agent_thread, read_job_key};
pub use flow_io::{Drained, FlowIo, Owed, Probe};
pub use give_way::ask_for_port;
pub use memory::memory_is_out;
pub use slim_core::endpoint::{Heard, Opened};
pub use sys::SignalsBlocked;
