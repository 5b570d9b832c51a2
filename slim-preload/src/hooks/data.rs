//! Reading and writing.

use super::looked_up::hook;
use crate::direct;
use crate::ops::buffers::Buffers;
use crate::ops::receive::Receive;
use crate::ops::transmit::Transmit;
use crate::ops::{fail, files, many, passing};
use crate::sys::is_writable;
use crate::{runtime, table};
use libc::{
    aiocb, c_int, c_uint, c_void, iovec, mmsghdr, msghdr, off_t, pthread_attr_t, pthread_t,
    sigevent, size_t, sockaddr, socklen_t, ssize_t, timespec,
};
use redhook::real;
use std::ptr::{null, null_mut};

/// `read` and its variants. A `read` of 0 bytes never waits, unlike `recv`; so it has a function of its own.
///
/// # Safety
/// As `read(2)` requires; `real` makes that call.
#[inline(always)]
unsafe fn read_some(
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    real: impl Fn() -> ssize_t + Copy,
) -> ssize_t {
    // SAFETY: the caller's contract.
    let direct = move || unsafe { direct::read(fd, buf, len) };
    // SAFETY: the caller's contract.
    let buffers = move || unsafe { Buffers::one(buf, len) };
    Receive::run(fd, 0, buffers, direct, real)
}

/// `recv` and its variants.
///
/// # Safety
/// As `recv(2)` requires; `real` makes that call.
#[inline(always)]
unsafe fn receive(
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    flags: c_int,
    real: impl Fn() -> ssize_t + Copy,
) -> ssize_t {
    // SAFETY: the caller's contract; no address is requested.
    let direct = move || unsafe { direct::recvfrom(fd, buf, len, flags, null_mut(), null_mut()) };
    // SAFETY: the caller's contract.
    let buffers = move || unsafe { Buffers::one(buf, len) };
    Receive::run(fd, flags, buffers, direct, real)
}

