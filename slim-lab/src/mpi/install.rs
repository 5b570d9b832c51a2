//! The MPI implementations that are installed, and their compilers.

use std::{
    env,
    path::{Path, PathBuf},
};

use strum::Display;

use crate::{Error, Result, artifacts};

/// An MPI that the lab knows how to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Display)]
pub enum Flavor {
    /// The distribution's Open MPI 4.1.
    #[strum(to_string = "Open MPI 4.1")]
    OpenMpi4,
    /// Open MPI 5.0, from the wheel that `scripts/setup` installs.
    #[strum(to_string = "Open MPI 5.0")]
    OpenMpi5,
    /// Open MPI 5.0 as `scripts/openmpi5` makes it: it loads components, and the wheel's does not.
    #[strum(to_string = "Open MPI 5.0 with components")]
    OpenMpi5Components,
    /// The distribution's MPICH, which moves its messages by UCX.
    #[strum(to_string = "MPICH")]
    Mpich,
    /// MPICH 4.0, from the wheel that `scripts/setup` installs. It moves its messages by libfabric (OFI).
    #[strum(to_string = "MPICH 4.0")]
    Mpich4,
    /// MPICH 5.0, from such a wheel. It moves its messages by UCX.
    #[strum(to_string = "MPICH 5.0")]
    Mpich5,
    /// Intel MPI, from such a wheel. It descends from MPICH, and moves its messages by libfabric.
    #[strum(to_string = "Intel MPI")]
    Intel,
}

impl Flavor {
    /// The implementations of which launcher and daemons survive every fault, too.
    pub const ALL: [Flavor; 4] = [
        Flavor::OpenMpi4,
        Flavor::OpenMpi5,
        Flavor::Mpich4,
        Flavor::Mpich5,
    ];

    /// A short word for file names.
    pub fn word(self) -> &'static str {
        match self {
            Flavor::OpenMpi4 => "ompi4",
            Flavor::OpenMpi5 => "ompi5",
            Flavor::OpenMpi5Components => "ompi5c",
            Flavor::Mpich => "mpich",
            Flavor::Mpich4 => "mpich4",
            Flavor::Mpich5 => "mpich5",
            Flavor::Intel => "impi",
        }
    }

    /// Whether it is MPICH, or descends from it: the launcher is hydra.
    pub fn is_mpich(self) -> bool {
        use Flavor::{Intel, Mpich, Mpich4, Mpich5};
        matches!(self, Mpich | Mpich4 | Mpich5 | Intel)
    }
}

/// An MPI as installed here.
#[derive(Clone, Debug)]
pub struct Mpi {
    flavor: Flavor,
    mpicc: PathBuf,
    mpirun: PathBuf,
    /// Passed to mpirun, so that it finds its daemon on the other nodes.
    pub(super) prefix: Option<PathBuf>,
}

impl Mpi {
    /// Finds the MPI. The error names the packages to install.
    pub fn find(flavor: Flavor) -> Result<Self> {
        let hint = "run scripts/setup";
        match flavor {
            Flavor::OpenMpi4 => {
                let mpirun = first(
                    ["mpirun.openmpi", "orterun"].map(|n| Path::new("/usr/bin").join(n)),
                    hint,
                )?;
                let mpicc = first([PathBuf::from("/usr/bin/mpicc.openmpi")], hint)?;
                Ok(Mpi {
                    flavor,
                    mpicc,
                    mpirun,
                    prefix: None,
                })
            }
            Flavor::OpenMpi5
            | Flavor::OpenMpi5Components
            | Flavor::Mpich4
            | Flavor::Mpich5
            | Flavor::Intel => {
                let name = match flavor {
                    Flavor::OpenMpi5Components => "openmpi5",
                    wheel => wheel.word(),
                };
                let prefix = cache_dir().join(name);
                // Intel's `mpirun` is a script around this.
                let launcher = match flavor {
                    Flavor::Intel => "bin/mpiexec.hydra",
                    _ => "bin/mpirun",
                };
                let mpirun = first([prefix.join(launcher)], hint)?;
                let mpicc = first([prefix.join("bin/mpicc")], hint)?;
                Ok(Mpi {
                    flavor,
                    mpicc,
                    mpirun,
                    prefix: Some(prefix),
                })
            }
            Flavor::Mpich => {
                let hint = "install the packages mpich and libmpich-dev (scripts/setup does)";
                Ok(Mpi {
                    flavor,
                    mpicc: first([PathBuf::from("/usr/bin/mpicc.mpich")], hint)?,
                    mpirun: first([PathBuf::from("/usr/bin/mpiexec.mpich")], hint)?,
                    prefix: None,
                })
            }
        }
    }

    /// The implementation.
    pub fn flavor(&self) -> Flavor {
        self.flavor
    }

    /// The program that starts jobs.
    pub fn mpirun(&self) -> &Path {
        &self.mpirun
    }

    /// Builds a C program with this MPI's compiler, unless the program is newer than its source.
    /// Returns the path of the program.
    pub fn build(&self, source: &Path) -> Result<PathBuf> {
        let place = self.flavor.word();
        match (self.flavor, &self.prefix) {
            (Flavor::Intel, Some(prefix)) => {
                let root = format!("I_MPI_ROOT={}", prefix.display());
                let compiler = self.mpicc.display().to_string();
                artifacts::compile_with(&[&root], &compiler, place, source)
            }
            _ => artifacts::compile(&self.mpicc, place, source),
        }
    }

    /// The directory with the byte-transfer component for this MPI, built now; the reason if it cannot be built or loaded.
    pub fn component(&self) -> Result<PathBuf> {
        artifacts::component(&self.mpicc, self.series()?)
    }

    /// The directory where [`component`](Self::component) has built it: for machines on which nothing can be built.
    pub fn built_component(&self) -> Result<PathBuf> {
        Ok(artifacts::component_dir(self.series()?))
    }

    /// The series of Open MPI for which components are built.
    fn series(&self) -> Result<&'static str> {
        match self.flavor {
            Flavor::OpenMpi4 => Ok("openmpi4"),
            Flavor::OpenMpi5Components => Ok("openmpi5"),
            _ => Err(Error::Missing {
                what: format!("a component for {}", self.flavor),
                tried: Vec::new(),
                hint: "this MPI loads none; Open MPI 4.1 and Open MPI 5.0 with components do"
                    .into(),
            }),
        }
    }

    /// Builds a program of the repository's `programs/`.
    pub fn build_program(&self, name: &str) -> Result<PathBuf> {
        self.build(&artifacts::source(name)?)
    }
}

/// The directory for the downloads of `scripts/setup`: `SLIM_CACHE`, else `~/.cache/slim`.
pub fn cache_dir() -> PathBuf {
    match env::var_os("SLIM_CACHE").filter(|v| !v.is_empty()) {
        Some(dir) => dir.into(),
        None => {
            PathBuf::from(env::var_os("HOME").unwrap_or_else(|| "/root".into())).join(".cache/slim")
        }
    }
}

fn first(candidates: impl IntoIterator<Item = PathBuf>, hint: &str) -> Result<PathBuf> {
    let tried: Vec<_> = candidates.into_iter().collect();
    match tried.iter().find(|path| path.exists()) {
        Some(path) => Ok(path.clone()),
        None => {
            let what = tried
                .last()
                .map(|p| p.display().to_string())
                .unwrap_or_default();
            Err(Error::Missing {
                what,
                tried: Vec::new(),
                hint: hint.into(),
            })
        }
    }
}
