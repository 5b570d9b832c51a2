//! Sessions.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::{self, MaybeUninit};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{ptr, slice};

use libc::{sockaddr, socklen_t};
use slim::{Config, LogLevel, Session, SessionEvent, SessionOptions, Update};
use slim_verbs::TransportKinds;

use crate::address;
use crate::codes::Refusal;
use crate::endpoint::SlimEndpoint;
use crate::flow::SlimFlow;
use crate::guard::{self, ApiHandle, Health, entry, limit, on};
use crate::posts::UserPointer;
use crate::shared::SessionShared;
use crate::types::{SlimEvent, SlimEventCallback, SlimOptions, SlimStats, SlimUpdate, copy_out};

/// The time limit of a close that has none.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 3600);
/// Longest sleep while a closed flow has posts: their completion wakes nobody.
const CLOSED_POSTS: Duration = Duration::from_millis(10);

/// All endpoints and flows of one job in this process.
pub struct SlimSession {
    session: Session,
    shared: Arc<SessionShared>,
    /// Memory of `progress`, kept for the next call.
    scratch: Mutex<Vec<Update>>,
    /// What could not be had. Empty: all could.
    warning: CString,
}

/// Bytes of the options that the first version had.
const FIRST_OPTIONS: usize = mem::offset_of!(SlimOptions, transports);
/// More than any version will have: a program that has not set the size gives some other number.
const MOST_OPTIONS: usize = 4096;

impl ApiHandle for SlimSession {
    fn health(&self) -> &Health {
        &self.shared.health
    }
}

/// Returns the version of the library, for example "0.1.0". Never NULL; the text is constant. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn slim_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Opens a session: starts the library's thread, unless another session with the same settings has one. `options`: NULL for the defaults.
/// Stores the session in `*session`; close it by slim_session_close().
///
/// Returns 0, SLIM_ERR_SETTING (a setting cannot be used), SLIM_ERR_KERNEL (the thread got no memory, socket or descriptor; the file with
/// the job key cannot be used), or SLIM_ERR_INVALID. Any thread.
///
/// # Safety
/// The pointers are NULL or valid, and the strings end with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_session_open(
    options: *const SlimOptions,
    session: *mut *mut SlimSession,
) -> c_int {
    guard::install_hook();
    entry("slim_session_open", || {
        if session.is_null() {
            return Err(Refusal::INVALID);
        }
        // SAFETY: promised by the caller.
        let (options, kinds) = unsafe { read_options(options) }?;
        let mut warnings = Vec::new();
        let inner = match kinds.open_verbs() {
            None => Session::open(options)?,
            Some(Ok(ports)) => {
                warnings = ports.left_out;
                Session::open_with(options, vec![Box::new(ports.provider)])?
            }
            Some(Err(e)) => {
                warnings.push(format!("{e}; flows use TCP only"));
                Session::open(options)?
            }
        };
        let opened = Box::new(SlimSession {
            session: inner,
            shared: Arc::default(),
            scratch: Mutex::default(),
            warning: CString::new(warnings.join("\n")).unwrap_or_default(),
        });
        // SAFETY: not NULL, and valid as promised.
        unsafe { *session = Box::into_raw(opened) };
        Ok(0)
    }) as c_int
}

