//! The `SLIM_` variables of the job: collected, checked, passed on.

use std::collections::BTreeMap;
use std::env;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use slim_core::config::{Config, LAB_PREFIX, TOOL_VARIABLES};

use crate::failure::CliError;

/// Checked `SLIM_` variables, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings(BTreeMap<String, String>);

/// Is `name` one of the variables that the preload library reads?
pub fn is_setting(name: &str) -> bool {
    let ours = name == "SLIM" || name.starts_with("SLIM_");
    ours && !name.starts_with(LAB_PREFIX) && !TOOL_VARIABLES.contains(&name)
}

impl Settings {
    /// The variables of this process's environment. Values that are not UTF-8 are bad input.
    pub fn from_env() -> Result<Self, CliError> {
        let mut found = BTreeMap::new();
        for (name, value) in env::vars_os() {
            let Some(name) = name.to_str().filter(|n| is_setting(n)) else {
                continue;
            };
            let value = value
                .into_string()
                .map_err(|_| CliError::input(format!("{name}: the value is not UTF-8")))?;
            found.insert(name.to_owned(), value);
        }
        Ok(Self(found))
    }

    /// Sets `name`, replacing a value from the environment.
    pub fn set(&mut self, name: &str, value: impl Into<String>) {
        self.0.insert(name.to_owned(), value.into());
    }

    /// Takes `NAME=VALUE` as given on the command line.
    pub fn set_pair(&mut self, pair: &str) -> Result<(), CliError> {
        match pair.split_once('=') {
            Some((name, value)) if is_setting(name) => {
                self.set(name, value);
                Ok(())
            }
            _ => Err(CliError::input(format!(
                "--set {pair}: expected SLIM_NAME=VALUE"
            ))),
        }
    }

    /// The value of `name`, if it is set.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// All settings, in the order of their names.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(n, v)| (n.as_str(), v.as_str()))
    }

    /// Checks every variable as the library would. A bad value is an error here, where the user
    /// sees it; in a rank the default replaces it.
    pub fn checked(self) -> Result<(Self, Config), CliError> {
        let (mut config, mut problems) = Config::from_vars(self.0.clone());
        if let Some(path) = config.job_key_file.clone() {
            let read = std::fs::read(&path).and_then(|bytes| {
                let about = std::fs::metadata(&path)?;
                let mode = if about.is_file() {
                    about.mode() & 0o777
                } else {
                    0
                };
                Ok((bytes, mode))
            });
            let file = read.map_err(|e| e.to_string());
            let file = file.as_ref().map(|(bytes, mode)| (&bytes[..], *mode));
            problems.extend(config.set_job_key(file.map_err(|e| &**e)).err());
        }
        let mut lines: Vec<String> = problems.iter().map(|p| p.mistake().to_owned()).collect();
        if let Some(path) = &config.events
            && let Some(problem) = events_problem(path)
        {
            lines.push(problem);
        }
        if lines.is_empty() {
            Ok((self, config))
        } else {
            Err(CliError::inputs(lines))
        }
    }
}

fn events_problem(path: &Path) -> Option<String> {
    let dir = path.parent().filter(|d| !d.as_os_str().is_empty())?;
    // A directory whose name has a %p or %h is known only to the process that replaces them.
    if dir.to_string_lossy().contains('%') || dir.is_dir() {
        return None;
    }
    Some(format!("SLIM_EVENTS: {} is not a directory", dir.display()))
}

/// Makes a path absolute, because ranks with other working directories will open it.
pub fn absolute(path: &Path) -> Result<PathBuf, CliError> {
    std::path::absolute(path).map_err(|e| CliError::input(format!("{}: {e}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(pairs: &[(&str, &str)]) -> Settings {
        let mut s = Settings::default();
        for (n, v) in pairs {
            s.set(n, *v);
        }
        s
    }

    #[test]
    fn good_values_pass_unchanged() {
        let s = with(&[("SLIM", "required"), ("SLIM_ATTEMPTS", "5")]);
        let (checked, config) = s.clone().checked().unwrap();
        assert_eq!(checked, s);
        assert_eq!(config.attempts, 5);
    }

    #[test]
    fn every_problem_is_named_and_the_status_is_2() {
        let failure = with(&[("SLIM_ATTEMPTS", "99"), ("SLIM_ATTEMPS", "3")])
            .checked()
            .unwrap_err();
        assert_eq!(failure.status(), 2);
        let text = failure.to_string();
        assert!(
            text.contains("SLIM_ATTEMPTS") && text.contains("SLIM_ATTEMPS"),
            "{text}"
        );
        assert_eq!(failure.lines().len(), 2, "{text}");
    }

    #[test]
    fn the_directory_of_an_event_log_must_exist() {
        let failure = with(&[("SLIM_EVENTS", "/no/such/dir/ev.%p.jsonl")])
            .checked()
            .unwrap_err();
        assert!(
            failure
                .to_string()
                .contains("/no/such/dir is not a directory"),
            "{failure}"
        );
    }

    #[test]
    fn pairs_must_name_a_setting() {
        let mut s = Settings::default();
        s.set_pair("SLIM_STALL=2").unwrap();
        assert_eq!(s.get("SLIM_STALL"), Some("2"));
        for bad in ["SLIM_STALL", "PATH=/x", "SLIM_PRELOAD=/x.so"] {
            assert_eq!(s.set_pair(bad).unwrap_err().status(), 2, "{bad}");
        }
    }
}
