//! The command line of a launcher: its own options, and where each program with its arguments is.
//!
//! What belongs to a program is neither read nor changed. So the table of an MPI has every option of its launcher, with its number
//! of values. Launchers refuse options that they do not know; here such an option and what follows it count as a program's.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::slice;

/// The meaning of an option for `slim run`, which also says how many values it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptionRole {
    /// The agent that starts daemons.
    Agent,
    /// A variable for the ranks, as `NAME VALUE` or as `NAME=VALUE`.
    Assign,
    /// A variable for the ranks, as `NAME` or as `NAME=VALUE`.
    Export,
    /// The list of all variables for the ranks ([`super::export_list`]).
    ExportList,
    /// Nothing; it has no value.
    Flag,
    /// A file with a list of hosts.
    HostFile,
    /// A list of hosts.
    Hosts,
    /// A list of hosts in Slurm's notation.
    HostRanges,
    /// The resource manager.
    Manager,
    /// A file with further options.
    OptionFile,
    /// A parameter: its name and its value.
    Parameter,
    /// The way to start daemons.
    Starter,
    /// Nothing; it has this many values.
    Values(usize),
}

impl OptionRole {
    /// The number of values, the first of which may be known.
    fn count(self, first: Option<&OsStr>) -> usize {
        match self {
            Self::Flag => 0,
            Self::Assign if first.is_some_and(|word| word.as_bytes().contains(&b'=')) => 1,
            Self::Assign | Self::Parameter => 2,
            Self::Values(count) => count,
            _ => 1,
        }
    }
}

/// The options of a launcher.
#[derive(Debug, PartialEq, Eq)]
pub struct Syntax {
    /// Every option, without dashes.
    pub options: &'static [(OptionRole, &'static [&'static str])],
    /// Capital letters are the same as small ones.
    pub ignores_case: bool,
    /// The beginning of a name is enough, as in `getopt_long`.
    pub abbreviates: bool,
    /// After one dash, each letter is an option, and a value may follow in the same word, as in `getopt`.
    pub has_letters: bool,
    /// Plug-ins add options that are not in the table. Those with their value in the same word are recognised.
    pub has_plugins: bool,
}

/// A part of a command line.
#[derive(Debug)]
pub struct Item<'a> {
    /// Set for an option; none for a program with its arguments, up to `:` and with it.
    pub role: Option<OptionRole>,
    /// The words as they were given.
    pub words: &'a [OsString],
    /// The values of an option. The first may be in the same word, behind `=`.
    pub values: Vec<&'a OsStr>,
}

