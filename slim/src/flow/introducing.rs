//! The connector's half of an introduction, on a connection that is not the flow's yet.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::RawFd;
use std::time::Duration;

use slim_agent::Agent;
use slim_core::endpoint::Agreed;
use slim_sys::Errno;

use crate::blob::{self, ADMITTED, DoorKey, Introduction, PROOF, WELCOME, Welcome};
use crate::socket;

/// How long the agent may take to say who we are.
const LIMIT: Duration = Duration::from_secs(5);

/// How far it has come.
pub(super) struct Introducing {
    key: DoorKey,
    random: [u8; 32],
    said: Vec<u8>,
    /// Bytes of that which are sent.
    sent: usize,
    answer: Vec<u8>,
    /// What both ends agree on, and our proof, from when the answer has come.
    agreed: Option<(Agreed, [u8; PROOF])>,
}

impl Introducing {
    /// Who we are.
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

    /// Whether only the answer is wanting.
    pub(super) fn waits(&self) -> bool {
        self.sent == self.said.len()
    }

    /// Goes on where the connection is ready: what both ends have agreed on, once that is known to both.
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
            // The buffer is empty by now: it fits.
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

/// Receives up to so many bytes in all, and not one more: those of the stream follow. Whether they are there.
fn hear(fd: RawFd, heard: &mut Vec<u8>, all: usize) -> Result<bool, Errno> {
    while heard.len() < all {
        let mut buf = [0; WELCOME];
        let wanted = buf.get_mut(..all - heard.len()).unwrap_or_default();
        match socket::recv(fd, &mut [IoSliceMut::new(wanted)]) {
            // Nobody there takes us for one of the job.
            Ok(0) => return Err(libc::ECONNREFUSED),
            Ok(n) => heard.extend_from_slice(&wanted[..n]),
            Err(libc::EAGAIN) => return Ok(false),
            Err(errno) => return Err(errno),
        }
    }
    Ok(true)
}
