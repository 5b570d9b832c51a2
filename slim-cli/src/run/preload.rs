//! Finds `libslim_preload.so`, and adds it to `LD_PRELOAD`.

use std::env;
use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::failure::CliError;

/// File name of the preload library.
pub const LIBRARY: &str = "libslim_preload.so";

/// Environment variable that names a library that is not in its usual place.
pub const VARIABLE: &str = "SLIM_PRELOAD";

/// Finds the library: `given` (option), then `SLIM_PRELOAD`, then next to the
/// program and in its `../lib`. A path that the user gave must exist.
pub fn find(given: Option<&Path>) -> Result<PathBuf, CliError> {
    let from_env = env::var_os(VARIABLE)
        .filter(|v| !v.is_empty())
        .map(PathBuf::from);
    if let Some(path) = given {
        return usable(path, "--preload");
    }
    if let Some(path) = from_env {
        return usable(&path, VARIABLE);
    }
    let program = env::current_exe()
        .map_err(|e| CliError::input(format!("cannot find the path of this program: {e}")))?;
    let places = places_near(&program);
    places
        .iter()
        .find(|p| p.is_file())
        .ok_or_else(|| missing(&places))
        .and_then(|p| usable(p, "the library"))
}

fn places_near(program: &Path) -> Vec<PathBuf> {
    let Some(dir) = program.parent() else {
        return Vec::new();
    };
    let mut places = vec![dir.join(LIBRARY)];
    if let Some(prefix) = dir.parent() {
        places.push(prefix.join("lib").join(LIBRARY));
        places.push(prefix.join("lib/slim").join(LIBRARY));
    }
    places
}

fn missing(places: &[PathBuf]) -> CliError {
    let looked: Vec<_> = places.iter().map(|p| p.display().to_string()).collect();
    CliError::input(format!(
        "{LIBRARY} not found (looked at {}); build it with `cargo build --release`, or name it with --preload or {VARIABLE}",
        looked.join(", ")
    ))
}

/// Checks that `LD_PRELOAD` can name the library. The loader splits the variable at blanks and colons, and supports no quoting.
fn usable(path: &Path, source: &str) -> Result<PathBuf, CliError> {
    let full = path
        .canonicalize()
        .map_err(|e| CliError::input(format!("{source}: {}: {e}", path.display())))?;
    if !full.is_file() {
        return Err(CliError::input(format!(
            "{source}: {} is not a file",
            full.display()
        )));
    }
    if !is_shared_library(&full) {
        return Err(CliError::input(format!(
            "{source}: {} is not a shared library for this machine",
            full.display()
        )));
    }
    match full.to_str() {
        Some(text) if !text.contains([' ', ':', '\t', '\n', '\'']) => Ok(full),
        _ => Err(CliError::input(format!(
            "{source}: {} has a blank, colon or quote in its path, which LD_PRELOAD cannot carry",
            full.display()
        ))),
    }
}

/// The loader only warns about a file that it cannot load, and runs the program without it; so check first.
fn is_shared_library(path: &Path) -> bool {
    const ELF64: [u8; 5] = *b"\x7fELF\x02";
    const TYPE: usize = 16;
    const MACHINE: usize = 18;
    const SHARED: u16 = 3;
    let head = |path: &Path| -> Option<[u8; 20]> {
        let mut head = [0; 20];
        File::open(path).ok()?.read_exact(&mut head).ok()?;
        Some(head)
    };
    let number = |head: &[u8; 20], at: usize| u16::from_ne_bytes([head[at], head[at + 1]]);
    let (Some(library), Some(ours)) = (head(path), head(Path::new("/proc/self/exe"))) else {
        return false;
    };
    library.starts_with(&ELF64)
        && number(&library, TYPE) == SHARED
        && number(&library, MACHINE) == number(&ours, MACHINE)
}

/// `LD_PRELOAD` with our library in front of the user's entries.
pub fn joined(library: &Path, present: Option<&OsStr>) -> String {
    let rest = without(present.and_then(OsStr::to_str).unwrap_or_default());
    let ours = library.display();
    if rest.is_empty() {
        ours.to_string()
    } else {
        format!("{ours}:{rest}")
    }
}

/// `LD_PRELOAD` without any SLIM library in it.
pub fn without(present: &str) -> String {
    let others: Vec<_> = present
        .split([':', ' '])
        .filter(|entry| !entry.is_empty() && !is_ours(entry))
        .collect();
    others.join(":")
}

fn is_ours(entry: &str) -> bool {
    Path::new(entry).file_name() == Some(OsStr::new(LIBRARY))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_library_is_added_in_front_and_only_once() {
        let lib = Path::new("/x/libslim_preload.so");
        assert_eq!(joined(lib, None), "/x/libslim_preload.so");
        assert_eq!(
            joined(lib, Some(OsStr::new("/a.so /old/libslim_preload.so:/b.so"))),
            "/x/libslim_preload.so:/a.so:/b.so"
        );
    }

    #[test]
    fn removing_our_library_leaves_the_users_entries() {
        assert_eq!(without("/x/libslim_preload.so"), "");
        assert_eq!(without("/x/libslim_preload.so:/tmp/t.so"), "/tmp/t.so");
    }

    #[test]
    fn a_named_library_must_exist() {
        let failure = find(Some(Path::new("/nowhere/libslim_preload.so"))).unwrap_err();
        assert_eq!(failure.status(), 2);
        assert!(
            failure.to_string().contains("/nowhere/libslim_preload.so"),
            "{failure}"
        );
    }

    #[test]
    fn a_colon_in_the_path_is_refused() {
        let dir = tempfile::Builder::new().prefix("slim:").tempdir().unwrap();
        let file = dir.path().join(LIBRARY);
        std::fs::copy("/proc/self/exe", &file).unwrap();
        let failure = find(Some(&file)).unwrap_err();
        assert!(
            failure.to_string().contains("LD_PRELOAD cannot carry"),
            "{failure}"
        );
    }

    #[test]
    fn the_library_is_searched_next_to_the_program_and_then_in_lib() {
        let places = places_near(Path::new("/opt/slim/bin/slim"));
        assert_eq!(places[0], Path::new("/opt/slim/bin/libslim_preload.so"));
        assert_eq!(places[1], Path::new("/opt/slim/lib/libslim_preload.so"));
    }
}
