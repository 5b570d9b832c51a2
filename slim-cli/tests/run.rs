//! `slim run` as a program: the command and environment that it starts, and the input that it refuses.

mod common;

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use common::{Scratch, assert_refused, output, slim};

const HYDRA: &str = "echo 'HYDRA build details:'; echo '    Version: 4.0.2'";

/// A script in place of `mpirun` that prints its variables and arguments.
fn mpirun(scratch: &Scratch, version: &str) -> PathBuf {
    let version = format!("echo 'mpirun (Open MPI) {version}'");
    launcher(scratch, "mpirun", &version)
}

/// The same with this name, and this way to tell its version.
fn launcher(scratch: &Scratch, name: &str, version: &str) -> PathBuf {
    scratch.script(
        name,
        &format!(
            "[ \"$1\" = --version ] && {{ {version}; exit 0; }}\n\
             for a in \"$@\"; do echo \"arg=$a\"; done\n\
             env | grep -E '^(SLIM|_SLIM|LD_PRELOAD|OMPI_MCA|PRTE_MCA|HYDRA)'"
        ),
    )
}

#[test]
fn a_plain_command_is_run_with_the_library_and_its_status_passes_through() {
    let scratch = Scratch::new("plain");
    let library = scratch.library();
    let mut command = slim();
    command
        .args(["run", "--preload"])
        .arg(&library)
        .args(["--policy", "required", "--"]);
    command.args(["sh", "-c", "echo $LD_PRELOAD $SLIM; exit 7"]);
    let (status, out, err) = output(&mut command);
    assert_eq!((status, err.as_str()), (7, ""));
    assert_eq!(out.trim(), format!("{} required", library.display()));
}

#[test]
fn a_signal_that_ends_the_command_passes_through() {
    use std::os::unix::process::ExitStatusExt;
    let scratch = Scratch::new("signal");
    let mut command = slim();
    command
        .args(["run", "--preload"])
        .arg(scratch.library())
        .args(["sh", "-c", "kill -9 $$"]);
    assert_eq!(command.status().unwrap().signal(), Some(9));
}

#[test]
fn the_users_own_preload_stays_behind_ours() {
    let scratch = Scratch::new("theirs");
    let library = scratch.library();
    let theirs = scratch.path("theirs.so");
    std::fs::copy(&library, &theirs).unwrap();
    let mut command = slim();
    command
        .env("LD_PRELOAD", &theirs)
        .env("SLIM_PRELOAD", &library);
    command.args([
        "run",
        "sh",
        "-c",
        "echo $LD_PRELOAD; echo ${SLIM_PRELOAD-none}",
    ]);
    let (status, out, _) = output(&mut command);
    assert_eq!(status, 0);
    assert_eq!(
        out,
        format!("{}:{}\nnone\n", library.display(), theirs.display())
    );
}

#[test]
fn open_mpi_4_gets_variables_for_ranks_and_a_wrapped_agent_for_daemons() {
    let scratch = Scratch::new("ompi4");
    let library = scratch.library();
    let mut command = slim();
    command
        .env("OMPI_MCA_plm_rsh_agent", "ssh -q")
        .args(["run", "--preload"])
        .arg(&library);
    command
        .args(["--set", "SLIM_ATTEMPTS=5", "--"])
        .arg(mpirun(&scratch, "4.1.4"));
    command.args(["-n", "2", "prog", "-x"]);
    let (status, out, err) = output(&mut command);
    assert_eq!((status, err.as_str()), (0, ""));
    let args: Vec<_> = out.lines().filter_map(|l| l.strip_prefix("arg=")).collect();
    assert_eq!(
        args,
        [
            "-x",
            "LD_PRELOAD",
            "-x",
            "SLIM_ATTEMPTS",
            "-n",
            "2",
            "prog",
            "-x"
        ]
    );
    assert!(
        out.contains(&format!("LD_PRELOAD={}\n", library.display())),
        "{out}"
    );
    assert!(out.contains("SLIM_ATTEMPTS=5\n"), "{out}");
    let agent = out
        .lines()
        .find_map(|l| l.strip_prefix("OMPI_MCA_plm_rsh_agent="))
        .unwrap();
    assert_eq!(agent, env!("CARGO_BIN_EXE_slim-rsh-agent"));
    assert!(out.contains("_SLIM_RSH_AGENT=ssh -q\n"), "{out}");
}

