//! The report of a chaos run, as text and as JSON.

use std::net::IpAddr;
use std::time::Duration;

use serde::Serialize;

use super::times::Lasting;
use crate::table::Table;

/// The report of a chaos run.
#[derive(Debug, Default, Serialize)]
pub struct ChaosReport {
    /// Seed of the run: with it the same plan gives the same schedule.
    pub seed: u64,
    /// How long faults were made, in seconds.
    pub seconds: f64,
    /// Exit status of the command (128 + signal if one ended it); none for a job that ran already.
    pub status: Option<i32>,
    /// Every fault, by time.
    pub faults: Vec<FaultRow>,
    /// Faults that were due before the end of the plan's duration and were left out, because the faults before them took too long.
    pub late: usize,
}

/// One fault.
#[derive(Clone, Debug, Serialize)]
pub struct FaultRow {
    /// Seconds after the beginning.
    pub at: f64,
    /// Kind, as in the plan.
    pub kind: &'static str,
    /// Node, or `-` outside a lab.
    pub node: String,
    /// Seconds that it lasted; none for an instantaneous kind.
    pub lasted: Option<f64>,
    /// Connections hit; none for a kind that hits a whole node.
    pub hit: Option<usize>,
    /// Whether it met anything: a connection, a process or a packet.
    pub effect: bool,
    /// Description.
    pub detail: String,
    /// Set if the fault could not be made; `detail` says why.
    pub failed: bool,
    /// Set if the fault was made and could not be ended; `detail` says why.
    pub stays: bool,
    /// Index of the fault in the plan.
    #[serde(skip)]
    pub planned: usize,
    /// How long it is to last; none if it is over at once.
    #[serde(skip)]
    pub lasting: Option<Lasting>,
    /// What a fault that hit one connection or process has hit.
    #[serde(skip)]
    pub victim: Option<Victim>,
}

/// How to find a connection or process again in another run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Victim {
    /// Name of the process.
    pub process: Option<String>,
    /// Address of the other end.
    pub peer: Option<IpAddr>,
    /// A port that programs choose themselves.
    pub port: Option<u16>,
}

impl ChaosReport {
    /// Connections hit, by all faults.
    pub fn hit(&self) -> usize {
        self.faults.iter().filter_map(|row| row.hit).sum()
    }

    /// The first fault that could not be made or ended.
    pub fn first_failure(&self) -> Option<&FaultRow> {
        self.faults.iter().find(|row| row.failed || row.stays)
    }

    /// The exit status of the run: the command's. Without a command: 1 if a fault could not be made or ended, else 0.
    pub fn exit_status(&self) -> i32 {
        self.status
            .unwrap_or_else(|| self.first_failure().is_some().into())
    }

    /// The table and a closing line.
    pub fn text(&self) -> String {
        let mut table = Table::new(&[">time", "fault", "node", ">lasted", ">hit", "what"]);
        for row in &self.faults {
            table.row([
                format!("{:.2} s", row.at),
                row.kind.to_owned(),
                row.node.clone(),
                row.lasted.map_or(String::new(), |s| format!("{s:.2} s")),
                row.hit.map_or(String::new(), |n| n.to_string()),
                row.detail.clone(),
            ]);
        }
        let mut text = if self.faults.is_empty() {
            String::new()
        } else {
            table.to_string()
        };
        text.push_str(&format!(
            "{} faults in {:.1} s, {} connections hit, seed {}",
            self.faults.len(),
            self.seconds,
            self.hit(),
            self.seed
        ));
        let count = |of: fn(&FaultRow) -> bool| self.faults.iter().filter(|row| of(row)).count();
        for (n, what) in [
            (count(|row| row.failed), "made"),
            (count(|row| row.stays), "ended"),
        ] {
            if n > 0 {
                text.push_str(&format!(", {n} could not be {what}"));
            }
        }
        if self.late > 0 {
            text.push_str(&format!(", {} came too late", self.late));
        }
        if let Some(status) = self.status {
            text.push_str(&format!("; exit status of the command: {status}"));
        }
        text.push('\n');
        text
    }

    /// The same as one JSON object.
    pub fn json(&self) -> String {
        serde_json::to_string_pretty(self).expect("strings and numbers always become JSON")
    }
}

/// Seconds with thousandths, as reports show them.
pub fn seconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> ChaosReport {
        let row = |kind, hit, lasted, failed| FaultRow {
            at: 1.25,
            kind,
            node: "nodeA".into(),
            lasted,
            hit,
            effect: true,
            detail: "x".into(),
            failed,
            stays: false,
            planned: 0,
            lasting: None,
            victim: None,
        };
        ChaosReport {
            seed: 9,
            seconds: 3.0,
            status: Some(0),
            faults: vec![
                row("kill", Some(2), None, false),
                row("drop", None, Some(1.5), true),
            ],
            late: 0,
        }
    }

    #[test]
    fn the_table_has_every_fault_and_the_sums() {
        let text = report().text();
        assert!(text.contains("1.25 s  kill   nodeA"), "{text}");
        assert!(
            text.contains("2 faults in 3.0 s, 2 connections hit, seed 9, 1 could not be made"),
            "{text}"
        );
    }

    #[test]
    fn a_fault_that_stays_is_counted_and_decides_where_there_is_no_command() {
        let mut report = report();
        assert_eq!(report.exit_status(), 0, "the command's");
        report.status = None;
        assert_eq!(report.exit_status(), 1, "a fault was not made");
        report.faults[1].failed = false;
        assert_eq!(report.exit_status(), 0);
        report.faults[0].stays = true;
        assert_eq!(report.exit_status(), 1);
        let text = report.text();
        assert!(text.contains("seed 9, 1 could not be ended\n"), "{text}");
        report.late = 7;
        let text = report.text();
        assert!(
            text.contains("could not be ended, 7 came too late\n"),
            "{text}"
        );
    }

    #[test]
    fn the_json_can_be_read_back() {
        let value: serde_json::Value = serde_json::from_str(&report().json()).unwrap();
        assert_eq!(value["faults"][0]["hit"], 2);
        assert_eq!(value["faults"][1]["lasted"], 1.5);
        assert_eq!(value["status"], 0);
    }
}
