//! Descriptor numbers: close, dup, exec, passing to others.

use crate::flow::{Flow, Mode, UNKNOWN};
use crate::table::{self, Entry};
use crate::transport::{self, CtlGuard};
use crate::{runtime, stand_in, sys};
use libc::c_int;
use slim_core::stash::Stash;
use slim_core::{FinHow, Verdict};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Whether a number is SLIM's own: for the application it does not exist.
pub fn is_ours(fd: c_int) -> bool {
    (slim_agent::fds::is_internal(fd) || stand_in::is_ours(fd)) && !runtime::is_our_call()
}

/// `close`; `real` closes the number.
pub fn close(fd: c_int, real: impl Fn() -> c_int) -> c_int {
    if is_ours(fd) && runtime::in_own_process() {
        sys::set_errno(libc::EBADF);
        return -1;
    }
    if has_stream(fd) && runtime::in_own_process() {
        // A stream that is left without its number is of no use.
        stream(fd, false);
    }
    match table::entry(fd) {
        Entry::None => real(),
        _ if !runtime::in_own_process() => real(),
        Entry::Flow(flow) => {
            let errno = sys::errno();
            let taken = flow.ctl_of(fd).map(|ctl| part(flow, ctl, fd));
            let r = real();
            match (taken, r) {
                (Some(left), 0) => {
                    finish(flow, left);
                    sys::set_errno(errno);
                }
                (Some(left), _) => finish(flow, left),
                _ => {}
            }
            r
        }
        Entry::Listener => {
            let at = crate::addr::RawAddr::local(fd).and_then(|a| a.internet());
            table::clear(fd);
            let r = real();
            if let Some(at) = at {
                sys::keep_errno(|| runtime::with_agent(|a| a.unlisten(at)));
            }
            r
        }
        Entry::Epoll(instance) => {
            table::clear(fd);
            instance.closed(fd);
            real()
        }
        Entry::Inherited => {
            table::clear(fd);
            real()
        }
    }
}

/// What is to happen once a number is closed.
pub enum Left {
    /// Nothing: other numbers remain, or the flow was plain already.
    Nothing,
    /// The last number: the session ends this way.
    Last(FinHow),
    /// The last number, but the connection may live on in another process.
    Shared,
}

/// A number leaves its flow. The real close comes after it, then [`finish`].
pub fn part(flow: &'static Flow, mut ctl: CtlGuard, fd: c_int) -> Left {
    for e in &ctl.epolls {
        // While the transport is away the kernel has no registration to drop by itself.
        e.forget(fd);
    }
    table::clear(fd);
    let exposed = ctl.exposed().is_some();
    ctl.fds.retain(|n| *n != fd);
    if !ctl.fds.is_empty() {
        return Left::Nothing;
    }
    ctl.epolls.clear();
    ctl.uncover(flow);
    let established = flow.was_established(fd) || ctl.mode != Mode::Open;
    if flow.forked.load(Ordering::Relaxed) || !established || !flow.live.load(Ordering::Acquire) {
        ctl.set_transport(None);
        ctl.mode = Mode::Lingering;
        runtime::with_agent(|a| a.demote(flow.token()));
        return Left::Shared;
    }
    let sent = flow.with_half(|s| s.replay.end());
    let linger: Option<libc::linger> = sys::option(fd, libc::SOL_SOCKET, libc::SO_LINGER);
    let hard = linger.is_some_and(|l| l.l_onoff != 0);
    let unread = !ctl.stash.is_empty() || (ctl.mode == Mode::Open && sys::readable(fd) > 0);
    let how = if unread || linger.is_some_and(|l| l.l_onoff != 0 && l.l_linger == 0) {
        FinHow::Reset
    } else {
        FinHow::Close
    };
    let _ = flow
        .local_final
        .compare_exchange(UNKNOWN, sent, Ordering::SeqCst, Ordering::SeqCst);
    let end = flow.local_final.load(Ordering::SeqCst);
    // Announced before the kernel sends anything of it: who asks us about an unexpected end of stream must not be
    // told that the flow is open.
    runtime::with_agent(|a| a.finish(flow.token(), end, how));
    ctl.stash = Stash::new();
    match ctl.mode {
        _ if how == FinHow::Reset => ctl.set_transport(None),
        // Undelivered bytes stay with the agent, who goes on if the transport breaks. A close that lingers is
        // left to the kernel.
        Mode::Open if !hard && sys::unacked(fd).is_ok_and(|n| n > 0) => {
            let kept = sys::dup_high(fd).ok();
            if let Some(kept) = kept {
                sys::shutdown(kept, libc::SHUT_WR);
            }
            ctl.set_transport(kept);
        }
        Mode::Stashed { .. } => {
            if let Some(fd) = ctl.transport {
                sys::shutdown(fd, libc::SHUT_WR);
            }
        }
        Mode::Suspended if exposed && !ctl.drained => transport::keep(flow, &mut ctl, fd),
        _ => {}
    }
    // The gate of a lingering flow tells whether it has a transport.
    if ctl.mode != Mode::Suspended || how == FinHow::Reset {
        flow.gate.open();
    }
    ctl.mode = Mode::Lingering;
    Left::Last(how)
}

