//! Parameters of Open MPI itself (MCA), which the native component and the time budgets ask for.

use std::env;
use std::ffi::OsString;

/// Options of `mpirun` that set one.
const MCA: [&str; 5] = ["--mca", "-mca", "--gmca", "-gmca", "--omca"];

/// The value of a parameter, if the user sets it on the command line of `mpirun` or in the environment.
pub fn parameter(args: &[OsString], name: &str) -> Option<String> {
    let in_env = || env::var_os(format!("OMPI_MCA_{name}"));
    on_line(args, name).or_else(|| Some(in_env()?.to_string_lossy().into_owned()))
}

/// The last value on the command line.
pub(super) fn on_line(args: &[OsString], name: &str) -> Option<String> {
    let mut set = args.windows(3).filter(|three| {
        let option = three[0].to_str().is_some_and(|word| MCA.contains(&word));
        option && three[1] == name
    });
    let last = set.next_back()?;
    Some(last[2].to_string_lossy().into_owned())
}
