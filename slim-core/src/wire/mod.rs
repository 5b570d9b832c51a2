//! The control messages: structs on one side, bytes on the other.
//!
//! `docs/PROTOCOL.md` is the specification; the comments here name its sections. A message is checked
//! in three steps, so that garbage is dropped before it costs anything: magic, version, kind and
//! length (section "Header"), then the fields, then the authentication code. [`auth`](crate::auth)
//! checks the code, because only the endpoint knows the key.
//!
//! On a datagram call [`parse`]. On a stream read [`HEADER_LEN`] bytes, ask [`message_len`], read
//! the rest and call [`parse`]; never read ahead, because stream bytes may follow.

mod field;
mod flow;
mod hello;
pub mod layout;
mod meet;
mod offer;
mod pair;
mod resume;
#[cfg(test)]
mod tests;
mod witness;

use std::fmt;

pub use field::{AddrList, End};
pub use flow::{Demote, Fin, FlowStatus, Query, Status, Unknown};
pub use hello::{Hello, HelloAck, HelloDone, HelloNak, HelloWait, NakReason};
pub use layout::{HEADER_LEN, MAC_LEN, MAX_ADDRS, MAX_LEN, MAX_LOCATORS};
pub use meet::{Here, ProcessPlace, Where};
pub use offer::{LocatorList, Offer};
pub use pair::{Open, Pair, PairId, Seen};
pub use resume::{Challenge, Confirm, Refuse, RefuseReason, Resume, ResumeOk};
pub use witness::{Accuse, Fenced, Lost, Relay, Ruling};

use field::{array, put, put_u16, read_u16};
use layout::header;

use crate::ids::FlowId;

/// The first four bytes of every message.
pub const MAGIC: [u8; 4] = *b"SLIM";
/// The version of the protocol in this code.
pub const VERSION: u8 = 1;

/// Bits of the feature fields: optional parts of the protocol.
pub mod feature {
    /// `docs/PROTOCOL.md`, section "Pairs".
    pub const PAIRS: u64 = 1;
    /// `docs/PROTOCOL.md`, section "Kinds of transport".
    pub const TRANSPORTS: u64 = 2;
    /// `docs/PROTOCOL.md`, section "The witness".
    pub const WITNESS: u64 = 4;
    /// `docs/PROTOCOL.md`, section "Without a witness".
    pub const TIE_BREAK: u64 = 8;
    /// All bits that have a meaning.
    pub const ALL: u64 = PAIRS | TRANSPORTS | WITNESS | TIE_BREAK;
}

/// Authentication code at the end of a message: HMAC-SHA256, the first 16 bytes.
pub type Mac = [u8; MAC_LEN];

/// The kind of a message: its sixth byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// [`Hello`]
    Hello = 1,
    /// [`HelloWait`]
    HelloWait = 2,
    /// [`HelloAck`]
    HelloAck = 3,
    /// [`HelloNak`]
    HelloNak = 4,
    /// [`Fin`]
    Fin = 5,
    /// [`Query`]
    Query = 6,
    /// [`Status`]
    Status = 7,
    /// [`Unknown`]
    Unknown = 8,
    /// [`Demote`]
    Demote = 9,
    /// [`HelloDone`]
    HelloDone = 10,
    /// [`Pair`]
    Pair = 11,
    /// [`Open`]
    Open = 12,
    /// [`Seen`]
    Seen = 13,
    /// [`Offer`]
    Offer = 14,
    /// [`Challenge`]
    Challenge = 16,
    /// [`Resume`]
    Resume = 17,
    /// [`ResumeOk`]
    ResumeOk = 18,
    /// [`Confirm`]
    Confirm = 19,
    /// [`Refuse`]
    Refuse = 20,
    /// [`Accuse`]
    Accuse = 24,
    /// [`Lost`]
    Lost = 25,
    /// [`Fenced`]
    Fenced = 26,
    /// [`Relay`]
    Relay = 27,
    /// [`Where`]
    Where = 28,
    /// [`Here`]
    Here = 29,
}

impl Kind {
    /// Every kind, in the order of the specification.
    pub const ALL: [Kind; 25] = [
        Kind::Hello,
        Kind::HelloWait,
        Kind::HelloAck,
        Kind::HelloNak,
        Kind::Fin,
        Kind::Query,
        Kind::Status,
        Kind::Unknown,
        Kind::Demote,
        Kind::HelloDone,
        Kind::Pair,
        Kind::Open,
        Kind::Seen,
        Kind::Offer,
        Kind::Challenge,
        Kind::Resume,
        Kind::ResumeOk,
        Kind::Confirm,
        Kind::Refuse,
        Kind::Accuse,
        Kind::Lost,
        Kind::Fenced,
        Kind::Relay,
        Kind::Where,
        Kind::Here,
    ];

