//! The launchers that `slim run` knows, each an entry of a table. docs/MPI.md says what was tested with each.

use super::entry::MpiEntry;
use super::hydra::MPICH;
use super::intel::INTEL_MPI;
use super::openmpi::{OPEN_MPI_4, OPEN_MPI_5, PRRTE, PRRTE_DVM, PRRTE_RUN};
use super::srun::SLURM;

/// All of them. The first whose program, mark and version fit is taken.
pub const ALL: [&MpiEntry; 8] = [
    &OPEN_MPI_4,
    &OPEN_MPI_5,
    &PRRTE_DVM,
    &PRRTE_RUN,
    &PRRTE,
    &MPICH,
    &INTEL_MPI,
    &SLURM,
];

/// The entry that is known by the name of its program alone.
pub fn of_program(name: &str) -> Option<&'static MpiEntry> {
    let known = |mpi: &&MpiEntry| mpi.marks.is_empty() && mpi.programs.contains(&name);
    ALL.into_iter().find(known)
}

/// The MPI whose launcher has this name and prints this for `--version`.
pub fn of_version(program: &str, text: &str) -> Option<&'static MpiEntry> {
    let named = |mpi: &&MpiEntry| mpi.programs.is_empty() || mpi.programs.contains(&program);
    ALL.into_iter().filter(named).find(|mpi| {
        let behind = mpi.marks.iter().find_map(|mark| text.split(mark).nth(1));
        let is_ours = |text: &str| {
            let major = text.trim_start().split('.').next();
            let major = major.and_then(|major| major.parse().ok());
            major.is_some_and(|major| mpi.majors.contains(&major))
        };
        behind.is_some_and(|text| mpi.majors.is_empty() || is_ours(text))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launchers_are_recognised_by_their_version_text() {
        let name = |text| of_version("mpirun", text).map(|mpi| mpi.name);
        for (text, want) in [
            ("mpirun (Open MPI) 4.1.4\n\nReport bugs", Some("Open MPI 4")),
            ("mpirun.openmpi (OpenRTE) 4.1.4", Some("Open MPI 4")),
            ("prterun (PRRTE) 3.0.8", Some("PRRTE")),
            ("mpirun (Open MPI) 5.0.11\n", Some("Open MPI 5")),
            ("mpirun (Open MPI) 3.1.6", None),
            ("mpirun (Open MPI) 6.0.0a1", None),
            ("HYDRA build details:\n Version: 4.0.2", Some("MPICH")),
            (
                "Intel(R) MPI Library for Linux* OS, Version 2021.10 Build",
                Some("Intel MPI"),
            ),
            (
                "Intel(R) MPI Library for Linux* OS, Version 2019 Update 9",
                None,
            ),
            ("", None),
        ] {
            assert_eq!(name(text), want, "{text}");
        }
    }

    #[test]
    fn launchers_with_names_of_their_own_are_recognised_by_them() {
        let name = |program| of_version(program, "x (PRRTE) 3.0.8").map(|mpi| mpi.name);
        assert_eq!(name("prterun"), Some("PRRTE"));
        assert_eq!(name("prte"), Some("PRRTE's prte"));
        assert_eq!(name("prun"), Some("PRRTE's prun"));
        assert_eq!(of_version("prun", "another prun"), None);
        assert_eq!(of_program("srun").map(|mpi| mpi.name), Some("Slurm"));
        assert_eq!(of_program("prun"), None);
    }
}
