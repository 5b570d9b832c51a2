//! Adapters of RDMA: lists them, takes their ports down, and deletes soft ones (rxe).

use std::{
    io::{ErrorKind, PipeReader, PipeWriter, Read, pipe},
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, poll};
use serde::Deserialize;

use super::{
    link::{self, Down},
    watcher::Watcher,
};
use crate::{Error, Netns, Result, netns::checked, node::SYSTEM_PATH};

/// How long to wait for the deletion of an adapter that no process has open, and for its return.
const AT_ONCE: Duration = Duration::from_millis(500);

/// A port of an adapter.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
pub struct AdapterPort {
    /// Name of the adapter.
    #[serde(rename = "ifname")]
    pub device: String,
    /// The interface with the same line; none for InfiniBand.
    pub netdev: Option<String>,
}

/// Runs `rdma`.
pub(super) fn rdma(net: &Netns, words: &[&str]) -> Result<String> {
    let line = format!("rdma {}", words.join(" "));
    let mut command = net.command("rdma");
    command.args(words).env("PATH", SYSTEM_PATH);
    let output = command.output().map_err(|error| match error.kind() {
        ErrorKind::NotFound => Error::Missing {
            what: "the program rdma".into(),
            tried: Vec::new(),
            hint: "install the package iproute2 (scripts/setup does)".into(),
        },
        _ => Error::io(line.clone())(error),
    })?;
    if String::from_utf8_lossy(&output.stderr).contains("NETLINK_RDMA") {
        return Err(Error::Invalid(
            "this kernel has no RDMA: load a driver, such as that of soft RoCE (modprobe rdma_rxe)"
                .into(),
        ));
    }
    checked(line, output)
}

/// How often the adapters are listed anew because one was deleted meanwhile.
const LISTED_AGAIN: usize = 3;

/// All ports of adapters that `net` can use.
pub fn ports(net: &Netns) -> Result<Vec<AdapterPort>> {
    let list = || rdma(net, &["-j", "link", "show"]);
    let mut listed = list();
    for _ in 0..LISTED_AGAIN {
        match &listed {
            Err(error) if one_has_gone(error) => listed = list(),
            _ => break,
        }
    }
    parsed(&listed?, "adapters")
}

/// `rdma` lists the adapters, and then asks the kernel for each: for one that was deleted in between, the kernel says EINVAL.
fn one_has_gone(error: &Error) -> bool {
    matches!(error, Error::Command { outcome, .. } if outcome.contains("Invalid argument"))
}

/// What `rdma -j` has printed, which may be nothing.
pub(super) fn parsed<T: for<'a> Deserialize<'a>>(text: &str, what: &str) -> Result<Vec<T>> {
    match text.trim() {
        "" => Ok(Vec::new()),
        text => serde_json::from_str(text)
            .map_err(|e| Error::Invalid(format!("`rdma` lists {what} in another way: {e}"))),
    }
}

/// The interface of the adapter `device`.
pub fn interface_of(net: &Netns, device: &str) -> Result<String> {
    let all = ports(net)?;
    let found = all.iter().find(|port| port.device == device);
    match found {
        Some(AdapterPort {
            netdev: Some(name), ..
        }) => Ok(name.clone()),
        Some(_) => Err(Error::Invalid(format!(
            "the adapter {device} has no interface of Ethernet"
        ))),
        None => {
            let names: Vec<_> = all.iter().map(|port| port.device.as_str()).collect();
            let names = match names.is_empty() {
                true => "there is none".into(),
                false => names.join(", "),
            };
            Err(Error::Invalid(format!("no adapter {device} ({names})")))
        }
    }
}

/// Checks that the adapter is a soft one of RoCE: only those can be deleted and added.
pub fn check_soft(device: &str) -> Result<()> {
    let adapter = Path::new("/sys/class/infiniband").join(device);
    // Only these have this file, which names their interface.
    if adapter.join("parent").exists() {
        return Ok(());
    }
    if !adapter.exists() {
        return Err(Error::Invalid(format!(
            "there is no adapter {device} now: deleted, and perhaps in use still"
        )));
    }
    Err(Error::Invalid(format!(
        "{device} is not a soft adapter of RoCE (rxe): it cannot be deleted"
    )))
}

