//! A section of the printed report.

use crate::table::Table;

/// A section of the report: a table with notes and plots.
#[derive(Debug)]
pub struct Section {
    /// The heading.
    pub title: String,
    /// The results.
    pub table: Table,
    /// Notes on the results.
    pub notes: Vec<String>,
    /// Plots, as SVG.
    pub plots: Vec<String>,
}
