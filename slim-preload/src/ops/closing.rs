//! Numbers that are closed: by `close` and its like, because another file takes them, or where no hook sees it.

use crate::descriptors::{has_stream, is_internal, is_ours, open_numbers, set_stream};
use crate::flow::{Ctl, Flow, Mode};
use crate::table::{self, Entry};
use crate::transport::{self, CtlGuard};
use crate::{epoll, listeners, options, runtime, sys};
use libc::c_int;
use slim_core::FinHow;
use slim_core::stash::Stash;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// `close`; `real` closes the number.
pub fn close(fd: c_int, real: impl Fn() -> c_int) -> c_int {
    if is_internal(fd) && runtime::in_own_process() {
        if !runtime::is_our_call() {
            sys::set_errno(libc::EBADF);
            return -1;
        }
        // The runtime of an agent closes its own descriptors.
        slim_sys::fds::release(fd);
    }
    if has_stream(fd) && runtime::in_own_process() {
        // A stream whose number is closed is useless.
        set_stream(fd, false);
    }
    match table::entry(fd) {
        Entry::None => real(),
        _ if !runtime::in_own_process() => real(),
        Entry::Flow(flow) => {
            let errno = sys::errno();
            let taken = before_close(flow, fd);
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

/// The kernel has just given this number out: if the table has an entry, the number was closed where no hook saw it.
#[inline]
pub fn given_out(fd: c_int) {
    if table::is_known(fd) {
        sys::keep_errno(|| closed_unseen(fd));
    }
}

/// The kernel has given out a number that has an entry in the table: the number was closed where no hook saw it.
#[cold]
pub fn closed_unseen(fd: c_int) {
    if runtime::is_our_call() {
        return;
    }
    if !runtime::in_own_process() {
        return crate::direct::numbers_differ();
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

/// What has to be done after a number is closed.
pub enum AfterClose {
    /// Nothing: the flow has other numbers.
    Nothing,
    /// It was the last number: the flow ends this way. The call waits for so long, at most, if the agent has to deliver the rest.
    Last(FinHow, Duration),
    /// It was the last number, but the flow is plain TCP: another process may have the connection, or it was never established,
    /// or the end of our stream is unknown.
    Shared,
}

/// Removes a number from its flow, if the number is the flow's. The real close comes after it, then [`finish`].
fn before_close(flow: &'static Flow, fd: c_int) -> Option<AfterClose> {
    let lingers = lingers(fd);
    // A close with SO_LINGER is left to the kernel, which does not wait if the transport has died, even if nobody has noticed that.
    if lingers.is_some_and(|s| s > 0) && sys::tcp_state(fd) == Some(sys::TCP_CLOSE) {
        transport::notice(flow, fd);
    }
    let ctl = flow.own_at(fd)?;
    Some(remove_number(flow, ctl, fd, lingers, Closed::Now))
}

/// When a number is closed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Closed {
    Now,
    /// With the process. Until then the number is open, and most others, too: a number of SLIM's own may not be left for each.
    ByExit,
}

/// Removes a number, which has this SO_LINGER, from its flow.
fn remove_number(
    flow: &'static Flow,
    mut ctl: CtlGuard,
    fd: c_int,
    lingers: Option<c_int>,
    closed: Closed,
) -> AfterClose {
    table::release(fd, flow);
    let exposed = ctl.exposed().is_some();
    ctl.fds.retain(|n| *n != fd);
    if ctl.is_exclusive() {
        epoll::keep_closed(flow, &mut ctl, fd);
    }
    // The always-ready stand-in is one file for all flows, so it stays open, and the kernel keeps its epoll registrations.
    if ctl.shows_stash() {
        sys::keep_errno(|| epoll::outlived(fd, &ctl.epolls));
    }
    for e in &ctl.epolls {
        // While the transport is away the kernel has no registration, so nothing else removes it from the mirror.
        e.forget(fd);
    }
    if ctl.is_exclusive() {
        return AfterClose::Nothing;
    }
    let away = ctl.mode() == Mode::Suspended;
    let shared = flow.forked.load(Ordering::Relaxed) && is_shared(flow, &ctl, fd, lingers);
    // It stays registered for as long as the child has it.
    if shared {
        epoll::drop_closed(flow, &mut ctl);
    } else {
        epoll::end_closed(flow, &mut ctl);
    }
    let epolls = std::mem::take(&mut ctl.epolls);
    ctl.clear_suspension(flow);
    flow.stream.give_back_pass();
    if !flow.live.load(Ordering::Acquire) && ctl.mode() == Mode::Open {
        transport::read_mailbox(flow, &mut ctl, flow.stream.received());
    }
    let established = flow.was_established(fd) || ctl.mode() != Mode::Open;
    let sent = flow.stream.sent_in_time();
    // If the end of our stream is unknown, only the kernel can tell the peer.
    let plain = shared || !established;
    let Some(sent) = sent.filter(|_| !plain) else {
        drop_transport(&mut ctl);
        ctl.linger();
        flow.live.store(false, Ordering::Release);
        runtime::with_agent(|a| match away {
            // The peer must not take the end of a resumed transport for the end of the stream.
            true => a.out_of_step(flow.token()),
            false => a.demote(flow.token()),
        });
        return AfterClose::Shared;
    };
    ctl.transport()
        .into_iter()
        .chain([fd])
        .for_each(options::disown);
    // As the kernel judges, whether or not the break has been noticed.
    let queue = match ctl.mode() {
        Mode::Open => Some(fd),
        Mode::Suspended if !ctl.receiving.is_drained() => ctl.transport().or(exposed.then_some(fd)),
        _ => None,
    };
    let unread =
        !ctl.receiving.stash.is_empty() || queue.is_some_and(|queue| sys::readable(queue) > 0);
    let how = if unread || lingers == Some(0) {
        FinHow::Reset
    } else {
        FinHow::Close
    };
    flow.stream.end_at(sent);
    let end = flow.stream.local_final().unwrap_or(sent);
    let relayed = flow.stream.is_relayed();
    let ours = ctl.mode() == Mode::Open && (relayed || lingers.is_none());
    let unacked = ours.then(|| flow.stream.undelivered_on(fd));
    // The end is announced before the kernel sends it: a peer that asks about an unexpected end of stream must not be told that
    // the flow is open.
    let plainly = how == FinHow::Close && unacked == Some(Ok(0)) && !relayed;
    if !(plainly && announce_close(flow, &ctl, end)) {
        runtime::with_agent(|a| a.finish(flow.token(), end, how));
    }
    if how == FinHow::Reset {
        drop_transport(&mut ctl);
    }
    ctl.receiving.stash = Stash::new();
    let mut kept = None;
    match ctl.mode() {
        _ if how == FinHow::Reset => {}
        // The agent keeps undelivered bytes, and goes on if the transport breaks. A close with SO_LINGER is left to the kernel, except on a
        // relayed transport, where only the agent can tell the peer of the end.
        Mode::Open if relayed || unacked.is_some_and(|n| n.is_ok_and(|n| n > 0)) => {
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
        Mode::Suspended if exposed && !ctl.receiving.is_drained() => match closed {
            Closed::Now => transport::keep_transport(flow, &mut ctl, fd),
            Closed::ByExit => flow.stream.discard_unread(&mut ctl.receiving, fd),
        },
        _ => {}
    }
    let by_agent = relayed || ctl.mode() == Mode::Suspended;
    let wait = lingers.filter(|_| by_agent && how == FinHow::Close);
    // The gate of a lingering flow is open if the flow has a transport.
    if ctl.mode() != Mode::Suspended || how == FinHow::Reset {
        flow.stream.open();
    }
    ctl.linger();
    if kept.is_some() {
        ctl.set_transport(kept);
    }
    AfterClose::Last(how, wait.map_or(Duration::ZERO, seconds))
}

/// If a child has the connection, too, the stream does not end here. A child that has only inherited it does not count if it has closed it,
/// or has executed another program without it. That is found out only where bytes may be lost, because it takes long.
fn is_shared(flow: &Flow, ctl: &Ctl, fd: c_int, lingers: Option<c_int>) -> bool {
    match ctl.mode() {
        Mode::Suspended => is_held_elsewhere(flow, fd),
        Mode::Open if lingers.is_none() && has_own_bytes_under_way(flow, fd) => {
            sys::any_number_of_later_processes(|pid, number| is_under(flow, pid, number))
        }
        _ => true,
    }
}

/// Whether the peer's kernel may lack bytes of the open flow with the number `fd`, and this process has sent them. A server that forks for each
/// connection has sent none.
fn has_own_bytes_under_way(flow: &Flow, fd: c_int) -> bool {
    let unacked = flow.stream.undelivered_on(fd).unwrap_or(0);
    let sent = flow.stream.try_sent().unwrap_or(0);
    has_bytes_under_way(flow, fd) && unacked <= sent
}

/// Whether the peer's kernel may lack bytes of the open flow with the number `fd`.
pub fn has_bytes_under_way(flow: &Flow, fd: c_int) -> bool {
    flow.live.load(Ordering::Acquire) && flow.stream.undelivered_on(fd).is_ok_and(|n| n > 0)
}

/// Whether another process has the file that is under the flow's number `fd` here: a child that was forked while the connection was
/// open. It is looked for under the same number, and under the standard numbers. True if /proc does not tell.
pub fn is_held_elsewhere(f: &Flow, fd: c_int) -> bool {
    let (mut held, mut tells) = (false, false);
    sys::for_each_process(|pid| match pid == sys::pid() {
        true => tells |= is_under(f, pid, fd),
        false => held |= [fd, 0, 1, 2].into_iter().any(|n| is_under(f, pid, n)),
    });
    held || !tells
}

/// Whether the flow's file is under this number of a process.
fn is_under(flow: &Flow, pid: c_int, number: c_int) -> bool {
    let file = runtime::file_in(pid, number);
    file.is_some_and(|file| flow.is_file(file))
}

/// Closes the private transport. Resets it if stashed bytes are unread: the kernel does that only for unread bytes in its own
/// queue.
fn drop_transport(ctl: &mut Ctl) {
    if let Some(waiting) = ctl.transport().filter(|_| !ctl.receiving.stash.is_empty()) {
        sys::set_option(waiting, libc::SOL_SOCKET, libc::SO_LINGER, &sys::AT_ONCE);
    }
    ctl.set_transport(None);
}

/// Tells the peer that the flow is closed after `end` bytes, all of which the peer has; or finds that the peer need not be told. False
/// if the agent has to tell it.
fn announce_close(flow: &Flow, ctl: &Ctl, end: u64) -> bool {
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
                .is_some_and(|(opened, (local, _))| a.announce_close(opened, local, end));
        if told {
            a.finish_announced(flow.token(), end);
        }
        told
    });
    told == Some(true)
}

/// For how long `close` waits, if the application has set SO_LINGER; 0 resets the connection.
pub fn lingers(fd: c_int) -> Option<c_int> {
    let linger: libc::linger = sys::option(fd, libc::SOL_SOCKET, libc::SO_LINGER)?;
    (linger.l_onoff != 0).then_some(linger.l_linger)
}

fn seconds(n: c_int) -> Duration {
    Duration::from_secs(n.try_into().unwrap_or(0))
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
pub fn finish(flow: &'static Flow, left: AfterClose) {
    let wait = release(flow, left);
    if !wait.is_zero() {
        runtime::with_agent(|a| a.drain_exit(wait));
    }
}

/// Gives the flow to the agent; for how long the close waits.
fn release(flow: &'static Flow, left: AfterClose) -> Duration {
    match left {
        AfterClose::Nothing => Duration::ZERO,
        AfterClose::Last(how, wait) => {
            let token = flow.token();
            flow.stream.wake();
            if how == FinHow::Reset {
                runtime::with_agent(|a| a.gone(token));
            }
            flow.drop_ref();
            wait
        }
        AfterClose::Shared => {
            flow.stream.wake();
            flow.drop_ref();
            Duration::ZERO
        }
    }
}

/// The process is about to end, which closes the number: the flow ends as if it were closed now. SO_LINGER does not count then, for the
/// kernel, either.
pub fn leave(flow: &'static Flow, fd: c_int) {
    if let Some(ctl) = flow.own_at(fd) {
        let left = remove_number(flow, ctl, fd, lingers(fd), Closed::ByExit);
        release(flow, left);
    }
}

/// Before `dup2`/`dup3` takes the number `to` over: gives what [`finish`] needs afterwards.
pub fn overwrite(to: c_int) -> Option<(&'static Flow, AfterClose)> {
    match table::entry(to) {
        Entry::Flow(flow) => {
            let left = before_close(flow, to)?;
            Some((flow, left))
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

/// `close_range`, `closefrom`: closes the numbers one by one if SLIM manages or owns any of them, and leaves SLIM's own
/// open. Gives false when the kernel can close the whole range.
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
