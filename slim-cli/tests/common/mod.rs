//! Helpers of the tests of the programs.

#![allow(dead_code, reason = "not every test program uses all of it")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

/// A directory that is removed at the end of the test.
pub struct Scratch(TempDir);

impl Scratch {
    pub fn new(name: &str) -> Self {
        let prefix = format!("slim-cli-{name}-");
        Self(tempfile::Builder::new().prefix(&prefix).tempdir().unwrap())
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, text).unwrap();
        path
    }

    /// An executable shell script. Another process writes it: if this one did, a child that another thread starts at that moment would have the open file,
    /// too, and a script that somebody may write to cannot be executed.
    pub fn script(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        let text = format!("#!/bin/sh\n{text}\n");
        let write = r#"printf %s "$1" > "$0" && chmod 755 "$0""#;
        let status = Command::new("sh")
            .args(["-c", write])
            .arg(&path)
            .arg(text)
            .status();
        assert!(status.unwrap().success());
        path
    }

    /// A stand-in for the preload library: a copy of the C library, which the loader accepts and
    /// which has no effect.
    pub fn library(&self) -> PathBuf {
        let path = self.path("libslim_preload.so");
        fs::copy(libc_path(), &path).unwrap();
        path
    }
}

/// The C library that this very process runs with.
fn libc_path() -> PathBuf {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps
        .lines()
        .find(|l| l.ends_with("/libc.so.6"))
        .expect("linked to the C library");
    Path::new(line.split_whitespace().next_back().unwrap()).to_owned()
}

/// `slim` with a clean environment.
pub fn slim() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_slim"));
    command
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    command
}

pub fn output(command: &mut Command) -> (i32, String, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (status.code().unwrap_or(-1), text(stdout), text(stderr))
}

/// Checks that input is refused: status 2, nothing on standard output, and exactly one line on standard error that contains
/// `words`.
pub fn assert_refused(command: &mut Command, words: &[&str]) {
    let (status, out, err) = output(command);
    assert_eq!((status, out.as_str()), (2, ""), "stderr: {err}");
    assert_eq!(err.lines().count(), 1, "not one line: {err}");
    assert!(err.starts_with("slim: "), "{err}");
    for word in words {
        assert!(err.contains(word), "no `{word}` in: {err}");
    }
}
