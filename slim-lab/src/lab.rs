//! Labs: nodes joined by paths. One call makes a lab; dropping it removes everything.

use std::{
    fs,
    net::Ipv4Addr,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Child,
    thread,
    time::{Duration, Instant},
};

use tempfile::TempDir;

use crate::{
    Error, Netns, Node, Result,
    netns::privileged,
    node::{SYSTEM_PATH, hold, ready, release},
};

/// Most nodes in one lab: their names run from `nodeA` to `nodeZ`.
pub const MAX_NODES: usize = 26;
/// Most paths between nodes.
pub const MAX_PATHS: usize = 8;

/// If this variable is set, the directory of a lab that ends in a panic is kept.
pub const KEEP_VAR: &str = "SLIM_LAB_KEEP";

/// How long a link may take to come up. The kernel reports a link up to a second late.
const LINK_UP: Duration = Duration::from_secs(10);

/// A set of nodes that can reach each other. See the crate's documentation.
#[derive(Debug)]
pub struct Lab {
    // Field order matters: nodes with their processes are dropped first, then the switch, then the files.
    nodes: Vec<Node>,
    _switch: Option<Switch>,
    paths: usize,
    name: String,
    dir: TempDir,
}

/// Configuration of a lab.
#[derive(Clone, Debug)]
pub struct LabBuilder {
    nodes: usize,
    paths: usize,
    name: String,
}

impl Lab {
    /// A builder, set to two nodes and one path.
    pub fn builder() -> LabBuilder {
        LabBuilder {
            nodes: 2,
            paths: 1,
            name: "lab".into(),
        }
    }

    /// Checks that labs can be made here.
    pub fn check() -> Result<()> {
        if !privileged() {
            return Err(Error::NeedsRoot);
        }
        let tried: Vec<_> = SYSTEM_PATH
            .split(':')
            .map(|dir| Path::new(dir).join("ip"))
            .collect();
        if tried.iter().any(|ip| ip.exists()) {
            return Ok(());
        }
        Err(Error::Missing {
            what: "the program ip".into(),
            tried,
            hint: "install the package iproute2 (scripts/setup does)".into(),
        })
    }

    /// Node `index`; 0 is `nodeA`. Panics if there is none: the caller chose the number of nodes.
    pub fn node(&self, index: usize) -> &Node {
        &self.nodes[index]
    }

    /// All nodes.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Number of paths between the nodes.
    pub fn paths(&self) -> usize {
        self.paths
    }

    /// Makes the nodes send packets as a network carries them, so that rules see their lengths: one segment each, instead of up to 64 KiB that
    /// the kernel would only divide on its way to a real network. Connections that exist already may go on as before.
    pub fn send_single_segments(&self) -> Result<()> {
        for node in &self.nodes {
            for path in 0..self.paths {
                let interface = node.interface(path);
                let words = ["link", "set", "dev", &interface, "gso_max_segs", "1"];
                node.net().exec("ip", &words)?;
            }
        }
        Ok(())
    }

    /// The name given to the builder, made unique.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Address `n` on path `path` that no node has from the beginning; none if there are not so many.
    pub fn spare_address(&self, path: usize, n: usize) -> Option<Ipv4Addr> {
        let last = u8::try_from(n + 100).ok().filter(|last| *last < 255)?;
        Some(Ipv4Addr::new(10, 77 + path as u8, 0, last))
    }

    /// A directory that lives as long as the lab.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Keeps the lab's directory when the lab ends, for inspection. Returns its path.
    pub fn keep_dir(&mut self) -> &Path {
        self.dir.disable_cleanup(true);
        eprintln!("kept: {}", self.dir.path().display());
        self.dir()
    }

    /// The network of path `path` as `ADDRESS/BITS`, for options such as `btl_tcp_if_include`.
    pub fn subnet(&self, path: usize) -> String {
        format!("10.{}.0.0/24", 77 + path)
    }
}

impl LabBuilder {
    /// Number of nodes, 1 to [`MAX_NODES`]. More than two are joined by a switch.
    pub fn nodes(mut self, nodes: usize) -> Self {
        self.nodes = nodes;
        self
    }

    /// Number of paths between the nodes, 1 to [`MAX_PATHS`].
    pub fn paths(mut self, paths: usize) -> Self {
        self.paths = paths;
        self
    }

    /// A word for the lab's directory and messages.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Makes the lab and waits until every link is up. A failed build leaves nothing behind.
    pub fn build(self) -> Result<Lab> {
        if !(1..=MAX_NODES).contains(&self.nodes) || !(1..=MAX_PATHS).contains(&self.paths) {
            return Err(Error::Invalid(format!(
                "a lab has 1 to {MAX_NODES} nodes and 1 to {MAX_PATHS} paths, not {} and {}",
                self.nodes, self.paths
            )));
        }
        Lab::check()?;
        let dir = directory(&self.name)?;
        let name = dir
            .path()
            .file_name()
            .map(|n| n.to_string_lossy().into_owned())
            .unwrap_or_default();
        let hosts = self.write_hosts(dir.path())?;
        let nodes = (0..self.nodes)
            .map(|n| Node::start(&node_name(n), dir.path(), &hosts, self.addresses(n)))
            .collect::<Result<Vec<_>>>()?;
        let switch = if self.nodes > 2 {
            Some(Switch::start(&hosts, self.paths)?)
        } else {
            None
        };
        let lab = Lab {
            nodes,
            _switch: switch,
            paths: self.paths,
            name,
            dir,
        };
        for path in 0..lab.paths {
            lab.connect(path)?;
        }
        lab.wait_up()?;
        Ok(lab)
    }

