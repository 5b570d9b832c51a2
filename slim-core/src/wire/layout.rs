//! The place of each field: offsets from the first byte of the message.
//!
//! One module per message, in the order of `docs/PROTOCOL.md`, section "Messages". Every message
//! has one length, so after one length check every field can be read without another.

use crate::transport::MAX_LOCATOR;

/// Bytes in front of the fields; see `docs/PROTOCOL.md`, section "Header".
pub const HEADER_LEN: usize = 8;
/// Bytes of the authentication code that ends every message.
pub const MAC_LEN: usize = 16;
/// No message is, or ever will be, longer than this, so that a reader can have a fixed buffer.
pub const MAX_LEN: usize = 512;
/// How many addresses an endpoint can announce.
pub const MAX_ADDRS: usize = 8;
/// How many locators of other kinds than TCP an endpoint can announce.
pub const MAX_LOCATORS: usize = 4;

/// Offsets within the header.
pub mod header {
    /// The four bytes of [`MAGIC`](crate::wire::MAGIC).
    pub const MAGIC: usize = 0;
    /// [`VERSION`](crate::wire::VERSION).
    pub const VERSION: usize = 4;
    /// Which message this is.
    pub const KIND: usize = 5;
    /// Bytes of the whole message, header and authentication code included.
    pub const LENGTH: usize = 6;
}

pub(super) const ID: usize = 16;
pub(super) const NONCE: usize = 16;
pub(super) const RANDOM: usize = 32;
/// Family, one zero byte, port, 16 bytes of address.
pub(super) const SOCKET_ADDR: usize = 20;
/// Family, 16 bytes of address.
pub(super) const IP_ADDR: usize = 17;
/// Count, then always [`MAX_ADDRS`] places.
pub(super) const ADDRS: usize = 1 + MAX_ADDRS * IP_ADDR;
/// Kind, length, bytes.
pub(super) const LOCATOR: usize = 2 + MAX_LOCATOR;
/// Count, then always [`MAX_LOCATORS`] places.
pub(super) const LOCATOR_LIST: usize = 1 + MAX_LOCATORS * LOCATOR;
/// Host, pid, incarnation.
pub(super) const ENDPOINT: usize = 16 + 4 + 8;
/// Whether and how (1 byte), then the number.
pub(super) const END_OF_STREAM: usize = 1 + 8;

