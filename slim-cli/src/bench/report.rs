//! What came out: as text, JSON and a page.

use std::fs;
use std::path::Path;

use serde::Serialize;

use super::messages::Measured;
use super::{instructions, memory, resume};
use crate::failure::Failure;
use crate::table::Table;

/// All that was measured in one call.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Version of SLIM.
    pub version: &'static str,
    /// Where it was measured.
    pub machine: Machine,
    /// MPI's messages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub messages: Option<Measured>,
    /// Instructions of a small message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instructions: Option<instructions::Measured>,
    /// Interruptions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resume: Option<resume::Measured>,
    /// What flows and processes cost.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<memory::Measured>,
}

/// A machine, as far as figures depend on it.
#[derive(Debug, Serialize)]
pub struct Machine {
    /// Name of the processor.
    pub processor: String,
    /// How many cores we may use.
    pub cores: usize,
    /// Version of the kernel.
    pub kernel: String,
    /// What else ran: processes waiting for a core in the last minute, on average.
    pub load: f64,
}

/// A part of the report that is shown.
#[derive(Debug)]
pub struct Section {
    /// What it is about.
    pub title: String,
    /// Figures.
    pub table: Table,
    /// What to know about them.
    pub notes: Vec<String>,
    /// Pictures, as SVG.
    pub plots: Vec<String>,
}

impl Machine {
    /// This one, now.
    pub fn here() -> Self {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        let processor = read("/proc/cpuinfo")
            .lines()
            .find_map(|line| line.strip_prefix("model name")?.split(": ").nth(1))
            .unwrap_or("unknown")
            .to_owned();
        Self {
            processor,
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            load: read("/proc/loadavg")
                .split(' ')
                .next()
                .and_then(|l| l.parse().ok())
                .unwrap_or(0.0),
        }
    }
}

impl std::fmt::Display for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} x {}, Linux {}, load {:.2} before it began",
            self.cores, self.processor, self.kernel, self.load
        )
    }
}

impl Report {
    /// The parts, in the order in which they are shown.
    pub fn sections(&self) -> Result<Vec<Section>, Failure> {
        let mut all = Vec::new();
        if let Some(measured) = &self.messages {
            all.push(super::plot::messages(measured)?);
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
        for section in sections {
            text.push_str(&format!("\n{}\n\n{}", section.title, section.table));
            for note in &section.notes {
                text.push_str(&format!("  {note}\n"));
            }
        }
        text
    }

    /// Writes the figures for programs.
    pub fn write_json(&self, path: &Path) -> Result<(), Failure> {
        let text = serde_json::to_string_pretty(self)
            .map_err(|e| Failure::failed(format!("the report as JSON: {e}")))?;
        write(path, &(text + "\n"))
    }

    /// Writes a page that needs nothing else.
    pub fn write_html(&self, path: &Path, sections: &[Section]) -> Result<(), Failure> {
        let mut page = format!(
            "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
             <title>slim bench</title>\n<style>\n{STYLE}</style></head><body>\n\
             <h1>slim bench {}</h1>\n<p>{}</p>\n",
            escape(self.version),
            escape(&self.machine.to_string())
        );
        for section in sections {
            page.push_str(&format!("<h2>{}</h2>\n", escape(&section.title)));
            section.plots.iter().for_each(|svg| page.push_str(svg));
            page.push_str(&html_table(&section.table));
            for note in &section.notes {
                page.push_str(&format!("<p>{}</p>\n", escape(note)));
            }
        }
        page.push_str("</body></html>\n");
        write(path, &page)
    }
}

const STYLE: &str = "body { font: 15px/1.45 sans-serif; margin: 2em auto; max-width: 60em; color: #222 }\n\
table { border-collapse: collapse; margin: 1em 0 }\n\
th, td { padding: .25em .8em; text-align: right; border-bottom: 1px solid #ddd }\n\
th:first-child, td:first-child { text-align: left }\n\
svg { max-width: 100%; height: auto }\n";

fn html_table(table: &Table) -> String {
    let cells = |tag: &str, row: &[String]| -> String {
        let cells = row.iter().map(|c| format!("<{tag}>{}</{tag}>", escape(c)));
        format!("<tr>{}</tr>\n", cells.collect::<String>())
    };
    let rows: String = table.rows().iter().map(|row| cells("td", row)).collect();
    format!("<table>\n{}{rows}</table>\n", cells("th", table.head()))
}

/// `text` where HTML has no meaning.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

fn write(path: &Path, text: &str) -> Result<(), Failure> {
    fs::write(path, text).map_err(|e| Failure::failed(format!("{}: {e}", path.display())))
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
            "<table>\n<tr><th>a</th><th>b&lt;c</th></tr>\n\
             <tr><td>1 &amp; 2</td><td>&lt;x&gt;</td></tr>\n</table>\n"
        );
    }

    #[test]
    fn the_machine_is_known() {
        let here = Machine::here();
        assert!(here.cores > 0 && here.kernel.contains('.'), "{here}");
    }
}
