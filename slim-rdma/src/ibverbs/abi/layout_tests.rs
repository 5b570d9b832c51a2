//! What is declared of libibverbs, against its header.

use std::fmt::Write as _;
use std::process::Command;

use super::super::library::PROTOTYPES;
use super::{CONSTANTS, LAYOUTS, ibv_send_wr};

fn compiles(program: &str) -> Result<(), String> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("layout.c");
    std::fs::write(&file, program).unwrap();
    let output = Command::new("cc")
        .args(["-fsyntax-only", "-Wall", "-Werror"])
        .arg(&file)
        .output()
        .map_err(|e| format!("cc: {e}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

/// A program that compiles only if the header says the same. `shift` is added to each number.
fn program(shift: i64) -> String {
    let mut text = String::from("#include <stddef.h>\n#include <infiniband/verbs.h>\n");
    let mut assert = |what: &str, value: i64| {
        writeln!(text, "_Static_assert({what} == {value}, \"{what}\");").unwrap();
    };
    for layout in LAYOUTS {
        let name = layout.name;
        if let Some(size) = layout.size {
            assert(&format!("sizeof(struct {name})"), size as i64 + shift);
        }
        for (field, offset, size) in layout.fields {
            if !field.starts_with('_') {
                let (offset, size) = (*offset as i64 + shift, *size as i64 + shift);
                assert(&format!("offsetof(struct {name}, {field})"), offset);
                assert(&format!("sizeof(((struct {name} *)0)->{field})"), size);
            }
        }
    }
    // Fields that share a place with others.
    let addr = std::mem::offset_of!(ibv_send_wr, remote_addr) as i64;
    let number = std::mem::offset_of!(ibv_send_wr, rkey) as i64;
    for (field, offset, size) in [("ah", addr, 8), ("remote_qpn", number, 4)] {
        let of = "offsetof(struct ibv_send_wr, wr.ud.";
        assert(&format!("{of}{field})"), offset + shift);
        let of = "sizeof(((struct ibv_send_wr *)0)->wr.ud.";
        assert(&format!("{of}{field})"), size + shift);
    }
    for (name, value) in CONSTANTS {
        assert(name, value + shift);
    }
    for (name, prototype) in PROTOTYPES {
        // Macros hide some of the functions.
        writeln!(text, "#undef {name}\n{prototype};").unwrap();
    }
    text
}

#[test]
fn sizes_offsets_values_and_prototypes_are_those_of_the_header() {
    if let Err(why) = compiles("#include <infiniband/verbs.h>\n") {
        let why = why.lines().next().unwrap_or_default().to_owned();
        println!(
            "skip: sizes_offsets_values_and_prototypes_are_those_of_the_header: no header of libibverbs (libibverbs-dev): {why}"
        );
        return;
    }
    assert_eq!(compiles(&program(0)), Ok(()));
    let checks = program(0).matches("_Static_assert").count();
    let wrong = compiles(&program(1)).unwrap_err();
    let found = wrong.matches("static assertion failed").count();
    assert_eq!(found, checks, "each number is checked");
    // A prototype that is not that of the header is an error, too.
    let other = program(0).replace(
        "ibv_close_device(struct ibv_context *)",
        "ibv_close_device(int)",
    );
    assert!(compiles(&other).is_err());
}
