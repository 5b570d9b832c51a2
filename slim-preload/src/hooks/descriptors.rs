//! Descriptor numbers and processes.

use super::looked_up::{hook, real_of};
use crate::exec::program::{Named, Program, Strings};
use crate::exec::{exec, withdraw};
use crate::ops::{closing, demoting, duplicating};
use crate::process;
use crate::sys::keep_errno;
use libc::{FILE, c_char, c_int, c_uint, c_ulong, c_void};
use redhook::real;
use slim_sys::limit::keep as keep_limit;
use slim_sys::numbers::{take, take_and_wait};

hook! { unsafe fn close(fd: c_int) -> c_int => slim_close {
    closing::close(fd, || take_and_wait(|| real!(close)(fd)))
}}
hook! { unsafe fn __close(fd: c_int) -> c_int => slim___close {
    closing::close(fd, || take_and_wait(|| real!(__close)(fd)))
}}
hook! { unsafe fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int => slim_close_range {
    if flags as c_uint & libc::CLOSE_RANGE_UNSHARE != 0 { return process::close_range_apart(first, last, || take_and_wait(|| real!(close_range)(first, last, flags))); }
    // CLOSE_RANGE_CLOEXEC closes nothing now, so no flow ends.
    if flags == 0 && first <= last && keep_errno(|| closing::close_each(first, last, |fd| { slim_close(fd); })) { return 0; }
    take_and_wait(|| real!(close_range)(first, last, flags))
}}
hook! { unsafe fn closefrom(first: c_int) => slim_closefrom {
    if !keep_errno(|| closing::close_each(first.max(0) as c_uint, c_uint::MAX, |fd| { slim_close(fd); })) { take_and_wait(|| real!(closefrom)(first)) }
}}
hook! { unsafe fn dup(fd: c_int) -> c_int => slim_dup {
    duplicating::duplicate(fd, None, || take(|| real!(dup)(fd)))
}}
hook! { unsafe fn dup2(from: c_int, to: c_int) -> c_int => slim_dup2 {
    duplicating::duplicate(from, Some(to), || take_and_wait(|| real!(dup2)(from, to)))
}}
hook! { unsafe fn __dup2(from: c_int, to: c_int) -> c_int => slim___dup2 {
    duplicating::duplicate(from, Some(to), || take_and_wait(|| real!(__dup2)(from, to)))
}}
hook! { unsafe fn dup3(from: c_int, to: c_int, flags: c_int) -> c_int => slim_dup3 {
    // The kernel refuses such flags before it looks at anything else.
    if flags & !libc::O_CLOEXEC != 0 { return real!(dup3)(from, to, flags); }
    duplicating::duplicate(from, Some(to), || take_and_wait(|| real!(dup3)(from, to, flags)))
}}
type Arguments = *mut c_void;
hook! { unsafe fn vdprintf(fd: c_int, format: *const c_char, list: Arguments) -> c_int => slim_vdprintf {
    demoting::for_stdio(fd);
    real!(vdprintf)(fd, format, list)
}}
hook! { unsafe fn __vdprintf_chk(fd: c_int, flag: c_int, format: *const c_char, list: Arguments) -> c_int => slim___vdprintf_chk {
    demoting::for_stdio(fd);
    real!(__vdprintf_chk)(fd, flag, format, list)
}}
hook! { unsafe fn fclose(file: *mut FILE) -> c_int => slim_fclose {
    let fd = if file.is_null() { -1 } else { libc::fileno(file) };
    demoting::no_stdio(fd);
    real!(fclose)(file)
}}
hook! { unsafe fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE => slim_fdopen {
    let file = real!(fdopen)(fd, mode);
    if !file.is_null() { demoting::stdio(fd); }
    file
}}
// Variadic in C; on the supported platforms the third argument is passed like a fixed one.
hook! { unsafe fn fcntl(fd: c_int, command: c_int, arg: *mut c_void) -> c_int => slim_fcntl {
    duplicating::control(fd, command, |fd| gives_out(command, || real!(fcntl)(fd, command, arg)))
}}
hook! { unsafe fn fcntl64(fd: c_int, command: c_int, arg: *mut c_void) -> c_int => slim_fcntl64 {
    duplicating::control(fd, command, |fd| gives_out(command, || real!(fcntl64)(fd, command, arg)))
}}
hook! { unsafe fn __fcntl(fd: c_int, command: c_int, arg: *mut c_void) -> c_int => slim___fcntl {
    duplicating::control(fd, command, |fd| gives_out(command, || real!(__fcntl)(fd, command, arg)))
}}

