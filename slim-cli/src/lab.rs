//! The environment in which a launcher finds the nodes of a lab.

use std::ffi::OsString;

use slim_lab::{Lab, artifacts, launch};

use crate::failure::CliError;

/// Variables for a command on a node: the lab's agent instead of ssh for every MPI
/// that `slim run` knows, and permission to run as root, as every command of a lab does.
pub fn launcher_environment(lab: &Lab) -> Result<Vec<(&'static str, OsString)>, CliError> {
    let agent = artifacts::program("slim-lab-agent").map_err(|e| CliError::input(e.to_string()))?;
    let mut vars = launch::environment(lab);
    vars.extend([
        ("OMPI_MCA_plm_rsh_agent", agent.clone().into()),
        ("PRTE_MCA_plm_ssh_agent", agent.clone().into()),
        ("HYDRA_LAUNCHER_EXEC", agent.into()),
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
