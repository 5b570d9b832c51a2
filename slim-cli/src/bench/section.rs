//! One part of the report, ready to be shown.

use crate::table::Table;

/// A titled table with notes and plots.
#[derive(Debug)]
pub struct Section {
    /// Title.
    pub title: String,
    /// The results.
    pub table: Table,
    /// Explanations of the figures.
    pub notes: Vec<String>,
    /// Plots, as SVG.
    pub plots: Vec<String>,
}
