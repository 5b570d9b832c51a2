//! The performance goals, and the verdict on each for a report.

use super::contender::Contender;
use super::messages::{MessageFigures, Test};
use super::report::BenchReport;
use super::section::Section;
use super::stats::{median, quantile};
use crate::table::Table;

/// A goal, with the measured value.
#[derive(Clone, Debug, PartialEq)]
struct Goal {
    what: String,
    goal: String,
    measured: String,
    reached: Option<bool>,
}

/// Goals of ratios to bare: test, size, ratio.
const UNLIMITED: [(Test, u32, f64); 4] = [
    (Test::Latency, 8, 1.01),
    (Test::Rate, 64, 0.99),
    (Test::Bandwidth, 1 << 20, 0.99),
    (Test::Bandwidth, 4 << 20, 0.99),
];
const TEN_GIGABIT: [(Test, u32, f64); 2] = [
    (Test::Bandwidth, 1 << 20, 0.998),
    (Test::Bandwidth, 4 << 20, 0.998),
];

/// Adds goals for ratios. A ratio must not be above (or below) its goal; there is no verdict when its interval contains the goal.
fn ratios(measured: &MessageFigures, goals: &[(Test, u32, f64)], all: &mut Vec<Goal>) {
    for (test, bytes, goal) in goals {
        let mut points = measured.points.iter();
        let Some(point) = points.find(|p| p.test == *test && p.bytes == *bytes) else {
            continue;
        };
        let mut runs = point.runs.iter();
        let slim = runs.find(|r| r.contender == Contender::Slim);
        let Some(compared) = slim.and_then(|r| r.compared.as_ref()) else {
            continue;
        };
        let less = test.less_is_better();
        all.push(Goal {
            what: format!(
                "{test} of {}, {}, {}",
                super::plot::size((*bytes).into()),
                measured.mpi,
                measured.line
            ),
            goal: format!("{} {goal}", if less { "<=" } else { ">=" }),
            measured: format!(
                "{:.3} ({:.3}..{:.3})",
                compared.ratio, compared.low, compared.high
            ),
            reached: compared.reaches(*goal, less),
        });
    }
}

fn at_most(what: &str, goal: f64, unit: &str, measured: Option<f64>, all: &mut Vec<Goal>) {
    let Some(measured) = measured.filter(|m| m.is_finite()) else {
        return;
    };
    all.push(Goal {
        what: what.into(),
        goal: format!("<= {goal}{unit}"),
        measured: format!("{measured:.2}{unit}"),
        reached: Some(measured <= goal),
    });
}

fn at_least(what: &str, goal: f64, measured: Option<f64>, all: &mut Vec<Goal>) {
    let Some(measured) = measured.filter(|m| m.is_finite()) else {
        return;
    };
    all.push(Goal {
        what: what.into(),
        goal: format!(">= {goal}"),
        measured: format!("{measured:.4}"),
        reached: Some(measured >= goal),
    });
}

fn goals(report: &BenchReport) -> Vec<Goal> {
    let mut all = Vec::new();
    for measured in &report.messages {
        match measured.rate_kbit {
            None => ratios(measured, &UNLIMITED, &mut all),
            Some(10_000_000) => ratios(measured, &TEN_GIGABIT, &mut all),
            Some(_) => {}
        }
    }
    if let Some(counted) = &report.instructions {
        let what = "extra instructions of a send and a recv of 8 bytes";
        at_most(what, 150.0, "", Some(counted.pair.extra()), &mut all);
    }
    if let Some(resume) = &report.resume {
        for killed in &resume.kills {
            if killed.flows == 1 {
                let what = "kill to first byte, one flow, ";
                at_most(
                    &format!("{what}p50"),
                    1.0,
                    " ms",
                    Some(killed.p50_ms),
                    &mut all,
                );
                at_most(
                    &format!("{what}p99"),
                    5.0,
                    " ms",
                    Some(killed.p99_ms),
                    &mut all,
                );
            }
            if killed.flows == 10_000 {
                let what = "10,000 flows killed at once, all resumed";
                at_most(what, 1000.0, " ms", Some(killed.last_ms), &mut all);
            }
        }
        for hole in resume.holes.iter().filter(|hole| hole.seconds == 60.0) {
            let what = "lift of a hole of 60 s to first byte, slowest";
            let slowest = quantile(&hole.first_byte.slim_ms, 1.0);
            at_most(what, 50.0, " ms", slowest, &mut all);
        }
    }
    if let Some(memory) = &report.memory {
        let bytes = memory.idle_client_bytes.max(memory.idle_server_bytes);
        at_most("an idle flow, memory", 1024.0, " B", Some(bytes), &mut all);
        let woken = memory.idle_wakeups.max(0.0);
        at_most(
            "an idle flow, wake-ups a second",
            0.0,
            "",
            Some(woken),
            &mut all,
        );
        let what = "short connections, ratio to bare";
        at_least(what, 0.5, memory.short.ratio(), &mut all);
        let what = "short connections, part live at both ends";
        at_least(what, 0.995, Some(memory.short.live), &mut all);
        let what = "short connections, part that is plain TCP";
        at_most(what, 0.0, "", Some(memory.short.plain), &mut all);
        let extra = memory.short.connect_extra();
        at_most("connect, extra", 20.0, " us", extra, &mut all);
        let start = median(&memory.start.slim).zip(median(&memory.start.bare));
        let added = start.map(|(slim, bare)| slim - bare);
        at_most(
            "start of a process without sockets",
            1.0,
            " ms",
            added,
            &mut all,
        );
    }
    all
}

/// The goals that this report has measured.
pub fn section(report: &BenchReport) -> Option<Section> {
    let goals = goals(report);
    if goals.is_empty() {
        return None;
    }
    let mut table = Table::new(&["what", ">goal", ">measured", "verdict"]);
    for goal in goals {
        let verdict = match goal.reached {
            Some(true) => "reached",
            Some(false) => "NOT reached",
            None => "too noisy to tell",
        };
        table.row([goal.what, goal.goal, goal.measured, verdict.into()]);
    }
    Some(Section {
        title: "Goals".into(),
        table,
        notes: vec![
            "Ratios are to bare, with their 95 % interval. Too noisy to tell: the interval contains the goal."
                .into(),
        ],
        plots: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::report::Machine;

    #[test]
    fn a_report_without_measurements_has_no_goals() {
        assert!(section(&BenchReport::new(Machine::here())).is_none());
    }

    #[test]
    fn a_value_that_is_missing_or_not_finite_gets_no_verdict() {
        let mut all = Vec::new();
        at_most("x", 1.0, " ms", Some(f64::NAN), &mut all);
        at_most("x", 1.0, " ms", None, &mut all);
        assert!(all.is_empty());
        at_most("x", 1.0, " ms", Some(1.5), &mut all);
        assert_eq!(all[0].reached, Some(false));
        assert_eq!(all[0].measured, "1.50 ms");
    }
}
