//! What happens to the process as a whole: its end, its children, what it shares, and what it is allowed.

mod common;

use common::{Program, SETTLED, compile, same_alone};

#[test]
fn ends_of_processes() {
    for case in [
        "return", "quick", "_exit", "handler", "thread", "busy", "fork", "vfork",
    ] {
        same_alone("exits", &[], &[case]);
    }
}

/// A process whose thread of ours went on until the last moment would leave the thread's memory behind.
#[test]
fn valgrind_finds_nothing_lost() {
    let program = compile("exits", &[]);
    let run = |preloaded| {
        Program::new("valgrind")
            .args(["--leak-check=full", "--show-leak-kinds=definite,possible"])
            .arg(&program)
            .arg("return")
            .preloaded(preloaded)
            .settle(SETTLED)
            .run()
    };
    if std::process::Command::new("valgrind")
        .arg("--version")
        .output()
        .is_err()
    {
        println!("skip: valgrind_finds_nothing_lost: valgrind is not installed");
        return;
    }
    for preloaded in [false, true] {
        let got = run(preloaded);
        assert!(got.ok(), "{}", got.transcript());
        let nothing = got.stderr.contains("no leaks are possible")
            || got.stderr.contains("ERROR SUMMARY: 0 errors");
        assert!(nothing, "preloaded: {preloaded}\n{}", got.stderr);
        assert!(got.stdout.contains("works: ping, pong"), "{}", got.stdout);
    }
}
