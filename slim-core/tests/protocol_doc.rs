//! `docs/PROTOCOL.md` is the specification: these tests compare its numbers with those of the code.

use slim_core::wire::layout::*;
use slim_core::wire::{HEADER_LEN, Kind, MAC_LEN, MAX_LEN};

const DOC: &str = include_str!("../../docs/PROTOCOL.md");

/// The text below a heading, up to the next heading of the same or a higher level.
fn section(heading: &str) -> &'static str {
    let line = format!("\n{heading}\n");
    let start = DOC
        .find(&line)
        .unwrap_or_else(|| panic!("no heading: {heading}"))
        + line.len();
    let level = heading.split(' ').next().expect("marks");
    let text = &DOC[start..];
    let ends = ["## ", "### "].map(|mark| format!("\n{mark}"));
    let ends = ends.iter().filter(|mark| mark.trim().len() <= level.len());
    let end = ends.filter_map(|mark| text.find(mark.as_str())).min();
    &text[..end.unwrap_or(text.len())]
}

/// (offset, size, field) of each row of the table in `text`.
fn rows(text: &str) -> Vec<(usize, usize, &str)> {
    text.lines()
        .filter(|line| line.starts_with('|'))
        .filter_map(|line| {
            let mut cells = line.split('|').map(str::trim).skip(1);
            let offset = cells.next()?.parse().ok()?;
            let size = cells.next()?.parse().ok()?;
            Some((offset, size, cells.next()?))
        })
        .collect()
}

/// The code's offsets of every field of a kind, its authentication code last.
fn offsets(kind: Kind) -> Vec<usize> {
    match kind {
        Kind::Hello | Kind::HelloDone => vec![
            hello::FLOW,
            hello::CONNECTOR,
            hello::ACCEPTOR,
            hello::ENDPOINT_ID,
            hello::RANDOM_C,
            hello::FEATURES,
            hello::RESUME_PORT,
            hello::CONTROL_PORT,
            hello::ADDR_LIST,
            hello::MAC,
        ],
        Kind::HelloWait => vec![hello_wait::FLOW, hello_wait::MAC],
        Kind::HelloAck => vec![
            hello_ack::FLOW,
            hello_ack::ENDPOINT_ID,
            hello_ack::RANDOM_S,
            hello_ack::FEATURES,
            hello_ack::RESUME_PORT,
            hello_ack::CONTROL_PORT,
            hello_ack::ADDR_LIST,
            hello_ack::MAC,
        ],
        Kind::HelloNak => vec![hello_nak::FLOW, hello_nak::REASON, hello_nak::MAC],
        Kind::Fin => vec![fin::FLOW, fin::FINAL_SEQ, fin::HOW, fin::MAC],
        Kind::Query => vec![query::FLOW, query::NONCE_Q, query::MAC],
        Kind::Status => {
            vec![
                status::FLOW,
                status::NONCE_Q,
                status::STATE,
                status::FINAL_SEQ,
                status::MAC,
            ]
        }
        Kind::Unknown => {
            vec![
                unknown::FLOW,
                unknown::NONCE_Q,
                unknown::ENDPOINT_ID,
                unknown::MAC,
            ]
        }
        Kind::Demote => vec![demote::FLOW, demote::MAC],
        Kind::Pair => vec![pair::FLOW, pair::PAIR, pair::MAILBOX, pair::MAC],
        Kind::Open => vec![
            open::FLOW,
            open::PAIR,
            open::COUNTER,
            open::CONNECTOR,
            open::ACCEPTOR,
            open::MAC,
        ],
        Kind::Seen => vec![seen::PAIR, seen::COUNTER, seen::MAC],
        Kind::Offer => vec![
            offer::FLOW,
            offer::SERIAL,
            offer::ANSWERS,
            offer::LOCATORS,
            offer::MAC,
        ],
        Kind::Challenge => vec![challenge::ENDPOINT_ID, challenge::NONCE_R, challenge::MAC],
        Kind::Resume => vec![resume::FLOW, resume::EPOCH, resume::NONCE_I, resume::MAC],
        Kind::ResumeOk => vec![
            resume_ok::FLOW,
            resume_ok::EPOCH,
            resume_ok::RECEIVED,
            resume_ok::SENT,
            resume_ok::END,
            resume_ok::MAC,
        ],
        Kind::Confirm => {
            vec![confirm::RECEIVED, confirm::SENT, confirm::END, confirm::MAC]
        }
        Kind::Refuse => {
            vec![
                refuse::FLOW,
                refuse::NONCE_I,
                refuse::REASON,
                refuse::FINAL_SEQ,
                refuse::MAC,
            ]
        }
        Kind::Accuse => vec![
            accuse::ACCUSER,
            accuse::ACCUSED,
            accuse::CONTROL_PORT,
            accuse::ADDR_LIST,
            accuse::COOKIE,
            accuse::MAC,
        ],
        Kind::Lost => vec![lost::TO, lost::LOST, lost::STATE, lost::COOKIE, lost::MAC],
        Kind::Fenced => vec![fenced::ENDPOINT_ID, fenced::MAC],
        Kind::Relay => vec![relay::PORT, relay::ADDR_LIST, relay::MAC],
        Kind::Where => vec![
            asking::SENDER,
            asking::WANTED,
            asking::KNOWN,
            asking::SERIAL,
            asking::RESUME_PORT,
            asking::CONTROL_PORT,
            asking::ADDR_LIST,
            asking::MAC,
        ],
        Kind::Here => vec![
            here::TO,
            here::ENDPOINT_ID,
            here::SERIAL,
            here::RESUME_PORT,
            here::CONTROL_PORT,
            here::ADDR_LIST,
            here::MAC,
        ],
    }
}

