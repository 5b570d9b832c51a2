//! Finds the preload library, the programs of this workspace, and the C sources.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    time::SystemTime,
};

use crate::{Error, Result};

/// Environment variable that names the preload library and overrides the search.
pub const PRELOAD_VAR: &str = "SLIM_PRELOAD";

/// File name of the preload library.
pub const PRELOAD: &str = "libslim_preload.so";

/// The preload library: `SLIM_PRELOAD` if set, else next to the running program, else in the
/// build directories beside it (the newest, so that a stale one is not tested by accident).
pub fn preload() -> Result<PathBuf> {
    if let Some(path) = env::var_os(PRELOAD_VAR)
        .filter(|v| !v.is_empty())
        .map(PathBuf::from)
    {
        if path.is_file() {
            return path
                .canonicalize()
                .map_err(Error::io(path.display().to_string()));
        }
        let hint = format!("{PRELOAD_VAR} names a file that does not exist");
        return Err(Error::Missing {
            what: PRELOAD.into(),
            tried: vec![path],
            hint,
        });
    }
    find(PRELOAD, "cargo build --release -p slim-preload")
}

/// A program of this workspace, such as `slim` or `slim-lab-agent`.
pub fn program(name: &str) -> Result<PathBuf> {
    find(name, "cargo build --release")
}

/// The directory with the byte-transfer component for the Open MPI of this compiler, built now by `slim-btl/build` in the profile
/// of the running program. `series` is the directory's name. The reason if it cannot be built here.
pub fn component(mpicc: &Path, series: &str) -> Result<PathBuf> {
    let own = own_build_dir();
    let name = own.file_name().unwrap_or_default().to_string_lossy();
    let profile = if name == "debug" { "dev" } else { &*name };
    let script = root().join("slim-btl/build");
    let dir = component_dir(series);
    let mut command = Command::new(&script);
    command.arg(profile).arg(&dir).env("MPICC", mpicc);
    command.envs(own.parent().map(|target| ("CARGO_TARGET_DIR", target)));
    let line = format!("{} {profile}", script.display());
    let output = command.output().map_err(Error::io(line.clone()))?;
    match output.status.code() {
        Some(0) => Ok(dir),
        Some(3) => Err(Error::Missing {
            what: "mca_btl_slim.so".into(),
            tried: Vec::new(),
            hint: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        }),
        _ => Err(Error::command(line, &output)),
    }
}

/// The directory of that name.
pub fn component_dir(series: &str) -> PathBuf {
    own_build_dir().join(series)
}

/// The output directory of the running program's build.
fn own_build_dir() -> PathBuf {
    let first = build_dirs().into_iter().next();
    first.unwrap_or_else(|| "target/debug".into())
}

/// A source file in the repository's `programs/`, for example `slim_pp.c`.
pub fn source(name: &str) -> Result<PathBuf> {
    let mut tried = vec![root().join("programs").join(name)];
    // In an installed or copied build, the directory of programs is beside the binary.
    tried.extend(
        build_dirs()
            .into_iter()
            .map(|dir| dir.join("programs").join(name)),
    );
    match tried.iter().find(|path| path.is_file()) {
        Some(path) => Ok(path.clone()),
        None => Err(Error::Missing {
            what: name.into(),
            tried,
            hint: "run inside the repository".into(),
        }),
    }
}

/// The repository.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the crate is in a workspace")
}

/// Builds a C program of one file with `compiler` in the [`scratch`] directory `place`, unless it is up to date.
/// Returns the path of the program.
pub fn compile(compiler: &Path, place: &str, source: &Path) -> Result<PathBuf> {
    build(compiler, &[], place, &source.with_extension(""), source)
}

/// [`compile`], with these variables for the compiler (`NAME=VALUE`).
pub fn compile_with(
    variables: &[&str],
    compiler: &str,
    place: &str,
    source: &Path,
) -> Result<PathBuf> {
    let words = [variables, &[compiler]].concat();
    build(
        Path::new("env"),
        &words,
        place,
        &source.with_extension(""),
        source,
    )
}

/// Builds a shared library for `LD_PRELOAD` in the same way.
pub fn compile_library(place: &str, source: &Path) -> Result<PathBuf> {
    let name = source.with_extension("so");
    build(Path::new("cc"), &["-shared", "-fPIC"], place, &name, source)
}

