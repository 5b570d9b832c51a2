//! The applications and their calls.

use std::time::Duration;

use slim_core::{Cause, FinHow, FlowToken, Verdict};

use crate::event::Ev;
use crate::front::{Front, Plan, pattern};
use crate::kinds::FABRIC;
use crate::tcp::{ECONNABORTED, ECONNRESET, Read};
use crate::world::{MS, Mutation, World};

impl World {
    pub fn tick(&mut self, node: usize, token: FlowToken) -> Result<(), String> {
        if self.nodes[node].crashed || self.front(node, token).gone {
            return Ok(());
        }
        if let Some((tcp, side)) = self.front(node, token).tcp {
            self.keepalive(tcp, side);
        }
        match self.dice.pick(0, 9) {
            0..=3 => self.write(node, token)?,
            4..=7 => self.read(node, token)?,
            _ => self.sweep(node, token),
        }
        self.end(node, token)?;
        let late = if self.is_dark() {
            4 * 3600 * 1000 * MS
        } else if self.now > 20_000 * MS {
            500 * MS
        } else {
            30 * MS
        };
        let mut wait = self.dice.spread(200, late);
        if let Some(until) = self.dark_until() {
            // What it would do meanwhile, it does soon after the outage.
            wait = wait.min(until.saturating_sub(self.now) + 100 * MS);
        }
        self.later(wait, wait, Ev::Tick { node, token });
        Ok(())
    }

    pub fn write(&mut self, node: usize, token: FlowToken) -> Result<(), String> {
        let most = self
            .dice
            .spread(1, self.chunk)
            .min(self.front(node, token).to_write);
        let seed = self.seed ^ token.0;
        let front = self.front(node, token);
        if front.barred || front.over || front.fin.is_some() || most == 0 {
            return Ok(());
        }
        if front.verdict.is_some() {
            // The application gets EPIPE or the error, but it reads the stash first.
            front.over = front.stash.is_empty();
            return Ok(());
        }
        let Some((tcp, side)) = front.tcp else {
            return Err(format!(
                "side {node}: {token:?} is open without a transport"
            ));
        };
        let data: Vec<u8> = (0..most)
            .map(|i| pattern(seed, node, front.sent + i))
            .collect();
        match self.tcps[tcp].write(side, &data) {
            Ok(n) => {
                let front = self.front(node, token);
                front.replay.push(&data[..n]);
                front.sent += n as u64;
                front.to_write -= n as u64;
                self.transmit(tcp, side);
            }
            Err(errno) => self.fault(node, token, Cause::Errno(errno)),
        }
        Ok(())
    }

    pub fn read(&mut self, node: usize, token: FlowToken) -> Result<(), String> {
        let most = self.dice.spread(1, self.chunk + 200) as usize;
        let seed = self.seed ^ token.0;
        let front = self.front(node, token);
        if front.over || front.end_seen {
            return Ok(());
        }
        if !front.stash.is_empty() {
            let mut out = vec![0; most];
            let n = front.stash.read(&mut out);
            return front.deliver(seed, node, &out[..n]);
        }
        if let Some(verdict) = front.verdict {
            front.over = true;
            if verdict == Verdict::Eof {
                self.end_of_stream(node, token)?;
            }
            return Ok(());
        }
        // While the flow is suspended, only a call that was already inside reads.
        let Some((tcp, side)) = front.tcp.filter(|_| front.pump.is_none()) else {
            return Ok(());
        };
        let barred = front.barred;
        match self.tcps[tcp].read(side, most) {
            Read::Bytes(bytes) if barred && bytes.is_empty() => Ok(()),
            Read::Bytes(bytes) => {
                let front = self.front(node, token);
                front.received += bytes.len() as u64;
                if barred {
                    front.stash.push(bytes).unwrap();
                    return Ok(());
                }
                front.deliver(seed, node, &bytes)
            }
            Read::Nothing => Ok(()),
            _ if barred => Ok(()),
            Read::Error(errno) => {
                self.fault(node, token, Cause::Errno(errno));
                Ok(())
            }
            Read::End => {
                let front = self.front(node, token);
                let received = front.received;
                if front.legacy {
                    front.end_seen = true;
                    return Ok(());
                }
                if front.peer_final == Some(received) {
                    return self.end_of_stream(node, token);
                }
                self.fault(node, token, Cause::Eof { received });
                if self.dice.chance(10) {
                    // The connection is killed now, while another thread writes to it.
                    self.tcps[tcp].die(side, ECONNABORTED);
                    self.fault(node, token, Cause::Errno(ECONNABORTED));
                }
                Ok(())
            }
        }
    }

