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
//! From the top to the bottom; arrows of imports go down only, but for those between a module and its own parts. Of a folder the
//! tasks (`control::receive`, `listeners::links`, `host::address_watch`, `tasks::spawn`, `resume`) lie above the driver.
//!
//! | module | what it holds |
//! | --- | --- |
//! | `agent` | the handle that application threads use |
//! | `thread` | starting the thread: signals, runtime, sockets |
//! | `tasks` | what runs on it: tasks that the driver wants, and what they are to do |
//! | `resume` | resume connections: accepting, the messages on them, the replay |
//! | `shared` | how tasks get at the driver, one after the other, and what follows from each |
//! | `driver` | what the endpoint decides is done, and what happens is told to it: flows, resume connections, listeners, what is to be looked at again |
//! | `control` | UDP control sockets, what comes to them, ICMP refusals, the addresses where peers come to us |
//! | [`transport`] | what resumes need of a transport, whatever kind it is of; TCP, with its listeners |
//! | `listeners` | listeners that several processes accept from |
//! | `commands` | what application threads share with the agent's |
//! | `failure` | what is left to do should the thread ever panic, or memory run out |
//! | `flow_io`, `handover` | what a front end does for the agent, and gets of a transport |
//! | `host` | who we are, own addresses, which ports we take |
//! | `events` | event log and messages for people |
//! | [`turn`] | seeing to it that the thread runs |
//! | `kernel` | what is asked of the kernel, and of the runtime |
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

mod agent;
mod commands;
mod control;
mod driver;
mod events;
mod failure;
mod flow_io;
mod handover;
mod host;
mod kernel;
mod listeners;
mod resume;
mod shared;
mod tasks;
mod thread;

pub mod transport;
pub mod turn;

pub use agent::{Agent, read_job_key};
pub use failure::memory::memory_is_out;
pub use flow_io::FlowIo;
pub use handover::{Transport, TransportRef};
pub use listeners::give_way::ask_for_port;
pub use slim_core::endpoint::{Heard, Opened};
