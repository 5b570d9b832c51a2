//! Quoting for a POSIX shell.

use std::fmt::Write as _;

/// `text` as one word for a POSIX shell.
pub fn quote(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./:=,@%+".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// `NAME='value' ` for each pair, as arguments of `env`.
pub fn assignments<'a>(pairs: impl IntoIterator<Item = (&'a str, &'a str)>) -> String {
    pairs
        .into_iter()
        .fold(String::new(), |mut out, (name, value)| {
            // Writing to a String cannot fail.
            let _ = write!(out, "{name}={} ", quote(value));
            out
        })
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
