//! Every hooked call gives the same result, errno, flags, readiness and signals with and without the preload.
//!
//! Each C program in `c/` prints a transcript of all results that it sees. It runs bare, under the preload before and after
//! the negotiation has ended, with `SLIM=off`, and (server and client programs) with the preload at one end only. Every
//! transcript must be the bare one.

mod common;

use common::events::Events;
use common::{
    NEGOTIATED_MS, Program, apart, compare, compile, pair, preload, same_alone, same_pair,
};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::process::Command;

#[test]
fn calls_that_move_bytes() {
    same_alone("calls", &[], &[]);
}

#[test]
fn calls_on_other_descriptors() {
    same_alone("others", &[], &[]);
}

#[test]
fn wrong_calls() {
    same_alone("wrong", &[], &[]);
}

#[test]
fn beginnings() {
    same_alone("connects", &[], &[]);
}

#[test]
fn endings() {
    same_pair("closing", &[], &[]);
}

#[test]
fn short_connections() {
    same_alone("shorts", &[], &[]);
}

#[test]
fn calls_left_by_a_jump() {
    same_alone("jumps", &[], &[]);
}

#[test]
fn urgent_bytes() {
    for case in [
        "close",
        "close,aside",
        "close,inline",
        "shut,twice",
        "shut,inline,twice",
        "more,aside",
    ] {
        same_pair("urgent", &[], &[case]);
    }
}

#[test]
fn readiness() {
    same_alone("ready", &[], &[]);
}

/// The application gets its error queue, and waits end when their time limits do.
#[test]
fn events_of_whole_connections() {
    same_alone("events", &[], &[]);
}

#[test]
fn epoll() {
    same_alone("epolls", &[], &[]);
}

#[test]
fn copies_and_numbers() {
    same_alone("dups", &[], &[]);
}

/// Closing a descriptor number by a raw system call has the same effect as `close`.
#[test]
fn numbers_closed_unseen() {
    same_alone("unseen", &[], &[]);
}

/// An end of the stream that poll has reported stays reported, whatever the negotiation finds out about the peer afterwards.
#[test]
fn ends_that_were_shown() {
    same_alone("shown", &["-rdynamic"], &[]);
}

/// Random sequences of calls on both ends, some of them raw system calls that no hook sees, behave as on bare sockets.
/// `SLIM_SEQUENCES` is the number of sequences. A failure names the blocks of 20 that differ, and how to see every call of one.
#[test]
fn sequences_of_calls() {
    const PROCESSES: u32 = 4;
    const PER_BLOCK: u32 = 20;
    let want = std::env::var("SLIM_SEQUENCES").ok();
    let want = want.and_then(|n| n.parse().ok()).unwrap_or(20_000);
    let blocks = (want / PER_BLOCK).div_ceil(PROCESSES);
    let program = compile("sequences", &[]);
    let run = |preloaded: bool| {
        let start = |part: u32| {
            Program::new(&program)
                .args([part * blocks, blocks].map(|n| n.to_string()))
                .preloaded(preloaded)
                .negotiation_ms(5)
                .env("SLIM_LOG", "off")
                .start()
        };
        let all: Vec<_> = (0..PROCESSES).map(start).collect();
        let limit = std::time::Duration::from_secs(600);
        all.into_iter()
            .map(|one| one.finish_within(limit))
            .collect::<Vec<_>>()
    };
    let (bare, got) = (run(false), run(true));
    for (want, got) in bare.iter().zip(&got) {
        assert!(want.ok(), "{}", want.transcript());
        assert!(got.ok() && got.stderr.is_empty(), "{}", got.transcript());
        let different: Vec<_> = want
            .stdout
            .lines()
            .zip(got.stdout.lines())
            .filter(|(a, b)| a != b)
            .collect();
        assert!(
            different.is_empty(),
            "{different:?}: to see what block N does, run tests/c/sequences.c with N 1 N, bare and with the library"
        );
    }
}

