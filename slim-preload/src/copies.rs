//! What the library offers to a program that links SLIM itself: see [`slim_sys::copies`], [`slim_agent::offered`] and
//! [`slim_agent::table`]. And the table for all programs.

use slim_agent::Agent;
use slim_agent::offered::OfferedAgentCalls;
use slim_agent::offered::host::{self, AgentOwner};
use slim_agent::table::asking;
use slim_agent::table::offered::OfferedTableCalls;
use slim_agent::table::types::TableCalls;
use slim_sys::copies::OfferedCalls;

use crate::runtime;

// The name is `slim_sys::copies::SYMBOL`.
#[unsafe(no_mangle)]
extern "C" fn slim_offered_1() -> *const OfferedCalls {
    slim_sys::offered()
}

// The name is `slim_agent::offered::SYMBOL`.
#[unsafe(no_mangle)]
extern "C" fn slim_offered_agent_4() -> *const OfferedAgentCalls {
    host::offered::<OfferedHere>()
}

// The name is `slim_agent::table::offered::SYMBOL`.
#[unsafe(no_mangle)]
extern "C" fn slim_offered_table_1() -> *const OfferedTableCalls {
    asking::offered()
}

/// The table that programs ask: `slim-c/include/slim_table.h`.
#[unsafe(no_mangle)]
extern "C" fn slim_table() -> *const TableCalls {
    asking::own_table()
}

/// The agent of this process.
struct OfferedHere;

impl AgentOwner for OfferedHere {
    fn agent(digest: &[u8; 32]) -> Option<Agent> {
        runtime::agent_for(digest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_is_the_one_that_programs_look_up() {
        assert_eq!(slim_sys::copies::SYMBOL, c"slim_offered_1");
        assert!(std::ptr::eq(slim_offered_1(), slim_sys::offered()));
        assert_eq!(slim_agent::offered::SYMBOL, c"slim_offered_agent_4");
        assert!(!slim_offered_agent_4().is_null());
        assert_eq!(slim_agent::table::offered::SYMBOL, c"slim_offered_table_1");
        assert!(std::ptr::eq(slim_offered_table_1(), asking::offered()));
    }
}
