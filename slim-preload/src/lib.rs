//! SLIM under unmodified programs: `LD_PRELOAD=libslim_preload.so`.
//!
//! A hook takes the place of a libc function. It looks the descriptor up in the [`table`]. A plain descriptor goes straight to libc. For a
//! flow, [`ops`] does what the call asks for and counts the bytes (crate `slim-stream`). When the transport dies, [`transport`] suspends
//! the flow, until the agent (crate `slim-agent`) has resumed it and [`transport`] installs the new transport under the number.
//!
//! ```text
//! application ── hooks ── ops ── table ── flow ── transport ── stand_in, epoll
//!                                           │        ▲
//!                                           └─ front ┘  called by slim-agent's thread
//! ```
//!
//! # Map
//!
//! From the top to the bottom: a module imports only modules below its own row, or in it.
//!
//! | module | what it holds |
//! | --- | --- |
//! | `load` | initialization when the library is loaded |
//! | [`hooks`] | the functions that take the place of libc's |
//! | [`exec`] | executing another program, which goes on with the flows |
//! | [`process`], [`exit`] | fork, namespaces; the end of the process |
//! | [`ops`] | what a hooked call does |
//! | [`front`], [`listeners`] | flows and listeners as the agent knows them |
//! | [`transport`] | the file under a flow's numbers, and swapping it |
//! | [`epoll`] | the epoll instances of the process |
//! | [`table`] | what a descriptor number means |
//! | [`flow`] | one flow |
//! | [`mirror`], [`rings`] | the registrations of an epoll instance; io_uring |
//! | [`options`], [`kept_names`] | socket options that a new transport gets; addresses of connections that are plain TCP |
//! | `copies` | what a program that links SLIM itself shares with this library; the table that programs ask |
//! | [`runtime`] | whether SLIM works in this process, and its agent |
//! | [`descriptors`], [`sleep`], [`stand_in`] | numbers of SLIM's own; threads that sleep in `poll`; sockets in place of a dead transport |
//! | [`addr`], [`direct`], [`heap`], [`marks`], [`sys`] | addresses; calls past libc; memory; page shared with children; the kernel |
//!
//! This crate makes no decisions about peers and networks: `slim-core` decides, driven by `slim-agent`.

mod addr;
mod copies;
mod descriptors;
mod direct;
mod epoll;
mod exec;
mod exit;
mod flow;
mod front;
mod heap;
mod hooks;
mod kept_names;
mod listeners;
mod load;
mod marks;
mod mirror;
mod ops;
mod options;
mod process;
mod rings;
mod runtime;
mod sleep;
mod stand_in;
mod sys;
mod table;
mod transport;
