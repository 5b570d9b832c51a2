//! The program that is about to be executed: does it load this library?
//!
//! The answer must not be yes if the program goes on without the library: its connections would be sessions for their peers, and plain
//! TCP here. Whatever is not clear counts as no.

use crate::{runtime, sys};
use libc::{c_char, c_int, c_void};
use slim_core::config::{Config, Policy};
use std::ffi::{CStr, OsStr, OsString};
use std::fs::{self, File};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// How an exec names the program.
pub enum Named {
    /// By a path.
    Path(*const c_char),
    /// By a path, or by a name that is looked for in `PATH`.
    Searched(*const c_char),
    /// By a path below an open directory, with the flags of `execveat`.
    At(c_int, *const c_char, c_int),
    /// By an open descriptor.
    Open(c_int),
}

/// The arguments of an exec.
pub struct Program {
    /// The program.
    pub named: Named,
    /// Its environment.
    pub env: Strings,
}

/// A list of strings as C has it: it ends with a null pointer.
pub type Strings = *const *const c_char;

/// What comes of an exec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExecOutcome {
    /// It fails: there is no such program, or it cannot be executed.
    Fails,
    /// The new program does not load this library, or it is not clear whether it does.
    Plain,
    /// The new program loads this library.
    Ours,
}

/// Scripts that name scripts as their interpreters; the kernel follows five.
const DEPTH: u32 = 5;
/// The kernel reads this much of a script.
const HEAD: usize = 256;

impl Program {
    /// What comes of the exec, as far as can be told beforehand.
    pub fn outcome(&self) -> ExecOutcome {
        runtime::quietly(|| {
            let (Some(path), Some(env)) = (self.path(), strings(self.env)) else {
                return ExecOutcome::Fails;
            };
            let loader = own_loader();
            let is_same = loader.is_some() && loader == loader_of(&path, DEPTH);
            match names_us(&env) && is_unprivileged() && is_same {
                true => ExecOutcome::Ours,
                false => ExecOutcome::Plain,
            }
        })
    }

    /// The program's file. `None` if there is no such file, or it cannot be executed.
    fn path(&self) -> Option<PathBuf> {
        let path = match self.named {
            Named::Open(fd) => format!("/proc/self/fd/{fd}").into(),
            Named::Path(path) => PathBuf::from(string(path)?),
            Named::At(at, path, flags) => {
                let path = PathBuf::from(string(path)?);
                match (path.as_os_str().is_empty(), at) {
                    (true, _) if flags & libc::AT_EMPTY_PATH == 0 => return None,
                    (false, libc::AT_FDCWD) => path,
                    (false, _) if path.is_absolute() => path,
                    _ => Path::new(&format!("/proc/self/fd/{at}")).join(path),
                }
            }
            Named::Searched(name) => {
                let name = string(name)?;
                match name.as_bytes().contains(&b'/') {
                    true => PathBuf::from(name),
                    false => return search(&name),
                }
            }
        };
        is_executable(&path).then_some(path)
    }
}

/// Looks a program up as `execvp` does.
fn search(name: &OsStr) -> Option<PathBuf> {
    if name.is_empty() {
        return None;
    }
    // The path that libc uses if there is no variable.
    let dirs = std::env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    let mut all = std::env::split_paths(&dirs).map(|dir| dir.join(name));
    all.find(|path| is_executable(path))
}

fn is_executable(path: &Path) -> bool {
    let Ok(name) = std::ffi::CString::new(path.as_os_str().as_bytes()) else {
        return false;
    };
    // SAFETY: a valid string.
    let allowed =
        || unsafe { libc::faccessat(libc::AT_FDCWD, name.as_ptr(), libc::X_OK, libc::AT_EACCESS) };
    path.is_file() && allowed() == 0
}

/// A string of the application; `None` if it cannot be read.
fn string(at: *const c_char) -> Option<OsString> {
    if at.is_null() || !sys::is_readable(at.cast(), 1) {
        return None;
    }
    // SAFETY: readable. The application says that it is a string.
    let text = unsafe { CStr::from_ptr(at) };
    Some(OsString::from_vec(text.to_bytes().to_vec()))
}