    /// Its name in the specification.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Hello => "HELLO",
            Kind::HelloWait => "HELLO_WAIT",
            Kind::HelloAck => "HELLO_ACK",
            Kind::HelloNak => "HELLO_NAK",
            Kind::Fin => "FIN",
            Kind::Query => "QUERY",
            Kind::Status => "STATUS",
            Kind::Unknown => "UNKNOWN",
            Kind::Demote => "DEMOTE",
            Kind::HelloDone => "HELLO_DONE",
            Kind::Pair => "PAIR",
            Kind::Open => "OPEN",
            Kind::Seen => "SEEN",
            Kind::Offer => "OFFER",
            Kind::Challenge => "CHALLENGE",
            Kind::Resume => "RESUME",
            Kind::ResumeOk => "RESUME_OK",
            Kind::Confirm => "CONFIRM",
            Kind::Refuse => "REFUSE",
            Kind::Accuse => "ACCUSE",
            Kind::Lost => "LOST",
            Kind::Fenced => "FENCED",
            Kind::Relay => "RELAY",
            Kind::Where => "WHERE",
            Kind::Here => "HERE",
        }
    }

    /// Length of the whole message in bytes; every kind has exactly one.
    pub const fn message_len(self) -> usize {
        match self {
            Kind::Hello => layout::hello::LEN,
            Kind::HelloWait => layout::hello_wait::LEN,
            Kind::HelloAck => layout::hello_ack::LEN,
            Kind::HelloNak => layout::hello_nak::LEN,
            Kind::Fin => layout::fin::LEN,
            Kind::Query => layout::query::LEN,
            Kind::Status => layout::status::LEN,
            Kind::Unknown => layout::unknown::LEN,
            Kind::Demote => layout::demote::LEN,
            Kind::HelloDone => layout::hello_done::LEN,
            Kind::Pair => layout::pair::LEN,
            Kind::Open => layout::open::LEN,
            Kind::Seen => layout::seen::LEN,
            Kind::Offer => layout::offer::LEN,
            Kind::Challenge => layout::challenge::LEN,
            Kind::Resume => layout::resume::LEN,
            Kind::ResumeOk => layout::resume_ok::LEN,
            Kind::Confirm => layout::confirm::LEN,
            Kind::Refuse => layout::refuse::LEN,
            Kind::Accuse => layout::accuse::LEN,
            Kind::Lost => layout::lost::LEN,
            Kind::Fenced => layout::fenced::LEN,
            Kind::Relay => layout::relay::LEN,
            Kind::Where => layout::asking::LEN,
            Kind::Here => layout::here::LEN,
        }
    }

    fn from_byte(byte: u8) -> Option<Kind> {
        Kind::ALL.into_iter().find(|&kind| kind as u8 == byte)
    }
}

/// Any control message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(
    missing_docs,
    reason = "each variant is documented at the struct it holds"
)]
#[allow(
    clippy::large_enum_variant,
    reason = "one exists at a time, and none is kept in a collection"
)]
pub enum Message {
    Hello(Hello),
    HelloWait(HelloWait),
    HelloAck(HelloAck),
    HelloNak(HelloNak),
    Fin(Fin),
    Query(Query),
    Status(Status),
    Unknown(Unknown),
    Demote(Demote),
    HelloDone(HelloDone),
    Pair(Pair),
    Open(Open),
    Seen(Seen),
    Offer(Offer),
    Challenge(Challenge),
    Resume(Resume),
    ResumeOk(ResumeOk),
    Confirm(Confirm),
    Refuse(Refuse),
    Accuse(Accuse),
    Lost(Lost),
    Fenced(Fenced),
    Relay(Relay),
    Where(Where),
    Here(Here),
}

