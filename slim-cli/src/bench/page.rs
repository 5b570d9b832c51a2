//! The report as text, JSON and HTML.

use std::path::Path;

use maud::{Markup, PreEscaped, html};

use super::report::BenchReport;
use super::section::Section;
use super::{goals, plot};
use crate::failure::CliError;
use crate::page::{page, write};

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

    /// The report as plain text.
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

    /// Writes the figures as JSON.
    pub fn write_json(&self, path: &Path) -> Result<(), CliError> {
        let text = serde_json::to_string_pretty(self)
            .map_err(|e| CliError::failed(format!("the report as JSON: {e}")))?;
        write(path, &(text + "\n"))
    }

    /// Writes a page that needs no other file.
    pub fn write_html(&self, path: &Path, sections: &[Section]) -> Result<(), CliError> {
        write(path, &(self.page(sections).into_string() + "\n"))
    }

    /// Everything is escaped but the plots, which are markup.
    fn page(&self, sections: &[Section]) -> Markup {
        let body = html! {
            h1 { "slim bench " (self.version) }
            p { (self.when) br; (self.machine) br; code { (self.command) } }
            @for missing in &self.missing {
                p.missing { "NOT measured: " (missing) }
            }
            @for section in sections {
                h2 { (section.title) }
                @for note in &section.notes { p { (note) } }
                @for svg in &section.plots { (PreEscaped(svg)) }
                (section.table)
            }
        };
        page("slim bench", &body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::report::Machine;
    use crate::table::Table;

    #[test]
    fn data_on_a_page_is_escaped_and_plots_are_not() {
        let mut report = BenchReport::new(Machine::here());
        let mark = |n: u32| format!("<{n}&\"");
        report.when = mark(1);
        report.machine.processor = mark(2);
        report.command = mark(3);
        report.missing = vec![mark(4)];
        let mut table = Table::new(&["cell"]);
        table.row([mark(5)]);
        let section = Section {
            title: mark(6),
            table,
            notes: vec![mark(7)],
            plots: vec!["<svg/>".into()],
        };
        let page = report.page(&[section]).into_string();
        for n in 1..=7 {
            assert!(page.contains(&format!("&lt;{n}&amp;&quot;")), "{n}: {page}");
            assert!(!page.contains(&format!("<{n}")), "{n}: {page}");
        }
        assert!(
            page.contains("<p>&lt;7&amp;&quot;</p><svg/><table>"),
            "{page}"
        );
        assert!(
            page.starts_with("<!DOCTYPE html><html lang=\"en\">"),
            "{page}"
        );
        // Nothing is loaded from elsewhere.
        assert!(!page.contains("http") && !page.contains("src="), "{page}");
    }
}
