//! The installed library: its symbols, its pkg-config file, every function, panics.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use common::*;

/// The functions that the headers declare.
fn declared() -> BTreeSet<String> {
    let read = |name: &str| fs::read_to_string(installed().join("include").join(name)).unwrap();
    let headers = read("slim.h") + &read("slim_table.h");
    let code = headers
        .lines()
        .filter(|l| !l.trim_start().starts_with(['*', '/', '#', ' ']));
    code.filter_map(|line| {
        let before = line.split('(').next()?;
        let name = before.rsplit([' ', '*']).next()?;
        (line.contains('(') && name.starts_with("slim_")).then(|| name.to_owned())
    })
    .collect()
}

/// The defined symbols of a file, as nm shows them.
fn symbols(args: &[&str], file: &Path) -> BTreeSet<String> {
    let output = succeed(Command::new("nm").args(args).arg(file));
    let output = String::from_utf8(output.stdout).unwrap();
    let names = output.lines().filter_map(|l| l.split_whitespace().nth(2));
    names.map(str::to_owned).collect()
}

#[test]
fn the_libraries_export_what_the_headers_declare_and_nothing_else() {
    let declared = declared();
    assert!(declared.len() > 30, "{declared:?}");
    let shared = installed().join("lib/libslim.so.0.1.0");
    let mut versioned: BTreeSet<_> = declared.iter().map(|n| format!("{n}@@SLIM_0.1")).collect();
    versioned.insert("SLIM_0.1".to_owned());
    assert_eq!(symbols(&["-D", "--defined-only"], &shared), versioned);
    let archive = installed().join("lib/libslim.a");
    assert_eq!(symbols(&["-g", "--defined-only"], &archive), declared);
}

#[test]
fn the_soname_has_the_major_version_and_no_other_library_is_needed_than_those_of_the_system() {
    let lib = installed().join("lib");
    let output = succeed(
        Command::new("readelf")
            .args(["-dW"])
            .arg(lib.join("libslim.so.0.1.0")),
    );
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("Library soname: [libslim.so.0]"), "{text}");
    for line in text.lines().filter(|l| l.contains("(NEEDED)")) {
        let known = [
            "libc.so",
            "libgcc_s.so",
            "libm.so",
            "libpthread.so",
            "libdl.so",
            "ld-linux",
        ];
        assert!(known.iter().any(|name| line.contains(name)), "{line}");
    }
    let to = |name: &str| fs::read_link(lib.join(name)).unwrap();
    assert_eq!(to("libslim.so"), Path::new("libslim.so.0"));
    assert_eq!(to("libslim.so.0"), Path::new("libslim.so.0.1.0"));
}

/// Compiles the echo example with only these words after the source, and lets it talk to itself.
fn builds_and_runs(name: &str, words: &[String], library_path: Option<&Path>) {
    let dir = scratch();
    let program = dir.path().join(name);
    let mut command = Command::new("cc");
    command
        .arg(root().join("examples/library/echo.c"))
        .args(words);
    succeed(command.arg("-o").arg(&program));
    let run = || {
        let mut command = Command::new(&program);
        if let Some(path) = library_path {
            command.env("LD_LIBRARY_PATH", path);
        }
        command
    };
    let (server, port) = serve(run().args(["serve", "127.0.0.1", "0"]));
    let mut client = Running::start(run().args(["127.0.0.1", &port]));
    let input = client.child.stdin.as_mut().unwrap();
    std::io::Write::write_all(input, b"bye\n").unwrap();
    client.resumes();
    server.resumes();
}

#[test]
fn pkg_config_says_how_to_link_the_shared_library() {
    let words = pkg_config(installed(), &["--cflags", "--libs"]);
    builds_and_runs("shared", &words, Some(&installed().join("lib")));
}

#[test]
fn pkg_config_says_how_to_link_the_static_library() {
    // A program without any shared library.
    let mut words = pkg_config(installed(), &["--static", "--cflags", "--libs"]);
    words.push("-static".to_owned());
    builds_and_runs("static", &words, None);
    // A program with the system's shared libraries: the archive by its name.
    for word in &mut words {
        if word == "-lslim" {
            "-l:libslim.a".clone_into(word);
        }
    }
    words.pop();
    builds_and_runs("archive", &words, None);
}

/// The installed files can be moved.
#[test]
fn the_installation_is_relocatable() {
    let dir = scratch();
    let moved = dir.path().join("moved");
    succeed(Command::new("cp").arg("-a").arg(installed()).arg(&moved));
    let words = pkg_config(&moved, &["--cflags", "--libs"]);
    assert!(words.iter().any(|w| w.contains("/moved/")), "{words:?}");
    builds_and_runs("moved-program", &words, Some(&moved.join("lib")));
}

#[test]
fn every_function_does_what_the_header_says() {
    let dir = scratch();
    let program = compile(installed(), "slim-c/tests/c/api.c", dir.path(), &[]);
    let output = succeed(&mut Command::new(program));
    // Nothing is printed but the names of the parts.
    assert_eq!(output.stdout.iter().filter(|b| **b == b'\n').count(), 7);
    assert!(output.stderr.is_empty());
}

#[test]
fn a_program_asks_for_its_flows_and_the_death_of_its_peer() {
    let dir = scratch();
    let program = compile(installed(), "slim-c/tests/c/table.c", dir.path(), &[]);
    succeed(&mut Command::new(program));
}

#[test]
fn a_session_that_cannot_be_opened_leaves_nothing() {
    let dir = scratch();
    let program = compile(installed(), "slim-c/tests/c/scarce.c", dir.path(), &[]);
    for lacking in ["descriptors", "threads", "memory"] {
        succeed(Command::new(&program).arg(lacking));
    }
}

#[test]
fn a_panic_is_an_error_code_and_prints_nothing() {
    let dir = scratch();
    let program = compile(
        installed_panicking(),
        "slim-c/tests/c/panic.c",
        dir.path(),
        &[],
    );
    for name in [
        "slim_flow_send",
        "slim_flow_recv",
        "slim_flow_post",
        "slim_session_progress",
        "slim_session_events",
        "slim_connect",
    ] {
        let output = succeed(Command::new(&program).arg(name));
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(output.stdout.is_empty() && err.is_empty(), "{name}: {err}");
    }
    // The shipped library has no such hook.
    let shared = fs::read(installed().join("lib/libslim.so.0.1.0")).unwrap();
    let name = b"SLIM_FORCED_PANIC";
    assert!(!shared.windows(name.len()).any(|at| at == name));
}