/// After the real close.
pub fn finish(flow: &'static Flow, left: Left) {
    match left {
        Left::Nothing => {}
        Left::Last(how) => {
            let token = flow.token();
            flow.wake();
            if how == FinHow::Reset {
                runtime::with_agent(|a| a.gone(token));
            }
            flow.drop_ref();
        }
        Left::Shared => {
            flow.wake();
            flow.drop_ref();
        }
    }
}

/// Somebody whom we cannot see is to use `fd`: the flow becomes plain TCP. A transport that is away is waited for
/// a while first.
pub fn hand_over(flow: &'static Flow, fd: c_int) {
    hand_over_until(flow, fd, Instant::now() + PATIENCE);
}

/// How long a transport that is away is waited for before its flow is given up.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// [`hand_over`], waiting until `limit`.
pub fn hand_over_until(flow: &'static Flow, fd: c_int, limit: Instant) {
    transport::notice(flow, fd);
    wait_while_away(flow, fd, limit, || false);
    demote(flow, fd);
}

/// Waits until the flow behind `fd` has a transport again or is given up, `enough` holds, or `limit` has come.
pub fn wait_while_away(flow: &'static Flow, fd: c_int, limit: Instant, enough: impl Fn() -> bool) {
    while let Some(ctl) = flow.ctl_of(fd)
        && ctl.mode == Mode::Suspended
    {
        let seen = flow.signal.load(Ordering::SeqCst);
        drop(ctl);
        let left = limit.saturating_duration_since(Instant::now());
        if left.is_zero() || enough() {
            break;
        }
        let _ = flow.wait(seen, Some(left));
    }
}

/// The flow behind `fd` becomes plain TCP here and at the peer. Where that cannot be, because the transport is away or
/// bytes are stashed, it is a connection that was reset after these bytes.
pub fn demote(flow: &'static Flow, fd: c_int) {
    let Some(ctl) = flow.ctl_of(fd) else { return };
    let token = flow.token();
    if ctl.mode == Mode::Open {
        transport::unmanage(flow, ctl);
    } else {
        drop(ctl);
        transport::escalate(flow, Verdict::Errno(libc::ECONNRESET));
    }
    runtime::with_agent(|a| a.demote(token));
}

/// Before libc reads or writes a descriptor where no hook sees it.
pub fn for_stdio(fd: c_int) {
    if let Entry::Flow(flow) = table::entry(fd) {
        sys::keep_errno(|| hand_over(flow, fd));
    }
}

/// libc's stdio has a stream for this number. What comes under it, by `connect` or `dup2`, stays plain TCP.
pub fn stdio(fd: c_int) {
    for_stdio(fd);
    stream(fd, true);
}

/// The stream is about to be closed, and the number with it.
pub fn no_stdio(fd: c_int) {
    stream(fd, false);
}

/// Numbers that have a stream of libc's; the standard ones always do.
static STREAMS: [AtomicU64; 1024] = [const { AtomicU64::new(0) }; 1024];

fn stream(fd: c_int, has: bool) {
    if let Some(word) = STREAMS.get(fd as u32 as usize / 64) {
        let bit = 1 << (fd % 64);
        if has {
            word.fetch_or(bit, Ordering::Relaxed);
        } else {
            word.fetch_and(!bit, Ordering::Relaxed);
        }
    }
}

/// Whether libc may read or write this number where no hook sees it.
pub fn has_stream(fd: c_int) -> bool {
    let word = STREAMS.get(fd as u32 as usize / 64);
    (0..=2).contains(&fd) || word.is_some_and(|w| w.load(Ordering::Relaxed) >> (fd % 64) & 1 == 1)
}

/// Before `dup2`/`dup3` takes the number `to` over: gives what [`finish`] needs afterwards.
pub fn overwrite(to: c_int) -> Option<(&'static Flow, Left)> {
    match table::entry(to) {
        Entry::Flow(flow) => {
            let ctl = flow.ctl_of(to)?;
            Some((flow, part(flow, ctl, to)))
        }
        Entry::Listener => {
            let at = crate::addr::RawAddr::local(to).and_then(|a| a.internet());
            table::clear(to);
            if let Some(at) = at {
                runtime::with_agent(|a| a.unlisten(at));
            }
            None
        }
        Entry::Epoll(instance) => {
            table::clear(to);
            instance.closed(to);
            None
        }
        Entry::Inherited => {
            table::clear(to);
            None
        }
        Entry::None => None,
    }
}

