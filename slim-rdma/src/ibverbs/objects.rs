//! A reliable connected queue pair.

use std::ptr;
use std::sync::Arc;

use super::abi::{
    IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE, IBV_QP_ACCESS_FLAGS, IBV_QP_AV,
    IBV_QP_DEST_QPN, IBV_QP_MAX_DEST_RD_ATOMIC, IBV_QP_MAX_QP_RD_ATOMIC, IBV_QP_MIN_RNR_TIMER,
    IBV_QP_PATH_MTU, IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY,
    IBV_QP_RQ_PSN, IBV_QP_SQ_PSN, IBV_QP_STATE, IBV_QP_TIMEOUT, IBV_QPS_ERR, IBV_QPS_INIT,
    IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPT_RC, IBV_SEND_INLINE, IBV_SEND_SIGNALED, IBV_WC_RDMA_READ,
    IBV_WC_RDMA_WRITE, IBV_WC_RECV_RDMA_WITH_IMM, IBV_WC_REM_ACCESS_ERR, IBV_WC_RETRY_EXC_ERR,
    IBV_WC_SUCCESS, IBV_WC_WR_FLUSH_ERR, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE,
    IBV_WR_RDMA_WRITE_WITH_IMM, ibv_qp_attr, ibv_qp_cap, ibv_qp_init_attr, ibv_recv_wr,
    ibv_send_wr, ibv_sge, ibv_wc,
};
use super::port::OpenPort;
use super::queues::{NewQueue, Queues};
use crate::address::{PairAddress, QpNumber};
use crate::sizes::PairSizes;
use crate::verbs::{Completed, Completion, ReadWork, VerbsError, WorkError, WriteWork};

/// Completions that are taken at once.
const BATCH: usize = 16;
/// A peer that has no receive is asked again after 0.64 ms.
const NOT_READY_TIME: u8 = 12;

/// A reliable connected queue pair.
pub(super) struct PairObjects {
    port: Arc<OpenPort>,
    queues: Queues,
    psn: u32,
    /// Completions that were taken and not given out: those from `next` to `count`.
    taken: [ibv_wc; BATCH],
    next: usize,
    count: usize,
}

impl PairObjects {
    /// Makes a queue pair that can take receives. Returns the bytes that it takes by value, too.
    pub(super) fn new(
        port: &Arc<OpenPort>,
        sizes: &PairSizes,
    ) -> Result<(Self, usize), VerbsError> {
        port.check()?;
        let slots = u32::try_from(sizes.shape.slots())
            .map_err(|_| VerbsError::new("size of a queue", libc::EINVAL))?;
        let psn = getrandom::u32().map_err(|_| VerbsError::new("getrandom", libc::EIO))?;
        let entries = (slots as usize).saturating_add(sizes.depth as usize);
        let (queues, inline) = Self::make(NewQueue::new(port, entries)?, sizes, slots)?;
        // SAFETY: zeros are a value of this structure of numbers.
        let none: ibv_wc = unsafe { std::mem::zeroed() };
        let pair = PairObjects {
            port: port.clone(),
            queues,
            psn: psn & 0xff_ffff,
            taken: [none; BATCH],
            next: 0,
            count: 0,
        };
        pair.initialise()?;
        Ok((pair, inline))
    }

    /// Makes the queue pair alone.
    fn make(
        mut queue: NewQueue,
        sizes: &PairSizes,
        slots: u32,
    ) -> Result<(Queues, usize), VerbsError> {
        // Adapters do not say how many bytes they take by value. So fewer are tried if they refuse.
        let mut wanted = u32::try_from(sizes.inline).unwrap_or(u32::MAX).min(1024);
        loop {
            let mut attr = ibv_qp_init_attr {
                qp_context: ptr::null_mut(),
                send_cq: ptr::null_mut(),
                recv_cq: ptr::null_mut(),
                srq: ptr::null_mut(),
                cap: ibv_qp_cap {
                    max_send_wr: sizes.depth,
                    max_recv_wr: slots,
                    max_send_sge: 1,
                    max_recv_sge: 1,
                    max_inline_data: wanted,
                },
                qp_type: IBV_QPT_RC,
                sq_sig_all: 0,
            };
            match queue.pair(&mut attr) {
                Ok(queues) => {
                    return Ok((queues, attr.cap.max_inline_data.min(wanted) as usize));
                }
                Err((_, e)) if wanted == 0 => return Err(e),
                Err((same, _)) => queue = same,
            }
            wanted /= 2;
        }
    }

