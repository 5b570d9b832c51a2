//! Pages in HTML that need no other file.

use std::fs::{self, OpenOptions};
use std::path::Path;

use maud::{DOCTYPE, Markup, PreEscaped, html};

use crate::failure::CliError;

const STYLE: &str = "
body { font: 15px/1.45 sans-serif; margin: 2em auto; max-width: 60em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 }
th, td { padding: .2em .8em .2em 0; text-align: left; border-bottom: 1px solid #ddd }
.n { text-align: right; font-variant-numeric: tabular-nums }
code { background: #f3f3f3; padding: .1em .3em }
.missing { color: #a00; white-space: pre-wrap }
svg { display: block; max-width: 100%; height: auto; margin: 1em 0 }
td.good { background: #dcf2dc } td.bad { background: #f8d4d0 } td.none { background: #eee }
td.good, td.bad, td.none { padding-left: .8em }
";

/// A page with this title.
pub fn page(title: &str, body: &Markup) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                title { (title) }
                style { (PreEscaped(STYLE)) }
            }
            body { (body) }
        }
    }
}

/// Finds out whether the file can be written, before the work whose result it is to hold.
pub fn check(path: &Path) -> Result<(), CliError> {
    let file = OpenOptions::new().append(true).create(true).open(path);
    file.map(drop)
        .map_err(|e| CliError::input(format!("{}: {e}", path.display())))
}

/// Writes a file.
pub fn write(path: &Path, text: &str) -> Result<(), CliError> {
    fs::write(path, text).map_err(|e| CliError::failed(format!("{}: {e}", path.display())))
}
