//! The table that layers above SLIM ask: peers, flows, and escalations with their evidence. `slim-c/include/slim_table.h` is its C side.
//!
//! A process has one table, which shows the flows of all its agents. The preload library has it if there is one; other copies of SLIM
//! in the process hand their agents' answers and escalations to it ([`offered`]).
//!
//! ```text
//!   slim_table() ──► asking ──► Agent::survey, of each agent here
//!                       │  └──► the same in other copies
//!                       ▼
//!                   escalations ◄── driver, before the application sees the error
//! ```
//!
//! | module | what it holds |
//! | --- | --- |
//! | [`asking`] | the functions of the table |
//! | `escalations` | the last escalations, and the descriptors that tell of new ones |
//! | [`offered`] | what the preload library's copy offers to others |
//! | [`types`] | structures as C sees them |
//! | `rows` | values of the survey as these structures have them |
//! | `per_process` | statics that a forked child begins anew |

pub mod asking;
pub(crate) mod escalations;
pub mod offered;
pub(crate) mod per_process;
pub(crate) mod rows;
pub mod types;
