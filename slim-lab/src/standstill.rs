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
