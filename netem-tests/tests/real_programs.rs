//! Programs that people use, a client on one node and a server on the other, under SLIM: they do what
//! they do without it, and their transfers live through killed connections.

mod common;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use common::{eventually, lab};
use netem_tests::{
    Lab, Node, Rng, artifacts,
    faults::{
        destroy::{self, Amount, Pick},
        diag,
    },
    output::Running,
    skip::skip,
};

/// Where a program is, if it is installed.
fn installed(name: &str) -> Option<PathBuf> {
    ["/usr/bin", "/usr/sbin", "/usr/local/bin"]
        .map(|d| Path::new(d).join(name))
        .into_iter()
        .find(|p| p.is_file())
}

/// Paths of all `programs`, or a skip with its reason.
fn all_installed<const N: usize>(test: &str, programs: [&str; N]) -> Option<[PathBuf; N]> {
    for program in programs {
        if installed(program).is_none() {
            skip(test, format!("{program} is not installed"));
            return None;
        }
    }
    Some(programs.map(|p| installed(p).expect("looked for above")))
}

/// A command on a node, under SLIM if asked for.
fn command(node: &Node, program: &Path, slim: bool) -> Command {
    let mut command = node.command(program);
    command
        .env_remove("LD_PRELOAD")
        .env_remove("SLIM_SOAK")
        .env_remove(artifacts::PRELOAD_VAR);
    if slim {
        command.env(
            "LD_PRELOAD",
            artifacts::preload().expect("the preload library"),
        );
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

/// Runs a client to its end, and kills its connections from random ends meanwhile, at most `kills`
/// times. Gives exit code, output, and how many connections were killed.
fn client(lab: &Lab, command: Command, kills: usize) -> (Option<i32>, String, usize) {
    let mut client = Running::start(command).expect("start the client");
    let (mut rng, mut killed, start) = (Rng::new(7), 0, Instant::now());
    for _ in 0..kills {
        thread::sleep(Duration::from_millis(300));
        if !client.is_running() {
            break;
        }
        let end = lab.node(usize::from(rng.coin()));
        let report = destroy::destroy(end.net(), &Pick::between_hosts(), Amount::All, &mut rng);
        killed += report.expect("destroy connections").connections.len();
    }
    let status = client.wait(Duration::from_secs(60).saturating_sub(start.elapsed()));
    let text: Vec<_> = client.lines().into_iter().map(|l| l.text).collect();
    (
        status.map(|s| s.code().unwrap_or(-1)),
        text.join("\n"),
        killed,
    )
}

/// Without SLIM, with it, and with it while connections are killed.
const MODES: [(&str, bool, usize); 3] = [
    ("bare", false, 0),
    ("under SLIM", true, 0),
    ("killed", true, 6),
];

/// A file of `mib` MiB in which no two pieces are the same.
fn big_file(dir: &Path, mib: usize) -> PathBuf {
    let mut rng = Rng::new(99);
    let bytes: Vec<u8> = (0..mib << 17)
        .flat_map(|_| rng.next_u64().to_le_bytes())
        .collect();
    let path = dir.join("big.bin");
    fs::write(&path, bytes).expect("write a file");
    path
}

/// Fetches `urls` with curl in one run and compares each with `original`.
fn fetch(
    lab: &Lab,
    curl: &Path,
    urls: &[String],
    original: &Path,
    slim: bool,
    kills: usize,
) -> usize {
    let out = lab.dir().join("fetched");
    let mut get = command(lab.node(0), curl, slim);
    get.args(["--silent", "--show-error", "--fail", "--limit-rate", "12M"]);
    for (n, url) in urls.iter().enumerate() {
        get.arg("-o")
            .arg(out.with_extension(n.to_string()))
            .arg(url);
    }
    let (code, text, killed) = client(lab, get, kills);
    assert_eq!(code, Some(0), "{text}");
    for n in 0..urls.len() {
        let same =
            fs::read(out.with_extension(n.to_string())).unwrap() == fs::read(original).unwrap();
        assert!(same, "what was fetched differs from the original");
    }
    killed
}

#[test]
fn curl_and_python_http_server() {
    let Some([curl, python]) = all_installed("curl-python", ["curl", "python3"]) else {
        return;
    };
    for (mode, slim, kills) in MODES {
        let Some(lab) = lab("curl-python", 2, 1) else {
            return;
        };
        let original = big_file(lab.dir(), 24);
        let mut server = command(lab.node(1), &python, slim);
        server
            .args(["-m", "http.server", "8000", "--bind", "10.77.0.2", "-d"])
            .arg(lab.dir());
        let _server = serve(&lab, server, 8000);
        let urls = ["http://nodeB:8000/big.bin".to_owned()];
        let killed = fetch(&lab, &curl, &urls, &original, slim, kills);
        println!("curl and python's http.server, {mode}: fetched, {killed} connections killed");
        assert!(kills == 0 || killed >= 3, "only {killed} killed");
    }
}

#[test]
fn curl_and_nginx_with_keep_alive_and_sendfile() {
    let Some([curl, nginx]) = all_installed("curl-nginx", ["curl", "nginx"]) else {
        return;
    };
    for (mode, slim, kills) in MODES {
        let Some(lab) = lab("curl-nginx", 2, 1) else {
            return;
        };
        let original = big_file(lab.dir(), 12);
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
        let mut server = command(lab.node(1), &nginx, slim);
        server.arg("-c").arg(&file);
        let _server = serve(&lab, server, 8080);
        let urls: Vec<_> = (0..3)
            .map(|n| format!("http://nodeB:8080/big.bin?{n}"))
            .collect();
        let killed = fetch(&lab, &curl, &urls, &original, slim, kills);
        println!("curl and nginx, {mode}: fetched 3 times, {killed} connections killed");
        assert!(kills == 0 || killed >= 3, "only {killed} killed");
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
    for (mode, slim, kills) in MODES {
        for reverse in [false, true] {
            let Some(lab) = lab("iperf3", 2, 1) else {
                return;
            };
            let mut server = command(lab.node(1), &iperf3, slim);
            server.args(["--server", "--one-off"]);
            let _server = serve(&lab, server, 5201);
            let mut run = command(lab.node(0), &iperf3, slim);
            // A limited rate: the kills, not the processor, are what is tested.
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
            let (code, text, killed) = client(&lab, run, kills);
            assert_eq!(code, Some(0), "{text}");
            let json: serde_json::Value = serde_json::from_str(&text).expect("iperf3 writes JSON");
            let rate = json["end"]["sum_received"]["bits_per_second"]
                .as_f64()
                .unwrap_or(0.0);
            println!(
                "iperf3, {mode}: {:.0} Mbit/s, {killed} connections killed",
                rate / 1e6
            );
            assert!(json.get("error").is_none() && rate > 100e6, "{text}");
            assert!(kills == 0 || killed >= 6, "only {killed} killed");
        }
    }
}

#[test]
fn redis() {
    let programs = ["redis-server", "redis-cli", "redis-benchmark"];
    let Some([redis_server, redis_cli, redis_benchmark]) = all_installed("redis", programs) else {
        return;
    };
    for (mode, slim, kills) in MODES {
        let Some(lab) = lab("redis", 2, 1) else {
            return;
        };
        let mut server = command(lab.node(1), &redis_server, slim);
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

        // A count that would show a request lost or done twice.
        let mut count = command(lab.node(0), &redis_cli, slim);
        count.args(["-h", "10.77.0.2", "-r", "15000", "incr", "counter"]);
        let (code, text, killed) = client(&lab, count, kills);
        assert_eq!(code, Some(0), "{}", &text[text.len().saturating_sub(500)..]);
        let expected: Vec<_> = (1..=15_000).map(|n| n.to_string()).collect();
        assert!(
            text.lines().eq(expected.iter().map(String::as_str)),
            "each increment is seen once"
        );

        let mut bench = command(lab.node(0), &redis_benchmark, slim);
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
        let (code, text, more) = client(&lab, bench, kills);
        println!("redis, {mode}: {killed} and {more} connections killed");
        assert_eq!(code, Some(0), "{text}");
        assert!(
            text.contains("\"SET\"") && text.contains("\"GET\"") && !text.contains("rror"),
            "{text}"
        );
        assert!(
            kills == 0 || (killed >= 1 && more >= 20),
            "only {killed} and {more} killed"
        );
    }
}
