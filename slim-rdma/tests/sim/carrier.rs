//! What carries one side of the flow right now.

use std::cell::RefCell;
use std::rc::Rc;

use slim_rdma::in_memory::MemoryAdapter;
use slim_rdma::{PairError, QueuePair};

use crate::pipe::Pipe;

pub enum Carrier {
    Pair(Box<QueuePair>),
    Pipe(Rc<RefCell<Pipe>>),
}

/// The transport carries nothing any more.
#[derive(Debug)]
pub struct Dead;

impl Carrier {
    /// Bytes taken; 0 if there is no room.
    pub fn send(
        &mut self,
        side: usize,
        adapter: &mut MemoryAdapter,
        data: &[u8],
    ) -> Result<usize, Dead> {
        match self {
            Carrier::Pair(pair) => match pair.send(adapter, data) {
                Ok(n) => Ok(n),
                Err(PairError::WouldBlock) => Ok(0),
                Err(PairError::Ended) => unreachable!("nothing is sent behind the end"),
                Err(PairError::Broken(_)) => Err(Dead),
            },
            Carrier::Pipe(pipe) => pipe.borrow_mut().send(side, data).ok_or(Dead),
        }
    }

    /// Bytes that are there; none if there are none yet, or if the peer has ended its direction.
    pub fn recv(
        &mut self,
        side: usize,
        adapter: &mut MemoryAdapter,
        most: usize,
    ) -> Result<Vec<u8>, Dead> {
        match self {
            Carrier::Pair(pair) => {
                let mut buf = vec![0; most];
                match pair.recv(adapter, &mut buf) {
                    Ok(n) => {
                        buf.truncate(n);
                        Ok(buf)
                    }
                    Err(PairError::WouldBlock) => Ok(Vec::new()),
                    Err(_) => Err(Dead),
                }
            }
            Carrier::Pipe(pipe) => pipe.borrow_mut().recv(side, most).ok_or(Dead),
        }
    }

    /// Nothing more is sent. A pipe does not tell.
    pub fn end(&mut self, adapter: &mut MemoryAdapter) {
        if let Carrier::Pair(pair) = self {
            pair.end(adapter);
        }
    }

    /// Bytes received on it in all, if the peer has ended its direction.
    pub fn ended(&self) -> Option<u64> {
        match self {
            Carrier::Pair(pair) if pair.peer_has_ended() => Some(pair.received()),
            _ => None,
        }
    }

    /// Bytes sent on it that the peer has for certain.
    pub fn acked(&self, side: usize) -> u64 {
        match self {
            Carrier::Pair(pair) => pair.recorded_by_peer(),
            Carrier::Pipe(pipe) => pipe.borrow().acked(side),
        }
    }

    pub fn is_pair(&self) -> bool {
        matches!(self, Carrier::Pair(_))
    }
}
