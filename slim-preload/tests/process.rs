//! Process-wide matters: the end of the process, its children, what it shares, and the restrictions that it runs under.

mod common;

use std::{fs, os::unix::fs::MetadataExt};

use common::{NEGOTIATED_MS, Program, compare, compile, own_network, same_alone};

/// The program's output must be the bare one. Standard error has one line of SLIM's that contains `why`, or none.
fn steps_back(name: &str, args: &[&str], why: Option<&str>) {
    let program = compile(name, &[]);
    let run = |preloaded, negotiation| {
        Program::new(&program)
            .args(args)
            .env("SLIM_LOG", "info")
            .preloaded(preloaded)
            .negotiation_ms(negotiation)
            .run()
    };
    let bare = run(false, 0);
    assert!(bare.ok(), "{name} {args:?}: {}", bare.transcript());
    for negotiation in [0, NEGOTIATED_MS] {
        let mut got = run(true, negotiation);
        let said = got.stderr.lines().filter(|l| l.contains("plain TCP"));
        let said: Vec<_> = said.map(str::to_owned).collect();
        match why {
            Some(why) => assert!(
                !said.is_empty() && said.iter().all(|l| l.contains(why)),
                "{name} {args:?}: {}",
                got.stderr
            ),
            None => assert!(said.is_empty(), "{name} {args:?}: {}", got.stderr),
        }
        got.stderr.clear();
        if let Some(difference) = compare(&format!("{name} {args:?}"), &bare, &got) {
            panic!("{difference}");
        }
    }
}

#[test]
fn ends_of_processes() {
    for case in [
        "return", "quick", "_exit", "handler", "thread", "busy", "fork", "vfork",
    ] {
        same_alone("exits", &[], &[case]);
    }
}

/// SLIM's thread has the priority of the setting, where the process may have it. No other thread's priority changes.
#[test]
fn the_priority_of_the_setting() {
    if fs::metadata("/proc/self").unwrap().uid() != 0 {
        println!("skip: the_priority_of_the_setting: needs root");
        return;
    }
    let program = compile("priority", &["-pthread"]);
    let refused = "SLIM_PRIORITY=realtime: Operation not permitted";
    for (priority, args, slims, says) in [
        ("", &[][..], "policy 0, nice -15", ""),
        ("normal", &[], "policy 0, nice 0", ""),
        ("realtime", &[], "policy 1, nice 0", ""),
        ("", &["user"], "policy 0, nice 0", ""),
        ("", &["idle"], "policy 5, nice 0", ""),
        ("realtime", &["user"], "policy 0, nice 0", refused),
    ] {
        let run = Program::new(&program).args(args);
        let got = run.env("SLIM_PRIORITY", priority).preloaded(true).run();
        let policy = if args == ["idle"] { 5 } else { 0 };
        let others = ["first", "thread", "child"];
        let others = others.map(|who| format!("{who}: policy {policy}, nice 0\n"));
        let want = format!(
            "a connection: ping, pong\nSLIM: {slims}\n{}",
            others.concat()
        );
        let case = format!("{priority} {args:?}: {got:?}");
        assert_eq!(got.stdout, want, "{case}");
        assert!(got.ok(), "{case}");
        let lines = usize::from(!says.is_empty());
        assert_eq!(got.stderr.lines().count(), lines, "{case}");
        assert!(got.stderr.contains(says), "{case}");
    }
}

/// A signal handler of the program sends while the process waits for its last bytes.
#[test]
fn handlers_that_send_at_the_end() {
    unnoticed("exit_waits", "");
}