impl Syntax {
    /// The parts of a command line.
    pub fn read<'a>(&self, args: &'a [OsString]) -> Vec<Item<'a>> {
        let mut items = Vec::new();
        let mut rest = args;
        while !rest.is_empty() {
            let item = self.option(rest).unwrap_or_else(|| Item::program(rest));
            rest = &rest[item.words.len()..];
            items.push(item);
        }
        items
    }

    /// The words of the launcher's own options.
    pub fn own(&self, args: &[OsString]) -> Vec<OsString> {
        let options = self.read(args).into_iter().filter(|i| i.role.is_some());
        options.flat_map(|item| item.words.to_vec()).collect()
    }

    /// One of these parameters, if a program has it among its arguments as an option of the launcher would be.
    pub fn parameter_of_program<'a>(&self, items: &[Item<'a>], names: &[&str]) -> Option<&'a str> {
        let programs = items.iter().filter(|item| item.role.is_none());
        let mut pairs = programs.flat_map(|item| item.words.windows(2));
        pairs.find_map(|pair| {
            let role = without_dashes(&pair[0]).and_then(|name| self.role(name));
            let name = pair[1].to_str().filter(|name| names.contains(name));
            name.filter(|_| role == Some(OptionRole::Parameter))
        })
    }

    /// An unknown option before a list of variables for the ranks: the list may be an option as well, or belong to the program.
    pub fn hides_export_list<'a>(&self, items: &[Item<'a>]) -> Option<&'a str> {
        let programs = items.iter().filter(|item| item.role.is_none());
        let is_list = |word: &OsString| {
            let name = without_dashes(word).map(|name| split(name).0);
            name.and_then(|name| self.role(name)) == Some(OptionRole::ExportList)
        };
        let mut hiding = programs.filter(|item| item.words[1..].iter().any(is_list));
        hiding.find_map(|item| {
            let first = item.words[0].to_str()?;
            (first.starts_with('-') && first != "--").then_some(first)
        })
    }

    /// The option that begins with the first word, if it is one and has all its values.
    fn option<'a>(&self, args: &'a [OsString]) -> Option<Item<'a>> {
        let (name, value) = split(without_dashes(&args[0])?);
        if self.has_letters && !args[0].as_bytes().starts_with(b"--") {
            return self.letters(args);
        }
        match self.role(name) {
            Some(role) => Self::with_values(args, role, value),
            None if self.has_plugins => {
                value.and_then(|_| Self::with_values(args, OptionRole::Values(0), value))
            }
            None => None,
        }
    }

    /// A word of letters: flags, and at the end one that may have a value.
    fn letters<'a>(&self, args: &'a [OsString]) -> Option<Item<'a>> {
        let mut letters = &args[0].as_bytes()[1..];
        loop {
            let (letter, rest) = letters.split_at_checked(1)?;
            let role = self.role_if(&|known| known.as_bytes() == letter)?;
            if rest.is_empty() || role != OptionRole::Flag {
                let value = (!rest.is_empty()).then(|| OsStr::from_bytes(rest));
                return Self::with_values(args, role, value);
            }
            letters = rest;
        }
    }

    /// The option of this role that begins with the first word, which may have a value in it.
    fn with_values<'a>(
        args: &'a [OsString],
        role: OptionRole,
        value: Option<&'a OsStr>,
    ) -> Option<Item<'a>> {
        let mut values: Vec<&OsStr> = value.into_iter().collect();
        let mut more = args[1..].iter();
        while values.len() < role.count(values.first().copied()) {
            values.push(more.next()?);
        }
        let unexpected = role == OptionRole::Flag && value.is_some();
        (!unexpected).then(|| Item {
            role: Some(role),
            words: &args[..args.len() - more.len()],
            values,
        })
    }

    fn role(&self, name: &OsStr) -> Option<OptionRole> {
        let name = name.to_str().filter(|name| !name.is_empty())?;
        // A letter is no name for after two dashes.
        let is_name = |known: &str| !self.has_letters || known.len() > 1;
        if self.ignores_case {
            return self.role_if(&|known| known.eq_ignore_ascii_case(name));
        }
        let exact = self.role_if(&|known| is_name(known) && known == name);
        exact.or_else(|| {
            self.abbreviates
                .then(|| self.role_if(&|known| is_name(known) && known.starts_with(name)))?
        })
    }

    /// The role of all options whose names match, if it is one.
    fn role_if(&self, matches: &dyn Fn(&str) -> bool) -> Option<OptionRole> {
        let with = |(role, names): &(OptionRole, &[&str])| {
            names.iter().any(|n| matches(n)).then_some(*role)
        };
        let mut roles = self.options.iter().filter_map(with);
        let role = roles.next()?;
        roles.all(|other| other == role).then_some(role)
    }
}

impl<'a> Item<'a> {
    fn program(args: &'a [OsString]) -> Self {
        let colon = args.iter().position(|word| word == ":");
        Self {
            role: None,
            words: &args[..colon.map_or(args.len(), |at| at + 1)],
            values: Vec::new(),
        }
    }

    /// The value that the option gives to this variable of the ranks.
    pub fn assigned(&self, name: &str) -> Option<&'a OsStr> {
        match (self.role?, self.values.as_slice()) {
            (OptionRole::Assign, [variable, value]) => (*variable == name).then_some(*value),
            (OptionRole::Assign | OptionRole::Export, [pair]) => {
                let (variable, value) = split(pair);
                value.filter(|_| variable == name)
            }
            _ => None,
        }
    }

    /// The option with another last value.
    pub fn with_last(&self, last: &OsStr) -> Vec<OsString> {
        let (option, _) = split(&self.words[0]);
        let (_, front) = self.values.split_last().unwrap_or((&last, &[]));
        let words = [&[option], front, slice::from_ref(&last)].concat();
        words.into_iter().map(OsStr::to_owned).collect()
    }

    /// The option with another value for the variable of the ranks that it sets.
    pub fn with_assigned(&self, value: &str) -> Vec<OsString> {
        match self.values.as_slice() {
            [pair] => {
                let mut pair = split(pair).0.to_owned();
                pair.push("=");
                pair.push(value);
                self.with_last(&pair)
            }
            _ => self.with_last(value.as_ref()),
        }
    }
}

