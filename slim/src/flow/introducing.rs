//! The connector's half of an introduction, before the connection carries the flow.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::RawFd;
use std::time::Duration;

use slim_agent::Agent;
use slim_core::endpoint::Agreed;
use slim_sys::Errno;

use crate::blob::{self, ADMITTED, DoorKey, Introduction, PROOF, WELCOME, Welcome};
use crate::socket;

/// Time limit for the agent to describe this process (its announcement).
const LIMIT: Duration = Duration::from_secs(5);

/// Progress of an introduction.
pub(super) struct Introducing {
    key: DoorKey,
    random: [u8; 32],
    said: Vec<u8>,
    /// Bytes of `said` that the kernel has taken.
    sent: usize,
    answer: Vec<u8>,
    /// The agreement and our proof, once WELCOME has arrived.
    agreed: Option<(Agreed, [u8; PROOF])>,
}

impl Introducing {
    /// Prepares INTRODUCTION.
    pub(super) fn new(agent: &Agent, key: DoorKey) -> Result<Self, Errno> {
        let random = blob::random()?;
        let who = agent.announcement(LIMIT).ok_or(libc::ETIMEDOUT)?;
        let said = Introduction { random, who }.encode(&key);
        Ok(Self {
            key,
            random,
            said,
            sent: 0,
            answer: Vec::new(),
            agreed: None,
        })
    }

    /// Whether everything is sent and only answers are missing.
    pub(super) fn waits(&self) -> bool {
        self.sent == self.said.len()
    }

    /// Sends and receives as far as the connection is ready. Returns the agreement once both ends know it.
    pub(super) fn go_on(&mut self, fd: RawFd) -> Result<Option<Agreed>, Errno> {
        while let Some(rest @ [_, ..]) = self.said.get(self.sent..) {
            match socket::send(fd, &[IoSlice::new(rest)]) {
                Ok(n) => self.sent += n,
                Err(libc::EAGAIN) => return Ok(None),
                Err(errno) => return Err(errno),
            }
        }
        if self.agreed.is_none() {
            if !hear(fd, &mut self.answer, WELCOME)? {
                return Ok(None);
            }
            let welcome = Welcome::decode(&self.answer, &self.said, &self.key);
            let welcome = welcome.ok_or(libc::EPROTO)?;
            let proof = blob::proof(&self.answer, &self.key);
            // The peer has answered INTRODUCTION, so the send buffer is empty and has room for the proof.
            match socket::send(fd, &[IoSlice::new(&proof)]) {
                Ok(n) if n == proof.len() => {}
                Ok(_) => return Err(libc::EPROTO),
                Err(errno) => return Err(errno),
            }
            let randoms = [&self.random, &welcome.random];
            let agreed = blob::agreed(&self.key, randoms, welcome.who);
            self.agreed = Some((agreed, proof));
            self.answer.clear();
        }
        if !hear(fd, &mut self.answer, ADMITTED)? {
            return Ok(None);
        }
        match self.agreed.take() {
            Some((agreed, proof)) if blob::is_admitted(&self.answer, &proof, &self.key) => {
                Ok(Some(agreed))
            }
            _ => Err(libc::EPROTO),
        }
    }
}

/// Receives until `heard` has `all` bytes, and no byte more, since the stream's bytes follow. Returns whether all have arrived.
fn hear(fd: RawFd, heard: &mut Vec<u8>, all: usize) -> Result<bool, Errno> {
    while heard.len() < all {
        let mut buf = [0; WELCOME];
        let wanted = buf.get_mut(..all - heard.len()).unwrap_or_default();
        match socket::recv(fd, &mut [IoSliceMut::new(wanted)]) {
            // The acceptor has closed the connection: it does not recognize this process as one of the job.
            Ok(0) => return Err(libc::ECONNREFUSED),
            Ok(n) => heard.extend_from_slice(&wanted[..n]),
            Err(libc::EAGAIN) => return Ok(false),
            Err(errno) => return Err(errno),
        }
    }
    Ok(true)
}