    fn addresses(&self, node: usize) -> Vec<Ipv4Addr> {
        (0..self.paths).map(|path| address(path, node)).collect()
    }

    fn write_hosts(&self, dir: &Path) -> Result<PathBuf> {
        let mut text = "127.0.0.1 localhost\n".to_owned();
        for node in 0..self.nodes {
            text.push_str(&format!("{} {}\n", address(0, node), node_name(node)));
        }
        let path = dir.join("hosts");
        fs::write(&path, text).map_err(Error::io(path.display().to_string()))?;
        Ok(path)
    }
}

impl Lab {
    /// Joins all nodes by path `path`.
    fn connect(&self, path: usize) -> Result<()> {
        let name = interface(path);
        match (self.nodes.as_slice(), &self._switch) {
            ([a, b], _) => veth(a.net(), &name, b.holder(), &name)?,
            (nodes, Some(switch)) => {
                for (n, node) in nodes.iter().enumerate() {
                    let port = format!("port{path}-{n}");
                    veth(node.net(), &name, switch.holder.id(), &port)?;
                    let bridge = bridge(path);
                    switch
                        .net
                        .exec("ip", &["link", "set", &port, "master", &bridge, "up"])?;
                }
            }
            _ => return Ok(()),
        }
        for node in &self.nodes {
            let address = format!("{}/24", node.address(path));
            node.net()
                .exec("ip", &["addr", "add", &address, "dev", &name])?;
            node.net().exec("ip", &["link", "set", &name, "up"])?;
        }
        Ok(())
    }

    /// Waits until the state of every path's interface on every node is `up`: some libraries skip an
    /// interface in another state.
    fn wait_up(&self) -> Result<()> {
        if self.nodes.len() < 2 {
            return Ok(());
        }
        let start = Instant::now();
        for node in &self.nodes {
            for path in 0..self.paths {
                while operstate(node, path) != "up" {
                    if start.elapsed() > LINK_UP {
                        let what = format!("{} of {} up", interface(path), node.name());
                        return Err(Error::Timeout {
                            what,
                            after: LINK_UP,
                        });
                    }
                    thread::sleep(Duration::from_millis(20));
                }
            }
        }
        Ok(())
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        // Keep the event logs and configurations of a failed test for inspection.
        if thread::panicking() && std::env::var_os(KEEP_VAR).is_some() {
            self.keep_dir();
        }
    }
}

/// The kernel's word for the state of a node's interface (`up`, `down`, `lowerlayerdown`).
pub fn operstate(node: &Node, path: usize) -> String {
    // Read through the holder's root, because sysfs shows the interfaces of the namespace that mounted it.
    let file = format!(
        "/proc/{}/root/sys/class/net/{}/operstate",
        node.holder(),
        interface(path)
    );
    fs::read_to_string(file)
        .map(|s| s.trim().to_owned())
        .unwrap_or_default()
}

/// Name of the interface of path `path`, the same in every node.
pub(crate) fn interface(path: usize) -> String {
    format!("path{path}")
}

fn bridge(path: usize) -> String {
    format!("switch{path}")
}

fn address(path: usize, node: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 77 + path as u8, 0, 1 + node as u8)
}

fn node_name(node: usize) -> String {
    format!("node{}", (b'A' + node as u8) as char)
}

/// Makes a pair of interfaces, `name` in `net` and `peer` in the namespace of process `pid`.
fn veth(net: &Netns, name: &str, pid: u32, peer: &str) -> Result<()> {
    let pid = pid.to_string();
    let args = [
        "link", "add", name, "type", "veth", "peer", "name", peer, "netns", &pid,
    ];
    net.exec("ip", &args).map(drop)
}

/// A namespace with one bridge per path, for labs of more than two nodes.
#[derive(Debug)]
struct Switch {
    holder: Child,
    net: Netns,
}

impl Switch {
    fn start(hosts: &Path, paths: usize) -> Result<Self> {
        let mut holder = hold("switch", hosts)?;
        ready(&mut holder, "switch")?;
        let net = Netns::of_process(holder.id())?;
        let switch = Switch { holder, net };
        for path in 0..paths {
            let name = bridge(path);
            switch
                .net
                .exec("ip", &["link", "add", &name, "type", "bridge"])?;
            switch.net.exec("ip", &["link", "set", &name, "up"])?;
        }
        Ok(switch)
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        release(&mut self.holder);
    }
}

/// A new directory for the lab's files. Programs of other users may read it.
fn directory(name: &str) -> Result<TempDir> {
    let word: String = name
        .chars()
        .filter(|c| c.is_ascii_alphanumeric() || *c == '-')
        .collect();
    tempfile::Builder::new()
        .prefix(&format!("slim-{word}-"))
        .permissions(fs::Permissions::from_mode(0o755))
        .tempdir()
        .map_err(Error::io("make a directory for the lab"))
}
