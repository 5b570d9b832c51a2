//! `mca_btl_slim`: a byte-transfer component of Open MPI on the session library.
//!
//! Ranks that use it have flows between them that outlive their TCP connections, without `LD_PRELOAD`. Open MPI's point-to-point
//! layer (`ob1`) cuts messages into fragments and hands them to the component; on the other side the component hands each
//! fragment to the callback of its tag.
//!
//! ```text
//!   ob1 ──► shim/*.c ──► component ──► module ──► endpoint ──► slim::Flow
//!            structs of     C ABI      session,    one peer:
//!            Open MPI                  progress    link, queue
//! ```
//!
//! What needs Open MPI's headers is in the shim: the structs of component and module, the modex, receive callbacks, packing by the
//! convertor. `slim-btl/build` links both to `mca_btl_slim.so`.
//!
//! # Connections
//!
//! One flow for each pair of processes, made by the first that sends. Its first frame is a hello with the connector's name;
//! the acceptor answers with accept or reject. If both connect at the same time, the flow of the lower name is the one. The last
//! frame is a goodbye; a flow that ends without it was lost, and Open MPI is told.
//!
//! # Map
//!
//! | module | what it holds |
//! | --- | --- |
//! | `component` | the functions that the shim calls |
//! | `module` | [`module::BtlModule`]: session, peers, progress |
//! | `endpoint` | [`endpoint::BtlEndpoint`]: one peer |
//! | `frag` | fragments, with Open MPI's descriptor |
//! | `inbox` | received bytes, cut into frames |
//! | `hdr` | frames on the wire |
//! | `interfaces` | addresses to listen at |
//! | `proc` | names of processes, and what they publish |

pub mod component;
pub mod endpoint;
pub mod frag;
pub mod hdr;
pub mod inbox;
pub mod interfaces;
pub mod module;
pub mod proc;
