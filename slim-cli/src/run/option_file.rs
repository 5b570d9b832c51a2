//! The file with further options that a launcher reads after its command line.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use super::line::{Role, value_of};
use super::mpis::{MpiEntry, OptionFile};

impl MpiEntry {
    /// The words in the file that the launcher will read if it has one and gets these arguments.
    pub fn options_in_file(
        &self,
        launcher: &Path,
        args: &[OsString],
        variable: &dyn Fn(&str) -> Option<OsString>,
    ) -> Vec<OsString> {
        let Some(file) = &self.option_file else {
            return Vec::new();
        };
        let text = match value_of(&self.syntax.read(args), Role::OptionFile) {
            Some(named) => fs::read(named).ok(),
            None => file
                .places(launcher, variable)
                .find_map(|path| fs::read(path).ok()),
        };
        words(&text.unwrap_or_default())
    }
}

impl OptionFile {
    /// Where it may be, the first place first.
    fn places(
        &self,
        launcher: &Path,
        variable: &dyn Fn(&str) -> Option<OsString>,
    ) -> impl Iterator<Item = PathBuf> {
        let named = variable(self.variable).map(PathBuf::from);
        let users = variable("HOME").map(|home| Path::new(&home).join(self.user));
        let systems = fs::read(launcher).ok();
        let systems = systems.and_then(|program| string_with_end(&program, self.system));
        [named, users, systems].into_iter().flatten()
    }
}

/// The absolute path in a program file that ends so.
fn string_with_end(program: &[u8], end: &str) -> Option<PathBuf> {
    let strings = program.split(|byte| *byte == 0);
    let found = strings
        .filter(|string| string.ends_with(end.as_bytes()))
        .find(|string| string.starts_with(b"/"))?;
    Some(PathBuf::from(OsStr::from_bytes(found)))
}

/// A line is as the part of the command line for one program. `\` at its end joins the next one.
fn words(text: &[u8]) -> Vec<OsString> {
    let mut words: Vec<OsString> = Vec::new();
    for line in text.split(|byte| *byte == b'\n') {
        let line = line.trim_ascii();
        if line.is_empty() || line.starts_with(b"#") {
            continue;
        }
        match words.last() {
            Some(last) if last == "\\" => drop(words.pop()),
            Some(last) if last != ":" => words.push(":".into()),
            _ => {}
        }
        let more = line.split(u8::is_ascii_whitespace);
        let more = more.filter(|word| !word.is_empty());
        words.extend(more.map(|word| OsString::from_vec(word.to_vec())));
    }
    words
}
