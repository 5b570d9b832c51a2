//! Runs the C programs beside these tests, bare and under the preload, and compares their transcripts.

#![allow(dead_code)] // each test binary uses only some of these items

pub mod breaks;
pub mod events;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// After this time a program is killed. Each program also has its own, shorter limit.
const LIMIT: Duration = Duration::from_secs(150);

/// The library under test: `SLIM_PRELOAD`, or one built here. The one that cargo builds for tests has unwinding panics,
/// whatever the profile says; a library in which threads are cancelled must abort instead.
pub fn preload() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    match std::env::var_os("SLIM_PRELOAD") {
        Some(path) => path.into(),
        None => BUILT.get_or_init(build).clone(),
    }
}

fn build() -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .parent()
        .expect("it is in the target directory");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let out = Command::new(&cargo)
        .args(["build", "--release", "--lib", "--target-dir"])
        .arg(target)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap_or_else(|e| panic!("cannot run {}: {e}", cargo.display()));
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "the library cannot be built: {said}");
    target.join("release/libslim_preload.so")
}

/// A new path below cargo's directory for test files.
pub fn scratch(name: &str) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.{}.{n}", std::process::id()))
}

/// Compiles `tests/c/<name>.c`; `-shared` among the flags makes a library.
pub fn compile(name: &str, flags: &[&str]) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/c")
        .join(format!("{name}.c"));
    let made = scratch(name);
    let cc = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let out = Command::new(&cc)
        .args([
            "-O1",
            "-g",
            "-Wall",
            "-Wextra",
            "-Wno-nonnull",
            "-Wno-stringop-overflow",
            "-Wno-stringop-overread",
            "-Wno-unused-result",
            "-Werror",
            "-pthread",
        ])
        .arg("-o")
        .arg(&made)
        .arg(&source)
        .args(flags)
        .output()
        .unwrap_or_else(|e| panic!("cannot run {cc}: {e}"));
    assert!(
        out.status.success(),
        "{}: {}",
        source.display(),
        String::from_utf8_lossy(&out.stderr)
    );
    made
}

/// One program to run.
pub struct Program {
    command: Command,
}

/// The exit status and output of a program.
#[derive(Debug)]
pub struct Outcome {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
    pub took: Duration,
}

impl Outcome {
    /// Everything that must be equal in two runs.
    pub fn transcript(&self) -> String {
        let mut t = self.stdout.clone();
        if !self.stderr.is_empty() {
            let _ = write!(t, "stderr: {}", self.stderr);
        }
        match self.status.signal() {
            Some(signal) => t + &format!("killed by signal {signal}\n"),
            None => t + &format!("exit {}\n", self.status.code().unwrap_or(-1)),
        }
    }

    pub fn ok(&self) -> bool {
        self.status.success()
    }
}

impl Program {
    pub fn new(path: impl AsRef<Path>) -> Self {
        let mut command = Command::new(path.as_ref());
        command
            .env_remove("LD_PRELOAD")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        for (name, _) in std::env::vars_os() {
            if name.as_encoded_bytes().starts_with(b"SLIM") {
                command.env_remove(name);
            }
        }
        Program { command }
    }

    pub fn arg(mut self, arg: impl AsRef<std::ffi::OsStr>) -> Self {
        self.command.arg(arg);
        self
    }

    pub fn args<I: IntoIterator<Item = S>, S: AsRef<std::ffi::OsStr>>(mut self, args: I) -> Self {
        self.command.args(args);
        self
    }

