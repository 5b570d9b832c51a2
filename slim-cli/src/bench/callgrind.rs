//! Counts instructions with valgrind's callgrind; the count does not depend on the machine's load.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use crate::failure::CliError;
use crate::run::launcher;

/// A function as identified in a profile.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Function {
    /// File name of the program or library that has the function.
    pub object: String,
    /// Name of the function.
    pub name: String,
}

/// Instructions of one thread, by function.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    own: BTreeMap<Function, u64>,
    entered: BTreeMap<Function, Entered>,
}

/// Calls of a function from other objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entered {
    /// Number of calls.
    pub calls: u64,
    /// Instructions of all calls, callees included.
    pub instructions: u64,
}

/// The path of valgrind.
pub fn valgrind() -> Result<PathBuf, CliError> {
    launcher::resolve("valgrind").map_err(|_| {
        CliError::input("counting instructions needs valgrind, which is not installed")
    })
}

/// Arguments that make valgrind write one file for each thread; [`first_thread`] of `out` names that of the first.
pub fn arguments(out: &Path) -> [String; 5] {
    [
        "-q".into(),
        "--tool=callgrind".into(),
        "--separate-threads=yes".into(),
        format!("--callgrind-out-file={}", out.display()),
        "--".into(),
    ]
}

/// The file with the profile of the thread in which `main` ran.
pub fn first_thread(out: &Path) -> PathBuf {
    let mut name = out.as_os_str().to_owned();
    name.push("-01");
    name.into()
}

impl Profile {
    /// Reads a profile that callgrind wrote.
    pub fn read(path: &Path) -> Result<Self, CliError> {
        let text = fs::read_to_string(path)
            .map_err(|e| CliError::failed(format!("{}: {e}", path.display())))?;
        Ok(Self::parse(&text))
    }

    /// Each line is either a name, which the following costs belong to, or a cost. A cost right after `calls=` is
    /// that of the callee, which has it in lines of its own, too.
    fn parse(text: &str) -> Self {
        let (mut objects, mut functions) = (Names::default(), Names::default());
        let (mut object, mut name) = (String::new(), String::new());
        let (mut callee_object, mut callee) = (None, String::new());
        let mut call: Option<(Function, u64)> = None;
        let mut profile = Self::default();
        for line in text.lines() {
            match line.split_once('=') {
                Some(("ob", value)) => object = base_name(&objects.resolve(value)),
                Some(("fn", value)) => name = functions.resolve(value),
                Some(("cob", value)) => callee_object = Some(base_name(&objects.resolve(value))),
                Some(("cfn", value)) => callee = functions.resolve(value),
                Some(("calls", value)) => {
                    let times = value.split(' ').next().and_then(|n| n.parse().ok());
                    let called = Function {
                        object: callee_object.take().unwrap_or_else(|| object.clone()),
                        name: callee.clone(),
                    };
                    call = Some((called, times.unwrap_or(0)));
                }
                Some(_) => {}
                None => {
                    let Some(cost) = cost(line) else { continue };
                    match call.take() {
                        Some((called, _)) if called.object == object => {}
                        Some((called, times)) => {
                            let entered = profile.entered.entry(called).or_default();
                            entered.calls += times;
                            entered.instructions += cost;
                        }
                        None => {
                            let function = Function {
                                object: object.clone(),
                                name: name.clone(),
                            };
                            *profile.own.entry(function).or_default() += cost;
                        }
                    }
                }
            }
        }
        profile
    }

    /// Number of all instructions.
    pub fn total(&self) -> u64 {
        self.own.values().sum()
    }

    /// All functions.
    pub fn functions(&self) -> impl Iterator<Item = &Function> {
        self.own.keys()
    }

    /// Instructions of a function without its callees.
    pub fn own(&self, function: &Function) -> u64 {
        self.own.get(function).copied().unwrap_or(0)
    }

    /// Functions that were called from other objects.
    pub fn entered(&self) -> impl Iterator<Item = (&Function, Entered)> {
        self.entered.iter().map(|(f, e)| (f, *e))
    }
}

/// A name is written in full once, with a number, and by its number from then on.
#[derive(Default)]
struct Names(HashMap<String, String>);

impl Names {
    fn resolve(&mut self, text: &str) -> String {
        let Some((number, name)) = text.strip_prefix('(').and_then(|rest| rest.split_once(')'))
        else {
            return text.to_owned();
        };
        match name.trim_start() {
            "" => self.0.get(number).cloned().unwrap_or_default(),
            name => {
                self.0.insert(number.to_owned(), name.to_owned());
                name.to_owned()
            }
        }
    }
}

fn base_name(path: &str) -> String {
    path.rsplit('/').next().unwrap_or(path).to_owned()
}

/// The cost in a line `POSITION COST`. A position may also be `+N`, `-N` or `*`.
fn cost(line: &str) -> Option<u64> {
    let (position, cost) = line.split_once(' ')?;
    let place = position.strip_prefix(['+', '-']).unwrap_or(position);
    (place == "*" || place.bytes().all(|b| b.is_ascii_digit()) && !place.is_empty())
        .then(|| cost.trim().parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "version: 1\npositions: line\nevents: Ir\n\n\
        ob=(1) /usr/bin/prog\nfl=(1) a.c\nfn=(1) main\n10 5\n+1 7\n\
        cob=(2) /usr/lib/libc.so.6\ncfn=(2) send\ncalls=3 20\n* 60\n* 2\n\
        fi=(2) b.h\n4 1\nfe=(1)\n\
        ob=(2)\nfn=(2)\n20 60\n\
        ob=(1)\nfn=(3) other\n30 1\ncfn=(1)\ncalls=2 10\n-3 15\n\ntotals: 76\n";

    fn function(object: &str, name: &str) -> Function {
        Function {
            object: object.into(),
            name: name.into(),
        }
    }

    #[test]
    fn the_cost_of_a_callee_is_counted_once() {
        let profile = Profile::parse(TEXT);
        let (main, send) = (function("prog", "main"), function("libc.so.6", "send"));
        assert_eq!(profile.total(), 76);
        assert_eq!((profile.own(&main), profile.own(&send)), (15, 60));
        let used = Entered {
            calls: 3,
            instructions: 60,
        };
        assert_eq!(profile.entered().collect::<Vec<_>>(), [(&send, used)]);
    }

    #[test]
    fn only_lines_with_costs_give_a_cost() {
        for line in ["", "positions: line", "summary: 5", "part: 1", "+ 5"] {
            assert_eq!(cost(line), None, "{line}");
        }
        assert_eq!(cost("+12 5"), Some(5));
        assert_eq!(cost("* 5"), Some(5));
    }
}
