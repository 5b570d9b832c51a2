//! Connections that break under a program with the preload at both ends: the program must not notice.
//!
//! Each program runs bare on unbroken connections, and then under the preload while every connection of its network
//! namespace is destroyed (`SOCK_DESTROY`) again and again. Both transcripts must be the same. Needs root.

mod common;

use common::breaks::{differences, run, unnoticed, unnoticed_with};
use common::events::Events;
use common::{NEGOTIATED_MS, Program, compare, compile, own_network, pair, scratch};

#[test]
fn transfers_with_blocking_calls() {
    unnoticed("xfer", &["block", "msg", "much", "waitall", "dup"], 12);
}

#[test]
fn threads_cancelled_in_a_call_block_no_other_call() {
    unnoticed("cancelled", &[""], 1);
}

#[test]
fn transfers_with_peek_fionread_time_limits_and_sendfile() {
    unnoticed("xfer", &["peek", "fionread", "time-limits", "sendfile"], 12);
}

#[test]
fn transfers_with_poll_and_select() {
    unnoticed("xfer", &["poll", "ppoll", "select", "pselect"], 12);
}

#[test]
fn transfers_with_epoll() {
    unnoticed(
        "xfer",
        &["epoll-level", "epoll-edge", "epoll-oneshot", "epoll-two"],
        12,
    );
}

/// The same breaks end a bare transfer, so the tests above can fail.
#[test]
fn bare_transfers_do_not_survive() {
    if !own_network("bare_transfers_do_not_survive") {
        return;
    }
    let binary = compile("xfer", &[]);
    let whole = run(&binary, "block", 0, false, 0);
    let broken = run(&binary, "block", 12, false, 0);
    assert!(
        !differences("xfer block", &whole, &broken).is_empty(),
        "nothing was broken"
    );
}

/// The event log has the resumes; without resumes the tests above would have tested nothing.
#[test]
fn resumes_are_written_to_the_event_log() {
    if !own_network("resumes_are_written_to_the_event_log") {
        return;
    }
    let binary = compile("xfer", &[]);
    let log = scratch("events");
    let one = || {
        Program::new(&binary)
            .env("T_ARGS", "block")
            .env("T_BREAKS", "5")
            .env("T_OWN_NETWORK", "1")
            .env("SLIM_EVENTS", &log)
            .preloaded(true)
            .negotiation_ms(NEGOTIATED_MS)
    };
    let (server, client) = pair(one(), one());
    assert!(
        server.ok() && client.ok(),
        "{}\n{}",
        server.transcript(),
        client.transcript()
    );
    let events = Events::read(&log);
    let resumes = events.count("resume");
    assert!(resumes >= 6, "{resumes} resumes in\n{events}");
    assert_eq!(events.count("escalate"), 0, "{events}");
}

/// Connections with buffer sizes that the application has set, full when they break, lose nothing and do not stall on the
/// new transport.
#[test]
fn small_buffers() {
    if !own_network("small_buffers") {
        return;
    }
    let binary = compile("small", &[]);
    for sizes in [
        ["8192", "0"],
        ["4096", "100000"],
        ["8192", "8192"],
        ["0", "8192"],
    ] {
        let run = |preloaded, breaks| {
            let one = Program::new(&binary)
                .args(sizes)
                .env("T_OWN_NETWORK", "1")
                .env("T_BREAKS", breaks)
                .preloaded(preloaded)
                .negotiation_ms(NEGOTIATED_MS);
            let mut outcome = one.run();
            println!("{sizes:?}: {}", outcome.stderr);
            outcome.stderr.clear();
            outcome
        };
        let bare = run(false, "0");
        assert!(bare.ok(), "{sizes:?} fails bare:\n{}", bare.transcript());
        if let Some(difference) = compare(&format!("{sizes:?}"), &bare, &run(true, "1")) {
            panic!("\n{difference}");
        }
    }
}

#[test]
fn idle_connections() {
    unnoticed("broken", &["idle"], 1);
}

#[test]
fn addresses_of_broken_and_of_reused_sockets() {
    unnoticed(
        "anew",
        &["", "plain", "listen", "plain listen", "unused"],
        1,
    );
}

