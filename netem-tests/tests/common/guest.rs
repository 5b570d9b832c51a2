//! Tests that need netem, on a machine whose kernel has none, and tests that would harm this machine: a kernel that runs as a program
//! (user-mode Linux, made by `scripts/netem-kernel`) boots with this machine's files, read-only, and runs the test program again, for one test.

use std::{
    fs,
    io::Read,
    num::NonZero,
    os::{
        fd::{AsRawFd, BorrowedFd, OwnedFd},
        unix::process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{PoisonError, RwLock},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use nix::{
    fcntl::{FcntlArg, FdFlag, fcntl},
    sched::sched_getcpu,
    sys::{
        signal::{Signal, killpg},
        socket::{
            AddressFamily, MsgFlags, SockFlag, SockType, recv, setsockopt, socketpair,
            sockopt::{RcvBuf, SndBuf},
        },
        statvfs::statvfs,
    },
    unistd::Pid,
};
use slim_lab::{Lab, artifacts, faults::netem::Netem, mpi::cache_dir, skip::skip};

use super::soak;

/// Limit of a test in the guest, with booting (half a second), and of its long version.
const LIMIT: Duration = Duration::from_secs(150);
const LONG: Duration = Duration::from_secs(2 * 3600);
/// The guest's memory, in MiB.
const MEMORY: u64 = 1024;
/// Set in the guest.
const IN_GUEST: &str = "TESTS_RUN_IN_GUEST";
/// Set in the guest: 0, or 1 in the second of two hosts.
const HOST: &str = "TESTS_HOST";
/// The interface between two hosts.
pub const LINE: &str = "vec0";
/// Bytes of packets that are on the line.
const LINE_BUFFER: usize = 4 << 20;
/// The file by which host 0 has the other one ended.
const CRASH: &str = "crash-peer";
const NO_GUEST: &str = "scripts/netem-kernel (run by scripts/setup) has made no guest";

/// Variables that the test in the guest gets, if they are set.
const PASSED: [&str; 6] = [
    "HOME",
    "SLIM_CACHE",
    "SLIM_LAB_SEED",
    "SLIM_PRELOAD",
    "SLIM_SOAK",
    "RUST_BACKTRACE",
];

/// The guest's first process. The words in braces are filled in. The test's directory is /mnt.
const INIT: &str = r#"#!/bin/sh
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs run /run
mountpoint -q /dev || mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm /run/tmp
mount -t devpts devpts /dev/pts
mount -t tmpfs shm /dev/shm
mount -t hostfs none /mnt -o {dir}
[ -e /dev/fd ] || ln -s /proc/self/fd /dev/fd
ip link set lo up
export TMPDIR=/run/tmp {variables}
cd {here}
{program} --exact {test} --show-output --test-threads=1
echo $? > /mnt/status
# reboot(RB_POWER_OFF); there is no program for that without an init system.
exec perl -e 'syscall(169, 0xfee1dead, 672274793, 0x4321fedc, 0)'
"#;

/// Whether to run the calling test, `test`, here: on a kernel with netem. If this kernel has none, the test runs in a guest, and is over
/// when this returns. The guest cannot write to this machine's files: make what the test needs before the call.
pub fn here(test: &str) -> bool {
    if let Err(reason) = Lab::check() {
        skip(test, reason);
        return false;
    }
    let netem = Netem::default().check();
    if netem.is_ok() {
        return true;
    }
    assert!(!is_guest(), "in the guest: {netem:?}");
    let reason = "this kernel has no netem, and scripts/netem-kernel (run by scripts/setup) has made none that has";
    run_again(test, reason);
    false
}

/// Whether the calling test, `test`, with its module's path, runs in a guest, where it may do what would harm this machine. If not, the test runs in a guest, and is
/// over when this returns.
pub fn only_there(test: &str) -> bool {
    if is_guest() {
        return true;
    }
    match Lab::check() {
        Ok(()) => run_again(test, NO_GUEST),
        Err(reason) => skip(test, reason),
    }
    false
}

/// Whether this is the guest.
pub fn is_guest() -> bool {
    let named =
        fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| text.contains("User Mode Linux"));
    named && std::env::var_os(IN_GUEST).is_some()
}

/// Which of two joined guests this is, 0 or 1: two hosts, with interfaces [`LINE`] between them. If it is none, `test` runs in both, and is over when
/// this returns `None`. What host 0 finds counts.
pub fn two_hosts(test: &str) -> Option<usize> {
    if is_guest() {
        return Some(std::env::var(HOST).unwrap().parse().unwrap());
    }
    if let Err(reason) = Lab::check() {
        skip(test, reason);
        return None;
    }
    let Some(kernel) = kernel() else {
        skip(test, NO_GUEST);
        return None;
    };
    let _alone = GUESTS.write().unwrap_or_else(PoisonError::into_inner);
    let (near, far) = socketpair(
        AddressFamily::Unix,
        SockType::Datagram,
        None,
        SockFlag::SOCK_NONBLOCK,
    )
    .unwrap();
    for end in [&near, &far] {
        setsockopt(end, SndBuf, &LINE_BUFFER).unwrap();
        setsockopt(end, RcvBuf, &LINE_BUFFER).unwrap();
    }
    let mut other = Guest::boot(&kernel, test, Some((1, &far)));
    let mut first = Guest::boot(&kernel, test, Some((0, &near)));
    drop(near);
    let begin = Instant::now();
    let mut crashed = false;
    while !first.has_ended() && begin.elapsed() < limit() {
        thread::sleep(Duration::from_millis(10));
        if !crashed && first.dir.join(CRASH).exists() {
            other.kill();
            crashed = true;
        }
        if crashed {
            // The line stays, and is silent: nobody takes what the first host sends.
            while recv(far.as_raw_fd(), &mut [0; 64], MsgFlags::empty()).is_ok() {}
        }
    }
    let (_, other) = other.end();
    first.report(test, &format!("the other host:\n{}", of_test(&other)));
    None
}

/// Ends the other host as a power failure does.
pub fn crash_peer() {
    fs::write(Path::new("/mnt").join(CRASH), "").unwrap();
}

/// The kernel for guests, if it is there.
fn kernel() -> Option<PathBuf> {
    let kernel = cache_dir().join("netem-kernel/linux");
    kernel.is_file().then_some(kernel)
}

/// Held by tests in guests. Two hosts take both processors of a small machine, so nothing else of this program runs beside them: tests that race with a guest's traffic
/// would lose.
static GUESTS: RwLock<()> = RwLock::new(());

/// Runs a test in a guest. Skips it for this reason if there is none.
fn run_again(test: &str, reason: &str) {
    let Some(kernel) = kernel() else {
        return skip(test, reason);
    };
    let _turn = GUESTS.read().unwrap_or_else(PoisonError::into_inner);
    let mut guest = Guest::boot(&kernel, test, None);
    let begin = Instant::now();
    while !guest.has_ended() && begin.elapsed() < limit() {
        thread::sleep(Duration::from_millis(10));
    }
    guest.report(test, "");
}

fn limit() -> Duration {
    match soak() {
        true => LONG,
        false => LIMIT,
    }
}

/// A guest that runs a test.
struct Guest {
    child: Child,
    dir: PathBuf,
    readers: Vec<JoinHandle<String>>,
}

impl Guest {
    /// Boots the kernel for one test. `host`: the number of one of two hosts, and its end of the line.
    fn boot(kernel: &Path, test: &str, host: Option<(usize, &OwnedFd)>) -> Self {
        let number = host.map_or(0, |(number, _)| number);
        let name = test.replace("::", "-");
        let name = format!("guest-{name}-{}-{number}", std::process::id());
        let dir = artifacts::scratch(&name).unwrap();
        let init = dir.join("init");
        fs::write(&init, script(&dir, test, number)).unwrap();
        let mut command = start(kernel, &dir, number);
        if let Some((_, line)) = host {
            let fd = line.as_raw_fd();
            command.arg(format!(
                "vec0:transport=fd,fd={fd},depth=64,mtu=4200,mac=02:00:00:00:00:1{number}"
            ));
            let keep = move || {
                // SAFETY: the child of the fork has it, too.
                let line = unsafe { BorrowedFd::borrow_raw(fd) };
                fcntl(line, FcntlArg::F_SETFD(FdFlag::empty()))?;
                Ok(())
            };
            // SAFETY: it makes one system call.
            unsafe { command.pre_exec(keep) };
        }
        command.args(["init=/bin/sh", "--"]).arg(&init);
        let child = command.spawn();
        let mut child = child.unwrap_or_else(|e| panic!("{}: {e}", kernel.display()));
        let pipes: [Box<dyn Read + Send>; 2] = [
            Box::new(child.stdout.take().unwrap()),
            Box::new(child.stderr.take().unwrap()),
        ];
        let read = |mut pipe: Box<dyn Read + Send>| {
            thread::spawn(move || {
                let mut text = Vec::new();
                // What was read before an error is still of use.
                let _ = pipe.read_to_end(&mut text);
                String::from_utf8_lossy(&text).replace('\r', "")
            })
        };
        let readers = pipes.into_iter().map(read).collect();
        Guest {
            child,
            dir,
            readers,
        }
    }

    fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    fn kill(&mut self) {
        // The kernel's helper processes are in its group.
        let group = Pid::from_raw(self.child.id().cast_signed());
        let _ = killpg(group, Signal::SIGKILL);
        self.child.wait().unwrap();
    }

    /// The test program's exit status, if it came to that, and what the guest has printed.
    fn end(mut self) -> (Option<String>, String) {
        self.kill();
        let console: String = self
            .readers
            .into_iter()
            .map(|r| r.join().unwrap())
            .collect();
        let status = fs::read_to_string(self.dir.join("status")).ok();
        fs::remove_dir_all(&self.dir).unwrap();
        (status.map(|text| text.trim().to_owned()), console)
    }

    /// Ends it, and prints what the test has printed. Panics, with what there is `besides`, if the test has failed.
    fn report(self, test: &str, besides: &str) {
        let (status, console) = self.end();
        match status.as_deref() {
            Some("0") if console.contains(" 1 passed;") => {
                print!("{}", of_test(&console));
            }
            _ => panic!("{test} failed in the guest:\n{console}\n{besides}"),
        }
    }
}

/// The command that boots the kernel, without the arguments behind those of the kernel.
fn start(kernel: &Path, dir: &Path, number: usize) -> Command {
    // On one processor: the kernel and the process that it runs wait for each other all the time. The second host has another one.
    let first = sched_getcpu().unwrap();
    let all = thread::available_parallelism().map_or(1, NonZero::get);
    let processor = ((first + number) % all).to_string();
    let mut command = Command::new("taskset");
    command
        .args(["-c", &processor])
        .arg(kernel)
        .arg(format!("mem={MEMORY}M"))
        .args([
            "con=null",
            "con0=fd:0,fd:1",
            "rootfstype=hostfs",
            "rootflags=/",
            "ro",
            "quiet",
            "ssl=null",
            // Else the first program that wants random numbers waits some seconds for them.
            "random.trust_cpu=on",
        ])
        .env_clear()
        // The kernel has a directory of its own there while it runs.
        .env("HOME", dir)
        .env("TMPDIR", memory_dir(dir))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    command
}

/// What the test has printed, without the words of the test program: these would count as tests of their own.
fn of_test(console: &str) -> &str {
    let begin = console.find(" stdout ----\n");
    let rest = begin.map_or("", |at| &console[at + " stdout ----\n".len()..]);
    rest.find("\n\nsuccesses:").map_or(rest, |at| &rest[..=at])
}

/// The guest's first process for this test.
fn script(dir: &Path, test: &str, host: usize) -> String {
    let set = |name: &&str| {
        std::env::var(name)
            .ok()
            .map(|value| format!("{name}={}", quoted(&value)))
    };
    let mut variables: Vec<_> = PASSED.iter().filter_map(set).collect();
    variables.push(format!("{IN_GUEST}=1 {HOST}={host}"));
    let path = |path: &Path| quoted(&path.display().to_string());
    INIT.replace("{dir}", &path(dir))
        .replace("{variables}", &variables.join(" "))
        .replace("{here}", &path(&std::env::current_dir().unwrap()))
        .replace("{program}", &path(&std::env::current_exe().unwrap()))
        .replace("{test}", test)
}

fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

/// Where the file that is the guest's memory goes: into memory, if there is room.
fn memory_dir(dir: &Path) -> PathBuf {
    let room = statvfs("/dev/shm").map_or(0, |fs| fs.blocks_available() * fs.fragment_size());
    match room > (MEMORY + 64) << 20 {
        true => "/dev/shm".into(),
        false => dir.to_owned(),
    }
}
