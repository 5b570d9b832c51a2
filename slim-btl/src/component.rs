//! The functions that the shim calls (`shim/slim_btl.h`).

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;
use std::time::Duration;

use slim::Config;
use slim_rdma::ibverbs::ProgramAccess;
use slim_verbs::{KEYS_LEN, MemoryAtPorts, MemoryKeys, TransportKinds};

use crate::endpoint::BtlEndpoint;
use crate::frag::{BtlDescriptor, FragRef, UNREACHABLE};
use crate::gets::{GetBytes, GetCallback};
use crate::module::{BtlModule, ModuleOptions, Upcalls};
use crate::proc::ProcName;
use crate::report;

/// `SLIM_BTL_KEYS` of the shim.
const _: () = assert!(KEYS_LEN == 80);

/// How long a connection may last without a hello: the connector may compute before it sends one.
const HELLO_LIMIT: Duration = Duration::from_secs(60);

/// The text of a C string that may be null.
///
/// # Safety
/// It is null or ends with a zero byte.
unsafe fn text(at: *const c_char) -> String {
    if at.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(at) };
    text.to_string_lossy().into_owned()
}

/// Bytes from C.
///
/// # Safety
/// There are `len` bytes at `at`, for as long as the result is used.
unsafe fn bytes<'a>(at: *const u8, len: usize) -> &'a [u8] {
    match len {
        0 => &[],
        // SAFETY: the caller's promise.
        _ => unsafe { slice::from_raw_parts(at, len) },
    }
}

/// The endpoint that Open MPI has a pointer to, for the time of a call.
///
/// # Safety
/// It comes from [`slim_btl_add`], and is not given to [`slim_btl_remove`] before the end of the call.
unsafe fn lent(endpoint: *const BtlEndpoint) -> ManuallyDrop<Arc<BtlEndpoint>> {
    // SAFETY: the caller's promise: Open MPI's pointer counts as one owner. It is not dropped here, and outlives the call.
    ManuallyDrop::new(unsafe { Arc::from_raw(endpoint) })
}

/// The settings in the environment, and the problems with them.
fn settings() -> (Config, Vec<String>) {
    let vars = std::env::vars_os();
    let vars = vars.filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
    let (mut config, problems) = Config::from_vars(vars);
    let mut problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
    let no_key = slim::read_job_key(&mut config).err();
    problems.extend(no_key.map(|problem| problem.to_string()));
    (config, problems)
}

/// Opens the module: settings of the session are in the environment. Null, after a message, if that is impossible.
///
/// # Safety
/// The strings are null or end with a zero byte; the functions in `upcalls` are as [`Upcalls`] says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_btl_open(
    name: u64,
    if_include: *const c_char,
    if_exclude: *const c_char,
    transports: *const c_char,
    verbs_ports: *const c_char,
    upcalls: Upcalls,
) -> *mut BtlModule {
    let (config, problems) = settings();
    for problem in problems {
        upcalls.say(1, || problem);
    }
    // SAFETY: the caller's promise.
    let (transports, ports) = unsafe { (text(transports), text(verbs_ports)) };
    let kinds = ("btl_slim_transports", transports.as_str());
    let transports = match TransportKinds::parse(kinds, ("btl_slim_verbs_ports", &ports)) {
        Ok(transports) => transports,
        Err(problem) => {
            upcalls.say(0, || problem);
            return ptr::null_mut();
        }
    };
    let options = ModuleOptions {
        me: ProcName(name),
        // SAFETY: the caller's promise.
        if_include: unsafe { text(if_include) },
        // SAFETY: the caller's promise.
        if_exclude: unsafe { text(if_exclude) },
        transports,
        config,
        hello_limit: HELLO_LIMIT,
    };
    match BtlModule::open(options, upcalls) {
        Ok(module) => {
            report::report(ProcName(name));
            Box::into_raw(Box::new(module))
        }
        Err(e) => {
            upcalls.say(0, || e.to_string());
            ptr::null_mut()
        }
    }
}

/// Writes the blob to publish to `to` if it fits into `room` bytes. Returns its length. `reads`: this process can read the memory of peers.
///
/// # Safety
/// The module is open, and there are `room` bytes at `to`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_btl_blob(
    module: &BtlModule,
    reads: c_int,
    to: *mut u8,
    room: usize,
) -> usize {
    let blob = module.blob(reads != 0);
    if blob.len() <= room {
        // SAFETY: there is room for it, and it does not overlap a fresh vector.
        unsafe { ptr::copy_nonoverlapping(blob.as_ptr(), to, blob.len()) };
    }
    blob.len()
}

/// Returns the endpoint of a process from its `opal_proc_t` and its blob; null if the process cannot be reached. It is the same for
/// the same process, until it is removed.
///
/// # Safety
/// The module is open, and there are `len` bytes at `blob`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_btl_add(
    module: &BtlModule,
    name: u64,
    proc: *mut c_void,
    blob: *const u8,
    len: usize,
) -> *const BtlEndpoint {
    // SAFETY: the caller's promise.
    let blob = unsafe { bytes(blob, len) };
    let endpoint = module.add(ProcName(name), proc, blob);
    endpoint.map_or(ptr::null(), |endpoint| Arc::as_ptr(&endpoint))
}

