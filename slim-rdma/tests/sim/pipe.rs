//! The other transport: what a kernel does with a TCP connection, as far as a resume depends on it.

use std::collections::VecDeque;

/// Most bytes that were sent and have not arrived, and that arrived and are not read.
const ROOM: usize = 300;

#[derive(Debug, Default)]
struct Way {
    flying: VecDeque<u8>,
    arrived: VecDeque<u8>,
    /// Bytes that the receiver's kernel has acknowledged.
    acked: u64,
}

#[derive(Debug, Default)]
pub struct Pipe {
    /// By sender.
    ways: [Way; 2],
    broken: bool,
}

impl Pipe {
    pub fn send(&mut self, side: usize, data: &[u8]) -> Option<usize> {
        if self.broken {
            return None;
        }
        let flying = &mut self.ways[side].flying;
        let n = data.len().min(ROOM - flying.len().min(ROOM));
        flying.extend(&data[..n]);
        Some(n)
    }

    /// Bytes that have arrived stay readable after a break.
    pub fn recv(&mut self, side: usize, most: usize) -> Option<Vec<u8>> {
        let arrived = &mut self.ways[1 - side].arrived;
        let n = most.min(arrived.len());
        if n == 0 && self.broken {
            return None;
        }
        Some(arrived.drain(..n).collect())
    }

    pub fn acked(&self, side: usize) -> u64 {
        self.ways[side].acked
    }

    /// Up to `n` bytes of a side arrive.
    pub fn arrive(&mut self, side: usize, n: usize) {
        let way = &mut self.ways[side];
        if !self.broken {
            let n = n.min(way.flying.len()).min(ROOM - way.arrived.len());
            way.arrived.extend(way.flying.drain(..n));
            way.acked += n as u64;
        }
    }

    pub fn kill(&mut self) {
        self.broken = true;
    }
}
