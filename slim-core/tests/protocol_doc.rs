//! `docs/PROTOCOL.md` is the specification: its numbers are compared with the code's.

use slim_core::wire::layout::*;
use slim_core::wire::{HEADER_LEN, Kind, MAC_LEN, MAX_LEN};

const DOC: &str = include_str!("../../docs/PROTOCOL.md");

/// What follows the heading, up to the next one of its level.
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
        Kind::Hello => vec![
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
        Kind::Challenge => vec![challenge::ENDPOINT_ID, challenge::NONCE_R, challenge::MAC],
        Kind::Resume => vec![resume::FLOW, resume::EPOCH, resume::NONCE_I, resume::MAC],
        Kind::ResumeOk => vec![
            resume_ok::FLOW,
            resume_ok::EPOCH,
            resume_ok::RECEIVED,
            resume_ok::SENT,
            resume_ok::FINAL_SEQ,
            resume_ok::MAC,
        ],
        Kind::Confirm => {
            vec![
                confirm::RECEIVED,
                confirm::SENT,
                confirm::FINAL_SEQ,
                confirm::MAC,
            ]
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
    }
}

#[test]
fn every_message_is_described_as_it_is() {
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
fn no_message_is_described_that_does_not_exist() {
    let described = section("## Messages").matches("\n### ").count();
    assert_eq!(described, Kind::ALL.len());
}

#[test]
fn the_header_is_described_as_it_is() {
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
        "## Messages",
        "## Negotiation",
        "## Resume",
        "## The resume handshake and why it is correct",
    ] {
        section(heading);
    }
}
