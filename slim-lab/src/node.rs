//! One node of a lab: its namespaces, which a process holds, and the commands that run in them.

use std::{
    ffi::OsStr,
    fs,
    io::{self, BufRead, BufReader, Read, Write},
    net::Ipv4Addr,
    os::{
        fd::{AsFd, OwnedFd},
        unix::process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
};

use nix::{
    fcntl::OFlag,
    sched::{CloneFlags, setns, unshare},
    sys::stat::Mode,
    unistd::{fchdir, setsid},
};

use crate::{Error, Netns, Process, Result, netns::checked};

/// The script of a node's holder. It sets its namespaces up, prints `ready`, and waits for the end of
/// its standard input. If the lab is dropped, the word `over` comes first. If the lab's process dies
/// there is no such word, and the holder also removes the lab's files. In both cases the holder kills
/// the processes that still run in the node. It does so three times: a process that the lab's process has
/// forked just before it died may enter the node a moment later. (The parent-death signal would not do: it
/// is sent when the *thread* that started the child ends.)
const HOLDER: &str = r#"
set -e
mount --make-rprivate /
umount -l /sys
mount -t sysfs sysfs /sys
mount -t tmpfs -o mode=1777 shm /dev/shm
mount --bind "$2" /etc/hosts
echo "$1" > /proc/sys/kernel/hostname
ip link set lo up
# The lab's process may be dead already.
trap '' PIPE
set +e
echo ready
read -r end
for round in 1 2 3; do
  for dir in /proc/[0-9]*; do
    pid=${dir#/proc/}
    [ "$pid" != $$ ] && [ "$dir/ns/net" -ef /proc/$$/ns/net ] && kill -9 "$pid" 2>/dev/null
  done
  [ "$end" = over ] || sleep 0.3
done
[ "$end" = over ] || rm -rf "${2%/*}"
"#;

/// The namespaces that make a node, opened once.
#[derive(Debug)]
struct Spaces {
    mnt: OwnedFd,
    uts: OwnedFd,
    ipc: OwnedFd,
}

impl Spaces {
    fn of(pid: u32) -> Result<Self> {
        let open = |kind: &str| {
            let path = format!("/proc/{pid}/ns/{kind}");
            fs::File::open(&path)
                .map(OwnedFd::from)
                .map_err(Error::io(path))
        };
        Ok(Spaces {
            mnt: open("mnt")?,
            uts: open("uts")?,
            ipc: open("ipc")?,
        })
    }

    /// Moves the calling (single-threaded) process into the namespaces. Keeps its working directory,
    /// which entering a mount namespace would reset.
    fn enter(&self) -> io::Result<()> {
        let here = nix::fcntl::open(
            ".",
            OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC,
            Mode::empty(),
        )?;
        setns(self.uts.as_fd(), CloneFlags::CLONE_NEWUTS)?;
        setns(self.ipc.as_fd(), CloneFlags::CLONE_NEWIPC)?;
        setns(self.mnt.as_fd(), CloneFlags::CLONE_NEWNS)?;
        Ok(fchdir(here)?)
    }
}

/// A node: a host of the lab. Dropping it kills everything that was started in it.
#[derive(Debug)]
pub struct Node {
    name: String,
    tmp: PathBuf,
    holder: Child,
    net: Netns,
    spaces: Arc<Spaces>,
    addresses: Vec<Ipv4Addr>,
}

impl Node {
    /// Starts the holder. `dir` is for this node's files, `hosts` becomes its `/etc/hosts`.
    pub(crate) fn start(
        name: &str,
        dir: &Path,
        hosts: &Path,
        addresses: Vec<Ipv4Addr>,
    ) -> Result<Self> {
        let tmp = dir.join(name);
        fs::create_dir_all(&tmp).map_err(Error::io(tmp.display().to_string()))?;
        let mut holder = hold(name, hosts)?;
        let opened = ready(&mut holder, name).and_then(|()| {
            Ok((
                Netns::of_process(holder.id())?,
                Arc::new(Spaces::of(holder.id())?),
            ))
        });
        match opened {
            Ok((net, spaces)) => Ok(Node {
                name: name.to_owned(),
                tmp,
                holder,
                net,
                spaces,
                addresses,
            }),
            Err(error) => {
                release(&mut holder);
                Err(error)
            }
        }
    }

    /// The node's host name: `nodeA`, `nodeB`, ...
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The node's network namespace.
    pub fn net(&self) -> &Netns {
        &self.net
    }

    /// The node's address on path `path` (0 is the first).
    pub fn address(&self, path: usize) -> Ipv4Addr {
        self.addresses[path]
    }

    /// All addresses, one per path.
    pub fn addresses(&self) -> &[Ipv4Addr] {
        &self.addresses
    }

    /// The network interface of path `path`, the same name in every node.
    pub fn interface(&self, path: usize) -> String {
        crate::lab::interface(path)
    }

    /// Process id of the holder: `/proc/PID/ns/*` are the node's namespaces.
    pub fn holder(&self) -> u32 {
        self.holder.id()
    }

    /// A directory for temporary files of this node's programs (`TMPDIR` there).
    pub fn tmp(&self) -> &Path {
        &self.tmp
    }

    /// A command that runs on this node.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = self.net.command(program);
        let spaces = self.spaces.clone();
        // SAFETY: the closure runs between fork and exec, in a process with one thread; only system calls on
        // descriptors that the closure keeps open, no allocation and no lock.
        unsafe {
            command.pre_exec(move || spaces.enter());
        }
        command.env("TMPDIR", &self.tmp);
        command
    }

    /// Runs a short command on the node and returns its standard output.
    pub fn exec(&self, program: &str, args: &[&str]) -> Result<String> {
        let line = || format!("{program} {} (on {})", args.join(" "), self.name);
        let output = self
            .command(program)
            .args(args)
            .output()
            .map_err(Error::io(line()))?;
        checked(line(), output)
    }

    /// The processes on the node now, without the holder.
    pub fn processes(&self) -> Vec<Process> {
        let mut found = self.net.processes();
        found.retain(|p| p.pid != self.holder.id());
        found
    }

    /// Kills all processes on the node, and returns them.
    pub fn kill_all(&self) -> Vec<Process> {
        self.net.kill_all(&[self.holder.id()])
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.kill_all();
        release(&mut self.holder);
    }
}

/// Ends a holder, and with it its namespaces.
pub(crate) fn release(holder: &mut Child) {
    if let Some(mut stdin) = holder.stdin.take() {
        // The holder may be dead already; then its namespaces are gone as well.
        let _ = stdin.write_all(b"over\n");
    }
    let _ = holder.wait();
}

/// `PATH` of the lab's own commands.
pub(crate) const SYSTEM_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Starts a holder in new namespaces.
pub(crate) fn hold(name: &str, hosts: &Path) -> Result<Child> {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", HOLDER, "holder", name]).arg(hosts);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.env_clear().env("PATH", SYSTEM_PATH);
    let flags = CloneFlags::CLONE_NEWNET
        | CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWIPC;
    // SAFETY: two system calls between fork and exec, no allocation and no lock.
    unsafe {
        command.pre_exec(move || {
            // A session of its own: an interrupt typed at the terminal must not end the holder before
            // the program that cleans up.
            setsid()?;
            Ok(unshare(flags)?)
        });
    }
    command
        .spawn()
        .map_err(Error::io(format!("start the holder of {name}")))
}

/// Waits until the holder has set its namespaces up.
pub(crate) fn ready(holder: &mut Child, name: &str) -> Result<()> {
    let mut line = String::new();
    let stdout = holder
        .stdout
        .take()
        .expect("the holder was started with a pipe");
    // If the script fails it exits, which closes the pipe, so this read cannot hang.
    BufReader::new(stdout)
        .read_line(&mut line)
        .map_err(Error::io(format!("holder of {name}")))?;
    if line.trim() == "ready" {
        return Ok(());
    }
    let mut said = String::new();
    let stderr = holder
        .stderr
        .take()
        .expect("the holder was started with a pipe");
    BufReader::new(stderr)
        .read_to_string(&mut said)
        .map_err(Error::io(format!("holder of {name}")))?;
    Err(Error::Command {
        command: format!("set up {name}"),
        outcome: said.trim().to_owned(),
    })
}
