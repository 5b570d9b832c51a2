//! Helpers of the tests: the installed library, compilers, processes, and kills of their connections.

#![allow(dead_code, reason = "each test program uses only a part")]

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Time limit of a process; far longer than any should take.
const LIMIT: Duration = Duration::from_secs(120);

/// Only connections on which a program has sent so many bytes are killed: more than the messages of a resume have.
const SENT: u64 = 2000;

/// A line that is longer.
pub fn long_line() -> String {
    "long ".repeat(500) + "\n"
}

pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A directory for the files of one test program.
pub fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn install(name: &str, features: &str) -> PathBuf {
    let prefix = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let mut build = Command::new(root().join("slim-c/build"));
    build.args([prefix.as_os_str(), "fast".as_ref(), features.as_ref()]);
    succeed(&mut build);
    prefix
}

/// Where the library is installed.
pub fn installed() -> &'static Path {
    static PREFIX: OnceLock<PathBuf> = OnceLock::new();
    PREFIX.get_or_init(|| install("slim-c", ""))
}

/// Where a library is installed whose functions can be made to panic.
pub fn installed_panicking() -> &'static Path {
    static PREFIX: OnceLock<PathBuf> = OnceLock::new();
    PREFIX.get_or_init(|| install("slim-c-panic", "forced-panic"))
}

pub fn succeed(command: &mut Command) -> Output {
    let output = command.output();
    let output = output.unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let err = String::from_utf8_lossy(&output.stderr);
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{command:?}: {out}{err}");
    output
}

/// What pkg-config says of the library installed there.
pub fn pkg_config(prefix: &Path, args: &[&str]) -> Vec<String> {
    let mut command = Command::new("pkg-config");
    command.env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig"));
    let output = succeed(command.args(args).arg("slim"));
    let words = String::from_utf8(output.stdout).unwrap();
    words.split_whitespace().map(str::to_owned).collect()
}

/// Compiles a C or C++ program against the shared library installed at `prefix`. `source` is relative to the workspace.
pub fn compile(prefix: &Path, source: &str, dir: &Path, flags: &[&str]) -> PathBuf {
    let source = root().join(source);
    let is_c = source.extension().is_some_and(|e| e == "c");
    let (compiler, standard) = match is_c {
        true => ("gcc", "-std=gnu11"),
        false => ("g++", "-std=c++14"),
    };
    let program = dir
        .join(source.file_name().unwrap())
        .with_extension(if is_c { "c.bin" } else { "cpp.bin" });
    let mut command = Command::new(compiler);
    command.args([standard, "-O2", "-g", "-Wall", "-Wextra", "-Werror"]);
    command.args(flags).arg(&source).arg("-o").arg(&program);
    command.args(pkg_config(prefix, &["--cflags", "--libs"]));
    let lib = prefix.join("lib");
    succeed(command.arg(format!("-Wl,-rpath,{}", lib.display())));
    program
}

/// The Rust example with this name.
pub fn rust_example(name: &str) -> PathBuf {
    let mut command = Command::new(env!("CARGO"));
    command.args([
        "build",
        "--quiet",
        "--locked",
        "--profile",
        "fast",
        "-p",
        "slim",
    ]);
    succeed(command.args(["--example", name]).current_dir(root()));
    let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    let target = target.unwrap_or_else(|| root().join("target"));
    target.join("fast/examples").join(name)
}

