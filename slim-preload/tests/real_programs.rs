//! Unmodified programs do with the preload what they do without it: the same output, the same exit status.
//! (netem-tests tests their transfers over breaking connections, in the lab.)

mod common;

use common::{NEGOTIATED_MS, Program, Running, compare, scratch};
use std::fs;
use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

fn installed(test: &str, names: &[&str]) -> Option<Vec<PathBuf>> {
    names
        .iter()
        .map(|name| {
            // Only where packages install: a shim in a home directory may start the program through a shell.
            let found = ["/usr/bin", "/usr/sbin", "/usr/local/bin", "/bin"]
                .map(|d| Path::new(d).join(name))
                .into_iter()
                .find(|p| p.is_file());
            if found.is_none() {
                println!("skip: {test}: {name} is not installed");
            }
            found
        })
        .collect()
}

/// A port that was free a moment ago.
fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("its address").port()
}

fn wait_for(port: u16, server: &mut Running) {
    let begun = Instant::now();
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(server.alive(), "the server ended");
        assert!(begun.elapsed() < Duration::from_secs(20), "nobody listens");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn directory(name: &str) -> PathBuf {
    let dir = scratch(name);
    fs::create_dir_all(&dir).expect("a directory");
    dir
}

/// Pseudo-random bytes, so that misplaced data never matches.
fn bytes(n: usize) -> Vec<u8> {
    let mut x = 88_172_645_463_325_252_u64;
    (0..n / 8)
        .flat_map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            x.to_le_bytes()
        })
        .collect()
}

