//! Descriptor numbers: close, dup, exec, passing to others.

use crate::flow::{Ctl, Flow, Mode, Then};
use crate::table::{self, Entry};
use crate::transport::{self, CtlGuard};
use crate::{epoll, flow, listeners, options, runtime, stand_in, sys};
use libc::c_int;
use slim_core::stash::Stash;
use slim_core::{FinHow, Verdict};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Whether a number is SLIM's own: for the application it does not exist.
pub fn is_ours(fd: c_int) -> bool {
    is_internal(fd) && !runtime::is_our_call()
}

/// Whether a number is SLIM's own, also for its own calls.
pub fn is_internal(fd: c_int) -> bool {
    slim_sys::fds::is_internal(fd) || stand_in::is_ours(fd)
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
            let taken = flow.own_at(fd).map(|ctl| part(flow, ctl, fd));
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
            let at = listeners::remove(fd);
            let r = real();
            listeners::unlisten(at);
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

/// The kernel has given out a number that the table knows: what was there has been closed where no hook saw it.
#[cold]
pub fn closed_unseen(fd: c_int) {
    if runtime::is_our_call() {
        return;
    }
    if !runtime::in_own_process() {
        return sys::direct::numbers_differ();
    }
    match table::entry(fd) {
        Entry::None => {}
        Entry::Flow(flow) => drop(flow.own()),
        Entry::Listener => listeners::unlisten(listeners::remove(fd)),
        Entry::Epoll(instance) => {
            table::clear(fd);
            instance.closed(fd);
        }
        Entry::Inherited => table::clear(fd),
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
    table::release(fd, flow);
    let exposed = ctl.exposed().is_some();
    ctl.fds.retain(|n| *n != fd);
    if ctl.is_held() {
        epoll::keep_closed(flow, &mut ctl, fd);
    }
    // The stand-in of a stash is one file for all flows: the kernel does not drop what is registered with it by itself.
    if ctl.shows_stash() {
        sys::keep_errno(|| epoll::outlived(fd, &ctl.epolls));
    }
    for e in &ctl.epolls {
        // While the transport is away the kernel has no registration to drop by itself.
        e.forget(fd);
    }
    if ctl.is_held() {
        return Left::Nothing;
    }
    // What a child has, too, stays registered for as long as the child has it.
    if flow.forked.load(Ordering::Relaxed) {
        epoll::drop_closed(flow, &mut ctl);
    } else {
        epoll::end_closed(flow, &mut ctl);
    }
    let epolls = std::mem::take(&mut ctl.epolls);
    ctl.uncover(flow);
    flow.stream.give_back_pass();
    if !flow.live.load(Ordering::Acquire) && ctl.mode() == Mode::Open {
        transport::hear(flow, &mut ctl, flow.stream.received());
    }
    let established = flow.was_established(fd) || ctl.mode() != Mode::Open;
    let sent = flow.stream.sent_in_time();
    // Where nobody can tell where our stream ends, the kernel says it alone.
    let plain = flow.forked.load(Ordering::Relaxed) || !established;
    let Some(sent) = sent.filter(|_| !plain) else {
        drop_transport(&mut ctl);
        ctl.linger();
        flow.live.store(false, Ordering::Release);
        runtime::with_agent(|a| a.demote(flow.token()));
        return Left::Shared;
    };
    let lingers = lingers(fd);
    let unread =
        !ctl.receiving.stash.is_empty() || (ctl.mode() == Mode::Open && sys::readable(fd) > 0);
    let how = if unread || lingers == Some(0) {
        FinHow::Reset
    } else {
        FinHow::Close
    };
    flow.stream.end_at(sent);
    let end = flow.stream.local_final().unwrap_or(sent);
    let unacked = (ctl.mode() == Mode::Open && lingers.is_none()).then(|| sys::unacked(fd));
    // Announced before the kernel sends anything of it: who asks us about an unexpected end of stream must not be
    // told that the flow is open.
    let plainly = how == FinHow::Close && unacked == Some(Ok(0));
    if !(plainly && say_closed(flow, &ctl, end)) {
        runtime::with_agent(|a| a.finish(flow.token(), end, how));
    }
    if how == FinHow::Reset {
        drop_transport(&mut ctl);
    }
    ctl.receiving.stash = Stash::new();
    let mut kept = None;
    match ctl.mode() {
        _ if how == FinHow::Reset => {}
        // Undelivered bytes stay with the agent, who goes on if the transport breaks. A close that lingers is
        // left to the kernel.
        Mode::Open if unacked.is_some_and(|n| n.is_ok_and(|n| n > 0)) => {
            kept = sys::dup_high(fd).ok();
            if let Some(kept) = kept {
                epoll::outlived(fd, &epolls);
                sys::shutdown(kept, libc::SHUT_WR);
            }
        }
        Mode::Stashed { .. } => {
            if let Some(fd) = ctl.transport() {
                sys::shutdown(fd, libc::SHUT_WR);
            }
        }
        Mode::Suspended if exposed && !ctl.receiving.is_drained() => {
            transport::keep(flow, &mut ctl, fd)
        }
        _ => {}
    }
    // The gate of a lingering flow tells whether it has a transport.
    if ctl.mode() != Mode::Suspended || how == FinHow::Reset {
        flow.stream.open();
    }
    ctl.linger();
    if kept.is_some() {
        ctl.set_transport(kept);
    }
    Left::Last(how)
}

/// Closes the transport that waits until the stash is read. It is reset if the stash is not: the kernel, who would do that for
/// unread bytes of its own, does not know of these.
fn drop_transport(ctl: &mut Ctl) {
    if let Some(waiting) = ctl.transport().filter(|_| !ctl.receiving.stash.is_empty()) {
        sys::set_option(waiting, libc::SOL_SOCKET, libc::SO_LINGER, &sys::AT_ONCE);
    }
    ctl.set_transport(None);
}

/// Tells the peer that the flow is closed after `end` bytes, all of which it has, or finds that it need not be told. False if
/// the agent has to.
fn say_closed(flow: &Flow, ctl: &Ctl, end: u64) -> bool {
    if ctl.mode() != Mode::Open
        || ctl.receiving.has_moved()
        || (ctl.opened.is_none() && !ctl.receiving.peer_closed)
    {
        return false;
    }
    let told = runtime::with_agent(|a| {
        let told = ctl.receiving.peer_closed
            || ctl
                .opened
                .as_ref()
                .zip(ctl.ends())
                .is_some_and(|(opened, (local, _))| a.say_closed(opened, local, end));
        if told {
            a.finish_told(flow.token(), end);
        }
        told
    });
    told == Some(true)
}

/// For how long `close` waits, if the application has set that; 0 resets the connection.
fn lingers(fd: c_int) -> Option<c_int> {
    let linger: libc::linger = sys::option(fd, libc::SOL_SOCKET, libc::SO_LINGER)?;
    (linger.l_onoff != 0).then_some(linger.l_linger)
}

/// What the peer sees when the kernel closes the transport under `fd`.
pub fn how_closed(fd: c_int) -> FinHow {
    if sys::readable(fd) > 0 || lingers(fd) == Some(0) {
        FinHow::Reset
    } else {
        FinHow::Close
    }
}

/// After the real close.
pub fn finish(flow: &'static Flow, left: Left) {
    match left {
        Left::Nothing => {}
        Left::Last(how) => {
            let token = flow.token();
            flow.stream.wake();
            if how == FinHow::Reset {
                runtime::with_agent(|a| a.gone(token));
            }
            flow.drop_ref();
        }
        Left::Shared => {
            flow.stream.wake();
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
        && ctl.mode() == Mode::Suspended
    {
        let seen = flow.stream.signal();
        drop(ctl);
        let left = limit.saturating_duration_since(Instant::now());
        if left.is_zero() || enough() {
            break;
        }
        let _ = flow.stream.wait(seen, Some(left));
    }
}

/// The flow behind `fd` becomes plain TCP here and at the peer. Where that cannot be, because the transport is away or
/// bytes are stashed, it is a connection that was reset after these bytes.
pub fn demote(flow: &'static Flow, fd: c_int) {
    let Some(ctl) = flow.own_at(fd) else { return };
    let token = flow.token();
    if ctl.mode() == Mode::Open {
        transport::unmanage(flow, ctl);
    } else {
        drop(ctl);
        transport::escalate(flow, Verdict::Errno(libc::ECONNRESET));
    }
    runtime::with_agent(|a| a.demote(token));
}

/// The flow behind `fd`, if it has a transport, becomes plain TCP here, and the peer is told so before anything else is sent. One
/// that has bytes stashed keeps them until they are read.
pub fn demote_if_open(flow: &'static Flow, fd: c_int) {
    let Some(ctl) = flow.ctl_of(fd) else { return };
    let token = flow.token();
    match ctl.mode() {
        Mode::Open => transport::unmanage(flow, ctl),
        Mode::Stashed { then: Then::Open } if !ctl.is_plain() => {
            drop(ctl);
            transport::become_plain(flow);
        }
        _ => return,
    }
    runtime::with_agent(|a| {
        a.demote(token);
        a.flush(TELLING);
    });
}

/// [`demote_if_open`], before an urgent byte is sent: the peer has heard it before that, if it answers in time. What it has
/// read aside, and where the mark is, would be lost if it had to resume the connection.
pub fn demote_for_urgent(flow: &'static Flow, fd: c_int, flags: c_int) {
    let is_ours = || {
        let ctl = flow.ctl_of(fd)?;
        let ours = ctl.mode() == Mode::Open || ctl.mode() == Mode::Stashed { then: Then::Open };
        (ours && !ctl.is_plain()).then(|| sys::is_nonblocking(ctl.flags_of(fd)))
    };
    let Some(nonblocking) = is_ours() else { return };
    let at_once = nonblocking || flags & libc::MSG_DONTWAIT != 0;
    let limit = Instant::now() + runtime::time_to_answer(at_once);
    let token = flow.token();
    if flow.live.load(Ordering::Acquire) {
        runtime::with_agent(|a| a.demote_heard(token));
        loop {
            let seen = flow.stream.signal();
            let left = limit.saturating_duration_since(Instant::now());
            if is_ours().is_none() || left.is_zero() {
                break;
            }
            let _ = flow.stream.wait(seen, Some(left));
        }
    }
    demote_if_open(flow, fd);
}

/// How long the agent is given to send the peer what it is to know.
const TELLING: Duration = Duration::from_millis(100);

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
            let ctl = flow.own_at(to)?;
            Some((flow, part(flow, ctl, to)))
        }
        Entry::Listener => {
            listeners::unlisten(listeners::remove(to));
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
        if to.is_some_and(table::is_flow) {
            sys::direct::numbers_differ();
        }
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
        flow::given_out(new);
        return new;
    }
    // From a bad descriptor, or to a number beyond the limit on open files, which was lowered: refused, and the target is
    // left alone.
    if !sys::is_open(from)
        || to.is_some_and(|to| !sys::keep_errno(|| slim_sys::limit::may_be_given_out(to)))
    {
        return real();
    }
    if let (Entry::Flow(flow), Some(to)) = (&source, to)
        && has_stream(to)
    {
        sys::keep_errno(|| hand_over(flow, from));
    }
    let mut guard = match source {
        Entry::Flow(flow) => flow.own_at(from).map(|ctl| (flow, ctl)),
        _ => None,
    };
    let same = matches!((&source, &target), (Entry::Flow(a), Some(Entry::Flow(b))) if std::ptr::eq(*a, *b));
    if same {
        return real();
    }
    let left = to.and_then(overwrite);
    let new = real();
    note_number(new);
    let before = table::entry(new);
    if new >= 0 {
        match (&source, &mut guard) {
            (Entry::Flow(_), Some((flow, ctl))) => {
                if table::set_flow(new, flow) {
                    ctl.add_number(new);
                    sys::keep_errno(|| epoll::take_back(flow, ctl, new));
                }
            }
            (Entry::Listener, _) => listeners::duplicated(from, new),
            (Entry::Epoll(instance), _) => {
                instance.duplicated(new);
                table::set_epoll(new, instance);
            }
            (Entry::Inherited, _) if has_stream(new) => {
                // No hook will see what is done with it: the parent is told now.
                let _ = table::flow(from);
            }
            (Entry::Inherited, _) => table::inherited_again(from, new),
            (Entry::None, _) | (Entry::Flow(_), None) => {}
        }
    }
    drop(guard);
    if let (None, Entry::Flow(closed)) = (to, before) {
        sys::keep_errno(|| drop(closed.own()));
    }
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

/// `close_range` for a thread that gets a table of descriptors of its own: what means something to us, or is ours, is
/// closed like all else.
pub fn close_range_apart(first: u32, last: u32, real: impl FnOnce() -> c_int) -> c_int {
    if !runtime::in_own_process() {
        return real();
    }
    crate::process::before_other_numbers();
    let r = real();
    if r == 0 && !runtime::possible() {
        for fd in first..=last.min(slim_sys::fds::LIMIT as u32 - 1) {
            let fd = fd as c_int;
            if is_internal(fd) && !sys::keep_errno(|| sys::is_open(fd)) {
                slim_sys::fds::release(fd);
                stand_in::closed(fd);
            }
        }
    }
    r
}

/// All numbers that are open.
pub fn open_numbers() -> Vec<c_int> {
    let mut all = Vec::new();
    sys::for_each_open(|fd| all.push(fd));
    all
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

/// Before the first descriptor of ours above those of the application: what the kernel says of the process.
pub fn note_table_size(status: &str) {
    let size = runtime::number_in(status, "FDSize:");
    PLACES.fetch_max(size.unwrap_or(sys::TABLE_MIN), Ordering::Relaxed);
}

/// How many places the table would have without our descriptors: what is beyond them, `select` does not look at. It
/// grows by powers of two, and never shrinks.
pub fn table_size() -> c_int {
    // One of ours that is just being made is up there, and not known to be ours yet.
    let floor = slim_sys::fds::floor();
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
        libc::F_GETFL => on_flags(fd, real),
        libc::F_SETFL => match table::flow(fd) {
            Some(flow) => flow.set_mode(fd, real),
            None => on_flags(fd, real),
        },
        libc::F_SETOWN | libc::F_GETOWN | F_SETSIG | F_GETSIG | F_SETOWN_EX | F_GETOWN_EX => {
            options::owned();
            on_transport(fd, real)
        }
        _ => real(fd),
    }
}

/// As in `asm-generic/fcntl.h`.
const F_SETSIG: c_int = 10;
const F_GETSIG: c_int = 11;
const F_SETOWN_EX: c_int = 15;
const F_GETOWN_EX: c_int = 16;

/// The control part of the flow behind `fd`. Who is given a descriptor of ours uses it with this held: another thread may
/// close it.
fn ctl_of(fd: c_int) -> Option<CtlGuard> {
    match table::entry(fd) {
        Entry::Flow(flow) => flow.ctl_of(fd),
        _ => None,
    }
}

/// Runs `f` on the descriptor that has the status flags of `fd`. The always-ready stand-in is one file for many flows: its
/// flags are nobody's.
fn on_flags(fd: c_int, f: impl FnOnce(c_int) -> c_int) -> c_int {
    let ctl = ctl_of(fd);
    f(ctl.as_ref().map_or(fd, |ctl| ctl.flags_of(fd)))
}

/// Runs `f` on the descriptor of the transport whose state a new one takes over: mostly the number itself.
pub fn on_transport(fd: c_int, f: impl FnOnce(c_int) -> c_int) -> c_int {
    let ctl = ctl_of(fd);
    f(ctl.as_ref().map_or(fd, |ctl| ctl.kept_under(fd)))
}