#[test]
fn every_message_is_described_with_its_kind_length_and_offsets() {
    for kind in Kind::ALL {
        let name = kind.name();
        let text = section(&format!("### {name}"));
        let numbers = format!("Kind {}, {} bytes.", kind as u8, kind.message_len());
        assert!(
            text.contains(&numbers),
            "{name}: the document does not say {numbers:?}"
        );

        let rows = rows(text);
        let documented: Vec<usize> = rows.iter().map(|row| row.0).collect();
        assert_eq!(documented, offsets(kind), "{name}");
        let mut at = HEADER_LEN;
        for (offset, size, field) in &rows {
            assert_eq!(
                *offset, at,
                "{name}: {field} does not follow what is before it"
            );
            at += size;
        }
        assert_eq!(at, kind.message_len(), "{name}");
        assert_eq!(rows.last().map(|row| row.1), Some(MAC_LEN), "{name}");
    }
}

#[test]
fn every_message_that_is_described_exists() {
    let described = section("## Messages").matches("\n### ").count();
    assert_eq!(described, Kind::ALL.len());
}

#[test]
fn the_header_is_described_with_its_offsets_and_length() {
    let text = section("## Header");
    let documented: Vec<usize> = rows(text).iter().map(|row| row.0).collect();
    let offsets = [header::MAGIC, header::VERSION, header::KIND, header::LENGTH];
    assert_eq!(documented, offsets);
    assert_eq!(rows(text).last().map(|row| row.0 + row.1), Some(HEADER_LEN));
    assert!(text.contains(&format!("longer than {MAX_LEN} bytes")));
}

#[test]
fn sections_that_the_code_names_exist() {
    for heading in [
        "## Attempts",
        "## End of a flow, and questions about it",
        "## Header",
        "## Keys and authentication codes",
        "## Kinds of transport",
        "## Messages",
        "## Negotiation",
        "## Resume",
        "## The resume handshake and why it is correct",
        "## The witness",
    ] {
        section(heading);
    }
}

