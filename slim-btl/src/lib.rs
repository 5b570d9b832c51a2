//! `mca_btl_slim`: a byte-transfer component of Open MPI on the session library.
//!
//! Ranks that use it have flows between them that outlive their TCP connections, without `LD_PRELOAD`. Open MPI's point-to-point
//! layer (`ob1`) cuts messages into fragments and hands them to the component; on the other side the component hands each
//! fragment to the callback of its tag.
//!
//! ```text
//!   ob1 ──► shim/*.c ──► component ──► module ──► endpoint ──► rail ──► slim::Flow
//!            structs of     C ABI      session,    one peer     one line
//!            Open MPI                  progress
//! ```
//!
//! What needs Open MPI's headers is in the shim: the structs of component and module, the modex, receive callbacks, packing by the
//! convertor. `slim-btl/build` links both to `mca_btl_slim.so`.
//!
//! # Connections
//!
//! The process that sends first connects. The first frame of a flow is a hello with the connector's name; the acceptor answers with
//! accept or reject, and the connector confirms an accept. A flow that breaks before is made anew. If both connect at the same time, the
//! flow of the lower name is used. The last frame is a goodbye; if a flow ends without it, the peer is lost, and Open MPI is told.
//!
//! Once the first flow is accepted, its connector makes a further flow for each pair of lines (interfaces) in a common network: the
//! rails. Data fragments of long messages take any rail; all other frames take the first.
//!
//! # Map
//!
//! | module | what it holds |
//! | --- | --- |
//! | `component` | the functions that the shim calls |
//! | `module` | [`module::BtlModule`]: session, peers, progress |
//! | `endpoint` | [`endpoint::BtlEndpoint`]: one peer |
//! | `rail` | the flows to one peer, and which of them a fragment takes |
//! | `backlog` | frames that wait for one flow |
//! | `frag` | fragments, with Open MPI's descriptor |
//! | `gets` | long messages that are read out of the sender's memory |
//! | `inbox` | received bytes, cut into frames |
//! | `hdr` | frames on the wire |
//! | `interfaces` | addresses to listen at |
//! | `report` | tells `slim run --btl` that this rank uses the component |
//! | `proc` | names of processes, and what they publish |

mod backlog;
pub mod component;
pub mod endpoint;
pub mod frag;
pub mod gets;
pub mod hdr;
pub mod inbox;
pub mod interfaces;
pub mod module;
pub mod proc;
mod rail;
mod report;