/// A socket with an option that a new transport cannot have stays plain TCP, even after it is disconnected and used again.
#[test]
fn options_outlive_the_connection() {
    if !own_network("options_outlive_the_connection") {
        return;
    }
    let binary = compile("anew", &[]);
    for args in ["plain bound", "plain bound listen"] {
        let bare = run(&binary, args, 1, false, 0);
        let got = run(&binary, args, 1, true, NEGOTIATED_MS);
        let bad = differences(&format!("anew {args}"), &bare, &got);
        assert!(bad.is_empty(), "\n{}", bad.join("\n"));
    }
}

/// A receiving half that is shut down stays shut over a break. Data that arrives for it is refused where the kernel does so.
#[test]
fn data_for_a_receiving_half_that_is_shut() {
    let cases = ["rd before", "rd away", "rd after", "both after"];
    unnoticed("refuse", &cases, 1);
}

/// A stand-in for a stash is registered with epoll in the name of a descriptor number, and only while that number is open.
#[test]
fn epoll_forgets_connections_closed_with_unread_bytes() {
    unnoticed("closed_unread", &[""], 1);
}

/// A wait that a signal handler has left by a jump leaves its alarm set, and a later break signals that alarm. Later waits
/// must not end because of it.
#[test]
fn waits_after_a_jump() {
    unnoticed("alarms", &[""], 1);
}

#[test]
fn options_are_set_on_the_new_transport() {
    unnoticed("broken", &["options", "options-exec"], 1);
}

/// A connection with an urgent byte becomes plain TCP, and breaks like a bare one.
#[test]
fn broken_with_urgent_bytes() {
    if !own_network("broken_with_urgent_bytes") {
        return;
    }
    let binary = compile("urgent", &[]);
    for case in ["close", "close,aside", "close,inline", "shut,twice"] {
        let bare = run(&binary, case, 1, false, 0);
        let got = run(&binary, case, 1, true, NEGOTIATED_MS);
        let bad = differences(&format!("urgent {case}"), &bare, &got);
        assert!(bad.is_empty() && bare.0.ok(), "\n{}", bad.join("\n"));
    }
}

/// A connection with asynchronous I/O becomes plain TCP, and breaks like a bare one.
#[test]
fn broken_with_asynchronous_io() {
    if !own_network("broken_with_asynchronous_io") {
        return;
    }
    let binary = compile("aio", &[]);
    for case in ["libc", "list", "kernel"] {
        let bare = run(&binary, case, 1, false, 0);
        let got = run(&binary, case, 1, true, NEGOTIATED_MS);
        let bad = differences(&format!("aio {case}"), &bare, &got);
        assert!(bad.is_empty() && bare.0.ok(), "\n{}", bad.join("\n"));
    }
}

/// The connection becomes plain TCP, and the application still reads the bytes in the stash.
#[test]
fn an_urgent_byte_behind_a_stash() {
    unnoticed("behind", &[""], 1);
}

/// MSG_PEEK and FIONREAD show as many unread bytes as without a break.
#[test]
fn peeks_at_unread_bytes() {
    unnoticed("looks", &[""], 1);
}

/// Every way to peek at unread bytes, immediately after a break.
#[test]
fn peeks_immediately_after_a_break() {
    let ways = ["plain", "wait", "dontwait", "message", "least", "edge"];
    unnoticed("peeks", &ways, 1);
}

#[test]
fn options_set_while_the_connection_is_away() {
    unnoticed("peeks", &["options"], 1);
}

/// A bad pointer gets the kernel's error and no other, also while the flow has no transport.
#[test]
fn bad_pointers() {
    unnoticed(
        "pointers",
        &["idle", "unread", "away", "over,unread", "over,idle"],
        1,
    );
}

#[test]
fn no_hangup_event_before_the_last_byte() {
    unnoticed("hung_up", &["poll", "epoll", "edges"], 1);
}

/// A non-blocking call does not fail with EAGAIN after a report that the descriptor is ready.
#[test]
fn what_was_reported_as_ready_is_ready() {
    let all = [
        "300 20480 0 40",
        "60 1048576 0 10",
        "400 8 2 20",
        "300 20480 1 40",
        "60 1048576 2 10",
    ];
    unnoticed("told_ready", &all, 1);
}

