//! `docs/ENVIRONMENT.md` describes exactly the variables that the code reads.

use slim_core::config::{LAB_PREFIX, TOOL_VARIABLES, VARIABLES};

#[test]
fn every_variable_is_documented_and_no_other() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/ENVIRONMENT.md");
    let text = std::fs::read_to_string(path).unwrap();
    for v in VARIABLES {
        let row = format!(
            "| `{}` | {} | {} | {} |",
            v.name, v.allowed, v.default, v.help
        );
        assert!(
            text.lines().any(|line| line == row),
            "docs/ENVIRONMENT.md lacks this row:\n{row}"
        );
    }
    let known = |name: &str| VARIABLES.iter().any(|v| v.name == name);
    let rows = text
        .lines()
        .filter_map(|l| l.strip_prefix("| `")?.split('`').next());
    let of_library = rows.clone().filter(|name| known(name)).count();
    assert_eq!(of_library, VARIABLES.len(), "a variable is described twice");
    // All other variables in the document must be known ones of the tools, of the lab, or of our own tests.
    for name in rows.filter(|name| !known(name)) {
        let of_tests = [
            "SLIM_SIM_",
            "SLIM_FUZZ_",
            "SLIM_SOAK",
            "SLIM_WRITE_",
            "SLIM_FORCED_",
        ]
        .iter()
        .any(|p| name.starts_with(p));
        assert!(
            TOOL_VARIABLES.contains(&name) || name.starts_with(LAB_PREFIX) || of_tests,
            "{name} is described, but nothing reads it"
        );
    }
}
