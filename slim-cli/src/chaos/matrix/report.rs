//! The matrix as text, as JSON and as a page.

use std::path::Path;

use maud::{Markup, html};
use serde::Serialize;

use super::cells::{MatrixCell, MatrixMode};
use crate::failure::{CliError, visible};
use crate::page::{page, write};
use crate::table::Table;

/// All cells.
#[derive(Debug, Serialize)]
pub struct MatrixReport {
    /// Seed of the first run of each cell; the others count on from it.
    pub seed: u64,
    /// The command line.
    pub command: String,
    /// The cells.
    pub cells: Vec<MatrixCell>,
}

impl MatrixReport {
    /// Whether all runs with SLIM survived; without any, whether all runs did.
    pub fn is_good(&self) -> bool {
        let slim = |cell: &&MatrixCell| cell.mode == MatrixMode::Slim;
        match self.cells.iter().any(|cell| slim(&cell)) {
            true => self.cells.iter().filter(slim).all(MatrixCell::is_good),
            false => self.cells.iter().all(MatrixCell::is_good),
        }
    }

    fn cell(&self, fault: &str, job: &str, mode: MatrixMode) -> Option<&MatrixCell> {
        let is_it = |c: &&MatrixCell| c.fault == fault && c.job == job && c.mode == mode;
        self.cells.iter().find(is_it)
    }

    /// Names in the order of their first cells.
    fn names(&self, of: fn(&MatrixCell) -> &str) -> Vec<&str> {
        let mut names = Vec::new();
        for name in self.cells.iter().map(of) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }

    /// The table, and how to repeat what failed.
    pub fn text(&self) -> String {
        let mut table = Table::new(&["fault", "job", "bare", "SLIM", ">longest stall"]);
        for fault in self.names(|cell| &cell.fault) {
            for job in self.names(|cell| &cell.job) {
                let [bare, slim] =
                    [MatrixMode::Bare, MatrixMode::Slim].map(|mode| self.cell(fault, job, mode));
                let text = |cell: Option<&MatrixCell>| cell.map_or("-".into(), MatrixCell::text);
                let stall = slim.and_then(MatrixCell::longest_stall);
                table.row([
                    visible(fault),
                    visible(job),
                    text(bare),
                    text(slim),
                    stall.map_or("-".into(), |s| format!("{s:.2} s")),
                ]);
            }
        }
        let mut text = table.to_string();
        for cell in &self.cells {
            if let (Some(run), Some(repeat)) = (cell.first_bad(), &cell.repeat) {
                let words = format!("{}, {}, {}: {}", cell.fault, cell.job, cell.mode, run.end);
                text.push_str(&format!("\n{}\n  {repeat}\n", visible(&words)));
            }
        }
        text
    }

    /// The same as one JSON object.
    pub fn json(&self) -> String {
        serde_json::to_string_pretty(self).expect("strings and numbers always become JSON")
    }

    /// Writes a page that needs no other file.
    pub fn write_page(&self, path: &Path) -> Result<(), CliError> {
        write(path, &(self.page().into_string() + "\n"))
    }

    fn page(&self) -> Markup {
        let jobs = self.names(|cell| &cell.job);
        let modes = [MatrixMode::Bare, MatrixMode::Slim];
        let body = html! {
            h1 { "slim chaos matrix " (env!("CARGO_PKG_VERSION")) }
            p { code { (self.command) } br; "seed " (self.seed) }
            table {
                tr { th { } @for job in &jobs { th colspan="2" { (job) } } }
                tr { th { "fault" } @for _ in &jobs { @for mode in modes { th { (mode) } } } }
                @for fault in self.names(|cell| &cell.fault) {
                    tr {
                        td { (fault) }
                        @for job in &jobs {
                            @for mode in modes { (self.page_cell(fault, job, mode)) }
                        }
                    }
                }
            }
            p { "The job survived n of n runs. A run whose faults met nothing does not count as survived." }
            h2 { "Runs that did not survive" }
            table {
                tr { th { "fault" } th { "job" } th { } th { "first of them" } th { "repeat it" } }
                @for cell in &self.cells {
                    @if let (Some(run), Some(repeat)) = (cell.first_bad(), &cell.repeat) {
                        tr {
                            td { (cell.fault) } td { (cell.job) } td { (cell.mode) }
                            td { (run.end) } td { code { (repeat) } }
                        }
                    }
                }
            }
        };
        page("slim chaos matrix", &body)
    }

    fn page_cell(&self, fault: &str, job: &str, mode: MatrixMode) -> Markup {
        let Some(cell) = self.cell(fault, job, mode) else {
            return html! { td.none { "-" } };
        };
        let class = match (cell.is_good(), cell.is_empty()) {
            (true, _) => "good",
            (_, true) => "none",
            _ => "bad",
        };
        let stall = cell.longest_stall();
        html! {
            td class=(class) {
                (cell.text())
                @if let Some(stall) = stall { br; (format!("{stall:.2} s")) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::cells::{MatrixRun, RunEnd};
    use super::*;

    fn cell(fault: &str, mode: MatrixMode, end: RunEnd) -> MatrixCell {
        let repeat = (end != RunEnd::Survived).then(|| "slim <again>".to_owned());
        MatrixCell {
            fault: fault.into(),
            job: "a&b".into(),
            mode,
            runs: vec![MatrixRun {
                seed: 3,
                end,
                seconds: 1.0,
                longest_stall: Some(0.25),
                faults: 1,
                killed: 1,
            }],
            repeat,
        }
    }

    fn report() -> MatrixReport {
        MatrixReport {
            seed: 3,
            command: "slim <x>".into(),
            cells: vec![
                cell("kill", MatrixMode::Bare, RunEnd::Hung),
                cell("kill", MatrixMode::Slim, RunEnd::Survived),
                cell("drop", MatrixMode::Slim, RunEnd::NoEffect("x".into())),
            ],
        }
    }

    #[test]
    fn the_table_has_a_row_for_each_fault_and_job() {
        let text = report().text();
        let rows: Vec<Vec<&str>> = text
            .lines()
            .map(|l| l.split_whitespace().collect())
            .collect();
        assert_eq!(
            rows[2].join(" "),
            "kill a&b 0 of 1 (1 hung) 1 of 1 0.25 s",
            "{text}"
        );
        assert_eq!(
            rows[3].join(" "),
            "drop a&b - 0 of 1 (1 without effect) -",
            "{text}"
        );
        assert!(
            text.contains("kill, a&b, bare: hung\n  slim <again>\n"),
            "{text}"
        );
    }

    #[test]
    fn only_runs_with_slim_decide_if_there_are_any() {
        let mut report = report();
        assert!(!report.is_good(), "`drop` had no effect");
        report.cells.pop();
        assert!(report.is_good());
        report.cells.pop();
        assert!(!report.is_good());
    }

    #[test]
    fn the_page_is_escaped_and_complete_in_itself() {
        let page = report().page().into_string();
        assert!(
            page.contains("slim &lt;again&gt;") && page.contains("slim &lt;x&gt;"),
            "{page}"
        );
        assert!(page.contains("<td class=\"bad\">0 of 1 (1 hung)"), "{page}");
        assert!(
            page.contains("<td class=\"good\">1 of 1<br>0.25 s"),
            "{page}"
        );
        assert!(page.contains("<td class=\"none\">"), "{page}");
        assert!(!page.contains("http") && !page.contains("src="), "{page}");
    }
}
