//! The file with further options that a launcher reads after its command line.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use super::entry::{MpiEntry, OptionFile};
use super::line::{OptionRole, value_of};

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
        let text = match value_of(&self.syntax.read(args), OptionRole::OptionFile) {
            Some(named) => read(Path::new(&named)),
            None => file.places(launcher, variable).find_map(|path| read(&path)),
        };
        words(&text.unwrap_or_default())
    }
}

/// The content of a file, if there is one. Nothing is read from a pipe, because the launcher would miss these bytes, or from a device.
fn read(path: &Path) -> Option<Vec<u8>> {
    match fs::metadata(path).ok()?.is_file() {
        true => fs::read(path).ok(),
        false => Some(Vec::new()),
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

#[cfg(test)]
mod tests {
    use super::super::hydra::MPICH;
    use super::*;

    #[test]
    fn lines_of_the_file_are_parts_of_a_command_line() {
        let text = b"# -n 9 no\n\n -n 1 a\tb \n-n 2 \\\nc\n  -n 3 d :\n-n 4 e";
        let found = words(text);
        let found: Vec<_> = found.iter().map(|word| word.to_str().unwrap()).collect();
        assert_eq!(found.join(" "), "-n 1 a b : -n 2 c : -n 3 d : -n 4 e");
    }

    #[test]
    fn the_file_is_searched_as_hydra_does() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let file = MPICH.option_file.as_ref().unwrap();
        let system = path("mpiexec.hydra.conf");
        let launcher = path("mpiexec");
        let strings = format!("\x7fELF\0%s/mpiexec.hydra.conf\0{}\0", system.display());
        fs::write(&launcher, strings).unwrap();
        let (named, given) = (path("named"), path("given"));
        let found = |args: &[&str], variable_is_set: bool| {
            let args: Vec<OsString> = args.iter().map(OsString::from).collect();
            let variable = |name: &str| match name {
                "HOME" => Some(dir.path().into()),
                "HYDRA_CONFIG_FILE" if variable_is_set => Some(named.clone().into()),
                _ => None,
            };
            MPICH.options_in_file(&launcher, &args, &variable)
        };
        assert_eq!(found(&["p"], true), [""; 0]);
        fs::write(&system, "system").unwrap();
        assert_eq!(found(&["p"], true), ["system"]);
        fs::write(path(file.user), "user").unwrap();
        assert_eq!(found(&["p"], true), ["user"]);
        fs::write(&named, "named").unwrap();
        assert_eq!(found(&["p"], true), ["named"]);
        assert_eq!(found(&["p"], false), ["user"]);
        // With this variable users switch their own file off.
        fs::remove_file(&named).unwrap();
        std::os::unix::fs::symlink("/dev/null", &named).unwrap();
        assert_eq!(found(&["p"], true), [""; 0]);
        let line = ["-configfile", given.to_str().unwrap(), "p"];
        assert_eq!(found(&line, true), [""; 0]);
        fs::write(&given, "given").unwrap();
        assert_eq!(found(&line, true), ["given"]);
        // What is no regular file is left to the launcher.
        assert_eq!(found(&["-configfile", "/dev/zero", "p"], true), [""; 0]);
    }
}
