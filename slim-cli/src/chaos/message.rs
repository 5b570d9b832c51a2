//! Messages of the parser in the words of a user.

use crate::failure::visible;

/// Names of Rust types in messages, and what users call them.
const TYPES: [(&str, &str); 12] = [
    ("f64", "a number"),
    ("f32", "a number"),
    ("u64", "a whole number, not negative"),
    ("usize", "a whole number, not negative"),
    ("u32", "a whole number, not negative"),
    ("u16", "a whole number, 0 to 65535"),
    ("i64", "a whole number"),
    ("boolean", "true or false"),
    ("a sequence", "a list"),
    ("sequence", "a list"),
    ("map", "a table"),
    ("enum", "a word"),
];

/// One line without names of Rust types and without control characters.
pub fn plain(message: &str) -> String {
    let mut text = visible(&message.replace('\n', " "));
    if let Some((before, expected)) = text.rsplit_once("expected ") {
        let known = TYPES.iter().find(|(name, _)| *name == expected);
        let words = match known {
            Some((_, words)) => Some((*words).to_owned()),
            None if expected.starts_with("struct ") => Some("a table".to_owned()),
            None => None,
        };
        if let Some(words) = words {
            text = format!("{before}expected {words}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_have_the_names_of_users() {
        assert_eq!(
            plain("invalid type: string \"x\", expected u16"),
            "invalid type: string \"x\", expected a whole number, 0 to 65535"
        );
        assert_eq!(plain("expected struct Plan"), "expected a table");
        assert_eq!(plain("expected seconds"), "expected seconds");
    }
}