/// Ends the connection with a process in good order.
///
/// # Safety
/// The module is open; the endpoint is one of [`slim_btl_add`], and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_btl_remove(module: &BtlModule, endpoint: *const BtlEndpoint) {
    // SAFETY: the caller's promise; this is the owner that `BtlModule::add` has left for Open MPI's pointer.
    module.remove(&unsafe { Arc::from_raw(endpoint) });
}

/// A fragment with one segment; null without memory.
#[unsafe(no_mangle)]
pub extern "C" fn slim_btl_alloc(size: usize, flags: u32, order: u8) -> *mut BtlDescriptor {
    let frag = FragRef::allocate(size, flags, order);
    frag.map_or(ptr::null_mut(), FragRef::into_raw)
}

/// Frees a fragment.
///
/// # Safety
/// It comes from [`slim_btl_alloc`], and is not waiting to be sent.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_btl_free(descriptor: NonNull<BtlDescriptor>) {
    // SAFETY: the caller's promise.
    unsafe { FragRef::from_raw(descriptor) }.free();
}

/// Limits the payload of one fragment.
///
/// # Safety
/// The endpoint is one of [`slim_btl_add`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_btl_limit(endpoint: &BtlEndpoint, len: usize) -> usize {
    endpoint.limit(len)
}

/// Sends a fragment; the result is `btl_send`'s.
///
/// # Safety
/// The module is open, the endpoint one of its own, the fragment from [`slim_btl_alloc`]; its segments stay valid and unchanged
/// until its callback.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_btl_send(
    module: &BtlModule,
    endpoint: *const BtlEndpoint,
    descriptor: NonNull<BtlDescriptor>,
    tag: u8,
) -> c_int {
    // SAFETY: the caller's promise.
    let (endpoint, frag) = unsafe { (lent(endpoint), FragRef::from_raw(descriptor)) };
    module.send(&endpoint, frag, tag)
}

/// Sends a header and a payload: 0, or negative if they are not sent.
///
/// # Safety
/// The module is open; the endpoint is one of [`slim_btl_add`]; there are as many bytes as is said.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_btl_send_now(
    module: &BtlModule,
    endpoint: *const BtlEndpoint,
    tag: u8,
    header: *const u8,
    header_len: usize,
    payload: *const u8,
    payload_len: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    let (header, payload) = unsafe { (bytes(header, header_len), bytes(payload, payload_len)) };
    // SAFETY: the caller's promise.
    let endpoint = unsafe { lent(endpoint) };
    match module.send_now(&endpoint, tag, [header, payload]) {
        true => 0,
        false => UNREACHABLE,
    }
}

/// Whether this process can read the memory of peers.
///
/// # Safety
/// The module is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_btl_reads_memory(module: &BtlModule) -> c_int {
    module.reads_memory().into()
}

/// Whether the peer can read memory of this process now.
///
/// # Safety
/// The endpoint is one of [`slim_btl_add`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_btl_is_read(endpoint: &BtlEndpoint) -> c_int {
    endpoint.can_read().into()
}

/// Registers memory, and writes the keys for peers to `keys` ([`KEYS_LEN`] bytes); null if that is impossible.
///
/// # Safety
/// The module is open; the memory stays mapped until [`slim_btl_deregister`], and there is room at `keys`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_btl_register(
    module: &BtlModule,
    at: *mut u8,
    len: usize,
    readable: c_int,
    sink: c_int,
    keys: &mut [u8; KEYS_LEN],
) -> *mut MemoryAtPorts {
    let access = match (readable != 0, sink != 0) {
        (_, false) => ProgramAccess::Readable,
        (false, true) => ProgramAccess::Sink,
        (true, true) => ProgramAccess::Both,
    };
    // SAFETY: the caller's promise.
    let Some(memory) = (unsafe { module.register(at, len, access) }) else {
        return ptr::null_mut();
    };
    *keys = memory.keys().to_bytes();
    Box::into_raw(Box::new(memory))
}

/// Ends a registration.
///
/// # Safety
/// It comes from [`slim_btl_register`], and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_btl_deregister(memory: *mut MemoryAtPorts) {
    // SAFETY: the caller's promise.
    drop(unsafe { Box::from_raw(memory) });
}

/// Reads `len` bytes at `from` of the peer, whose keys are at `keys`, into the memory that the callback names. That is registered, or `memory` is null.
///
/// # Safety
/// The module is open; the endpoint is one of [`slim_btl_add`]; the memory stays registered until the callback, which may be called.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_btl_get(
    module: &BtlModule,
    endpoint: *const BtlEndpoint,
    from: u64,
    keys: &[u8; KEYS_LEN],
    memory: Option<&MemoryAtPorts>,
    len: usize,
    callback: GetCallback,
) {
    // SAFETY: the caller's promise.
    let endpoint = unsafe { lent(endpoint) };
    let bytes = GetBytes {
        from: (from, MemoryKeys::from_bytes(*keys)),
        into: (callback.local as u64, memory),
        len: len as u64,
    };
    module.get(&endpoint, callback, &bytes);
}

/// Makes progress; how many fragments were moved.
///
/// # Safety
/// The module is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_btl_progress(module: &BtlModule) -> c_int {
    module.progress() as c_int
}

/// Reports the state of all peers and flows.
///
/// # Safety
/// The module is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_btl_dump(module: &BtlModule) {
    module.dump();
}

/// Closes the module.
///
/// # Safety
/// It is open, and no thread uses it any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_btl_close(module: *mut BtlModule) {
    // SAFETY: it comes from slim_btl_open, and this is its last use.
    unsafe { Box::from_raw(module) }.close();
}
