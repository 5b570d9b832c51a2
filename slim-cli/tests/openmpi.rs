//! `slim run` with real Open MPI on two nodes: ranks and daemons on both nodes have the library.

mod common;

use common::{Scratch, output};
use slim_cli::lab::launcher_environment;
use slim_lab::mpi::{Flavor, Mpi};
use slim_lab::{Lab, artifacts, skip::skip};

/// Prints its host name, its own variables, and those of the daemon that started it.
const RANK: &str = r#"
daemon=$(tr '\0' '\n' < /proc/$PPID/environ | grep -E '^(LD_PRELOAD|SLIM_ATTEMPTS)=' | sort | tr '\n' ' ')
echo "$(hostname) rank LD_PRELOAD=$LD_PRELOAD SLIM_ATTEMPTS=$SLIM_ATTEMPTS"
echo "$(hostname) daemon $daemon"
"#;

#[test]
fn open_mpi_4_daemons_and_ranks_have_the_library() {
    everything_has_the_library(
        "open_mpi_4_daemons_and_ranks_have_the_library",
        Flavor::OpenMpi4,
    );
}

#[test]
fn open_mpi_5_daemons_and_ranks_have_the_library() {
    everything_has_the_library(
        "open_mpi_5_daemons_and_ranks_have_the_library",
        Flavor::OpenMpi5,
    );
}

fn everything_has_the_library(test: &str, flavor: Flavor) {
    let mpi = match Lab::check().and_then(|()| Mpi::find(flavor)) {
        Ok(mpi) => mpi,
        Err(reason) => return skip(test, reason),
    };
    let scratch = Scratch::new(test);
    // Any library will do: the test checks only which processes get it.
    let library = scratch.library();
    let rank = scratch.script("rank", RANK);
    let lab = Lab::builder().nodes(2).name("cli-run").build().unwrap();
    let environment = match launcher_environment(&lab) {
        Ok(environment) => environment,
        Err(reason) => return skip(test, reason),
    };

    let mut command = lab.node(0).command(env!("CARGO_BIN_EXE_slim"));
    command.envs(environment).env_remove("LD_PRELOAD");
    command
        .args(["run", "--set", "SLIM_ATTEMPTS=4", "--preload"])
        .arg(&library)
        .arg("--");
    command
        .arg(mpi.mpirun())
        .args(["-H", "nodeA:1,nodeB:1", "-np", "2", "--bind-to", "none"])
        .arg(rank);
    let (status, out, err) = output(&mut command);

    assert_eq!(status, 0, "{out}{err}");
    let has = format!("LD_PRELOAD={} SLIM_ATTEMPTS=4", library.display());
    for node in ["nodeA", "nodeB"] {
        for who in ["rank", "daemon"] {
            let line = format!("{node} {who} {has}");
            assert!(
                out.lines().any(|l| l.trim_end() == line),
                "no `{line}` in:\n{out}{err}"
            );
        }
    }
}

/// What a job by `slim run --btl` prints: two ranks on two nodes, with all data checked.
fn run_by_component(test: &str, flavor: Flavor, more: &[&str]) -> Option<String> {
    let mpi = match Lab::check().and_then(|()| Mpi::find(flavor)) {
        Ok(mpi) => mpi,
        Err(reason) => {
            skip(test, reason);
            return None;
        }
    };
    if let Err(reason) = artifacts::component() {
        skip(test, reason);
        return None;
    }
    let library = match artifacts::preload() {
        Ok(library) => library,
        Err(reason) => {
            skip(test, reason);
            return None;
        }
    };
    let program = mpi.build_program("slim_pp.c").unwrap();
    let lab = Lab::builder().nodes(2).name("cli-btl").build().unwrap();
    let mut command = lab.node(0).command(env!("CARGO_BIN_EXE_slim"));
    command.envs(launcher_environment(&lab).unwrap());
    command.env_remove("LD_PRELOAD");
    command.args(["run", "--btl", "--preload"]).arg(library);
    command.arg("--").arg(mpi.mpirun());
    command
        .args(["-H", "nodeA:1,nodeB:1", "-np", "2", "--bind-to", "none"])
        .args(more)
        .arg(program)
        .arg("1");
    let (status, out, err) = output(&mut command);
    assert_eq!(status, 0, "{out}{err}");
    assert!(out.contains("DONE") && out.contains("errs=0"), "{out}{err}");
    Some(out + &err)
}

#[test]
fn open_mpi_4_ranks_use_the_component() {
    let verbose = ["--mca", "btl_slim_verbose", "2"];
    let test = "open_mpi_4_ranks_use_the_component";
    let Some(said) = run_by_component(test, Flavor::OpenMpi4, &verbose) else {
        return;
    };
    assert!(said.contains("btl:slim: connects to"), "{said}");
    assert!(!said.contains("--btl:"), "{said}");
}

#[test]
fn open_mpi_5_ranks_run_without_the_component() {
    let test = "open_mpi_5_ranks_run_without_the_component";
    let Some(said) = run_by_component(test, Flavor::OpenMpi5, &[]) else {
        return;
    };
    assert_eq!(said.matches("slim: --btl: ").count(), 1, "{said}");
}
