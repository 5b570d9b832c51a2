//! Problems with settings, each in one line.

use std::fmt;

use super::{TOOL_VARIABLES, VARIABLES, Variable};

/// One problem with the settings. Displays as one line for the user: the variable, its value, the
/// values that it takes, and the value that is used instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    variable: String,
    mistake: String,
    then: String,
}

impl Problem {
    /// The variable in question.
    pub fn variable(&self) -> &str {
        &self.variable
    }

    /// The mistake, without the way in which SLIM goes on: for a caller that stops instead.
    pub fn mistake(&self) -> &str {
        &self.mistake
    }

    pub(super) fn bad_value(variable: &Variable, value: &str) -> Self {
        let Variable {
            name,
            allowed,
            default,
            ..
        } = variable;
        let value = quoted(value);
        Problem {
            variable: name.to_string(),
            mistake: format!("{name}={value}: not allowed; it takes {allowed}"),
            then: format!("using {default}"),
        }
    }

    pub(super) fn unknown(name: &str) -> Self {
        let shown = quoted(name);
        let shown = shown.trim_matches('"');
        let hint = match nearest(name) {
            Some(known) => format!("did you mean {known}"),
            None => "see `slim run --help` for all variables".to_owned(),
        };
        Problem {
            variable: name.to_owned(),
            mistake: format!("{shown}: there is no such variable; {hint}"),
            then: "it is ignored".to_owned(),
        }
    }

    /// Does not show the value, which is meant to be a secret.
    pub(super) fn no_key(name: &str, why: &str) -> Self {
        Problem {
            variable: name.to_owned(),
            mistake: format!("{name}: gives no job key, {why}"),
            then: "SLIM is off, connections stay plain".to_owned(),
        }
    }

    pub(super) fn witness_without_key() -> Self {
        Problem {
            variable: "SLIM_WITNESS".to_owned(),
            mistake: "SLIM_WITNESS: there is no job key, so anybody could speak for the witness"
                .to_owned(),
            then: "using no witness".to_owned(),
        }
    }

    pub(super) fn meet_without_key() -> Self {
        Problem {
            variable: "SLIM_MEET".to_owned(),
            mistake: "SLIM_MEET: there is no job key, so anybody could say where processes are"
                .to_owned(),
            then: "processes whose addresses have both changed do not find each other".to_owned(),
        }
    }

    pub(super) fn two_keys() -> Self {
        Problem {
            variable: "SLIM_JOB_KEY_FILE".to_owned(),
            mistake: "SLIM_JOB_KEY_FILE: SLIM_JOB_KEY is set too".to_owned(),
            then: "using SLIM_JOB_KEY".to_owned(),
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.mistake, self.then)
    }
}

/// The value in quotes, on one line, and shortened if it is long.
fn quoted(value: &str) -> String {
    const MOST: usize = 60;
    if value.chars().count() <= MOST {
        return format!("{value:?}");
    }
    let start: String = value.chars().take(MOST).collect();
    format!("{:?}", start + "...")
}

/// The variable that the user probably meant.
fn nearest(name: &str) -> Option<&'static str> {
    const MAX_DISTANCE: usize = 3;
    let known = VARIABLES.iter().map(|v| v.name).chain(TOOL_VARIABLES);
    let name = name.to_ascii_uppercase();
    known
        .filter(|known| known.len().abs_diff(name.len()) <= MAX_DISTANCE)
        .map(|known| (edit_distance(known.as_bytes(), name.as_bytes()), known))
        .filter(|(distance, _)| *distance <= MAX_DISTANCE)
        .min()
        .map(|(_, known)| known)
}

/// How many letters must be added, left out or changed to get from `a` to `b`.
fn edit_distance(a: &[u8], b: &[u8]) -> usize {
    // row[j]: distance from the prefix of `a` seen so far to the first j letters of `b`.
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let changed = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(row[j] + 1).min(row[j + 1] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edit_distance_counts_letters_added_left_out_or_changed() {
        for (a, b, n) in [
            ("", "", 0),
            ("abc", "", 3),
            ("kitten", "sitting", 3),
            ("ab", "ba", 2),
        ] {
            assert_eq!(edit_distance(a.as_bytes(), b.as_bytes()), n, "{a} {b}");
            assert_eq!(edit_distance(b.as_bytes(), a.as_bytes()), n, "{b} {a}");
        }
    }

    #[test]
    fn every_known_name_is_its_own_nearest() {
        for known in VARIABLES {
            assert_eq!(nearest(known.name), Some(known.name));
        }
        assert_eq!(nearest("SLIM_ATTEMPS"), Some("SLIM_ATTEMPTS"));
        assert_eq!(nearest("SLIM_EVENT"), Some("SLIM_EVENTS"));
        assert_eq!(nearest("slim_log"), Some("SLIM_LOG"));
        assert_eq!(nearest("SLIM_COMPLETELY_ELSE"), None);
    }
}
