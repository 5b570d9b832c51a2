//! Sockets: connect, listen, accept, shutdown, ioctl, and giving way to a `bind`.

use super::closing::given_out;
use super::{demoting, duplicating};
use crate::addr::RawAddr;
use crate::flow::{Ctl, Flow, Mode, Then};
use crate::front::{FirstConnection, Handle};
use crate::sys;
use crate::table::{self, Entry};
use crate::transport::{self, CtlGuard, Fault};
use crate::{descriptors, epoll, kept_names, listeners, options, runtime};
use libc::{c_int, sockaddr, socklen_t};
use slim_core::{Cause, FinHow, Role};
use slim_sys::lock::block_signals;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Whether a new connection has become a flow.
enum Managed {
    /// It is not managed.
    No,
    /// It is a flow.
    Flow,
    /// It is a flow, and the peer has been told by OPEN.
    Told,
}

/// Makes a new connection a flow, if SLIM works in this process and can manage the connection.
fn manage(fd: c_int, role: Role, established: bool, peer: Option<RawAddr>) -> Managed {
    if descriptors::has_stream(fd) || !runtime::ready() || options::is_bound(fd) {
        return Managed::No;
    }
    let peer = peer.or_else(|| RawAddr::peer(fd));
    let Some(own) = RawAddr::local(fd) else {
        return Managed::No;
    };
    let (Some(local), Some(remote)) = (own.internet(), peer.and_then(|a| a.internet())) else {
        return Managed::No;
    };
    // Several locks are taken below. Blocking signals once is cheaper.
    let _signals = block_signals();
    let Some(flow) = Flow::create(fd, role, established, &own, peer) else {
        return Managed::No;
    };
    if !table::set_flow(fd, flow) {
        // Neither the table nor the agent refers to the flow.
        flow.drop_ref();
        flow.drop_ref();
        return Managed::No;
    }
    epoll::adopt(fd, &mut flow.ctl());
    let handle = Arc::new(Handle::new(flow));
    if role == Role::Acceptor {
        handle.begins_with(FirstConnection::accepted(fd));
    }
    let opened = runtime::with_agent(|a| {
        let known = match role {
            Role::Connector => a.dial(local, remote),
            Role::Acceptor => None,
        };
        let Some(opened) = known else {
            if role == Role::Connector {
                handle.begins_with(FirstConnection::dialled(fd));
            }
            a.open(flow.token(), handle, role, local, remote);
            return Managed::Flow;
        };
        // No answer has to be waited for: the flow is live from here on.
        flow.live.store(true, Ordering::Release);
        flow.ctl().opened = Some(opened.clone());
        a.open_known(flow.token(), handle, local, opened);
        Managed::Told
    });
    opened.unwrap_or(Managed::No)
}

/// How long `connect` waits until HELLO has been sent to the peer. It goes to the UDP port with the number of the TCP port. The peer
/// application might open that UDP port for another purpose, and would then get the question. It has no reason to do so before
/// this application has sent anything. The agent's thread needs some microseconds, but a machine that has too much to do may let it wait
/// for some hundred milliseconds.
const ASKING: Duration = Duration::from_secs(1);
/// The same while the agent's thread has not run since a wait in vain.
const ASKING_AGAIN: Duration = Duration::from_millis(100);

