//! The I/O half of SLIM: one background thread per process that carries out what
//! [`slim_core::endpoint::Endpoint`] decides.
//!
//! The endpoint decides what a session has to do, and performs no I/O. A front end (the preload library) holds the
//! application's descriptors and knows nothing of sessions. This crate stands between them. It owns every socket that
//! is not the application's own.
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
//! Listed from top to bottom: a module imports only modules below it, except that a module and its own submodules may
//! import each other. The tasks inside the folders (`control::receive`, `listeners::links`, `host::address_watch`,
//! `tasks::spawn`, `resume`) lie above the driver.
//!
//! | module | what it holds |
//! | --- | --- |
//! | [`offered`] | one agent for several copies of this crate in a process; its `host` lies above `agent`, its `guest` below |
//! | [`table`] | what layers above ask; its `asking` lies above `agent`, the rest below |
//! | `agent` | the handle that application threads use |
//! | `thread`, `driven` | the agent thread, and the agent without a thread: both drive the event loop |
//! | `event_loop` | the runtime, with its sockets and tasks |
//! | `tasks` | tasks of the agent thread that the driver starts, and their orders |
//! | `resume` | resume connections: accepting and making them, the messages on them, the replay |
//! | `shared` | how tasks access the driver, one at a time, and what follows from each access |
//! | `driver` | carries out the endpoint's actions, and reports events to it: flows, resume connections, listeners, timed checks |
//! | `control` | UDP control sockets, their datagrams, ICMP refusals, the addresses where peers reach this process |
//! | [`transport`] | what a resume requires of a transport of any kind; TCP, with its listeners |
//! | `listeners` | listeners that several processes accept from |
//! | `commands` | what application threads share with the agent thread |
//! | [`exec`] | what goes over to the next program of the process |
//! | `failure` | what the agent does after a panic of its thread, or when memory runs out |
//! | `flow_io`, `handover` | what a front end does for the agent, and how it receives a transport |
//! | `host` | identity of this process, own addresses, ports that the agent uses |
//! | `events` | event log and messages for people |
//! | [`turn`] | ensures that the agent thread gets processor time |
//! | `kernel` | requests to the kernel and to the runtime |
//!
//! # What it is not
//!
//! It is not in the data path. While a flow is live, its bytes go from the application to the kernel without involving
//! this thread. In a process whose flows are all live, with nothing unacknowledged, the thread is never woken.
//!
//! # Threads and locks
//!
//! [`Agent`]'s methods may be called from any thread, and from inside hooked socket calls: they
//! put a command in a queue and return. Every [`FlowIo`] method is called on the agent thread, or by the thread that drives an agent
//! without one ([`Agent::start_driven`]); never by two threads at a time.
//! While the agent's own code runs, [`slim_sys::in_agent`] is true, so that a front end that
//! interposes on socket calls can let them through.

// Lets the test transport in `tests/common/memory.rs` name this crate when it is compiled into the unit tests.
#[cfg(test)]
extern crate self as slim_agent;

mod agent;
mod commands;
mod control;
mod driven;
mod driver;
mod event_loop;
mod events;
pub mod exec;
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

pub mod offered;
pub mod table;
pub mod transport;
pub mod turn;

pub use agent::{Agent, read_job_key};
pub use failure::memory::memory_is_out;
pub use flow_io::FlowIo;
pub use handover::{Transport, TransportRef};
pub use listeners::give_way::ask_for_port;
pub use slim_core::endpoint::{MailboxState, Opened};
