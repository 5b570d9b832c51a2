//! Rewrites the command line of a launcher, so that it carries SLIM: variables to the ranks, and the library to remote daemons.

use std::ffi::{OsStr, OsString};

use super::entry::{MpiEntry, RankVariables};
use super::export_list;
use super::line::{GivenLine, Item, OptionRole, value_of};
use super::means::Means;
use super::preload;
use crate::agent::{AGENT_VARIABLE, ONE_WORD};
use crate::failure::CliError;

const PRELOAD: &str = "LD_PRELOAD";

/// A command line of a launcher that carries SLIM, and changes to its environment.
#[derive(Debug, PartialEq, Eq)]
pub struct PreparedCommand {
    /// Arguments of the launcher.
    pub args: Vec<OsString>,
    /// Variables to set in the environment of the launcher.
    pub set: Vec<(String, OsString)>,
    /// Variables to remove from the environment of the launcher.
    pub unset: Vec<String>,
}

/// Builds the command line. `exported` are the variables for the ranks.
pub fn prepare(
    mpi: &MpiEntry,
    given: &GivenLine<'_>,
    exported: &[(&str, &str)],
    means: &Means<'_>,
) -> Result<PreparedCommand, CliError> {
    let mut file = given.file().into_iter();
    if file.any(|option| option.assigned(PRELOAD).is_some()) {
        return Err(CliError::input(format!(
            "a configuration file of {} sets {PRELOAD}, and the ranks would run without SLIM: remove that there, and give {} {PRELOAD}=… on the command line",
            mpi.name,
            mpi.variables.option()
        )));
    }
    let line = given.line();
    let agent = mpi.agent.as_ref();
    let taken = agent.and_then(|agent| given.syntax.parameter_of_program(&line, agent.parameters));
    if let Some(name) = taken {
        return Err(CliError::input(format!(
            "the arguments of the program have {name}, which {} takes for its own parameter wherever it is: daemons would run without SLIM",
            mpi.name
        )));
    }
    if let Some(option) = given.syntax.hides_export_list(&line) {
        return Err(CliError::input(format!(
            "`slim run` does not know the option {option} of {}, and what follows it has --export, which may take SLIM from the ranks: give --export first",
            mpi.name
        )));
    }
    let default = agent.and_then(|agent| match &agent.starters {
        Some(starters) => starters.chosen(given, means),
        None => Some(agent.default.to_owned()),
    });
    let mut rewritten = Rewritten::of(mpi, &line, exported, means, default.is_some());
    let mut front: Vec<OsString> = Vec::new();
    if let RankVariables::ByOption(option, role) = mpi.variables {
        for (name, value) in exported {
            match role {
                OptionRole::Assign => front.extend([option, name, value].map(OsString::from)),
                _ if *name == PRELOAD && rewritten.ranks_have_preload => {}
                _ => front.extend([option, name].map(OsString::from)),
            }
        }
    }
    let mut prepared = PreparedCommand {
        args: front,
        set: Vec::new(),
        unset: Vec::new(),
    };
    prepared.set.append(&mut rewritten.set);
    // Open MPI and hydra may start their daemons by srun.
    for name in export_list::VARIABLES {
        if let Some(list) = (means.variable)(name) {
            let (list, more) = carrying(&list, exported, means);
            prepared.set.push((name.into(), list));
            prepared.set.extend(more);
        }
    }
    if let (Some(default), Some(agent)) = (default, agent) {
        let in_file = || {
            let agent = value_of(&given.file(), OptionRole::Agent)?;
            let option = mpi.option_file.as_ref()?.agent;
            prepared.args.extend([option.into(), means.wrapper.into()]);
            Some(agent)
        };
        let chosen = rewritten
            .agent
            .or_else(in_file)
            .or_else(|| agent.variables.iter().find_map(|name| means.set(name)))
            .or_else(|| agent.in_files(means.launcher))
            .unwrap_or(default);
        let chosen = match agent.is_one_word {
            true => format!("{ONE_WORD}{chosen}"),
            false => chosen,
        };
        prepared.set.extend([
            (agent.variables[0].into(), means.wrapper.into()),
            (AGENT_VARIABLE.into(), chosen.into()),
        ]);
        prepared.unset = agent.variables[1..].iter().map(|v| (*v).into()).collect();
    }
    prepared.args.append(&mut rewritten.args);
    Ok(prepared)
}