/// `connect`.
///
/// # Safety
/// `addr` and `len` as `connect(2)` asks.
pub unsafe fn connect(
    fd: c_int,
    addr: *const sockaddr,
    len: socklen_t,
    real: impl FnOnce() -> c_int,
) -> c_int {
    if runtime::is_our_call() || !runtime::possible() {
        return real();
    }
    // The kernel reports all other errors of the address.
    let dissolves = || {
        let long = len as usize >= size_of::<libc::sa_family_t>();
        // SAFETY: an integer of the application's.
        let family = unsafe { sys::copy_of(addr.cast::<libc::sa_family_t>()) }.filter(|_| long);
        family.map(i32::from) == Some(libc::AF_UNSPEC)
    };
    if let Entry::Flow(flow) = table::entry(fd)
        && flow.own_at(fd).is_some()
    {
        if dissolves() {
            // The association is dissolved (connect(2)); the socket may be connected anew.
            sys::keep_errno(|| demoting::demote(flow, fd));
        } else if flow
            .ctl_of(fd)
            .is_some_and(|c| c.mode() != Mode::Open || c.receiving.has_moved())
        {
            // On a transport that SLIM made, the kernel would report a new connection: it does not know that the application has
            // been told already.
            let errno = match len as usize {
                len if len > size_of::<libc::sockaddr_storage>() => libc::EINVAL,
                len if !sys::is_readable(addr.cast(), len) => libc::EFAULT,
                _ => libc::EISCONN,
            };
            return super::fail(errno) as c_int;
        }
    }
    let known = matches!(table::entry(fd), Entry::Flow(_));
    // Start the agent before the connection is made. If the peer accepts the connection and it breaks at once, the peer waits
    // only a moment for our HELLO.
    let managed = !known && sys::keep_errno(|| sys::is_tcp(fd) && runtime::ready());
    if managed {
        sys::keep_errno(|| about_to_connect(fd, addr, len));
    }
    let r = real();
    let errno = sys::errno();
    if r == 0 && (kept_names::any() || options::any_connected()) && sys::keep_errno(dissolves) {
        sys::keep_errno(|| {
            kept_names::forget(fd);
            options::dissolved(fd);
        });
    }
    // An interrupted connect goes on by itself (connect(2), EINTR).
    if managed && (r == 0 || errno == libc::EINPROGRESS || errno == libc::EINTR) {
        sys::keep_errno(|| {
            // SAFETY: the kernel has accepted the address.
            let peer = unsafe { RawAddr::copy(addr, len) };
            if let Managed::Flow = manage(fd, Role::Connector, r == 0, Some(peer)) {
                runtime::with_agent(|a| a.flush_unless_stuck(ASKING, ASKING_AGAIN));
            }
        });
    }
    r
}

/// Before the `connect` of a socket that is already bound to a port: an earlier connection may have had the same addresses.
fn about_to_connect(fd: c_int, addr: *const sockaddr, len: socklen_t) {
    let local = RawAddr::local(fd).and_then(|a| a.internet());
    let Some(local) = local.filter(|a| a.port() != 0) else {
        return;
    };
    if (len as usize) < size_of::<libc::sockaddr_in>()
        || !sys::is_readable(addr.cast(), len as usize)
    {
        return;
    }
    // SAFETY: just found to be readable.
    let peer = unsafe { RawAddr::copy(addr, len) };
    if let Some(remote) = peer.internet() {
        runtime::with_agent(|a| a.about_to_connect(local, remote));
    }
}

/// Before `listen`: if the socket is bound to a port, makes its control socket, and gives the address. The control socket must exist
/// before the first connection: otherwise the HELLO of that peer would be refused.
pub fn about_to_listen(fd: c_int) -> Option<SocketAddr> {
    if let Entry::Flow(flow) = table::entry(fd) {
        // The file under the number may be another one than the flow's.
        drop(flow.own());
    }
    if !runtime::possible()
        || !matches!(table::entry(fd), Entry::None)
        || !sys::is_tcp(fd)
        || !runtime::ready()
    {
        return None;
    }
    // A socket that is not bound yet gets a port by `listen`, and no peer knows it before `listen` returns.
    let addr = RawAddr::local(fd).and_then(|a| a.internet())?;
    (addr.port() != 0).then(|| serve(fd, addr))
}

fn serve(fd: c_int, addr: SocketAddr) -> SocketAddr {
    // SAFETY: the application's descriptor, which the application keeps open during this call.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    runtime::with_agent(|a| a.listen(fd, addr));
    addr
}

