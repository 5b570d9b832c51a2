//! Which socket a descriptor is.

use libc::c_int;

/// Which socket a descriptor is, as long as that exists; `None` if it is none.
pub fn identity(fd: c_int) -> Option<u64> {
    let mut file = std::mem::MaybeUninit::<libc::stat>::uninit();
    call!(libc::SYS_fstat, fd, file.as_mut_ptr()).ok()?;
    // SAFETY: filled by the kernel.
    let file = unsafe { file.assume_init() };
    (file.st_mode & libc::S_IFMT == libc::S_IFSOCK).then(|| identity_of(file.st_dev, file.st_ino))
}

/// The [`identity`] of a socket that is this file. The kernel numbers sockets with 32 bits, and file systems too.
pub fn identity_of(device: u64, inode: u64) -> u64 {
    device << 32 | inode & u64::from(u32::MAX)
}
