//! A program in C whose flows go over queue pairs of soft RoCE.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use super::{
    common::guest::is_guest,
    openmpi::{SOON, queue_pairs},
    rxe, succeeds, wait,
};

/// The program runs for as long as there is this file.
const GOES_ON: &str = "/run/tmp/goes-on";

fn succeed(command: &mut Command) {
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {text}");
}

/// The library for C is built outside of the guest, and the program with it.
fn built() -> PathBuf {
    let prefix = Path::new(env!("CARGO_TARGET_TMPDIR")).join("slim-c-verbs");
    let program = prefix.join("verbs");
    if !is_guest() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let mut build = Command::new(root.join("slim-c/build"));
        succeed(build.arg(&prefix).arg("fast"));
        let mut compile = Command::new("gcc");
        compile.args(["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror"]);
        compile.arg("-I").arg(prefix.join("include"));
        compile.arg(root.join("slim-c/tests/c/verbs.c"));
        compile.arg(prefix.join("lib/libslim.a"));
        compile.args(["-lpthread", "-ldl", "-lm", "-o"]);
        succeed(compile.arg(&program));
    }
    program
}

#[test]
fn flows_of_a_program_in_c_go_over_queue_pairs_and_survive_them() {
    let program = built();
    let test = "c_programs::flows_of_a_program_in_c_go_over_queue_pairs_and_survive_them";
    let Some(rxe) = rxe(test) else {
        return;
    };
    fs::create_dir_all("/run/tmp").unwrap();
    fs::write(GOES_ON, "").unwrap();
    let mut command = Command::new(program);
    command.args(["rx1", "rx2", GOES_ON]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let running = command.spawn().unwrap();
    let are = |number| move || (queue_pairs() == number).then_some(());
    wait("on queue pairs", SOON, are(2));
    for _ in 0..2 {
        rxe.line("loss 100%");
        wait("both have failed", SOON, are(0));
        rxe.plain();
        wait("back on queue pairs", SOON, are(2));
    }
    fs::remove_file(GOES_ON).unwrap();
    let [out, _] = succeeds(running);
    assert!(out.contains("bytes were right"));
}