/// After `listen`; `announced` is the result of [`about_to_listen`].
pub fn listening(fd: c_int, announced: Option<SocketAddr>, done: bool) {
    if !done {
        if let Some(addr) = announced {
            runtime::with_agent(|a| a.unlisten(addr));
        }
        return;
    }
    if !runtime::possible()
        || !matches!(table::entry(fd), Entry::None)
        || !sys::is_tcp(fd)
        || !runtime::ready()
    {
        return;
    }
    let Some(addr) = RawAddr::local(fd).and_then(|a| a.internet()) else {
        return;
    };
    // A socket that was connected before still reports its earlier port before `listen`, and gets another one by `listen`.
    let kept = announced.filter(|announced| *announced == addr);
    if let Some(wrong) = announced.filter(|_| kept.is_none()) {
        runtime::with_agent(|a| a.unlisten(wrong));
    }
    listeners::add(fd, kept.unwrap_or_else(|| serve(fd, addr)));
}

/// A forked child waits for connections on `fd`. If that is a listener of its parent, which may end at any time, the child's agent
/// answers peers' questions from now on.
#[inline]
pub fn waits_on(fd: c_int) {
    if table::any_inherited_listener() && table::is_inherited_listener(fd) {
        sys::keep_errno(|| take_over(fd));
    }
}

#[cold]
#[inline(never)]
fn take_over(fd: c_int) {
    if runtime::in_own_process()
        && runtime::ready()
        && let Some(addr) = RawAddr::local(fd).and_then(|a| a.internet())
    {
        listeners::add(fd, addr);
        serve(fd, addr);
    }
}

/// `accept` and `accept4`. The peer's address is always requested here, because `getpeername` fails on a connection
/// that is already broken when it is accepted.
///
/// # Safety
/// `addr` and `len` as `accept(2)` asks.
pub unsafe fn accept(
    listener: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
    real: impl Fn(*mut sockaddr, *mut socklen_t) -> c_int,
) -> c_int {
    if runtime::is_our_call() || !runtime::possible() {
        return real(addr, len);
    }
    let mut own = RawAddr::room();
    let (at, room) = if addr.is_null() {
        (own.as_mut_ptr(), &raw mut own.len)
    } else {
        (addr, len)
    };
    waits_on(listener);
    // Keep the length of the room: the kernel writes the address's full length over it.
    // SAFETY: an integer, of the application's or of `own`, to which nothing else refers.
    let before = unsafe { sys::copy_of(room) };
    let fd = real(at, room);
    given_out(fd);
    if fd >= 0 {
        sys::keep_errno(|| {
            if matches!(table::entry(listener), Entry::Listener) || sys::is_tcp(fd) {
                let whole = |a: &RawAddr| a.internet().is_some();
                let peer = if addr.is_null() {
                    own
                } else {
                    // SAFETY: the kernel has just written both: the address is cut to the room it was given.
                    unsafe { RawAddr::copy(addr, before.map_or(0, |room| room.min(*len))) }
                };
                if !matches!(table::entry(listener), Entry::Listener) {
                    options::any();
                }
                if !options::is_bound(listener) {
                    manage(fd, Role::Acceptor, true, Some(peer).filter(whole));
                }
            }
        });
    }
    fd
}