/// Descriptors that SLIM makes for a resume never take a number that the program could have got, not even for a moment.
#[test]
fn numbers_during_resumes() {
    let program = compile("numbers", &[]);
    let events = common::scratch("numbers-events");
    let bare = Program::new(&program).run();
    assert!(bare.ok(), "{}", bare.transcript());
    let got = Program::new(&program)
        .preloaded(true)
        .negotiation_ms(NEGOTIATED_MS)
        .env("T_BREAKS", "1")
        .env("SLIM_EVENTS", &events)
        .run();
    let resumes = Events::read(&events).count("resume");
    if let Some(difference) = compare("numbers", &bare, &got) {
        panic!("{difference}after {resumes} resumes");
    }
    assert!(resumes >= 300, "{resumes} resumes");
}

#[test]
fn options() {
    same_alone("options", &[], &[]);
}

#[test]
fn time_limits_and_signals() {
    same_alone("timers", &[], &[]);
}

#[test]
fn a_process_without_connections() {
    same_alone("alone", &[], &[]);
}

#[test]
fn processes() {
    same_alone("forks", &[], &[]);
}

#[test]
fn forks_while_others_register() {
    same_alone("mirrors", &[], &["forking"]);
}

#[test]
fn forks_while_descriptors_are_made() {
    same_alone("strays", &[], &[]);
}

#[test]
fn unusual_processes_and_limits() {
    same_alone("kin", &[], &[]);
}

#[test]
fn threads() {
    same_alone("threads", &[], &[]);
}

#[test]
fn several_messages_in_a_call() {
    same_alone("many", &[], &[]);
}

#[test]
fn rare_calls() {
    same_alone("rare", &[], &[]);
}

/// Thread-local storage takes space from the stack of a new thread, SLIM's own thread included.
#[test]
fn much_thread_local_storage() {
    same_alone("big_tls", &[], &[]);
}