fn strings(list: Strings) -> Option<Vec<OsString>> {
    let mut all = Vec::new();
    // The kernel takes a missing list for an empty one.
    while !list.is_null() {
        let at = list.wrapping_add(all.len());
        let bytes = sys::memory(at.cast(), size_of::<*const c_char>())?;
        let text = usize::from_ne_bytes(bytes.try_into().ok()?) as *const c_char;
        if text.is_null() {
            break;
        }
        all.push(string(text)?);
    }
    Some(all)
}

/// Whether this environment makes the loader load this library, and does not switch SLIM off.
fn names_us(env: &[OsString]) -> bool {
    let pairs = || {
        env.iter().filter_map(|pair| {
            let pair = pair.as_bytes();
            let at = pair.iter().position(|byte| *byte == b'=')?;
            let (name, value) = pair.split_at(at);
            Some((name, OsStr::from_bytes(value.get(1..)?)))
        })
    };
    let own = own_file();
    // If there are several, the loader takes one of them.
    let preloaded = pairs().filter(|(name, _)| *name == b"LD_PRELOAD");
    let named = preloaded.map(|(_, list)| {
        let mut libraries = list.as_bytes().split(|byte| b": ".contains(byte));
        libraries.any(|path| file_of(Path::new(OsStr::from_bytes(path))) == own)
    });
    let named: Vec<bool> = named.collect();
    if own.is_none() || named.is_empty() || named.contains(&false) {
        return false;
    }
    let settings = pairs().filter_map(|(name, value)| {
        let name = String::from_utf8(name.to_vec()).ok()?;
        Some((name, value.to_owned()))
    });
    Config::from_vars(settings).0.policy != Policy::Off
}

/// The file of this library: device and inode.
fn own_file() -> Option<(u64, u64)> {
    // SAFETY: plain data for which all zeroes is valid.
    let mut about: libc::Dl_info = unsafe { std::mem::zeroed() };
    let here = own_file as *const c_void;
    // SAFETY: an address within this library, and a structure that is filled in.
    let found = unsafe { libc::dladdr(here, &raw mut about) } != 0 && !about.dli_fname.is_null();
    // SAFETY: the loader's string, which lasts as long as the library.
    let path = found.then(|| unsafe { CStr::from_ptr(about.dli_fname) })?;
    file_of(Path::new(OsStr::from_bytes(path.to_bytes())))
}

/// A library of `LD_PRELOAD`. The loader looks a name without a slash up in its own directories.
fn file_of(path: &Path) -> Option<(u64, u64)> {
    let named = path.as_os_str().as_bytes().contains(&b'/');
    let about = fs::metadata(path).ok().filter(|_| named)?;
    Some((about.dev(), about.ino()))
}

/// Whether the process has not got another user's or group's rights: the loader of a privileged program ignores `LD_PRELOAD`.
fn is_unprivileged() -> bool {
    // SAFETY: these calls have no arguments, and cannot fail.
    unsafe { libc::getuid() == libc::geteuid() && libc::getgid() == libc::getegid() }
}

/// The loader of the present program, `PT_INTERP`. `None` if it has been started by its loader, or has none.
fn own_loader() -> Option<OsString> {
    loader_of(Path::new("/proc/self/exe"), 0)
}

/// The loader of a program, or of a script's interpreter. `None` if the program has none, or gets rights of its own.
fn loader_of(path: &Path, depth: u32) -> Option<OsString> {
    const RIGHTS: u32 = libc::S_ISUID | libc::S_ISGID;
    let file = File::open(path).ok()?;
    let about = file.metadata().ok()?;
    if !about.is_file() || about.mode() & RIGHTS != 0 || sys::has_capabilities(&file) {
        return None;
    }
    let mut head = [0; HEAD];
    let len = file.read_at(&mut head, 0).ok()?;
    let head = head.get(..len)?;
    match head.strip_prefix(b"#!") {
        Some(line) if depth > 0 => loader_of(&interpreter(line)?, depth - 1),
        Some(_) => None,
        None => elf_loader(&file, head),
    }
}

