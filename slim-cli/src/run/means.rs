//! The means by which a job is started: its environment, and what starts daemons on other hosts, an agent or a batch system.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use super::entry::{AgentChoice, BatchSystem, Starters};
use super::line::{GivenLine, OptionRole};

/// What a job is started with, besides its command line.
pub struct Means<'a> {
    /// The launcher's program.
    pub launcher: &'a Path,
    /// The preload library.
    pub library: &'a Path,
    /// `slim-rsh-agent`.
    pub wrapper: &'a Path,
    /// Looks up a variable of the environment.
    pub variable: &'a dyn Fn(&str) -> Option<OsString>,
}

impl Means<'_> {
    /// A variable that is set to something.
    pub fn set(&self, name: &str) -> Option<String> {
        let value = (self.variable)(name).filter(|value| !value.is_empty());
        value.map(|value| value.to_string_lossy().into_owned())
    }
}

impl Starters {
    /// The way in which the launcher will start daemons, if that is by an agent.
    pub fn chosen(&self, given: &GivenLine<'_>, means: &Means<'_>) -> Option<String> {
        let set = |name: &&str| means.set(name);
        let named = given.value(OptionRole::Starter);
        if let Some(name) = named.or_else(|| self.variables.iter().find_map(set)) {
            return self.by_agent.contains(&name.as_str()).then_some(name);
        }
        let manager = given
            .value(OptionRole::Manager)
            .or_else(|| set(&self.manager));
        let is_batch = |batch: &BatchSystem| match &manager {
            Some(name) => name == batch.name,
            None => batch.is_present(means.variable),
        };
        (!self.batch.iter().any(is_batch)).then(|| self.by_agent[0].to_owned())
    }
}

impl BatchSystem {
    fn is_present(&self, variable: &dyn Fn(&str) -> Option<OsString>) -> bool {
        let any = |names: &&[&str]| names.iter().any(|name| variable(name).is_some());
        self.needs.iter().all(any)
    }
}

impl AgentChoice {
    /// The agent in a file with parameters.
    pub fn in_files(&self, launcher: &Path) -> Option<String> {
        self.parameter_files(launcher)
            .iter()
            .filter_map(|file| fs::read_to_string(file).ok())
            .find_map(|text| agent_in(&text, self.parameters))
    }

    /// Files in which the agent can be chosen, highest priority first.
    fn parameter_files(&self, launcher: &Path) -> Vec<PathBuf> {
        let Some((user, system)) = self.files else {
            return Vec::new();
        };
        let mut files = Vec::new();
        if let Some(home) = env::var_os("HOME") {
            files.push(Path::new(&home).join(user));
        }
        let real = launcher.canonicalize();
        let program = real.as_deref().unwrap_or(launcher);
        if let Some(prefix) = program.parent().and_then(Path::parent) {
            files.push(prefix.join("etc").join(system));
        }
        files.push(Path::new("/etc/openmpi").join(system));
        files
    }
}

fn agent_in(text: &str, names: &[&str]) -> Option<String> {
    text.lines()
        .filter(|line| !line.trim_start().starts_with('#'))
        .filter_map(|line| line.split_once('='))
        .filter(|(name, value)| names.contains(&name.trim()) && !value.trim().is_empty())
        .map(|(_, value)| value.trim().trim_matches('"').to_owned())
        .next_back()
}

#[cfg(test)]
mod tests {
    use super::super::hydra::MPICH;
    use super::*;

    #[test]
    fn the_resource_manager_decides_as_in_hydra() {
        const SLURM: &[(&str, &str)] = &[
            ("SLURM_NODELIST", "a"),
            ("SLURM_JOB_NUM_NODES", "1"),
            ("SLURM_TASKS_PER_NODE", "1"),
        ];
        const SGE: &[(&str, &str)] = &[("SGE_ROOT", "/"), ("ARC", "x"), ("PE_HOSTFILE", "/f")];
        const LSF: &[(&str, &str)] = &[("LSF_BINDIR", "/"), ("LSB_MCPU_HOSTS", "a 1")];
        const LL: &[(&str, &str)] = &[("LOADL_HOSTFILE", "/f"), ("MP_CHILD", "0")];
        for (line, vars, by_agent) in [
            ("p", SLURM, false),
            ("p", &SLURM[..2], true),
            ("p", &[("SLURM_JOBID", "4"), ("SLURM_JOB_ID", "4")], true),
            ("p", SGE, false),
            ("p", &SGE[1..], true),
            ("p", LSF, false),
            ("p", &LSF[1..], true),
            ("p", LL, false),
            ("p", &LL[..1], true),
            (
                "p",
                &[("PBS_NODEFILE", "/f"), ("COBALT_NODEFILE", "/f")],
                true,
            ),
            ("-rmk slurm p", &[], false),
            ("-rmk=lsf p", &[], false),
            ("-rmk pbs p", &[], true),
            ("-rmk user p", SLURM, true),
            ("p", &[("HYDRA_RMK", "slurm")], false),
            ("-rmk user p", &[("HYDRA_RMK", "slurm")], true),
            ("p -rmk slurm", &[], true),
            ("-launcher ssh p", SLURM, true),
            ("-launcher ssh -rmk slurm p", &[], true),
            (
                "p",
                &[("HYDRA_BOOTSTRAP", "ssh"), ("HYDRA_RMK", "slurm")],
                true,
            ),
            ("-rmk user p", &[("HYDRA_LAUNCHER", "slurm")], false),
        ] {
            let line_words: Vec<_> = line.split(' ').map(OsString::from).collect();
            let given = GivenLine {
                syntax: &MPICH.syntax,
                args: &line_words,
                in_file: Vec::new(),
            };
            let variable = |name: &str| {
                let set = vars.iter().find(|(known, _)| *known == name);
                set.map(|(_, value)| value.into())
            };
            let means = Means {
                launcher: Path::new("/"),
                library: Path::new("/"),
                wrapper: Path::new("/"),
                variable: &variable,
            };
            let starter = MPICH.agent.as_ref().unwrap().starters.as_ref().unwrap();
            let starter = starter.chosen(&given, &means);
            assert_eq!(starter.is_some(), by_agent, "{line} {vars:?}");
        }
    }

    #[test]
    fn parameter_files_are_read_as_open_mpi_does() {
        let text = "# plm_rsh_agent = no\nbtl = tcp\n plm_rsh_agent = ssh -q \n";
        assert_eq!(
            agent_in(text, &["plm_rsh_agent"]).as_deref(),
            Some("ssh -q")
        );
        assert_eq!(agent_in("plm_rsh_agent =\n", &["plm_rsh_agent"]), None);
    }
}
