//! Programs in Python on the nodes of a lab.

use std::{path::Path, process::Command};

use slim_lab::{Lab, artifacts, skip::skip};

use super::{events::events_dir, lab};

const PYTHON: &str = "/usr/bin/python3";

/// A lab for `test` that runs programs in Python, or `None` with the skip and its reason printed.
pub fn lab_with_python(test: &str, nodes: usize, paths: usize) -> Option<Lab> {
    if !Path::new(PYTHON).exists() {
        skip(test, "python3 is not installed");
        return None;
    }
    lab(test, nodes, paths)
}

/// The command that runs this program on a node, under SLIM if `slim`.
pub fn python(lab: &Lab, node: usize, program: &str, slim: bool) -> Command {
    let mut command = lab.node(node).command(PYTHON);
    command.args(["-c", program]).env_remove("LD_PRELOAD");
    if slim {
        under_slim(&mut command, lab);
    }
    command
}

/// Makes the command run under the preload library, with an event log.
pub fn under_slim(command: &mut Command, lab: &Lab) {
    let library = artifacts::preload().expect("the preload library");
    command.env("LD_PRELOAD", library);
    command.env("SLIM_EVENTS", events_dir(lab).join("%h.%p.jsonl"));
}
