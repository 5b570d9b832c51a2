//! The lab itself: each node is a separate host, labs are independent, and nothing is left behind.

mod common;

use std::{
    env, fs,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use common::{connection, eventually, lab};
use slim_lab::{
    Error, Lab, artifacts,
    lab::{KEEP_VAR, operstate},
    launch, standstill,
};

fn alive(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}/ns/net")).exists()
        && fs::metadata(format!("/proc/{pid}/ns/net")).is_ok()
}

/// Asserts everything that must hold for a lab of any size.
fn check_lab(lab: &Lab) {
    for node in lab.nodes() {
        assert_eq!(
            node.exec("cat", &["/proc/sys/kernel/hostname"])
                .unwrap()
                .trim(),
            node.name()
        );
        let interfaces = node.exec("ls", &["/sys/class/net"]).unwrap();
        let mut names: Vec<_> = interfaces
            .split_whitespace()
            .filter(|n| *n != "lo")
            .collect();
        names.sort_unstable();
        let expected: Vec<_> = (0..lab.paths()).map(|p| node.interface(p)).collect();
        assert_eq!(
            names,
            expected,
            "sysfs of {} shows its own interfaces",
            node.name()
        );
        for path in 0..lab.paths() {
            assert_eq!(operstate(node, path), "up");
        }
    }
    for from in lab.nodes() {
        for to in lab.nodes().iter().filter(|n| n.name() != from.name()) {
            let found = from.exec("getent", &["hosts", to.name()]).unwrap();
            assert!(found.starts_with(&to.address(0).to_string()), "{found}");
            for path in 0..lab.paths() {
                let (mut a, mut b) = connection(from, to, path);
                assert_eq!(a.local_addr().unwrap().ip(), from.address(path));
                assert_eq!(b.peer_addr().unwrap().ip(), from.address(path));
                a.write_all(b"ping").unwrap();
                let mut got = [0; 4];
                b.read_exact(&mut got).unwrap();
                assert_eq!(&got, b"ping");
            }
        }
    }
}

#[test]
fn two_nodes_are_two_hosts_twice_in_a_row() {
    for _ in 0..2 {
        let Some(lab) = lab("two_nodes", 2, 2) else {
            return;
        };
        check_lab(&lab);
        // Each node has its own /dev/shm.
        lab.node(0).exec("touch", &["/dev/shm/mark"]).unwrap();
        assert!(lab.node(0).exec("ls", &["/dev/shm/mark"]).is_ok());
        assert!(lab.node(1).exec("ls", &["/dev/shm/mark"]).is_err());
        assert!(!Path::new("/dev/shm/mark").exists());
    }
}

#[test]
fn four_nodes_are_joined_by_a_switch() {
    let Some(lab) = lab("four_nodes", 4, 2) else {
        return;
    };
    check_lab(&lab);
}

#[test]
fn labs_live_side_by_side() {
    if Lab::check().is_err() {
        lab("side_by_side", 2, 1);
        return;
    }
    thread::scope(|scope| {
        for n in 0..4 {
            scope.spawn(move || {
                let lab = Lab::builder().name(format!("side{n}")).build().unwrap();
                check_lab(&lab);
            });
        }
    });
}

#[test]
fn a_command_runs_on_its_node_and_in_the_callers_directory() {
    let Some(lab) = lab("command", 2, 1) else {
        return;
    };
    let output = lab
        .node(1)
        .command("pwd")
        .current_dir("/usr/bin")
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "/usr/bin");
    let mut sleeper = lab.node(1).command("sleep").arg("1000").spawn().unwrap();
    let on = |n: usize| {
        lab.node(n)
            .processes()
            .into_iter()
            .map(|p| p.name)
            .collect::<Vec<_>>()
    };
    assert!(eventually(Duration::from_secs(2), || on(1) == ["sleep"]));
    assert!(on(0).is_empty());
    assert!(lab.node(0).kill_all().is_empty());
    assert_eq!(lab.node(1).kill_all().len(), 1);
    assert!(!sleeper.wait().unwrap().success());
}

#[test]
fn nothing_is_left_after_the_end_or_a_panic() {
    let Some(lab) = lab("left", 3, 1) else { return };
    let (dir, holders) = (
        lab.dir().to_owned(),
        lab.nodes().iter().map(|n| n.holder()).collect::<Vec<_>>(),
    );
    let mut sleeper = lab.node(1).command("sleep").arg("1000").spawn().unwrap();
    let end = catch_unwind(AssertUnwindSafe(move || {
        let _lab = lab;
        panic!("on purpose");
    }));
    assert!(end.is_err());
    assert!(
        !sleeper.wait().unwrap().success(),
        "processes started in the lab are killed"
    );
    assert!(holders.iter().all(|pid| !alive(*pid)), "no holder lives");
    if env::var_os(KEEP_VAR).is_some() {
        // The variable asks to keep the directory, for looking into a failed test.
        fs::remove_dir_all(&dir).expect("the directory was kept");
    } else {
        assert!(!dir.exists(), "no file is left");
    }
}

/// Not a test: the process that owns a lab and that the test below kills.
#[test]
#[ignore = "started by nothing_is_left_when_the_owner_is_killed"]
fn owner_of_a_lab() {
    let lab = Lab::builder().name("owned").build().unwrap();
    let mut sleeper = lab.node(0).command("sleep").arg("1000").spawn().unwrap();
    let pids: Vec<_> = lab
        .nodes()
        .iter()
        .map(|n| n.holder())
        .chain([sleeper.id()])
        .collect();
    println!("\nowned {} {pids:?}", lab.dir().display());
    // Returns only when this process is killed.
    sleeper.wait().unwrap();
}

