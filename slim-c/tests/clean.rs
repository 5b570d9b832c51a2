//! The C examples and the test of every function under valgrind, AddressSanitizer and ThreadSanitizer: no error, and no memory is left.

mod common;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use common::*;

/// Most kills of connections of each example.
const KILLS: u64 = 3;

/// How the library gets into a program.
enum Build {
    /// The installed shared library.
    Shared,
    /// By `slim-c/tsan`, with all code instrumented.
    Instrumented,
}

/// How programs are compiled and run.
struct Checker {
    build: Build,
    flags: &'static [&'static str],
    /// The program that runs them, with its arguments.
    runner: &'static [&'static str],
    /// How many times more bytes the examples carry than under the slowest checker, so that each runs long enough to be killed.
    work: usize,
}

const VALGRIND: Checker = Checker {
    build: Build::Shared,
    flags: &[],
    runner: &[
        "valgrind",
        "--quiet",
        // Otherwise a thread that computes keeps others from running for seconds.
        "--fair-sched=yes",
        "--error-exitcode=99",
        "--leak-check=full",
        "--errors-for-leak-kinds=definite,indirect,possible",
        "--show-leak-kinds=definite,indirect,possible",
    ],
    work: 1,
};
const ADDRESS: Checker = Checker {
    build: Build::Shared,
    flags: &["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    runner: &[],
    work: 10,
};

const THREAD: Checker = Checker {
    build: Build::Instrumented,
    flags: &[],
    runner: &[],
    work: 3,
};

/// The command that builds a C program, relative to the workspace, with ThreadSanitizer, and the program.
fn instrument(source: &str, dir: &Path) -> (Command, PathBuf) {
    let source = root().join(source);
    let program = dir.join(source.file_stem().unwrap());
    let mut build = Command::new(root().join("slim-c/tsan"));
    build.arg(source).arg(&program);
    (build, program)
}

fn instrumented(source: &str, dir: &Path) -> PathBuf {
    let (mut build, program) = instrument(source, dir);
    succeed(&mut build);
    program
}

/// What is missing for [`instrumented`], if something is.
fn no_instrumentation(dir: &Path) -> Option<String> {
    let built = instrument("slim-c/tests/c/race.c", dir).0.output().unwrap();
    let said = String::from_utf8_lossy(&built.stderr);
    (built.status.code() == Some(3)).then(|| said.trim().to_owned())
}

impl Checker {
    fn command(&self, program: &Path) -> Command {
        let mut command = match self.runner {
            [] => Command::new(program),
            [runner, args @ ..] => {
                let mut command = Command::new(runner);
                command.args(args).arg(program);
                command
            }
        };
        // Valgrind slows a program down so much that its peer may not answer within the defaults, and is taken for one without SLIM.
        command.env("SLIM_HELLO_TIMEOUT", "60");
        command.env("SLIM_ATTEMPT_TIMEOUTS", "60");
        command
    }

    fn program<'a>(&'a self, source: &str, dir: &Path) -> impl Fn() -> Command + use<'a> {
        let program = match self.build {
            Build::Shared => compile(installed(), source, dir, self.flags),
            Build::Instrumented => instrumented(source, dir),
        };
        move || self.command(&program)
    }

    /// Runs both ends of an example, with kills if they are possible here.
    fn example(&self, name: &str, of_server: &[&str], of_client: &[&str], more: &[&str]) {
        let dir = scratch();
        let run = self.program(&format!("examples/library/{name}.c"), dir.path());
        let mut command = run();
        let (server, port) = serve(command.args(of_server));
        let mut command = run();
        let mut client = Running::start(command.args(of_client).arg(&port).args(more));
        let mut input = client.child.stdin.take().unwrap();
        // Only `echo` reads it.
        let _ = input.write_all(long_line().as_bytes());
        let killed = match rustix::process::geteuid().is_root() {
            true => client.kill_often(KILLS, Duration::from_millis(20)),
            false => 0,
        };
        let _ = input.write_all(b"another\nbye\n");
        drop(input);
        let (success, text) = client.wait();
        let (served, said) = server.wait();
        assert!(success && served, "{name}: client: {text}server: {said}");
        println!("{name}: {killed} killed, {text}");
        assert!(
            killed > 0 || !rustix::process::geteuid().is_root(),
            "{name}: no kill"
        );
    }

    fn everything(&self) {
        let dir = scratch();
        let here = "127.0.0.1";
        let api = self.program("slim-c/tests/c/api.c", dir.path());
        succeed(&mut api());
        self.example("echo", &["serve", here, "0"], &[here], &[]);
        let bytes = (4_000_000 * self.work).to_string();
        let sizes = ["4", &bytes];
        let of_server = [&["serve", here, "0"][..], &sizes].concat();
        self.example("many", &of_server, &[here], &sizes);
        let (file, copy) = (dir.path().join("file"), dir.path().join("copy"));
        let data: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..))
            .take(40_000_001 * self.work.min(4))
            .collect();
        std::fs::write(&file, &data).unwrap();
        let of_server = ["receive", here, "0", copy.to_str().unwrap()];
        self.example(
            "transfer",
            &of_server,
            &["send", here],
            &[file.to_str().unwrap()],
        );
        assert!(std::fs::read(copy).unwrap() == data);
    }
}

#[test]
fn valgrind_finds_nothing() {
    if has("valgrind_finds_nothing", "valgrind") {
        VALGRIND.everything();
    }
}

#[test]
fn address_sanitizer_finds_nothing() {
    ADDRESS.everything();
}

/// A race of the program itself, which must be reported, shows that the check works.
#[test]
fn thread_sanitizer_finds_nothing() {
    let dir = scratch();
    // The first build takes minutes.
    if let Some(missing) = no_instrumentation(dir.path()) {
        println!("skip: thread_sanitizer_finds_nothing: {missing}");
        return;
    }
    let racing = THREAD.program("slim-c/tests/c/race.c", dir.path());
    let found = racing().output().unwrap();
    let said = String::from_utf8_lossy(&found.stderr);
    assert!(
        !found.status.success() && said.contains("data race"),
        "{said}"
    );
    THREAD.everything();
}
