//! A part of the report that is shown.

use crate::table::Table;

/// See the module.
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
