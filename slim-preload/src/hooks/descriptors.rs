//! Descriptor numbers and processes.

use crate::ops::descriptors as ops;
use crate::process;
use crate::sys::keep_errno;
use libc::{FILE, c_char, c_int, c_uint, c_void};
use redhook::{hook, real};
use slim_agent::numbers::take;

hook! { unsafe fn close(fd: c_int) -> c_int => slim_close {
    ops::close(fd, || take(|| real!(close)(fd)))
}}
hook! { unsafe fn __close(fd: c_int) -> c_int => slim___close {
    ops::close(fd, || take(|| real!(__close)(fd)))
}}
hook! { unsafe fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int => slim_close_range {
    // Anything but plain closing (CLOSE_RANGE_CLOEXEC, _UNSHARE) ends no session.
    if flags == 0 && first <= last && keep_errno(|| ops::close_each(first, last, |fd| { slim_close(fd); })) { return 0; }
    take(|| real!(close_range)(first, last, flags))
}}
hook! { unsafe fn closefrom(first: c_int) => slim_closefrom {
    if !keep_errno(|| ops::close_each(first.max(0) as c_uint, c_uint::MAX, |fd| { slim_close(fd); })) { take(|| real!(closefrom)(first)) }
}}
hook! { unsafe fn dup(fd: c_int) -> c_int => slim_dup {
    ops::duplicate(fd, None, || take(|| real!(dup)(fd)))
}}
hook! { unsafe fn dup2(from: c_int, to: c_int) -> c_int => slim_dup2 {
    ops::duplicate(from, Some(to), || take(|| real!(dup2)(from, to)))
}}
hook! { unsafe fn __dup2(from: c_int, to: c_int) -> c_int => slim___dup2 {
    ops::duplicate(from, Some(to), || take(|| real!(__dup2)(from, to)))
}}
hook! { unsafe fn dup3(from: c_int, to: c_int, flags: c_int) -> c_int => slim_dup3 {
    ops::duplicate(from, Some(to), || take(|| real!(dup3)(from, to, flags)))
}}
hook! { unsafe fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE => slim_fdopen {
    ops::for_stdio(fd);
    real!(fdopen)(fd, mode)
}}
// Variadic in C; on the platforms supported the third argument travels as a fixed one does.
hook! { unsafe fn fcntl(fd: c_int, command: c_int, arg: *mut c_void) -> c_int => slim_fcntl {
    ops::control(fd, command, |fd| gives_out(command, || real!(fcntl)(fd, command, arg)))
}}
hook! { unsafe fn fcntl64(fd: c_int, command: c_int, arg: *mut c_void) -> c_int => slim_fcntl64 {
    ops::control(fd, command, |fd| gives_out(command, || real!(fcntl64)(fd, command, arg)))
}}
hook! { unsafe fn __fcntl(fd: c_int, command: c_int, arg: *mut c_void) -> c_int => slim___fcntl {
    ops::control(fd, command, |fd| gives_out(command, || real!(__fcntl)(fd, command, arg)))
}}

fn gives_out(command: c_int, real: impl Fn() -> c_int) -> c_int {
    match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => take(real),
        _ => real(),
    }
}

type Strings = *const *const c_char;

hook! { unsafe fn execve(path: *const c_char, args: Strings, env: Strings) -> c_int => slim_execve {
    process::before_exec();
    real!(execve)(path, args, env)
}}
hook! { unsafe fn execv(path: *const c_char, args: Strings) -> c_int => slim_execv {
    process::before_exec();
    real!(execv)(path, args)
}}
hook! { unsafe fn execvp(file: *const c_char, args: Strings) -> c_int => slim_execvp {
    process::before_exec();
    real!(execvp)(file, args)
}}
hook! { unsafe fn execvpe(file: *const c_char, args: Strings, env: Strings) -> c_int => slim_execvpe {
    process::before_exec();
    real!(execvpe)(file, args, env)
}}
hook! { unsafe fn fexecve(fd: c_int, args: Strings, env: Strings) -> c_int => slim_fexecve {
    process::before_exec();
    real!(fexecve)(fd, args, env)
}}
