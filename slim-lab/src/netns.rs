//! A network namespace held by a descriptor: run code in it, start commands in it, list and kill
//! its processes.

use std::{
    ffi::OsStr,
    fs, io,
    os::{
        fd::{AsFd, OwnedFd},
        linux::fs::MetadataExt,
        unix::process::CommandExt,
    },
    path::Path,
    process::{Command, Output},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use nix::{
    net::if_::if_nameindex,
    sched::{CloneFlags, setns},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use rustix::thread::{CapabilitySet, capabilities};

use crate::{Error, Result};

/// A network namespace. A clone is another handle on the same namespace.
#[derive(Clone, Debug)]
pub struct Netns {
    fd: Arc<OwnedFd>,
    /// Device and inode of the namespace, as `/proc/PID/ns/net` shows for its processes.
    id: (u64, u64),
}

/// A process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Process id.
    pub pid: u32,
    /// Name as in `/proc/PID/comm` (at most 15 bytes).
    pub name: String,
}

impl Netns {
    /// The namespace of the calling thread.
    pub fn current() -> Result<Self> {
        Self::open(Path::new("/proc/thread-self/ns/net"))
    }

    /// The namespace of process `pid`.
    pub fn of_process(pid: u32) -> Result<Self> {
        Self::open(Path::new(&format!("/proc/{pid}/ns/net")))
    }

    fn open(path: &Path) -> Result<Self> {
        let file = fs::File::open(path).map_err(Error::io(path.display().to_string()))?;
        let meta = file
            .metadata()
            .map_err(Error::io(path.display().to_string()))?;
        Ok(Netns {
            fd: Arc::new(file.into()),
            id: (meta.st_dev(), meta.st_ino()),
        })
    }

    /// What tells this namespace from others.
    pub(crate) fn id(&self) -> (u64, u64) {
        self.id
    }

    /// A descriptor of the namespace.
    pub(crate) fn descriptor(&self) -> io::Result<OwnedFd> {
        self.fd.try_clone()
    }

    /// Runs `f` on a thread of its own inside this namespace and returns its result.
    /// A socket made there stays in the namespace, wherever it is used afterwards.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> Result<T> {
        let inside = || {
            setns(self.fd.as_fd(), CloneFlags::CLONE_NEWNET).map_err(|e| Error::Io {
                what: "enter a network namespace".into(),
                source: e.into(),
            })?;
            Ok(f())
        };
        thread::scope(|scope| match scope.spawn(inside).join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    }

    /// A command that runs inside this network namespace, and in the caller's other namespaces.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        let fd = self.fd.clone();
        // SAFETY: the closure runs between fork and exec and makes one system call, on a
        // descriptor that it keeps open; it allocates nothing and takes no lock.
        unsafe {
            command.pre_exec(move || Ok(setns(fd.as_fd(), CloneFlags::CLONE_NEWNET)?));
        }
        command
    }

    /// Runs a short command inside and returns its standard output. The error of a failure
    /// has the command line and the command's standard error.
    pub fn exec(&self, program: &str, args: &[&str]) -> Result<String> {
        let line = || format!("{program} {}", args.join(" "));
        let output = self
            .command(program)
            .args(args)
            .output()
            .map_err(Error::io(line()))?;
        checked(line(), output)
    }

    /// Names of the interfaces, without the loopback.
    pub fn interfaces(&self) -> Result<Vec<String>> {
        let list = || -> nix::Result<Vec<String>> {
            let found = if_nameindex()?;
            let names = found
                .iter()
                .map(|i| i.name().to_string_lossy().into_owned());
            Ok(names.filter(|name| name != "lo").collect())
        };
        self.run(list)?.map_err(|e| Error::Io {
            what: "list the interfaces of a network namespace".into(),
            source: e.into(),
        })
    }

    /// Every process whose main thread is in this namespace.
    pub fn processes(&self) -> Vec<Process> {
        let Ok(entries) = fs::read_dir("/proc") else {
            return Vec::new();
        };
        let pids = entries
            .flatten()
            .filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
        pids.filter(|pid| self.holds(*pid))
            .map(Process::of)
            .collect()
    }

    fn holds(&self, pid: u32) -> bool {
        // A zombie has no namespaces any more, so its link cannot be followed.
        fs::metadata(format!("/proc/{pid}/ns/net"))
            .is_ok_and(|m| (m.st_dev(), m.st_ino()) == self.id)
    }

    /// Kills every process in this namespace except `spare` and ourselves, and waits until they
    /// are gone. Returns the killed processes. Repeats, because a process may fork meanwhile.
    pub fn kill_all(&self, spare: &[u32]) -> Vec<Process> {
        let (mut killed, start) = (Vec::<Process>::new(), Instant::now());
        loop {
            let mut found = self.processes();
            found.retain(|p| !spare.contains(&p.pid) && p.pid != std::process::id());
            if found.is_empty() || start.elapsed() > Duration::from_secs(5) {
                return killed;
            }
            for process in found {
                // An error means that it has ended already.
                let _ = kill(Pid::from_raw(process.pid as i32), Signal::SIGKILL);
                if !killed.contains(&process) {
                    killed.push(process);
                }
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Process {
    fn of(pid: u32) -> Self {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        Process {
            pid,
            name: name.trim_end().to_owned(),
        }
    }
}

/// Standard output of a command that must have succeeded.
pub(crate) fn checked(line: impl Into<String>, output: Output) -> Result<String> {
    if !output.status.success() {
        return Err(Error::command(line, &output));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Whether this process may make namespaces and change networks.
pub fn privileged() -> bool {
    let needed = CapabilitySet::NET_ADMIN | CapabilitySet::SYS_ADMIN;
    capabilities(None).is_ok_and(|sets| sets.effective.contains(needed))
}
