//! Two adapters of soft RoCE, one at each end of a pair of interfaces. To be made in a guest: they are of its first network namespace.

use std::{
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use slim_lab::skip::skip;
use slim_rdma::ibverbs::{PortSettings, VerbsAdapter};

/// Names of the adapters.
pub const DEVICES: [&str; 2] = ["rx1", "rx2"];

/// Both addresses are of this host, so the kernel would not use the line: rules send the packets there, and a line that is down does not
/// make them take the short way.
const MAKE: &str = r#"
ip link add v1 address 02:00:00:00:00:01 type veth peer name v2 address 02:00:00:00:00:02
for i in all v1 v2; do
  echo 1 > /proc/sys/net/ipv4/conf/$i/accept_local
  echo 0 > /proc/sys/net/ipv4/conf/$i/rp_filter
done
ip addr add 10.1.0.1/24 dev v1
ip addr add 10.1.0.2/24 dev v2
ip link set v1 mtu 9000 up
ip link set v2 mtu 9000 up
ip rule add pref 10 iif lo to 10.1.0.1 lookup 11
ip rule add pref 10 iif lo to 10.1.0.2 lookup 12
ip rule add pref 100 lookup local
ip rule del pref 0
ip route add unreachable default metric 9999 table 11
ip route add unreachable default metric 9999 table 12
"#;

/// What is lost when a link goes down.
const FORWARD: &str = r#"
ip neigh replace 10.1.0.2 lladdr 02:00:00:00:00:02 dev v1 nud permanent
ip neigh replace 10.1.0.1 lladdr 02:00:00:00:00:01 dev v2 nud permanent
ip route replace 10.1.0.1 dev v2 src 10.1.0.2 table 11
ip route replace 10.1.0.2 dev v1 src 10.1.0.1 table 12
"#;

/// The two adapters.
pub struct Rxe(());

/// Runs lines of the shell.
pub fn shell(lines: &str) {
    let output = Command::new("sh").args(["-e", "-c", lines]).output();
    let output = output.unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{lines}: {said}");
}

impl Rxe {
    /// Makes them. `None`, with the skip and its reason printed, if this kernel has no verbs.
    pub fn make(test: &str) -> Option<Self> {
        let rxe = Self::in_kernel(test)?;
        rxe.wait_for_addresses();
        Some(rxe)
    }

    /// An address takes some moments to become an identifier.
    pub fn wait_for_addresses(&self) {
        let begin = Instant::now();
        while [0, 1].iter().any(|side| {
            VerbsAdapter::open(&self.settings(*side)).map_or(true, |a| a.gid()[10..12] != [0xff; 2])
        }) {
            assert!(begin.elapsed() < Duration::from_secs(5), "no identifier");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// The kernel has them. Whether libibverbs can use them is not looked at.
    pub fn in_kernel(test: &str) -> Option<Self> {
        if !Path::new("/sys/class/infiniband").is_dir() {
            skip(
                test,
                "the guest's kernel has no soft RoCE; scripts/netem-kernel (run by scripts/setup) makes one that has",
            );
            return None;
        }
        shell(MAKE);
        shell(FORWARD);
        let rxe = Rxe(());
        for side in [0, 1] {
            rxe.link(side);
        }
        Some(rxe)
    }

    fn link(&self, side: usize) {
        let (device, number) = (DEVICES[side], side + 1);
        shell(&format!("rdma link add {device} type rxe netdev v{number}"));
    }

    /// Makes the adapter of a side again, after it was deleted.
    pub fn add(&self, side: usize) {
        self.link(side);
        self.wait_for_addresses();
    }

    /// Settings for the adapter of a side. A peer that has posted no receive breaks the queue pair.
    pub fn settings(&self, side: usize) -> PortSettings {
        PortSettings {
            device: Some(DEVICES[side].into()),
            not_ready_retries: 0,
            ..PortSettings::default()
        }
    }

    /// Opens both.
    pub fn open(&self) -> [VerbsAdapter; 2] {
        [0, 1].map(|side| {
            let adapter = VerbsAdapter::open(&self.settings(side));
            adapter.unwrap_or_else(|e| panic!("{e}"))
        })
    }

    /// The interface of a side goes down.
    pub fn down(&self, side: usize) {
        shell(&format!("ip link set v{} down", side + 1));
    }

    /// It comes up again.
    pub fn up(&self, side: usize) {
        shell(&format!("ip link set v{} up", side + 1));
        shell(FORWARD);
    }

    /// Both directions of the line are like this (options of netem), until [`plain`](Self::plain).
    pub fn line(&self, netem: &str) {
        for interface in ["v1", "v2"] {
            shell(&format!(
                "tc qdisc replace dev {interface} root netem {netem}"
            ));
        }
    }

    /// The line is as before.
    pub fn plain(&self) {
        for interface in ["v1", "v2"] {
            shell(&format!("tc qdisc del dev {interface} root"));
        }
    }

    /// The line is as before, and has a link, whatever has happened to it.
    pub fn heal(&self) {
        for interface in ["v1", "v2"] {
            shell(&format!(
                "tc qdisc del dev {interface} root 2> /dev/null || true; ip link set {interface} up"
            ));
        }
        shell(FORWARD);
    }
}