/// The interpreter that the first line of a script names. `None` if the kernel may read the line in another way.
fn interpreter(line: &[u8]) -> Option<PathBuf> {
    let end = line.iter().position(|byte| *byte == b'\n')?;
    let mut words = line.get(..end)?.split(|byte| b" \t".contains(byte));
    let path = words.find(|word| !word.is_empty())?;
    Some(PathBuf::from(OsStr::from_bytes(path)))
}

/// The loader that a 64-bit ELF file for this processor names.
fn elf_loader(file: &File, head: &[u8]) -> Option<OsString> {
    const IDENT: [u8; 6] = [
        0x7f,
        b'E',
        b'L',
        b'F',
        2, // 64 bits
        if cfg!(target_endian = "little") { 1 } else { 2 },
    ];
    const MACHINE: u16 = if cfg!(target_arch = "x86_64") {
        62
    } else if cfg!(target_arch = "aarch64") {
        183
    } else {
        0
    };
    const PT_INTERP: u32 = 3;
    const MOST_HEADERS: u16 = 128;
    let half = |at| number::<2>(head, at).map(u16::from_ne_bytes);
    if !head.starts_with(&IDENT) || half(18)? != MACHINE {
        return None;
    }
    let table = u64::from_ne_bytes(number(head, 32)?);
    let (size, count) = (half(54)?, half(56)?);
    for n in 0..count.min(MOST_HEADERS) {
        let mut header = [0; 56];
        let at = table.checked_add(u64::from(n) * u64::from(size))?;
        file.read_exact_at(&mut header, at).ok()?;
        if u32::from_ne_bytes(number(&header, 0)?) == PT_INTERP {
            let at = u64::from_ne_bytes(number(&header, 8)?);
            let len = u64::from_ne_bytes(number(&header, 32)?);
            let mut path = vec![0; usize::try_from(len).ok().filter(|len| *len < 4096)?];
            file.read_exact_at(&mut path, at).ok()?;
            return Some(OsString::from_vec(path));
        }
    }
    None
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loader_of_a_script_is_that_of_its_interpreter() {
        let own = own_loader();
        assert!(own.is_some());
        let dir = std::env::temp_dir().join(format!("slim-program-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let script = |name: &str, text: &str| {
            let path = dir.join(name);
            fs::write(&path, text).unwrap();
            path
        };
        let first = script("first", "#!/bin/sh -e\nexit 0\n");
        let second = script("second", &format!("#! {}\n", first.display()));
        assert_eq!(loader_of(Path::new("/bin/sh"), DEPTH), own);
        assert_eq!(loader_of(&first, DEPTH), own);
        assert_eq!(loader_of(&second, DEPTH), own);
        assert_eq!(loader_of(&second, 1), None);
        for text in ["", "exit 0\n", "#!/bin/sh", "#!\n", "\x7fELF"] {
            assert_eq!(loader_of(&script("other", text), DEPTH), None, "{text:?}");
        }
        assert_eq!(loader_of(&dir, DEPTH), None);
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_program_that_is_not_there_makes_the_exec_fail() {
        let outcome = |named| {
            let env = std::ptr::null();
            Program { named, env }.outcome()
        };
        let (here, gone) = (c"/bin/sh".as_ptr(), c"/bin/slim-is-not-here".as_ptr());
        assert_eq!(outcome(Named::Path(gone)), ExecOutcome::Fails);
        assert_eq!(outcome(Named::Path(here)), ExecOutcome::Plain);
        let nowhere = std::ptr::without_provenance(8);
        assert_eq!(outcome(Named::Path(nowhere)), ExecOutcome::Fails);
        assert_eq!(
            outcome(Named::Path(c"/etc/passwd".as_ptr())),
            ExecOutcome::Fails
        );
        for (name, want) in [
            (c"sh", ExecOutcome::Plain),
            (c"slim-is-not-here", ExecOutcome::Fails),
            (c"", ExecOutcome::Fails),
        ] {
            assert_eq!(outcome(Named::Searched(name.as_ptr())), want, "{name:?}");
        }
        let at = |path: &CStr, flags| outcome(Named::At(libc::AT_FDCWD, path.as_ptr(), flags));
        assert_eq!(at(c"", 0), ExecOutcome::Fails);
        assert_eq!(at(c"/bin/sh", 0), ExecOutcome::Plain);
    }
}