/// Numbers in the text, next to the constants that they describe. The constants are private, so the
/// test looks for their lines in the source: a change of one side alone fails.
#[test]
fn numbers_in_the_text_are_those_of_the_code() {
    const NEGOTIATE: &str = include_str!("../src/endpoint/negotiate.rs");
    const CANDIDATES: &str = include_str!("../src/endpoint/candidates.rs");
    const PENDING: &str = include_str!("../src/endpoint/pending.rs");
    const REFUSALS: &str = include_str!("../src/endpoint/refusals.rs");
    const INQUIRY: &str = include_str!("../src/endpoint/inquiry.rs");
    const INQUIRIES: &str = include_str!("../src/endpoint/inquiries.rs");
    const CLOSE: &str = include_str!("../src/endpoint/close.rs");
    const RESPOND: &str = include_str!("../src/endpoint/respond.rs");
    const ATTEMPTS: &str = include_str!("../src/endpoint/attempts.rs");
    const CONNECTING: &str = include_str!("../src/endpoint/connecting.rs");
    const PACE: &str = include_str!("../src/endpoint/pace.rs");
    const PROBE: &str = include_str!("../src/endpoint/probe.rs");
    const LOCATORS: &str = include_str!("../src/endpoint/locators.rs");
    const FAILBACK: &str = include_str!("../src/endpoint/failback.rs");
    const OUTLOOKS: &str = include_str!("../src/endpoint/outlooks.rs");
    const ACCUSATIONS: &str = include_str!("../src/endpoint/accusations.rs");
    const WITNESS: &str = include_str!("../src/witness.rs");
    let pairs = [
        (
            NEGOTIATE,
            "RETRY: Duration = Duration::from_millis(50)",
            "HELLO is repeated after 50 ms, 100 ms, 200 ms",
        ),
        (
            NEGOTIATE,
            "RETRY_MAX: Duration = Duration::from_secs(1)",
            "after 50 ms, 100 ms, 200 ms and so on up to 1 s",
        ),
        (
            NEGOTIATE,
            "LATE_HELLO: Duration = Duration::from_millis(250)",
            "it is waited for 250 ms",
        ),
        (
            NEGOTIATE,
            "STRAY_HELLO: Duration = Duration::from_millis(20)",
            "20 ms where connections have come from that host without",
        ),
        (
            NEGOTIATE,
            "LATE_ANSWER: Duration = Duration::from_millis(500)",
            "is waited for half a second at most",
        ),
        (
            NEGOTIATE,
            "WAIT_LIFE: Duration = Duration::from_secs(300)",
            "asks once in 1 to 1.5 s, for five minutes",
        ),
        (
            PENDING,
            "PENDING: usize = 4096",
            "keeps the HELLO (for at most 4096 connections, 4 for each, for 60 s)",
        ),
        (
            CANDIDATES,
            "CANDIDATES: usize = 4",
            "4 of a connection, of which",
        ),
        (
            CANDIDATES,
            "PATIENCE: Duration = Duration::from_millis(200)",
            "heard nothing from a candidate after 200 ms",
        ),
        (
            CANDIDATES,
            "QUERIES: u32 = 5",
            "asks it by QUERY, up to five times",
        ),
        (
            PENDING,
            "PENDING_AGE: Duration = Duration::from_secs(60)",
            "keeps the HELLO (for at most 4096 connections, 4 for each, for 60 s)",
        ),
        (
            REFUSALS,
            "REFUSAL_GRACE: Duration = Duration::from_millis(50)",
            "twice and at least 50 ms apart",
        ),
        (
            REFUSALS,
            "REFUSAL_AGE: Duration = Duration::from_secs(5)",
            "until the last refusal is 5 s old",
        ),
        (
            INQUIRY,
            "QUERIES: u32 = 5",
            "QUERY is sent up to five times",
        ),
        (
            INQUIRIES,
            "CONFIRM_DEATH: Duration = Duration::from_millis(150)",
            "so again 150 ms later or more",
        ),
        (
            INQUIRIES,
            "CONFIRM_DEATH_SOON: Duration = Duration::from_millis(5)",
            "5 ms instead of 150 ms",
        ),
        (
            INQUIRIES,
            "GONE_AGE: Duration = Duration::from_secs(5)",
            "it within the next 5 s",
        ),
        (
            CLOSE,
            "TOMBS: usize = 4096",
            "remembers a closed flow for 120 s (at most 4096 of them)",
        ),
        (
            CLOSE,
            "TOMB_AGE: Duration = Duration::from_secs(120)",
            "remembers a closed flow for 120 s (at most 4096 of them)",
        ),
        (
            RESPOND,
            "FRESH: usize = 1024",
            "keeps at most 1024 such connections, for 5 s each",
        ),
        (
            RESPOND,
            "FRESH_AGE: Duration = Duration::from_secs(5)",
            "keeps at most 1024 such connections, for 5 s each",
        ),
        (
            CONNECTING,
            "BACKOFF: Duration = Duration::from_millis(20)",
            "grows from 20 ms to 1 s",
        ),
        (
            CONNECTING,
            "BACKOFF_MAX: Duration = Duration::from_secs(1)",
            "grows from 20 ms to 1 s",
        ),
        (
            CONNECTING,
            "STUCK: Duration = Duration::from_secs(1)",
            "hangs is replaced after 1 s, in later windows 2 s and 4 s",
        ),
        (
            CONNECTING,
            "STUCK_DOUBLINGS: u32 = 2",
            "hangs is replaced after 1 s, in later windows 2 s and 4 s",
        ),
        (
            ATTEMPTS,
            "PEER_SILENT: Duration = Duration::from_secs(2)",
            "hears nothing for 2 s",
        ),
        (
            CONNECTING,
            "HUNG: Duration = Duration::from_millis(25)",
            "does not stand after 25 ms",
        ),
        (
            PACE,
            "FIRST: usize = 128",
            "at most 128 flows are under way",
        ),
        (PACE, "LEAST: usize = 16", "and down to 16"),
        (PACE, "MOST: usize = 512", "up to 512"),
        (
            PACE,
            "PER_MORE: u32 = 4",
            "Every fourth answer lets one more",
        ),
        (
            PACE,
            "ONE_LOSS: Duration = Duration::from_millis(50)",
            "at most once in 50 ms",
        ),
        (
            PROBE,
            "EVERY: Duration = Duration::from_millis(15)",
            "every 15 ms, or every *n* ms if *n* > 15 peers",
        ),
        (PROBE, "OFTEN: u32 = 6000", "after 6,000 of them"),
        (
            PROBE,
            "SELDOM: Duration = Duration::from_millis(250)",
            "every 250 ms",
        ),
        (
            PROBE,
            "SLOW: Duration = Duration::from_millis(400)",
            "after 400 ms and four round trips",
        ),
        (
            LOCATORS,
            "RETRY: Duration = Duration::from_millis(50)",
            "OFFER is repeated after 50 ms, 100 ms, 200 ms",
        ),
        (
            LOCATORS,
            "LONGEST: Duration = Duration::from_secs(60)",
            "until it is answered, at last every 60 s",
        ),
        (
            FAILBACK,
            "BEGIN: Duration = Duration::from_millis(20)",
            "when a flow has been live for 20 ms",
        ),
        (
            FAILBACK,
            "PATIENCE: Duration = Duration::from_secs(3)",
            "waits for CHALLENGE, for 3 s at most",
        ),
        (
            OUTLOOKS,
            "AGAIN: Duration = Duration::from_secs(1)",
            "the locator is tried again after 1 s",
        ),
        (
            OUTLOOKS,
            "LONGEST: Duration = Duration::from_secs(60)",
            "after twice as long, up to 60 s",
        ),
        (
            OUTLOOKS,
            "PROVEN: Duration = Duration::from_secs(60)",
            "After a locator has worked for 60 s",
        ),
        (
            ACCUSATIONS,
            "AGAIN: Duration = Duration::from_millis(200)",
            "ACCUSE is repeated every 200 ms",
        ),
        (
            ACCUSATIONS,
            "AWAITED: Duration = Duration::from_secs(5)",
            "hears nothing from the witness for 5 s",
        ),
        (
            WITNESS,
            "SETTLED: Duration = Duration::from_secs(20)",
            "or 20 s after the verdict",
        ),
        (
            WITNESS,
            "COOKIE_AGE: u64 = 10_000_000",
            "it counts for 10 to 20 s",
        ),
    ];
    // The text may have a line break anywhere.
    let text: Vec<&str> = DOC.split_whitespace().collect();
    let text = text.join(" ");
    for (source, constant, words) in pairs {
        assert!(source.contains(constant), "changed, or gone: {constant}");
        assert!(
            text.contains(words),
            "{constant}, but the text does not say: {words}"
        );
    }
}
