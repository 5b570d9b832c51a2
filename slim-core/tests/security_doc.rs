//! `docs/SECURITY.md` names a test for each claim: they must exist.

use std::fs;
use std::path::Path;

/// The text of all Rust files below a directory.
fn sources(dir: &Path, text: &mut String) {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    for path in entries.map(|entry| entry.path()) {
        if path.is_dir() {
            sources(&path, text);
        } else if path.extension().is_some_and(|e| e == "rs") {
            text.push_str(&fs::read_to_string(path).expect("a source file"));
        }
    }
}

#[test]
fn every_test_that_is_named_exists() {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut text = String::new();
    for krate in [
        "slim",
        "slim-core",
        "slim-agent",
        "slim-preload",
        "slim-cli",
        "slim-lab",
        "netem-tests",
    ] {
        sources(&top.join(krate).join("src"), &mut text);
        sources(&top.join(krate).join("tests"), &mut text);
    }
    let doc = fs::read_to_string(top.join("docs/SECURITY.md")).expect("the document");
    // Every other piece is between two backticks.
    let quoted = doc.split('`').skip(1).step_by(2);
    let is_test = |name: &&str| {
        name.matches('_').count() >= 3 && name.bytes().all(|b| b == b'_' || b.is_ascii_lowercase())
    };
    let named: Vec<&str> = quoted.filter(is_test).collect();
    assert!(named.len() >= 20, "{named:?}");
    for name in named {
        let test = format!("#[test]\nfn {name}()");
        let indented = format!("#[test]\n    fn {name}()");
        assert!(
            text.contains(&test) || text.contains(&indented),
            "there is no test {name}"
        );
    }
}