#[test]
fn nothing_is_left_when_the_owner_is_killed() {
    if lab("owner", 1, 1).is_none() {
        return;
    }
    let mut owner = Command::new(env::current_exe().unwrap())
        .args(["--ignored", "--exact", "owner_of_a_lab", "--nocapture"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(owner.stdout.take().unwrap()).lines();
    let line = lines
        .find_map(|l| l.ok().filter(|l| l.starts_with("owned ")))
        .expect("the owner prints its lab");
    let (dir, pids) = line["owned ".len()..].split_once(' ').unwrap();
    let pids: Vec<u32> = pids
        .trim_matches(['[', ']'])
        .split(", ")
        .map(|p| p.parse().unwrap())
        .collect();
    assert!(pids.iter().all(|pid| alive(*pid)) && Path::new(dir).exists());
    owner.kill().unwrap();
    owner.wait().unwrap();
    let gone = || pids.iter().all(|pid| !alive(*pid)) && !Path::new(dir).exists();
    assert!(
        eventually(Duration::from_secs(10), gone),
        "left: {pids:?} or {dir}"
    );
}

#[test]
fn a_lab_of_nothing_is_refused() {
    let error = Lab::builder().nodes(0).build().unwrap_err();
    assert!(matches!(error, Error::Invalid(_)), "{error}");
    assert!(Lab::builder().paths(99).build().is_err());
}

#[test]
fn without_privilege_the_error_says_what_is_needed() {
    // Effective capabilities belong to a thread; the other threads keep theirs.
    let error = thread::spawn(|| {
        drop_effective_capabilities();
        match fs::read_to_string("/proc/thread-self/status")
            .unwrap()
            .contains("CapEff:\t0000000000000000")
        {
            true => Some(Lab::builder().build().unwrap_err()),
            false => None,
        }
    });
    let error = error.join().unwrap().expect("capabilities can be dropped");
    assert!(matches!(error, Error::NeedsRoot));
    assert_eq!(
        error.to_string(),
        "the lab needs root (CAP_NET_ADMIN, CAP_SYS_ADMIN): run as root"
    );
}

fn drop_effective_capabilities() {
    #[repr(C)]
    struct Header {
        version: u32,
        pid: i32,
    }
    let header = Header {
        version: 0x2008_0522,
        pid: 0,
    };
    let none = [0u32; 6];
    // SAFETY: both pointers are to live values laid out as the kernel wants them for this version:
    // a header, and two sets of three words.
    let result = unsafe { libc::syscall(libc::SYS_capset, &header, none.as_ptr()) };
    assert_eq!(result, 0);
}

#[test]
fn the_launcher_agent_enters_the_node_and_carries_what_slim_needs() {
    let Some(lab) = lab("agent", 2, 1) else {
        return;
    };
    let run = |host: &str| {
        let mut command = lab
            .node(0)
            .command(artifacts::program("slim-lab-agent").unwrap());
        command.envs(launch::environment(&lab));
        command
            .env("SLIM_LOG", "off")
            .env("OTHER", "1")
            .env("NAMED", "2")
            .env(launch::CARRY_VAR, "NAMED");
        command.args(["-x", host, "cat", "/proc/sys/kernel/hostname;", "env"]);
        command.output().unwrap()
    };
    for host in ["nodeB", "10.77.0.2"] {
        let output = run(host);
        let text = String::from_utf8_lossy(&output.stdout);
        let has = |line: &str| text.lines().any(|l| l == line);
        assert!(
            has("nodeB") && has("SLIM_LOG=off") && has("NAMED=2"),
            "{text}"
        );
        assert!(
            !text.contains("OTHER=") && !text.contains("SLIM_LAB_"),
            "{text}"
        );
    }
    let refused = run("nodeZ");
    assert_eq!(refused.status.code(), Some(255));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("no node named nodeZ"));
}

#[test]
fn a_socket_made_on_a_node_stays_there() {
    let Some(lab) = lab("socket", 2, 1) else {
        return;
    };
    let (a, _b) = connection(lab.node(0), lab.node(1), 0);
    // This thread is in the host's network namespace, where the address does not lead to the lab.
    let target = a.peer_addr().unwrap();
    let outside = TcpStream::connect_timeout(&target, Duration::from_millis(300));
    assert!(outside.is_err(), "the lab cannot be reached from outside");
}

#[test]
fn a_standstill_report_has_sockets_and_processes() {
    let Some(lab) = lab("still", 2, 1) else {
        return;
    };
    let mut sleeper = lab.node(1).command("sleep").arg("60").spawn().unwrap();
    let _connection = connection(lab.node(0), lab.node(1), 0);
    // Until the child has executed the program.
    assert!(eventually(Duration::from_secs(10), || {
        lab.node(1).processes().iter().any(|p| p.name == "sleep")
    }));
    standstill::record(&lab).unwrap();
    let text = fs::read_to_string(lab.dir().join(standstill::FILE)).unwrap();
    sleeper.kill().unwrap();
    sleeper.wait().unwrap();
    let (first, second) = text.split_once("==== nodeB").expect("both nodes");
    assert!(
        first.contains("ESTAB") && second.contains("ESTAB"),
        "{text}"
    );
    let sleeps = format!("---- sleep {}", sleeper.id());
    assert!(second.contains(&sleeps), "{text}");
}