/// # Safety
/// As for [`slim_session_open`].
unsafe fn read_options(
    options: *const SlimOptions,
) -> Result<(SessionOptions, TransportKinds), Refusal> {
    if options.is_null() {
        return Ok((SessionOptions::new(""), TransportKinds::Tcp));
    }
    // SAFETY: the size is the first field of every version.
    let size = unsafe { ptr::read(options.cast::<usize>()) };
    // No version ends within an option.
    let whole = size.is_multiple_of(mem::align_of::<SlimOptions>());
    if !whole || !(FIRST_OPTIONS..=MOST_OPTIONS).contains(&size) {
        return Err(Refusal::INVALID);
    }
    // SAFETY: the program says that the structure has this size.
    let all = unsafe { slice::from_raw_parts(options.cast::<u8>(), size) };
    let known = size.min(mem::size_of::<SlimOptions>());
    // An option of a later version: its effect would be missing.
    if all[known..].iter().any(|b| *b != 0) {
        return Err(Refusal::INVALID);
    }
    // Options that an earlier version has not are NULL.
    let mut taken = MaybeUninit::<SlimOptions>::zeroed();
    // SAFETY: both have so many bytes; zeros and any pointers are values of the structure.
    let options = unsafe {
        ptr::copy_nonoverlapping(all.as_ptr(), taken.as_mut_ptr().cast(), known);
        taken.assume_init()
    };
    // SAFETY: strings, as promised.
    let (job, transports, ports) = unsafe {
        (
            text(options.job)?.unwrap_or_default(),
            text(options.transports)?.unwrap_or("tcp"),
            text(options.verbs_ports)?.unwrap_or_default(),
        )
    };
    let kinds = TransportKinds::parse(("transports", transports), ("verbs_ports", ports))
        .map_err(Refusal::setting)?;
    let mut taken = SessionOptions::new(job);
    if !options.settings.is_null() {
        // SAFETY: an array of strings with a NULL at the end, as promised.
        let vars = unsafe { read_settings(options.settings) };
        let quiet = !vars.iter().any(|(name, _)| name == "SLIM_LOG");
        let (config, problems) = Config::from_vars(vars);
        if let Some(problem) = problems.first() {
            return Err(Refusal::setting(problem.to_string()));
        }
        let log = if quiet { LogLevel::Off } else { config.log };
        taken.config = Config { log, ..config };
    }
    Ok((taken, kinds))
}

/// A string of the program; `None` for NULL.
///
/// # Safety
/// It is NULL or ends with a zero byte, and lives as long as the result.
unsafe fn text<'a>(at: *const c_char) -> Result<Option<&'a str>, Refusal> {
    if at.is_null() {
        return Ok(None);
    }
    // SAFETY: promised by the caller.
    let text = unsafe { CStr::from_ptr(at) };
    text.to_str().map(Some).map_err(|_| Refusal::INVALID)
}

/// # Safety
/// `settings` is an array of strings with a NULL at the end.
unsafe fn read_settings(settings: *const *const c_char) -> Vec<(String, std::ffi::OsString)> {
    use std::os::unix::ffi::OsStrExt;
    let mut vars = BTreeMap::new();
    for at in 0.. {
        // SAFETY: not beyond the NULL.
        let text = unsafe { *settings.add(at) };
        if text.is_null() {
            break;
        }
        // SAFETY: a string, as promised.
        let text = unsafe { CStr::from_ptr(text) }.to_bytes();
        let Some(end) = text.iter().position(|b| *b == b'=') else {
            continue;
        };
        let (name, value) = (&text[..end], &text[end + 1..]);
        if let Ok(name) = str::from_utf8(name)
            && !vars.contains_key(name)
        {
            let value = std::ffi::OsStr::from_bytes(value).to_owned();
            vars.insert(name.to_owned(), value);
        }
    }
    vars.into_iter().collect()
}