/// A running program. Killed if the test panics.
pub struct Running {
    pub child: Child,
    name: String,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Running {
    pub fn start(command: &mut Command) -> Self {
        let name = format!("{command:?}");
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let child = command.stderr(Stdio::piped()).spawn();
        let child = child.unwrap_or_else(|e| panic!("{name}: {e}"));
        Self { child, name }
    }

    pub fn output(&mut self) -> BufReader<ChildStdout> {
        BufReader::new(self.child.stdout.take().unwrap())
    }

    /// Waits for the end. Returns whether the program has succeeded, and what it wrote to standard error.
    pub fn wait(mut self) -> (bool, String) {
        drop(self.child.stdin.take());
        let begun = Instant::now();
        let status = loop {
            match self.child.try_wait().unwrap() {
                Some(status) => break status,
                None if begun.elapsed() > LIMIT => panic!("{} does not end", self.name),
                None => thread::sleep(Duration::from_millis(5)),
            }
        };
        let mut text = String::new();
        let mut stderr = self.child.stderr.take().unwrap();
        stderr.read_to_string(&mut text).unwrap();
        (status.success(), text)
    }

    /// Waits for the end of a program that succeeds. Returns the number of resumes that it reports.
    pub fn resumes(self) -> u64 {
        let name = self.name.clone();
        let (success, text) = self.wait();
        assert!(success, "{name}: {text}");
        let number = text.lines().find_map(|l| l.strip_prefix("resumes: "));
        number.map_or(0, |n| n.parse().unwrap())
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Kills connections of the program, at most `most`, with so much time between them, until it ends or it has had none for a while.
    /// Returns how many it has killed.
    pub fn kill_often(&mut self, most: u64, pause: Duration) -> u64 {
        let mut rng = fastrand::Rng::with_seed(4);
        let (mut killed, mut last) = (0, Instant::now());
        while killed < most && last.elapsed() < Duration::from_secs(20) && self.is_running() {
            if self.kill_connection(&mut rng) {
                killed += 1;
                last = Instant::now();
            }
            thread::sleep(pause);
        }
        killed
    }

    /// Stops the program, kills one of its connections, and lets it go on. Returns false if it had none, or has ended. Only connections on
    /// which the program has sent some kilobytes are killed: a flow that is still connecting would fail, as it should, and so would a flow
    /// whose attempts to resume are killed one after the other.
    pub fn kill_connection(&mut self, rng: &mut fastrand::Rng) -> bool {
        if !self.is_running() {
            return false;
        }
        kill_process(self.pid(), Signal::STOP).unwrap();
        let of_this = format!("pid={},", self.pid().as_raw_nonzero());
        let all = succeed(Command::new("ss").args(["-HtnpiO", "state", "established"]));
        let all = String::from_utf8(all.stdout).unwrap();
        let own: Vec<_> = all
            .lines()
            .filter(|l| l.contains(&of_this) && sent(l) >= SENT)
            .collect();
        let killed = rng.choice(&own).is_some_and(|line| {
            let fields: Vec<_> = line.split_whitespace().collect();
            let port = |at: usize| fields[at].rsplit_once(':').unwrap().1;
            let filter = format!("( sport = :{} and dport = :{} )", port(2), port(3));
            let done = succeed(Command::new("ss").args(["-KHtn", &filter]));
            !done.stdout.is_empty()
        });
        kill_process(self.pid(), Signal::CONT).unwrap();
        killed
    }
}

/// The bytes sent on a connection, in a line of `ss -i`.
fn sent(line: &str) -> u64 {
    let mut words = line.split_whitespace();
    let sent = words.find_map(|w| w.strip_prefix("bytes_sent:"));
    sent.map_or(0, |n| n.parse().unwrap())
}

/// Starts a server, which prints its port. Returns the port, too.
pub fn serve(command: &mut Command) -> (Running, String) {
    let mut server = Running::start(command);
    let mut line = String::new();
    let mut output = server.output();
    output.read_line(&mut line).unwrap();
    if line.is_empty() {
        panic!("{command:?} has not begun: {}", server.wait().1);
    }
    // Keep reading, so that the program can go on to write.
    thread::spawn(move || std::io::copy(&mut output, &mut std::io::sink()));
    (server, line.trim().to_owned())
}

/// Whether connections can be killed here; prints why not.
pub fn can_kill(test: &str) -> bool {
    let can = rustix::process::geteuid().is_root();
    if !can {
        println!("skip: {test}: ss -K needs root");
    }
    can
}

/// Whether the program is installed; prints that it is not.
pub fn has(test: &str, program: &str) -> bool {
    let has = Command::new(program).arg("--version").output().is_ok();
    if !has {
        println!("skip: {test}: {program} is not installed");
    }
    has
}
