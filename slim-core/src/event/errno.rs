//! Error numbers in the event log, written as names where the name is well known.
//!
//! The numbers are those of Linux on every architecture SLIM runs on (MIPS, SPARC, Alpha and
//! PA-RISC count differently). This crate has no libc to ask, and a log may be read on another host.

const NAMES: [(i32, &str); 14] = [
    (4, "EINTR"),
    (12, "ENOMEM"),
    (24, "EMFILE"),
    (32, "EPIPE"),
    (99, "EADDRNOTAVAIL"),
    (100, "ENETDOWN"),
    (101, "ENETUNREACH"),
    (102, "ENETRESET"),
    (103, "ECONNABORTED"),
    (104, "ECONNRESET"),
    (110, "ETIMEDOUT"),
    (111, "ECONNREFUSED"),
    (112, "EHOSTDOWN"),
    (113, "EHOSTUNREACH"),
];

fn name(errno: i32) -> String {
    match NAMES.iter().find(|(n, _)| *n == errno) {
        Some((_, name)) => (*name).to_owned(),
        None => format!("errno {errno}"),
    }
}

fn number(text: &str) -> Option<i32> {
    match NAMES.iter().find(|(_, name)| *name == text) {
        Some((n, _)) => Some(*n),
        None => text.strip_prefix("errno ")?.parse().ok(),
    }
}

/// Makes a serde `with` module for an enum whose variants are written as words, except for the variant `Errno`.
macro_rules! as_text {
    ($module:ident, $type:ident { $($variant:ident => $word:literal,)* }) => {
        pub(super) mod $module {
            use serde::{Deserialize, Deserializer, Serializer, de::Error};

            use super::super::$type;

            pub fn serialize<S: Serializer>(value: &$type, s: S) -> Result<S::Ok, S::Error> {
                match value {
                    $type::Errno(errno) => s.serialize_str(&super::name(*errno)),
                    $($type::$variant => s.serialize_str($word),)*
                }
            }

            pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<$type, D::Error> {
                let text = String::deserialize(d)?;
                match &*text {
                    $($word => Ok($type::$variant),)*
                    other => super::number(other)
                        .map($type::Errno)
                        .ok_or_else(|| D::Error::custom(format!("unknown: {other:?}"))),
                }
            }
        }
    };
}

as_text!(trouble, Trouble {
    Eof => "eof",
    Stall => "stall",
    Move => "move",
    PeerAsked => "peer_asked",
});

as_text!(failure, Failure {
    TimedOut => "timed_out",
    Eof => "eof",
    Busy => "busy",
    OldEpoch => "old_epoch",
    BadProof => "bad_proof",
    Garbage => "garbage",
});
