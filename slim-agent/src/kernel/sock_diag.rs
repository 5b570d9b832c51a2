//! Questions to the kernel about TCP sockets (sock_diag(7)).

use std::io;

use crate::kernel::netlink::HEADER;
use crate::kernel::sys;
use slim_sys::OwnFd;

/// `SOCK_DIAG_BY_FAMILY` (linux/sock_diag.h): the kind of a question, and of an answer that is not an error.
pub(crate) const BY_FAMILY: u16 = 20;
/// Length of a question after its header.
const QUESTION: usize = 56;
/// Offset of the two ends in a question (our port, their port, our address, their address, interface, cookie).
pub(crate) const ENDS_IN_QUESTION: usize = 8;
/// Offset of the two ends in an answer.
pub(crate) const ENDS_IN_ANSWER: usize = 4;

/// A question. Fields that are not set are zero.
pub(crate) struct Question([u8; HEADER + QUESTION]);

impl Question {
    /// A question about TCP sockets of this family in one of these states, which are a bit mask. `flags` are those of
    /// netlink(7), besides `NLM_F_REQUEST`.
    pub(crate) fn new(flags: i32, family: i32, states: u32) -> Self {
        let mut question = Question([0; HEADER + QUESTION]);
        let header = &mut question.0[..HEADER];
        header[..4].copy_from_slice(&((HEADER + QUESTION) as u32).to_ne_bytes());
        header[4..6].copy_from_slice(&BY_FAMILY.to_ne_bytes());
        header[6..8].copy_from_slice(&((libc::NLM_F_REQUEST | flags) as u16).to_ne_bytes());
        question.put(0, &[family as u8, libc::IPPROTO_TCP as u8]);
        question.put(4, &states.to_ne_bytes());
        question
    }

    /// Writes at an offset after the header.
    pub(crate) fn put(&mut self, at: usize, bytes: &[u8]) {
        self.0[HEADER + at..][..bytes.len()].copy_from_slice(bytes);
    }

    /// Sends the question on a socket of [`sys::sock_diag`].
    pub(crate) fn ask(&self, socket: &OwnFd) -> io::Result<()> {
        sys::send(socket.raw(), &self.0).map(drop)
    }
}
