//! Socket options over a break.

mod common;
#[path = "../src/options/table.rs"]
mod table;

use common::{NEGOTIATED_MS, Outcome, Program, compare, compile, own_network, pair, scratch};
use std::fs;
use std::path::Path;

/// The options table, in the format that the test program reads.
fn table() -> String {
    let mut text = String::new();
    for row in table::ROWS {
        let (fate, kind) = match row.fate {
            table::Fate::After(kind) => ("After", kind),
            table::Fate::Before(kind) | table::Fate::Must(kind) => ("Before", kind),
            table::Fate::Like(_) => ("Like", table::ValueKind::Int),
            table::Fate::Bound => ("Bound", table::ValueKind::Int),
            table::Fate::Nothing => ("Nothing", table::ValueKind::Int),
        };
        text += &format!("{} {} {kind:?} {fate} {}\n", row.level, row.name, row.label);
    }
    text
}

fn options(case: &str) -> Option<(Outcome, Outcome)> {
    if !own_network(&format!("every_option {case}")) {
        return None;
    }
    let binary = compile("every_option", &[]);
    let file = scratch("table");
    fs::write(&file, table()).expect("a file of our own");
    let one = || {
        Program::new(&binary)
            .env("T_ARGS", case)
            .env("T_TABLE", &file)
            .env("T_OWN_NETWORK", "1")
            .preloaded(true)
            .negotiation_ms(NEGOTIATED_MS)
    };
    Some(pair(one(), one()))
}

/// Each option keeps its value over a break, or makes the connection plain TCP.
#[test]
fn every_option_of_a_connection() {
    let Some((server, client)) = options("every") else {
        return;
    };
    for (end, got) in [("server", server), ("client", client)] {
        let text = got.transcript();
        let number = |what| {
            let line = text.lines().find_map(|l| l.strip_prefix(what));
            line.and_then(|n| n.parse::<u32>().ok()).unwrap_or(0)
        };
        let bad = ["LOST", "HELD", "BROKEN", "owner 0", "signal 0", "flag 0"];
        let bad = bad.into_iter().chain([": 0", "stderr"]);
        let bad: Vec<_> = bad.filter(|word| text.contains(word)).collect();
        assert!(got.ok() && bad.is_empty(), "{end}: {bad:?} in\n{text}");
        // An older kernel lacks some of the options in the table.
        assert!(number("changed ") >= 60, "{end}:\n{text}");
        assert!(end == "server" || number("bound ") >= 6, "{end}:\n{text}");
    }
}

/// Signals of a descriptor (`O_ASYNC`) name the application's number, also those of bytes that come while it gets a new connection.
#[test]
fn signals_name_the_number_of_the_application() {
    if let Some((server, client)) = options("owned") {
        for got in [server, client] {
            let want = "signals of unknown descriptors: 0, flag 1\nexit 0\n";
            assert_eq!(got.transcript(), want);
        }
    }
}

/// Signals of a descriptor name the same number, and come for the same bytes, as without SLIM, where no connection breaks.
#[test]
fn signals_are_as_without_breaks() {
    if !own_network("signals") {
        return;
    }
    let binary = compile("signals", &[]);
    let run = |case: &str, stashed: &str, preloaded: bool| {
        let one = || {
            Program::new(&binary)
                .env("T_ARGS", case)
                .env("T_STASHED", stashed)
                .env("T_BREAKS", if preloaded { "1" } else { "0" })
                .env("T_OWN_NETWORK", "1")
                .preloaded(preloaded)
                .negotiation_ms(NEGOTIATED_MS)
        };
        pair(one(), one())
    };
    let mut bad = Vec::new();
    for (case, stashed) in [
        ("asked", "0"),
        ("changed", "0"),
        ("closed", "0"),
        ("executed", "0"),
        ("executed", "1"),
        ("executing", "0"),
        ("first_group", "0"),
        ("full", "0"),
        ("owners", "0"),
        ("second", "0"),
        ("storm", "0"),
        ("suspended", "0"),
        ("unread", "0"),
    ] {
        let (bare, got) = (run(case, stashed, false), run(case, stashed, true));
        assert!(bare.0.ok() && bare.1.ok(), "{case} fails bare: {bare:?}");
        for (end, bare, got) in [("server", bare.0, got.0), ("client", bare.1, got.1)] {
            bad.extend(compare(&format!("{case} {stashed}, {end}"), &bare, &got));
        }
    }
    assert!(bad.is_empty(), "\n{}", bad.join("\n"));
}

/// If the application's socket has a mark (SO_MARK), so has SLIM's new connection, from its first packet on.
#[test]
fn marks_are_there_before_the_connection() {
    if let Some((server, client)) = options("marked") {
        let (server, client) = (server.transcript(), client.transcript());
        let want = "marked: 1\nagain: 1\nexit 0\n";
        assert_eq!(server, want);
        let refused = "connect(fd, (void *)&a, sizeof a) = -1 EHOSTUNREACH\n";
        let made = "connect(fd, (void *)&a, sizeof a) = 0\n";
        assert_eq!(client, format!("{refused}{made}{want}"));
    }
}

/// The table has every option that the kernel's headers define.
#[test]
fn every_option_of_the_headers() {
    let files = [
        ("asm-generic/socket.h", "SO_", libc::SOL_SOCKET),
        ("linux/in.h", "IP_", libc::IPPROTO_IP),
        ("linux/in6.h", "IPV6_", libc::IPPROTO_IPV6),
        ("linux/tcp.h", "TCP_", libc::IPPROTO_TCP),
    ];
    // Prefixes of names that are values of options, flags or constants, not options.
    let others = [
        "IP_PMTUDISC_",
        "IP_DEFAULT_MULTICAST_",
        "IP_MSFILTER_SIZE",
        "IPV6_FL_",
        "IPV6_FLOWINFO_FLOWLABEL",
        "IPV6_FLOWINFO_PRIORITY",
        "IPV6_PRIORITY_",
        "IPV6_TLV_",
        "IPV6_PMTUDISC_",
        "IPV6_PREFER_SRC_",
        "TCP_MSS_",
        "TCP_REPAIR_ON",
        "TCP_REPAIR_OFF",
        "TCP_MD5SIG_MAXKEYLEN",
        "TCP_MD5SIG_FLAG",
        "TCP_AO_MAXKEYLEN",
        "TCP_AO_KEYF_",
        "TCP_RECEIVE_ZEROCOPY_FLAG",
        "TCP_CM_INQ",
    ];
    let mut seen = 0;
    for (file, prefix, level) in files {
        let text = fs::read_to_string(Path::new("/usr/include").join(file))
            .expect("the kernel's headers (linux-libc-dev)");
        for line in text.lines() {
            let mut words = line.split_whitespace();
            let (Some("#define"), Some(name), Some(value)) =
                (words.next(), words.next(), words.next())
            else {
                continue;
            };
            let Ok(number) = value.parse::<i32>() else {
                continue;
            };
            if name.starts_with(prefix) && !others.iter().any(|o| name.starts_with(o)) {
                seen += 1;
                let known = |row: &&table::Row| row.level == level && row.name == number;
                assert!(
                    table::ROWS.iter().any(|row| known(&row)),
                    "{name} ({number}) of {file} is in no row of the table"
                );
            }
        }
    }
    assert!(seen > 150, "only {seen} options found");
}
