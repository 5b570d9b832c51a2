//! libibverbs, loaded at run time: a host without it runs as if this crate knew nothing of it.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use super::abi::{
    IBV_FORK_UNNEEDED, ibv_ah, ibv_ah_attr, ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq,
    ibv_device, ibv_device_attr, ibv_gid_entry, ibv_mr, ibv_pd, ibv_port_attr, ibv_qp, ibv_qp_attr,
    ibv_qp_init_attr,
};
use super::error::AdapterError;

/// The file that the loader looks for.
const FILE: &str = "libibverbs.so.1";

type ForkStatus = unsafe extern "C" fn() -> c_int;
const FORK_STATUS: (&str, &str) = (
    "ibv_is_fork_initialized",
    "enum ibv_fork_status ibv_is_fork_initialized(void)",
);

/// Declares the functions that are used, each with its prototype in C.
macro_rules! c_functions {
    ($($name:ident: fn($($argument:ty),*) $(-> $result:ty)? = $prototype:literal;)*) => {
        /// The functions of the library. They may be called from any thread.
        pub(super) struct Library {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            /// Newer than the others: rdma-core 35.
            fork_status: Option<ForkStatus>,
        }

        impl Library {
            fn find(file: &str, library: &libloading::Library) -> Result<Self, AdapterError> {
                Ok(Library {
                    $($name: {
                        let name = stringify!($name);
                        // SAFETY: the symbol is a function of this type: the prototype is that of the header, which a test compiles.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn($($argument),*) $(-> $result)?>(name)
                        };
                        *found.map_err(|_| AdapterError::Symbol(file.into(), name))?
                    },)*
                    // SAFETY: as above.
                    fork_status: unsafe { library.get::<ForkStatus>(FORK_STATUS.0) }.ok().map(|found| *found),
                })
            }
        }

        #[cfg(test)]
        pub(super) const PROTOTYPES: &[(&str, &str)] = &[$((stringify!($name), $prototype),)* FORK_STATUS];
    };
}

c_functions! {
    ibv_get_device_list: fn(*mut c_int) -> *mut *mut ibv_device
        = "struct ibv_device **ibv_get_device_list(int *)";
    ibv_free_device_list: fn(*mut *mut ibv_device) = "void ibv_free_device_list(struct ibv_device **)";
    ibv_get_device_name: fn(*mut ibv_device) -> *const c_char
        = "const char *ibv_get_device_name(struct ibv_device *)";
    ibv_open_device: fn(*mut ibv_device) -> *mut ibv_context
        = "struct ibv_context *ibv_open_device(struct ibv_device *)";
    ibv_close_device: fn(*mut ibv_context) -> c_int = "int ibv_close_device(struct ibv_context *)";
    ibv_query_device: fn(*mut ibv_context, *mut ibv_device_attr) -> c_int
        = "int ibv_query_device(struct ibv_context *, struct ibv_device_attr *)";
    ibv_query_port: fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int
        = "int ibv_query_port(struct ibv_context *, uint8_t, struct _compat_ibv_port_attr *)";
    _ibv_query_gid_table: fn(*mut ibv_context, *mut ibv_gid_entry, usize, u32, usize) -> isize
        = "ssize_t _ibv_query_gid_table(struct ibv_context *, struct ibv_gid_entry *, size_t, uint32_t, size_t)";
    ibv_query_pkey: fn(*mut ibv_context, u8, c_int, *mut u16) -> c_int
        = "int ibv_query_pkey(struct ibv_context *, uint8_t, int, __be16 *)";
    ibv_alloc_pd: fn(*mut ibv_context) -> *mut ibv_pd = "struct ibv_pd *ibv_alloc_pd(struct ibv_context *)";
    ibv_dealloc_pd: fn(*mut ibv_pd) -> c_int = "int ibv_dealloc_pd(struct ibv_pd *)";
    ibv_reg_mr: fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr
        = "struct ibv_mr *ibv_reg_mr(struct ibv_pd *, void *, size_t, int)";
    ibv_dereg_mr: fn(*mut ibv_mr) -> c_int = "int ibv_dereg_mr(struct ibv_mr *)";
    ibv_create_comp_channel: fn(*mut ibv_context) -> *mut ibv_comp_channel
        = "struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *)";
    ibv_destroy_comp_channel: fn(*mut ibv_comp_channel) -> c_int
        = "int ibv_destroy_comp_channel(struct ibv_comp_channel *)";
    ibv_create_cq: fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq
        = "struct ibv_cq *ibv_create_cq(struct ibv_context *, int, void *, struct ibv_comp_channel *, int)";
    ibv_destroy_cq: fn(*mut ibv_cq) -> c_int = "int ibv_destroy_cq(struct ibv_cq *)";
    ibv_get_cq_event: fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int
        = "int ibv_get_cq_event(struct ibv_comp_channel *, struct ibv_cq **, void **)";
    ibv_ack_cq_events: fn(*mut ibv_cq, c_uint) = "void ibv_ack_cq_events(struct ibv_cq *, unsigned int)";
    ibv_create_qp: fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp
        = "struct ibv_qp *ibv_create_qp(struct ibv_pd *, struct ibv_qp_init_attr *)";
    ibv_modify_qp: fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int
        = "int ibv_modify_qp(struct ibv_qp *, struct ibv_qp_attr *, int)";
    ibv_destroy_qp: fn(*mut ibv_qp) -> c_int = "int ibv_destroy_qp(struct ibv_qp *)";
    ibv_create_ah: fn(*mut ibv_pd, *mut ibv_ah_attr) -> *mut ibv_ah
        = "struct ibv_ah *ibv_create_ah(struct ibv_pd *, struct ibv_ah_attr *)";
    ibv_destroy_ah: fn(*mut ibv_ah) -> c_int = "int ibv_destroy_ah(struct ibv_ah *)";
    ibv_get_async_event: fn(*mut ibv_context, *mut ibv_async_event) -> c_int
        = "int ibv_get_async_event(struct ibv_context *, struct ibv_async_event *)";
    ibv_ack_async_event: fn(*mut ibv_async_event) = "void ibv_ack_async_event(struct ibv_async_event *)";
}

