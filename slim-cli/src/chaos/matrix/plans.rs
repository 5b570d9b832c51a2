//! The faults of the matrix: plans that come with `slim`, and those of the user.

use std::path::Path;

use super::super::plan::{Plan, PlannedFault};
use super::super::times::Seconds;
use crate::failure::CliError;

/// A column of the matrix.
#[derive(Clone, Debug)]
pub struct MatrixFault {
    /// Its name in the table.
    pub name: String,
    /// As the user names it: a built-in plan, or a file.
    pub given: String,
    /// The faults.
    pub plan: Plan,
    /// Paths of the lab, at least.
    pub paths: usize,
}

/// Name and text of each built-in plan. Those with another number of paths than their faults need have it here, too.
const BUILT_IN: [(&str, &str, usize); 17] = [
    (
        "kill",
        include_str!("../../../../examples/chaos/matrix/kill.toml"),
        1,
    ),
    (
        "kill-all",
        include_str!("../../../../examples/chaos/matrix/kill-all.toml"),
        1,
    ),
    (
        "rst",
        include_str!("../../../../examples/chaos/matrix/rst.toml"),
        1,
    ),
    (
        "fin",
        include_str!("../../../../examples/chaos/matrix/fin.toml"),
        1,
    ),
    (
        "reset",
        include_str!("../../../../examples/chaos/matrix/reset.toml"),
        1,
    ),
    (
        "drop",
        include_str!("../../../../examples/chaos/matrix/drop.toml"),
        1,
    ),
    (
        "one-way",
        include_str!("../../../../examples/chaos/matrix/one-way.toml"),
        1,
    ),
    (
        "flush",
        include_str!("../../../../examples/chaos/matrix/flush.toml"),
        1,
    ),
    (
        "flush-reset",
        include_str!("../../../../examples/chaos/matrix/flush-reset.toml"),
        1,
    ),
    (
        "mtu-hole",
        include_str!("../../../../examples/chaos/matrix/mtu-hole.toml"),
        1,
    ),
    (
        "link-down",
        include_str!("../../../../examples/chaos/matrix/link-down.toml"),
        1,
    ),
    (
        "path-gone",
        include_str!("../../../../examples/chaos/matrix/path-gone.toml"),
        2,
    ),
    (
        "address-gone",
        include_str!("../../../../examples/chaos/matrix/address-gone.toml"),
        1,
    ),
    (
        "renumber",
        include_str!("../../../../examples/chaos/matrix/renumber.toml"),
        1,
    ),
    (
        "syn-full",
        include_str!("../../../../examples/chaos/matrix/syn-full.toml"),
        1,
    ),
    (
        "stop",
        include_str!("../../../../examples/chaos/matrix/stop.toml"),
        1,
    ),
    (
        "netem",
        include_str!("../../../../examples/chaos/matrix/netem.toml"),
        1,
    ),
];

/// The faults that the user names, or all that this kernel can make. A plan without an end makes faults for so many seconds. Returns
/// the reasons for which built-in plans are left out, too.
pub fn faults(given: &[String], seconds: u32) -> Result<(Vec<MatrixFault>, Vec<String>), CliError> {
    let (mut found, mut left_out) = (Vec::new(), Vec::new());
    for name in given {
        let fault = named(name, seconds)?;
        let possible = fault.plan.check_kernel();
        possible.map_err(|e| CliError::input(format!("{name}: {e}")))?;
        found.push(fault);
    }
    name_apart(&mut found)?;
    if given.is_empty() {
        for (name, ..) in BUILT_IN {
            let fault = named(name, seconds)?;
            match fault.plan.check_kernel() {
                Ok(()) => found.push(fault),
                Err(reason) => left_out.push(format!("no `{name}`: {reason}")),
            }
        }
    }
    Ok((found, left_out))
}

/// Names plans of one name as the user has named them.
fn name_apart(plans: &mut [MatrixFault]) -> Result<(), CliError> {
    let names: Vec<_> = plans.iter().map(|fault| fault.name.clone()).collect();
    for fault in plans.iter_mut() {
        if names.iter().filter(|name| **name == fault.name).count() > 1 {
            fault.name.clone_from(&fault.given);
        }
    }
    for (n, fault) in plans.iter().enumerate() {
        if plans[..n].iter().any(|other| other.name == fault.name) {
            let twice = format!("{}: named twice", fault.given);
            return Err(CliError::input(twice));
        }
    }
    Ok(())
}

fn named(given: &str, seconds: u32) -> Result<MatrixFault, CliError> {
    let built_in = BUILT_IN.iter().find(|(name, ..)| *name == given);
    let (mut plan, paths) = match built_in {
        Some((name, text, paths)) => {
            let plan = Plan::parse(text).map_err(|e| CliError::failed(format!("{name}: {e}")))?;
            (plan, *paths)
        }
        None if !Path::new(given).exists() => {
            let names: Vec<_> = BUILT_IN.iter().map(|(name, ..)| *name).collect();
            return Err(CliError::input(format!(
                "{given}: neither a file with a plan nor one of {}",
                names.join(", ")
            )));
        }
        None => (Plan::read(Path::new(given))?, 1),
    };
    let endless = |fault: &PlannedFault| fault.every.is_some() && fault.times.is_none();
    if plan.duration.is_none() && plan.faults.iter().any(endless) {
        plan.duration = Some(Seconds::whole(seconds));
    }
    let stem = Path::new(given).file_stem().unwrap_or_default();
    Ok(MatrixFault {
        name: stem.to_string_lossy().into_owned(),
        given: given.to_owned(),
        paths: paths.max(plan.last_path() + 1),
        plan,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_plans_are_valid_and_end() {
        for (name, ..) in BUILT_IN {
            let fault = named(name, 10).unwrap();
            assert_eq!(fault.name, name);
            assert!(
                fault.plan.duration.is_none(),
                "{name} has no end of its own"
            );
        }
    }

    #[test]
    fn plans_of_one_name_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let text = "[[fault]]\nkind = \"kill\"\nstart = 0.1\n";
        let files = ["a", "b"].map(|place| {
            let place = dir.path().join(place);
            std::fs::create_dir(&place).unwrap();
            let file = place.join("kill.toml");
            std::fs::write(&file, text).unwrap();
            file.display().to_string()
        });
        let (all, _) = faults(&files, 1).unwrap();
        let names: Vec<_> = all.into_iter().map(|fault| fault.name).collect();
        assert_eq!(names, files);
        let line = faults(&["kill", "kill"].map(String::from), 1).unwrap_err();
        assert!(line.to_string().contains("twice"), "{line}");
    }

    #[test]
    fn a_fault_that_is_not_known_is_named_with_those_that_are() {
        let line = faults(&["fire".to_owned()], 10).unwrap_err().to_string();
        assert!(line.contains("fire") && line.contains("kill-all"), "{line}");
    }
}
