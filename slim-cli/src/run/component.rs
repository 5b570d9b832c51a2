//! The native component for Open MPI (`mca_btl_slim.so`): where it is, and how `mpirun` has its ranks use it.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::entry::OpenMpi;
use super::openmpi;

/// File name of the component.
const COMPONENT: &str = "mca_btl_slim.so";
/// An empty directory beside it: see [`arguments`].
const EMPTY: &str = "none";
/// Components that would come before it where their hardware is. `btl/tcp` stays, for ranks on hosts without the component.
const OTHERS: &str = "^ofi,openib,portals4,uct,ugni,usnic";

impl OpenMpi {
    /// The component's directory, beside `slim` or in the prefix's `lib/slim`.
    fn component_directory(self) -> &'static str {
        match self {
            Self::V4 => "openmpi4",
            Self::V5 => "openmpi5",
        }
    }
}

/// Arguments for `mpirun`, before those of the user, so that ranks talk by the component; within a host by shared memory, as
/// otherwise. Or, in one line, why that cannot be.
pub fn arguments(
    version: OpenMpi,
    mpirun: &Path,
    args: &[OsString],
) -> Result<Vec<OsString>, String> {
    let program = env::current_exe().map_err(|e| e.to_string())?;
    let dir = find(&program, version.component_directory())?;
    let info = OmpiInfo::ask(mpirun, &dir)?;
    if !info.takes_components {
        return Err(format!(
            "{} is built without dlopen and takes no components",
            mpirun.display()
        ));
    }
    if !info.has_component {
        return Err(format!(
            "{} cannot load {}: slim-btl/build builds it for the Open MPI that MPICC names",
            mpirun.display(),
            dir.join(COMPONENT).display()
        ));
    }
    let mut all = chosen(&dir, &info.components, args)?;
    let empty = dir.join(EMPTY);
    if version == OpenMpi::V5 && empty.is_dir() {
        // PMIx has a parameter of this name, too. It takes Open MPI's if it has none, and warns of components that are not its own.
        all.extend(["--pmixmca", "mca_base_component_path"].map(Into::into));
        all.push(empty.into());
    }
    Ok(all)
}

fn find(program: &Path, directory: &str) -> Result<PathBuf, String> {
    let places = places_near(program, directory);
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

fn places_near(program: &Path, directory: &str) -> Vec<PathBuf> {
    let Some(dir) = program.parent() else {
        return Vec::new();
    };
    let mut places = vec![dir.join(directory)];
    places.extend(dir.parent().map(|p| p.join("lib/slim").join(directory)));
    places
}

/// What `ompi_info` says of an Open MPI.
struct OmpiInfo {
    takes_components: bool,
    /// It can load this component.
    has_component: bool,
    /// Where its own components are.
    components: String,
}

impl OmpiInfo {
    fn ask(mpirun: &Path, component: &Path) -> Result<Self, String> {
        let real = mpirun.canonicalize().unwrap_or_else(|_| mpirun.into());
        let beside = [mpirun, &real].map(|program| program.with_file_name("ompi_info"));
        let none = || format!("no ompi_info beside {}", mpirun.display());
        let program = beside.iter().find(|p| p.is_file()).ok_or_else(none)?;
        let output = Command::new(program)
            .args(["--parsable", "-c", "--path", "pkglibdir"])
            .args(["--param", "btl", "slim"])
            .env("OMPI_MCA_mca_base_component_path", component)
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
            takes_components: value("option:dlopen:") != Some("no"),
            has_component: value("mca:btl:slim:").is_some(),
            components: value("path:pkglibdir:")?.to_owned(),
        })
    }
}

/// The arguments, unless the user has chosen what they would choose.
fn chosen(dir: &Path, components: &str, args: &[OsString]) -> Result<Vec<OsString>, String> {
    let theirs = |name: &str| openmpi::parameter(args, name).is_some();
    for name in ["btl", "mca_base_component_path"] {
        if theirs(name) {
            return Err(format!("the parameter {name} is set already"));
        }
    }
    let mut path = OsString::from(dir);
    if Path::new(components).is_dir() {
        path.push(format!(":{components}"));
    }
    if let Some(home) = env::var_os("HOME") {
        path.push(":");
        path.push(Path::new(&home).join(".openmpi/components"));
    }
    let mut all: Vec<OsString> = ["--mca", "mca_base_component_path"].map(Into::into).into();
    all.push(path);
    all.extend(["--mca", "btl", OTHERS].map(Into::into));
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
        let args = chosen(Path::new("/s/openmpi4"), "/tmp", &words("-n 2 prog")).unwrap();
        let path = args[2].to_string_lossy();
        assert_eq!(args[..2], words("--mca mca_base_component_path"));
        assert!(path.starts_with("/s/openmpi4:/tmp"), "{path}");
        assert_eq!(
            args[3..],
            words(&format!("--mca btl {OTHERS} --mca pml ob1"))
        );
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
        let why = find(Path::new("/opt/slim/bin/slim"), "openmpi4").unwrap_err();
        assert!(why.contains("slim-btl/build"), "{why}");
        assert!(why.contains("/opt/slim/lib/slim/openmpi4"), "{why}");
    }

    #[test]
    fn what_ompi_info_says_is_read() {
        let text = "option:heterogeneous:no\noption:dlopen:yes\npath:pkglibdir:/usr/lib/x\n\
                    mca:btl:slim:version:\"component:4.1.4\"\n";
        let info = OmpiInfo::parse(text).unwrap();
        assert!(info.takes_components && info.has_component);
        assert_eq!(info.components, "/usr/lib/x");
        let info = OmpiInfo::parse("path:pkglibdir:/x\noption:dlopen:no\n").unwrap();
        assert!(!info.takes_components && !info.has_component);
        assert!(OmpiInfo::parse("").is_none());
    }
}
