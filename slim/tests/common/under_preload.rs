//! Runs a test again in a process of its own, under the preload library.

#![allow(dead_code, reason = "each test program uses only a part")]

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The preload library: `SLIM_PRELOAD`, or one built here.
fn library() -> PathBuf {
    if let Some(path) = std::env::var_os("SLIM_PRELOAD") {
        return path.into();
    }
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built = Command::new(cargo)
        .args(["build", "--profile", "fast", "--lib", "-p", "slim-preload"])
        .arg("--target-dir")
        .arg(target)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&built.stderr);
    assert!(
        built.status.success(),
        "the library cannot be built: {said}"
    );
    target.join("fast/libslim_preload.so")
}

/// Whether this process has the preload library. If not, the test of this name is run in a process that has it.
pub fn is_under_preload(test: &str) -> bool {
    is_under(test, library)
}

/// As [`is_under_preload`], with a preload library that does not offer its agent, as that of an older version.
pub fn is_under_older_preload(test: &str) -> bool {
    is_under(test, || {
        let older = Path::new(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("older.{}.{test}.so", std::process::id()));
        let mut library = fs::read(library()).unwrap();
        let name = b"slim_offered_agent_4\0";
        let mut at: Vec<usize> = Vec::new();
        for (n, bytes) in library.windows(name.len()).enumerate() {
            if bytes == name {
                at.push(n);
            }
        }
        assert!(!at.is_empty(), "the library does not offer its agent");
        for n in at {
            library[n..n + 4].copy_from_slice(b"hide");
        }
        fs::write(&older, library).unwrap();
        older
    })
}

fn is_under(test: &str, library: impl FnOnce() -> PathBuf) -> bool {
    if std::env::var_os("LD_PRELOAD").is_some() {
        return true;
    }
    let events = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!(
        "events.{}.{}",
        std::process::id(),
        test
    ));
    let library = library();
    let ran = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture", test])
        .env("LD_PRELOAD", &library)
        .env("SLIM_EVENTS", &events)
        .output()
        .unwrap();
    let _ = fs::remove_file(&events);
    if library.starts_with(env!("CARGO_TARGET_TMPDIR")) {
        let _ = fs::remove_file(&library);
    }
    let said = String::from_utf8_lossy(&ran.stdout) + String::from_utf8_lossy(&ran.stderr);
    println!("{said}");
    assert!(
        ran.status.success(),
        "the test fails under the preload: {}",
        ran.status
    );
    assert!(said.contains("1 passed"), "there is no test {test}");
    false
}

/// One line of the preload library's event log.
pub struct Line {
    pub ends: (SocketAddr, SocketAddr),
    pub kind: String,
}

/// What the preload library has logged in this process.
pub fn logged() -> Vec<Line> {
    let log = std::env::var_os("SLIM_EVENTS").unwrap();
    let text = fs::read_to_string(log).unwrap_or_default();
    let field = |line: &str, name: &str| {
        let (_, rest) = line.split_once(&format!("\"{name}\":\"")).unwrap();
        rest.split_once('"').unwrap().0.to_owned()
    };
    let line = |line: &str| Line {
        ends: ["sock", "peer"]
            .map(|end| field(line, end).parse().unwrap())
            .into(),
        kind: field(line, "kind"),
    };
    text.lines().map(line).collect()
}
