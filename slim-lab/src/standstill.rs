//! Records the state of a job that has hung, before it is killed.

use std::{fmt::Write, fs, io, process::Command};

use crate::{Lab, Node, Process};

/// Name of the file in the lab's directory.
pub const FILE: &str = "standstill";

/// Writes the state of all connections and processes of the lab, and the kernel's latest messages, into [`FILE`]. It can be read
/// if the directory is [kept](crate::lab::KEEP_VAR). The stacks of all threads are included if gdb is installed.
pub fn record(lab: &Lab) -> io::Result<()> {
    let mut text: String = lab.nodes().iter().map(describe).collect();
    text += &kernel();
    fs::write(lab.dir().join(FILE), text)
}

/// Whether a recorded job waits for Open MPI itself: a process of `program` that has no SLIM yet (SLIM's agent is a thread) has sent a
/// request, and its launcher has not read it. Such a process is in `PMIx_Init` (docs/OPENMPI.md says how often that happens).
pub fn waits_for_launcher(record: &str, program: &str) -> bool {
    record.split("==== ").any(|node| {
        let mut parts = node.split("\n---- ");
        let connections = parts.next().unwrap_or_default();
        let mut pids = parts.filter_map(|process| {
            let (pid, threads) = process.strip_prefix(program)?.split_once('\n')?;
            (!threads.contains(" slim-agent ")).then(|| pid.trim())
        });
        pids.any(|pid| has_unread(connections, pid))
    })
}

/// Whether one of these connections, as `ss` prints them, has process `pid` at one end and unread bytes at the other.
fn has_unread(connections: &str, pid: &str) -> bool {
    // Each line: kind, state, unread bytes, unsent bytes, own address, peer's address, owner.
    let lines = connections
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>());
    let all: Vec<_> = lines.filter(|words| words.len() > 6).collect();
    let owner = format!("pid={pid},");
    let mut own = all.iter().filter(|words| words[6].contains(&owner));
    own.any(|own| {
        let mut others = all.iter();
        others.any(|other| (other[4], other[5]) == (own[5], own[4]) && other[2] != "0")
    })
}

/// The kernel's latest messages. A "workqueue lockup" means that the kernel has starved its own workers: then the network of the
/// whole machine hangs, not only this job.
fn kernel() -> String {
    let mut text = String::from("==== the kernel\n");
    match Command::new("dmesg").arg("--time-format=iso").output() {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stdout);
            let lines: Vec<_> = said.lines().collect();
            for line in &lines[lines.len().saturating_sub(60)..] {
                let _ = writeln!(text, "{line}");
            }
        }
        Err(error) => {
            let _ = writeln!(text, "no messages: {error}");
        }
    }
    text
}

fn describe(node: &Node) -> String {
    let connections = node.exec("ss", &["-tunoiep"]);
    let mut text = format!("==== {}\n", node.name());
    text += &connections.unwrap_or_else(|error| format!("no connections: {error}\n"));
    for process in node.processes() {
        let _ = writeln!(text, "---- {} {}", process.name, process.pid);
        text += &threads(&process);
        text += &stacks(&process).unwrap_or_else(|error| format!("no stacks: {error}\n"));
    }
    text
}

/// One line for each thread: id, name, state, and the kernel function in which it waits.
fn threads(process: &Process) -> String {
    let Ok(tasks) = fs::read_dir(format!("/proc/{}/task", process.pid)) else {
        return String::new();
    };
    let read = |path: String| fs::read_to_string(path).unwrap_or_default();
    tasks
        .flatten()
        .map(|task| {
            let path = task.path().display().to_string();
            let (name, stat) = (read(format!("{path}/comm")), read(format!("{path}/stat")));
            let state = stat.rsplit(')').next().and_then(|s| s.trim().get(..1));
            let wchan = read(format!("{path}/wchan"));
            let id = task.file_name();
            format!("{id:?} {} {} {wchan}\n", name.trim(), state.unwrap_or("?"))
        })
        .collect()
}

fn stacks(process: &Process) -> io::Result<String> {
    let output = Command::new("timeout")
        .args(["20", "gdb", "-batch", "-ex", "thread apply all bt"])
        // A rank that uses the native component prints its state. All others lack the function: gdb says so.
        .args(["-ex", "call (void)slim_btl_print()", "-p"])
        .arg(process.pid.to_string())
        .output()?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is recorded of a job whose spawned process, 3502, is in `PMIx_Init`. `unread`: the bytes that `mpirun` has not read.
    fn record(unread: u32, thread_of_spawned: &str) -> String {
        format!(
            "==== nodeA
Netid State      Recv-Q Send-Q Local Address:Port  Peer Address:Port Process
tcp   CLOSE-WAIT 9      0          10.77.0.1:56002    10.77.0.2:38039 users:((\"slim_kinds\",pid=3472,fd=4118)) ino:6328962
\t ts sack bbr wscale:10,10 rto:204 rtt:0.27/0.456 ato:40 mss:1448
tcp   ESTAB      {unread:<6} 0          127.0.0.1:42885    127.0.0.1:38840 users:((\"mpirun.openmpi\",pid=3450,fd=27)) ino:6328999
tcp   ESTAB      0      0          127.0.0.1:38840    127.0.0.1:42885 users:((\"slim_kinds\",pid=3502,fd=14)) ino:6330709
---- mpirun.openmpi 3450
\"3450\" mpirun.openmpi S poll_schedule_timeout.constprop.0
---- slim_kinds 3472
\"3472\" slim_kinds S futex_do_wait
\"3479\" slim-agent S do_epoll_wait
---- slim_kinds 3502
\"3502\" slim_kinds S futex_do_wait
\"3503\" {thread_of_spawned} S do_epoll_wait
#4  0x00007f49ee28be74 in run () at slim-agent/src/thread.rs:88
==== nodeB
Netid State      Recv-Q Send-Q Local Address:Port  Peer Address:Port Process
---- slim_kinds 3473
\"3473\" slim_kinds R 0
"
        )
    }

    #[test]
    fn a_process_without_slim_whose_request_is_unread_waits_for_the_launcher() {
        assert!(waits_for_launcher(&record(18, "slim_kinds"), "slim_kinds"));
        assert!(!waits_for_launcher(
            &record(18, "slim_kinds"),
            "slim_dynamic"
        ));
        assert!(!waits_for_launcher(&record(0, "slim_kinds"), "slim_kinds"));
        assert!(!waits_for_launcher(&record(18, "slim-agent"), "slim_kinds"));
        assert!(!waits_for_launcher("", "slim_kinds"));
    }
}