impl Message {
    /// The kind of this message.
    pub fn kind(&self) -> Kind {
        match self {
            Message::Hello(_) => Kind::Hello,
            Message::HelloWait(_) => Kind::HelloWait,
            Message::HelloAck(_) => Kind::HelloAck,
            Message::HelloNak(_) => Kind::HelloNak,
            Message::Fin(_) => Kind::Fin,
            Message::Query(_) => Kind::Query,
            Message::Status(_) => Kind::Status,
            Message::Unknown(_) => Kind::Unknown,
            Message::Demote(_) => Kind::Demote,
            Message::HelloDone(_) => Kind::HelloDone,
            Message::Pair(_) => Kind::Pair,
            Message::Open(_) => Kind::Open,
            Message::Seen(_) => Kind::Seen,
            Message::Offer(_) => Kind::Offer,
            Message::Challenge(_) => Kind::Challenge,
            Message::Resume(_) => Kind::Resume,
            Message::ResumeOk(_) => Kind::ResumeOk,
            Message::Confirm(_) => Kind::Confirm,
            Message::Refuse(_) => Kind::Refuse,
            Message::Accuse(_) => Kind::Accuse,
            Message::Lost(_) => Kind::Lost,
            Message::Fenced(_) => Kind::Fenced,
            Message::Relay(_) => Kind::Relay,
            Message::Where(_) => Kind::Where,
            Message::Here(_) => Kind::Here,
        }
    }
}

/// A message that is well formed but *not authenticated* yet: verify [`mac`](Parsed::mac) over
/// [`covered`](Parsed::covered) before using anything of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parsed<'a> {
    /// The message.
    pub message: Message,
    /// The authentication code it came with.
    pub mac: Mac,
    /// The bytes that the code covers: everything in front of it, header included.
    pub covered: &'a [u8],
}

/// Why bytes are not a message. Such bytes are dropped and counted, never answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParseError {
    /// Fewer bytes than a header has.
    Short(usize),
    /// Not a SLIM message: the magic is missing.
    Magic,
    /// A version that is not supported.
    Version(u8),
    /// A kind that this version does not have.
    Kind(u8),
    /// The header announces a length, or the buffer has one, that this kind cannot have.
    Length {
        /// The kind in question.
        kind: Kind,
        /// Bytes announced, or present.
        got: usize,
    },
    /// The field named here has a value that is not allowed.
    Value(&'static str),
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ParseError::Short(got) => write!(f, "{got} bytes are too few for a header"),
            ParseError::Magic => f.write_str("not a SLIM message"),
            ParseError::Version(got) => write!(f, "version {got} is not supported"),
            ParseError::Kind(got) => write!(f, "kind {got} is unknown"),
            ParseError::Length { kind, got } => {
                write!(
                    f,
                    "{} has {} bytes, not {got}",
                    kind.name(),
                    kind.message_len()
                )
            }
            ParseError::Value(field) => write!(f, "bad value: {field}"),
        }
    }
}

impl std::error::Error for ParseError {}

/// Encodes `message`. `mac` gets the covered bytes and returns their authentication code.
pub fn encode(message: &Message, mac: impl FnOnce(&[u8]) -> Mac) -> Vec<u8> {
    let kind = message.kind();
    let len = kind.message_len();
    let mut b = vec![0; len];
    put(&mut b, header::MAGIC, &MAGIC);
    b[header::VERSION] = VERSION;
    b[header::KIND] = kind as u8;
    // At most MAX_LEN, which fits: checked at compile time in `layout`.
    put_u16(&mut b, header::LENGTH, len as u16);
    match message {
        Message::Hello(m) => m.write(&mut b),
        Message::HelloWait(m) => m.write(&mut b),
        Message::HelloAck(m) => m.write(&mut b),
        Message::HelloNak(m) => m.write(&mut b),
        Message::Fin(m) => m.write(&mut b),
        Message::Query(m) => m.write(&mut b),
        Message::Status(m) => m.write(&mut b),
        Message::Unknown(m) => m.write(&mut b),
        Message::Demote(m) => m.write(&mut b),
        Message::HelloDone(m) => m.write(&mut b),
        Message::Pair(m) => m.write(&mut b),
        Message::Open(m) => m.write(&mut b),
        Message::Seen(m) => m.write(&mut b),
        Message::Offer(m) => m.write(&mut b),
        Message::Challenge(m) => m.write(&mut b),
        Message::Resume(m) => m.write(&mut b),
        Message::ResumeOk(m) => m.write(&mut b),
        Message::Confirm(m) => m.write(&mut b),
        Message::Refuse(m) => m.write(&mut b),
        Message::Accuse(m) => m.write(&mut b),
        Message::Lost(m) => m.write(&mut b),
        Message::Fenced(m) => m.write(&mut b),
        Message::Relay(m) => m.write(&mut b),
        Message::Where(m) => m.write(&mut b),
        Message::Here(m) => m.write(&mut b),
    }
    let (covered, end) = b.split_at_mut(len - MAC_LEN);
    end.copy_from_slice(&mac(covered));
    b
}

