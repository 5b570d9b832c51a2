//! Plain text tables.

use std::fmt;

/// Rows of cells under a heading, printed with aligned columns.
#[derive(Clone, Debug)]
pub struct Table {
    head: Vec<String>,
    rows: Vec<Vec<String>>,
    right: Vec<bool>,
}

impl Table {
    /// An empty table. A heading that begins with `>` aligns its column to the right.
    pub fn new(head: &[&str]) -> Self {
        Self {
            right: head.iter().map(|h| h.starts_with('>')).collect(),
            head: head
                .iter()
                .map(|h| h.trim_start_matches('>').to_owned())
                .collect(),
            rows: Vec::new(),
        }
    }

    /// Appends a row; it must have as many cells as the heading.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let cells: Vec<_> = cells.into_iter().collect();
        assert_eq!(
            cells.len(),
            self.head.len(),
            "the row and the heading differ in their number of cells"
        );
        self.rows.push(cells);
    }

    /// The heading.
    pub fn head(&self) -> &[String] {
        &self.head
    }

    /// Whether this column is aligned to the right.
    pub fn is_right(&self, column: usize) -> bool {
        self.right.get(column).copied().unwrap_or(false)
    }

    /// The rows.
    pub fn rows(&self) -> &[Vec<String>] {
        &self.rows
    }

    /// Whether the table has no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = || std::iter::once(&self.head).chain(&self.rows);
        let widths: Vec<usize> = (0..self.head.len())
            .map(|c| all().map(|row| row[c].chars().count()).max().unwrap_or(0))
            .collect();
        for (n, row) in all().enumerate() {
            let mut line = String::new();
            for ((cell, width), right) in row.iter().zip(&widths).zip(&self.right) {
                let pad = " ".repeat(width - cell.chars().count());
                line.push_str(&if *right {
                    format!("  {pad}{cell}")
                } else {
                    format!("  {cell}{pad}")
                });
            }
            writeln!(f, "{}", line.trim_end())?;
            if n == 0 {
                let rule: Vec<_> = widths.iter().map(|w| "-".repeat(*w)).collect();
                writeln!(f, "  {}", rule.join("  "))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let mut table = Table::new(&["name", ">n"]);
        table.row(["a".into(), "1".into()]);
        table.row(["longer".into(), "200".into()]);
        assert_eq!(
            table.to_string(),
            "  name      n\n  ------  ---\n  a         1\n  longer  200\n"
        );
    }
}