    /// The application gets an end of stream, which must be genuine.
    pub fn end_of_stream(&mut self, node: usize, token: FlowToken) -> Result<(), String> {
        self.stats.ended += 1;
        let front = self.front(node, token);
        front.end_seen = true;
        let delivered = front.delivered;
        let other = &self.nodes[1 - node].fronts[&token];
        if other.fin.is_none() || other.sent != delivered {
            return Err(format!(
                "side {node}: {token:?} ends at {delivered}, the peer has sent {} and {:?}",
                other.sent, other.fin
            ));
        }
        Ok(())
    }

    pub fn fault(&mut self, node: usize, token: FlowToken, cause: Cause) {
        if self.trace {
            println!("{:>10} {node} fault {cause:?}", self.now);
        }
        let front = self.front(node, token);
        if front.legacy {
            front.over = true;
            return;
        }
        front.barred = true;
        front.trying = true;
        let now = self.clock(node);
        self.nodes[node].endpoint.fault(now, token, cause);
    }

    /// Whether the front end knows that its transport goes through the witness.
    fn is_relayed(&self, front: &Front) -> bool {
        let broken = self.mutation == Some(Mutation::TrimRelayed);
        self.kinds.relay && front.network == FABRIC && !front.legacy && !broken
    }

    /// Bytes of the stream that the front end takes for acknowledged on its transport.
    fn acked(&self, front: &Front, tcp: usize, side: usize) -> u64 {
        let kernel = &self.tcps[tcp];
        match self.kinds.relay && front.network == FABRIC {
            _ if self.is_relayed(front) => front.replay.start(),
            // The witness's kernel has acknowledged everything.
            true => front.acked(kernel.written(side)),
            false if kernel.by_software && self.mutation != Some(Mutation::TrimArrived) => {
                front.acked(kernel.recorded(side))
            }
            false => front.acked(kernel.acked(side)),
        }
    }

    /// Trims the replay buffer.
    pub fn sweep(&mut self, node: usize, token: FlowToken) {
        let front = &self.nodes[node].fronts[&token];
        let Some((tcp, side)) = front.tcp else {
            return;
        };
        let acked = self.acked(front, tcp, side);
        let kept = front.replay.end() > acked;
        if self.is_relayed(front) && kept && !front.barred && front.pump.is_none() {
            // Only a resume tells what the peer has.
            let now = self.clock(node);
            let endpoint = &mut self.nodes[node].endpoint;
            match self.dice.chance(50) {
                true => endpoint.fault(now, token, Cause::Stall),
                false => endpoint.handle_full(now, token),
            }
            return;
        }
        if kept && !front.barred && front.pump.is_none() && self.dice.chance(self.taken_for_quiet) {
            self.wait_for_acks(node, token);
        }
        let front = &self.nodes[node].fronts[&token];
        let trims = !front.barred || self.mutation == Some(Mutation::TrimSuspended);
        if trims && front.pump.is_none() {
            let front = self.front(node, token);
            front.replay.trim(acked);
        }
    }

    /// The driver glances at a flow, which may have waited for an acknowledgement for long.
    fn wait_for_acks(&mut self, node: usize, token: FlowToken) {
        let now = self.clock(node);
        if self.nodes[node].endpoint.is_held(token) {
            return;
        }
        self.front(node, token).trying = true;
        let endpoint = &mut self.nodes[node].endpoint;
        endpoint.in_use(now, token);
        if self.dice.chance(70) {
            let overdue = Duration::from_micros(self.dice.spread(8_000, 400_000));
            endpoint.quiet(now, token, overdue);
        }
    }

