//! Descriptor numbers: `dup` and `fcntl`.

use super::closing::{finish, given_out, lingers, overwrite};
use super::demoting::{for_stdio, hand_over};
use crate::descriptors::{has_stream, is_ours, note_number};
use crate::flow::Mode;
use crate::table::{self, Entry};
use crate::transport::CtlGuard;
use crate::{epoll, listeners, options, runtime, sys};
use libc::c_int;

/// `dup`, `dup2`, `dup3` and `fcntl(F_DUPFD)`: `real` makes the new number.
pub fn duplicate(from: c_int, to: Option<c_int>, real: impl Fn() -> c_int) -> c_int {
    if !runtime::in_own_process() {
        if to.is_some_and(table::is_flow) {
            crate::direct::numbers_differ();
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
        given_out(new);
        return new;
    }
    // The kernel refuses a bad source, or a target above the (lowered) limit on open files, and leaves the target alone.
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
    // The kernel would wait for a target with SO_LINGER in here, with the lock held and signals blocked.
    let lingering = to
        .filter(|to| {
            guard.is_some() && sys::keep_errno(|| lingers(*to).is_some_and(|time| time > 0))
        })
        .and_then(|to| sys::keep_errno(|| sys::dup_high(to)).ok());
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
                // No hook will see the use of the number: `table::flow` tells the parent now.
                let _ = table::flow(from);
            }
            (Entry::Inherited, _) => table::inherited_again(from, new),
            (Entry::None, _) | (Entry::Flow(_), None) => {}
        }
    }
    drop(guard);
    if let Some(copy) = lingering {
        sys::keep_errno(|| sys::close_and_wait(copy));
    }
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

/// From `asm-generic/fcntl.h`.
const F_SETSIG: c_int = 10;
const F_GETSIG: c_int = 11;
const F_SETOWN_EX: c_int = 15;
const F_GETOWN_EX: c_int = 16;

/// The control part of the flow behind `fd`. Hold it while using a private descriptor: without it another thread may close the
/// descriptor.
fn ctl_of(fd: c_int) -> Option<CtlGuard> {
    match table::entry(fd) {
        Entry::Flow(flow) => flow.ctl_of(fd),
        _ => None,
    }
}

/// Runs `f` on the descriptor that has the status flags of `fd`. The always-ready stand-in is one file for many flows, so its
/// flags belong to none of them.
fn on_flags(fd: c_int, f: impl FnOnce(c_int) -> c_int) -> c_int {
    let ctl = ctl_of(fd);
    f(ctl.as_ref().map_or(fd, |ctl| ctl.flags_of(fd)))
}

/// Runs `f`, which asks for the owner or sets it, on the descriptor of the transport whose owner a new one takes over: usually the
/// number itself.
pub fn on_transport(fd: c_int, f: impl FnOnce(c_int) -> c_int) -> c_int {
    let mut ctl = ctl_of(fd);
    if let Some(ctl) = &mut ctl {
        ctl.options_set |= ctl.mode() == Mode::Suspended;
    }
    f(ctl.as_ref().map_or(fd, |ctl| ctl.kept_under(fd)))
}
