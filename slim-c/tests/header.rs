//! `include/slim.h` is what cbindgen makes of this crate, and `include/slim_table.h` what it makes of the table's structures.
//! `SLIM_WRITE_HEADER=1` writes them anew.

mod common;

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use common::{root, scratch, succeed};

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

fn krate() -> PathBuf {
    root().join("slim-c")
}

fn generate(config: &str, sources: impl FnOnce(cbindgen::Builder) -> cbindgen::Builder) -> String {
    let config = cbindgen::Config::from_file(krate().join(config)).unwrap();
    let bindings = sources(cbindgen::Builder::new())
        .with_config(config)
        .generate()
        .unwrap();
    let mut header = Vec::new();
    bindings.write(&mut header);
    without_safety(&String::from_utf8(header).unwrap())
}

fn is_up_to_date(name: &str, made: &str) {
    let path = krate().join("include").join(name);
    if std::env::var_os("SLIM_WRITE_HEADER").is_some() {
        fs::write(&path, made).unwrap();
    }
    let kept = fs::read_to_string(&path).unwrap_or_default();
    let differs = kept.lines().zip(made.lines()).find(|(a, b)| a != b);
    assert!(
        kept == made,
        "include/{name} is stale, first at {differs:?}: SLIM_WRITE_HEADER=1 cargo test -p slim-c --test header"
    );
    // What only Rust needs is not there.
    assert!(!made.contains("# Safety"));
}

#[test]
fn the_header_is_up_to_date() {
    let made = generate("cbindgen.toml", |builder| builder.with_crate(krate()));
    is_up_to_date("slim.h", &made);
    assert!(made.contains("slim_flow_post("), "{made}");
    assert!(!made.contains("slim_table"), "it has a header of its own");
}

#[test]
fn the_header_of_the_table_is_up_to_date() {
    let made = generate("cbindgen-table.toml", |builder| {
        builder
            .with_src(root().join("slim-agent/src/table/types.rs"))
            .with_src(krate().join("src/table.rs"))
    });
    is_up_to_date("slim_table.h", &made);
    assert!(made.contains("slim_table(void);"), "{made}");
}

/// Compiles a file that includes only this header, with all warnings as errors.
fn compiles(compiler: &str, standard: &str, name: &str, text: &str) {
    let dir = scratch();
    let source = dir.path().join(name);
    fs::write(&source, text).unwrap();
    let mut command = Command::new(compiler);
    command
        .args([standard, "-Wall", "-Wextra", "-pedantic", "-Werror", "-c"])
        .arg("-I")
        .arg(krate().join("include"))
        .arg(&source)
        .arg("-o")
        .arg(dir.path().join("object"));
    succeed(&mut command);
}

#[test]
fn the_header_of_the_table_stands_alone_in_c_and_in_cpp() {
    let text = "#include <slim_table.h>\n\
                int last(slim_table_escalation *to);\n\
                int last(slim_table_escalation *to) {\n\
                \x20   const slim_table_calls *table = slim_table();\n\
                \x20   return table->escalations(to, 1, sizeof *to) + (int)table->size - SLIM_TABLE_ON;\n\
                }\n";
    compiles("cc", "-std=c99", "table.c", text);
    compiles("c++", "-std=c++98", "table.cpp", text);
    compiles("c++", "-std=c++17", "table.cpp", text);
}

/// The fields of the first version keep their places.
#[test]
fn the_layout_of_the_first_version_stays() {
    let fields = [
        ("peer", "suspended", 1252, 4),
        ("flow", "resumes", 248, 8),
        ("escalation", "error", 284, 4),
    ];
    let checks = fields.map(|(name, field, at, size)| {
        format!(
            "char {name}_at[offsetof(slim_table_{name}, {field}) == {at} ? 1 : -1];\n\
             char {name}_size[sizeof(((slim_table_{name} *)0)->{field}) == {size} ? 1 : -1];\n"
        )
    });
    let text = format!("#include <slim_table.h>\n{}", checks.concat());
    compiles("cc", "-std=c99", "layout.c", &text);
}
