//! The failure detector of Open MPI must give SLIM the time for its attempts. Otherwise it reports ranks as failed whose connections SLIM is
//! about to replace.
//!
//! Open MPI 5.0 has one detector, between ranks, by messages at an interval (`mpi_ft_detector`); it is off by default.

use std::ffi::OsString;
use std::time::Duration;

use slim_core::config::Config;
use slim_core::witness::SETTLED;

use super::openmpi;

const DETECTOR: &str = "mpi_ft_detector";
const TIMEOUT: &str = "mpi_ft_detector_timeout";
/// Open MPI's default for [`TIMEOUT`].
const DEFAULT_TIMEOUT: f64 = 10.0;

/// A line for the user if Open MPI's detector is on, and is too quick for these settings.
pub fn note(config: &Config, witnessed: bool, args: &[OsString]) -> Option<String> {
    check(config, witnessed, |name| openmpi::parameter(args, name))
}

fn check(
    config: &Config,
    witnessed: bool,
    value: impl Fn(&str) -> Option<String>,
) -> Option<String> {
    let on = value(DETECTOR)?;
    if ["0", "false", "no", "off", "disabled"].contains(&&*on.trim().to_ascii_lowercase()) {
        return None;
    }
    let timeout = value(TIMEOUT).and_then(|seconds| seconds.trim().parse().ok());
    let timeout: f64 = timeout.unwrap_or(DEFAULT_TIMEOUT);
    let verdict = if witnessed { SETTLED } else { Duration::ZERO };
    let needed = (config.resumable_for() + verdict).as_secs_f64();
    (timeout <= needed).then(|| {
        format!(
            "{DETECTOR} gives a silent rank up after {timeout} s, and SLIM may need {needed} s to replace its connections, or to decide who is lost: set --mca {TIMEOUT} to more, or SLIM_ATTEMPT_TIMEOUTS to less"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(args: &str, timeouts: &str, witnessed: bool) -> Option<String> {
        let vars = [("SLIM_ATTEMPT_TIMEOUTS".to_owned(), timeouts)];
        let (config, problems) = Config::from_vars(vars);
        assert!(problems.is_empty());
        let args: Vec<OsString> = args.split_whitespace().map(OsString::from).collect();
        check(&config, witnessed, |name| openmpi::on_line(&args, name))
    }

    #[test]
    fn a_detector_that_is_off_does_not_matter() {
        for args in [
            "-n 2 a",
            "--mca mpi_ft_detector 0 a",
            "--mca mpi_ft_detector false a",
        ] {
            assert_eq!(said(args, "3,12,45", true), None, "{args}");
        }
    }

    #[test]
    fn a_detector_that_is_too_quick_is_named_with_both_times() {
        let on = "--with-ft ulfm --mca mpi_ft_detector 1";
        let line = said(on, "3,12,45", true).unwrap();
        assert!(
            line.contains("after 10 s") && line.contains("need 80 s"),
            "{line}"
        );
        assert!(said(on, "3,12,45", false).unwrap().contains("need 60 s"));
        assert_eq!(said(on, "1,2,3", false), None);
        assert!(said(on, "1,2,3", true).is_some());
        let slow = format!("{on} --mca mpi_ft_detector_timeout 85 a");
        assert_eq!(said(&slow, "3,12,45", true), None);
    }
}