/// Closes all endpoints and flows of the session, and frees the session. Waits at most `timeout_ms` milliseconds until all sent bytes are
/// delivered (negative: no limit). If no other session uses the library's thread, the call also ends the thread, which may take about as
/// long again. Afterwards no posted buffer is in use, and there are no more updates about posts. The handles of endpoints and flows stay:
/// close each of them, before or after; until then they may keep descriptors. NULL is allowed and does nothing.
///
/// Returns 0; SLIM_ERR_TIMEOUT: posts were left that the kernel did not take in time, and their flows were reset, or the thread has not
/// ended yet and will end later; SLIM_ERR_INVALID in a callback of this library, and the session stays open; or SLIM_ERR_INTERNAL. Except
/// in the case SLIM_ERR_INVALID the session is freed. No other thread may use the session during the call.
///
/// # Safety
/// `session` is NULL or an open session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_session_close(session: *mut SlimSession, timeout_ms: c_int) -> c_int {
    entry("slim_session_close", || {
        if guard::is_in_callback() {
            return Err(Refusal::INVALID);
        }
        if session.is_null() {
            return Ok(0);
        }
        // SAFETY: a session that slim_session_open() has made, and which is not used any more.
        let session = unsafe { Box::from_raw(session) };
        let SlimSession {
            session, shared, ..
        } = *session;
        let broken = shared.health.is_broken();
        let limit = limit(timeout_ms).unwrap_or(FOREVER);
        let ended = match broken {
            true => session.abort(limit),
            false => session.close(limit),
        };
        shared.clear();
        match ended {
            Ok(()) if broken => Err(Refusal::INTERNAL),
            ended => Ok(ended.map(|()| 0)?),
        }
    }) as c_int
}

/// Says what the options have asked for and the session has not: a kind of transport that cannot be used (flows use TCP then), or ports of adapters. One line for each.
/// NULL if it has all, or if `session` is NULL. The text is valid until the session is closed. Any thread.
///
/// # Safety
/// `session` is NULL or an open session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_session_warning(session: *const SlimSession) -> *const c_char {
    // SAFETY: promised by the caller.
    let warning = unsafe { session.as_ref() }.map(|session| session.warning.as_c_str());
    let warning = warning.filter(|text| !text.is_empty());
    warning.map_or(ptr::null(), CStr::as_ptr)
}

/// Returns a descriptor for poll(), select() or epoll: readable when slim_session_progress() may have updates, or has work to do. It
/// belongs to the session: do not read from it, and do not close it. Or returns SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread.
///
/// # Safety
/// `session` is NULL or an open session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_session_descriptor(session: *const SlimSession) -> c_int {
    // SAFETY: promised by the caller.
    unsafe {
        on("slim_session_descriptor", session, |session| {
            Ok(session.session.descriptor().as_raw_fd() as isize)
        }) as c_int
    }
}

/// Stores the updates since the last call in `updates`, an array with room for `room` of them, and returns their number. Does not wait.
/// Sends posted bytes, finds idle connections that have died, and calls the callback for events. Each change is reported once, as by
/// edge-triggered epoll: on SLIM_UPDATE_READABLE receive until SLIM_ERR_AGAIN, or remember that there is more. If it returns `room`, call
/// it again before you wait for the descriptor.
///
/// Or returns SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread; concurrent calls divide the updates between them.
///
/// # Safety
/// `session` is NULL or an open session; `updates` points to `room` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_session_progress(
    session: *const SlimSession,
    updates: *mut SlimUpdate,
    room: usize,
) -> c_int {
    // SAFETY: promised by the caller.
    unsafe {
        on("slim_session_progress", session, |session| {
            let into = array(updates, room)?;
            session.gather();
            Ok(session.shared.take(into) as isize)
        }) as c_int
    }
}

/// Like slim_session_progress(), but waits until there is an update, at most `timeout_ms` milliseconds (negative: no limit). Returns 0 if
/// there was none.
///
/// # Safety
/// As for slim_session_progress().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_session_wait(
    session: *const SlimSession,
    updates: *mut SlimUpdate,
    room: usize,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: promised by the caller.
    unsafe {
        on("slim_session_wait", session, |session| {
            let into = array(updates, room)?;
            session.wait(limit(timeout_ms));
            Ok(session.shared.take(into) as isize)
        }) as c_int
    }
}

impl SlimSession {
    fn gather(&self) {
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let mut updates = mem::take(&mut *scratch);
        drop(scratch);
        // Calls the callback, so no lock is held.
        self.session.progress(&mut updates);
        self.shared.gather(&updates);
        updates.clear();
        *self.scratch.lock().unwrap_or_else(PoisonError::into_inner) = updates;
    }

