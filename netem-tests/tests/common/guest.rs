//! Tests that need netem, on a machine whose kernel has none, and tests that would harm this machine: a kernel that runs as a program
//! (user-mode Linux, made by `scripts/netem-kernel`) boots with this machine's files, read-only, and runs the test program again, for one test.

use std::{
    fs,
    io::Read,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sched::sched_getcpu,
    sys::{
        signal::{Signal, killpg},
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
        Ok(()) => run_again(
            test,
            "scripts/netem-kernel (run by scripts/setup) has made no guest",
        ),
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

/// Runs a test in a guest. Skips it for this reason if there is none.
fn run_again(test: &str, reason: &str) {
    let kernel = cache_dir().join("netem-kernel/linux");
    if !kernel.is_file() {
        return skip(test, reason);
    }
    let (status, console) = run(&kernel, test);
    match status.as_deref() {
        Some("0") if console.contains(" 1 passed;") => {
            print!("{}", of_test(&console));
        }
        _ => panic!("{test} failed in the guest:\n{console}"),
    }
}

/// Boots the kernel for one test. Returns the test program's exit status, if it came to that, and what the guest printed.
fn run(kernel: &Path, test: &str) -> (Option<String>, String) {
    let name = test.replace("::", "-");
    let dir = artifacts::scratch(&format!("guest-{name}-{}", std::process::id())).unwrap();
    let init = dir.join("init");
    fs::write(&init, script(&dir, test)).unwrap();
    // On one processor: the kernel and the process that it runs wait for each other all the time.
    let processor = sched_getcpu().unwrap().to_string();
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
        .args(["init=/bin/sh", "--"])
        .arg(&init)
        .env_clear()
        // The kernel has a directory of its own there while it runs.
        .env("HOME", &dir)
        .env("TMPDIR", memory_dir(&dir))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    let mut child = command
        .spawn()
        .unwrap_or_else(|e| panic!("{}: {e}", kernel.display()));
    let group = Pid::from_raw(child.id().cast_signed());
    let mut readers = Vec::new();
    let pipes: [Box<dyn Read + Send>; 2] = [
        Box::new(child.stdout.take().unwrap()),
        Box::new(child.stderr.take().unwrap()),
    ];
    for mut pipe in pipes {
        readers.push(thread::spawn(move || {
            let mut text = Vec::new();
            // What was read before an error is still of use.
            let _ = pipe.read_to_end(&mut text);
            String::from_utf8_lossy(&text).replace('\r', "")
        }));
    }
    let begin = Instant::now();
    let limit = if soak() { LONG } else { LIMIT };
    while child.try_wait().unwrap().is_none() && begin.elapsed() < limit {
        thread::sleep(Duration::from_millis(10));
    }
    // The kernel's helper processes are in its group.
    let _ = killpg(group, Signal::SIGKILL);
    child.wait().unwrap();
    let console: String = readers.into_iter().map(|r| r.join().unwrap()).collect();
    let status = fs::read_to_string(dir.join("status")).ok();
    fs::remove_dir_all(&dir).unwrap();
    (status.map(|text| text.trim().to_owned()), console)
}

/// What the test has printed, without the words of the test program: these would count as tests of their own.
fn of_test(console: &str) -> &str {
    let begin = console.find(" stdout ----\n");
    let rest = begin.map_or("", |at| &console[at + " stdout ----\n".len()..]);
    rest.find("\n\nsuccesses:").map_or(rest, |at| &rest[..=at])
}

/// The guest's first process for this test.
fn script(dir: &Path, test: &str) -> String {
    let set = |name: &&str| {
        std::env::var(name)
            .ok()
            .map(|value| format!("{name}={}", quoted(&value)))
    };
    let mut variables: Vec<_> = PASSED.iter().filter_map(set).collect();
    variables.push(format!("{IN_GUEST}=1"));
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
