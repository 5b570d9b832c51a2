//! Open MPI calls this program in place of ssh; see [`slim_cli::agent`].

use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args_os()
        .skip(1)
        .map(|a| a.to_string_lossy().into_owned())
        .collect();
    let failure = slim_cli::agent::exec(&args);
    for line in failure.lines() {
        eprintln!("slim: {line}");
    }
    ExitCode::from(failure.status())
}