    /// Waits until the program can take an update.
    fn wait(&self, limit: Option<Duration>) {
        let until = limit.and_then(|limit| Instant::now().checked_add(limit));
        loop {
            self.gather();
            let left = until.map(|at| at.saturating_duration_since(Instant::now()));
            if self.shared.has_pending() || left.is_some_and(|left| left.is_zero()) {
                return;
            }
            let left = left.map_or(i32::MAX as u128, |left| left.as_nanos().div_ceil(1_000_000));
            let left = match self.shared.has_closed_posts() {
                true => left.min(CLOSED_POSTS.as_millis()),
                false => left,
            };
            let left = Duration::from_millis(left.try_into().unwrap_or(i32::MAX as u64));
            slim_sys::poll(self.session.as_raw_fd(), libc::POLLIN, Some(left));
        }
    }
}

/// An array that the program gives for results.
///
/// # Safety
/// `at` is NULL, or points to `room` elements that live as long as the call.
unsafe fn array<'a, T>(at: *mut T, room: usize) -> Result<&'a mut [MaybeUninit<T>], Refusal> {
    match (at.is_null(), room) {
        (_, 0) => Ok(&mut []),
        (true, _) => Err(Refusal::INVALID),
        // SAFETY: promised by the caller.
        (false, room) => Ok(unsafe { slice::from_raw_parts_mut(at.cast(), room) }),
    }
}

/// Sets the callback for events, in place of an earlier one. Only slim_session_progress() and slim_session_wait() call it, in the thread
/// that called them, with `arg`. It stays until the session is closed. The event is valid during the callback.
///
/// Returns 0, SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread; the callback must be fit for each thread that calls the two functions.
///
/// # Safety
/// `session` is NULL or an open session; `callback` may be called with `arg` as long as the session is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_session_on_event(
    session: *const SlimSession,
    callback: SlimEventCallback,
    arg: *mut c_void,
) -> c_int {
    // SAFETY: promised by the caller.
    unsafe {
        on("slim_session_on_event", session, |session| {
            let callback = callback.ok_or(Refusal::INVALID)?;
            let (shared, arg) = (session.shared.clone(), Mutex::new(UserPointer(arg)));
            session.session.on_event(move |event| {
                let event = event_of(&shared, event);
                let arg = arg.lock().unwrap_or_else(PoisonError::into_inner).0;
                guard::in_callback(|| callback(&event, arg));
            });
            Ok(0)
        }) as c_int
    }
}

fn event_of(shared: &SessionShared, event: &SessionEvent) -> SlimEvent {
    SlimEvent::new(event.flow, shared.context(event.flow), event.change)
}

/// Stores the oldest events in `events`, an array with room for `room` of them, and returns their number. An event is returned once. The
/// session keeps the last 4096 events; with a callback it keeps none.
///
/// Or returns SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread.
///
/// # Safety
/// `session` is NULL or an open session; `events` points to `room` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_session_events(
    session: *const SlimSession,
    events: *mut SlimEvent,
    room: usize,
) -> c_int {
    // SAFETY: promised by the caller.
    unsafe {
        on("slim_session_events", session, |session| {
            let into = array(events, room)?;
            let taken = session.session.take_events(into.len());
            for (to, event) in into.iter_mut().zip(&taken) {
                to.write(event_of(&session.shared, event));
            }
            Ok(taken.len() as isize)
        }) as c_int
    }
}

/// Stores the session's counters in `*stats`: sums over its flows, closed ones included. `size` is sizeof(*stats).
///
/// Returns 0, SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread.
///
/// # Safety
/// `session` is NULL or an open session; `stats` points to `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_session_stats(
    session: *const SlimSession,
    stats: *mut SlimStats,
    size: usize,
) -> c_int {
    // SAFETY: promised by the caller.
    unsafe {
        on("slim_session_stats", session, |session| {
            copy_out(&session.session.stats().into(), stats, size)
        }) as c_int
    }
}

