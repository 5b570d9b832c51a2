//! A queue pair with its completion queue.

use std::ptr;
use std::sync::Arc;

use super::abi::{
    IBV_ACCESS_REMOTE_WRITE, IBV_QP_ACCESS_FLAGS, IBV_QP_AV, IBV_QP_DEST_QPN,
    IBV_QP_MAX_DEST_RD_ATOMIC, IBV_QP_MAX_QP_RD_ATOMIC, IBV_QP_MIN_RNR_TIMER, IBV_QP_PATH_MTU,
    IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY, IBV_QP_RQ_PSN,
    IBV_QP_SQ_PSN, IBV_QP_STATE, IBV_QP_TIMEOUT, IBV_QPS_ERR, IBV_QPS_INIT, IBV_QPS_RTR,
    IBV_QPS_RTS, IBV_QPT_RC, IBV_SEND_INLINE, IBV_SEND_SIGNALED, IBV_WC_RDMA_WRITE,
    IBV_WC_RECV_RDMA_WITH_IMM, IBV_WC_REM_ACCESS_ERR, IBV_WC_RETRY_EXC_ERR, IBV_WC_SUCCESS,
    IBV_WC_WR_FLUSH_ERR, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, ibv_cq, ibv_qp,
    ibv_qp_attr, ibv_qp_cap, ibv_qp_init_attr, ibv_recv_wr, ibv_send_wr, ibv_sge, ibv_wc,
};
use super::devices::gid_words;
use super::port::OpenPort;
use super::{failed, result};
use crate::address::{PairAddress, QpNumber};
use crate::sizes::PairSizes;
use crate::verbs::{Completed, Completion, VerbsError, WorkError, WriteWork};

/// Completions that are taken at once.
const BATCH: usize = 16;
/// A peer that has no receive is asked again after 0.64 ms.
const NOT_READY_TIME: u8 = 12;
/// Routers on the way.
const HOPS: u8 = 64;

/// A queue pair.
pub(super) struct PairObjects {
    port: Arc<OpenPort>,
    qp: *mut ibv_qp,
    cq: *mut ibv_cq,
    pub(super) number: QpNumber,
    psn: u32,
    /// Completions that were taken and not given out: those from `next` to `count`.
    taken: [ibv_wc; BATCH],
    next: usize,
    count: usize,
}

impl Drop for PairObjects {
    fn drop(&mut self) {
        if !self.port.is_own() {
            return;
        }
        let library = self.port.device.library;
        // SAFETY: both were made by the library, and are destroyed once; the queue pair, which uses the other one, comes first.
        unsafe {
            (library.ibv_destroy_qp)(self.qp);
            (library.ibv_destroy_cq)(self.cq);
        }
    }
}

/// A queue of completions that is destroyed if nothing comes of it.
struct NewQueue<'a>(&'a OpenPort, *mut ibv_cq);

impl Drop for NewQueue<'_> {
    fn drop(&mut self) {
        if !self.1.is_null() {
            // SAFETY: no queue pair uses it.
            unsafe { (self.0.device.library.ibv_destroy_cq)(self.1) };
        }
    }
}

