//! A queue pair for unreliable datagrams.

use std::collections::VecDeque;
use std::ptr;
use std::sync::Arc;

use super::abi::{
    IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_QKEY, IBV_QP_SQ_PSN, IBV_QP_STATE, IBV_QPS_INIT,
    IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPT_UD, IBV_SEND_SIGNALED, IBV_WC_GRH, IBV_WC_RECV,
    IBV_WC_SUCCESS, IBV_WR_SEND, ibv_ah, ibv_qp_attr, ibv_qp_cap, ibv_qp_init_attr, ibv_recv_wr,
    ibv_send_wr, ibv_sge, ibv_wc,
};
use super::failed;
use super::grh::{self, GRH_LEN};
use super::memory::{MemoryAccess, RegisteredMemory};
use super::objects::no_attr;
use super::port::OpenPort;
use super::queues::{NewQueue, Queues};
use crate::address::QpNumber;
use crate::datagrams::{DatagramSource, Datagrams, MAX_DATAGRAM, ReceivedDatagram};
use crate::locator::PortLocator;
use crate::verbs::VerbsError;

/// Datagrams that can be received before the software looks.
const RECEIVES: usize = 256;
/// Datagrams that can be on their way to the adapter.
const SENDS: usize = 64;
/// Bytes for a received datagram, with its header. A multiple of 8.
const RECEIVED: usize = GRH_LEN + MAX_DATAGRAM;
/// Numbers of sends begin here, and those of receives at 0: a failed completion does not say which it was.
const FIRST_SEND: u64 = 1 << 32;
/// Completions that are taken at once.
const BATCH: usize = 16;

/// Finds the ways from a port to others, in any thread. As long as one of these lives, the port stays open.
#[derive(Clone)]
pub struct DatagramWays(Arc<OpenPort>);

impl DatagramWays {
    /// Whether [`find`](Self::find) may wait for a neighbour, as it does for RoCE.
    pub fn may_wait(&self) -> bool {
        self.0.address.ethernet
    }

    /// Whether the calling process has opened the port, and is no child of a fork of the one that has.
    pub fn is_own(&self) -> bool {
        self.0.is_own()
    }

    /// Finds the way to this port. For RoCE, the kernel resolves the hardware address. For a neighbour that it does not know and that does not answer,
    /// this takes a second or more.
    ///
    /// # Errors
    /// There is no way, or the process is a child of a fork of the one that has opened the port.
    pub fn find(&self, to: &PortLocator) -> Result<DatagramWay, VerbsError> {
        let port = &self.0;
        port.check()?;
        let mut path = port.path(to.gid, to.lid, to.partition)?;
        // SAFETY: the protection domain lives, and the structure has the layout of the header.
        let handle = unsafe { (port.device.library.ibv_create_ah)(port.pd, &mut path) };
        match handle.is_null() {
            true => Err(failed("ibv_create_ah")),
            false => Ok(DatagramWay {
                port: port.clone(),
                to: *to,
                handle,
            }),
        }
    }
}

/// The way to a port for one datagram: an address handle. One that is kept would keep the hardware address of a peer that has another one by now.
pub struct DatagramWay {
    port: Arc<OpenPort>,
    to: PortLocator,
    handle: *mut ibv_ah,
}

// SAFETY: any thread may use and destroy the handle, and nobody else has it.
unsafe impl Send for DatagramWay {}

impl Drop for DatagramWay {
    fn drop(&mut self) {
        if self.port.is_own() {
            // SAFETY: it was made by the library, and is destroyed once: no send uses it any more.
            unsafe { (self.port.device.library.ibv_destroy_ah)(self.handle) };
        }
    }
}

/// A queue pair for unreliable datagrams of an adapter's port.
///
/// [`send`](Datagrams::send) may wait for a neighbour of RoCE. [`DatagramWays::find`] in another thread, and [`send_by`](Self::send_by), do not keep this one.
///
/// A child of a fork has none of it, as of [`VerbsAdapter`](super::VerbsAdapter).
pub struct VerbsDatagrams {
    // The order of the fields is that of their destruction: the queue pair comes before what it uses.
    queues: Queues,
    /// The ways of sends that have not completed, each in the place of its bytes.
    sends: Vec<Option<DatagramWay>>,
    memory: RegisteredMemory,
    port: Arc<OpenPort>,
    locator: PortLocator,
    arrived: VecDeque<ReceivedDatagram>,
    broken: bool,
}

