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
type Arguments = *mut c_void;
hook! { unsafe fn vdprintf(fd: c_int, format: *const c_char, list: Arguments) -> c_int => slim_vdprintf {
    ops::for_stdio(fd);
    real!(vdprintf)(fd, format, list)
}}
hook! { unsafe fn __vdprintf_chk(fd: c_int, flag: c_int, format: *const c_char, list: Arguments) -> c_int => slim___vdprintf_chk {
    ops::for_stdio(fd);
    real!(__vdprintf_chk)(fd, flag, format, list)
}}
hook! { unsafe fn fclose(file: *mut FILE) -> c_int => slim_fclose {
    let fd = if file.is_null() { -1 } else { libc::fileno(file) };
    ops::no_stdio(fd);
    real!(fclose)(file)
}}
hook! { unsafe fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE => slim_fdopen {
    let file = real!(fdopen)(fd, mode);
    if !file.is_null() { ops::stdio(fd); }
    file
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

hook! { unsafe fn system(command: *const c_char) -> c_int => slim_system {
    process::before_spawn(false);
    real!(system)(command)
}}
hook! { unsafe fn popen(command: *const c_char, mode: *const c_char) -> *mut FILE => slim_popen {
    process::before_spawn(false);
    real!(popen)(command, mode)
}}

type Pid = *mut libc::pid_t;
type Actions = *const libc::posix_spawn_file_actions_t;
type Attributes = *const libc::posix_spawnattr_t;
type Spawned = *const *mut c_char;

hook! { unsafe fn posix_spawn(pid: Pid, path: *const c_char, actions: Actions, attributes: Attributes, args: Spawned, env: Spawned) -> c_int => slim_posix_spawn {
    process::before_spawn(!actions.is_null());
    real!(posix_spawn)(pid, path, actions, attributes, args, env)
}}
hook! { unsafe fn posix_spawnp(pid: Pid, file: *const c_char, actions: Actions, attributes: Attributes, args: Spawned, env: Spawned) -> c_int => slim_posix_spawnp {
    process::before_spawn(!actions.is_null());
    real!(posix_spawnp)(pid, file, actions, attributes, args, env)
}}
