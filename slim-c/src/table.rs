//! The table that layers above ask: `include/slim_table.h`.

use slim::table::{self, TableCalls};

/// Returns the table of this process. Never NULL, and always the same; it is valid until the process ends. Any thread, but no signal
/// handler. A program that does not link the library finds the function by dlsym(RTLD_DEFAULT, "slim_table"), which returns NULL if the
/// process has no SLIM.
#[unsafe(no_mangle)]
pub extern "C" fn slim_table() -> *const TableCalls {
    table::calls()
}