/// The list that carries SLIM, and what the environment of the launcher has to have for it.
fn carrying(
    list: &OsStr,
    exported: &[(&str, &str)],
    means: &Means<'_>,
) -> (OsString, Option<(String, OsString)>) {
    let carrying = export_list::carrying(&list.to_string_lossy(), exported, means.library);
    let preload = carrying.preload.filter(|_| means.set(PRELOAD).is_none());
    let preload = preload.map(|theirs| {
        let both = preload::joined(means.library, Some(theirs.as_ref()));
        (PRELOAD.to_owned(), both.into())
    });
    (carrying.list.into(), preload)
}

/// The user's arguments, with the agent, `LD_PRELOAD` and the list of variables replaced in place.
struct Rewritten {
    args: Vec<OsString>,
    /// Variables for the environment of the launcher.
    set: Vec<(String, OsString)>,
    agent: Option<String>,
    ranks_have_preload: bool,
}

impl Rewritten {
    /// `by_agent`: the daemons are started by the agent.
    fn of(
        mpi: &MpiEntry,
        items: &[Item<'_>],
        exported: &[(&str, &str)],
        means: &Means<'_>,
        by_agent: bool,
    ) -> Self {
        let parameters = mpi.agent.as_ref().map_or(&[][..], |agent| agent.parameters);
        let mut out = Self {
            args: Vec::new(),
            set: Vec::new(),
            agent: None,
            ranks_have_preload: false,
        };
        for item in items {
            let is_agent = match (item.role, item.values.first()) {
                (Some(OptionRole::Agent), _) => true,
                (Some(OptionRole::Parameter), Some(name)) => {
                    parameters.iter().any(|known| name == known)
                }
                _ => false,
            };
            if let (true, Some(agent)) = (is_agent && by_agent, item.values.last()) {
                out.agent = Some(agent.to_string_lossy().into_owned());
                out.args.extend(item.with_last(means.wrapper.as_os_str()));
            } else if let (Some(OptionRole::ExportList), Some(list)) =
                (item.role, item.values.last())
            {
                let (list, more) = carrying(list, exported, means);
                out.args.extend(item.with_last(&list));
                out.set.extend(more);
            } else if let Some(theirs) = item.assigned(PRELOAD) {
                out.ranks_have_preload = true;
                let both = preload::joined(means.library, Some(theirs));
                out.args.extend(item.with_assigned(&both));
            } else {
                out.args.extend_from_slice(item.words);
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::mpis;
    use super::*;

    const LIB: &str = "/s/libslim_preload.so";
    const WRAPPER: &str = "/s/slim-rsh-agent";
    const OMPI4: &str = "(Open MPI) 4.1.4";
    const OMPI5: &str = "(Open MPI) 5.0.11";
    const HYDRA: &str = "HYDRA build details:";

    fn words(text: &[&str]) -> Vec<OsString> {
        text.iter().map(OsString::from).collect()
    }

    fn means(variable: &dyn Fn(&str) -> Option<OsString>) -> Means<'_> {
        Means {
            launcher: Path::new("/usr/bin/mpirun"),
            library: Path::new(LIB),
            wrapper: Path::new(WRAPPER),
            variable,
        }
    }

    fn rewrite(version: &str, args: &[&str]) -> (Vec<String>, Option<String>, bool) {
        let args = words(args);
        let mpi = mpis::of_version("mpirun", version).unwrap();
        let r = Rewritten::of(mpi, &mpi.syntax.read(&args), &[], &means(&|_| None), true);
        let text = r
            .args
            .into_iter()
            .map(|a| a.into_string().unwrap())
            .collect();
        (text, r.agent, r.ranks_have_preload)
    }

    #[test]
    fn a_chosen_agent_is_replaced_by_the_wrapper_in_place() {
        let (args, agent, _) = rewrite(
            OMPI4,
            &["--mca", "plm_rsh_agent", "ssh -p 22", "-n", "2", "prog"],
        );
        assert_eq!(args, ["--mca", "plm_rsh_agent", WRAPPER, "-n", "2", "prog"]);
        assert_eq!(agent.as_deref(), Some("ssh -p 22"));
        let (args, agent, _) = rewrite(OMPI5, &["--prtemca", "plm_ssh_agent", "/a", "prog"]);
        assert_eq!(args, ["--prtemca", "plm_ssh_agent", WRAPPER, "prog"]);
        assert_eq!(agent.as_deref(), Some("/a"));
        let (args, agent, _) = rewrite(HYDRA, &["-bootstrap-exec", "/a", "-n", "2", "prog"]);
        assert_eq!(args, ["-bootstrap-exec", WRAPPER, "-n", "2", "prog"]);
        assert_eq!(agent.as_deref(), Some("/a"));
    }

    #[test]
    fn other_parameters_stay_as_they_are() {
        let given = ["--mca", "btl", "tcp,self", "-np", "4", "prog", "-x"];
        let (args, agent, preload) = rewrite(OMPI4, &given);
        assert_eq!(args, given);
        assert_eq!((agent, preload), (None, false));
        let given = ["-genv", "A", "1", "-np", "4", "prog", "-genv"];
        let (args, agent, preload) = rewrite(HYDRA, &given);
        assert_eq!(args, given);
        assert_eq!((agent, preload), (None, false));
    }

    #[test]
    fn a_users_preload_for_the_ranks_is_joined_to_ours() {
        let both = format!("{LIB}:/t.so");
        let (args, _, preload) = rewrite(OMPI4, &["-x", "LD_PRELOAD=/t.so", "-x", "A=1", "p"]);
        assert_eq!(
            args,
            ["-x", &format!("LD_PRELOAD={both}"), "-x", "A=1", "p"]
        );
        assert!(preload);
        let (args, _, preload) = rewrite(HYDRA, &["-genv", "LD_PRELOAD", "/t.so", "p"]);
        assert_eq!(args, ["-genv", "LD_PRELOAD", &both, "p"]);
        assert!(preload);
    }

    fn prepared_with(
        version: &str,
        args: &[&str],
        file: &[&str],
        vars: &[(&str, &str)],
    ) -> Result<PreparedCommand, CliError> {
        let mpi = mpis::of_version("mpirun", version).unwrap();
        prepared_for(mpi, args, file, vars)
    }

    fn prepared_for(
        mpi: &MpiEntry,
        args: &[&str],
        file: &[&str],
        vars: &[(&str, &str)],
    ) -> Result<PreparedCommand, CliError> {
        let given = GivenLine {
            syntax: &mpi.syntax,
            args: &words(args),
            in_file: words(file),
        };
        let variable = |name: &str| {
            let set = vars.iter().find(|(known, _)| *known == name);
            set.map(|(_, value)| value.into())
        };
        let exported = [("LD_PRELOAD", LIB), ("SLIM_EVENTS", "/e v")];
        prepare(mpi, &given, &exported, &means(&variable))
    }

    fn prepared(version: &str, args: &[&str]) -> PreparedCommand {
        prepared_with(version, args, &[], &[]).unwrap()
    }

    #[test]
    fn variables_are_exported_in_front_of_the_users_arguments() {
        let p = prepared(OMPI5, &["-n", "2", "prog"]);
        assert_eq!(
            p.args,
            ["-x", "LD_PRELOAD", "-x", "SLIM_EVENTS", "-n", "2", "prog"]
        );
        assert_eq!(p.set[0], ("PRTE_MCA_plm_ssh_agent".into(), WRAPPER.into()));
        assert_eq!(p.set[1].0, AGENT_VARIABLE);
        let p = prepared(HYDRA, &["-n", "2", "prog"]);
        let front = ["-genv", "LD_PRELOAD", LIB, "-genv", "SLIM_EVENTS", "/e v"];
        assert_eq!(p.args[..6], front);
        assert_eq!(p.args[6..], ["-n", "2", "prog"]);
        assert_eq!(p.set[0], ("HYDRA_LAUNCHER_EXEC".into(), WRAPPER.into()));
        assert_eq!(p.set[1], (AGENT_VARIABLE.into(), "=ssh".into()));
    }

    #[test]
    fn srun_gets_the_variables_of_slim_in_its_list() {
        let srun = mpis::of_program("srun").unwrap();
        let with = |line: &str, vars: &[(&str, &str)]| {
            let line: Vec<&str> = line.split(' ').collect();
            prepared_for(srun, &line, &[], vars).unwrap()
        };
        let p = with("-N2 p --export=NONE", &[]);
        assert_eq!(p.args, ["-N2", "p", "--export=NONE"]);
        assert_eq!((p.set, p.unset), (Vec::new(), Vec::new()));

        let p = with("-N2 --export=NONE p", &[]);
        let list = "LD_PRELOAD,SLIM_EVENTS";
        assert_eq!(p.args, ["-N2", "--export", list, "p"]);
        let p = with("--export A p : --export B p", &[]);
        let want = format!("--export {list},A p : --export {list},B p");
        assert_eq!(p.args.join(" ".as_ref()).to_str(), Some(&*want));

        let p = with("p", &[("SLURM_EXPORT_ENV", "NONE")]);
        assert_eq!(p.set, [("SLURM_EXPORT_ENV".into(), list.into())]);

        let both = format!("{LIB}:/t.so");
        let line = "--export=ALL,LD_PRELOAD=/t.so p";
        let p = with(line, &[]);
        assert_eq!(p.set, [("LD_PRELOAD".into(), both.into())]);
        // Slurm takes the variable of the environment.
        assert_eq!(with(line, &[("LD_PRELOAD", "/e.so")]).set, []);

        let line = ["--of-a-plugin", "1", "--export=NONE", "p"];
        let refused = prepared_for(srun, &line, &[], &[]).unwrap_err();
        assert!(refused.to_string().contains("give --export first"));
    }

    #[test]
    fn daemons_that_srun_starts_get_the_variables_too() {
        for version in [OMPI4, OMPI5, HYDRA] {
            let p = prepared_with(version, &["p"], &[], &[("SLURM_EXPORT_ENV", "NONE")]);
            let want = (
                "SLURM_EXPORT_ENV".to_owned(),
                "LD_PRELOAD,SLIM_EVENTS".into(),
            );
            assert!(p.unwrap().set.contains(&want), "{version}");
        }
    }

    #[test]
    fn a_virtual_machine_and_its_jobs_are_prepared_apart() {
        let entry = |program| mpis::of_version(program, "prte (PRRTE) 3.0.8").unwrap();
        let prte = prepared_for(entry("prte"), &["--daemonize"], &[], &[]).unwrap();
        assert_eq!(prte.args, ["--daemonize"]);
        assert_eq!(
            prte.set[0],
            ("PRTE_MCA_plm_ssh_agent".into(), WRAPPER.into())
        );
        let prun = prepared_for(entry("prun"), &["p"], &[], &[]).unwrap();
        assert_eq!(prun.args, ["-x", "LD_PRELOAD", "-x", "SLIM_EVENTS", "p"]);
        assert_eq!(prun.set, []);
    }

    #[test]
    fn only_starters_that_use_an_agent_get_the_wrapper() {
        let p = prepared(HYDRA, &["-launcher", "rsh", "prog"]);
        assert_eq!(p.set[1].1, "=rsh");
        for other in ["fork", "slurm"] {
            let line = ["-bootstrap", other, "-launcher-exec", "/s", "prog"];
            let p = prepared(HYDRA, &line);
            assert_eq!(p.set, [], "{other}");
            assert_eq!(p.args[6..], line, "{other}");
        }
    }

    #[test]
    fn the_programs_own_arguments_stay_as_they_are() {
        let words = |line: &str| line.split(' ').map(String::from).collect::<Vec<_>>();
        for (version, line) in [
            (HYDRA, "-n 1 echo -launcher-exec foo -genv LD_PRELOAD /y"),
            (HYDRA, "-l prog -bootstrap-exec foo"),
            (
                HYDRA,
                "-n 1 prog -env LD_PRELOAD=/y : -n 1 prog -genv LD_PRELOAD /y",
            ),
            (HYDRA, "-no-such-option prog -genv LD_PRELOAD /y"),
            (OMPI4, "-n 1 prog -x LD_PRELOAD=/y -H foo"),
            (OMPI4, "--bind-to none -q prog -x LD_PRELOAD=/y"),
            (
                OMPI4,
                "--mca a b prog -x LD_PRELOAD=/y : prog -x LD_PRELOAD=/y",
            ),
            (OMPI4, "-n 1 -- prog -x LD_PRELOAD=/y"),
            (OMPI5, "--map-by=node prog -x LD_PRELOAD=/y"),
            (OMPI5, "--display map prog -x LD_PRELOAD=/y --host foo"),
            (OMPI5, "--no-such-option prog -x LD_PRELOAD=/y"),
        ] {
            let given = words(line);
            let given: Vec<&str> = given.iter().map(String::as_str).collect();
            let (args, agent, preload) = rewrite(version, &given);
            assert_eq!(args, given, "{line}");
            assert_eq!((agent, preload), (None, false), "{line}");
        }
        let p = prepared(HYDRA, &["-n", "1", "prog", "-launcher", "fork"]);
        assert_eq!(p.set.len(), 2, "{p:?}");
    }

    #[test]
    fn hydras_other_ways_to_write_an_option_are_understood() {
        for variable in [
            "-genv A=1",
            "-env A=1",
            "-genv=A=1",
            "-genv=A 1",
            "--GENV A 1",
        ] {
            let line = format!("{variable} -launcher-exec /a -n 2 prog");
            let given: Vec<&str> = line.split(' ').collect();
            let (args, agent, _) = rewrite(HYDRA, &given);
            assert_eq!(args.join(" "), line.replace("/a", WRAPPER));
            assert_eq!(agent.as_deref(), Some("/a"), "{line}");
        }
        let (args, agent, _) = rewrite(HYDRA, &["-launcher-exec=/a", "prog"]);
        assert_eq!(args, ["-launcher-exec", WRAPPER, "prog"]);
        assert_eq!(agent.as_deref(), Some("/a"));
        for (line, starter) in [
            ("-launcher=rsh prog", "rsh"),
            ("-BOOTSTRAP rsh prog", "rsh"),
        ] {
            let given: Vec<&str> = line.split(' ').collect();
            let set = prepared(HYDRA, &given).set;
            assert!(set[1].1.to_str().unwrap().ends_with(starter), "{set:?}");
        }
        assert_eq!(prepared(HYDRA, &["-launcher=fork", "prog"]).set, []);
    }

    #[test]
    fn a_preload_in_one_word_is_joined_to_ours() {
        let both = format!("LD_PRELOAD={LIB}:/t.so");
        for option in ["-genv", "-env", "--env"] {
            let (args, _, _) = rewrite(HYDRA, &[option, "LD_PRELOAD=/t.so", "p"]);
            assert_eq!(args, [option, &both, "p"]);
        }
        let (args, _, _) = rewrite(HYDRA, &["-genv=LD_PRELOAD=/t.so", "p"]);
        assert_eq!(args, ["-genv", &both, "p"]);
    }

    #[test]
    fn options_in_hydras_file_count_after_those_of_the_line() {
        let env = [("HYDRA_LAUNCHER_EXEC", "/e")];
        let with = |line: &[&str], file: &[&str]| prepared_with(HYDRA, line, file, &env).unwrap();
        let agent_of = |p: &PreparedCommand| p.set[1].1.clone();

        let p = with(&["p"], &["-launcher-exec", "/f"]);
        assert_eq!(p.args[6..], ["-launcher-exec", WRAPPER, "p"]);
        assert_eq!(agent_of(&p), "=/f");
        let p = with(&["-launcher-exec", "/l", "p"], &["-launcher-exec", "/f"]);
        assert_eq!(p.args[6..], ["-launcher-exec", WRAPPER, "p"]);
        assert_eq!(agent_of(&p), "=/l");
        let p = with(&["p"], &["-n", "1", "p", "-launcher-exec", "/f"]);
        assert_eq!(p.args[6..], ["p"]);
        assert_eq!(agent_of(&p), "=/e");

        assert_eq!(with(&["p"], &["-launcher", "fork"]).set, []);
        let line = ["-launcher", "rsh", "p"];
        assert_eq!(with(&line, &["-launcher", "fork"]).set.len(), 2);
        let file = ["-launcher", "slurm", "-launcher-exec", "/f"];
        assert_eq!(with(&["p"], &file).args[6..], ["p"]);
        assert_eq!(with(&["p"], &["-rmk", "slurm"]).set, []);

        let file = ["-n", "1", "-env", "LD_PRELOAD=/t.so", "p"];
        let refused = prepared_with(HYDRA, &["p"], &file, &[]).unwrap_err();
        assert_eq!(refused.status(), 2);
        assert!(
            refused.to_string().contains("-genv LD_PRELOAD="),
            "{refused}"
        );
    }

    #[test]
    fn an_agent_in_the_programs_arguments_is_refused_where_mpirun_would_take_it() {
        for (version, line) in [
            (OMPI4, "-n 1 p --mca plm_rsh_agent /a"),
            (OMPI4, "-n 1 p : p -gmca orte_rsh_agent /a"),
            (OMPI5, "-n 1 p --prtemca plm_ssh_agent /a"),
        ] {
            let line: Vec<_> = line.split(' ').collect();
            let refused = prepared_with(version, &line, &[], &[]).unwrap_err();
            assert_eq!(refused.status(), 2);
            assert!(refused.to_string().contains("_agent, which"), "{refused}");
        }
        for line in ["p --mca a plm_rsh_agent", "p mca plm_rsh_agent a"] {
            let line: Vec<_> = line.split(' ').collect();
            prepared_with(OMPI4, &line, &[], &[]).unwrap();
        }
    }

    #[test]
    fn hydras_agent_is_one_program_and_open_mpis_a_list() {
        let path = "/a b/c:d/agent -x";
        let p = prepared(HYDRA, &["-launcher-exec", path, "p"]);
        assert_eq!(p.set[1].1.to_str().unwrap(), format!("={path}"));
        let p = prepared(OMPI4, &["--mca", "plm_rsh_agent", "rsh -q : ssh", "p"]);
        assert_eq!(p.set[1].1, "rsh -q : ssh");
    }

    #[test]
    fn a_preload_for_one_program_leaves_that_of_the_others() {
        let line = ["-env", "LD_PRELOAD", "/t.so", "p", ":", "p"];
        let p = prepared(HYDRA, &line);
        assert_eq!(p.args[..3], ["-genv", "LD_PRELOAD", LIB]);
    }
}
