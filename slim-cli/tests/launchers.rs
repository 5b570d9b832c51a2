//! `slim run` with the launcher of every MPI on two nodes: ranks and daemons on both nodes have the library.

mod common;

use std::process::Command;

use common::{Scratch, output};
use slim_cli::lab::launcher_environment;
use slim_lab::mpi::{Flavor, Mpi};
use slim_lab::{Lab, skip::skip};

/// Prints its host name, its own variables, and those of the daemon that started it.
const RANK: &str = r#"
daemon=$(tr '\0' '\n' < /proc/$PPID/environ | grep -E '^(LD_PRELOAD|SLIM_ATTEMPTS)=' | sort | tr '\n' ' ')
echo "$(hostname) rank LD_PRELOAD=$LD_PRELOAD SLIM_ATTEMPTS=$SLIM_ATTEMPTS"
echo "$(hostname) daemon $daemon"
"#;

const OPEN_MPI: [&str; 6] = ["-H", "nodeA:1,nodeB:1", "-np", "2", "--bind-to", "none"];
const MPICH: [&str; 6] = ["-hosts", "nodeA,nodeB", "-n", "2", "-ppn", "1"];

#[test]
fn open_mpi_4_daemons_and_ranks_have_the_library() {
    let test = "open_mpi_4_daemons_and_ranks_have_the_library";
    everything_has_the_library(test, Flavor::OpenMpi4, &OPEN_MPI);
}

#[test]
fn open_mpi_5_daemons_and_ranks_have_the_library() {
    let test = "open_mpi_5_daemons_and_ranks_have_the_library";
    everything_has_the_library(test, Flavor::OpenMpi5, &OPEN_MPI);
}

#[test]
fn mpich_4_daemons_and_ranks_have_the_library() {
    let test = "mpich_4_daemons_and_ranks_have_the_library";
    everything_has_the_library(test, Flavor::Mpich4, &MPICH);
}

#[test]
fn mpich_5_daemons_and_ranks_have_the_library() {
    let test = "mpich_5_daemons_and_ranks_have_the_library";
    everything_has_the_library(test, Flavor::Mpich5, &MPICH);
}

#[test]
fn intel_mpi_daemons_and_ranks_have_the_library() {
    let test = "intel_mpi_daemons_and_ranks_have_the_library";
    everything_has_the_library(test, Flavor::Intel, &MPICH);
}

#[test]
fn hydras_file_with_options_names_the_agent() {
    let test = "hydras_file_with_options_names_the_agent";
    for flavor in [Flavor::Mpich4, Flavor::Mpich5] {
        // The hosts and the agent are only in the file. The variable must not be used: the file comes before it.
        let change = |command: &mut Command, scratch: &Scratch| {
            let mut vars = command.get_envs();
            let agent = vars.find(|(name, _)| *name == "HYDRA_LAUNCHER_EXEC");
            let agent = agent.and_then(|(_, agent)| agent?.to_str()).unwrap();
            let text = format!("-launcher-exec {agent} -hosts nodeA,nodeB");
            let file = scratch.write("options", &text);
            command.env("HYDRA_CONFIG_FILE", file);
            command.env("HYDRA_LAUNCHER_EXEC", "/no/such/agent");
        };
        let line = ["-genv", "A=1", "-n=2", "--PPN", "1"];
        everything_has_the_library_if(test, flavor, &line, change);
    }
}

/// [`output`], with a standard input that has no end. MPICH's launcher tells a daemon of the end, and dies by SIGPIPE if the job has ended meanwhile, as
/// it may on a busy machine, with and without SLIM.
fn launched(command: &mut Command) -> (i32, String, String) {
    let (stdin, _open) = std::io::pipe().unwrap();
    output(command.stdin(stdin))
}

/// Words that mean something to launchers, as arguments of a program.
#[test]
fn arguments_of_the_program_reach_it_unchanged() {
    let test = "arguments_of_the_program_reach_it_unchanged";
    let words = "-launcher-exec a -genv LD_PRELOAD b -launcher fork -x LD_PRELOAD=c -H d --host e";
    for flavor in [
        Flavor::OpenMpi4,
        Flavor::OpenMpi5,
        Flavor::Mpich4,
        Flavor::Mpich5,
        Flavor::Intel,
    ] {
        let mpi = match Mpi::find(flavor) {
            Ok(mpi) => mpi,
            Err(reason) => {
                skip(test, reason);
                continue;
            }
        };
        let scratch = Scratch::new(test);
        let mut command = Command::new(env!("CARGO_BIN_EXE_slim"));
        for name in ["OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT"] {
            command.env(name, "1").env(format!("{name}_CONFIRM"), "1");
        }
        command.args(["run", "--preload"]).arg(scratch.library());
        command.arg("--").arg(mpi.mpirun());
        command.args(["-n", "1", "echo", "first"]);
        command.args(words.split(' '));
        command.args([":", "-n", "1", "echo", "second"]);
        command.args(words.split(' '));
        let (status, out, err) = launched(&mut command);
        assert_eq!(status, 0, "{out}{err}");
        for which in ["first", "second"] {
            let line = format!("{which} {words}");
            assert!(out.lines().any(|l| l == line), "no `{line}` in {out}{err}");
        }
    }
}

fn everything_has_the_library(test: &str, flavor: Flavor, placement: &[&str]) {
    everything_has_the_library_if(test, flavor, placement, |_, _| ());
}

/// `change` changes the environment of the launcher.
fn everything_has_the_library_if(
    test: &str,
    flavor: Flavor,
    placement: &[&str],
    change: impl FnOnce(&mut Command, &Scratch),
) {
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
    change(&mut command, &scratch);
    command
        .args(["run", "--set", "SLIM_ATTEMPTS=4", "--preload"])
        .arg(&library)
        .arg("--");
    command.arg(mpi.mpirun()).args(placement).arg(rank);
    let (status, out, err) = launched(&mut command);

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