/// If SLIM's thread ran until the very end of the process, valgrind would report the thread's memory as lost.
#[test]
fn valgrind_finds_nothing_lost() {
    let program = compile("exits", &[]);
    let run = |preloaded| {
        Program::new("valgrind")
            .args(["--leak-check=full", "--show-leak-kinds=definite,possible"])
            .arg(&program)
            .arg("return")
            .preloaded(preloaded)
            .negotiation_ms(NEGOTIATED_MS)
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

/// Calls that the kernel allows only to a process of one thread, or that give one thread its own descriptors or network.
#[test]
fn what_threads_no_longer_share() {
    if !own_network("what_threads_no_longer_share") {
        return;
    }
    let table = Some("table of descriptors");
    let alone = Some("one thread");
    for (case, why) in [
        ("files", table),
        ("files-by-number", table),
        ("close-range", table),
        ("close-all", table),
        ("close-on-exec", table),
        ("thread", table),
        ("user", alone),
        ("user-by-number", alone),
        ("user-thread", alone),
        ("thread-flags", alone),
        ("mounts", alone),
        ("network", Some("another network")),
        ("same-network", Some("another network")),
        ("own-mounts", None),
        ("uts", None),
        ("bad", Some("another network")),
    ] {
        steps_back("apart", &[case], why);
    }
}

/// The program's parent has installed a system call filter, which kills for calls that only SLIM makes.
#[test]
fn a_filter_from_before() {
    steps_back(
        "filtered",
        &["begin"],
        Some("began under a system call filter"),
    );
}

#[test]
fn numbers_of_vforked_children() {
    unnoticed("vforks", "");
}

/// Asserts that the transcript is the bare one, on unbroken connections and on broken ones.
fn unnoticed(name: &str, case: &str) {
    if !own_network(&format!("{name} {case}")) {
        return;
    }
    let program = compile(name, &[]);
    let run = |preloaded, breaks: &str| {
        Program::new(&program)
            .arg(case)
            .env("T_OWN_NETWORK", "1")
            .env("T_BREAKS", breaks)
            .preloaded(preloaded)
            .negotiation_ms(NEGOTIATED_MS)
            .run()
    };
    let bare = run(false, "0");
    assert!(bare.ok(), "{name} {case}: {}", bare.transcript());
    for breaks in ["0", "1"] {
        let got = run(true, breaks);
        if let Some(difference) = compare(&format!("{name} {case}, {breaks}"), &bare, &got) {
            panic!("{difference}");
        }
    }
}

#[test]
fn roots_without_proc() {
    for case in ["after", "after-unseen", "before"] {
        unnoticed("jailed", case);
    }
}

/// A handler ends the connection on which its own thread is sending. It must not wait for that send, which continues only
/// after the handler.
#[test]
fn handlers_end_what_they_have_interrupted() {
    same_alone("ending_handlers", &[], &[]);
    same_alone("ending_handlers", &[], &["waits"]);
}

#[test]
fn handlers_do_what_they_have_interrupted() {
    for case in ["fork", "listen", "leave"] {
        unnoticed("interrupts", case);
    }
}

/// `dup2` over a connection with SO_LINGER takes its time, as in a bare run, but holds no lock meanwhile.
#[test]
fn a_dup2_that_lingers_holds_up_no_other_call() {
    unnoticed("lingering", "");
}

/// Starting SLIM's thread takes memory of the program. Where there is none, connections are plain TCP.
#[test]
fn a_program_without_memory_for_the_first_connection() {
    let program = compile("no_malloc", &[]);
    let run = |preloaded| {
        let one = Program::new(&program).preloaded(preloaded);
        one.negotiation_ms(NEGOTIATED_MS).run()
    };
    let (bare, mut got) = (run(false), run(true));
    assert!(
        bare.ok() && got.stderr.contains("out of memory"),
        "{}",
        got.transcript()
    );
    got.stderr.clear();
    let difference = compare("no_malloc", &bare, &got);
    assert_eq!(difference, None);
}

/// The preload looks libc's functions up when it is loaded, never in a call that a signal handler may make.
#[test]
fn first_uses_look_nothing_up() {
    let program = compile("first_uses", &["-Wl,-z,now", "-Wno-unused-value"]);
    let got = Program::new(&program)
        .preloaded(true)
        .env("LD_BIND_NOW", "1")
        .env("LD_DEBUG", "symbols")
        .run();
    assert!(got.ok(), "{}", got.transcript());
    let (_, after) = got.stderr.split_once("BEGIN\n").expect("it begins");
    let (uses, _) = after.split_once("END\n").expect("it ends");
    let lookups: Vec<_> = uses.lines().filter(|l| l.contains("symbol=")).collect();
    assert!(lookups.is_empty(), "{lookups:#?}");
}
