//! `slim chaos` and `slim demo` as programs.

mod common;

use common::{Scratch, assert_refused, output, slim};
use rustix::process::{Pid, Signal, kill_process};
use slim_lab::{Lab, faults::netem::Netem, skip::skip};

#[test]
fn bad_plans_are_refused_in_one_line() {
    let scratch = Scratch::new("plans");
    let refused = |text: &str, words: &[&str]| {
        let plan = scratch.write("plan.toml", text);
        assert_refused(slim().arg("chaos").arg(plan).args(["--", "true"]), words);
    };
    refused("", &["plan.toml", "no [[fault]]"]);
    refused(
        "[[fault]]\nkind = \"fire\"\n",
        &["plan.toml", "line 2", "fire"],
    );
    refused(
        "[[fault]]\nkind = \"kill\"\nevery = [2, 1]\n",
        &["upside down"],
    );
    refused("sede = 1\n[[fault]]\nkind = \"kill\"\n", &["sede"]);
    assert_refused(
        slim().args(["chaos", "/no/plan.toml", "--", "true"]),
        &["/no/plan.toml"],
    );
}

/// Without netem in the kernel, a plan that needs it is refused before anything is made, with a line that says what to do.
#[test]
fn a_kernel_without_netem_is_named() {
    let test = "a_kernel_without_netem_is_named";
    if let Err(reason) = Lab::check() {
        return skip(test, reason);
    }
    if Netem::default().check().is_ok() {
        return skip(test, "this kernel has netem");
    }
    let scratch = Scratch::new("netem");
    let plan = scratch.write(
        "plan.toml",
        "[[fault]]\nkind = \"kill\"\n[[fault]]\nkind = \"netem\"\nnetem = { loss = \"2%\" }\n",
    );
    let mark = scratch.path("mark");
    assert_refused(
        slim()
            .arg("chaos")
            .arg(plan)
            .args(["--", "touch"])
            .arg(&mark),
        &[
            "fault 2 (netem)",
            "has no netem",
            "modprobe sch_netem",
            "or use a machine",
        ],
    );
    assert!(!mark.exists(), "the command was run");
}

#[test]
fn a_plan_needs_something_to_hit() {
    let scratch = Scratch::new("nothing");
    let plan = scratch.write("plan.toml", "[[fault]]\nkind = \"kill\"\n");
    assert_refused(slim().arg("chaos").arg(&plan), &["command", "--pid"]);
    let both = ["--pid", "1", "--", "true"];
    assert_eq!(output(slim().arg("chaos").arg(&plan).args(both)).0, 2);
}

#[test]
fn missing_privileges_are_named() {
    if Lab::check().is_err() {
        let scratch = Scratch::new("privilege");
        let plan = scratch.write("plan.toml", "[[fault]]\nkind = \"kill\"\n");
        assert_refused(
            slim().arg("chaos").arg(plan).args(["--", "true"]),
            &["root"],
        );
        assert_refused(slim().arg("demo"), &["root"]);
        return;
    }
    // As root: run the child without privileges.
    let mut command = std::process::Command::new("setpriv");
    command.args([
        "--bounding-set=-all",
        "--inh-caps=-all",
        env!("CARGO_BIN_EXE_slim"),
        "demo",
    ]);
    assert_refused(&mut command, &["CAP_NET_ADMIN", "run as root"]);
}

#[test]
fn a_pid_that_does_not_exist_is_named() {
    if let Err(reason) = Lab::check() {
        return skip("a_pid_that_does_not_exist_is_named", reason);
    }
    let scratch = Scratch::new("nobody");
    let plan = scratch.write("plan.toml", "[[fault]]\nkind = \"kill\"\n");
    // Above the largest process id of Linux.
    assert_refused(
        slim().arg("chaos").arg(plan).args(["--pid", "4194305"]),
        &["no process 4194305"],
    );
}