// SAFETY: the objects behind the pointers may be used by any thread, one at a time, and are reached through `&mut self` only.
unsafe impl Send for VerbsDatagrams {}

impl std::fmt::Debug for VerbsDatagrams {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VerbsDatagrams")
            .field("name", &self.port.name)
            .field("locator", &self.locator)
            .field("broken", &self.broken)
            .finish()
    }
}

impl VerbsDatagrams {
    pub(super) fn open(port: &Arc<OpenPort>) -> Result<Self, VerbsError> {
        port.check()?;
        let random = || getrandom::u32().map_err(|_| VerbsError::new("getrandom", libc::EIO));
        // The highest bit would mean the sender's own key.
        let (queue_key, psn) = (random()? >> 1, random()? >> 8);
        let len = RECEIVES * RECEIVED + SENDS * MAX_DATAGRAM;
        let memory = RegisteredMemory::new(port, len, MemoryAccess::Receive)?;
        let queue = NewQueue::new(port, RECEIVES + SENDS)?;
        let mut attr = ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: ptr::null_mut(),
            recv_cq: ptr::null_mut(),
            srq: ptr::null_mut(),
            cap: ibv_qp_cap {
                max_send_wr: SENDS as u32,
                max_recv_wr: RECEIVES as u32,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            qp_type: IBV_QPT_UD,
            sq_sig_all: 0,
        };
        let queues = queue.pair(&mut attr).map_err(|(_, e)| e)?;
        let number = queues.number();
        let address = &port.address;
        let mut datagrams = VerbsDatagrams {
            queues,
            sends: (0..SENDS).map(|_| None).collect(),
            memory,
            port: port.clone(),
            locator: PortLocator {
                gid: address.gid,
                lid: address.lid,
                partition: address.partition,
                number,
                queue_key,
            },
            arrived: VecDeque::new(),
            broken: false,
        };
        datagrams.initialise(psn)?;
        Ok(datagrams)
    }

    /// Makes it ready, with all receives posted.
    fn initialise(&mut self, psn: u32) -> Result<(), VerbsError> {
        let mut attr = ibv_qp_attr {
            qp_state: IBV_QPS_INIT,
            pkey_index: self.port.address.partition_index,
            port_num: self.port.address.number,
            qkey: self.locator.queue_key,
            ..no_attr()
        };
        self.queues.modify(
            &mut attr,
            IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY,
        )?;
        for place in 0..RECEIVES {
            self.post_receive(place)?;
        }
        let mut attr = ibv_qp_attr {
            qp_state: IBV_QPS_RTR,
            ..no_attr()
        };
        self.queues.modify(&mut attr, IBV_QP_STATE)?;
        let mut attr = ibv_qp_attr {
            qp_state: IBV_QPS_RTS,
            sq_psn: psn,
            ..no_attr()
        };
        self.queues.modify(&mut attr, IBV_QP_STATE | IBV_QP_SQ_PSN)
    }

    fn post_receive(&mut self, place: usize) -> Result<(), VerbsError> {
        let at = place * RECEIVED;
        // An adapter that leaves out a part of the header shall not leave that of an earlier datagram.
        self.memory.write(at, &[0; GRH_LEN]);
        let (addr, lkey) = self.memory.place(at, RECEIVED);
        let mut bytes = ibv_sge {
            addr,
            length: RECEIVED as u32,
            lkey,
        };
        let mut work = ibv_recv_wr {
            wr_id: place as u64,
            next: ptr::null_mut(),
            sg_list: &mut bytes,
            num_sge: 1,
        };
        // SAFETY: there is one place. Its bytes are registered, and nobody else uses them until the receive has completed.
        unsafe { self.queues.post_receive(&mut work) }
    }

    /// Finds ways to other ports.
    pub fn ways(&self) -> DatagramWays {
        DatagramWays(self.port.clone())
    }

    /// Sends a datagram by this way, which is from this port.
    ///
    /// # Errors
    /// As of [`send`](Datagrams::send).
    pub fn send_by(&mut self, way: DatagramWay, bytes: &[u8]) -> Result<(), VerbsError> {
        self.port.check()?;
        if bytes.is_empty() || bytes.len() > MAX_DATAGRAM {
            return Err(VerbsError::new("length of a datagram", libc::EINVAL));
        }
        if !Arc::ptr_eq(&way.port, &self.port) {
            return Err(VerbsError::new("way of another port", libc::EINVAL));
        }
        self.take_completions();
        if self.broken {
            return Err(VerbsError::new("queue for datagrams", libc::EPIPE));
        }
        let free = self.sends.iter().position(Option::is_none);
        let place = free.ok_or(VerbsError::new("queue for datagrams", libc::ENOBUFS))?;
        self.memory.write(Self::staged(place), bytes);
        self.post_send(place, way, bytes.len())
    }