/// A blocking descriptor is not reported as readable because its stream has ended where nobody has announced it.
#[test]
fn an_unannounced_end_is_not_reported_as_bytes() {
    unnoticed("fin_only", &["10 0", "10 1", "10 2", "10 3"], 1);
}

/// All bytes sent before a close arrive, even at a thread that met a break just before the flow ended.
#[test]
fn last_bytes_before_a_close() {
    unnoticed("last_bytes", &["20"], 1);
}

/// A program closes a broken connection, and its peer finds that it has all bytes. The closing end must not take that for a reset.
#[test]
fn a_broken_connection_is_closed_by_one_end_and_complete_at_the_other() {
    if !own_network("a_broken_connection_is_closed_by_one_end_and_complete_at_the_other") {
        return;
    }
    let binary = compile("closed_away", &[]);
    let log = scratch("closed-away");
    let one = |breaks, preloaded| {
        Program::new(&binary)
            .env("T_ARGS", "100")
            .env("T_BREAKS", breaks)
            .env("T_OWN_NETWORK", "1")
            .env("SLIM_EVENTS", &log)
            .preloaded(preloaded)
            .negotiation_ms(NEGOTIATED_MS)
    };
    let bare = pair(one("0", false), one("0", false));
    let got = pair(one("1", true), one("1", true));
    let bad = differences("closed_away", &bare, &got);
    assert!(bad.is_empty(), "\n{}", bad.join("\n"));
    let events = Events::read(&log);
    println!("{:?}", events.counts());
    let ends: Vec<&str> = events.of_kind("escalate").collect();
    let complete = |end: &&&str| end.contains("\"peer_closed\"") && end.contains("\"errno\":0");
    assert!(ends.iter().any(|end| complete(&end)), "none was complete");
    let other: Vec<_> = ends.iter().filter(|end| !complete(end)).collect();
    assert!(
        other.is_empty(),
        "{} of {}: {other:#?}",
        other.len(),
        ends.len()
    );
}

/// Other threads use the connection and meet the breaks. Calls that only query it must neither fail nor report one.
#[test]
fn queries_do_not_report_breaks() {
    unnoticed("asked", &[""], 1);
}

#[test]
fn half_closed_connections() {
    unnoticed("broken", &["half-close"], 1);
}

#[test]
fn closed_with_bytes_on_the_way() {
    unnoticed("broken", &["linger"], 1);
}

#[test]
fn closed_and_exited_with_bytes_on_the_way() {
    unnoticed("broken", &["linger-exit"], 1);
}

#[test]
fn shut_in_both_directions_with_bytes_on_the_way() {
    unnoticed("broken", &["shut-both"], 1);
}

#[test]
fn exited_before_noticing_the_break() {
    unnoticed("broken", &["leave"], 1);
}

#[test]
fn shut_while_the_transport_is_replaced() {
    unnoticed("broken", &["shut"], 1);
}

#[test]
fn one_send_of_64_mb() {
    unnoticed("broken", &["big-send"], 1);
}

#[test]
fn waiting_calls() {
    unnoticed("broken", &["waits"], 1);
}

#[test]
fn broken_while_negotiating() {
    unnoticed("broken", &["hello", "hello-shut"], 1);
}

/// All that the acceptor has from its peer is HELLO.
#[test]
fn ended_and_broken_while_negotiating() {
    let cases = ["closes", "in-flight", "in-flight-now", "connector", "half"];
    unnoticed_with(&["-rdynamic"], "early", &cases, 1);
}

/// Control messages (UDP) are lost, late, or duplicated.
#[test]
fn broken_early_with_a_bad_network() {
    unnoticed_with(&["-rdynamic"], "udp", &["no-done", "late", "twice"], 1);
    let deaf = ["mute-server,may-fail", "mute-client,may-fail"];
    unnoticed_with(&["-rdynamic"], "udp", &deaf, 1);
}

#[test]
fn broken_while_connecting() {
    unnoticed("broken", &["connecting"], 1);
}

/// A busy server accepts connections that broke while they were in the listener's queue.
#[test]
fn broken_in_the_accept_queue() {
    unnoticed("queued", &["100 4500"], 1);
}

#[test]
fn several_senders_on_one_connection() {
    unnoticed("senders", &["threads"], 12);
}

