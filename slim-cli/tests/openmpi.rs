//! `slim run --btl` with real Open MPI on two nodes: the ranks talk by the component.

mod common;

use std::path::{Path, PathBuf};

use common::output;
use slim_cli::lab::launcher_environment;
use slim_lab::mpi::{Flavor, Mpi};
use slim_lab::{Lab, artifacts, skip::skip};

/// What a job by `slim run --btl` prints: two ranks on two nodes, with all data checked. `prepare` may change the nodes.
fn run_by_component(
    test: &str,
    flavor: Flavor,
    more: &[&str],
    prepare: impl FnOnce(&Lab, &Path),
) -> Option<String> {
    let mpi = match Lab::check().and_then(|()| Mpi::find(flavor)) {
        Ok(mpi) => mpi,
        Err(reason) => {
            skip(test, reason);
            return None;
        }
    };
    let dir = match mpi.component() {
        Ok(dir) => dir,
        // Open MPI 5.0 from the wheel takes none: `slim run` is to say so.
        Err(_) if flavor == Flavor::OpenMpi5 => PathBuf::new(),
        Err(reason) => {
            skip(test, reason);
            return None;
        }
    };
    let library = match artifacts::preload() {
        Ok(library) => library,
        Err(reason) => {
            skip(test, reason);
            return None;
        }
    };
    let program = mpi.build_program("slim_pp.c").unwrap();
    let lab = Lab::builder().nodes(2).name("cli-btl").build().unwrap();
    prepare(&lab, &dir);
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

fn ranks_use_the_component(test: &str, flavor: Flavor) {
    let verbose = ["--mca", "btl_slim_verbose", "2"];
    let Some(said) = run_by_component(test, flavor, &verbose, |_, _| ()) else {
        return;
    };
    assert!(said.contains("btl:slim: connects to"), "{said}");
    assert!(!said.contains("--btl:"), "{said}");
    assert!(!said.contains("component_path"), "{said}");
    assert!(!said.contains("bad prefix"), "{said}");
}

#[test]
fn open_mpi_4_ranks_use_the_component() {
    ranks_use_the_component("open_mpi_4_ranks_use_the_component", Flavor::OpenMpi4);
}

#[test]
fn open_mpi_5_ranks_use_the_component() {
    let test = "open_mpi_5_ranks_use_the_component";
    ranks_use_the_component(test, Flavor::OpenMpi5Components);
}

#[test]
fn an_open_mpi_without_dlopen_runs_without_the_component() {
    let test = "an_open_mpi_without_dlopen_runs_without_the_component";
    let Some(said) = run_by_component(test, Flavor::OpenMpi5, &[], |_, _| ()) else {
        return;
    };
    assert_eq!(said.matches("slim: --btl: ").count(), 1, "{said}");
}

/// One node has no component: its ranks talk by btl/tcp, and one line says so.
fn a_node_without_the_component(test: &str, flavor: Flavor) {
    let empty = tempfile::tempdir().unwrap();
    let hide = |lab: &Lab, dir: &Path| {
        let mut mount = lab.node(1).command("mount");
        mount.arg("--bind").arg(empty.path()).arg(dir);
        assert!(mount.status().unwrap().success());
    };
    let verbose = ["--mca", "btl_slim_verbose", "2"];
    let Some(said) = run_by_component(test, flavor, &verbose, hide) else {
        return;
    };
    assert!(!said.contains("btl:slim: connects to"), "{said}");
    let told: Vec<_> = said.lines().filter(|l| l.contains("--btl:")).collect();
    assert!(
        told.len() == 1 && told[0].contains("used by 1 of 2 ranks, not by 1:"),
        "{said}"
    );
}

#[test]
fn open_mpi_4_ranks_fall_back_on_a_node_without_the_component() {
    let test = "open_mpi_4_ranks_fall_back_on_a_node_without_the_component";
    a_node_without_the_component(test, Flavor::OpenMpi4);
}

#[test]
fn open_mpi_5_ranks_fall_back_on_a_node_without_the_component() {
    let test = "open_mpi_5_ranks_fall_back_on_a_node_without_the_component";
    a_node_without_the_component(test, Flavor::OpenMpi5Components);
}
