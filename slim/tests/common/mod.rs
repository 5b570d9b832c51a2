//! Helpers of the tests: sessions, faults, threads and descriptors.

#![allow(dead_code, reason = "each test program uses only a part")]

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::process::Command;
use std::time::{Duration, Instant};

use slim::{Endpoint, Flow, Session, SessionOptions, StreamState};

/// Time limit of every wait; far longer than any should take.
pub const LIMIT: Option<Duration> = Some(Duration::from_secs(60));

pub fn session() -> Session {
    session_with(&[])
}

/// Opens a session with the settings of these environment variables and values.
pub fn session_with(vars: &[(&str, &str)]) -> Session {
    Session::open(options(vars)).expect("the session opens")
}

/// Options with the settings of these environment variables and values.
pub fn options(vars: &[(&str, &str)]) -> SessionOptions {
    let mut options = SessionOptions::new("test");
    let vars = vars.iter().map(|(k, v)| (k.to_string(), v.to_string()));
    let (config, problems) = slim::Config::from_vars(vars);
    assert!(problems.is_empty(), "{problems:?}");
    let log = options.config.log;
    options.config = slim::Config { log, ..config };
    options
}

pub fn loopback() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

pub fn listen(session: &Session) -> Endpoint {
    session.listen(loopback()).unwrap()
}

/// Both ends of a protected flow.
pub fn pair(session: &Session, endpoint: &Endpoint) -> (Flow, Flow) {
    let near = session.connect(endpoint.local_addr(), LIMIT).unwrap();
    let far = endpoint.accept(LIMIT).unwrap();
    for flow in [&near, &far] {
        assert_eq!(flow.wait_negotiated(LIMIT), StreamState::Protected);
    }
    (near, far)
}

/// The first address of the door, which follows the magic and the number of addresses in the blob.
pub fn door(blob: &[u8]) -> SocketAddr {
    let ip: [u8; 16] = blob[9..25].try_into().unwrap();
    let port = u16::from_be_bytes([blob[25], blob[26]]);
    (std::net::IpAddr::from(ip).to_canonical(), port).into()
}

/// Waits until `f` holds.
pub fn wait_until(what: &str, f: impl Fn() -> bool) {
    let begun = Instant::now();
    while !f() {
        assert!(begun.elapsed() < LIMIT.unwrap(), "not {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until the flow has been resumed more than `before` times. One kill may cause two resumes, if both ends begin at once.
pub fn wait_resumed(session: &Session, flow: &Flow, before: u64) {
    let begun = Instant::now();
    while flow.stats().resumes <= before {
        session.progress(&mut Vec::new());
        let (state, stats) = (flow.state(), flow.stats());
        assert!(
            begun.elapsed() < LIMIT.unwrap(),
            "not resumed: {state:?}, {stats:?}"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// How a connection is broken.
#[derive(Clone, Copy, Debug)]
pub enum Kill {
    /// As `ss -K` does: an error at this end, a reset at the other.
    Destroy,
    /// Shut down in both directions on the descriptor, without the library's knowledge.
    Fin,
}

/// The kinds of faults that this user can cause.
pub fn kills() -> Vec<Kill> {
    if rustix::process::geteuid().is_root() {
        vec![Kill::Destroy, Kill::Fin]
    } else {
        println!("ss -K needs root: connections are only ended, not destroyed");
        vec![Kill::Fin]
    }
}

/// Breaks the flow's present connection, if it has one.
pub fn kill(flow: &Flow, how: Kill) -> bool {
    flow.connection().is_some_and(|ends| kill_ends(ends, how))
}

/// Breaks the connection with these ends.
pub fn kill_ends((local, remote): (SocketAddr, SocketAddr), how: Kill) -> bool {
    match how {
        Kill::Destroy => {
            let filter = format!(
                "( sport = :{} and dport = :{} )",
                local.port(),
                remote.port()
            );
            let done = Command::new("ss").args(["-KHtn", &filter]).output();
            done.is_ok_and(|done| done.status.success() && !done.stdout.is_empty())
        }
        Kill::Fin => descriptor_of(local, remote)
            .is_some_and(|fd| slim_sys::try_shutdown(fd, libc::SHUT_RDWR).is_ok()),
    }
}

/// A descriptor of this process for the IPv4 connection with these ends.
fn descriptor_of(local: SocketAddr, remote: SocketAddr) -> Option<i32> {
    let hex = |addr: SocketAddr| match addr {
        SocketAddr::V4(v4) => format!(
            "{:08X}:{:04X}",
            u32::from_ne_bytes(v4.ip().octets()),
            v4.port()
        ),
        SocketAddr::V6(_) => String::new(),
    };
    let (local, remote) = (hex(local), hex(remote));
    let table = fs::read_to_string("/proc/self/net/tcp").ok()?;
    let inode: u64 = table.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let found = fields[1] == local && fields[2] == remote;
        found.then(|| fields[9].parse().ok())?
    })?;
    fs::read_dir("/proc/self/fd").ok()?.find_map(|entry| {
        let entry = entry.ok()?;
        let found = fs::metadata(entry.path()).ok()?.ino() == inode;
        found.then(|| entry.file_name().to_str()?.parse().ok())?
    })
}

/// Waits until a child process ends, at most a quarter of a minute. Returns its status, or `None` after killing it.
pub fn wait_for_child(pid: i32) -> Option<i32> {
    let begun = Instant::now();
    loop {
        let mut status = -1;
        // SAFETY: the status is written to a variable of ours.
        let ended = unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) };
        match ended {
            0 if begun.elapsed() < Duration::from_secs(15) => {
                std::thread::sleep(Duration::from_millis(1));
            }
            0 => {
                // SAFETY: the child is ours, and its number is not free before the wait.
                unsafe {
                    libc::kill(pid, libc::SIGKILL);
                    libc::waitpid(pid, &raw mut status, 0);
                }
                return None;
            }
            _ => return (ended == pid).then_some(status),
        }
    }
}

/// Runs the test of this name, of the same test program, in a process of its own. Returns false in that process.
pub fn runs_alone_elsewhere(test: &str) -> bool {
    if std::env::var_os("SLIM_TEST_ALONE").is_some() {
        return false;
    }
    let ran = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture", "--test-threads=1", test])
        .env("SLIM_TEST_ALONE", "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stdout) + String::from_utf8_lossy(&ran.stderr);
    println!("{said}");
    assert!(ran.status.success(), "{}", ran.status);
    assert!(said.contains("1 passed"), "there is no test {test}");
    true
}

/// Number of agent threads in this process.
pub fn agent_threads() -> usize {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let name = |entry: std::io::Result<fs::DirEntry>| {
        fs::read_to_string(entry.ok()?.path().join("comm")).ok()
    };
    tasks
        .filter_map(name)
        .filter(|name| name.trim() == "slim-agent")
        .count()
}

/// Descriptors of this process, and the files that they refer to.
pub fn descriptors() -> Vec<(String, String)> {
    let link = |entry: fs::DirEntry| {
        let to = fs::read_link(entry.path()).ok()?;
        Some((
            entry.file_name().into_string().ok()?,
            to.display().to_string(),
        ))
    };
    let all = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let mut all: Vec<_> = all.filter_map(link).collect();
    // Leave out the descriptor of the directory that is being read.
    all.retain(|(_, to)| !to.contains("/fd"));
    all.sort();
    all
}
