//! What this crate uses of the interface of libibverbs: types and constants of `<infiniband/verbs.h>`, with the names that they have there.
//!
//! The library promises this interface under the symbol version `IBVERBS_1.1`. A test compiles the sizes, offsets, values and prototypes that
//! are declared here against the header. Fields whose names begin with `_` only take up room.

#![allow(non_camel_case_types)]

use std::ffi::{c_char, c_int, c_uint, c_void};

/// What the test checks of a structure.
#[cfg(test)]
pub(super) struct Layout {
    pub(super) name: &'static str,
    /// `None` for a structure of which only the beginning is declared: the library makes it.
    pub(super) size: Option<usize>,
    /// Names or paths of fields, and their offsets and sizes.
    pub(super) fields: &'static [(&'static str, usize, usize)],
}

/// Declares structures of C: `all` of one, or its `front`. The path of a field follows it where its name is another one in C.
macro_rules! c_structs {
    ($($(#[$doc:meta])* $part:ident $name:ident { $($(#[$what:meta])* $field:ident $(= $path:literal)? : $type:ty,)* })*) => {
        $(
            $(#[$doc])*
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub(super) struct $name {
                $($(#[$what])* pub(super) $field: $type,)*
            }
        )*

        #[cfg(test)]
        pub(super) const LAYOUTS: &[Layout] = &[$(Layout {
            name: stringify!($name),
            size: c_structs!(@size $part $name),
            fields: &[$((
                c_structs!(@path $field $($path)?),
                std::mem::offset_of!($name, $field),
                size_of::<$type>(),
            ),)*],
        },)*];
    };
    (@size all $name:ident) => { Some(size_of::<$name>()) };
    (@size front $name:ident) => { None };
    (@path $field:ident $path:literal) => { $path };
    (@path $field:ident) => { stringify!($field) };
}

/// Declares constants of C.
macro_rules! c_constants {
    ($($name:ident: $type:ty = $value:expr;)*) => {
        $(pub(super) const $name: $type = $value;)*

        #[cfg(test)]
        pub(super) const CONSTANTS: &[(&str, i64)] = &[$((stringify!($name), $value as i64),)*];
    };
}

// Functions of a context's table. The library fills all entries.
pub(super) type PollCq = unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int;
pub(super) type ReqNotifyCq = unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int;
pub(super) type PostSend =
    unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int;
pub(super) type PostRecv =
    unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;

/// A protection domain.
#[repr(C)]
pub(super) struct ibv_pd {
    _opaque: [u8; 0],
}

/// An address handle.
#[repr(C)]
pub(super) struct ibv_ah {
    _opaque: [u8; 0],
}

c_structs! {
    front ibv_device {
        _ops: [*mut c_void; 2],
        node_type: c_int,
        transport_type: c_int,
        name: [c_char; 64],
    }

    front ibv_context_ops {
        _first: [*mut c_void; 11],
        poll_cq: Option<PollCq>,
        req_notify_cq: Option<ReqNotifyCq>,
        _second: [*mut c_void; 12],
        post_send: Option<PostSend>,
        post_recv: Option<PostRecv>,
        _third: [*mut c_void; 5],
    }

    front ibv_context {
        device: *mut ibv_device,
        ops: ibv_context_ops,
        cmd_fd: c_int,
        async_fd: c_int,
        num_comp_vectors: c_int,
    }

    all ibv_mr {
        context: *mut ibv_context,
        pd: *mut ibv_pd,
        addr: *mut c_void,
        length: usize,
        handle: u32,
        lkey: u32,
        rkey: u32,
    }

    all ibv_comp_channel {
        context: *mut ibv_context,
        fd: c_int,
        refcnt: c_int,
    }

    front ibv_cq {
        context: *mut ibv_context,
        channel: *mut ibv_comp_channel,
        cq_context: *mut c_void,
        handle: u32,
        cqe: c_int,
    }

    front ibv_qp {
        context: *mut ibv_context,
        qp_context: *mut c_void,
        pd: *mut ibv_pd,
        send_cq: *mut ibv_cq,
        recv_cq: *mut ibv_cq,
        _srq = "srq": *mut c_void,
        handle: u32,
        qp_num: u32,
    }

    all ibv_port_attr {
        state: c_int,
        max_mtu: c_int,
        active_mtu: c_int,
        gid_tbl_len: c_int,
        port_cap_flags: u32,
        max_msg_sz: u32,
        bad_pkey_cntr: u32,
        qkey_viol_cntr: u32,
        pkey_tbl_len: u16,
        lid: u16,
        sm_lid: u16,
        lmc: u8,
        max_vl_num: u8,
        sm_sl: u8,
        subnet_timeout: u8,
        init_type_reply: u8,
        active_width: u8,
        active_speed: u8,
        phys_state: u8,
        link_layer: u8,
        flags: u8,
        port_cap_flags2: u16,
    }

    all ibv_device_attr {
        fw_ver: [c_char; 64],
        node_guid: u64,
        sys_image_guid: u64,
        max_mr_size: u64,
        page_size_cap: u64,
        vendor_id: u32,
        vendor_part_id: u32,
        hw_ver: u32,
        max_qp: c_int,
        max_qp_wr: c_int,
        device_cap_flags: c_uint,
        max_sge: c_int,
        max_sge_rd: c_int,
        max_cq: c_int,
        max_cqe: c_int,
        _limits: [c_int; 22],
        max_pkeys: u16,
        local_ca_ack_delay: u8,
        phys_port_cnt: u8,
    }

    all ibv_gid_entry {
        gid: [u64; 2],
        gid_index: u32,
        port_num: u32,
        gid_type: u32,
        ndev_ifindex: u32,
    }

    all ibv_global_route {
        dgid: [u64; 2],
        flow_label: u32,
        sgid_index: u8,
        hop_limit: u8,
        traffic_class: u8,
    }

    all ibv_ah_attr {
        grh: ibv_global_route,
        dlid: u16,
        sl: u8,
        src_path_bits: u8,
        static_rate: u8,
        is_global: u8,
        port_num: u8,
    }

    all ibv_qp_cap {
        max_send_wr: u32,
        max_recv_wr: u32,
        max_send_sge: u32,
        max_recv_sge: u32,
        max_inline_data: u32,
    }

    all ibv_qp_init_attr {
        qp_context: *mut c_void,
        send_cq: *mut ibv_cq,
        recv_cq: *mut ibv_cq,
        srq: *mut c_void,
        cap: ibv_qp_cap,
        qp_type: c_int,
        sq_sig_all: c_int,
    }

    all ibv_qp_attr {
        qp_state: c_int,
        cur_qp_state: c_int,
        path_mtu: c_int,
        path_mig_state: c_int,
        qkey: u32,
        rq_psn: u32,
        sq_psn: u32,
        dest_qp_num: u32,
        qp_access_flags: c_uint,
        cap: ibv_qp_cap,
        ah_attr: ibv_ah_attr,
        alt_ah_attr: ibv_ah_attr,
        pkey_index: u16,
        alt_pkey_index: u16,
        en_sqd_async_notify: u8,
        sq_draining: u8,
        max_rd_atomic: u8,
        max_dest_rd_atomic: u8,
        min_rnr_timer: u8,
        port_num: u8,
        timeout: u8,
        retry_cnt: u8,
        rnr_retry: u8,
        alt_port_num: u8,
        alt_timeout: u8,
        rate_limit: u32,
    }

    all ibv_sge {
        addr: u64,
        length: u32,
        lkey: u32,
    }

    all ibv_send_wr {
        wr_id: u64,
        next: *mut ibv_send_wr,
        sg_list: *mut ibv_sge,
        num_sge: c_int,
        opcode: c_int,
        send_flags: c_uint,
        /// In network byte order.
        imm_data: u32,
        /// For datagrams, the address handle.
        remote_addr = "wr.rdma.remote_addr": u64,
        /// For datagrams, the number of the peer's queue pair.
        rkey = "wr.rdma.rkey": u32,
        remote_qkey = "wr.ud.remote_qkey": u32,
        _others: [u64; 9],
    }

    all ibv_recv_wr {
        wr_id: u64,
        next: *mut ibv_recv_wr,
        sg_list: *mut ibv_sge,
        num_sge: c_int,
    }

    all ibv_wc {
        wr_id: u64,
        status: c_int,
        opcode: c_int,
        vendor_err: u32,
        byte_len: u32,
        /// In network byte order.
        imm_data: u32,
        qp_num: u32,
        src_qp: u32,
        wc_flags: c_uint,
        pkey_index: u16,
        slid: u16,
        sl: u8,
        dlid_path_bits: u8,
    }

    all ibv_async_event {
        /// A pointer to a queue pair or a completion queue, or, in its first bytes, the number of a port.
        element: *mut c_void,
        event_type: c_int,
    }
}

c_constants! {
    IBV_TRANSPORT_IB: c_int = 0;
    IBV_TRANSPORT_IWARP: c_int = 1;
    IBV_PORT_ACTIVE: c_int = 4;
    IBV_LINK_LAYER_ETHERNET: u8 = 2;
    IBV_FORK_UNNEEDED: c_int = 2;
    IBV_GID_TYPE_IB: u32 = 0;
    IBV_GID_TYPE_ROCE_V1: u32 = 1;
    IBV_GID_TYPE_ROCE_V2: u32 = 2;
    IBV_QPT_RC: c_int = 2;
    IBV_QPT_UD: c_int = 4;
    IBV_QPS_INIT: c_int = 1;
    IBV_QPS_RTR: c_int = 2;
    IBV_QPS_RTS: c_int = 3;
    IBV_QPS_ERR: c_int = 6;
    IBV_QP_STATE: c_int = 1 << 0;
    IBV_QP_ACCESS_FLAGS: c_int = 1 << 3;
    IBV_QP_PKEY_INDEX: c_int = 1 << 4;
    IBV_QP_PORT: c_int = 1 << 5;
    IBV_QP_QKEY: c_int = 1 << 6;
    IBV_QP_AV: c_int = 1 << 7;
    IBV_QP_PATH_MTU: c_int = 1 << 8;
    IBV_QP_TIMEOUT: c_int = 1 << 9;
    IBV_QP_RETRY_CNT: c_int = 1 << 10;
    IBV_QP_RNR_RETRY: c_int = 1 << 11;
    IBV_QP_RQ_PSN: c_int = 1 << 12;
    IBV_QP_MAX_QP_RD_ATOMIC: c_int = 1 << 13;
    IBV_QP_MIN_RNR_TIMER: c_int = 1 << 15;
    IBV_QP_SQ_PSN: c_int = 1 << 16;
    IBV_QP_MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
    IBV_QP_DEST_QPN: c_int = 1 << 20;
    IBV_ACCESS_LOCAL_WRITE: c_int = 1;
    IBV_ACCESS_REMOTE_WRITE: c_int = 1 << 1;
    IBV_ACCESS_REMOTE_READ: c_int = 1 << 2;
    IBV_WR_RDMA_WRITE: c_int = 0;
    IBV_WR_RDMA_WRITE_WITH_IMM: c_int = 1;
    IBV_WR_SEND: c_int = 2;
    IBV_WR_RDMA_READ: c_int = 4;
    IBV_SEND_SIGNALED: c_uint = 1 << 1;
    IBV_SEND_INLINE: c_uint = 1 << 3;
    IBV_WC_SUCCESS: c_int = 0;
    IBV_WC_WR_FLUSH_ERR: c_int = 5;
    IBV_WC_REM_ACCESS_ERR: c_int = 10;
    IBV_WC_RETRY_EXC_ERR: c_int = 12;
    IBV_WC_RDMA_WRITE: c_int = 1;
    IBV_WC_RDMA_READ: c_int = 2;
    IBV_WC_RECV_RDMA_WITH_IMM: c_int = 129;
    IBV_WC_RECV: c_int = 128;
    IBV_WC_GRH: c_uint = 1;
    IBV_EVENT_CQ_ERR: c_int = 0;
    IBV_EVENT_QP_FATAL: c_int = 1;
    IBV_EVENT_QP_REQ_ERR: c_int = 2;
    IBV_EVENT_QP_ACCESS_ERR: c_int = 3;
    IBV_EVENT_DEVICE_FATAL: c_int = 8;
    IBV_EVENT_PORT_ACTIVE: c_int = 9;
    IBV_EVENT_PORT_ERR: c_int = 10;
    IBV_EVENT_LID_CHANGE: c_int = 11;
    IBV_EVENT_PKEY_CHANGE: c_int = 12;
    IBV_EVENT_GID_CHANGE: c_int = 18;
}

#[cfg(test)]
mod layout_tests;
