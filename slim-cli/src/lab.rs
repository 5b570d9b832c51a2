//! The environment with which a launcher reaches the other nodes of a lab.

use std::ffi::OsString;

use slim_lab::{Lab, artifacts, launch};

use crate::failure::CliError;

/// Variables for a command on a node: for both series of Open MPI, the lab's agent in place of ssh,
/// and permission to run as root, because a lab always runs as root.
pub fn launcher_environment(lab: &Lab) -> Result<Vec<(&'static str, OsString)>, CliError> {
    let agent = artifacts::program("slim-lab-agent").map_err(|e| CliError::input(e.to_string()))?;
    let mut vars = launch::environment(lab);
    vars.extend([
        ("OMPI_MCA_plm_rsh_agent", agent.clone().into()),
        ("PRTE_MCA_plm_ssh_agent", agent.into()),
    ]);
    for name in [
        "OMPI_ALLOW_RUN_AS_ROOT",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
        "PRTE_ALLOW_RUN_AS_ROOT",
        "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM",
    ] {
        vars.push((name, "1".into()));
    }
    Ok(vars)
}