/// Guard of a port whose interface is down. Dropping it brings it up again; so does a process of its own if this one is killed.
#[derive(Debug)]
pub struct PortDown {
    // It goes up before the other process looks.
    down: Down,
    watcher: Watcher,
}

/// Takes the interface of the adapter `device` down.
pub fn port_down(net: &Netns, device: &str) -> Result<PortDown> {
    let interface = interface_of(net, device)?;
    if !link::is_up(net, &interface)? {
        return Err(Error::Invalid(format!(
            "the port of {device} is down already: its interface {interface} is"
        )));
    }
    let mut down = Down::prepare(net, &interface)?;
    // Before it is down, for the case that this process is killed at once.
    let watcher = Watcher::start(net, "a port that is down", &down.commands())?;
    down.take(Some(&watcher))?;
    Ok(PortDown { down, watcher })
}

impl PortDown {
    /// Brings the port up again.
    pub fn lift(self) -> Result<()> {
        self.down.lift()?;
        self.watcher.over();
        Ok(())
    }
}

/// What deletes the adapter, and adds it again when its standard input ends: also if the program that has started it is gone.
const DELETE: &str = r#"
trap '' PIPE
rdma link delete "$1" || exit
echo
read -r end
exec rdma link add "$1" type rxe netdev "$2"
"#;

/// Guard of a soft adapter that is deleted. Dropping it adds the adapter again.
///
/// The kernel deletes an adapter only when the last process has closed it. Until then processes that have it open use it as before, and others do not find it.
#[derive(Debug)]
pub struct DeletedAdapter {
    shell: Child,
    /// The shell waits for its end.
    hold: Option<PipeWriter>,
    /// The shell writes to it when the adapter is gone.
    gone: PipeReader,
    /// Whether that was at once.
    at_once: bool,
}

/// Deletes the soft adapter `device`.
pub fn delete(net: &Netns, device: &str) -> Result<DeletedAdapter> {
    let io = || Error::io(format!("delete the adapter {device}"));
    check_soft(device)?;
    let interface = interface_of(net, device)?;
    let (read, hold) = pipe().map_err(io())?;
    let (gone, told) = pipe().map_err(io())?;
    let mut shell = net.command("/bin/sh");
    shell.args(["-c", DELETE, "adapter", device, &interface]);
    shell.env_clear().env("PATH", SYSTEM_PATH);
    // An interrupt typed at the terminal must not end it.
    shell.process_group(0);
    shell.stdin(read).stdout(told).stderr(Stdio::null());
    let child = shell.spawn().map_err(io())?;
    // Its end of the pipe.
    drop(shell);
    let mut deleted = DeletedAdapter {
        shell: child,
        hold: Some(hold),
        gone,
        at_once: false,
    };
    deleted.at_once = deleted.is_gone()?;
    Ok(deleted)
}

impl DeletedAdapter {
    /// Whether the adapter was gone at once. If not, processes have it open.
    pub fn was_free(&self) -> bool {
        self.at_once
    }

    /// Waits a moment until it is gone, because no process has it open. To be called once.
    fn is_gone(&mut self) -> Result<bool> {
        let mut fds = [PollFd::new(&self.gone, PollFlags::IN)];
        let wait = AT_ONCE.try_into().expect("a short time");
        let ready =
            poll(&mut fds, Some(&wait)).map_err(|e| Error::io("wait for a deletion")(e.into()))?;
        if ready == 0 {
            return Ok(false);
        }
        // The end of the pipe without a word: the command has failed.
        let told = self
            .gone
            .read(&mut [0])
            .map_err(Error::io("read from `rdma`"))?;
        match told {
            0 => Err(Error::Invalid("`rdma link delete` failed".into())),
            _ => Ok(true),
        }
    }

    /// Adds the adapter again, as soon as it is gone. Returns whether it is there again; if not, processes still have it open.
    pub fn lift(mut self) -> Result<bool> {
        self.hold = None;
        let begun = Instant::now();
        while begun.elapsed() < AT_ONCE {
            if let Some(status) = self
                .shell
                .try_wait()
                .map_err(Error::io("wait for `rdma`"))?
            {
                return match status.success() {
                    true => Ok(true),
                    false => Err(Error::Invalid(format!("`rdma` failed: {status}"))),
                };
            }
            thread::sleep(Duration::from_millis(5));
        }
        Ok(false)
    }
}