    fn post_send(&mut self, place: usize, way: DatagramWay, len: usize) -> Result<(), VerbsError> {
        let (addr, lkey) = self.memory.place(Self::staged(place), len);
        let mut bytes = ibv_sge {
            addr,
            // At most MAX_DATAGRAM.
            length: len as u32,
            lkey,
        };
        let mut work = ibv_send_wr {
            wr_id: FIRST_SEND + place as u64,
            next: ptr::null_mut(),
            sg_list: &mut bytes,
            num_sge: 1,
            opcode: IBV_WR_SEND,
            send_flags: IBV_SEND_SIGNALED,
            imm_data: 0,
            remote_addr: way.handle as u64,
            rkey: way.to.number.0,
            remote_qkey: way.to.queue_key,
            _others: [0; 9],
        };
        // SAFETY: there is one place. Its bytes stay as they are, and the address handle lives, until the send has completed.
        unsafe { self.queues.post_send(&mut work)? };
        self.sends[place] = Some(way);
        Ok(())
    }

    /// Where the bytes of a send are.
    fn staged(place: usize) -> usize {
        RECEIVES * RECEIVED + place * MAX_DATAGRAM
    }

    /// Takes some completions that have come. Returns whether there were any.
    fn take_completions(&mut self) -> bool {
        if self.broken {
            return false;
        }
        // SAFETY: zeros are a value of this structure of numbers.
        let mut taken: [ibv_wc; BATCH] = unsafe { std::mem::zeroed() };
        let Some(found) = self.queues.poll(&mut taken) else {
            self.broken = true;
            return false;
        };
        for wc in &taken[..found] {
            self.complete(wc);
        }
        found > 0
    }

    fn complete(&mut self, wc: &ibv_wc) {
        // After a failure the adapter carries out nothing more, or nothing for certain.
        self.broken |= wc.status != IBV_WC_SUCCESS;
        let place = wc.wr_id % FIRST_SEND;
        let place = usize::try_from(place).unwrap_or(usize::MAX);
        if wc.wr_id >= FIRST_SEND {
            if let Some(handle) = self.sends.get_mut(place) {
                *handle = None;
            }
            return;
        }
        if wc.status != IBV_WC_SUCCESS || place >= RECEIVES {
            return;
        }
        if wc.opcode == IBV_WC_RECV {
            self.arrived.extend(self.datagram(wc, place));
        }
        self.broken |= self.post_receive(place).is_err();
    }

    /// What has arrived in this place.
    fn datagram(&self, wc: &ibv_wc, place: usize) -> Option<ReceivedDatagram> {
        let len = usize::try_from(wc.byte_len).ok()?.checked_sub(GRH_LEN)?;
        if len > MAX_DATAGRAM {
            return None;
        }
        let at = place * RECEIVED;
        let mut header = [0; GRH_LEN];
        self.memory.read(at, &mut header);
        let mut bytes = vec![0; len];
        self.memory.read(at + GRH_LEN, &mut bytes);
        let ethernet = self.port.address.ethernet;
        Some(ReceivedDatagram {
            from: DatagramSource {
                number: QpNumber(wc.src_qp),
                // RoCE has none, and adapters put anything there.
                lid: if ethernet { 0 } else { wc.slid },
                gid: (wc.wc_flags & IBV_WC_GRH != 0).then(|| grh::source(&header)),
            },
            bytes,
        })
    }
}

impl Datagrams for VerbsDatagrams {
    fn locator(&self) -> PortLocator {
        self.locator
    }

    fn send(&mut self, to: &PortLocator, bytes: &[u8]) -> Result<(), VerbsError> {
        let way = self.ways().find(to)?;
        self.send_by(way, bytes)
    }

    fn receive(&mut self) -> Option<ReceivedDatagram> {
        self.port.check().ok()?;
        // Those of sends come in the same queue.
        while self.arrived.is_empty() && self.take_completions() {}
        self.arrived.pop_front()
    }

    fn arm(&mut self) -> Result<(), VerbsError> {
        self.port.check()?;
        self.queues.arm()
    }

    fn is_broken(&self) -> bool {
        self.broken || !self.port.is_own()
    }
}