#[test]
fn open_mpi_5_names_its_agent_differently() {
    let scratch = Scratch::new("ompi5");
    let mut command = slim();
    command
        .args(["run", "--preload"])
        .arg(scratch.library())
        .arg("--");
    command.arg(mpirun(&scratch, "5.0.11")).args([
        "--prtemca",
        "plm_ssh_agent",
        "/my/agent",
        "prog",
    ]);
    let (status, out, _) = output(&mut command);
    assert_eq!(status, 0);
    let wrapper = env!("CARGO_BIN_EXE_slim-rsh-agent");
    assert!(
        out.contains(&format!("arg=plm_ssh_agent\narg={wrapper}\narg=prog\n")),
        "{out}"
    );
    assert!(
        out.contains(&format!("PRTE_MCA_plm_ssh_agent={wrapper}\n")),
        "{out}"
    );
    assert!(out.contains("_SLIM_RSH_AGENT=/my/agent\n"), "{out}");
}

#[test]
fn the_agent_carries_the_environment_and_runs_without_the_library_itself() {
    let scratch = Scratch::new("agent");
    let library = scratch.library();
    let ssh = scratch.script(
        "ssh",
        "echo \"agent: ${LD_PRELOAD-none} $1 $2\"; shift 2; exec sh -c \"$*\"",
    );
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_slim-rsh-agent"));
    command
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .env("LD_PRELOAD", &library);
    command
        .env("SLIM_EVENTS", "/tmp/e v.%p")
        .env("_SLIM_RSH_AGENT", format!("{} -q", ssh.display()));
    command.args([
        "nodeB",
        "A=1 ; export A ;",
        "echo",
        "\"$A $SLIM_EVENTS $LD_PRELOAD\"",
    ]);
    let (status, out, err) = output(&mut command);
    assert_eq!((status, err.as_str()), (0, ""));
    assert_eq!(
        out,
        format!(
            "agent: none -q nodeB\n1 /tmp/e v.%p {}\n",
            library.display()
        )
    );
}

#[test]
fn print_shows_a_line_that_a_shell_can_run() {
    let scratch = Scratch::new("print");
    let mut command = slim();
    command
        .args(["run", "--print", "--preload"])
        .arg(scratch.library());
    command.args([
        "--events",
        "/tmp/a b.%p",
        "--",
        "sh",
        "-c",
        "echo \"$SLIM_EVENTS\"",
    ]);
    let (status, line, _) = output(&mut command);
    assert_eq!(status, 0);
    let (status, out, _) = output(std::process::Command::new("sh").args(["-c", &line]));
    assert_eq!((status, out.as_str()), (0, "/tmp/a b.%p\n"), "{line}");
}

#[test]
fn bad_input_is_refused_in_one_line() {
    let scratch = Scratch::new("bad");
    let library = scratch.library();
    let run = || {
        let mut command = slim();
        command.args(["run", "--preload"]).arg(&library);
        command
    };
    assert_refused(
        run().env("SLIM_ATTEMPTS", "0").arg("true"),
        &["SLIM_ATTEMPTS", "1 to 16"],
    );
    assert_refused(
        run().env("SLIM_ATTEMPS", "3").arg("true"),
        &["SLIM_ATTEMPS"],
    );
    // Bad values are refused, neither ignored nor replaced by defaults.
    for (name, value) in [("SLIM_ATTEMPTS", "0"), ("SLIM_ATTEMPS", "3")] {
        let (_, _, err) = output(run().env(name, value).arg("true"));
        assert!(!err.contains("using") && !err.contains("ignored"), "{err}");
    }
    for key in ["/no/key", "/dev/null"] {
        assert_refused(
            run().env("SLIM_JOB_KEY_FILE", key).arg("true"),
            &["SLIM_JOB_KEY_FILE", "no job key"],
        );
    }
    let key = scratch.write("key", "0123456789abcdef");
    fs::set_permissions(&key, Permissions::from_mode(0o640)).unwrap();
    assert_refused(
        run().env("SLIM_JOB_KEY_FILE", &key).arg("true"),
        &["SLIM_JOB_KEY_FILE", "no job key", "chmod 600"],
    );
    for args in [&["--no-such-option", "--", "true"][..], &["-x", "true"]] {
        let (status, _, err) = output(run().args(args));
        assert_eq!(status, 2, "{err}");
        assert!(err.contains(args[0]), "{err}");
    }
    assert_refused(
        run().args(["--set", "PATH=/x", "true"]),
        &["--set PATH=/x", "SLIM_NAME=VALUE"],
    );
    assert_refused(
        run().args(["--policy", "maybe", "true"]),
        &["SLIM", "maybe"],
    );
    assert_refused(
        run().args(["--events", "/no/such/dir/e", "true"]),
        &["/no/such/dir"],
    );
    assert_refused(
        slim().args(["run", "--preload", "/no/lib.so", "true"]),
        &["/no/lib.so"],
    );
    // The loader would only warn, and run the command without the library.
    let text = scratch.write("text.so", "no library at all");
    assert_refused(
        slim().args(["run", "--preload"]).arg(text).arg("true"),
        &["text.so", "not a shared library"],
    );
    let mpirun = mpirun(&scratch, "4.1.4");
    assert_refused(
        run()
            .env("SLIM_JOB_KEY", "0123456789abcdef")
            .arg(&mpirun)
            .arg("prog"),
        &["SLIM_JOB_KEY_FILE", "process list"],
    );
}