/// `shutdown`.
pub fn shutdown(fd: c_int, how: c_int, real: impl Fn() -> c_int) -> c_int {
    // `table::flow` marks a parent's connection as used: a forked child that shuts the connection down uses it.
    let Some(flow) = table::flow(fd) else {
        return real();
    };
    let known = matches!(how, libc::SHUT_RD | libc::SHUT_WR | libc::SHUT_RDWR);
    if !known || !runtime::in_own_process() {
        return real();
    }
    // If the transport of a live flow has died, the next one is shut down, also if nobody has noticed the death.
    if flow.live.load(Ordering::Acquire)
        && sys::keep_errno(|| sys::tcp_state(fd)) == Some(sys::TCP_CLOSE)
    {
        sys::keep_errno(|| transport::notice(flow, fd));
    }
    let Some(mut ctl) = flow.own_after_exec(fd) else {
        return real();
    };
    let reads_no_more = how != libc::SHUT_WR && !flow.read_shut.swap(true, Ordering::Relaxed);
    let ended = flow.stream.local_final();
    let first = ended.is_none();
    if reads_no_more && let Some(end) = ended {
        tell_shut(flow, end);
    }
    if how == libc::SHUT_RD {
        let r = shut_transport(&ctl, how, real);
        sys::keep_errno(|| transport::show_end(flow, &mut ctl));
        return r;
    }
    let errno = sys::errno();
    // Another thread may be blocked in a send, and hold the sending half. Only the shutdown itself makes it leave.
    let (r, sent) = if let Some(sent) = flow.stream.try_sent() {
        announce(flow, sent);
        (shut_transport(&ctl, how, real), sent)
    } else if flow.stream.is_sending_here() {
        return shut_by_handler(flow, ctl, fd, real);
    } else {
        let r = shut_transport(&ctl, how, &real);
        let Some(sent) = sys::keep_errno(|| flow.stream.sent_in_time()) else {
            return r;
        };
        (r, sent)
    };
    announce(flow, sent);
    sys::keep_errno(|| transport::show_end(flow, &mut ctl));
    if r == 0 || !first || ctl.mode() != Mode::Open {
        return r;
    }
    // The shutdown failed because the transport is dead. The flow goes on: the next transport is shut down when everything is sent.
    // Checked before the lock is released, because afterwards there may be another transport.
    let failed = sys::errno();
    let dead = super::broken(fd, failed);
    let live = || flow.live.load(Ordering::Acquire);
    // The peer has been told of the end by `announce`. It may close, and the flow be over, before this function returns.
    let was_live = live();
    drop(ctl);
    let cause = Cause::Errno(transport::TO_BE_ASKED);
    if dead && matches!(transport::fault(flow, fd, cause), Fault::Suspended) {
        // A flow that still negotiates does not know yet whether there will be another transport.
        demoting::wait_while_away(flow, fd, Instant::now() + demoting::PATIENCE, live);
        if was_live || live() {
            sys::set_errno(errno);
            return 0;
        }
    }
    sys::set_errno(failed);
    r
}

/// A signal handler shuts the connection down on which it has interrupted a send of its own thread. The end of our stream is
/// unknown then, so only the kernel can tell the peer, and the flow becomes plain TCP.
fn shut_by_handler(
    flow: &'static Flow,
    ctl: CtlGuard,
    fd: c_int,
    real: impl Fn() -> c_int,
) -> c_int {
    drop(ctl);
    sys::keep_errno(|| demoting::demote(flow, fd));
    real()
}

/// Tells the peer, once, where our stream ends.
fn announce(flow: &'static Flow, sent: u64) {
    if flow.stream.end_at(sent) {
        tell_shut(flow, sent);
    }
}

/// Tells the peer that our stream has ended after `sent` bytes, and whether we still accept its bytes.
fn tell_shut(flow: &'static Flow, sent: u64) {
    let how = match flow.read_shut.load(Ordering::Relaxed) {
        true => FinHow::Close,
        false => FinHow::HalfClose,
    };
    let token = flow.token();
    sys::keep_errno(|| runtime::with_agent(|a| a.shut(token, sent, how)));
}

fn shut_transport(ctl: &Ctl, how: c_int, real: impl Fn() -> c_int) -> c_int {
    match ctl.mode() {
        Mode::Open => real(),
        // The agent shuts the new transport down when the replay is done.
        Mode::Suspended => {
            if let Some(old) = ctl.half_open() {
                sys::shutdown(old, libc::SHUT_WR);
            }
            0
        }
        Mode::Stashed { then: Then::Open } => {
            if let Some(t) = ctl.transport() {
                sys::shutdown(t, how);
            }
            0
        }
        // The file under the number is a connection that is over.
        Mode::Stashed { .. } | Mode::Dead(_) | Mode::Lingering => real(),
    }
}

/// Older names of `F_SETOWN` and `F_GETOWN` (asm-generic/sockios.h).
const FIOSETOWN: libc::c_ulong = 0x8901;
const SIOCSPGRP: libc::c_ulong = 0x8902;
const FIOGETOWN: libc::c_ulong = 0x8903;
const SIOCGPGRP: libc::c_ulong = 0x8904;