/// Opens an endpoint, which accepts flows at this IPv4 or IPv6 address; with port 0 the kernel chooses a port. Stores the endpoint in
/// `*endpoint`; close it by slim_endpoint_close().
///
/// Returns 0, SLIM_ERR_KERNEL (for example with `errno` EADDRINUSE), SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread.
///
/// # Safety
/// `session` is NULL or an open session; `addr` points to `addrlen` bytes, `endpoint` to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_listen(
    session: *const SlimSession,
    addr: *const sockaddr,
    addrlen: socklen_t,
    endpoint: *mut *mut SlimEndpoint,
) -> c_int {
    // SAFETY: promised by the caller.
    unsafe {
        on("slim_listen", session, |session| {
            if endpoint.is_null() {
                return Err(Refusal::INVALID);
            }
            let opened = session.session.listen(address::read(addr, addrlen)?)?;
            *endpoint = SlimEndpoint::new(opened, &session.shared);
            Ok(0)
        }) as c_int
    }
}

/// Opens a flow to an endpoint, or to any TCP server, and stores it in `*flow`; close it by slim_flow_close(). Waits at most `timeout_ms`
/// milliseconds until the connection is established (negative: no limit). With 0 it does not wait: the flow is SLIM_STATE_CONNECTING, and
/// an update reports the connection, or its failure. An established flow is SLIM_STATE_NEGOTIATING until the peer has answered whether it
/// has SLIM; slim_flow_wait_negotiated() waits for that.
///
/// Returns 0, SLIM_ERR_TIMEOUT, SLIM_ERR_KERNEL (for example with `errno` ECONNREFUSED), SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread.
///
/// # Safety
/// `session` is NULL or an open session; `addr` points to `addrlen` bytes, `flow` to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_connect(
    session: *const SlimSession,
    addr: *const sockaddr,
    addrlen: socklen_t,
    timeout_ms: c_int,
    flow: *mut *mut SlimFlow,
) -> c_int {
    // SAFETY: promised by the caller.
    unsafe {
        on("slim_connect", session, |session| {
            if flow.is_null() {
                return Err(Refusal::INVALID);
            }
            let to = address::read(addr, addrlen)?;
            let opened = match timeout_ms {
                0 => session.session.try_connect(to)?,
                _ => session.session.connect(to, limit(timeout_ms))?,
            };
            *flow = SlimFlow::new(opened, &session.shared);
            Ok(0)
        }) as c_int
    }
}

/// Opens a flow to the endpoint with this blob (slim_endpoint_blob()), and stores it in `*flow`; close it by slim_flow_close(). The flow
/// is protected from the beginning, without negotiation. Waits at most `timeout_ms` milliseconds until the endpoint has accepted the
/// flow, and tries one address of the endpoint after the other (negative: no limit). With 0 it tries only the first address and does not
/// wait: the flow is SLIM_STATE_CONNECTING, and goes on while the program is in slim_session_progress() or waits in a call of this session.
///
/// Returns 0, SLIM_ERR_TIMEOUT, SLIM_ERR_BLOB, SLIM_ERR_JOB, SLIM_ERR_KERNEL (with `errno` ECONNREFUSED: the endpoint is closed, or does
/// not recognize this process as one of its job), SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread.
///
/// # Safety
/// `session` is NULL or an open session; `blob` points to `len` bytes, `flow` to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slim_connect_blob(
    session: *const SlimSession,
    blob: *const c_void,
    len: usize,
    timeout_ms: c_int,
    flow: *mut *mut SlimFlow,
) -> c_int {
    // SAFETY: promised by the caller.
    unsafe {
        on("slim_connect_blob", session, |session| {
            if flow.is_null() || blob.is_null() {
                return Err(Refusal::INVALID);
            }
            let blob = slice::from_raw_parts(blob.cast::<u8>(), len);
            let opened = match timeout_ms {
                0 => session.session.try_connect_blob(blob)?,
                _ => session.session.connect_blob(blob, limit(timeout_ms))?,
            };
            *flow = SlimFlow::new(opened, &session.shared);
            Ok(0)
        }) as c_int
    }
}