#[test]
fn several_problems_are_all_named() {
    let scratch = Scratch::new("several");
    let mut command = slim();
    command
        .args(["run", "--preload"])
        .arg(scratch.library())
        .arg("true");
    let (status, _, err) = output(command.env("SLIM_STALL", "-1").env("SLIM_LOG", "loud"));
    assert_eq!((status, err.lines().count()), (2, 2), "{err}");
}

#[test]
fn mpich_gets_values_for_ranks_and_a_wrapped_agent_for_daemons() {
    let scratch = Scratch::new("mpich");
    let library = scratch.library();
    let mpiexec = launcher(&scratch, "mpiexec", HYDRA);
    let run = |more: &[&str]| {
        let mut command = slim();
        command.env("HYDRA_LAUNCHER_EXEC", "/my/agent -q");
        command.args(["run", "--preload"]).arg(&library);
        command.args(["--set", "SLIM_ATTEMPTS=5", "--btl", "--"]);
        command.arg(&mpiexec).args(more).args(["-n", "2", "prog"]);
        let (status, out, err) = output(&mut command);
        assert_eq!(status, 0, "{err}");
        assert!(err.contains("--btl") && err.contains("MPICH"), "{err}");
        out
    };
    let out = run(&[]);
    let args: Vec<_> = out.lines().filter_map(|l| l.strip_prefix("arg=")).collect();
    let library = library.display().to_string();
    let ours = [
        "-genv",
        "LD_PRELOAD",
        &library,
        "-genv",
        "SLIM_ATTEMPTS",
        "5",
    ];
    assert_eq!(args[..6], ours);
    assert_eq!(args[6..], ["-n", "2", "prog"]);
    let wrapper = env!("CARGO_BIN_EXE_slim-rsh-agent");
    let agent = format!("HYDRA_LAUNCHER_EXEC={wrapper}\n");
    assert!(out.contains(&agent), "{out}");
    // The agent of hydra is one program.
    assert!(out.contains("_SLIM_RSH_AGENT==/my/agent -q\n"), "{out}");
    // Where srun starts the daemons, it must not be replaced.
    let out = run(&["-launcher", "slurm"]);
    assert!(out.contains("HYDRA_LAUNCHER_EXEC=/my/agent -q\n"), "{out}");
}