    pub fn end(&mut self, node: usize, token: FlowToken) -> Result<(), String> {
        let front = self.front(node, token);
        if front.plan == Plan::Idle && front.end_seen {
            front.plan = Plan::Orderly;
        }
        let (plan, sent) = (front.plan, front.sent);
        // An error also ends an application.
        if front.over && front.fin.is_none_or(|how| how == FinHow::HalfClose) {
            front.fin = Some(FinHow::Close);
            self.finish(node, token, sent, FinHow::Close);
        }
        let front = self.front(node, token);
        let finished = front.to_write == 0 || front.over;
        if finished && front.fin.is_none() && plan != Plan::Idle {
            let how = if plan == Plan::Rude {
                FinHow::Close
            } else {
                FinHow::HalfClose
            };
            front.fin = Some(how);
            front.over |= plan == Plan::Rude;
            let tcp = front.tcp.filter(|_| !front.barred);
            self.finish(node, token, sent, how);
            if let Some((tcp, side)) = tcp {
                self.tcps[tcp].shutdown(side);
                self.transmit(tcp, side);
            }
        }
        let front = self.front(node, token);
        if front.end_seen && front.fin == Some(FinHow::HalfClose) {
            front.fin = Some(FinHow::Close);
            front.over = true;
            self.finish(node, token, sent, FinHow::Close);
        }
        self.linger(node, token);
        Ok(())
    }

    /// Ends our direction. A front end that has sent OPEN sends FIN itself if everything is delivered.
    fn finish(&mut self, node: usize, token: FlowToken, sent: u64, how: FinHow) {
        let now = self.clock(node);
        let front = &self.nodes[node].fronts[&token];
        let tcp = front.tcp.filter(|_| !front.barred);
        let delivered = tcp.is_some_and(|(tcp, side)| self.acked(front, tcp, side) == sent);
        let opened = front.opened.clone().filter(|_| !self.is_relayed(front));
        let endpoint = &mut self.nodes[node].endpoint;
        match opened.filter(|_| how == FinHow::Close && delivered) {
            Some(opened) => {
                endpoint.finish_announced(token, sent, how);
                let fin = opened.fin(sent, how);
                self.send_datagram(node, None, opened.mailbox, fin);
            }
            None => endpoint.finish(now, token, sent, how),
        }
    }

    /// Drops a flow that the application has closed, once all its bytes are delivered.
    pub fn linger(&mut self, node: usize, token: FlowToken) {
        let front = &self.nodes[node].fronts[&token];
        if !front.over || front.barred || front.gone {
            return;
        }
        let delivered = match front.tcp {
            Some((tcp, side)) => self.acked(front, tcp, side) == front.sent,
            None => true,
        };
        let relayed = self.is_relayed(front);
        // Only a resume tells the peer of the end of a relayed flow.
        let delivered = delivered && (front.told || !relayed || front.tcp.is_none());
        // The application makes no more calls on a closed flow: the driver finds that its transport has failed.
        if !delivered
            && front.verdict.is_none()
            && front.pump.is_none()
            && let Some((tcp, side)) = front.tcp
            && let Some(errno) = self.tcps[tcp].sides[side]
                .dead
                .or(relayed.then_some(ECONNRESET))
        {
            self.front(node, token).told = true;
            return self.fault(node, token, Cause::Errno(errno));
        }
        let front = &self.nodes[node].fronts[&token];
        if delivered || front.verdict.is_some() || front.legacy {
            let front = self.front(node, token);
            front.gone = true;
            if let Some((tcp, side)) = front.tcp.take() {
                self.close_tcp(tcp, side);
            }
            let now = self.clock(node);
            self.nodes[node].endpoint.gone(now, token);
        }
    }
}
