//! The connector's half of an introduction, before the connection carries the flow.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use slim_agent::Agent;
use slim_core::endpoint::{Agreed, Announcement};
use slim_sys::{Errno, OwnFd};

use crate::blob::{self, ADMITTED, DoorKey, Introduction, PROOF, WELCOME, Welcome};
use crate::hub::Hub;
use crate::socket;

/// Time limit for the agent to describe this process (its announcement).
const LIMIT: Duration = Duration::from_secs(5);

/// Time for each address of a door but the last.
const PER_DOOR: Duration = Duration::from_secs(3);

/// Progress of an introduction.
pub(super) struct Introducing {
    key: DoorKey,
    who: Announcement,
    /// Addresses that are tried if the present one fails.
    others: VecDeque<SocketAddr>,
    /// When the present address counts as failed, if there are others; and a timerfd in the session's poll set for that time.
    late_at: Option<Instant>,
    alarm: Option<OwnFd>,
    random: [u8; 32],
    said: Vec<u8>,
    /// Bytes of `said` that the kernel has taken.
    sent: usize,
    answer: Vec<u8>,
    /// The agreement and our proof, once WELCOME has arrived.
    agreed: Option<(Agreed, [u8; PROOF])>,
}

impl Introducing {
    /// Prepares an introduction at the first of these addresses that works.
    pub(super) fn new(agent: &Agent, doors: Vec<SocketAddr>, key: DoorKey) -> Result<Self, Errno> {
        let who = agent.announcement(LIMIT).ok_or(libc::ETIMEDOUT)?;
        Ok(Self {
            key,
            who,
            others: doors.into(),
            late_at: None,
            alarm: None,
            random: [0; 32],
            said: Vec::new(),
            sent: 0,
            answer: Vec::new(),
            agreed: None,
        })
    }

    /// Begins to connect to the next address, and prepares INTRODUCTION. Addresses that the kernel refuses at once are skipped. `errno`: the
    /// error if there is no address left.
    pub(super) fn next_connection(
        &mut self,
        hub: &Hub,
        id: u64,
        mut errno: Errno,
    ) -> Result<(SocketAddr, OwnFd), Errno> {
        while let Some(door) = self.others.pop_front() {
            match socket::connect(door) {
                Ok((fd, _)) => {
                    self.random = blob::random()?;
                    let (random, who) = (self.random, self.who.clone());
                    self.said = Introduction { random, who }.encode(&self.key);
                    (self.sent, self.agreed) = (0, None);
                    self.answer.clear();
                    self.set_alarm(hub, id);
                    return Ok((door, fd));
                }
                Err(refused) => errno = refused,
            }
        }
        Err(errno)
    }

    /// Sets the limit for the present address.
    fn set_alarm(&mut self, hub: &Hub, id: u64) {
        self.alarm = None;
        self.late_at = (!self.others.is_empty()).then(|| Instant::now() + PER_DOOR);
        if self.late_at.is_some() {
            // Without descriptors the program finds the limit exceeded when it asks for the flow's state.
            let alarm = slim_sys::timerfd().ok();
            self.alarm = alarm.filter(|alarm| hub.watch_set(alarm, id).is_ok());
        }
        if let Some(alarm) = &self.alarm {
            slim_sys::set_timerfd(alarm.raw(), Some(PER_DOOR));
        }
    }

    /// Whether the present address has had its time, and there are others.
    pub(super) fn is_late(&self) -> bool {
        self.late_at.is_some_and(|at| at <= Instant::now())
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