/// The kind of the message that `bytes` begins with, if they begin with a valid header.
pub fn kind_of(bytes: &[u8]) -> Option<Kind> {
    check_header(bytes.first_chunk()?).ok()
}

/// Parses `bytes`, which must be exactly one message.
///
/// # Errors
/// [`ParseError`] if it is not exactly one well-formed message.
pub fn parse(bytes: &[u8]) -> Result<Parsed<'_>, ParseError> {
    let Some(header) = bytes.first_chunk() else {
        return Err(ParseError::Short(bytes.len()));
    };
    let kind = check_header(header)?;
    // The one length check: from here on every offset of `kind` lies inside `bytes`.
    if bytes.len() != kind.message_len() {
        return Err(ParseError::Length {
            kind,
            got: bytes.len(),
        });
    }
    let message = match kind {
        Kind::Hello => Message::Hello(Hello::read(bytes)?),
        Kind::HelloWait => Message::HelloWait(HelloWait::read(bytes)),
        Kind::HelloAck => Message::HelloAck(HelloAck::read(bytes)?),
        Kind::HelloNak => Message::HelloNak(HelloNak::read(bytes)?),
        Kind::Fin => Message::Fin(Fin::read(bytes)?),
        Kind::Query => Message::Query(Query::read(bytes)),
        Kind::Status => Message::Status(Status::read(bytes)?),
        Kind::Unknown => Message::Unknown(Unknown::read(bytes)),
        Kind::Demote => Message::Demote(Demote::read(bytes)),
        Kind::HelloDone => Message::HelloDone(HelloDone::read(bytes)?),
        Kind::Pair => Message::Pair(Pair::read(bytes)),
        Kind::Open => Message::Open(Open::read(bytes)?),
        Kind::Seen => Message::Seen(Seen::read(bytes)),
        Kind::Offer => Message::Offer(Offer::read(bytes)?),
        Kind::Challenge => Message::Challenge(Challenge::read(bytes)),
        Kind::Resume => Message::Resume(Resume::read(bytes)),
        Kind::ResumeOk => Message::ResumeOk(ResumeOk::read(bytes)?),
        Kind::Confirm => Message::Confirm(Confirm::read(bytes)?),
        Kind::Refuse => Message::Refuse(Refuse::read(bytes)?),
        Kind::Accuse => Message::Accuse(Accuse::read(bytes)?),
        Kind::Lost => Message::Lost(Lost::read(bytes)?),
        Kind::Fenced => Message::Fenced(Fenced::read(bytes)),
        Kind::Relay => Message::Relay(Relay::read(bytes)?),
        Kind::Where => Message::Where(Where::read(bytes)?),
        Kind::Here => Message::Here(Here::read(bytes)?),
    };
    let covered = &bytes[..bytes.len() - MAC_LEN];
    Ok(Parsed {
        message,
        mac: array(bytes, covered.len()),
        covered,
    })
}

/// Length of the message with this header, header included: [`MAX_LEN`] at most.
///
/// # Errors
/// [`ParseError`] if the header is not that of a message. Then nothing more must be read.
pub fn message_len(header: &[u8; HEADER_LEN]) -> Result<usize, ParseError> {
    check_header(header).map(Kind::message_len)
}

/// Kind and flow of the control message that `bytes` begin with. An ICMP message may quote only the start of a message.
/// `None` if the start is too short, or is not that of a message that is sent by UDP.
pub fn quoted(bytes: &[u8]) -> Option<(Kind, FlowId)> {
    let header = bytes.first_chunk()?;
    // Every message of the control channel begins with the name of the flow. SEEN, which is about no flow, begins with that
    // of the pair.
    let flow = bytes.get(HEADER_LEN..)?.first_chunk()?;
    let kind = check_header(header).ok()?;
    let on_control = (kind as u8) < Kind::Challenge as u8;
    on_control.then_some((kind, FlowId(*flow)))
}

fn check_header(h: &[u8; HEADER_LEN]) -> Result<Kind, ParseError> {
    if array(h, header::MAGIC) != MAGIC {
        return Err(ParseError::Magic);
    }
    if h[header::VERSION] != VERSION {
        return Err(ParseError::Version(h[header::VERSION]));
    }
    let kind = Kind::from_byte(h[header::KIND]).ok_or(ParseError::Kind(h[header::KIND]))?;
    let announced = usize::from(read_u16(h, header::LENGTH));
    if announced != kind.message_len() {
        return Err(ParseError::Length {
            kind,
            got: announced,
        });
    }
    Ok(kind)
}