/// The plan kills a connection between two nodes, and the report has it.
#[test]
fn a_command_in_a_lab_loses_its_connection() {
    if let Err(reason) = Lab::check() {
        return skip("a_command_in_a_lab_loses_its_connection", reason);
    }
    let scratch = Scratch::new("lab");
    let plan = scratch.write(
        "plan.toml",
        "seed = 5\n[[fault]]\nkind = \"kill\"\nstart = 0.2\nevery = 0.2\nprocess = \"python3\"\n\
         [[fault]]\nkind = \"drop\"\nstart = 0.3\nlasts = 0.2\nnode = \"nodeB\"\n",
    );
    // A server and a client on the two nodes. The client's read fails when the connection is killed.
    let agent = slim_lab::artifacts::program("slim-lab-agent");
    let Ok(agent) = agent else {
        return skip(
            "a_command_in_a_lab_loses_its_connection",
            "slim-lab-agent is not built",
        );
    };
    let server = scratch.write(
        "server.py",
        "import socket\ns=socket.create_server(('',7000))\nprint('ready',flush=True)\n\
         c,_=s.accept()\ntry:\n  c.recv(1)\nexcept OSError as e: print('server:',e.errno,flush=True)\n",
    );
    let client = scratch.write(
        "client.py",
        "import socket,sys,time\nfor n in range(50):\n  try: c=socket.create_connection(('nodeB',7000),timeout=10); break\n\
         \x20 except OSError: time.sleep(.1)\ntry: c.recv(1); sys.exit(1)\nexcept OSError as e: print('client:',e.errno,flush=True); time.sleep(.5); sys.exit(9)\n",
    );
    let script = scratch.script(
        "both",
        &format!(
            "/usr/bin/env PYTHONUNBUFFERED=1 \"{}\" nodeB \"$PYTHON {}\" & exec $PYTHON {}",
            agent.display(),
            server.display(),
            client.display()
        ),
    );
    let mut command = slim();
    command
        .env("PYTHON", "/usr/bin/python3")
        .env("SLIM_LAB_ENV", "PYTHON");
    command
        .arg("chaos")
        .arg(plan)
        .args(["--json", "--"])
        .arg(script);
    let (status, out, err) = output(&mut command);
    let json = out.find("{\n").map(|at| &out[at..]).unwrap_or_default();
    let report: serde_json::Value =
        serde_json::from_str(json).unwrap_or_else(|e| panic!("{e}: {out}{err}"));
    assert_eq!(
        (status, report["status"].as_i64()),
        (9, Some(9)),
        "{out}{err}"
    );
    let faults = report["faults"].as_array().unwrap();
    let hit: u64 = faults.iter().filter_map(|f| f["hit"].as_u64()).sum();
    assert_eq!(hit, 1, "{out}");
    assert!(
        faults
            .iter()
            .any(|f| f["kind"] == "drop" && f["lasted"].as_f64() > Some(0.1)),
        "{out}"
    );
    assert!(faults.iter().all(|f| f["failed"] == false), "{out}");
}

/// What the command prints in a lab under this fault. It must succeed.
fn printed_under(test: &str, fault: &str, command: &[&str]) -> Option<String> {
    if let Err(reason) = Lab::check() {
        skip(test, reason);
        return None;
    }
    let scratch = Scratch::new(test);
    let plan = scratch.write("plan.toml", &format!("[[fault]]\n{fault}"));
    let (status, out, err) = output(slim().arg("chaos").arg(plan).arg("--").args(command));
    assert_eq!(status, 0, "{out}{err}");
    Some(out)
}

/// A Python program that prints how long it stood still at most, in seconds.
const GAP: &str = "import time\nlast=begin=time.monotonic(); gap=0\n\
                   while last<begin+2:\n  time.sleep(.01); now=time.monotonic(); gap=max(gap,now-last); last=now\n\
                   print('gap',gap)\n";

fn gap(out: &str) -> f64 {
    let gap = out.lines().find_map(|line| line.strip_prefix("gap "));
    gap.and_then(|gap| gap.parse().ok()).expect("a number")
}