/// `dup`, `dup2`, `dup3` and `fcntl(F_DUPFD)`: `real` makes the new number.
pub fn duplicate(from: c_int, to: Option<c_int>, real: impl Fn() -> c_int) -> c_int {
    if !runtime::in_own_process() {
        return real();
    }
    if is_ours(from) || to.is_some_and(is_ours) {
        sys::set_errno(libc::EBADF);
        return -1;
    }
    if to == Some(from) {
        return real();
    }
    let (source, target) = (table::entry(from), to.map(table::entry));
    if let (Entry::None, None | Some(Entry::None)) = (&source, &target) {
        let new = real();
        note_number(new);
        return new;
    }
    // From a bad descriptor: the target is left alone.
    if !sys::is_open(from) {
        return real();
    }
    if let (Entry::Flow(flow), Some(to)) = (&source, to)
        && has_stream(to)
    {
        sys::keep_errno(|| hand_over(flow, from));
    }
    let mut guard = match source {
        Entry::Flow(flow) => flow.ctl_of(from).map(|ctl| (flow, ctl)),
        _ => None,
    };
    let same = matches!((&source, &target), (Entry::Flow(a), Some(Entry::Flow(b))) if std::ptr::eq(*a, *b));
    if same {
        return real();
    }
    let left = to.and_then(overwrite);
    let new = real();
    note_number(new);
    if new >= 0 {
        match (&source, &mut guard) {
            (Entry::Flow(_), Some((flow, ctl))) => {
                if table::set_flow(new, flow) {
                    ctl.fds.push(new);
                }
            }
            (Entry::Listener, _) => table::set_listener(new),
            (Entry::Epoll(instance), _) => table::set_epoll(new, instance),
            (Entry::Inherited, _) | (Entry::None, _) | (Entry::Flow(_), None) => {}
        }
    }
    drop(guard);
    if let Some((flow, left)) = left {
        sys::keep_errno(|| finish(flow, left));
    }
    if has_stream(new) {
        for_stdio(new);
    }
    new
}

/// `close_range`, `closefrom`: closes the numbers one by one where any of them means something to us, and
/// leaves our own open. Gives false when the kernel can do the whole range.
pub fn close_each(first: u32, last: u32, one: impl Fn(c_int)) -> bool {
    if !runtime::in_own_process() {
        return false;
    }
    let open = open_numbers();
    let special = open.iter().any(|fd| {
        let n = *fd as u32;
        n >= first && n <= last && (is_ours(*fd) || !matches!(table::entry(*fd), Entry::None))
    });
    if !special {
        return false;
    }
    for fd in open
        .into_iter()
        .filter(|fd| (*fd as u32) >= first && (*fd as u32) <= last)
    {
        if !is_ours(fd) {
            one(fd);
        }
    }
    true
}

/// All numbers that are open.
pub fn open_numbers() -> Vec<c_int> {
    runtime::quietly(|| {
        let entries = std::fs::read_dir("/proc/self/fd")
            .into_iter()
            .flatten()
            .flatten();
        entries
            .filter_map(|e| e.file_name().to_str()?.parse().ok())
            .collect()
    })
}

/// How many places the kernel's table of descriptors has, as proc(5) tells it.
static PLACES: AtomicI32 = AtomicI32::new(sys::TABLE_MIN);

/// The application has got this number.
fn note_number(fd: c_int) {
    if fd >= sys::TABLE_MIN {
        let places = (fd as u32 + 1).next_power_of_two() as c_int;
        PLACES.fetch_max(places, Ordering::Relaxed);
    }
}

/// Before the first descriptor of ours above those of the application.
pub fn note_table_size() {
    let status = runtime::quietly(|| std::fs::read_to_string("/proc/self/status"));
    let size = status.ok().and_then(|text| {
        let line = text.lines().find_map(|l| l.strip_prefix("FDSize:"))?;
        line.trim().parse().ok()
    });
    PLACES.fetch_max(size.unwrap_or(sys::TABLE_MIN), Ordering::Relaxed);
}

/// How many places the table would have without our descriptors: what is beyond them, `select` does not look at. It
/// grows by powers of two, and never shrinks.
pub fn table_size() -> c_int {
    // One of ours that is just being made is up there, and not known to be ours yet.
    let floor = slim_agent::fds::floor();
    let open = open_numbers()
        .into_iter()
        .filter(|fd| *fd < floor && !is_ours(*fd));
    if let Some(last) = open.max() {
        note_number(last);
    }
    PLACES.load(Ordering::Relaxed)
}

/// `fcntl`; `real(fd)` asks the kernel.
pub fn control(fd: c_int, command: c_int, real: impl Fn(c_int) -> c_int) -> c_int {
    match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC if runtime::is_our_call() => {
            runtime::out_of_the_way(real(fd))
        }
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => duplicate(fd, None, || real(fd)),
        libc::F_GETFL | libc::F_SETFL => {
            // The always-ready stand-in is one file for many flows: its flags are nobody's.
            let ctl = match table::entry(fd) {
                Entry::Flow(flow) => flow.ctl_of(fd),
                _ => None,
            };
            let to = ctl.map_or(fd, |ctl| ctl.flags_of(fd));
            match table::flow(fd).filter(|_| command == libc::F_SETFL) {
                Some(flow) => flow.set_mode(fd, || real(to)),
                None => real(to),
            }
        }
        _ => real(fd),
    }
}