/// A command line, and the file with further options that the launcher reads after it.
#[derive(Debug)]
pub struct GivenLine<'a> {
    /// The options of the launcher.
    pub syntax: &'a Syntax,
    /// The command line.
    pub args: &'a [OsString],
    /// The words of the file.
    pub in_file: Vec<OsString>,
}

impl GivenLine<'_> {
    /// The parts of the command line.
    pub fn line(&self) -> Vec<Item<'_>> {
        self.syntax.read(self.args)
    }

    /// The parts of the file.
    pub fn file(&self) -> Vec<Item<'_>> {
        self.syntax.read(&self.in_file)
    }

    /// The value of the option with this role. The command line comes before the file.
    pub fn value(&self, role: OptionRole) -> Option<String> {
        value_of(&self.line(), role).or_else(|| value_of(&self.file(), role))
    }
}

/// The value of the first option with this role.
pub fn value_of(items: &[Item<'_>], role: OptionRole) -> Option<String> {
    let option = items.iter().find(|item| item.role == Some(role))?;
    Some(option.values.first()?.to_string_lossy().into_owned())
}

/// `NAME=VALUE` as both parts.
fn split(word: &OsStr) -> (&OsStr, Option<&OsStr>) {
    let bytes = word.as_bytes();
    match bytes.iter().position(|byte| *byte == b'=') {
        Some(at) => {
            let value = OsStr::from_bytes(&bytes[at + 1..]);
            (OsStr::from_bytes(&bytes[..at]), Some(value))
        }
        None => (word, None),
    }
}

/// The word without its dashes, if it begins with one.
fn without_dashes(word: &OsStr) -> Option<&OsStr> {
    let bytes = word.as_bytes();
    let dashes = bytes.iter().take_while(|byte| **byte == b'-').count();
    (dashes > 0).then(|| OsStr::from_bytes(&bytes[dashes..]))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use slim_lab::mpi::{Flavor, Mpi};
    use slim_lab::skip::skip;

    use super::super::mpis;
    use super::*;

    const OMPI4: &str = "(Open MPI) 4.1.4";
    const OMPI5: &str = "(Open MPI) 5.0.11";
    const HYDRA: &str = "HYDRA build details:";
    const INTEL: &str = "Intel(R) MPI Library for Linux* OS, Version 2021.17";

    fn syntax(version: &str) -> &'static Syntax {
        if version == SRUN {
            return &mpis::of_program("srun").unwrap().syntax;
        }
        &mpis::of_version("mpirun", version).unwrap().syntax
    }

    const SRUN: &str = "";

    /// The line with `|` between its parts, and `*` before the programs.
    fn parts(version: &str, line: &str) -> String {
        let args: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        let text = |item: Item| {
            let words: Vec<_> = item.words.iter().map(|w| w.to_str().unwrap()).collect();
            let mark = if item.role.is_none() { "*" } else { "" };
            format!("{mark}{}", words.join(" "))
        };
        let parts: Vec<_> = syntax(version).read(&args).into_iter().map(text).collect();
        parts.join("|")
    }

    #[test]
    fn a_line_is_parted_into_options_and_programs() {
        for (version, want) in [
            (
                HYDRA,
                "-n 2|-genv A=1|-genv A 1|--GENV=A 1|*p -n 3 :|-np 1|*p",
            ),
            (HYDRA, "-genv A=|-l|*p"),
            (HYDRA, "-n=2|---verbose|*p :|*x"),
            (HYDRA, "-l|*-l=3 p"),
            (OMPI4, "-np 2|--mca a b|-x A|-x A=1|*p -x A :|-H a|*p"),
            (OMPI4, "-display-topo|*p"),
            (OMPI4, "-q|*-- p -q"),
            (OMPI4, "-q|*--tag-outp p -q"),
            (OMPI5, "--display-topo a|*p"),
            (OMPI5, "--tag-outp|--prtem a b|*p --tag-output"),
            (OMPI5, "*-q p"),
            (OMPI5, "-n 1|*--mca a"),
            (SRUN, "-n4|-N 2|-lu|-lN2|-lN 2|-K1|-K|--mpi=pmix|*p -n 3"),
            (SRUN, "--exp NONE|*p :|-I|--nice|--nice=3|*p --export=A"),
            (
                SRUN,
                "--of-a-plugin=1|--export A|*--of-a-plugin 1 --export=B p",
            ),
            (SRUN, "-l|*-- p -l"),
            (SRUN, "--x|*p --export=B"),
            (SRUN, "--x|-x h|*p"),
            (SRUN, "*-ly p"),
            (SRUN, "*- p"),
            (SRUN, "*-N"),
        ] {
            assert_eq!(
                parts(version, &want.replace('|', " ").replace('*', "")),
                want
            );
        }
        // The beginning of several options.
        assert_eq!(parts(OMPI5, "--re p"), "*--re p");
        assert_eq!(parts(OMPI4, ""), "*");
    }

    #[test]
    fn only_own_options_are_kept() {
        let line = "-n 2 p -x A : --mca a b p --mca c d";
        let args: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        assert_eq!(syntax(OMPI5).own(&args), ["-n", "2", "--mca", "a", "b"]);
    }

    #[test]
    fn a_list_of_variables_behind_an_unknown_option_is_found() {
        let hidden = |line: &str| {
            let args: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            let syntax = syntax(SRUN);
            let found = syntax.hides_export_list(&syntax.read(&args));
            found.map(str::to_owned)
        };
        let found = hidden("-l --of-a-plugin 1 --export NONE p");
        assert_eq!(found.as_deref(), Some("--of-a-plugin"));
        for line in [
            "p --export=NONE",
            "-- p --export=NONE",
            "--export=NONE --of-a-plugin 1 p -x",
        ] {
            assert_eq!(hidden(line), None, "{line}");
        }
    }

    /// The options in a help text: the words that begin with a dash at the beginning of a line, and the values after them.
    fn options_of_help(text: &str) -> impl Iterator<Item = (&str, usize)> {
        text.lines().flat_map(|line| {
            let front = line.trim_start().split("  ").next().unwrap_or_default();
            let mut words = front.split([' ', '|', '/']);
            let names: Vec<_> = words.by_ref().take_while(|w| w.starts_with('-')).collect();
            let values = front.matches("<arg").count();
            names.into_iter().map(move |name| (name, values))
        })
    }

    fn help(test: &str, flavor: Flavor, args: &[&str]) -> Option<String> {
        match Mpi::find(flavor) {
            Ok(mpi) => {
                let output = Command::new(mpi.mpirun()).args(args).output().unwrap();
                Some(String::from_utf8(output.stdout).unwrap())
            }
            Err(reason) => {
                skip(test, reason);
                None
            }
        }
    }

    #[test]
    fn every_option_in_hydras_help_is_known() {
        for (flavor, mpi) in [
            (Flavor::Mpich4, HYDRA),
            (Flavor::Mpich5, HYDRA),
            (Flavor::Intel, INTEL),
        ] {
            let text = help("every_option_in_hydras_help_is_known", flavor, &["-help"]);
            let text = text.unwrap_or_default();
            let mut count = 0;
            for (option, _) in options_of_help(&text) {
                let role = syntax(mpi).role(without_dashes(option.as_ref()).unwrap());
                assert!(role.is_some(), "{flavor}: {option}");
                count += 1;
            }
            assert!(text.is_empty() || count > 40, "{count} options");
        }
    }

    #[test]
    fn every_option_in_mpiruns_help_is_known_with_its_number_of_values() {
        let test = "every_option_in_mpiruns_help_is_known_with_its_number_of_values";
        let args = ["--allow-run-as-root", "--help", "full"];
        let Some(text) = help(test, Flavor::OpenMpi4, &args) else {
            return;
        };
        let mut count = 0;
        for (option, values) in options_of_help(&text) {
            let role = syntax(OMPI4).role(without_dashes(option.as_ref()).unwrap());
            let known = role.map(|role| role.count(None));
            assert_eq!(known, Some(values), "{option}");
            count += 1;
        }
        assert!(count > 150, "{count} options");
    }
}
