//! `slim chaos matrix` and `slim chaos shrink` as programs.

mod common;

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{Scratch, assert_refused, output, slim};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use slim_lab::{Lab, artifacts, mpi::Flavor, mpi::Mpi, skip::skip};

/// Whether labs can be made here.
fn root(test: &str) -> bool {
    match Lab::check() {
        Ok(()) => true,
        Err(reason) => {
            skip(test, reason);
            false
        }
    }
}

/// The report of a matrix with these words.
fn matrix(words: &[&str]) -> (i32, Value, String) {
    let mut command = slim();
    command.args(["chaos", "matrix", "--json"]).args(words);
    let (status, out, err) = output(&mut command);
    let report = serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e}: {out}{err}"));
    (status, report, err)
}

/// Before any run: they may take hours.
#[test]
fn a_page_that_cannot_be_written_is_refused() {
    if !root("a_page_that_cannot_be_written_is_refused") {
        return;
    }
    let mut command = slim();
    command.args(["chaos", "matrix", "--page", "/nonexistent/page.html"]);
    command.args(["--fault", "kill", "--with", "bare", "--", "true"]);
    assert_refused(&mut command, &["/nonexistent/page.html"]);
}

/// The results come, although standard error is gone, or the page cannot be written any more.
#[test]
fn results_do_not_depend_on_the_terminal_or_the_page() {
    if !root("results_do_not_depend_on_the_terminal_or_the_page") {
        return;
    }
    let full = || {
        fs::OpenOptions::new()
            .write(true)
            .open("/dev/full")
            .unwrap()
    };
    let words = [
        "--json",
        "--page",
        "/dev/full",
        "--fault",
        "kill",
        "--with",
        "bare",
        "--runs",
        "1",
    ];
    let mut command = slim();
    command.args(["chaos", "matrix"]).args(words);
    command.args(["--limit", "1", "--", "true"]);
    let output = command.stderr(full()).output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).expect("the report");
    assert_eq!(report["cells"].as_array().unwrap().len(), 1);
    assert_eq!(output.status.code(), Some(1), "the page is not written");
}

/// The user's command decides by its exit status. A fault that met nothing does not count as survived.
#[test]
fn a_command_survives_fails_or_is_not_met() {
    if !root("a_command_survives_fails_or_is_not_met") {
        return;
    }
    let scratch = Scratch::new("matrix");
    let drop = scratch.write(
        "drop.toml",
        "[[fault]]\nkind = \"drop\"\nstart = 0.1\nlasts = 0.3\nnode = \"nodeB\"\n",
    );
    let kill = scratch.write("kill.toml", "[[fault]]\nkind = \"kill\"\nstart = 0.1\n");
    let faults = format!("{},{}", drop.display(), kill.display());
    let pings = |end: &str| format!("ping -c 8 -i 0.1 -W 1 nodeB | grep received; exit {end}");
    let words = [
        "--with", "bare", "--runs", "2", "--seed", "5", "--fault", &faults,
    ];
    let run = |end: &str| {
        let script = pings(end);
        matrix(&[&words[..], &["--", "sh", "-c", &script]].concat())
    };
    let (status, report, err) = run("0");
    assert_eq!(status, 1, "{report}");
    let [dropped, killed] = report["cells"].as_array().unwrap().as_slice() else {
        panic!("{report}")
    };
    assert_eq!(
        (&dropped["fault"], &dropped["job"]),
        (&"drop".into(), &"sh".into())
    );
    for run in 0..2 {
        assert_eq!(dropped["runs"][run]["end"], "survived", "{report}");
        assert_eq!(dropped["runs"][run]["seed"], 5 + run, "{report}");
        assert_eq!(killed["runs"][run]["end"], "no-effect", "{report}");
    }
    assert!(dropped["repeat"].is_null());
    assert!(
        err.contains("4/4 kill, sh, bare: finished, but fault 1 (kill) met nothing"),
        "{err}"
    );
    let (status, report, _) = run("3");
    assert_eq!(status, 1);
    let failed = &report["cells"][0];
    assert_eq!(failed["runs"][1]["end"], "failed", "{report}");
    assert_eq!(failed["runs"][1]["detail"], "exit status: 3");

    // The command that the report prints repeats the run.
    let repeat = failed["repeat"].as_str().unwrap();
    let line = repeat.strip_prefix("slim ").unwrap();
    let script = format!("exec {} {line}", env!("CARGO_BIN_EXE_slim"));
    let (status, out, err) = output(Command::new("sh").args(["-c", &script]));
    assert_eq!(status, 1, "{out}{err}");
    assert!(
        out.contains("0 of 1 (1 failed)") && out.contains(repeat),
        "{out}"
    );
    assert!(err.contains("1 runs, seed 5"), "{err}");
}