    pub(super) fn number(&self) -> QpNumber {
        self.queues.number()
    }

    fn initialise(&self) -> Result<(), VerbsError> {
        let mut attr = ibv_qp_attr {
            qp_state: IBV_QPS_INIT,
            pkey_index: self.port.address.partition_index,
            port_num: self.port.address.number,
            // What a peer may do to a region depends on that region, too.
            qp_access_flags: (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ) as u32,
            ..no_attr()
        };
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        self.queues.modify(&mut attr, mask)
    }

    /// What the peer has to know, without the ring.
    pub(super) fn address(&self, sizes: &PairSizes) -> PairAddress {
        let port = &self.port.address;
        PairAddress {
            gid: port.gid,
            lid: port.lid,
            partition: port.partition,
            mtu: port.mtu,
            number: self.number(),
            psn: self.psn,
            shape: sizes.shape,
            ring: Default::default(),
        }
    }

    pub(super) fn connect(&self, peer: &PairAddress) -> Result<(), VerbsError> {
        let (port, settings) = (&self.port.address, &self.port.settings);
        let path = self.port.path(peer.gid, peer.lid, peer.partition)?;
        let mut attr = ibv_qp_attr {
            qp_state: IBV_QPS_RTR,
            path_mtu: port.mtu.min(peer.mtu) as i32,
            dest_qp_num: peer.number.0,
            rq_psn: peer.psn,
            max_dest_rd_atomic: 1,
            min_rnr_timer: NOT_READY_TIME,
            ah_attr: path,
            ..no_attr()
        };
        let mask = IBV_QP_STATE
            | IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER;
        self.queues.modify(&mut attr, mask)?;
        let mut attr = ibv_qp_attr {
            qp_state: IBV_QPS_RTS,
            timeout: settings.timeout,
            retry_cnt: settings.retries,
            rnr_retry: settings.not_ready_retries,
            sq_psn: self.psn,
            max_rd_atomic: 1,
            ..no_attr()
        };
        let mask = IBV_QP_STATE
            | IBV_QP_TIMEOUT
            | IBV_QP_RETRY_CNT
            | IBV_QP_RNR_RETRY
            | IBV_QP_SQ_PSN
            | IBV_QP_MAX_QP_RD_ATOMIC;
        self.queues.modify(&mut attr, mask)
    }

    /// If the adapter does not do it, it has gone, and the queue pair with it.
    pub(super) fn fail(&self) {
        let mut attr = ibv_qp_attr {
            qp_state: IBV_QPS_ERR,
            ..no_attr()
        };
        let _ = self.queues.modify(&mut attr, IBV_QP_STATE);
    }

    pub(super) fn post_receive(&self, id: u64) -> Result<(), VerbsError> {
        let mut work = ibv_recv_wr {
            wr_id: id,
            next: ptr::null_mut(),
            sg_list: ptr::null_mut(),
            num_sge: 0,
        };
        // SAFETY: it has no places.
        unsafe { self.queues.post_receive(&mut work) }
    }

    /// Posts a write of `len` bytes at this address, which the adapter reads with this key; without a key it takes them by value.
    pub(super) fn post_write(
        &self,
        work: &WriteWork<'_>,
        addr: u64,
        len: usize,
        key: Option<u32>,
    ) -> Result<(), VerbsError> {
        let length =
            u32::try_from(len).map_err(|_| VerbsError::new("length of a write", libc::EINVAL))?;
        let mut bytes = ibv_sge {
            addr,
            length,
            lkey: key.unwrap_or(0),
        };
        let mut flags = 0;
        if work.signaled {
            flags |= IBV_SEND_SIGNALED;
        }
        if key.is_none() && len > 0 {
            flags |= IBV_SEND_INLINE;
        }
        let mut request = ibv_send_wr {
            wr_id: work.id,
            next: ptr::null_mut(),
            sg_list: &mut bytes,
            num_sge: i32::from(len > 0),
            opcode: match work.immediate {
                Some(_) => IBV_WR_RDMA_WRITE_WITH_IMM,
                None => IBV_WR_RDMA_WRITE,
            },
            send_flags: flags,
            imm_data: work.immediate.unwrap_or(0).to_be(),
            remote_addr: work.to.addr,
            rkey: work.to.key,
            remote_qkey: 0,
            _others: [0; 9],
        };
        // SAFETY: there is one place or none. Its bytes are the caller's, and taken by value, or in a registered region.
        unsafe { self.queues.post_send(&mut request) }
    }

