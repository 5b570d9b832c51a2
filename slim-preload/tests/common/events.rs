//! Queries on event logs.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::Path;

/// The event log that the processes of a test have written.
pub struct Events(String);

impl Events {
    /// Reads the log. A missing file is an empty log: processes create it with their first event.
    pub fn read(log: &Path) -> Self {
        Self(fs::read_to_string(log).unwrap_or_default())
    }

    /// The lines of events of this kind.
    pub fn of_kind(&self, kind: &str) -> impl Iterator<Item = &str> {
        self.0.lines().filter(move |line| kind_of(line) == kind)
    }

    /// The number of events of this kind.
    pub fn count(&self, kind: &str) -> usize {
        self.of_kind(kind).count()
    }

    /// The number of events of each kind.
    pub fn counts(&self) -> BTreeMap<&str, usize> {
        let mut counts = BTreeMap::new();
        for line in self.0.lines() {
            *counts.entry(kind_of(line)).or_default() += 1;
        }
        counts
    }
}

fn kind_of(line: &str) -> &str {
    let kind = line.split("\"kind\":\"").nth(1);
    let kind = kind.and_then(|rest| rest.split('"').next());
    kind.unwrap_or_else(|| panic!("a line without a kind: {line}"))
}

impl fmt::Display for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
