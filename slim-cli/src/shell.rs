//! Quoting for a POSIX shell.

use std::ffi::OsString;

/// `text` as one word for a POSIX shell.
pub fn quote(text: &str) -> String {
    let quoted = shlex::try_quote(text).expect("neither arguments nor variables contain NUL");
    quoted.into_owned()
}

/// A command line that can be pasted into a shell.
pub fn line(words: impl IntoIterator<Item = OsString>) -> String {
    let quoted = words.into_iter().map(|word| quote(&word.to_string_lossy()));
    quoted.collect::<Vec<_>>().join(" ")
}

/// `NAME='value' ` for each pair, to follow `env `.
pub fn assignments<'a>(pairs: impl IntoIterator<Item = (&'a str, &'a str)>) -> String {
    let words = pairs.into_iter();
    words
        .map(|(name, value)| format!("{name}={} ", quote(value)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_reads_back_what_was_quoted() {
        for text in [
            "",
            "a b",
            "it's",
            "$HOME `x` \\",
            "plain-1.2",
            "\"",
            "a;b|c&d",
            "line\nbreak",
        ] {
            let script = format!("printf %s {}", quote(text));
            let out = std::process::Command::new("sh")
                .args(["-c", &script])
                .output()
                .unwrap();
            assert_eq!(String::from_utf8(out.stdout).unwrap(), text, "{script}");
        }
    }

    #[test]
    fn assignments_reach_the_command() {
        let script = format!(
            "env {}sh -c 'echo $SLIM_A-$SLIM_B'",
            assignments([("SLIM_A", "x y"), ("SLIM_B", "'")])
        );
        let out = std::process::Command::new("sh")
            .args(["-c", &script])
            .output()
            .unwrap();
        assert_eq!(String::from_utf8(out.stdout).unwrap(), "x y-'\n");
    }
}