#[test]
fn fortified_calls() {
    let flags = ["-O2", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"];
    let names = Command::new("nm")
        .arg("-u")
        .arg(compile("fortify", &flags))
        .output()
        .expect("nm");
    let names = String::from_utf8_lossy(&names.stdout);
    for name in ["read", "recv", "recvfrom", "poll", "ppoll"] {
        assert!(
            names.contains(&format!("__{name}_chk")),
            "the program does not use __{name}_chk"
        );
    }
    same_alone("fortify", &flags, &[]);
}

#[test]
fn a_library_opened_later() {
    let library = compile("dl_lib", &["-shared", "-fPIC"]);
    same_alone("odd_times", &[], &[library.to_str().expect("a UTF-8 path")]);
}

/// A library whose constructor and destructor use connections, loaded before and after the preload.
#[test]
fn early_and_late_callers() {
    let library = compile("dl_lib", &["-shared", "-fPIC"]);
    let program = compile("odd_times", &[]);
    let (ours, theirs) = (preload(), library.display().to_string());
    let run = |order: String, negotiation| {
        Program::new(&program)
            .env("T_EARLY", "1")
            .env("LD_PRELOAD", order)
            .negotiation_ms(negotiation)
            .run()
    };
    let bare = run(theirs.clone(), 0);
    assert!(bare.ok(), "{}", bare.transcript());
    for negotiation in [0, NEGOTIATED_MS] {
        for order in [
            format!("{}:{theirs}", ours.display()),
            format!("{theirs}:{}", ours.display()),
        ] {
            let got = run(order.clone(), negotiation);
            if let Some(difference) = compare(&order, &bare, &got) {
                panic!("{difference}");
            }
        }
    }
}

/// The program's output must be the bare one. Standard error must have `lines` lines of SLIM's, each of which names SLIM.
fn scarce(args: &[&str], lines: usize) {
    let program = compile("scarce", &[]);
    let run = |preloaded, negotiation| {
        Program::new(&program)
            .args(args)
            .preloaded(preloaded)
            .negotiation_ms(negotiation)
            .run()
    };
    let bare = run(false, 0);
    assert!(bare.ok(), "{}", bare.transcript());
    for negotiation in [0, NEGOTIATED_MS] {
        let mut got = run(true, negotiation);
        let said = std::mem::take(&mut got.stderr);
        if let Some(difference) = compare(&format!("{args:?}"), &bare, &got) {
            panic!("{difference}  stderr: {said}");
        }
        assert_eq!(
            said.lines().count(),
            lines,
            "{args:?}: lines on standard error:\n{said}"
        );
        assert!(
            said.lines().all(|l| l.to_lowercase().contains("slim")),
            "not said who speaks:\n{said}"
        );
    }
}

#[test]
fn few_descriptors() {
    scarce(&["nofile", "14"], 1);
    scarce(&["nofile", "40"], 1);
}

#[test]
fn no_threads() {
    scarce(&["nproc"], 1);
}

#[test]
fn little_memory() {
    let program = compile("scarce", &[]);
    let got = Program::new(&program).arg("memory").preloaded(true).run();
    assert!(got.ok(), "{}", got.transcript());
}

#[test]
fn the_udp_port_is_taken() {
    scarce(&["udp-before"], 0);
    let said = Program::new(compile("scarce", &[]))
        .arg("udp-before")
        .preloaded(true)
        .env("SLIM_LOG", "info")
        .run();
    assert!(said.stderr.contains("no control socket on"), "{said:?}");
}

/// A program may bind UDP on the port of its TCP listener: SLIM's control socket must give way.
#[test]
fn the_udp_port_is_wanted_later() {
    scarce(&["udp-after"], 0);
    scarce(&["udp-any-after"], 0);
}

#[test]
fn a_program_without_tcp_gets_nothing_from_us() {
    scarce(&["threads"], 0);
}

/// Each bad setting is reported once, and the program runs with the defaults.
#[test]
fn bad_settings_are_named_once() {
    let program = compile(
        "fortify",
        &["-O2", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"],
    );
    let bare = Program::new(&program).run();
    let mut got = Program::new(&program)
        .preloaded(true)
        .env("SLIM_ATTEMPTS", "a hundred")
        .env("SLIM_NO_SUCH_THING", "1")
        .env("SLIM_PEERS", OsStr::from_bytes(b"10.0.0.0/8,\xff"))
        .run();
    let said = std::mem::take(&mut got.stderr);
    if let Some(difference) = compare("bad settings", &bare, &got) {
        panic!("{difference}");
    }
    for name in ["SLIM_ATTEMPTS", "SLIM_NO_SUCH_THING", "SLIM_PEERS"] {
        assert_eq!(
            said.lines().filter(|l| l.contains(name)).count(),
            1,
            "{name} in:\n{said}"
        );
    }
}

/// A control socket gives way to another process that wants its port, without a message.
#[test]
fn a_udp_port_that_another_process_wants() {
    apart();
    let program = compile("udp_wanted", &[]);
    let run = |server, client, negotiation| {
        let one = |preloaded| {
            Program::new(&program)
                .preloaded(preloaded)
                .negotiation_ms(negotiation)
        };
        pair(one(server), one(client))
    };
    let bare = run(false, false, 0);
    assert!(bare.0.ok() && bare.1.ok(), "{bare:?}");
    for (mode, got) in [
        ("negotiating", run(true, true, 0)),
        ("negotiated", run(true, true, NEGOTIATED_MS)),
        ("client only", run(false, true, 0)),
    ] {
        let differences = [
            compare(&format!("server, {mode}"), &bare.0, &got.0),
            compare(&format!("client, {mode}"), &bare.1, &got.1),
        ];
        assert_eq!(differences, [None, None], "{differences:#?}");
    }
}

/// SLIM investigates an end of the stream that the peer did not announce. The sending direction goes on meanwhile.
#[test]
fn an_end_that_nobody_has_announced() {
    same_pair("half_ends", &[], &["send"]);
    same_pair("half_ends", &[], &["shut"]);
}

/// A connection that ends in order gets no error, even if it carried bytes that the library has not counted.
#[test]
fn ends_behind_bytes_that_no_hook_has_seen() {
    same_pair("uncounted", &[], &[]);
}

/// SLIM's UDP queries never reach a program that has bound the port in the meantime.
#[test]
fn a_udp_port_of_the_same_number() {
    same_pair("own_udp", &[], &[]);
    same_pair("own_udp", &[], &["frozen"]);
    same_pair("own_udp", &[], &["stopped"]);
}

/// A peer sends HELLO with its first connection. The answer must not depend on how long the listener has existed, nor on
/// whether the process that accepts is the one that called `listen`.
#[test]
fn listeners_answer_from_the_first_connection_on() {
    let program = compile("listeners", &[]);
    let ways = [
        "at-once",
        "accept",
        "poll",
        "select",
        "epoll",
        "epoll-before",
    ];
    for way in ways {
        let logs = ["server", "client"].map(|end| common::scratch(&format!("{way}.{end}")));
        let one = |preloaded, log: &std::path::Path| {
            Program::new(&program)
                .env("T_ARGS", way)
                .env("SLIM_EVENTS", log)
                .preloaded(preloaded)
                .negotiation_ms(if preloaded { NEGOTIATED_MS } else { 0 })
        };
        let run = |preloaded| pair(one(preloaded, &logs[0]), one(preloaded, &logs[1]));
        let (bare, got) = (run(false), run(true));
        for (want, got) in [(&bare.0, &got.0), (&bare.1, &got.1)] {
            if let Some(difference) = compare(way, want, got) {
                panic!("{difference}");
            }
        }
        let events = Events::read(&logs[1]);
        let connections = if way == "at-once" { 20 } else { 2 };
        assert_eq!(events.count("live"), connections, "{way}:\n{events}");
    }
}

/// A program that closes its listener and listens on the same port again at once can be reached by HELLO there.
#[test]
fn listeners_that_come_again_at_once_are_asked() {
    common::apart();
    let program = compile("listens_again", &[]);
    let got = Program::new(&program).preloaded(true).run();
    assert_eq!(got.transcript(), "0 times nobody was asked\nexit 0\n");
}

/// Checks the premise of the tests above: after the negotiation flows are live, and with SLIM=off there are none.
#[test]
fn negotiated_flows_are_live() {
    let program = compile("calls", &[]);
    for (slim, live) in [("preferred", true), ("off", false)] {
        let events = common::scratch("events");
        let got = Program::new(&program)
            .preloaded(true)
            .negotiation_ms(NEGOTIATED_MS)
            .env("SLIM", slim)
            .env("SLIM_EVENTS", &events)
            .run();
        assert!(got.ok(), "{}", got.transcript());
        let events = Events::read(&events);
        assert_eq!(events.count("live") > 0, live, "SLIM={slim}:\n{events}");
    }
}

/// The thread sanitizer does not see SLIM's locks, so SLIM steps back in a program built with it, and says so once.
#[test]
fn programs_with_the_thread_sanitizer() {
    let program = common::compile("sanitized", &["-fsanitize=thread"]);
    let run = |preloaded| {
        Program::new(&program)
            .preloaded(preloaded)
            .negotiation_ms(NEGOTIATED_MS)
            .run()
    };
    let (bare, mut got) = (run(false), run(true));
    assert!(bare.ok(), "{}", bare.transcript());
    assert_eq!(got.stderr.matches("thread sanitizer").count(), 1);
    assert_eq!(got.stderr.lines().count(), 1, "{}", got.stderr);
    got.stderr.clear();
    assert_eq!(got.transcript(), bare.transcript());
}
