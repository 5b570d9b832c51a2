//! The native component for Open MPI (`mca_btl_slim.so`): where it is, and how `mpirun` has its ranks use it.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::launcher::OpenMpi;

/// File name of the component.
const COMPONENT: &str = "mca_btl_slim.so";
/// Its directory, beside `slim` or in the prefix's `lib/slim`. One for each series of Open MPI.
const DIRECTORY: &str = "openmpi4";

/// Arguments for `mpirun`, before those of the user, so that ranks talk by the component; within a host by shared memory, as
/// otherwise. Or, in one line, why that cannot be.
pub fn arguments(
    version: OpenMpi,
    mpirun: &Path,
    args: &[OsString],
) -> Result<Vec<OsString>, String> {
    if version != OpenMpi::V4 {
        return Err("it is for Open MPI 4.1 only".into());
    }
    let program = env::current_exe().map_err(|e| e.to_string())?;
    let dir = find(&program)?;
    let info = OmpiInfo::ask(mpirun)?;
    if !info.loads_components {
        return Err(format!(
            "{} is built without dlopen and takes no components",
            mpirun.display()
        ));
    }
    chosen(&dir, &info.components, args)
}

fn find(program: &Path) -> Result<PathBuf, String> {
    let places = places_near(program);
    let found = places.iter().find(|dir| dir.join(COMPONENT).is_file());
    let Some(dir) = found else {
        return Err(format!(
            "{COMPONENT} is not built (slim-btl/build does that): looked in {}",
            places
                .iter()
                .map(|dir| dir.display().to_string())
                .collect::<Vec<_>>()
                .join(", ")
        ));
    };
    match dir.to_str() {
        Some(text) if !text.contains([':', ';', ',']) => Ok(dir.clone()),
        _ => Err(format!("{} cannot stand in a list of paths", dir.display())),
    }
}

fn places_near(program: &Path) -> Vec<PathBuf> {
    let Some(dir) = program.parent() else {
        return Vec::new();
    };
    let mut places = vec![dir.join(DIRECTORY)];
    places.extend(dir.parent().map(|p| p.join("lib/slim").join(DIRECTORY)));
    places
}

/// What `ompi_info` says of an Open MPI.
struct OmpiInfo {
    loads_components: bool,
    /// Where its own components are.
    components: String,
}

impl OmpiInfo {
    fn ask(mpirun: &Path) -> Result<Self, String> {
        let real = mpirun.canonicalize().unwrap_or_else(|_| mpirun.into());
        let beside = [mpirun, &real].map(|program| program.with_file_name("ompi_info"));
        let none = || format!("no ompi_info beside {}", mpirun.display());
        let program = beside.iter().find(|p| p.is_file()).ok_or_else(none)?;
        let output = Command::new(program)
            .args(["--parsable", "-c", "--path", "pkglibdir"])
            .env_remove("LD_PRELOAD")
            .stdin(Stdio::null())
            .output()
            .map_err(|e| format!("{}: {e}", program.display()))?;
        let info = Self::parse(&String::from_utf8_lossy(&output.stdout));
        info.ok_or_else(|| format!("{} does not say where components are", program.display()))
    }

    fn parse(text: &str) -> Option<Self> {
        let value = |name: &str| text.lines().find_map(|line| line.strip_prefix(name));
        Some(Self {
            loads_components: value("option:dlopen:") != Some("no"),
            components: value("path:pkglibdir:")?.to_owned(),
        })
    }
}

/// The arguments, unless the user has chosen what they would choose.
fn chosen(dir: &Path, components: &str, args: &[OsString]) -> Result<Vec<OsString>, String> {
    let theirs = |name: &str| {
        let is_mca = |word: &OsString| word == "--mca" || word == "-mca";
        let on_line = args.windows(2).any(|w| is_mca(&w[0]) && w[1] == name);
        on_line || env::var_os(format!("OMPI_MCA_{name}")).is_some()
    };
    for name in ["btl", "mca_base_component_path"] {
        if theirs(name) {
            return Err(format!("the parameter {name} is set already"));
        }
    }
    let mut path = OsString::from(dir);
    path.push(format!(":{components}"));
    if let Some(home) = env::var_os("HOME") {
        path.push(":");
        path.push(Path::new(&home).join(".openmpi/components"));
    }
    let mut all: Vec<OsString> = ["--mca", "mca_base_component_path"].map(Into::into).into();
    all.push(path);
    all.extend(["--mca", "btl", "self,vader,slim"].map(Into::into));
    if !theirs("pml") {
        all.extend(["--mca", "pml", "ob1"].map(Into::into));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(args: &str) -> Vec<OsString> {
        args.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn ranks_are_told_of_the_component() {
        let args = chosen(Path::new("/s/openmpi4"), "/l", &words("-n 2 prog")).unwrap();
        let path = args[2].to_string_lossy();
        assert_eq!(args[..2], words("--mca mca_base_component_path"));
        assert!(path.starts_with("/s/openmpi4:/l"), "{path}");
        assert_eq!(args[3..], words("--mca btl self,vader,slim --mca pml ob1"));
    }

    #[test]
    fn what_the_user_has_chosen_stays() {
        let dir = Path::new("/s/openmpi4");
        let args = chosen(dir, "/l", &words("--mca pml ob1 -n 2 prog")).unwrap();
        assert!(!args.contains(&"pml".into()), "{args:?}");
        let why = chosen(dir, "/l", &words("--mca btl tcp,self -n 2 prog")).unwrap_err();
        assert!(why.contains("btl"), "{why}");
    }

    #[test]
    fn a_missing_component_is_named_with_what_builds_it() {
        let why = find(Path::new("/opt/slim/bin/slim")).unwrap_err();
        assert!(why.contains("slim-btl/build"), "{why}");
        assert!(why.contains("/opt/slim/lib/slim/openmpi4"), "{why}");
    }

    #[test]
    fn what_ompi_info_says_is_read() {
        let text = "option:heterogeneous:no\noption:dlopen:yes\npath:pkglibdir:/usr/lib/x\n";
        let info = OmpiInfo::parse(text).unwrap();
        assert!(info.loads_components);
        assert_eq!(info.components, "/usr/lib/x");
        let info = OmpiInfo::parse("path:pkglibdir:/x\noption:dlopen:no\n").unwrap();
        assert!(!info.loads_components);
        assert!(OmpiInfo::parse("").is_none());
    }

    #[test]
    fn the_other_series_is_refused() {
        let why = arguments(OpenMpi::V5, Path::new("/usr/bin/mpirun"), &[]).unwrap_err();
        assert!(why.contains("4.1"), "{why}");
    }
}
