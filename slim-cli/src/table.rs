//! Tables: as plain text for a terminal (comfy-table), and as HTML for a page (maud).

use std::fmt;

use comfy_table::{CellAlignment, ContentLineStyle, LineStyle, TableStyle};
use maud::{Markup, Render, html};

/// Rows of cells under a heading.
#[derive(Clone, Debug)]
pub struct Table {
    head: Vec<Heading>,
    rows: Vec<Vec<String>>,
}

#[derive(Clone, Copy, Debug)]
struct Heading {
    text: &'static str,
    is_right: bool,
}

impl Heading {
    /// Class of the column's cells on a page.
    fn class(self) -> Option<&'static str> {
        self.is_right.then_some("n")
    }
}

/// Columns without lines between them; dashes below the heading.
const STYLE: TableStyle = TableStyle::new()
    .header_lines(ContentLineStyle::none().left(' ').junction(' '))
    .header_separator(LineStyle::none().left(' ').fill('-').junction(' '))
    .content_lines(ContentLineStyle::none().left(' ').junction(' '));

impl Table {
    /// An empty table. A heading that begins with `>` aligns its column to the right.
    pub fn new(head: &[&'static str]) -> Self {
        let head = head.iter().map(|text| Heading {
            text: text.trim_start_matches('>'),
            is_right: text.starts_with('>'),
        });
        Self {
            head: head.collect(),
            rows: Vec::new(),
        }
    }

    /// Appends a row; it must have as many cells as the heading.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let cells: Vec<_> = cells.into_iter().collect();
        assert_eq!(cells.len(), self.head.len(), "cells of a row");
        self.rows.push(cells);
    }

    /// The rows.
    pub fn rows(&self) -> &[Vec<String>] {
        &self.rows
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = comfy_table::Table::new();
        text.load_style(STYLE)
            .set_header(self.head.iter().map(|heading| heading.text))
            .add_rows(&self.rows);
        for (column, heading) in text.column_iter_mut().zip(&self.head) {
            column.set_padding((1, 0));
            if heading.is_right {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        writeln!(f, "{}", text.trim_fmt())
    }
}

impl Render for Table {
    fn render(&self) -> Markup {
        html! {
            table {
                tr { @for h in &self.head { th class=[h.class()] { (h.text) } } }
                @for row in &self.rows {
                    tr { @for (h, cell) in self.head.iter().zip(row) { td class=[h.class()] { (cell) } } }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut table = Table::new(&["name", ">a<b"]);
        table.row(["1 & 2".into(), "7 µs".into()]);
        table.row(["  <longer>".into(), String::new()]);
        table
    }

    #[test]
    fn columns_are_aligned() {
        assert_eq!(
            table().to_string(),
            "  name         a<b\n ----------- -----\n  1 & 2       7 µs\n    <longer>\n"
        );
    }

    #[test]
    fn cells_are_escaped_on_a_page() {
        assert_eq!(
            table().render().into_string(),
            "<table><tr><th>name</th><th class=\"n\">a&lt;b</th></tr>\
             <tr><td>1 &amp; 2</td><td class=\"n\">7 µs</td></tr>\
             <tr><td>  &lt;longer&gt;</td><td class=\"n\"></td></tr></table>"
        );
    }
}