#[test]
fn a_thousand_connections_at_once() {
    unnoticed("broken", &["many"], 1);
}

#[test]
fn calls_right_after_a_break() {
    unnoticed("broken", &["at-once"], 1);
}

/// The death of a peer process is reported as in a bare run, and as fast.
#[test]
fn a_peer_that_dies() {
    unnoticed(
        "broken",
        &[
            "death",
            "death-poll",
            "death-unread",
            "death-send",
            "death-first",
            "death-broken",
        ],
        0,
    );
}

/// A reset of a connection that the peer has closed before is no refusal of bytes that the peer never got.
#[test]
fn a_reset_after_the_peer_has_closed() {
    unnoticed("broken", &["closed-send", "closed-poll", "closed-read"], 1);
}

/// An end behind bytes that are not read yet is shown by poll and epoll, also after a break.
#[test]
fn an_end_behind_unread_bytes() {
    unnoticed("broken", &["end-behind", "end-later", "end-of-reading"], 1);
}

/// A single byte that the library has not seen escalates the flow at the next break; no byte is delivered twice.
#[test]
fn bytes_moved_past_the_library() {
    if !own_network("bytes_moved_past_the_library") {
        return;
    }
    let binary = compile("past", &[]);
    for (args, read) in [
        ("read", 1000),
        ("read-all", 1000),
        ("read-many", 1000),
        ("write", 501),
    ] {
        let (server, client) = run(&binary, args, 1, true, NEGOTIATED_MS);
        let said = format!("{args}:\n{}\n{}", server.transcript(), client.transcript());
        // The error depends on how the connection broke.
        for (end, read) in [(&server, 0), (&client, read)] {
            let error = format!("{read} bytes, then ECONN");
            assert!(end.stdout.starts_with(&error) && end.ok(), "{said}");
        }
        // For the writer, one extra byte may be its own FIN. The peer can tell that it was not, so the reason is the peer's.
        let why = match args {
            "write" => "reason=out_of_step",
            _ => "something uses the descriptor past SLIM",
        };
        assert!(said.contains(why), "{said}");
    }
}

/// A real-time thread polls without a pause on the only processor that its process may use. SLIM must still get to resume.
#[test]
fn a_real_time_thread_that_polls_without_a_pause() {
    unnoticed("realtime", &["recv", "poll", "select", "epoll"], 1);
    unnoticed(
        "realtime",
        &[
            "recv-user",
            "poll-user",
            "epoll-user",
            "select-user",
            "recv-late",
        ],
        1,
    );
}

/// A thread that stays inside a call delays the resume of that connection only.
#[test]
fn calls_that_take_their_time() {
    unnoticed("held", &["recv 800", "send 800", "room 0"], 1);
}

/// A thread that never returns from a call delays no other connection. Its own flow is escalated.
#[test]
fn calls_that_do_not_come_back() {
    if !own_network("calls_that_do_not_come_back") {
        return;
    }
    let binary = compile("held", &[]);
    for args in ["recv 14000 10500", "send 14000 10500"] {
        let (server, client) = run(&binary, args, 1, true, NEGOTIATED_MS);
        let said = format!("{args}:\n{}\n{}", server.transcript(), client.transcript());
        assert_eq!(client.stdout.matches("at once: 1").count(), 2, "{said}");
        let given_up = "a data call does not return; the flow is given up";
        assert!(client.stderr.contains(given_up), "{said}");
    }
}

/// Programs that install a system call filter, and processes that end with their last thread, behave as without the library.
/// For a filter the library says once that it steps back.
#[test]
fn filters_and_last_threads() {
    let binary = compile("filters", &[]);
    let mut bad = Vec::new();
    for args in [
        "strict",
        "thread",
        "process",
        "by-number",
        "seccomp",
        "killed",
        "numbers",
        "main-exits",
        "main-exits-first",
    ] {
        let bare = run(&binary, args, 0, false, 0);
        let mut got = run(&binary, args, 0, true, NEGOTIATED_MS);
        let filtered = !args.starts_with("main");
        let said = got.1.stderr.matches("connections are plain TCP").count();
        if said != usize::from(filtered) {
            bad.push(format!("{args}: said {said} times: {}", got.1.stderr));
        }
        got.1.stderr.clear();
        bad.extend(differences(&format!("filters {args}"), &bare, &got));
    }
    assert!(bad.is_empty(), "\n{}", bad.join("\n"));
}

