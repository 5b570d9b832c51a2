//! Stands in for ssh between the nodes of a lab. See `slim_lab::launch`.

use std::{env, process::ExitCode};

fn main() -> ExitCode {
    let error = slim_lab::launch::agent(env::args_os().skip(1));
    eprintln!("slim-lab-agent: {error}");
    // ssh's own exit status when it cannot run the command.
    ExitCode::from(255)
}
