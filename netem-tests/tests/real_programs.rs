//! Widely used programs under SLIM, a client on one node and a server on the other: they do what they do without SLIM, and
//! their transfers survive killed connections.

mod common;

use std::{
    collections::BTreeSet,
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use common::{
    events::{Events, event_logs, word},
    eventually, lab,
    python::under_slim,
};
use slim_lab::{
    Lab, SeededRng, artifacts,
    faults::{
        destroy::{self, Amount, Selector},
        diag,
    },
    output::Running,
    skip::skip,
};

/// Time limit for a client.
const LIMIT: Duration = Duration::from_secs(60);

/// The path of a program, if it is installed.
fn installed(name: &str) -> Option<PathBuf> {
    ["/usr/bin", "/usr/sbin", "/usr/local/bin"]
        .map(|d| Path::new(d).join(name))
        .into_iter()
        .find(|p| p.is_file())
}

/// Paths of all `programs`, or `None` with the skip and its reason printed.
fn all_installed<const N: usize>(test: &str, programs: [&str; N]) -> Option<[PathBuf; N]> {
    for program in programs {
        if installed(program).is_none() {
            skip(test, format!("{program} is not installed"));
            return None;
        }
    }
    Some(programs.map(|p| installed(p).expect("looked for above")))
}

/// A command on a node, under SLIM if `slim`.
fn command(lab: &Lab, node: usize, program: &Path, slim: bool) -> Command {
    let mut command = lab.node(node).command(program);
    command
        .env_remove("LD_PRELOAD")
        .env_remove("SLIM_SOAK")
        .env_remove(artifacts::PRELOAD_VAR);
    if slim {
        under_slim(&mut command, lab);
        // All settings, and the job key above all, must reach every worker of a server.
        let key = lab.dir().join("key");
        // Workers that have dropped the privilege to read the file have the key from their parent process.
        fs::write(&key, "the key of this job").expect("write the job key");
        fs::set_permissions(&key, Permissions::from_mode(0o600)).expect("hide the job key");
        command.env("SLIM_JOB_KEY_FILE", key);
    }
    command
}

/// Starts a server and waits until it listens.
fn serve(lab: &Lab, command: Command, port: u16) -> Running {
    let mut server = Running::start(command).expect("start the server");
    let net = lab.node(1).net();
    let listens = || diag::listening(net).is_ok_and(|ports| ports.contains(&port));
    assert!(
        eventually(Duration::from_secs(10), listens),
        "{:?}",
        server.lines()
    );
    assert!(server.is_running());
    server
}

/// Runs a client to its end, and meanwhile kills its connections from random ends, at most `kills` times. The client must
/// succeed. Returns its output and the number of killed connections.
fn client(lab: &Lab, command: Command, kills: usize) -> (String, usize) {
    let mut client = Running::start(command).expect("start the client");
    let (mut rng, mut killed, start) = (SeededRng::new(7), 0, Instant::now());
    for _ in 0..kills {
        thread::sleep(Duration::from_millis(300));
        if !client.is_running() {
            break;
        }
        let end = lab.node(usize::from(rng.coin()));
        let report = destroy::destroy(end.net(), &Selector::between_hosts(), Amount::All, &mut rng);
        killed += report.expect("destroy connections").connections.len();
    }
    let status = client.wait(LIMIT.saturating_sub(start.elapsed()));
    let lines: Vec<_> = client.lines().into_iter().map(|l| l.text).collect();
    let events = Events::read(lab);
    println!("{killed} connections killed; {events}");
    let tail = &lines[lines.len().saturating_sub(20)..];
    if killed > 0 {
        // Both hosts, even if the server's workers are forked from a process that has cleared its environment.
        let hosts: BTreeSet<_> = events.of_kind("resume").map(|e| word(e, "host")).collect();
        assert_eq!(
            hosts.len(),
            2,
            "both ends have resumed: {hosts:?}; {status:?}, {tail:#?}, {:#?}",
            event_logs(lab)
        );
    }
    let code = status.map(|s| s.code().unwrap_or(-1));
    assert_eq!(code, Some(0), "hung, if none: {tail:#?}");
    (lines.join("\n"), killed)
}

/// One way to run the programs.
struct Mode {
    name: &'static str,
    slim: bool,
    /// The largest number of times that connections are killed.
    kills: usize,
    /// Size of the transfer.
    mib: usize,
}

impl Mode {
    /// Asserts that enough connections were killed: a transfer must last a few seconds to be broken a few times.
    fn enough(&self, killed: usize) {
        let wanted = self.kills / 2;
        assert!(
            killed >= wanted,
            "{}: only {killed} of {wanted} killed",
            self.name
        );
    }
}

/// Without SLIM, with it, and with it while connections are killed.
const MODES: [Mode; 3] = [
    Mode {
        name: "bare",
        slim: false,
        kills: 0,
        mib: 24,
    },
    Mode {
        name: "under SLIM",
        slim: true,
        kills: 0,
        mib: 24,
    },
    Mode {
        name: "killed",
        slim: true,
        kills: 10,
        mib: 200,
    },
];

/// MiB per second of a client whose connections are killed: its download takes four seconds.
const RATE: usize = 50;

/// Writes a file of `mib` MiB of pseudo-random bytes. Returns its checksum.
fn big_file(lab: &Lab, mib: usize) -> String {
    let mut rng = SeededRng::new(99);
    let bytes: Vec<u8> = (0..mib << 17)
        .flat_map(|_| rng.next_u64().to_le_bytes())
        .collect();
    let path = lab.dir().join(BIG);
    fs::write(&path, bytes).expect("write a file");
    checksum(&path)
}

const BIG: &str = "big.bin";

fn checksum(path: &Path) -> String {
    let output = Command::new("sha256sum").arg(path).output();
    let output = output.expect("run sha256sum");
    assert!(output.status.success(), "sha256sum: {output:?}");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.split(' ').next().unwrap_or_default().to_owned()
}

/// Fetches `urls` with one run of curl. Each file must have the checksum `original`.
fn fetch(lab: &Lab, curl: &Path, urls: &[String], original: &str, mode: &Mode) -> usize {
    let out = lab.dir().join("fetched");
    let mut get = command(lab, 0, curl, mode.slim);
    get.args(["--silent", "--show-error", "--fail"]);
    if mode.kills > 0 {
        get.arg("--limit-rate").arg(format!("{RATE}M"));
    }
    for (n, url) in urls.iter().enumerate() {
        get.arg("-o")
            .arg(out.with_extension(n.to_string()))
            .arg(url);
    }
    let (_, killed) = client(lab, get, mode.kills);
    for n in 0..urls.len() {
        let fetched = out.with_extension(n.to_string());
        assert_eq!(checksum(&fetched), original, "{} of {urls:?}", n);
    }
    mode.enough(killed);
    killed
}

/// Starts Python's http.server on the second node, for the files of the lab.
fn python_server(lab: &Lab, python: &Path, slim: bool) -> Running {
    let mut server = command(lab, 1, python, slim);
    server
        .args(["-m", "http.server", "8000", "--bind", "10.77.0.2", "-d"])
        .arg(lab.dir());
    serve(lab, server, 8000)
}

#[test]
fn curl_and_python_http_server() {
    let Some([curl, python]) = all_installed("curl-python", ["curl", "python3"]) else {
        return;
    };
    for mode in &MODES {
        let Some(lab) = lab("curl-python", 2, 1) else {
            return;
        };
        let original = big_file(&lab, mode.mib);
        let _server = python_server(&lab, &python, mode.slim);
        let urls = [format!("http://nodeB:8000/{BIG}")];
        let killed = fetch(&lab, &curl, &urls, &original, mode);
        println!(
            "curl and python's http.server, {}: {} MiB fetched, {killed} connections killed",
            mode.name, mode.mib
        );
    }
}

/// Reads a URL in pieces of 1 MiB, with a pause after each, and prints the length and the checksum.
const PYTHON_CLIENT: &str = "
import hashlib, sys, time, urllib.request
length, sha = 0, hashlib.sha256()
with urllib.request.urlopen(sys.argv[1]) as response:
    while piece := response.read(1 << 20):
        length += len(piece)
        sha.update(piece)
        time.sleep(float(sys.argv[2]))
print(length, sha.hexdigest())
";

#[test]
fn python_http_client_and_server() {
    let Some([python]) = all_installed("python", ["python3"]) else {
        return;
    };
    for mode in &MODES {
        let Some(lab) = lab("python", 2, 1) else {
            return;
        };
        let original = big_file(&lab, mode.mib);
        let _server = python_server(&lab, &python, mode.slim);
        let pause = if mode.kills > 0 {
            1.0 / RATE as f64
        } else {
            0.0
        };
        let mut get = command(&lab, 0, &python, mode.slim);
        get.args(["-c", PYTHON_CLIENT])
            .arg(format!("http://nodeB:8000/{BIG}"))
            .arg(pause.to_string());
        let (text, killed) = client(&lab, get, mode.kills);
        assert_eq!(text, format!("{} {original}", mode.mib << 20));
        mode.enough(killed);
        println!(
            "python's urllib and http.server, {}: {} MiB fetched, {killed} connections killed",
            mode.name, mode.mib
        );
    }
}

#[test]
fn curl_and_nginx_with_keep_alive_and_sendfile() {
    let Some([curl, nginx]) = all_installed("curl-nginx", ["curl", "nginx"]) else {
        return;
    };
    const TIMES: usize = 3;
    for mode in &MODES {
        let Some(lab) = lab("curl-nginx", 2, 1) else {
            return;
        };
        let original = big_file(&lab, mode.mib.div_ceil(TIMES));
        let dir = lab.dir().display();
        let config = format!(
            "daemon off; user root; pid {dir}/nginx.pid; error_log {dir}/error.log;\n\
             events {{ worker_connections 64; }}\n\
             http {{ access_log {dir}/access.log; sendfile on; keepalive_timeout 60;\n\
             client_body_temp_path {dir}; proxy_temp_path {dir}; fastcgi_temp_path {dir};\n\
             uwsgi_temp_path {dir}; scgi_temp_path {dir};\n\
             log_format c '$connection'; access_log {dir}/connections.log c;\n\
             server {{ listen 10.77.0.2:8080; root {dir}; }} }}\n"
        );
        let file = lab.dir().join("nginx.conf");
        fs::write(&file, config).unwrap();
        let mut server = command(&lab, 1, &nginx, mode.slim);
        server.arg("-c").arg(&file);
        let _server = serve(&lab, server, 8080);
        let urls: Vec<_> = (0..TIMES)
            .map(|n| format!("http://nodeB:8080/{BIG}?{n}"))
            .collect();
        let killed = fetch(&lab, &curl, &urls, &original, mode);
        println!(
            "curl and nginx, {}: {TIMES} files of {} MiB together, {killed} connections killed",
            mode.name, mode.mib
        );
        let connections = fs::read_to_string(lab.dir().join("connections.log")).unwrap();
        let mut numbers: Vec<_> = connections.lines().collect();
        numbers.dedup();
        assert_eq!(numbers.len(), 1, "one connection carries all: {numbers:?}");
    }
}

#[test]
fn iperf3() {
    let Some([iperf3]) = all_installed("iperf3", ["iperf3"]) else {
        return;
    };
    for mode in &MODES {
        for reverse in [false, true] {
            let Some(lab) = lab("iperf3", 2, 1) else {
                return;
            };
            let mut server = command(&lab, 1, &iperf3, mode.slim);
            server.args(["--server", "--one-off"]);
            let _server = serve(&lab, server, 5201);
            let mut run = command(&lab, 0, &iperf3, mode.slim);
            // The rate is limited because the kills are tested, not the processor.
            run.args([
                "--client",
                "nodeB",
                "--time",
                "3",
                "--bitrate",
                "400M",
                "--parallel",
                "2",
                "--json",
            ]);
            if reverse {
                run.arg("--reverse");
            }
            let (text, killed) = client(&lab, run, mode.kills);
            let json: serde_json::Value = serde_json::from_str(&text).expect("iperf3 writes JSON");
            let rate = json["end"]["sum_received"]["bits_per_second"]
                .as_f64()
                .unwrap_or(0.0);
            println!(
                "iperf3, {}: {:.0} Mbit/s, {killed} connections killed",
                mode.name,
                rate / 1e6
            );
            assert!(json.get("error").is_none() && rate > 100e6, "{text}");
            mode.enough(killed);
        }
    }
}

#[test]
fn redis() {
    let programs = ["redis-server", "redis-cli", "redis-benchmark"];
    let Some([redis_server, redis_cli, redis_benchmark]) = all_installed("redis", programs) else {
        return;
    };
    for mode in &MODES {
        let Some(lab) = lab("redis", 2, 1) else {
            return;
        };
        let mut server = command(&lab, 1, &redis_server, mode.slim);
        server.args([
            "--bind",
            "10.77.0.2",
            "--port",
            "6379",
            "--save",
            "",
            "--protected-mode",
            "no",
            "--dir",
        ]);
        server.arg(lab.dir());
        let _server = serve(&lab, server, 6379);

        // A counter shows whether a request was lost or executed twice.
        let mut count = command(&lab, 0, &redis_cli, mode.slim);
        count.args(["-h", "10.77.0.2", "-r", "30000", "incr", "counter"]);
        let (text, killed) = client(&lab, count, mode.kills);
        let expected: Vec<_> = (1..=30_000).map(|n| n.to_string()).collect();
        assert!(
            text.lines().eq(expected.iter().map(String::as_str)),
            "each increment is seen once"
        );

        let mut bench = command(&lab, 0, &redis_benchmark, mode.slim);
        bench.args([
            "-h",
            "10.77.0.2",
            "-n",
            "60000",
            "-c",
            "20",
            "-d",
            "1000",
            "-t",
            "set,get",
            "--csv",
        ]);
        let (text, more) = client(&lab, bench, mode.kills);
        println!(
            "redis, {}: {killed} and {more} connections killed",
            mode.name
        );
        assert!(
            text.contains("\"SET\"") && text.contains("\"GET\"") && !text.contains("rror"),
            "{text}"
        );
        assert!(
            mode.kills == 0 || (killed >= 1 && more >= 20),
            "only {killed} and {more} killed"
        );
    }
}
