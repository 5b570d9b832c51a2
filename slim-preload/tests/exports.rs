//! The preload exports the hooked names and nothing else: any other exported name would interpose on a program's own symbol.

mod common;

use std::collections::BTreeSet;
use std::process::Command;

const GOLDEN: &str = include_str!("exports.golden");

#[test]
fn only_hooks_are_exported() {
    let library = common::preload();
    let out = Command::new("nm")
        .args(["-D", "--defined-only", "--format=posix"])
        .arg(&library)
        .output()
        .expect("nm");
    assert!(out.status.success(), "nm {}", library.display());
    let text = String::from_utf8(out.stdout).expect("names are ASCII");
    let got: BTreeSet<_> = text
        .lines()
        .filter_map(|l| l.split_whitespace().next())
        .map(|name| name.split('@').next().unwrap_or(name))
        .collect();
    let want: BTreeSet<_> = GOLDEN.lines().filter(|l| !l.starts_with('#')).collect();
    let more: Vec<_> = got.difference(&want).collect();
    let less: Vec<_> = want.difference(&got).collect();
    assert!(
        more.is_empty() && less.is_empty(),
        "not in exports.golden: {more:?}; in exports.golden only: {less:?}"
    );
}
