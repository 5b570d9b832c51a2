//! Initialization when the library is loaded. At that moment the program has neither threads nor signal handlers.

use crate::{exec, hooks, process, runtime, sleep, sys};

#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = {
    extern "C" fn at_start() {
        sys::keep_errno(|| {
            hooks::look_up();
            sleep::use_poll(hooks::real_poll);
            process::register();
            runtime::read_job_key();
            exec::take_over();
        });
    }
    at_start
};