#[test]
fn python() {
    let Some(paths) = installed("python", &["python3"]) else {
        return;
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/py/net.py");
    let run = |preloaded, negotiation| {
        Program::new(&paths[0])
            .arg(&script)
            .preloaded(preloaded)
            .negotiation_ms(negotiation)
            .run()
    };
    let bare = run(false, 0);
    assert!(bare.ok(), "{}", bare.transcript());
    for (mode, got) in [("negotiating", run(true, 0)), ("negotiated", run(true, 60))] {
        if let Some(difference) = compare(mode, &bare, &got) {
            panic!("{difference}");
        }
    }
}

/// The output and the downloaded body of curl with these arguments. `{}` in them stands for the address.
fn curl(curl: &Path, dir: &Path, port: u16, args: &[&str], preloaded: bool) -> String {
    let out = dir.join("out");
    let _ = fs::remove_file(&out);
    let outcome = Program::new(curl)
        .args(["--silent", "--show-error", "--max-time", "30", "-o"])
        .arg(&out)
        .args(
            args.iter()
                .map(|a| a.replace("{}", &format!("http://127.0.0.1:{port}"))),
        )
        .dir(dir)
        .preloaded(preloaded)
        .run();
    // Leaves out "after 1 ms", which differs from run to run.
    let said = outcome.transcript();
    let said = said.split(" after ").next().unwrap_or(&said);
    let mut body = Vec::new();
    if let Ok(mut f) = fs::File::open(&out) {
        f.read_to_end(&mut body).expect("a file of ours");
    }
    if args.contains(&"--head") {
        // The date differs from run to run.
        let text = String::from_utf8_lossy(&body);
        let kept: Vec<_> = text.lines().filter(|l| !l.starts_with("Date:")).collect();
        body = kept.join("\n").into_bytes();
    }
    let sum = body.iter().fold(0_u64, |h, b| {
        (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3)
    });
    format!(
        "{said} exit {:?}, {} bytes, sum {sum:x}\n",
        outcome.status.code(),
        body.len()
    )
    .replace(&port.to_string(), "PORT")
}

const CURL: &[&[&str]] = &[
    &["{}/big.bin"],
    &["--http1.0", "{}/big.bin"],
    &[
        "{}/small",
        "-o",
        "/dev/null",
        "{}/big.bin",
        "-o",
        "/dev/null",
        "{}/small",
    ],
    &["--limit-rate", "20M", "{}/big.bin"],
    &[
        "--head",
        "-w",
        "%{http_code} %{num_connects} %{content_type}\n",
        "{}/big.bin",
    ],
    &["--fail", "-w", "%{http_code}\n", "{}/nothing"],
    &[
        "-r",
        "100000-299999",
        "-w",
        "%{http_code} %{size_download}\n",
        "{}/big.bin",
    ],
    &[
        "--parallel",
        "--no-progress-meter",
        "{}/small",
        "-o",
        "/dev/null",
        "{}/big.bin",
    ],
    &["http://127.0.0.1:1/"],
];

#[test]
fn curl_and_nginx() {
    let Some(paths) = installed("curl_and_nginx", &["curl", "nginx"]) else {
        return;
    };
    let dir = directory("nginx");
    fs::write(dir.join("big.bin"), bytes(8 << 20)).expect("a file");
    fs::write(dir.join("small"), "small\n").expect("a file");
    let at = dir.display();
    // SAFETY: no memory is involved.
    let root = unsafe { libc::geteuid() } == 0;
    let user = if root { "user root;" } else { "" };
    let said = |slim_server: bool, slim_client: bool| {
        let port = free_port();
        let config = format!(
            "daemon off; {user} worker_processes 2; pid {at}/pid; error_log {at}/error.log;\n\
             events {{ worker_connections 64; }}\n\
             http {{ access_log off; sendfile on; tcp_nopush on; keepalive_timeout 60;\n\
             client_body_temp_path {at}; proxy_temp_path {at}; fastcgi_temp_path {at};\n\
             uwsgi_temp_path {at}; scgi_temp_path {at};\n\
             server {{ listen 127.0.0.1:{port}; root {at}; }} }}\n"
        );
        let file = dir.join("conf");
        fs::write(&file, config).expect("a file");
        let mut server = Program::new(&paths[1])
            .args(["-e", "stderr", "-p"])
            .arg(&dir)
            .arg("-c")
            .arg(&file)
            .preloaded(slim_server)
            .start();
        wait_for(port, &mut server);
        let all: Vec<_> = CURL
            .iter()
            .map(|args| curl(&paths[0], &dir, port, args, slim_client))
            .collect();
        // SIGQUIT is nginx's graceful shutdown: workers finish their requests.
        server.signal(libc::SIGQUIT);
        let end = server.finish_within(Duration::from_secs(20));
        (all, end.transcript().replace(&port.to_string(), "PORT"))
    };
    let bare = said(false, false);
    assert!(bare.0[0].contains("exit Some(0)"), "{bare:?}");
    for (server, client) in [(true, true), (true, false), (false, true)] {
        assert_eq!(
            said(server, client),
            bare,
            "preload at the server {server}, at the client {client}"
        );
    }
}

#[test]
fn curl_and_python_http_server() {
    let Some(paths) = installed("curl_and_python_http_server", &["curl", "python3"]) else {
        return;
    };
    let dir = directory("pyhttp");
    fs::write(dir.join("big.bin"), bytes(8 << 20)).expect("a file");
    fs::write(dir.join("small"), "small\n").expect("a file");
    let said = |slim_server: bool, slim_client: bool| {
        let port = free_port();
        let mut server = Program::new(&paths[1])
            .args([
                "-m",
                "http.server",
                &port.to_string(),
                "--bind",
                "127.0.0.1",
            ])
            .arg("-d")
            .arg(&dir)
            .preloaded(slim_server)
            .start();
        wait_for(port, &mut server);
        CURL.iter()
            .map(|args| curl(&paths[0], &dir, port, args, slim_client))
            .collect::<Vec<_>>()
    };
    let bare = said(false, false);
    assert!(bare[0].contains("exit Some(0)"), "{bare:?}");
    for (server, client) in [(true, true), (true, false), (false, true)] {
        assert_eq!(
            said(server, client),
            bare,
            "preload at the server {server}, at the client {client}"
        );
    }
}

#[test]
fn redis() {
    let Some(paths) = installed("redis", &["redis-server", "redis-cli", "redis-benchmark"]) else {
        return;
    };
    let dir = directory("redis");
    let said = |slim_server: bool, slim_client: bool| {
        let port = free_port().to_string();
        let mut server = Program::new(&paths[0])
            .args([
                "--port",
                &port,
                "--bind",
                "127.0.0.1",
                "--save",
                "",
                "--appendonly",
                "no",
                "--dir",
            ])
            .arg(&dir)
            .preloaded(slim_server)
            .start();
        wait_for(port.parse().expect("a number"), &mut server);
        let cli = |args: &[&str]| {
            Program::new(&paths[1])
                .args(["-p", &port])
                .args(args)
                .preloaded(slim_client)
                .run()
                .transcript()
        };
        let mut all = vec![
            cli(&["set", "key", "value"]),
            cli(&["get", "key"]),
            cli(&["-r", "500", "incr", "n"]),
            cli(&[
                "eval",
                "return redis.call('incrby', KEYS[1], ARGV[1])",
                "1",
                "n",
                "42",
            ]),
            cli(&["nonsense"]),
        ];
        let bench = Program::new(&paths[2])
            .args([
                "-p",
                &port,
                "-n",
                "20000",
                "-c",
                "25",
                "-P",
                "4",
                "-d",
                "3000",
                "-t",
                "set,get,lpush",
                "-q",
            ])
            .preloaded(slim_client)
            .run();
        let names: Vec<_> = bench
            .stdout
            .split(['\r', '\n'])
            .filter(|l| l.contains("requests per second"))
            .filter_map(|l| l.split(':').next())
            .collect();
        all.push(format!("{names:?} {}{:?}", bench.stderr, bench.status));
        all.push(cli(&["dbsize"]));
        all.push(cli(&["shutdown", "nosave"]));
        let end = server.finish_within(Duration::from_secs(20));
        all.push(format!("{:?}", end.status));
        all
    };
    let bare = said(false, false);
    assert!(bare[1].contains("value"), "{bare:?}");
    for (server, client) in [(true, true), (true, false), (false, true)] {
        assert_eq!(
            said(server, client),
            bare,
            "preload at the server {server}, at the client {client}"
        );
    }
}

#[test]
fn iperf3() {
    let Some(paths) = installed("iperf3", &["iperf3"]) else {
        return;
    };
    for (slim_server, slim_client) in [(false, false), (true, true), (true, false), (false, true)] {
        for extra in [
            &["-P", "3"][..],
            &["-R"],
            &["-u", "-b", "50M"],
            &["--bidir"],
        ] {
            let port = free_port().to_string();
            let server = Program::new(&paths[0])
                .args(["-s", "-1", "-p", &port])
                .preloaded(slim_server)
                .negotiation_ms(NEGOTIATED_MS)
                .start();
            // The server takes one client only, so a test connection must not probe whether it listens.
            let begun = Instant::now();
            let outcome = loop {
                let outcome = Program::new(&paths[0])
                    .args(["-c", "127.0.0.1", "-t", "1", "-J", "-p", &port])
                    .args(extra)
                    .preloaded(slim_client)
                    .run();
                if !outcome.stdout.contains("refused") || begun.elapsed() > Duration::from_secs(10)
                {
                    break outcome;
                }
            };
            let name = format!("server {slim_server}, client {slim_client}, {extra:?}");
            assert!(outcome.ok(), "{name}: {}", outcome.transcript());
            assert!(
                !outcome.stdout.contains("\"error\""),
                "{name}: {}",
                outcome.stdout
            );
            assert_eq!(outcome.stderr, "", "{name}");
            let end = server.finish_within(Duration::from_secs(20));
            assert!(
                end.ok() && end.stderr.is_empty(),
                "{name}: {}",
                end.transcript()
            );
        }
    }
}