#[test]
fn srun_carries_the_library_whatever_it_exports() {
    let scratch = Scratch::new("srun");
    let library = scratch.library();
    let srun = scratch.script("srun", "printf 'arg=%s\n' \"$@\"; env");
    let run = |line: &[&str], vars: &[(&str, &str)]| {
        let mut command = slim();
        command.args(["run", "--set", "SLIM_ATTEMPTS=5", "--preload"]);
        command.arg(&library).arg(&srun).args(line);
        let (status, out, err) = output(command.envs(vars.iter().copied()));
        assert_eq!((status, err.as_str()), (0, ""), "{out}");
        let has = format!("LD_PRELOAD={}\n", library.display());
        assert!(out.contains(&has), "{out}");
        out
    };
    let out = run(&["-N2", "prog", "--export=NONE"], &[]);
    assert!(
        out.starts_with("arg=-N2\narg=prog\narg=--export=NONE\n"),
        "{out}"
    );
    let out = run(&["-N2", "--export=NONE", "prog"], &[]);
    let want = "arg=-N2\narg=--export\narg=LD_PRELOAD,SLIM_ATTEMPTS\narg=prog\n";
    assert!(out.starts_with(want), "{out}");
    let out = run(&["prog"], &[("SLURM_EXPORT_ENV", "PATH")]);
    let want = "SLURM_EXPORT_ENV=LD_PRELOAD,SLIM_ATTEMPTS,PATH\n";
    assert!(out.contains(want), "{out}");
}

#[test]
fn launchers_that_are_not_supported_say_what_to_do_by_hand() {
    let scratch = Scratch::new("foreign");
    let library = scratch.library();
    let intel = scratch.script("mpiexec", "echo 'Intel(R) MPI Library'");
    let prun = scratch.script("prun", "echo 'another prun'");
    let flux = scratch.script("flux", "exit 0");
    for (launcher, word) in [
        (intel, "-genv LD_PRELOAD"),
        (prun, "in the environment of every process"),
        (flux, "in the environment of every process"),
    ] {
        let mut command = slim();
        command
            .args(["run", "--preload"])
            .arg(&library)
            .arg(&launcher)
            .args(["-n", "2", "prog"]);
        assert_refused(&mut command, &["not supported by `slim run` yet", word]);
    }
}

#[test]
fn a_missing_command_gives_status_127() {
    let scratch = Scratch::new("missing");
    let mut command = slim();
    command
        .args(["run", "--preload"])
        .arg(scratch.library())
        .arg("no-such-program");
    let (status, _, err) = output(&mut command);
    assert_eq!(
        (status, err.as_str()),
        (127, "slim: no-such-program: command not found\n")
    );
}

#[test]
fn without_a_command_the_status_is_2() {
    for args in [&["run"][..], &["frobnicate"], &[]] {
        assert_eq!(output(slim().args(args)).0, 2, "{args:?}");
    }
}

/// The hosts may be in public networks: `slim run` must make them peers of each other.
#[test]
fn the_hosts_of_a_job_are_peers() {
    let scratch = Scratch::new("peers");
    let peers = |args: &[&str]| {
        let mut command = slim();
        command.args(["run", "--preload"]).arg(scratch.library());
        command.arg("--").arg(mpirun(&scratch, "4.1.4")).args(args);
        let (status, out, err) = output(&mut command);
        assert_eq!((status, err.as_str()), (0, ""));
        let exported = out.contains("arg=SLIM_PEERS\n");
        let set = out.lines().find_map(|l| l.strip_prefix("SLIM_PEERS="));
        assert_eq!(exported, set.is_some(), "{out}");
        set.map(ToOwned::to_owned)
    };
    assert_eq!(peers(&["-H", "10.0.0.1,127.0.0.1", "prog"]), None);
    let told = peers(&["-H", "192.0.2.7:2", "prog", "-H", "192.0.2.8"]).unwrap();
    let words: Vec<_> = told.split(',').collect();
    assert_eq!(words[..2], ["private", "local"]);
    assert!(words.contains(&"192.0.2.7"), "{told}");
    assert!(!words.contains(&"192.0.2.8"), "{told}");
}

/// The wrapper adds a host that only mpirun knows to the peers of its daemon.
#[test]
fn the_agent_makes_its_host_a_peer() {
    let scratch = Scratch::new("agent-peers");
    // Runs the command here, in place of the host.
    let ssh = scratch.script("ssh", "shift; exec sh -c \"$*\"");
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_slim-rsh-agent"));
    command
        .env("_SLIM_RSH_AGENT", &ssh)
        .env_remove("SLIM_PEERS");
    command.args(["192.0.2.9", "echo", "$SLIM_PEERS"]);
    let (status, out, err) = output(&mut command);
    assert_eq!((status, err.as_str()), (0, ""));
    assert!(
        out.trim().split(',').any(|word| word == "192.0.2.9"),
        "{out}"
    );
}