/// A fault that lasts forever does not keep a run from its limit.
#[test]
fn a_run_under_a_fault_that_lasts_forever_has_a_limit() {
    if !root("a_run_under_a_fault_that_lasts_forever_has_a_limit") {
        return;
    }
    let scratch = Scratch::new("forever");
    let plan = scratch.write(
        "plan.toml",
        "[[fault]]\nkind = \"drop\"\nstart = 0.1\nlasts = \"forever\"\nnode = \"nodeB\"\n",
    );
    let plan = plan.to_str().unwrap();
    let words = [
        "--runs", "1", "--with", "bare", "--limit", "2", "--fault", plan,
    ];
    let begin = Instant::now();
    let (_, report, _) = matrix(&[&words[..], &["--", "sleep", "30"]].concat());
    assert_eq!(report["cells"][0]["runs"][0]["end"], "hung", "{report}");
    assert!(begin.elapsed() < Duration::from_secs(20));
}

/// Bare, the loss of its connections ends the job, or it hangs. With SLIM it finishes.
#[test]
fn an_mpi_survives_kills_with_slim_only() {
    let test = "an_mpi_survives_kills_with_slim_only";
    if !root(test) {
        return;
    }
    let library = match Mpi::find(Flavor::OpenMpi4).and_then(|_| artifacts::preload()) {
        Ok(library) => library,
        Err(reason) => return skip(test, reason),
    };
    let scratch = Scratch::new("matrix-page");
    let page = scratch.path("page.html");
    let mut command = slim();
    command
        .env("SLIM_PRELOAD", library)
        .args(["chaos", "matrix"]);
    command.args(["--mpi", "openmpi4", "--fault", "kill-all", "--runs", "1"]);
    command.args(["--limit", "20", "--page"]).arg(&page);
    let (status, out, err) = output(&mut command);
    assert_eq!(status, 0, "{out}{err}");
    let row = out.lines().find(|line| line.contains("kill-all")).unwrap();
    assert!(
        row.contains("0 of 1 (1 ") && row.contains(" 1 of 1 "),
        "{out}"
    );
    assert!(
        out.contains("--fault kill-all --with bare --runs 1 --seed "),
        "{out}"
    );
    let page = fs::read_to_string(page).unwrap();
    assert!(page.contains("<td class=\"good\">1 of 1"), "{page}");
    assert!(page.contains("<td class=\"bad\">0 of 1"), "{page}");
}

#[test]
fn mistakes_are_named() {
    if !root("mistakes_are_named") {
        return;
    }
    let refused = |words: &[&str], what: &[&str]| {
        let mut command = slim();
        assert_refused(command.args(["chaos", "matrix"]).args(words), what);
    };
    refused(&["--fault", "fire", "--", "true"], &["fire", "kill-all"]);
    let missing = ["chaos", "matrix", "--", "/no/such/program"];
    assert_eq!(output(slim().args(missing)).0, 127);
    let scratch = Scratch::new("mistakes");
    let plan = scratch.write("c.toml", "[[fault]]\nkind = \"drop\"\nnode = \"nodeC\"\n");
    let plan = plan.to_str().unwrap();
    let bare = ["--with", "bare", "--fault", plan, "--", "true"];
    let (status, _, err) = output(slim().args(["chaos", "matrix"]).args(bare));
    assert!(status == 2 && err.contains("no node `nodeC`"), "{err}");
    let both = ["--mpi", "openmpi4", "--", "true"];
    assert_eq!(output(slim().args(["chaos", "matrix"]).args(both)).0, 2);
}

/// Processes whose command line has this word.
fn processes_with(word: &str) -> usize {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let lines = entries.filter_map(|e| fs::read_to_string(e.path().join("cmdline")).ok());
    lines.filter(|line| line.contains(word)).count()
}

/// Processes whose command line begins like this.
fn processes_beginning(words: &str) -> usize {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let lines = entries.filter_map(|e| fs::read_to_string(e.path().join("cmdline")).ok());
    lines.filter(|line| line.starts_with(words)).count()
}