#[test]
fn the_limit_on_open_files_stays_as_the_program_set_it() {
    unnoticed("limits", &["alone", "fork"], 0);
}

/// Thousands of connections that break at once are resumed soon, however the program waits.
#[test]
fn a_crowd_of_connections() {
    if !own_network("a_crowd_of_connections") {
        return;
    }
    let binary = compile("crowd", &[]);
    for how in ["poll", "turns", "threads"] {
        let args = format!("{how} 2000");
        let mut bare = run(&binary, &args, 0, false, 0);
        let mut got = run(&binary, &args, 1, true, NEGOTIATED_MS);
        for outcome in [&mut bare, &mut got] {
            println!("{}{}", outcome.0.stderr, outcome.1.stderr);
            (outcome.0.stderr, outcome.1.stderr) = Default::default();
        }
        let bad = differences(&args, &bare, &got);
        assert!(bad.is_empty(), "\n{}", bad.join("\n"));
    }
}

/// An IPv6 socket with an IPv4 connection stays such a socket, at either end, whichever end makes the new connection.
#[test]
fn the_family_of_a_socket() {
    let ways = [
        "six six client resume",
        "six six server resume",
        "six four client resume",
        "six four server resume",
        "four six client resume",
        "four six server resume",
        "four four client resume",
        "four four server resume",
    ];
    unnoticed("families", &ways, 1);
}

/// An escalated connection keeps its addresses.
#[test]
fn addresses_of_an_escalated_connection() {
    let ways = [
        "six six client over",
        "six four server over",
        "four six server over",
        "four four client over",
        "four four server over",
    ];
    if !own_network("addresses_of_an_escalated_connection") {
        return;
    }
    let binary = compile("families", &[]);
    let pair = |way: &str, breaks: &str, preloaded| {
        let one = || {
            Program::new(&binary)
                .env("T_ARGS", way)
                .env("T_BREAKS", breaks)
                .env("T_OWN_NETWORK", "1")
                .env("SLIM_ATTEMPTS", "1")
                .env("SLIM_ATTEMPT_TIMEOUTS", "0.3")
                .env("SLIM_LOG", "off")
                .preloaded(preloaded)
                .negotiation_ms(NEGOTIATED_MS)
        };
        pair(one(), one())
    };
    for way in ways {
        let bad = differences(way, &pair(way, "0", false), &pair(way, "1", true));
        assert!(bad.is_empty(), "\n{}", bad.join("\n"));
    }
}

/// Code that runs at the end of the process still uses connections: exit handlers of the program, and destructors of a
/// library that it has opened.
#[test]
fn connections_used_by_exit_handlers_and_destructors() {
    let library = compile("last_words", &["-DLIBRARY", "-shared", "-fPIC"]);
    let ways = [
        "atexit 0", "atexit 1", "atexit 2", "dlopen 0", "dlopen 1", "dlopen 2", "quiet 0",
    ];
    let ways = ways.map(|way| format!("{way} {}", library.display()));
    unnoticed("last_words", &ways.each_ref().map(String::as_str), 1);
}

/// If there is no memory for a copy of the bytes that are sent, a connection that breaks ends in an error. Its peer must not take the end of
/// the process for the end of the stream.
#[test]
fn a_stream_with_missing_bytes_has_no_orderly_end() {
    if !own_network("a_stream_with_missing_bytes_has_no_orderly_end") {
        return;
    }
    let binary = compile("unkept", &[]);
    for kib in [0, 32, 128] {
        for how in ["close", "exit"] {
            let one = || {
                Program::new(&binary)
                    .env("T_ARGS", format!("{} {how}", kib << 10))
                    .env("T_OWN_NETWORK", "1")
                    .preloaded(true)
                    .negotiation_ms(NEGOTIATED_MS)
            };
            let (server, client) = pair(one(), one());
            println!("{kib} KiB, {how}: {}{}", server.stdout, client.stderr);
            let said = server.stdout.contains("which is right") && client.ok();
            let (server, client) = (server.transcript(), client.transcript());
            assert!(said, "{kib} KiB, {how}\n{server}\n{client}");
        }
    }
}