fn gives_out(command: c_int, real: impl Fn() -> c_int) -> c_int {
    match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => take(real),
        _ => real(),
    }
}

/// The environment that an exec without one of its own passes on.
fn environment() -> Strings {
    unsafe extern "C" {
        static environ: Strings;
    }
    // SAFETY: libc's variable, which the application may change only while no other thread uses it.
    unsafe { environ }
}

hook! { unsafe fn execve(path: *const c_char, args: Strings, env: Strings) -> c_int => slim_execve {
    exec(&Program { named: Named::Path(path), env }, || real!(execve)(path, args, env))
}}
hook! { unsafe fn execv(path: *const c_char, args: Strings) -> c_int => slim_execv {
    exec(&Program { named: Named::Path(path), env: environment() }, || real!(execv)(path, args))
}}
hook! { unsafe fn execvp(file: *const c_char, args: Strings) -> c_int => slim_execvp {
    exec(&Program { named: Named::Searched(file), env: environment() }, || real!(execvp)(file, args))
}}
hook! { unsafe fn execvpe(file: *const c_char, args: Strings, env: Strings) -> c_int => slim_execvpe {
    exec(&Program { named: Named::Searched(file), env }, || real!(execvpe)(file, args, env))
}}
hook! { unsafe fn fexecve(fd: c_int, args: Strings, env: Strings) -> c_int => slim_fexecve {
    exec(&Program { named: Named::Open(fd), env }, || real!(fexecve)(fd, args, env))
}}

