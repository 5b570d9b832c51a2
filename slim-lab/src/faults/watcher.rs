//! Removes a fault when the program that made it is gone.
//!
//! A shell waits for the end of a pipe that the program holds. Then it removes the fault, unless the program has said that it is over.

use std::{
    io::{PipeWriter, Write, pipe},
    os::{fd::OwnedFd, unix::process::CommandExt},
    process::{Child, Command, Stdio},
};

use crate::{Error, Netns, Result, node::SYSTEM_PATH};

/// The watcher's script; its argument is what to do then. The network namespace is its standard output.
const WATCHER: &str = r#"
read -r end
[ "$end" = over ] && exit
eval "$1"
"#;

/// A watcher. When this is dropped, it removes the fault, unless [`over`](Self::over) has been called.
#[derive(Debug)]
pub struct Watcher {
    child: Child,
    /// The pipe whose end the watcher waits for.
    alive: Option<PipeWriter>,
}

impl Watcher {
    /// Starts a watcher that removes a fault of `net` by `commands`, lines for a shell in which `inside` stands before each command
    /// that has to run in the namespace. `what` is for messages.
    pub fn start(net: &Netns, what: &str, commands: &str) -> Result<Self> {
        let io = || Error::io(format!("watch {what}"));
        let (read, alive) = pipe().map_err(io())?;
        let mut shell = Command::new("/bin/sh");
        let commands = commands.replace("inside ", "nsenter --net=/proc/self/fd/1 ");
        shell.args(["-c", WATCHER, "watcher", &commands]);
        shell.env_clear().env("PATH", SYSTEM_PATH);
        // An interrupt typed at the terminal must not end it. It is not in the namespace, so nobody takes it for a process of a job there.
        shell.process_group(0);
        let namespace = net.descriptor().map_err(io())?;
        shell.stdin(read).stdout(namespace).stderr(Stdio::null());
        Ok(Watcher {
            child: shell.spawn().map_err(io())?,
            alive: Some(alive),
        })
    }

    /// Gives the pipe to a command that makes the fault, as its standard input: so the watcher acts after it.
    pub fn outlives(&self, command: &mut Command) -> Result<()> {
        if let Some(alive) = &self.alive {
            let alive = alive
                .try_clone()
                .map_err(Error::io("duplicate a watcher's pipe"))?;
            command.stdin(OwnedFd::from(alive));
        }
        Ok(())
    }

    /// The fault is over: nothing is left to remove.
    pub fn over(mut self) {
        if let Some(mut alive) = self.alive.take() {
            // It may be dead already.
            let _ = alive.write_all(b"over\n");
        }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        drop(self.alive.take());
        let _ = self.child.wait();
    }
}

/// A word for a shell.
pub fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', "'\\''"))
}