/// The result of an `ioctl`.
pub enum Ioctl {
    /// The kernel was called, and this is the return value.
    Returned(c_int),
    /// This is the value that the application asks for.
    Answer(c_int),
}

/// `ioctl`; `real(fd)` asks the kernel. Requests about a flow's bytes while its transport is away are answered here. Requests that
/// set flags while the flow has a stash go to the transport, because the stand-in is shared by all flows.
pub fn ioctl(fd: c_int, request: libc::c_ulong, real: impl Fn(c_int) -> c_int) -> Ioctl {
    match request {
        FIOSETOWN | SIOCSPGRP | FIOGETOWN | SIOCGPGRP => {
            options::owned();
            Ioctl::Returned(duplicating::on_transport(fd, real))
        }
        libc::FIONBIO | libc::FIOASYNC => Ioctl::Returned(match table::entry(fd) {
            Entry::Flow(flow) => flow.set_mode(fd, real),
            _ => real(fd),
        }),
        _ => answered(fd, request, &real).unwrap_or_else(|| Ioctl::Returned(real(fd))),
    }
}

/// From `asm-generic/sockios.h`.
const SIOCATMARK: libc::c_ulong = 0x8905;

fn answered(fd: c_int, request: libc::c_ulong, real: impl Fn(c_int) -> c_int) -> Option<Ioctl> {
    let known = [libc::FIONREAD, libc::TIOCOUTQ, SIOCATMARK];
    if !known.contains(&request) {
        return None;
    }
    let Entry::Flow(flow) = table::entry(fd) else {
        return None;
    };
    let ctl = flow.ctl_of(fd)?;
    let unread = |fd| sys::keep_errno(|| sys::readable(fd));
    // With the lock held, because otherwise another thread may close the private descriptor.
    let returned = |on| Some(Ioctl::Returned(real(on)));
    let number = |n: usize| Some(Ioctl::Answer(n.min(c_int::MAX as usize) as c_int));
    match (ctl.mode(), request) {
        (Mode::Open | Mode::Dead(_) | Mode::Lingering, _) => None,
        // A flow with an urgent byte is plain TCP.
        (_, SIOCATMARK) => number(0),
        // The bytes in an old transport that is not drained yet; or the stash with the bytes that have arrived behind it.
        (Mode::Suspended, libc::FIONREAD)
            if ctl.receiving.stash.is_empty() && !ctl.receiving.is_drained() =>
        {
            number(ctl.old().map_or(0, unread) as usize)
        }
        (_, libc::FIONREAD) => {
            let behind = transport::behind_stash(&ctl).map_or(0, unread);
            number(ctl.receiving.stash.len() + behind as usize)
        }
        // A call that is still inside may hold the sending half for long. Then the kernel's count is as good.
        (Mode::Suspended, _) => match flow.stream.try_with_half(|s| s.replay.len()) {
            Some(kept) => number(kept),
            None => ctl.old().and_then(returned),
        },
        (Mode::Stashed { .. }, _) => ctl.transport().and_then(returned),
    }
}

/// After a failed `bind`: the UDP port may be taken by the control socket of a TCP listener, in this process or another
/// one. The control socket gives way, and the `bind` is repeated. `before` is errno from before the first try.
///
/// # Safety
/// `addr` and `len` as `bind(2)` asks.
pub unsafe fn give_way(
    fd: c_int,
    addr: *const sockaddr,
    len: socklen_t,
    before: c_int,
    real: impl Fn() -> c_int,
) -> c_int {
    let refused = sys::errno();
    let ours = || {
        if refused != libc::EADDRINUSE || runtime::is_our_call() || !sys::is_udp(fd) {
            return false;
        }
        // SAFETY: the kernel has read the address.
        let at = unsafe { RawAddr::copy(addr, len) }.internet();
        let Some(at) = at.filter(|_| runtime::possible()) else {
            return false;
        };
        let own = runtime::with_agent(|a| a.release(at)) == Some(true);
        own || slim_agent::ask_for_port(at)
    };
    if ours() {
        sys::set_errno(before);
        return real();
    }
    sys::set_errno(refused);
    -1
}