hook! { unsafe fn prctl(what: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int => slim_prctl {
    if what == libc::PR_SET_SECCOMP { process::before_filter(); }
    real!(prctl)(what, a, b, c, d)
}}
hook! { unsafe fn unshare(flags: c_int) -> c_int => slim_unshare {
    process::unshare(flags, || real!(unshare)(flags))
}}
hook! { unsafe fn setns(fd: c_int, kind: c_int) -> c_int => slim_setns {
    process::set_namespace(fd, kind, || real!(setns)(fd, kind))
}}
hook! { unsafe fn pthread_exit(value: *mut c_void) => slim_pthread_exit {
    // If a handler calls this, none of the calls that it has interrupted returns.
    crate::ops::left::before_jump(usize::MAX);
    // A handler may end the thread that executes a program.
    withdraw();
    process::before_thread_exit();
    real!(pthread_exit)(value)
}}
hook! { unsafe fn getrlimit(what: c_int, limit: *mut c_void) -> c_int => slim_getrlimit {
    keep_limit(|| real!(getrlimit)(what, limit))
}}
hook! { unsafe fn getrlimit64(what: c_int, limit: *mut c_void) -> c_int => slim_getrlimit64 {
    keep_limit(|| real!(getrlimit64)(what, limit))
}}
hook! { unsafe fn setrlimit(what: c_int, limit: *const c_void) -> c_int => slim_setrlimit {
    keep_limit(|| real!(setrlimit)(what, limit))
}}
hook! { unsafe fn setrlimit64(what: c_int, limit: *const c_void) -> c_int => slim_setrlimit64 {
    keep_limit(|| real!(setrlimit64)(what, limit))
}}
hook! { unsafe fn prlimit(pid: libc::pid_t, what: c_int, new: *const c_void, old: *mut c_void) -> c_int => slim_prlimit {
    keep_limit(|| real!(prlimit)(pid, what, new, old))
}}
hook! { unsafe fn prlimit64(pid: libc::pid_t, what: c_int, new: *const c_void, old: *mut c_void) -> c_int => slim_prlimit64 {
    keep_limit(|| real!(prlimit64)(pid, what, new, old))
}}
hook! { unsafe fn getdtablesize() -> c_int => slim_getdtablesize {
    keep_limit(|| real!(getdtablesize)())
}}
hook! { unsafe fn sysconf(name: c_int) -> libc::c_long => slim_sysconf {
    if name != libc::_SC_OPEN_MAX { return real!(sysconf)(name); }
    keep_limit(|| real!(sysconf)(name))
}}
hook! { unsafe fn execveat(at: c_int, path: *const c_char, args: Strings, env: Strings, flags: c_int) -> c_int => slim_execveat {
    exec(&Program { named: Named::At(at, path, flags), env }, || real!(execveat)(at, path, args, env, flags))
}}

// Unlike `fork`, it runs no fork handlers.
hook! { unsafe fn _Fork() -> libc::pid_t => slim__Fork {
    process::forking(|| real!(_Fork)())
}}

hook! { unsafe fn system(command: *const c_char) -> c_int => slim_system {
    process::before_spawn(false);
    keep_limit(|| real!(system)(command))
}}
hook! { unsafe fn popen(command: *const c_char, mode: *const c_char) -> *mut FILE => slim_popen {
    process::before_spawn(false);
    keep_limit(|| real!(popen)(command, mode))
}}

type Pid = *mut libc::pid_t;
type Actions = *const libc::posix_spawn_file_actions_t;
type Attributes = *const libc::posix_spawnattr_t;
type Spawned = *const *mut c_char;

hook! { unsafe fn posix_spawn(pid: Pid, path: *const c_char, actions: Actions, attributes: Attributes, args: Spawned, env: Spawned) -> c_int => slim_posix_spawn {
    process::before_spawn(!actions.is_null());
    keep_limit(|| real!(posix_spawn)(pid, path, actions, attributes, args, env))
}}
hook! { unsafe fn posix_spawnp(pid: Pid, file: *const c_char, actions: Actions, attributes: Attributes, args: Spawned, env: Spawned) -> c_int => slim_posix_spawnp {
    process::before_spawn(!actions.is_null());
    keep_limit(|| real!(posix_spawnp)(pid, file, actions, attributes, args, env))
}}

type SpawnFunction =
    unsafe extern "C" fn(*mut c_int, *const c_char, Actions, Attributes, Spawned, Spawned) -> c_int;

/// `pidfd_spawn` and `pidfd_spawnp`, which libc has from 2.39 on.
///
/// # Safety
/// As `pidfd_spawn(3)` requires; `found` is libc's function, or null.
unsafe fn spawn_by_pidfd(
    found: *mut c_void,
    pidfd: *mut c_int,
    path: *const c_char,
    (actions, attributes): (Actions, Attributes),
    (args, env): (Spawned, Spawned),
) -> c_int {
    if found.is_null() {
        return libc::ENOSYS;
    }
    process::before_spawn(!actions.is_null());
    // SAFETY: libc's function of either name has this type.
    let real = unsafe { std::mem::transmute::<*mut c_void, SpawnFunction>(found) };
    // SAFETY: the caller's contract.
    let spawned = keep_limit(|| unsafe { real(pidfd, path, actions, attributes, args, env) });
    if spawned == 0 && !pidfd.is_null() {
        // SAFETY: libc has just written it.
        crate::ops::closing::given_out(unsafe { *pidfd });
    }
    spawned
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pidfd_spawn(
    pidfd: *mut c_int,
    path: *const c_char,
    actions: Actions,
    attributes: Attributes,
    args: Spawned,
    env: Spawned,
) -> c_int {
    let real = real_of!(c"pidfd_spawn");
    // SAFETY: the arguments of libc's function, which `real` is.
    unsafe { spawn_by_pidfd(real, pidfd, path, (actions, attributes), (args, env)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pidfd_spawnp(
    pidfd: *mut c_int,
    file: *const c_char,
    actions: Actions,
    attributes: Attributes,
    args: Spawned,
    env: Spawned,
) -> c_int {
    let real = real_of!(c"pidfd_spawnp");
    // SAFETY: the arguments of libc's function, which `real` is.
    unsafe { spawn_by_pidfd(real, pidfd, file, (actions, attributes), (args, env)) }
}
