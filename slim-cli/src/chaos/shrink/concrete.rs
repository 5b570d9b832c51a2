//! The faults that a run has made, as a plan of their own.

use toml::{Table, Value};

use super::super::report::{ChaosReport, FaultRow};
use super::super::times::Lasting;

/// Each fault of the run that met something: its time, duration, node and victim instead of the plan's choices. `plan` is the text of
/// the plan.
pub fn faults(plan: &str, report: &ChaosReport) -> Result<Vec<Table>, toml::de::Error> {
    let plan: Table = toml::from_str(plan)?;
    let planned = plan.get("fault").and_then(Value::as_array);
    let made = report.faults.iter().filter(|row| row.effect && !row.failed);
    Ok(made
        .filter_map(|row| Some(fault(planned?.get(row.planned)?.as_table()?, row)))
        .collect())
}

fn fault(planned: &Table, row: &FaultRow) -> Table {
    let mut fault = planned.clone();
    for repeated in ["every", "times"] {
        fault.remove(repeated);
    }
    fault.insert("start".into(), Value::Float(row.at));
    match row.lasting {
        Some(Lasting::For(time)) => {
            fault.insert("lasts".into(), Value::Float(time.as_secs_f64()));
        }
        Some(Lasting::Forever) => {
            fault.insert("lasts".into(), Value::String("forever".into()));
        }
        None => {}
    }
    fault.insert("node".into(), Value::String(row.node.clone()));
    if let Some(victim) = &row.victim {
        if let Some(name) = &victim.process {
            fault.remove("not_process");
            fault.insert("process".into(), Value::String(name.clone()));
        }
        if let Some(peer) = victim.peer {
            fault.insert("peer".into(), Value::String(peer.to_string()));
        }
        if let Some(port) = victim.port {
            fault.insert("port".into(), Value::Integer(port.into()));
        }
    }
    fault
}

/// A plan with these faults.
pub fn plan(seed: u64, faults: &[Table]) -> String {
    let mut plan = Table::new();
    if let Ok(seed) = i64::try_from(seed) {
        plan.insert("seed".into(), Value::Integer(seed));
    }
    let faults = faults.iter().cloned().map(Value::Table).collect();
    plan.insert("fault".into(), Value::Array(faults));
    toml::to_string(&plan).expect("tables, texts and numbers always become TOML")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::super::plan::Plan;
    use super::super::super::report::Victim;
    use super::super::super::times::Lasts;
    use super::*;

    const PLAN: &str = "duration = 9\n[[fault]]\nkind = \"kill\"\nevery = [0.5, 2]\ntimes = 4\nnot_process = [\"orted\"]\n\
                        [[fault]]\nkind = \"netem\"\nevery = 3\nlasts = [1, 2]\nnetem = { loss = \"2%\" }\n\
                        [[fault]]\nkind = \"flush\"\n";

    fn row(planned: usize, effect: bool, lasting: Option<Lasting>) -> FaultRow {
        FaultRow {
            at: 1.25,
            kind: "kill",
            node: "nodeB".into(),
            lasted: None,
            hit: None,
            effect,
            detail: String::new(),
            failed: false,
            stays: false,
            planned,
            lasting,
            victim: None,
        }
    }

    #[test]
    fn what_was_made_becomes_a_plan_without_choices() {
        let victim = Victim {
            process: Some("rank".into()),
            peer: Some("10.77.0.1".parse().unwrap()),
            port: Some(1024),
        };
        let kill = FaultRow {
            victim: Some(victim),
            ..row(0, true, None)
        };
        let time = Duration::from_millis(1500);
        let report = ChaosReport {
            faults: vec![
                kill,
                row(0, false, None),
                row(1, true, Some(Lasting::For(time))),
                row(2, true, Some(Lasting::Forever)),
            ],
            ..ChaosReport::default()
        };
        let text = plan(7, &faults(PLAN, &report).unwrap());
        let plan = Plan::parse(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
        let [kill, netem, flush] = &plan.faults[..] else {
            panic!("{text}")
        };
        assert_eq!((plan.seed, plan.duration), (Some(7), None));
        assert_eq!(kill.start.from, Duration::from_millis(1250));
        assert_eq!((kill.every, kill.times), (None, None));
        assert_eq!(
            (kill.process.as_deref(), kill.port),
            (Some("rank"), Some(1024))
        );
        assert!(kill.not_process.is_empty() && kill.node == "nodeB");
        assert!(netem.netem.is_some());
        let Some(Lasts::Within(span)) = netem.lasts else {
            panic!("{text}")
        };
        assert_eq!((span.from, span.to), (time, time));
        assert_eq!(flush.lasts, Some(Lasts::Forever));
    }
}
