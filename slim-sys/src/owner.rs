//! Signal-driven I/O: a descriptor's owner gets a signal when the descriptor is ready (fcntl(2), `F_SETOWN`).

use crate::open::for_each_process;
use crate::sigio::{set_signal, signal_of};
use crate::{pid, set_status, status};
use libc::c_int;

/// As in `asm-generic/fcntl.h`; the libc crate lacks them for some targets.
const F_SETOWN_EX: c_int = 15;
const F_GETOWN_EX: c_int = 16;
/// `SI_SIGIO`: the `si_code` of a signal that reports a descriptor.
const SI_SIGIO: c_int = -5;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct SignalOwner {
    kind: c_int,
    id: c_int,
}
const THREAD: c_int = 0;
const GROUP: c_int = 2;

/// The fields of `siginfo_t` that report a descriptor; the rest is zero.
#[repr(C)]
struct SignalInfo {
    signal: c_int,
    errno: c_int,
    code: c_int,
    _pad: c_int,
    band: i64,
    fd: c_int,
    _rest: [c_int; 25],
}
const _: () = assert!(size_of::<SignalInfo>() == 128);

/// The owner and its signal. The owner's number is 0 if there is none, or if it has ended.
fn owner(fd: c_int) -> Option<(SignalOwner, c_int)> {
    let mut owner = SignalOwner::default();
    // SAFETY: the kernel fills the structure, which has the kernel's layout.
    unsafe { call!(libc::SYS_fcntl, fd, F_GETOWN_EX, &raw mut owner) }.ok()?;
    Some((owner, signal_of(fd).unwrap_or(0)))
}

/// Copies the owner and its signal from one descriptor to another.
pub fn copy_owner(from: c_int, to: c_int) {
    if let Some((owner, signal)) = owner(from) {
        // SAFETY: the kernel reads the structure, which has the kernel's layout.
        let _ = unsafe { call!(libc::SYS_fcntl, to, F_SETOWN_EX, &raw const owner) };
        set_signal(to, signal);
    }
}

/// Puts a file in `O_ASYNC` mode. From now on its signals report the number `fd`.
pub fn set_asynchronous(fd: c_int) {
    let flags = status(fd);
    // The kernel notes the number only when the flag changes.
    set_status(fd, flags & !libc::O_ASYNC);
    set_status(fd, flags | libc::O_ASYNC);
}

/// Signals the owner of a file, if the file has one and is in `O_ASYNC` mode, that the descriptor is ready. `fd` refers to the
/// file that has got, or is about to get, the number `number`.
pub fn tell_owner(fd: c_int, number: c_int) {
    if status(fd) & libc::O_ASYNC == 0 {
        return;
    }
    // Without a living owner the number is 0, which `kill` would take for the process group of the caller.
    let Some((owner, signal)) = owner(fd).filter(|(owner, _)| owner.id != 0) else {
        return;
    };
    let ready = libc::POLLIN | libc::POLLRDNORM | libc::POLLOUT | libc::POLLWRNORM;
    let told = SignalInfo {
        signal,
        errno: 0,
        code: SI_SIGIO,
        _pad: 0,
        band: ready.into(),
        fd: number,
        _rest: [0; 25],
    };
    let any = if signal == 0 { libc::SIGIO } else { signal };
    let (id, info) = (owner.id, &raw const told);
    // SAFETY: the kernel reads `told`, which has the size of the kernel's `siginfo_t`; the kernel would send the same signal itself.
    let _ = unsafe {
        match owner.kind {
            // No system call queues a signal for a group; and `kill` takes -1, the group of a container's first process, for all processes.
            GROUP if signal != 0 || id == 1 => {
                return for_each_process(|one| queue_in(id, one, any, &told));
            }
            GROUP => call!(libc::SYS_kill, -id, any),
            THREAD if signal == 0 => call!(libc::SYS_tkill, id, any),
            THREAD => call!(libc::SYS_rt_tgsigqueueinfo, pid(), id, any, info),
            _ if signal == 0 => call!(libc::SYS_kill, id, any),
            _ => call!(libc::SYS_rt_sigqueueinfo, id, any, info),
        }
    };
}

/// Queues a signal for a process, if it is in this group.
fn queue_in(group: c_int, process: c_int, signal: c_int, told: &SignalInfo) {
    let told = &raw const *told;
    // SAFETY: as in `tell_owner`.
    let _ = unsafe {
        match call!(libc::SYS_getpgid, process) {
            Ok(its) if its == group.into() => {
                call!(libc::SYS_rt_sigqueueinfo, process, signal, told)
            }
            other => other,
        }
    };
}