impl PairObjects {
    /// Makes a queue pair that can take receives. Returns the bytes that it takes by value, too.
    pub(super) fn new(
        port: &Arc<OpenPort>,
        sizes: &PairSizes,
    ) -> Result<(Self, usize), VerbsError> {
        port.check()?;
        let too_many = |_| VerbsError::new("size of a queue", libc::EINVAL);
        let slots = u32::try_from(sizes.shape.slots()).map_err(too_many)?;
        let entries = u64::from(slots) + u64::from(sizes.depth);
        let entries =
            i32::try_from(entries).map_err(|_| VerbsError::new("size of a queue", libc::EINVAL))?;
        let psn = getrandom::u32().map_err(|_| VerbsError::new("getrandom", libc::EIO))?;
        let library = port.device.library;
        // SAFETY: the device is open, and the channel lives as long as the port.
        let cq = unsafe {
            let create = library.ibv_create_cq;
            create(
                port.device.context,
                entries,
                ptr::null_mut(),
                port.channel,
                0,
            )
        };
        if cq.is_null() {
            return Err(failed("ibv_create_cq"));
        }
        let mut queue = NewQueue(port, cq);
        let (qp, inline) = Self::make(port, cq, sizes, slots)?;
        // SAFETY: the library has just made it.
        let number = unsafe { (*qp).qp_num };
        // SAFETY: the field is the user's; nobody reads it before the queue is armed.
        unsafe { (*cq).cq_context = number as usize as *mut _ };
        queue.1 = ptr::null_mut();
        // SAFETY: zeros are a value of this structure of numbers.
        let none: ibv_wc = unsafe { std::mem::zeroed() };
        let pair = PairObjects {
            port: port.clone(),
            qp,
            cq,
            number: QpNumber(number),
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
        port: &OpenPort,
        cq: *mut ibv_cq,
        sizes: &PairSizes,
        slots: u32,
    ) -> Result<(*mut ibv_qp, usize), VerbsError> {
        // Adapters do not say how many bytes they take by value. So fewer are tried if they refuse.
        let mut wanted = u32::try_from(sizes.inline).unwrap_or(u32::MAX).min(1024);
        loop {
            let mut attr = ibv_qp_init_attr {
                qp_context: ptr::null_mut(),
                send_cq: cq,
                recv_cq: cq,
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
            // SAFETY: protection domain and completion queue live; the structure has the layout of the header.
            let qp = unsafe { (port.device.library.ibv_create_qp)(port.pd, &mut attr) };
            if !qp.is_null() {
                return Ok((qp, attr.cap.max_inline_data.min(wanted) as usize));
            }
            let e = failed("ibv_create_qp");
            if wanted == 0 {
                return Err(e);
            }
            wanted /= 2;
        }
    }

    fn modify(&self, attr: &mut ibv_qp_attr, mask: i32) -> Result<(), VerbsError> {
        // SAFETY: the queue pair lives; the structure has the layout of the header.
        let status = unsafe { (self.port.device.library.ibv_modify_qp)(self.qp, attr, mask) };
        result("ibv_modify_qp", status)
    }

    fn initialise(&self) -> Result<(), VerbsError> {
        let mut attr = ibv_qp_attr {
            qp_state: IBV_QPS_INIT,
            pkey_index: self.port.address.partition_index,
            port_num: self.port.address.number,
            qp_access_flags: IBV_ACCESS_REMOTE_WRITE as u32,
            ..no_attr()
        };
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        self.modify(&mut attr, mask)
    }

    /// What the peer has to know, without the ring.
    pub(super) fn address(&self, sizes: &PairSizes) -> PairAddress {
        let port = &self.port.address;
        PairAddress {
            gid: port.gid,
            lid: port.lid,
            partition: port.partition,
            mtu: port.mtu,
            number: self.number,
            psn: self.psn,
            shape: sizes.shape,
            ring: Default::default(),
        }
    }

    pub(super) fn connect(&self, peer: &PairAddress) -> Result<(), VerbsError> {
        let (port, settings) = (&self.port.address, &self.port.settings);
        let of_no_use = |what| Err(VerbsError::new(what, libc::EINVAL));
        if (port.partition ^ peer.partition) & 0x7fff != 0 {
            return of_no_use("partition of the peer");
        }
        if (peer.lid == 0) != port.ethernet {
            return of_no_use("kind of the peer's port");
        }
        let mut attr = ibv_qp_attr {
            qp_state: IBV_QPS_RTR,
            path_mtu: port.mtu.min(peer.mtu) as i32,
            dest_qp_num: peer.number.0,
            rq_psn: peer.psn,
            max_dest_rd_atomic: 1,
            min_rnr_timer: NOT_READY_TIME,
            ..no_attr()
        };
        let to = &mut attr.ah_attr;
        to.port_num = port.number;
        to.sl = settings.service_level;
        to.dlid = peer.lid;
        // InfiniBand needs the global identifier between two subnets only: its first half is the subnet.
        to.is_global = u8::from(port.ethernet || peer.gid[..8] != port.gid[..8]);
        to.grh.dgid = gid_words(peer.gid);
        to.grh.sgid_index = port.gid_index;
        to.grh.hop_limit = HOPS;
        to.grh.traffic_class = settings.traffic_class;
        let mask = IBV_QP_STATE
            | IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER;
        self.modify(&mut attr, mask)?;
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
        self.modify(&mut attr, mask)
    }

    /// If the adapter does not do it, it has gone, and the queue pair with it.
    pub(super) fn fail(&self) {
        let mut attr = ibv_qp_attr {
            qp_state: IBV_QPS_ERR,
            ..no_attr()
        };
        let _ = self.modify(&mut attr, IBV_QP_STATE);
    }

    pub(super) fn post_receive(&self, id: u64) -> Result<(), VerbsError> {
        let mut work = ibv_recv_wr {
            wr_id: id,
            next: ptr::null_mut(),
            sg_list: ptr::null_mut(),
            num_sge: 0,
        };
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair and its context live, the context's table is filled, and the structures have the layout of the header.
        let status = unsafe {
            let post = (*(*self.qp).context).ops.post_recv;
            post.map_or(libc::ENOSYS, |post| post(self.qp, &mut work, &mut bad))
        };
        result("ibv_post_recv", status)
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
            _others: [0; 9],
        };
        let mut bad = ptr::null_mut();
        // SAFETY: as for a receive. The bytes are readable: they are the caller's, and copied by the call, or in a registered region.
        let status = unsafe {
            let post = (*(*self.qp).context).ops.post_send;
            post.map_or(libc::ENOSYS, |post| post(self.qp, &mut request, &mut bad))
        };
        result("ibv_post_send", status)
    }

    pub(super) fn poll(&mut self) -> Option<Completion> {
        if self.next == self.count {
            // SAFETY: the completion queue and its context live, and there is room for so many completions.
            let found = unsafe {
                let poll = (*(*self.cq).context).ops.poll_cq;
                poll.map_or(0, |poll| {
                    poll(self.cq, BATCH as i32, self.taken.as_mut_ptr())
                })
            };
            // A negative number is an error of the adapter, which an event reports.
            self.count = usize::try_from(found).unwrap_or(0).min(BATCH);
            self.next = 0;
        }
        let taken = self.taken[..self.count].get(self.next)?;
        self.next += 1;
        Some(completion(taken))
    }

    pub(super) fn arm(&self) -> Result<(), VerbsError> {
        // SAFETY: the completion queue and its context live.
        let status = unsafe {
            let arm = (*(*self.cq).context).ops.req_notify_cq;
            arm.map_or(libc::ENOSYS, |arm| arm(self.cq, 0))
        };
        result("ibv_req_notify_cq", status)
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

fn no_attr() -> ibv_qp_attr {
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