impl Library {
    /// Loads a library of this name. It stays loaded.
    pub(super) fn load(file: &str) -> Result<Self, AdapterError> {
        // SAFETY: libibverbs has nothing to be kept to when it is loaded; its initialisation only reads its settings.
        let library = unsafe { libloading::Library::new(file) };
        let library = library.map_err(|e| {
            // What the loader says is the cause of the error.
            let cause = std::error::Error::source(&e).map(ToString::to_string);
            AdapterError::Library(cause.unwrap_or_else(|| e.to_string()))
        })?;
        let found = Library::find(file, &library)?;
        // The functions are used for as long as the process lives. Providers, which it loads, cannot be unloaded, either.
        std::mem::forget(library);
        Ok(found)
    }

    /// Whether registered pages stay where they are when the process forks: the kernel copies them for the child (Linux 5.13).
    pub(super) fn forks_keep_pages(&self) -> bool {
        // SAFETY: it may be called at any time.
        let status = self.fork_status.map(|status| unsafe { status() });
        status == Some(IBV_FORK_UNNEEDED)
    }

    /// The library of this process, loaded at the first call. A failure is not final: perhaps the process had no descriptors left.
    pub(super) fn get() -> Result<&'static Self, AdapterError> {
        static LIBRARY: OnceLock<Library> = OnceLock::new();
        match LIBRARY.get() {
            Some(library) => Ok(library),
            // Two threads may load it at once; for the loader it is one.
            None => Self::load(FILE).map(|library| LIBRARY.get_or_init(|| library)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_and_a_missing_symbol_are_named_in_one_line() {
        let missing = Library::load("libibverbs-that-is-not-there.so").err();
        let text = missing.expect("there is none").to_string();
        assert!(text.contains("libibverbs-that-is-not-there.so"), "{text}");
        let other = Library::load("libc.so.6").err();
        let other = other.expect("it has no verbs").to_string();
        assert_eq!(
            other,
            "verbs cannot be used: libc.so.6 has no ibv_get_device_list (rdma-core 32 or newer has it)"
        );
        assert!(!text.contains('\n') && !other.contains('\n'));
    }
}
