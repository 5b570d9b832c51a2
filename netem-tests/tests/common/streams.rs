//! A server and a client with many connections, on two nodes.

use std::{path::PathBuf, process::Command, time::Duration};

use super::events::events_dir;
use slim_lab::{Lab, Node, artifacts, output::Running};

/// Parameters of a pair of programs.
#[derive(Clone, Debug)]
pub struct Streams {
    pub connections: usize,
    pub seconds: f64,
    pub kib: usize,
    /// Preload library at the server and at the client.
    pub preload: [Option<PathBuf>; 2],
    /// Further environment variables for both programs.
    pub env: Vec<(String, String)>,
}

/// The two programs while they run.
pub struct Pair {
    pub server: Running,
    pub client: Running,
}

/// How one program ended.
#[derive(Clone, Debug)]
pub struct End {
    /// Exit status; `None` if it hung.
    pub code: Option<i32>,
    pub lines: Vec<String>,
}

impl Streams {
    pub fn bare(connections: usize, seconds: f64, kib: usize) -> Self {
        Streams {
            connections,
            seconds,
            kib,
            preload: [None, None],
            env: Vec::new(),
        }
    }

    /// With SLIM at both ends.
    pub fn slim(mut self) -> Self {
        let library = artifacts::preload().expect("the preload library");
        self.preload = [Some(library.clone()), Some(library)];
        self
    }

    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// Starts the server on the second node and the client on the first, and waits until all connections exist.
    pub fn start(&self, lab: &Lab) -> Pair {
        let address = format!("{}:7000", lab.node(1).address(0));
        let server = Running::start(self.command(lab, lab.node(1), "server", &address))
            .expect("start the server");
        assert!(
            server.wait_line(Duration::from_secs(20), |l| l == "READY"),
            "{:?}",
            server.lines()
        );
        let client = Running::start(self.command(lab, lab.node(0), "client", &address))
            .expect("start the client");
        let pair = Pair { server, client };
        for program in [&pair.server, &pair.client] {
            let running = program.wait_line(Duration::from_secs(60), |l| l.starts_with("RUNNING"));
            assert!(
                running,
                "{:?} {:?}",
                pair.server.lines(),
                pair.client.lines()
            );
        }
        pair
    }

    fn command(&self, lab: &Lab, node: &Node, role: &str, address: &str) -> Command {
        let mut command = node.command(env!("CARGO_BIN_EXE_slim-lab-stream"));
        command.args([role, address]);
        command.args([
            self.connections.to_string(),
            self.seconds.to_string(),
            self.kib.to_string(),
        ]);
        let preload = &self.preload[usize::from(role == "client")];
        if let Some(library) = preload {
            command.env("LD_PRELOAD", library);
            command.env("SLIM_EVENTS", events_dir(lab).join("%h.%p.jsonl"));
        }
        command.envs(self.env.iter().map(|(n, v)| (n, v)));
        command
    }
}

impl Pair {
    /// Waits for both programs. Returns the ends of (server, client).
    pub fn wait(mut self, limit: Duration) -> (End, End) {
        let client = end(&mut self.client, limit);
        let server = end(&mut self.server, Duration::from_secs(5));
        (server, client)
    }
}

/// Waits for the end of one program.
pub fn end(program: &mut Running, limit: Duration) -> End {
    let status = program.wait(limit);
    let lines = program.lines().into_iter().map(|l| l.text).collect();
    End {
        code: status.map(|s| s.code().unwrap_or(-1)),
        lines,
    }
}

impl End {
    /// A number in the closing line (`DONE conns=.. bytes=.. errs=.. failed=..`).
    pub fn number(&self, name: &str) -> Option<u64> {
        let done = self.lines.iter().find(|l| l.starts_with("DONE"))?;
        done.split_whitespace()
            .find_map(|w| w.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
    }

    /// Asserts that every byte of every connection arrived.
    pub fn assert_whole(&self, what: &str, streams: &Streams) {
        let tail = &self.lines[self.lines.len().saturating_sub(10)..];
        assert_eq!(self.code, Some(0), "{what}: {tail:#?}");
        assert_eq!(self.number("errs"), Some(0), "{what}: {tail:#?}");
        let bytes = (streams.connections * streams.kib * 1024) as u64;
        assert_eq!(self.number("bytes"), Some(bytes), "{what}: {tail:#?}");
    }
}