/// A stopped process stands still for as long as the plan says, and goes on.
#[test]
fn a_process_is_stopped_for_a_while() {
    let fault =
        "kind = \"stop\"\nstart = 0.5\nlasts = 0.6\nnode = \"nodeA\"\nprocess = \"python3\"\n";
    let command = ["/usr/bin/python3", "-c", GAP];
    let Some(out) = printed_under("a_process_is_stopped_for_a_while", fault, &command) else {
        return;
    };
    assert!((0.5..1.5).contains(&gap(&out)), "{out}");
}

/// The end of a stop leaves a later one, on the same process, in force.
#[test]
fn stops_of_one_process_may_overlap() {
    let stop = |start: f64| {
        format!(
            "kind = \"stop\"\nstart = {start}\nlasts = 0.8\nnode = \"nodeA\"\nprocess = \"python3\"\n"
        )
    };
    let faults = format!("{}[[fault]]\n{}", stop(0.5), stop(1.0));
    let command = ["/usr/bin/python3", "-c", GAP];
    let Some(out) = printed_under("stops_of_one_process_may_overlap", &faults, &command) else {
        return;
    };
    assert!((1.2..2.0).contains(&gap(&out)), "{out}");
}

/// In an MTU black hole short messages pass, and long ones do not until it is over.
#[test]
fn an_mtu_hole_stops_only_long_packets() {
    let fault = "kind = \"mtu-hole\"\nstart = 0.1\nlasts = 60\nnode = \"nodeB\"\n";
    let ping = |size| format!("ping -c 2 -i 0.2 -W 0.5 -q -s {size} nodeB | grep received");
    let script = format!("sleep 1; {}; {}; true", ping(100), ping(1000));
    let command = ["sh", "-c", &script];
    let Some(out) = printed_under("an_mtu_hole_stops_only_long_packets", fault, &command) else {
        return;
    };
    let received = |n: &str| out.contains(&format!("2 packets transmitted, {n} received"));
    assert!(received("2") && received("0"), "{out}");
}

/// All plans in examples/chaos are valid.
#[test]
fn the_example_plans_are_valid() {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/chaos");
    let mut plans = 0;
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            // Tests of `slim chaos matrix` read these.
            continue;
        }
        slim_cli::chaos::plan::Plan::read(&path).unwrap_or_else(|e| panic!("{e}"));
        plans += 1;
    }
    assert!(plans >= 7, "only {plans} examples");
}

/// And so are those in the document.
#[test]
fn the_documented_plans_are_valid() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/CHAOS.md");
    let text = std::fs::read_to_string(path).unwrap();
    let parts = text.split("```toml\n").skip(1);
    let plans: Vec<_> = parts
        .map(|part| part.split("```").next().unwrap())
        .collect();
    assert_eq!(plans.len(), 2);
    for plan in plans {
        slim_cli::chaos::plan::Plan::parse(plan).unwrap_or_else(|e| panic!("{plan}: {e}"));
    }
}

/// `--pid` kills a connection of that process, and of no other one.
#[test]
fn a_running_process_loses_its_connection() {
    let test = "a_running_process_loses_its_connection";
    if let Err(reason) = Lab::check() {
        return skip(test, reason);
    }
    let scratch = Scratch::new("pid");
    let plan = scratch.write("plan.toml", "[[fault]]\nkind = \"kill\"\nstart = 0\n");
    let program = "import socket,sys\ns=socket.create_server(('127.0.0.1',0))\n\
                   c=socket.create_connection(s.getsockname()); a,_=s.accept()\n\
                   print('ready',flush=True)\ntry: c.recv(1)\nexcept OSError: sys.exit(9)\nsys.exit(9)\n";
    let start = || {
        let mut child = std::process::Command::new("python3")
            .args(["-c", program])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let stdout = child.stdout.take().unwrap();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(stdout), &mut line).unwrap();
        assert_eq!(line, "ready\n");
        child
    };
    let (mut victim, mut other) = (start(), start());
    let mut command = slim();
    command
        .arg("chaos")
        .arg(&plan)
        .args(["--json", "--pid", &victim.id().to_string()]);
    let (status, out, err) = output(&mut command);
    let victims_end = victim.wait().unwrap();
    let spared = other.try_wait().unwrap().is_none();
    other.kill().unwrap();
    other.wait().unwrap();
    assert_eq!((status, err.as_str()), (0, ""));
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(report["faults"][0]["hit"], 1, "{out}");
    assert_eq!(victims_end.code(), Some(9));
    assert!(spared, "another process has lost its connection");
}

