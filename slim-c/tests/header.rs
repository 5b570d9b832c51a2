//! `include/slim.h` is what cbindgen makes of this crate. `SLIM_WRITE_HEADER=1` writes it anew.

use std::fs;
use std::path::Path;

/// Leaves out the sections on safety, which are for Rust. The header says the same at its beginning.
fn without_safety(header: &str) -> String {
    let (mut lines, mut leaves_out) = (Vec::<&str>::new(), false);
    for line in header.lines() {
        if line.trim_start() == "* # Safety" {
            leaves_out = true;
            if lines.last().is_some_and(|last| last.trim() == "*") {
                lines.pop();
            }
        }
        leaves_out &= line.trim() != "*/";
        if !leaves_out {
            lines.push(line);
        }
    }
    lines.join("\n") + "\n"
}

fn generate(krate: &Path) -> String {
    let config = cbindgen::Config::from_file(krate.join("cbindgen.toml")).unwrap();
    let bindings = cbindgen::Builder::new()
        .with_crate(krate)
        .with_config(config)
        .generate()
        .unwrap();
    let mut header = Vec::new();
    bindings.write(&mut header);
    without_safety(&String::from_utf8(header).unwrap())
}

#[test]
fn the_header_is_up_to_date() {
    let krate = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = krate.join("include/slim.h");
    let made = generate(krate);
    if std::env::var_os("SLIM_WRITE_HEADER").is_some() {
        fs::write(&path, &made).unwrap();
    }
    let kept = fs::read_to_string(&path).unwrap_or_default();
    let differs = kept.lines().zip(made.lines()).find(|(a, b)| a != b);
    assert!(
        kept == made,
        "include/slim.h is stale, first at {differs:?}: SLIM_WRITE_HEADER=1 cargo test -p slim-c --test header"
    );
    assert!(made.contains("slim_flow_post("), "{made}");
    // What users must know is there, and what only Rust needs is not.
    assert!(!made.contains("# Safety"));
}
