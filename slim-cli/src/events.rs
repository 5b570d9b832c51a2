//! Reads event logs.

use std::fs;
use std::path::Path;

use slim_core::event::Record;

/// The records of every `*.jsonl` in `dir`, file by file. A line that is no event is skipped (the last line
/// of a killed process may be incomplete).
pub fn records(dir: &Path) -> Vec<Record> {
    let files = fs::read_dir(dir).into_iter().flatten().flatten();
    let logs = files
        .map(|f| f.path())
        .filter(|p| p.extension().is_some_and(|e| e == "jsonl"));
    logs.flat_map(|path| {
        let text = fs::read_to_string(path).unwrap_or_default();
        let events = text.lines().filter_map(|l| serde_json::from_str(l).ok());
        events.collect::<Vec<_>>()
    })
    .collect()
}
