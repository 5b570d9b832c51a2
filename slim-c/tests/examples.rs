//! The examples in C, C++ and Rust, in pairs of processes whose connections are killed 20 times.

mod common;

use std::fs::File;
use std::io::{BufRead, Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use common::*;

const KILLS: u64 = 20;
const HERE: &str = "127.0.0.1";

#[derive(Clone, Copy, Debug)]
enum Language {
    C,
    Cpp,
    Rust,
}

use Language::{C, Cpp, Rust};

fn example(name: &str, language: Language, dir: &Path) -> PathBuf {
    match language {
        C => compile(installed(), &format!("examples/library/{name}.c"), dir, &[]),
        Cpp => compile(
            installed(),
            &format!("examples/library/{name}.cpp"),
            dir,
            &[],
        ),
        Rust => rust_example(name),
    }
}

/// One exchange of lines for each kill. Returns the number of resumes.
fn echo(server: Language, client: Language) {
    let dir = scratch();
    let server = example("echo", server, dir.path());
    let client = example("echo", client, dir.path());
    let (server, port) = serve(Command::new(server).args(["serve", HERE, "0"]));
    let mut client = Running::start(Command::new(client).args([HERE, &port]));
    let mut answers = client.output();
    let mut rng = fastrand::Rng::with_seed(5);
    for n in 0..=KILLS {
        let mut line: String = (0..3000).map(|_| rng.alphanumeric()).collect();
        line.push('\n');
        let input = client.child.stdin.as_mut().unwrap();
        input.write_all(line.as_bytes()).unwrap();
        let mut answer = String::new();
        answers.read_line(&mut answer).unwrap();
        assert!(answer == line, "line {n}: {answer}");
        if n < KILLS {
            assert_eq!(client.kill_often(1, Duration::ZERO), 1);
        }
    }
    let input = client.child.stdin.as_mut().unwrap();
    input.write_all(b"bye\n").unwrap();
    let resumes = client.resumes();
    assert!(resumes >= KILLS, "{resumes} resumes");
    server.resumes();
}

#[test]
fn echo_survives_kills() {
    if can_kill("echo_survives_kills") {
        for (server, client) in [(C, Cpp), (Cpp, Rust), (Rust, C)] {
            echo(server, client);
        }
    }
}

fn many(server: Language, client: Language) {
    let dir = scratch();
    let server = example("many", server, dir.path());
    let client = example("many", client, dir.path());
    let sizes = ["32", "8388608"];
    let mut command = Command::new(server);
    let (server, port) = serve(command.args(["serve", HERE, "0"]).args(sizes));
    let mut command = Command::new(client);
    let begun = Instant::now();
    let mut client = Running::start(command.args([HERE, &port]).args(sizes));
    let killed = client.kill_often(KILLS, Duration::from_millis(5));
    let resumes = client.resumes() + server.resumes();
    println!(
        "{killed} killed, {resumes} resumes at two ends, {:?}",
        begun.elapsed()
    );
    assert_eq!(killed, KILLS, "the transfer was over before");
    assert!(resumes >= KILLS, "{resumes}");
}

#[test]
fn many_flows_survive_kills() {
    if can_kill("many_flows_survive_kills") {
        for (server, client) in [(C, Cpp), (Cpp, Rust), (Rust, C)] {
            many(server, client);
        }
    }
}

/// Writes a file of pseudo-random bytes.
fn make_file(path: &Path, size: usize) {
    let mut rng = fastrand::Rng::with_seed(6);
    let mut block = vec![0; 4 << 20];
    let mut file = File::create(path).unwrap();
    for at in (0..size).step_by(block.len()) {
        rng.fill(&mut block);
        let len = block.len().min(size - at);
        file.write_all(&block[..len]).unwrap();
    }
}

fn assert_equal(a: &Path, b: &Path) {
    assert_eq!(a.metadata().unwrap().len(), b.metadata().unwrap().len());
    let (mut a, mut b) = (File::open(a).unwrap(), File::open(b).unwrap());
    let (mut from_a, mut from_b) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    loop {
        let n = a.read(&mut from_a).unwrap();
        b.read_exact(&mut from_b[..n]).unwrap();
        assert!(from_a[..n] == from_b[..n], "the files differ");
        if n == 0 {
            return;
        }
    }
}

fn transfer(receiver: Language, sender: Language, size: usize) {
    let dir = scratch();
    let receiver = example("transfer", receiver, dir.path());
    let sender = example("transfer", sender, dir.path());
    let (file, copy) = (dir.path().join("file"), dir.path().join("copy"));
    make_file(&file, size);
    let mut command = Command::new(receiver);
    let (receiver, port) = serve(command.args(["receive", HERE, "0"]).arg(&copy));
    let begun = Instant::now();
    let mut command = Command::new(sender);
    let mut sender = Running::start(command.args(["send", HERE, &port]).arg(&file));
    let killed = sender.kill_often(KILLS, Duration::from_millis(5));
    let resumes = sender.resumes();
    receiver.resumes();
    println!(
        "{size} bytes: {killed} killed, {resumes} resumes, {:?}",
        begun.elapsed()
    );
    assert_eq!(killed, KILLS, "the transfer was over before");
    assert!(resumes > 0);
    assert_equal(&file, &copy);
}

#[test]
fn a_file_of_a_gibibyte_survives_kills() {
    if can_kill("a_file_of_a_gibibyte_survives_kills") {
        transfer(C, C, 1 << 30);
    }
}

/// The size is not a multiple of anything.
#[test]
fn files_survive_kills() {
    if can_kill("files_survive_kills") {
        for (receiver, sender) in [(Rust, Cpp), (Cpp, Rust)] {
            transfer(receiver, sender, (256 << 20) + 12345);
        }
    }
}

/// Without SLIM the first kill ends each example with an error.
#[test]
fn without_slim_a_kill_is_an_error() {
    if !can_kill("without_slim_a_kill_is_an_error") {
        return;
    }
    let dir = scratch();
    let file = dir.path().join("file");
    make_file(&file, 256 << 20);
    let file = file.to_str().unwrap();
    let copy = dir.path().join("copy");
    let sizes = ["4", "1000000000"];
    let cases: [(&str, Vec<&str>, Vec<&str>); 3] = [
        ("echo", vec!["serve", HERE, "0"], vec![HERE]),
        (
            "many",
            [&["serve", HERE, "0"][..], &sizes].concat(),
            vec![HERE],
        ),
        (
            "transfer",
            vec!["receive", HERE, "0", copy.to_str().unwrap()],
            vec!["send", HERE],
        ),
    ];
    for (name, of_server, of_client) in cases {
        let program = example(name, C, dir.path());
        let off = |args: &[&str]| {
            let mut command = Command::new(&program);
            command.env("SLIM", "off").args(args);
            command
        };
        let (server, port) = serve(&mut off(&of_server));
        let more = match name {
            "many" => &sizes[..],
            "transfer" => &[file][..],
            _ => &[],
        };
        let args = [&of_client[..], &[&*port], more].concat();
        let mut client = Running::start(&mut off(&args));
        let mut input = client.child.stdin.take().unwrap();
        // Only `echo` reads it.
        let _ = input.write_all(long_line().as_bytes());
        let begun = Instant::now();
        while !client.kill_connection(&mut fastrand::Rng::with_seed(7)) {
            assert!(begun.elapsed() < Duration::from_secs(20), "{name}: no kill");
        }
        // Fails if the client has ended already.
        let _ = input.write_all(b"another\n");
        drop(input);
        let (success, text) = client.wait();
        // It met the kill, or the end of the server, which has met it.
        assert!(!success && !text.is_empty(), "{name}: {text}");
        assert!(!server.wait().0, "{name}");
    }
}