/// Firewall rules in the network namespace of a process last until the job ends, and do not outlive `slim`, however it ends.
#[test]
fn no_firewall_rule_is_left_behind() {
    let test = "no_firewall_rule_is_left_behind";
    if let Err(reason) = Lab::check() {
        return skip(test, reason);
    }
    let lab = Lab::builder().name("rules").build().unwrap();
    let net = lab.node(0).net();
    let rules = || net.exec("nft", &["list", "ruleset"]).unwrap();
    let eventually = |wanted: &str, what: &dyn Fn(&str) -> bool| {
        let begin = std::time::Instant::now();
        while !what(&rules()) {
            let late = begin.elapsed() > std::time::Duration::from_secs(10);
            assert!(!late, "not {wanted}: {}", rules());
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    };
    let mut job = lab.node(0).command("sleep").arg("60").spawn().unwrap();
    let scratch = Scratch::new("rules");
    let kinds = ["drop", "reset", "flush", "syn-full"];
    let text =
        kinds.map(|kind| format!("[[fault]]\nkind = \"{kind}\"\nstart = 0\nlasts = \"forever\"\n"));
    let plan = scratch.write("plan.toml", &text.concat());
    let begin = || {
        let mut command = slim();
        command.arg("chaos").arg(&plan).arg("--whole-namespace");
        command.args(["--pid", &job.id().to_string()]);
        let chaos = command.spawn().unwrap();
        let count = |text: &str| text.matches("table inet slim_lab").count();
        eventually("all in force", &|text| count(text) == kinds.len());
        // Nothing else in the plan is due, and the job goes on.
        std::thread::sleep(std::time::Duration::from_millis(200));
        assert_eq!(count(&rules()), kinds.len());
        chaos
    };
    for signal in [Signal::INT, Signal::TERM, Signal::KILL] {
        let mut chaos = begin();
        kill_process(Pid::from_raw(chaos.id().cast_signed()).unwrap(), signal).unwrap();
        chaos.wait().unwrap();
        eventually("empty", &str::is_empty);
    }
    let mut chaos = begin();
    job.kill().unwrap();
    job.wait().unwrap();
    assert!(chaos.wait().unwrap().success());
    eventually("empty", &str::is_empty);
}

/// Keys that would have no effect are refused.
#[test]
fn keys_of_the_lab_are_refused_outside_it() {
    let test = "keys_of_the_lab_are_refused_outside_it";
    if let Err(reason) = Lab::check() {
        return skip(test, reason);
    }
    let scratch = Scratch::new("keys");
    let lab = Lab::builder().name("keys").build().unwrap();
    let mut job = lab.node(0).command("sleep").arg("60").spawn().unwrap();
    let pid = job.id().to_string();
    for (fault, words) in [
        ("kind = \"drop\"\npath = 0\n", "`path` is for the lab only"),
        (
            "kind = \"drop\"\nnode = \"nodeA\"\n",
            "`node` is for the lab only",
        ),
        ("kind = \"renumber\"\n", "for the lab only"),
        ("kind = \"one-way\"\n", "for the lab only"),
    ] {
        let plan = scratch.write("plan.toml", &format!("[[fault]]\n{fault}"));
        let mut command = slim();
        command.arg("chaos").arg(plan);
        command.args(["--whole-namespace", "--pid", &pid]);
        assert_refused(&mut command, &[words]);
    }
    job.kill().unwrap();
    job.wait().unwrap();
}
