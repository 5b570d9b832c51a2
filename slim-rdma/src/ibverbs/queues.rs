//! A queue pair of the library with the completion queue of both its queues.

use std::ptr;
use std::sync::Arc;

use super::abi::{ibv_cq, ibv_qp, ibv_qp_attr, ibv_qp_init_attr, ibv_recv_wr, ibv_send_wr, ibv_wc};
use super::port::OpenPort;
use super::{failed, result};
use crate::address::QpNumber;
use crate::verbs::VerbsError;

/// The completion queue, which is destroyed if no queue pair comes of it.
pub(super) struct NewQueue {
    port: Arc<OpenPort>,
    cq: *mut ibv_cq,
}

impl NewQueue {
    /// Makes the queue, which reports to the port's channel.
    pub(super) fn new(port: &Arc<OpenPort>, entries: usize) -> Result<Self, VerbsError> {
        let entries =
            i32::try_from(entries).map_err(|_| VerbsError::new("size of a queue", libc::EINVAL))?;
        let create = port.device.library.ibv_create_cq;
        let context = port.device.context;
        // SAFETY: the device is open, and the channel lives as long as the port.
        let cq = unsafe { create(context, entries, ptr::null_mut(), port.channel, 0) };
        match cq.is_null() {
            true => Err(failed("ibv_create_cq")),
            false => Ok(NewQueue {
                port: port.clone(),
                cq,
            }),
        }
    }

    /// Makes the queue pair with these attributes, whose queues are set here. If the adapter refuses, the queue can be used for another try.
    pub(super) fn pair(self, attr: &mut ibv_qp_init_attr) -> Result<Queues, (Self, VerbsError)> {
        (attr.send_cq, attr.recv_cq) = (self.cq, self.cq);
        let create = self.port.device.library.ibv_create_qp;
        // SAFETY: protection domain and completion queue live; the structure has the layout of the header.
        let qp = unsafe { create(self.port.pd, attr) };
        if qp.is_null() {
            return Err((self, failed("ibv_create_qp")));
        }
        let queues = Queues { qp, queue: self };
        // SAFETY: the queue was just made. The field is the user's; nobody reads it before the queue is armed.
        unsafe { (*queues.queue.cq).cq_context = queues.number().0 as usize as *mut _ };
        Ok(queues)
    }
}

impl Drop for NewQueue {
    fn drop(&mut self) {
        if self.port.is_own() {
            // SAFETY: the library made it, and it is destroyed once. No queue pair uses it any more.
            unsafe { (self.port.device.library.ibv_destroy_cq)(self.cq) };
        }
    }
}

/// The queue pair and its completion queue.
pub(super) struct Queues {
    qp: *mut ibv_qp,
    queue: NewQueue,
}

impl Queues {
    pub(super) fn port(&self) -> &OpenPort {
        &self.queue.port
    }

    pub(super) fn number(&self) -> QpNumber {
        // SAFETY: the queue pair lives, and its number does not change.
        QpNumber(unsafe { (*self.qp).qp_num })
    }

    pub(super) fn modify(&self, attr: &mut ibv_qp_attr, mask: i32) -> Result<(), VerbsError> {
        // SAFETY: the queue pair lives; the structure has the layout of the header.
        let status = unsafe { (self.port().device.library.ibv_modify_qp)(self.qp, attr, mask) };
        result("ibv_modify_qp", status)
    }

    /// # Safety
    ///
    /// `work.sg_list` has `work.num_sge` places, all in registered memory that nobody else uses until the receive has completed.
    pub(super) unsafe fn post_receive(&self, work: &mut ibv_recv_wr) -> Result<(), VerbsError> {
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair and its context live, the context's table is filled, and the structures have the layout of the header. The
        // caller answers for the places.
        let status = unsafe {
            let post = (*(*self.qp).context).ops.post_recv;
            post.map_or(libc::ENOSYS, |post| post(self.qp, work, &mut bad))
        };
        result("ibv_post_recv", status)
    }

    /// # Safety
    ///
    /// `work.sg_list` has `work.num_sge` places. Their bytes are readable and, if they are not taken by value, in registered memory and do not
    /// change until the send has completed. What else `work` names lives until then.
    pub(super) unsafe fn post_send(&self, work: &mut ibv_send_wr) -> Result<(), VerbsError> {
        let mut bad = ptr::null_mut();
        // SAFETY: as for a receive.
        let status = unsafe {
            let post = (*(*self.qp).context).ops.post_send;
            post.map_or(libc::ENOSYS, |post| post(self.qp, work, &mut bad))
        };
        result("ibv_post_send", status)
    }

    /// Takes completions that have come. Returns how many; none if the adapter has failed.
    pub(super) fn poll(&mut self, taken: &mut [ibv_wc]) -> Option<usize> {
        let room = i32::try_from(taken.len()).unwrap_or(i32::MAX);
        // SAFETY: the completion queue and its context live, and there is room for so many completions.
        let found = unsafe {
            let poll = (*(*self.queue.cq).context).ops.poll_cq;
            poll.map_or(0, |poll| poll(self.queue.cq, room, taken.as_mut_ptr()))
        };
        // A negative number is an error of the adapter.
        Some(usize::try_from(found).ok()?.min(taken.len()))
    }

    /// The next completion wakes whoever waits at the port's channel.
    pub(super) fn arm(&self) -> Result<(), VerbsError> {
        // SAFETY: the completion queue and its context live.
        let status = unsafe {
            let arm = (*(*self.queue.cq).context).ops.req_notify_cq;
            arm.map_or(libc::ENOSYS, |arm| arm(self.queue.cq, 0))
        };
        result("ibv_req_notify_cq", status)
    }
}

impl Drop for Queues {
    fn drop(&mut self) {
        if self.port().is_own() {
            // SAFETY: the library made it, and it is destroyed once, before the completion queue that it uses.
            unsafe { (self.port().device.library.ibv_destroy_qp)(self.qp) };
        }
    }
}