    pub fn env(mut self, name: &str, value: impl AsRef<std::ffi::OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    pub fn dir(mut self, dir: &Path) -> Self {
        self.command.current_dir(dir);
        self
    }

    /// Whether the program runs under the preload.
    pub fn preloaded(self, yes: bool) -> Self {
        if yes {
            self.env("LD_PRELOAD", preload())
        } else {
            self
        }
    }

    /// How long the program waits after it made a connection, in milliseconds, so that the negotiation can end.
    pub fn negotiation_ms(self, ms: u32) -> Self {
        self.env("T_NEGOTIATION_MS", ms.to_string())
    }

    /// Passes `fd` to the program, under the descriptor number that T_SYNC names.
    fn sync(mut self, fd: OwnedFd) -> Self {
        let raw = fd.as_raw_fd();
        // Far above the numbers that the programs use, and the same in every run: numbers are part of the transcript.
        const AT: i32 = 900;
        self.command.env("T_SYNC", AT.to_string());
        // SAFETY: dup2 is async-signal-safe; `fd` moves into the closure and lives as long as the command.
        unsafe {
            self.command.pre_exec(move || {
                let _keep = &fd;
                match libc::dup2(raw, AT) {
                    AT => Ok(()),
                    _ => Err(std::io::Error::last_os_error()),
                }
            })
        };
        self
    }

    pub fn start(mut self) -> Running {
        let began = Instant::now();
        let mut child = self
            .command
            .spawn()
            .unwrap_or_else(|e| panic!("cannot run {:?}: {e}", self.command.get_program()));
        let out = drain(child.stdout.take());
        let err = drain(child.stderr.take());
        Running {
            child,
            out,
            err,
            began,
        }
    }

    pub fn run(self) -> Outcome {
        self.start().finish()
    }
}

type Text = thread::JoinHandle<String>;

fn drain(from: Option<impl Read + Send + 'static>) -> Option<Text> {
    let mut from = from?;
    Some(thread::spawn(move || {
        let mut all = Vec::new();
        let _ = from.read_to_end(&mut all);
        String::from_utf8_lossy(&all).into_owned()
    }))
}

/// A started program; killed if it is dropped before it has finished.
pub struct Running {
    child: Child,
    out: Option<Text>,
    err: Option<Text>,
    began: Instant,
}

impl Running {
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: no memory is involved; the child is not reaped yet, so the number is still its own.
        unsafe { libc::kill(self.child.id() as i32, signal) };
    }

    pub fn finish(self) -> Outcome {
        self.finish_within(LIMIT)
    }