/// Declares the offsets of one message from the sizes of its fields, in order.
macro_rules! layout {
    ($(#[$doc:meta])* $name:ident { $($(#[$fdoc:meta])* $field:ident: $size:expr,)* }) => {
        $(#[$doc])*
        pub mod $name {
            #[allow(unused_imports, reason = "not every message has a field of every size")]
            use super::*;
            layout!(@fields HEADER_LEN; $($(#[$fdoc])* $field: $size,)*);
        }
    };
    (@fields $at:expr; $(#[$fdoc:meta])* $field:ident: $size:expr, $($rest:tt)*) => {
        $(#[$fdoc])*
        pub const $field: usize = $at;
        layout!(@fields $field + $size; $($rest)*);
    };
    (@fields $at:expr;) => {
        /// The authentication code.
        pub const MAC: usize = $at;
        /// Length of the whole message.
        pub const LEN: usize = MAC + MAC_LEN;
        const _: () = assert!(LEN <= MAX_LEN);
    };
}

layout! {
    /// `docs/PROTOCOL.md`, section "HELLO".
    hello {
        /// Name of the flow, chosen by the connector.
        FLOW: ID,
        /// Connector's address and port of the TCP connection.
        CONNECTOR: SOCKET_ADDR,
        /// Acceptor's address and port of the TCP connection.
        ACCEPTOR: SOCKET_ADDR,
        /// The connector.
        ENDPOINT_ID: ENDPOINT,
        /// The connector's part of the key.
        RANDOM_C: RANDOM,
        /// Feature bits.
        FEATURES: 8,
        /// TCP port of the resume listener.
        RESUME_PORT: 2,
        /// UDP port for control messages.
        CONTROL_PORT: 2,
        /// Addresses at which the two ports can be reached.
        ADDR_LIST: ADDRS,
    }
}

layout! {
    /// `docs/PROTOCOL.md`, section "HELLO_WAIT".
    hello_wait {
        /// Name of the flow.
        FLOW: ID,
    }
}

layout! {
    /// `docs/PROTOCOL.md`, section "HELLO_ACK".
    hello_ack {
        /// Name of the flow.
        FLOW: ID,
        /// The acceptor.
        ENDPOINT_ID: ENDPOINT,
        /// The acceptor's part of the key.
        RANDOM_S: RANDOM,
        /// Feature bits.
        FEATURES: 8,
        /// TCP port of the resume listener.
        RESUME_PORT: 2,
        /// UDP port for control messages.
        CONTROL_PORT: 2,
        /// Addresses at which the two ports can be reached.
        ADDR_LIST: ADDRS,
    }
}

layout! {
    /// `docs/PROTOCOL.md`, section "HELLO_NAK".
    hello_nak {
        /// Name of the flow.
        FLOW: ID,
        /// Reason of the refusal.
        REASON: 1,
    }
}

layout! {
    /// `docs/PROTOCOL.md`, section "FIN".
    fin {
        /// Name of the flow.
        FLOW: ID,
        /// Bytes that the sender has sent in all.
        FINAL_SEQ: 8,
        /// How the flow ended.
        HOW: 1,
    }
}

layout! {
    /// `docs/PROTOCOL.md`, section "QUERY".
    query {
        /// Name of the flow.
        FLOW: ID,
        /// Echoed by the answer.
        NONCE_Q: NONCE,
    }
}

layout! {
    /// `docs/PROTOCOL.md`, section "STATUS".
    status {
        /// Name of the flow.
        FLOW: ID,
        /// From the QUERY.
        NONCE_Q: NONCE,
        /// State of the flow at the sender.
        STATE: 1,
        /// Bytes that the sender has sent in all, if the state is one that has ended the stream.
        FINAL_SEQ: 8,
    }
}

layout! {
    /// `docs/PROTOCOL.md`, section "UNKNOWN".
    unknown {
        /// Name of the flow.
        FLOW: ID,
        /// From the QUERY.
        NONCE_Q: NONCE,
        /// The endpoint that does not know the flow.
        ENDPOINT_ID: ENDPOINT,
    }
}

layout! {
    /// `docs/PROTOCOL.md`, section "DEMOTE".
    demote {
        /// Name of the flow.
        FLOW: ID,
    }
}

/// `docs/PROTOCOL.md`, section "HELLO_DONE": the fields of HELLO.
pub use hello as hello_done;

layout! {
    /// `docs/PROTOCOL.md`, section "PAIR".
    pair {
        /// Name of the flow whose key the pair's key is derived from.
        FLOW: ID,
        /// Name of the pair.
        PAIR: ID,
        /// UDP port of the mailbox.
        MAILBOX: 2,
    }
}

layout! {
    /// `docs/PROTOCOL.md`, section "OPEN".
    open {
        /// Name of the flow.
        FLOW: ID,
        /// Name of the pair.
        PAIR: ID,
        /// Number of the OPEN.
        COUNTER: 8,
        /// Connector's address and port of the TCP connection.
        CONNECTOR: SOCKET_ADDR,
        /// Acceptor's address and port of the TCP connection.
        ACCEPTOR: SOCKET_ADDR,
    }
}

layout! {
    /// `docs/PROTOCOL.md`, section "SEEN".
    seen {
        /// Name of the pair.
        PAIR: ID,
        /// Number of an OPEN.
        COUNTER: 8,
    }
}

layout! {
    /// `docs/PROTOCOL.md`, section "OFFER".
    offer {
        /// Name of a flow between the two endpoints.
        FLOW: ID,
        /// Serial number of the sender's locators.
        SERIAL: 8,
        /// Serial number in the OFFER that is answered, or 0.
        ANSWERS: 8,
        /// How the sender is reached.
        LOCATORS: LOCATOR_LIST,
    }
}

layout! {
    /// `docs/PROTOCOL.md`, section "CHALLENGE".
    challenge {
        /// The responder.
        ENDPOINT_ID: ENDPOINT,
        /// Nonce that the initiator's authentication code covers.
        NONCE_R: NONCE,
    }
}

layout! {
    /// `docs/PROTOCOL.md`, section "RESUME".
    resume {
        /// Name of the flow.
        FLOW: ID,
        /// Number of the new transport.
        EPOCH: 8,
        /// Nonce that the responder's authentication code covers.
        NONCE_I: NONCE,
    }
}

layout! {
    /// `docs/PROTOCOL.md`, section "RESUME_OK".
    resume_ok {
        /// Name of the flow.
        FLOW: ID,
        /// From the RESUME.
        EPOCH: 8,
        /// Bytes that the responder has received.
        RECEIVED: 8,
        /// Bytes that the responder has sent.
        SENT: 8,
        /// How the responder's application has finished, if it has.
        END: END_OF_STREAM,
    }
}

layout! {
    /// `docs/PROTOCOL.md`, section "CONFIRM".
    confirm {
        /// Bytes that the initiator has received.
        RECEIVED: 8,
        /// Bytes that the initiator has sent.
        SENT: 8,
        /// How the initiator's application has finished, if it has.
        END: END_OF_STREAM,
    }
}

layout! {
    /// `docs/PROTOCOL.md`, section "REFUSE".
    refuse {
        /// Name of the flow.
        FLOW: ID,
        /// From the RESUME.
        NONCE_I: NONCE,
        /// Reason of the refusal.
        REASON: 1,
        /// Bytes that the responder has sent in all, if the reason is that the flow was closed.
        FINAL_SEQ: 8,
    }
}

layout! {
    /// `docs/PROTOCOL.md`, section "ACCUSE".
    accuse {
        /// The sender.
        ACCUSER: ENDPOINT,
        /// The process that the sender cannot reach any more.
        ACCUSED: ENDPOINT,
        /// UDP port for control messages of the accused.
        CONTROL_PORT: 2,
        /// Addresses at which that port can be reached.
        ADDR_LIST: ADDRS,
        /// From LOST, or 0.
        COOKIE: 8,
    }
}

layout! {
    /// `docs/PROTOCOL.md`, section "LOST".
    lost {
        /// The process that this is for.
        TO: ENDPOINT,
        /// The process that is lost.
        LOST: ENDPOINT,
        /// State of the verdict.
        STATE: 1,
        /// What ACCUSE has to bring back.
        COOKIE: 8,
    }
}

layout! {
    /// `docs/PROTOCOL.md`, section "FENCED".
    fenced {
        /// The sender, which is lost.
        ENDPOINT_ID: ENDPOINT,
    }
}

layout! {
    /// `docs/PROTOCOL.md`, section "RELAY".
    relay {
        /// TCP port for relayed connections.
        PORT: 2,
        /// Addresses at which that port can be reached.
        ADDR_LIST: ADDRS,
    }
}

layout! {
    /// `docs/PROTOCOL.md`, section "WHERE".
    asking {
        /// The sender.
        SENDER: ENDPOINT,
        /// The process that it looks for.
        WANTED: ENDPOINT,
        /// The serial number of the place that the sender knows of that process, or 0.
        KNOWN: 8,
        /// Serial number of the sender's place, which is what follows.
        SERIAL: 8,
        /// TCP port of the sender's resume listener.
        RESUME_PORT: 2,
        /// UDP port of the sender for control messages.
        CONTROL_PORT: 2,
        /// Addresses at which the two ports can be reached.
        ADDR_LIST: ADDRS,
    }
}

layout! {
    /// `docs/PROTOCOL.md`, section "HERE".
    here {
        /// The process that this is for.
        TO: ENDPOINT,
        /// The process that is at this place.
        ENDPOINT_ID: ENDPOINT,
        /// Serial number of the place, which is what follows.
        SERIAL: 8,
        /// TCP port of its resume listener.
        RESUME_PORT: 2,
        /// UDP port for control messages.
        CONTROL_PORT: 2,
        /// Addresses at which the two ports can be reached.
        ADDR_LIST: ADDRS,
    }
}