hook! { unsafe fn read(fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t => slim_read {
    read_some(fd, buf, len, move || real!(read)(fd, buf, len))
}}
hook! { unsafe fn __read(fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t => slim___read {
    read_some(fd, buf, len, move || real!(__read)(fd, buf, len))
}}
hook! { unsafe fn __read_chk(fd: c_int, buf: *mut c_void, len: size_t, room: size_t) -> ssize_t => slim___read_chk {
    if len > room { return real!(__read_chk)(fd, buf, len, room); }
    read_some(fd, buf, len, move || real!(__read_chk)(fd, buf, len, room))
}}
hook! { unsafe fn recv(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int) -> ssize_t => slim_recv {
    receive(fd, buf, len, flags, move || real!(recv)(fd, buf, len, flags))
}}
hook! { unsafe fn __recv_chk(fd: c_int, buf: *mut c_void, len: size_t, room: size_t, flags: c_int) -> ssize_t => slim___recv_chk {
    if len > room { return real!(__recv_chk)(fd, buf, len, room, flags); }
    receive(fd, buf, len, flags, move || real!(__recv_chk)(fd, buf, len, room, flags))
}}
hook! { unsafe fn recvfrom(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int, from: *mut sockaddr, from_len: *mut socklen_t) -> ssize_t => slim_recvfrom {
    let asked = std::cell::Cell::new(false);
    let direct = || { asked.set(true); direct::recvfrom(fd, buf, len, flags, from, from_len) };
    let real = || { asked.set(true); real!(recvfrom)(fd, buf, len, flags, from, from_len) };
    let n = Receive::run(fd, flags, move || Buffers::one(buf, len), direct, real);
    // TCP gives no address, and neither does a read from the stash.
    if n >= 0 && !asked.get() && !from.is_null() {
        if !is_writable(from_len.cast(), size_of::<socklen_t>()) { return fail(libc::EFAULT); }
        from_len.write_unaligned(0);
    }
    n
}}
hook! { unsafe fn __recvfrom_chk(fd: c_int, buf: *mut c_void, len: size_t, room: size_t, flags: c_int, from: *mut sockaddr, from_len: *mut socklen_t) -> ssize_t => slim___recvfrom_chk {
    if len > room { return real!(__recvfrom_chk)(fd, buf, len, room, flags, from, from_len); }
    slim_recvfrom(fd, buf, len, flags, from, from_len)
}}
hook! { unsafe fn readv(fd: c_int, list: *const iovec, count: c_int) -> ssize_t => slim_readv {
    let buffers = move || Buffers::new(list, count as usize);
    let real = move || real!(readv)(fd, list, count);
    Receive::run(fd, 0, buffers, move || direct::readv(fd, list, count), real)
}}

/// `preadv2` and its variants. On a socket the call equals `readv` if no offset (-1) is given; otherwise the kernel refuses it.
///
/// # Safety
/// As `preadv2(2)` requires; `real` makes that call.
unsafe fn read_at(
    fd: c_int,
    list: *const iovec,
    count: c_int,
    offset: off_t,
    flags: c_int,
    real: impl Fn() -> ssize_t + Copy,
) -> ssize_t {
    if offset != -1 || table::flow(fd).is_none() {
        return real();
    }
    let dontwait = if flags & libc::RWF_NOWAIT != 0 {
        libc::MSG_DONTWAIT
    } else {
        0
    };
    // SAFETY: the caller's contract.
    let buffers = move || unsafe { Buffers::new(list, count as usize) };
    Receive::run(fd, dontwait, buffers, move || direct::surely(real), real)
}

hook! { unsafe fn preadv2(fd: c_int, list: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t => slim_preadv2 {
    read_at(fd, list, count, offset, flags, move || real!(preadv2)(fd, list, count, offset, flags))
}}
hook! { unsafe fn preadv64v2(fd: c_int, list: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t => slim_preadv64v2 {
    read_at(fd, list, count, offset, flags, move || real!(preadv64v2)(fd, list, count, offset, flags))
}}
hook! { unsafe fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t => slim_recvmsg {
    if table::flow(fd).is_none() || message.is_null() { return real!(recvmsg)(fd, message, flags); }
    let buffers = move || Buffers::message(message);
    let asked = std::cell::Cell::new(false);
    let real = || { asked.set(true); real!(recvmsg)(fd, message, flags) };
    let direct = || { asked.set(true); direct::recvmsg(fd, message, flags) };
    let n = Receive::run(fd, flags, buffers, direct, real);
    if n >= 0 && !asked.get() {
        if !is_writable(message.cast(), size_of::<msghdr>()) { return fail(libc::EFAULT); }
        let mut header = message.read_unaligned();
        (header.msg_namelen, header.msg_controllen, header.msg_flags) = (0, 0, 0);
        message.write_unaligned(header);
    }
    n
}}
hook! { unsafe fn recvmmsg(fd: c_int, list: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut timespec) -> c_int => slim_recvmmsg {
    let one = |message, flags| slim_recvmsg(fd, message, flags);
    many::receive(fd, (list, count), flags, timeout, one, || real!(recvmmsg)(fd, list, count, flags, timeout))
}}

/// All writes from a single buffer.
///
/// # Safety
/// As `send(2)` asks.
#[inline(always)]
unsafe fn write_one(
    fd: c_int,
    buf: *const c_void,
    len: size_t,
    flags: c_int,
    plain: impl Fn() -> ssize_t + Copy,
) -> ssize_t {
    // SAFETY: the caller's contract, in both cases; no address is given.
    let real = move |fd, flags| unsafe { real!(send)(fd, buf, len, flags) };
    // SAFETY: likewise.
    let direct = move |fd, flags| unsafe { direct::sendto(fd, buf, len, flags, null(), 0) };
    // SAFETY: likewise.
    let source = unsafe { Buffers::one(buf, len) };
    Transmit { fd, source, flags }.run(plain, direct, real)
}

/// `write` and its variants.
///
/// # Safety
/// As `write(2)` requires; `real` makes that call.
#[inline(always)]
unsafe fn written(
    fd: c_int,
    buf: *const c_void,
    len: size_t,
    real: impl Fn() -> ssize_t + Copy,
) -> ssize_t {
    // SAFETY: the caller's contract.
    let direct = move || unsafe { direct::write(fd, buf, len) };
    // SAFETY: the caller's contract.
    unsafe { write_one(fd, buf, len, 0, move || direct::plainly(direct, real)) }
}

/// `send` and its variants.
///
/// # Safety
/// As `send(2)` requires; `real` makes that call.
#[inline(always)]
unsafe fn sent(
    fd: c_int,
    buf: *const c_void,
    len: size_t,
    flags: c_int,
    real: impl Fn() -> ssize_t + Copy,
) -> ssize_t {
    // SAFETY: the caller's contract; no address is given.
    let direct = move || unsafe { direct::sendto(fd, buf, len, flags, null(), 0) };
    // SAFETY: the caller's contract.
    unsafe { write_one(fd, buf, len, flags, move || direct::plainly(direct, real)) }
}

hook! { unsafe fn write(fd: c_int, buf: *const c_void, len: size_t) -> ssize_t => slim_write {
    written(fd, buf, len, move || real!(write)(fd, buf, len))
}}
hook! { unsafe fn __write(fd: c_int, buf: *const c_void, len: size_t) -> ssize_t => slim___write {
    written(fd, buf, len, move || real!(__write)(fd, buf, len))
}}
hook! { unsafe fn send(fd: c_int, buf: *const c_void, len: size_t, flags: c_int) -> ssize_t => slim_send {
    sent(fd, buf, len, flags, move || real!(send)(fd, buf, len, flags))
}}
hook! { unsafe fn __send(fd: c_int, buf: *const c_void, len: size_t, flags: c_int) -> ssize_t => slim___send {
    sent(fd, buf, len, flags, move || real!(__send)(fd, buf, len, flags))
}}
hook! { unsafe fn sendto(fd: c_int, buf: *const c_void, len: size_t, flags: c_int, to: *const sockaddr, to_len: socklen_t) -> ssize_t => slim_sendto {
    let real = move |fd, flags| real!(sendto)(fd, buf, len, flags, to, to_len);
    let direct = move |fd, flags| direct::sendto(fd, buf, len, flags, to, to_len);
    Transmit { fd, source: Buffers::one(buf, len), flags }.run(
        move || direct::plainly(|| direct(fd, flags), || real(fd, flags)),
        direct,
        real,
    )
}}

/// `writev` and its variants.
///
/// # Safety
/// As `writev(2)` requires; `plain` makes that call.
#[inline(always)]
unsafe fn write_list(
    fd: c_int,
    list: *const iovec,
    count: c_int,
    flags: c_int,
    plain: impl Fn() -> ssize_t + Copy,
) -> ssize_t {
    let n = count as usize;
    // writev(2) and sendmsg(2) refuse a bad count with different errnos.
    if n > libc::UIO_MAXIOV as usize {
        return plain();
    }
    let message = move || {
        // SAFETY: integers and pointers, which may be null.
        let mut m: msghdr = unsafe { std::mem::zeroed() };
        (m.msg_iov, m.msg_iovlen) = (list.cast_mut(), n);
        m
    };
    // SAFETY: the message refers to the caller's list, which is as `writev(2)` requires.
    let real = move |fd, flags| unsafe { real!(sendmsg)(fd, &message(), flags) };
    // SAFETY: likewise.
    let direct = move |fd, flags| unsafe { direct::sendmsg(fd, &message(), flags) };
    // SAFETY: the caller's contract.
    let source = unsafe { Buffers::new(list, n) };
    Transmit { fd, source, flags }.run(plain, direct, real)
}

hook! { unsafe fn writev(fd: c_int, list: *const iovec, count: c_int) -> ssize_t => slim_writev {
    let real = move || real!(writev)(fd, list, count);
    write_list(fd, list, count, 0, move || direct::plainly(|| direct::writev(fd, list, count), real))
}}

/// `pwritev2` and its variants. On a socket the call equals `writev` if no offset (-1) is given; otherwise the kernel refuses it.
///
/// # Safety
/// As `pwritev2(2)` requires; `plain` makes that call.
unsafe fn write_at(
    fd: c_int,
    list: *const iovec,
    count: c_int,
    offset: off_t,
    flags: c_int,
    plain: impl Fn() -> ssize_t + Copy,
) -> ssize_t {
    // Sockets refuse all other flags, and ignore these, except RWF_NOWAIT.
    let known = libc::RWF_HIPRI
        | libc::RWF_DSYNC
        | libc::RWF_SYNC
        | libc::RWF_APPEND
        | libc::RWF_NOAPPEND
        | libc::RWF_NOWAIT;
    if offset != -1 || table::flow(fd).is_none() {
        return plain();
    }
    if flags & !known != 0 {
        return fail(libc::EOPNOTSUPP);
    }
    let dontwait = if flags & libc::RWF_NOWAIT != 0 {
        libc::MSG_DONTWAIT
    } else {
        0
    };
    // SAFETY: the caller's contract.
    unsafe { write_list(fd, list, count, dontwait, plain) }
}

hook! { unsafe fn pwritev2(fd: c_int, list: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t => slim_pwritev2 {
    write_at(fd, list, count, offset, flags, move || real!(pwritev2)(fd, list, count, offset, flags))
}}
hook! { unsafe fn pwritev64v2(fd: c_int, list: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t => slim_pwritev64v2 {
    write_at(fd, list, count, offset, flags, move || real!(pwritev64v2)(fd, list, count, offset, flags))
}}
hook! { unsafe fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t => slim_sendmsg {
    if table::flow(fd).is_none() {
        passing::passing(fd, message);
        return real!(sendmsg)(fd, message, flags);
    }
    let real = move |fd, flags| real!(sendmsg)(fd, message, flags);
    let direct = move |fd, flags| direct::sendmsg(fd, message, flags);
    Transmit { fd, source: Buffers::message(message), flags }.run(
        move || real(fd, flags),
        direct,
        real,
    )
}}
hook! { unsafe fn sendmmsg(fd: c_int, list: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int => slim_sendmmsg {
    let one = |message| slim_sendmsg(fd, message, flags);
    many::send(fd, (list, count), one, || real!(sendmmsg)(fd, list, count, flags))
}}
hook! { unsafe fn sendfile(out: c_int, file: c_int, offset: *mut off_t, count: size_t) -> ssize_t => slim_sendfile {
    files::sendfile(out, file, offset, count, || real!(sendfile)(out, file, offset, count))
}}
hook! { unsafe fn sendfile64(out: c_int, file: c_int, offset: *mut off_t, count: size_t) -> ssize_t => slim_sendfile64 {
    files::sendfile(out, file, offset, count, || real!(sendfile64)(out, file, offset, count))
}}
hook! { unsafe fn splice(from: c_int, from_at: *mut i64, to: c_int, to_at: *mut i64, len: size_t, flags: c_uint) -> ssize_t => slim_splice {
    files::spliced(from);
    files::spliced(to);
    real!(splice)(from, from_at, to, to_at, len, flags)
}}

// These calls are carried out by threads of libc, or of the kernel, where no hook sees it.
hook! { unsafe fn aio_read(block: *mut aiocb) -> c_int => slim_aio_read { files::queued(block); real!(aio_read)(block) }}
hook! { unsafe fn aio_read64(block: *mut aiocb) -> c_int => slim_aio_read64 { files::queued(block); real!(aio_read64)(block) }}
hook! { unsafe fn aio_write(block: *mut aiocb) -> c_int => slim_aio_write { files::queued(block); real!(aio_write)(block) }}
hook! { unsafe fn aio_write64(block: *mut aiocb) -> c_int => slim_aio_write64 { files::queued(block); real!(aio_write64)(block) }}
hook! { unsafe fn lio_listio(mode: c_int, list: *const *mut aiocb, count: c_int, event: *mut sigevent) -> c_int => slim_lio_listio {
    files::queued_all(list, count);
    real!(lio_listio)(mode, list, count, event)
}}
hook! { unsafe fn lio_listio64(mode: c_int, list: *const *mut aiocb, count: c_int, event: *mut sigevent) -> c_int => slim_lio_listio64 {
    files::queued_all(list, count);
    real!(lio_listio64)(mode, list, count, event)
}}
pub(super) use files::submitted;

// These are no calls on descriptors. They decide whether the calls above may go past libc, see `crate::direct`.
hook! { unsafe fn pthread_cancel(thread: pthread_t) -> c_int => slim_pthread_cancel {
    direct::cancels();
    real!(pthread_cancel)(thread)
}}
hook! { unsafe fn pthread_create(thread: *mut pthread_t, how: *const pthread_attr_t, start: *mut c_void, arg: *mut c_void) -> c_int => slim_pthread_create {
    if !runtime::is_our_call() { direct::threads(); }
    real!(pthread_create)(thread, how, start, arg)
}}
hook! { unsafe fn thrd_create(thread: *mut pthread_t, start: *mut c_void, arg: *mut c_void) -> c_int => slim_thrd_create {
    direct::threads();
    real!(thrd_create)(thread, start, arg)
}}