    pub fn finish_within(mut self, limit: Duration) -> Outcome {
        let status = loop {
            match self.child.try_wait().expect("our own child") {
                Some(status) => break status,
                None if self.began.elapsed() > limit => {
                    let _ = self.child.kill();
                    break self.child.wait().expect("our own child");
                }
                None => thread::sleep(Duration::from_millis(3)),
            }
        };
        let took = self.began.elapsed();
        let text = |t: Option<Text>| t.and_then(|t| t.join().ok()).unwrap_or_default();
        Outcome {
            status,
            took,
            stdout: text(self.out.take()),
            stderr: text(self.err.take()),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.alive() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Runs two programs, as "server" and as "client". A socket pair joins them, apart from their TCP connections.
pub fn pair(server: Program, client: Program) -> (Outcome, Outcome) {
    let (server, client) = pair_started(server, client);
    (server.finish(), client.finish())
}

/// Starts such a pair without waiting for it.
pub fn pair_started(server: Program, client: Program) -> (Running, Running) {
    let (a, b) = UnixStream::pair().expect("a socket pair");
    let server = server.arg("server").sync(a.into());
    let client = client.arg("client").sync(b.into());
    (server.start(), client.start())
}

/// Shows the first difference of two transcripts.
fn difference(want: &str, got: &str) -> String {
    let (want, got): (Vec<_>, Vec<_>) = (want.lines().collect(), got.lines().collect());
    let same = want.iter().zip(&got).take_while(|(a, b)| a == b).count();
    let from = same.saturating_sub(6);
    let mut s = String::new();
    for l in &want[from..same] {
        let _ = writeln!(s, "    {l}");
    }
    for (sign, side) in [('-', &want), ('+', &got)] {
        for l in side.iter().skip(same).take(8) {
            let _ = writeln!(s, "  {sign} {l}");
        }
    }
    s
}

/// Compares two transcripts; `None` when they are the same.
pub fn compare(name: &str, want: &Outcome, got: &Outcome) -> Option<String> {
    let (want, got) = (want.transcript(), got.transcript());
    (want != got).then(|| {
        format!(
            "{name}: first difference (- bare, + this run):\n{}",
            difference(&want, &got)
        )
    })
}

/// Milliseconds after which a negotiation on loopback has ended.
pub const NEGOTIATED_MS: u32 = 120;

/// Keeps the ports of this test's programs apart from those of other tests, by a network namespace of its own. Without the
/// privilege for one the host's network is used.
pub fn apart() {
    static SAID: std::sync::Once = std::sync::Once::new();
    if !enter_own_network() {
        SAID.call_once(|| println!("without a network namespace: ports are shared with the host"));
    }
}

/// Compares runs of a program that has both ends of its connections: bare, under the preload during and after the
/// negotiation, and with `SLIM=off`.
pub fn same_alone(name: &str, flags: &[&str], args: &[&str]) {
    apart();
    let program = compile(name, flags);
    let run = |preloaded, negotiation| {
        Program::new(&program)
            .args(args)
            .preloaded(preloaded)
            .negotiation_ms(negotiation)
            .run()
    };
    let bare = run(false, 0);
    assert!(bare.ok(), "{name} fails bare:\n{}", bare.transcript());
    let bad: Vec<_> = [
        ("negotiating", run(true, 0)),
        ("negotiated", run(true, NEGOTIATED_MS)),
        (
            "off",
            Program::new(&program)
                .args(args)
                .preloaded(true)
                .env("SLIM", "off")
                .run(),
        ),
    ]
    .iter()
    .filter_map(|(mode, got)| compare(&format!("{name} {args:?}, {mode}"), &bare, got))
    .collect();
    assert!(bad.is_empty(), "\n{}", bad.join("\n"));
}

/// Compares runs of a program as server and client: bare, with the preload at both ends, and at either end only.
pub fn same_pair(name: &str, flags: &[&str], args: &[&str]) {
    apart();
    let program = compile(name, flags);
    let run = |server, client, negotiation| {
        let one = |preloaded| {
            Program::new(&program)
                .env("T_ARGS", args.join(" "))
                .preloaded(preloaded)
                .negotiation_ms(negotiation)
        };
        pair(one(server), one(client))
    };
    let bare = run(false, false, 0);
    assert!(
        bare.0.ok() && bare.1.ok(),
        "{name} fails bare:\n{}\n{}",
        bare.0.transcript(),
        bare.1.transcript()
    );
    let mut bad = Vec::new();
    for (mode, got) in [
        ("both negotiating", run(true, true, 0)),
        ("both negotiated", run(true, true, NEGOTIATED_MS)),
        ("server only", run(true, false, 0)),
        ("client only", run(false, true, 0)),
        ("server only, negotiated", run(true, false, NEGOTIATED_MS)),
        ("client only, negotiated", run(false, true, NEGOTIATED_MS)),
    ] {
        bad.extend(compare(&format!("{name} server, {mode}"), &bare.0, &got.0));
        bad.extend(compare(&format!("{name} client, {mode}"), &bare.1, &got.1));
    }
    assert!(bad.is_empty(), "\n{}", bad.join("\n"));
}

/// Moves the calling thread, and the programs it starts from now on, into a new network namespace with `lo` up.
/// Without the privilege for that, prints why and returns `false`.
pub fn own_network(test: &str) -> bool {
    let entered = enter_own_network();
    if !entered {
        let e = std::io::Error::last_os_error();
        println!("skip: {test}: a network namespace needs CAP_SYS_ADMIN: {e}");
    }
    entered
}

fn enter_own_network() -> bool {
    // SAFETY: unshare concerns the calling thread only; the ioctl gets a request it may write to.
    unsafe {
        if libc::unshare(libc::CLONE_NEWNET) != 0 {
            return false;
        }
        let s = libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
        let mut request: libc::ifreq = std::mem::zeroed();
        request.ifr_name[0] = b'l' as libc::c_char;
        request.ifr_name[1] = b'o' as libc::c_char;
        request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as i16;
        let up = libc::ioctl(s, libc::SIOCSIFFLAGS, &request);
        libc::close(s);
        assert_eq!(up, 0, "lo can be brought up in a fresh namespace");
    }
    true
}

/// Local ports in one of the tables of /proc/net, in the given state.
pub fn ports(table: &str, state: &str) -> BTreeSet<u16> {
    let text = fs::read_to_string(format!("/proc/thread-self/net/{table}")).unwrap_or_default();
    text.lines()
        .skip(1)
        .filter_map(|l| {
            let mut words = l.split_whitespace().skip(1);
            let local = words.next()?;
            (words.nth(1)? == state)
                .then(|| u16::from_str_radix(local.rsplit(':').next()?, 16).ok())?
        })
        .collect()
}
