//! The list by which Slurm's `srun` chooses the variables that processes get: its option `--export`, or a variable of that meaning.
//!
//! `ALL` among the names gives them the whole environment, and that comes before a value in the list. Otherwise they get what the
//! list names, as `NAME` or as `NAME=VALUE`. `NONE` alone names nothing.

use std::path::Path;

use super::preload;

/// The variables that srun takes for its option `--export`, in this order, if it does not have the option.
pub const VARIABLES: [&str; 2] = ["SRUN_EXPORT_ENV", "SLURM_EXPORT_ENV"];

const PRELOAD: &str = "LD_PRELOAD";

/// A list that carries SLIM.
#[derive(Debug, PartialEq, Eq)]
pub struct CarryingList {
    /// The list.
    pub list: String,
    /// The user's library for the ranks, which counts only if the environment names none.
    pub preload: Option<String>,
}

/// The list with these variables added, unless it gives them values of its own. `library` is the preload library.
pub fn carrying(list: &str, exported: &[(&str, &str)], library: &Path) -> CarryingList {
    let mut items: Vec<String> = items(list).into_iter().map(str::to_owned).collect();
    let is_all = items.iter().any(|item| item.eq_ignore_ascii_case("ALL"));
    let mut theirs = None;
    for item in &mut items {
        if let Some(value) = assigned(item, PRELOAD) {
            theirs = Some(value.to_owned());
            *item = format!(
                "{PRELOAD}={}",
                preload::joined(library, Some(value.as_ref()))
            );
        }
    }
    if is_all {
        return CarryingList {
            list: items.join(","),
            preload: theirs,
        };
    }
    if let [only] = &*items
        && only.eq_ignore_ascii_case("NONE")
    {
        items.clear();
    }
    let names = exported.iter().map(|(name, _)| *name);
    let missing = names.filter(|name| {
        let has = |item: &String| item == name || assigned(item, name).is_some();
        !items.iter().any(has)
    });
    // In front: a quotation mark that is not closed takes in all that follows.
    let all: Vec<&str> = missing.chain(items.iter().map(String::as_str)).collect();
    CarryingList {
        list: all.join(","),
        preload: None,
    }
}

/// The parts between commas that are in no quotation marks.
fn items(list: &str) -> Vec<&str> {
    let mut quote = None;
    let parts = list.split(|c| {
        match quote {
            None if c == '\'' || c == '"' => quote = Some(c),
            Some(open) if c == open => quote = None,
            _ => {}
        }
        c == ',' && quote.is_none()
    });
    parts.filter(|part| !part.is_empty()).collect()
}

fn assigned<'a>(item: &'a str, name: &str) -> Option<&'a str> {
    item.strip_prefix(name)?.strip_prefix('=')
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIB: &str = "/s/libslim_preload.so";

    fn list(given: &str) -> String {
        carrying(given, &[(PRELOAD, LIB), ("SLIM_LOG", "info")], LIB.as_ref()).list
    }

    #[test]
    fn a_list_names_the_variables_of_slim() {
        for (given, want) in [
            ("", "LD_PRELOAD,SLIM_LOG"),
            ("NONE", "LD_PRELOAD,SLIM_LOG"),
            ("none", "LD_PRELOAD,SLIM_LOG"),
            ("PATH,A=1", "LD_PRELOAD,SLIM_LOG,PATH,A=1"),
            ("LD_PRELOAD,PATH", "SLIM_LOG,LD_PRELOAD,PATH"),
            ("SLIM_LOG=off", "LD_PRELOAD,SLIM_LOG=off"),
            (
                "LD_PRELOAD=/t.so",
                "SLIM_LOG,LD_PRELOAD=/s/libslim_preload.so:/t.so",
            ),
            (
                "A='x,LD_PRELOAD=y',B",
                "LD_PRELOAD,SLIM_LOG,A='x,LD_PRELOAD=y',B",
            ),
            ("A=don't,B", "LD_PRELOAD,SLIM_LOG,A=don't,B"),
        ] {
            assert_eq!(list(given), want);
        }
    }

    #[test]
    fn the_whole_environment_needs_no_names() {
        for given in ["ALL", "all", "ALL,A=1", "A,ALL"] {
            assert_eq!(list(given), given);
        }
    }

    #[test]
    fn a_library_beside_the_whole_environment_is_for_the_environment() {
        let both = carrying("ALL,LD_PRELOAD=/t.so", &[(PRELOAD, LIB)], LIB.as_ref());
        assert_eq!(both.preload.as_deref(), Some("/t.so"));
        assert_eq!(both.list, format!("ALL,LD_PRELOAD={LIB}:/t.so"));
    }
}
