//! All flows of one process: the session state machine.