    pub(super) fn post_read(&self, work: &ReadWork) -> Result<(), VerbsError> {
        let mut bytes = ibv_sge {
            addr: work.into.addr,
            length: work.len,
            lkey: work.into.key,
        };
        let mut request = ibv_send_wr {
            wr_id: work.id,
            next: ptr::null_mut(),
            sg_list: &mut bytes,
            num_sge: 1,
            opcode: IBV_WR_RDMA_READ,
            send_flags: IBV_SEND_SIGNALED,
            imm_data: 0,
            remote_addr: work.from.addr,
            rkey: work.from.key,
            remote_qkey: 0,
            _others: [0; 9],
        };
        // SAFETY: there is one place. The adapter writes to registered memory only, and refuses other addresses and keys.
        unsafe { self.queues.post_send(&mut request) }
    }

    pub(super) fn poll(&mut self) -> Option<Completion> {
        if self.next == self.count {
            // An event reports that the adapter has failed.
            self.count = self.queues.poll(&mut self.taken).unwrap_or(0);
            self.next = 0;
        }
        let taken = self.taken[..self.count].get(self.next)?;
        self.next += 1;
        Some(completion(taken))
    }

    pub(super) fn arm(&self) -> Result<(), VerbsError> {
        self.queues.arm()
    }
}

/// What a completion of the library means. With an error, only its number and its status are set.
fn completion(taken: &ibv_wc) -> Completion {
    let how = match (taken.status, taken.opcode) {
        (IBV_WC_SUCCESS, IBV_WC_RECV_RDMA_WITH_IMM) => Completed::Received {
            len: taken.byte_len,
            immediate: u32::from_be(taken.imm_data),
        },
        (IBV_WC_SUCCESS, IBV_WC_RDMA_WRITE) => Completed::Written,
        (IBV_WC_SUCCESS, IBV_WC_RDMA_READ) => Completed::Read,
        // A peer may send a message without bytes, which takes a receive, too.
        (IBV_WC_SUCCESS, _) => Completed::Failed(WorkError::Unexpected),
        (IBV_WC_WR_FLUSH_ERR, _) => Completed::Failed(WorkError::Flushed),
        (IBV_WC_RETRY_EXC_ERR, _) => Completed::Failed(WorkError::RetryExceeded),
        (IBV_WC_REM_ACCESS_ERR, _) => Completed::Failed(WorkError::RemoteAccess),
        (status, _) => Completed::Failed(WorkError::Other(status as u32)),
    };
    Completion {
        id: taken.wr_id,
        how,
    }
}

pub(super) fn no_attr() -> ibv_qp_attr {
    // SAFETY: zeros are a value of this structure of numbers.
    unsafe { std::mem::zeroed() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_write_with_immediate_data_counts_as_a_message() {
        let wc = |status, opcode| {
            // SAFETY: zeros are a value of this structure of numbers.
            let mut wc: ibv_wc = unsafe { std::mem::zeroed() };
            (wc.wr_id, wc.status, wc.opcode) = (7, status, opcode);
            (wc.byte_len, wc.imm_data) = (9, 0x0102_0304_u32.to_be());
            completion(&wc)
        };
        const RECV: i32 = 128;
        let (len, immediate) = (9, 0x0102_0304);
        for (status, opcode, how) in [
            (0, 129, Completed::Received { len, immediate }),
            (0, 1, Completed::Written),
            (0, 2, Completed::Read),
            (0, RECV, Completed::Failed(WorkError::Unexpected)),
            (0, 0, Completed::Failed(WorkError::Unexpected)),
            (5, 129, Completed::Failed(WorkError::Flushed)),
            (12, 1, Completed::Failed(WorkError::RetryExceeded)),
            (10, 1, Completed::Failed(WorkError::RemoteAccess)),
            (13, 1, Completed::Failed(WorkError::Other(13))),
        ] {
            assert_eq!(wc(status, opcode), Completion { id: 7, how });
        }
    }
}
