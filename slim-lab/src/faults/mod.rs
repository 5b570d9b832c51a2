//! Faults between two hosts, on demand.
//!
//! | module | fault | ends |
//! | --- | --- | --- |
//! | [`adapter`] | the port of an adapter for RDMA goes down, a soft one is deleted | when the guard is dropped |
//! | [`destroy`] | the kernel gives connections up (`SOCK_DESTROY`) | at once |
//! | [`inject`] | a forged RST or FIN arrives | at once |
//! | [`link`] | a link goes down, an address goes away | when the guard is dropped |
//! | [`link::renumber`] | a node has another address | never |
//! | [`flush`] | a firewall forgets its connections | when the guard is dropped |
//! | [`nft`] | a firewall drops packets, or resets connections | when the guard is dropped |
//! | [`lines`], [`netem`] | a line delays, loses, reorders, repeats or damages packets | when the guard is dropped |
//! | [`roce`] | a forged packet breaks a queue pair | at once |
//! | [`shape`] | the line becomes slow, long or lossy | when the guard is dropped |

pub mod adapter;
pub mod destroy;
pub mod diag;
pub mod flush;
pub mod inject;
pub mod lines;
pub mod link;
pub mod netem;
pub mod nft;
pub mod roce;
pub mod shape;
pub mod watcher;
