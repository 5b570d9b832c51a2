//! Connections and their options.

use super::looked_up::hook;
use crate::ops::fail;
use crate::ops::names::{self, Side};
use crate::ops::socket_options;
use crate::ops::sockets::{self, Ioctl};
use crate::sys::{errno, is_writable, keep_errno};
use libc::{c_int, c_ulong, c_void, sockaddr, socklen_t};
use redhook::real;
use slim_sys::numbers::{take, take_and_wait};

hook! { unsafe fn connect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int => slim_connect {
    sockets::connect(fd, addr, len, || real!(connect)(fd, addr, len))
}}
hook! { unsafe fn __connect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int => slim___connect {
    sockets::connect(fd, addr, len, || real!(__connect)(fd, addr, len))
}}
hook! { unsafe fn bind(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int => slim_bind {
    let before = errno();
    // Under `take`: for a moment a new descriptor of SLIM's may have a number that is free in the application's view, and this
    // call must not use it.
    let really = || take(|| real!(bind)(fd, addr, len));
    let r = really();
    if r == 0 { return r; }
    sockets::give_way(fd, addr, len, before, really)
}}
hook! { unsafe fn listen(fd: c_int, backlog: c_int) -> c_int => slim_listen {
    let announced = keep_errno(|| sockets::about_to_listen(fd));
    let r = real!(listen)(fd, backlog);
    keep_errno(|| sockets::listening(fd, announced, r == 0));
    r
}}
hook! { unsafe fn accept(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int => slim_accept {
    sockets::accept(fd, addr, len, |addr, len| take_and_wait(|| real!(accept)(fd, addr, len)))
}}
hook! { unsafe fn accept4(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int => slim_accept4 {
    sockets::accept(fd, addr, len, |addr, len| take_and_wait(|| real!(accept4)(fd, addr, len, flags)))
}}
hook! { unsafe fn shutdown(fd: c_int, how: c_int) -> c_int => slim_shutdown {
    sockets::shutdown(fd, how, || real!(shutdown)(fd, how))
}}
hook! { unsafe fn getsockname(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int => slim_getsockname {
    names::name(fd, Side::Local, addr, len, || real!(getsockname)(fd, addr, len))
}}
hook! { unsafe fn getpeername(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int => slim_getpeername {
    names::name(fd, Side::Peer, addr, len, || real!(getpeername)(fd, addr, len))
}}
hook! { unsafe fn getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t) -> c_int => slim_getsockopt {
    socket_options::option(fd, level, name, value, len, |fd| real!(getsockopt)(fd, level, name, value, len))
}}
hook! { unsafe fn setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t) -> c_int => slim_setsockopt {
    socket_options::set_option(fd, level, name, |fd| real!(setsockopt)(fd, level, name, value, len))
}}
// Variadic in C; on the supported platforms the third argument is passed like a fixed one.
hook! { unsafe fn ioctl(fd: c_int, request: c_ulong, arg: *mut c_void) -> c_int => slim_ioctl {
    match sockets::ioctl(fd, request, |fd| real!(ioctl)(fd, request, arg)) {
        Ioctl::Returned(r) => r,
        Ioctl::Answer(answer) if is_writable(arg.cast(), size_of::<c_int>()) => { arg.cast::<c_int>().write_unaligned(answer); 0 }
        Ioctl::Answer(_) => fail(libc::EFAULT) as c_int,
    }
}}
