//! The report as text, JSON and a page.

use std::fs;
use std::path::Path;

use super::report::BenchReport;
use super::section::Section;
use super::{goals, plot};
use crate::failure::CliError;
use crate::table::Table;

impl BenchReport {
    /// The parts, in the order in which they are shown.
    pub fn sections(&self) -> Result<Vec<Section>, CliError> {
        let mut all = Vec::new();
        all.extend(goals::section(self));
        for measured in &self.messages {
            all.push(plot::messages(measured)?);
        }
        if let Some(measured) = &self.instructions {
            all.push(measured.section());
        }
        if let Some(measured) = &self.resume {
            all.push(measured.section());
        }
        if let Some(measured) = &self.memory {
            all.push(measured.section());
        }
        Ok(all)
    }

    /// As lines for a terminal.
    pub fn text(&self, sections: &[Section]) -> String {
        let mut text = format!("{}\n", self.machine);
        for missing in &self.missing {
            text.push_str(&format!("NOT measured: {missing}\n"));
        }
        for section in sections {
            text.push_str(&format!("\n{}\n\n{}", section.title, section.table));
            for note in &section.notes {
                text.push_str(&format!("  {note}\n"));
            }
        }
        text
    }

    /// Writes the figures for programs.
    pub fn write_json(&self, path: &Path) -> Result<(), CliError> {
        let text = serde_json::to_string_pretty(self)
            .map_err(|e| CliError::failed(format!("the report as JSON: {e}")))?;
        write(path, &(text + "\n"))
    }

    /// Writes a page that needs nothing else.
    pub fn write_html(&self, path: &Path, sections: &[Section]) -> Result<(), CliError> {
        let mut page = format!(
            "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
             <title>slim bench</title>\n<style>\n{STYLE}</style></head><body>\n\
             <h1>slim bench {}</h1>\n<p>{}<br>{}<br><code>{}</code></p>\n",
            escape(self.version),
            escape(&self.when),
            escape(&self.machine.to_string()),
            escape(&self.command)
        );
        for missing in &self.missing {
            let missing = escape(missing);
            page.push_str(&format!(
                "<p class=\"missing\">NOT measured: {missing}</p>\n"
            ));
        }
        for section in sections {
            page.push_str(&format!("<h2>{}</h2>\n", escape(&section.title)));
            for note in &section.notes {
                page.push_str(&format!("<p>{}</p>\n", escape(note)));
            }
            section.plots.iter().for_each(|svg| page.push_str(svg));
            page.push_str(&html_table(&section.table));
        }
        page.push_str("</body></html>\n");
        write(path, &page)
    }
}

const STYLE: &str = "body { font: 15px/1.45 sans-serif; margin: 2em auto; max-width: 60em; color: #222 }\n\
table { border-collapse: collapse; margin: 1em 0 }\n\
th, td { padding: .2em .8em .2em 0; text-align: left; border-bottom: 1px solid #ddd }\n\
.n { text-align: right; font-variant-numeric: tabular-nums }\n\
code { background: #f3f3f3; padding: .1em .3em }\n\
.missing { color: #a00; white-space: pre-wrap }\n\
svg { display: block; max-width: 100%; height: auto; margin: 1em 0 }\n";

fn html_table(table: &Table) -> String {
    let cells = |tag: &str, row: &[String]| -> String {
        let cell = |(n, text): (usize, &String)| match table.is_right(n) {
            true => format!("<{tag} class=\"n\">{}</{tag}>", escape(text)),
            false => format!("<{tag}>{}</{tag}>", escape(text)),
        };
        let cells = row.iter().enumerate().map(cell);
        format!("<tr>{}</tr>\n", cells.collect::<String>())
    };
    let rows: String = table.rows().iter().map(|row| cells("td", row)).collect();
    format!("<table>\n{}{rows}</table>\n", cells("th", table.head()))
}

/// `text` where HTML has no meaning.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

fn write(path: &Path, text: &str) -> Result<(), CliError> {
    fs::write(path, text).map_err(|e| CliError::failed(format!("{}: {e}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_of_a_page_has_no_markup_of_its_own() {
        let mut table = Table::new(&["a", ">b<c"]);
        table.row(["1 & 2".into(), "<x>".into()]);
        assert_eq!(
            html_table(&table),
            "<table>\n<tr><th>a</th><th class=\"n\">b&lt;c</th></tr>\n\
             <tr><td>1 &amp; 2</td><td class=\"n\">&lt;x&gt;</td></tr>\n</table>\n"
        );
    }
}