fn eventually(mut condition: impl FnMut() -> bool) -> bool {
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(10) {
        if condition() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    false
}

/// Neither processes (which hold the namespaces), nor files.
#[test]
fn nothing_is_left_behind() {
    if !root("nothing_is_left_behind") {
        return;
    }
    let scratch = Scratch::new("left");
    let plan = scratch.write(
        "plan.toml",
        "[[fault]]\nkind = \"drop\"\nstart = 0\nlasts = 60\n",
    );
    let (files, mark) = (scratch.path("tmp"), format!("10{}", std::process::id()));
    fs::create_dir(&files).unwrap();
    let start = |words: &[&str]| -> Child {
        let mut command = slim();
        command.env("TMPDIR", &files).arg("chaos").args(words);
        command.args(["--", "sleep", &mark]);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().unwrap()
    };
    let plan = plan.to_str().unwrap();
    let ways: [&[&str]; 2] = [
        &["matrix", "--with", "bare", "--fault", plan],
        &["shrink", plan],
    ];
    let is_empty = |dir: &Path| fs::read_dir(dir).unwrap().next().is_none();
    for words in ways {
        for signal in [Signal::INT, Signal::KILL] {
            let mut program = start(words);
            // Not a process that `slim` has just forked, which still has its command line.
            let runs = || processes_beginning(&format!("sleep\0{mark}")) == 1;
            assert!(eventually(runs), "{words:?}: the command did not start");
            assert!(!is_empty(&files));
            let pid = Pid::from_raw(program.id().cast_signed()).unwrap();
            kill_process(pid, signal).unwrap();
            program.wait().unwrap();
            let gone = || {
                processes_with(&mark) == 0
                    && processes_with(files.to_str().unwrap()) == 0
                    && is_empty(&files)
            };
            assert!(eventually(gone), "{words:?} {signal:?}");
        }
    }
}

/// A server on the second node and a client on the first. The client ends with status 9 if its connection is lost.
fn talk(scratch: &Scratch) -> std::path::PathBuf {
    let agent = artifacts::program("slim-lab-agent").unwrap();
    let server = scratch.write(
        "server.py",
        "import socket\ns=socket.create_server(('',7000))\nc,_=s.accept()\n\
         try:\n  while d:=c.recv(1): c.sendall(d)\nexcept OSError: pass\n",
    );
    let client = scratch.write(
        "client.py",
        "import socket,sys,time\nfor n in range(50):\n  try: c=socket.create_connection(('nodeB',7000),timeout=10); break\n\
         \x20 except OSError: time.sleep(.1)\nend=time.monotonic()+1\n\
         try:\n  while time.monotonic()<end: c.sendall(b'x'); assert c.recv(1)==b'x'; time.sleep(.01)\n\
         except OSError: sys.exit(9)\n",
    );
    scratch.script(
        "talk",
        &format!(
            "{} nodeB \"/usr/bin/python3 {}\" & exec /usr/bin/python3 {}",
            agent.display(),
            server.display(),
            client.display()
        ),
    )
}

/// One kill among harmless faults is what is left of the plan.
#[test]
fn a_plan_is_reduced_to_the_fault_that_matters() {
    let test = "a_plan_is_reduced_to_the_fault_that_matters";
    if !root(test) || !Path::new("/usr/bin/python3").exists() {
        return skip(test, "needs root and python3");
    }
    let scratch = Scratch::new("shrink");
    let harmless = "kind = \"stop\"\nevery = 0.1\ntimes = 6\nlasts = 0.02\nprocess = \"python3\"\n";
    let plan = scratch.write(
        "plan.toml",
        &format!(
            "seed = 3\n[[fault]]\nstart = 0.1\n{harmless}\
             [[fault]]\nkind = \"kill\"\nstart = 0.55\nprocess = \"python3\"\n"
        ),
    );
    let command = talk(&scratch);
    let small = scratch.path("small.toml");
    let mut shrink = slim();
    shrink.args(["chaos", "shrink"]).arg(&plan);
    shrink.args(["--tries", "2", "--expect", "9", "--output"]);
    let (status, out, err) = output(shrink.arg(&small).arg("--").arg(&command));
    assert_eq!((status, out.as_str()), (0, ""), "{err}");
    let text = fs::read_to_string(&small).unwrap();
    assert_eq!(text.matches("[[fault]]").count(), 1, "{text}{err}");
    assert!(
        text.contains("kind = \"kill\"") && text.contains("port = 7000"),
        "{text}"
    );
    assert!(text.contains("the command failed in "), "{text}");
    // The plan repeats the failure.
    let (status, out, err) = output(slim().arg("chaos").arg(&small).arg("--").arg(&command));
    assert_eq!(status, 9, "{out}{err}");
}

/// What cannot be reduced is said to be so.
#[test]
fn a_command_that_fails_always_or_never_is_named() {
    if !root("a_command_that_fails_always_or_never_is_named") {
        return;
    }
    let scratch = Scratch::new("never");
    let plan = scratch.write("plan.toml", "[[fault]]\nkind = \"kill\"\nstart = 0\n");
    let shrink = |command: &str| {
        let mut shrink = slim();
        shrink.args(["chaos", "shrink", "--tries", "2"]).arg(&plan);
        output(shrink.args(["--", "sh", "-c", command]))
    };
    let (status, out, err) = shrink("echo why; exit 4");
    assert_eq!((status, out.as_str()), (1, ""), "{err}");
    assert!(
        err.contains("fails without faults, too (exit status 4): why"),
        "{err}"
    );
    let (status, _, err) = shrink("sleep 0.2");
    assert_eq!(status, 1, "{err}");
    assert!(err.contains("did not fail in 2 runs of the plan"), "{err}");
}