fn build(
    compiler: &Path,
    options: &[&str],
    place: &str,
    name: &Path,
    source: &Path,
) -> Result<PathBuf> {
    let name = name
        .file_name()
        .ok_or_else(|| Error::Invalid(format!("no file name: {}", source.display())))?;
    let changed = |path: &Path| fs::metadata(path).and_then(|m| m.modified());
    let is_new = |program: &PathBuf| match (changed(program), changed(source)) {
        (Ok(built), Ok(written)) => built > written,
        _ => false,
    };
    // That of another profile is as good, and perhaps nothing can be written.
    let all = build_dirs().into_iter();
    let mut all = all.map(|dir| dir.join("lab").join(place).join(name));
    if let Some(program) = all.find(is_new) {
        return Ok(program);
    }
    let place = scratch(place)?;
    let program = place.join(name);
    // Several processes may build it at the same time: each in a directory of its own, then renamed.
    let dir = tempfile::tempdir_in(&place).map_err(Error::io(place.display().to_string()))?;
    let own = dir.path().join(name);
    let mut command = Command::new(compiler);
    command.args(options);
    command.args(["-O2", "-o"]).arg(&own).arg(source);
    let line = format!("{} -O2 {}", compiler.display(), source.display());
    let output = command.output().map_err(Error::io(line.clone()))?;
    if !output.status.success() {
        return Err(Error::command(line, &output));
    }
    fs::rename(&own, &program).map_err(Error::io(program.display().to_string()))?;
    Ok(program)
}

/// A directory for programs built at run time, beside the build's own output.
pub fn scratch(name: &str) -> Result<PathBuf> {
    let base = build_dirs()
        .into_iter()
        .next()
        .unwrap_or_else(env::temp_dir);
    let dir = base.join("lab").join(name);
    fs::create_dir_all(&dir).map_err(Error::io(dir.display().to_string()))?;
    Ok(dir)
}

/// The directory of the running program (without `deps` and `examples`, where cargo places test programs and examples), then the
/// directories of other profiles beside it.
fn build_dirs() -> Vec<PathBuf> {
    let Ok(exe) = env::current_exe() else {
        return Vec::new();
    };
    dirs_for(&exe)
}

fn dirs_for(exe: &Path) -> Vec<PathBuf> {
    let Some(mut own) = exe.parent() else {
        return Vec::new();
    };
    if own
        .file_name()
        .is_some_and(|n| n == "deps" || n == "examples")
    {
        own = own.parent().unwrap_or(own);
    }
    let mut dirs = vec![own.to_owned()];
    if let Some(target) = own.parent() {
        dirs.extend(
            ["release", "debug"]
                .map(|p| target.join(p))
                .into_iter()
                .filter(|d| d != own),
        );
    }
    dirs
}

fn find(name: &str, how: &str) -> Result<PathBuf> {
    let tried: Vec<_> = build_dirs().into_iter().map(|dir| dir.join(name)).collect();
    let age = |path: &&PathBuf| {
        fs::metadata(path)
            .and_then(|m| m.modified())
            .unwrap_or(SystemTime::UNIX_EPOCH)
    };
    match tried.iter().filter(|p| p.is_file()).max_by_key(age) {
        Some(path) => Ok(path.clone()),
        None => Err(Error::Missing {
            what: name.into(),
            tried,
            hint: format!("build it: {how}"),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directory_above_deps_is_searched_first() {
        let dirs = dirs_for(Path::new("/t/debug/deps/lab-123"));
        assert_eq!(
            dirs,
            [PathBuf::from("/t/debug"), PathBuf::from("/t/release")]
        );
        let dirs = dirs_for(Path::new("/opt/slim/bin/slim"));
        assert_eq!(dirs[0], PathBuf::from("/opt/slim/bin"));
    }

    #[test]
    fn a_missing_program_is_reported_with_its_name_and_a_hint() {
        let text = program("no-such-program").unwrap_err().to_string();
        assert!(
            text.contains("no-such-program not found") && text.contains("cargo build"),
            "{text}"
        );
    }

    #[test]
    fn the_test_program_is_found() {
        assert!(source("slim_pp.c").is_ok_and(|p| p.is_file()));
        assert!(source("no-such.c").is_err());
    }
}
