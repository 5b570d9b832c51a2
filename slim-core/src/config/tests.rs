use proptest::prelude::*;

use super::*;

fn from(pairs: &[(&str, &str)]) -> (Config, Vec<String>) {
    let vars = pairs.iter().map(|(n, v)| (n.to_string(), v.to_string()));
    let (config, problems) = Config::from_vars(vars);
    (config, problems.iter().map(ToString::to_string).collect())
}

fn good(pairs: &[(&str, &str)]) -> Config {
    let (config, problems) = from(pairs);
    assert_eq!(problems, [""; 0]);
    config
}

/// The message of the only problem with this setting. All settings must be the defaults.
fn bad(name: &str, value: &str) -> String {
    let (config, problems) = from(&[(name, value)]);
    assert_eq!(config, Config::default(), "{name}={value}");
    let [problem] = &problems[..] else {
        panic!("{name}={value}: {problems:?}")
    };
    assert!(!problem.contains('\n'));
    problem.clone()
}

#[test]
fn without_variables_all_settings_are_the_defaults() {
    assert_eq!(good(&[]), Config::default());
    assert_eq!(
        good(&[("PATH", "/bin"), ("SLIMMER", "1"), ("slim", "no")]),
        Config::default()
    );
}

#[test]
fn values_that_are_not_utf8_are_reported() {
    use std::os::unix::ffi::OsStringExt;
    let value = || OsString::from_vec(b"10.0.0.1\xff".to_vec());
    let (config, problems) = Config::from_vars([("SLIM_PEERS".to_owned(), value())]);
    assert_eq!(config, Config::default());
    let [problem] = &problems[..] else {
        panic!("{problems:?}")
    };
    assert_eq!(problem.variable(), "SLIM_PEERS");
    // Without the key that was asked for SLIM is off.
    for name in ["SLIM_JOB_KEY", "SLIM_JOB_KEY_FILE"] {
        let (config, problems) = Config::from_vars([(name.to_owned(), value())]);
        assert_eq!((config.policy, problems.len()), (Policy::Off, 1), "{name}");
    }
}

#[test]
fn every_variable_sets_its_value() {
    let config = good(&[
        ("SLIM", "Required"),
        ("SLIM_ATTEMPTS", "5"),
        ("SLIM_ATTEMPT_TIMEOUTS", "0.05, 2,600"),
        ("SLIM_DEADLINE", "90"),
        ("SLIM_HOLD", "86400"),
        ("SLIM_HELLO_TIMEOUT", ".5"),
        ("SLIM_STALL", "0"),
        ("SLIM_LINGER", "30"),
        ("SLIM_LINGER_MEMORY", "8"),
        ("SLIM_JOB_KEY", "0123456789abcdef"),
        ("SLIM_PEERS", "192.0.2.0/24"),
        ("SLIM_WITNESS", "192.0.2.1:40, [2001:db8::1]:41"),
        ("SLIM_MEET", "192.0.2.9:42"),
        ("SLIM_RELAY", "off"),
        ("RANK", "0"),
        ("SLIM_LOST_IF", "RANK"),
        ("SLIM_WHEN_LOST", "exit"),
        ("SLIM_PRIORITY", "RealTime"),
        ("SLIM_EVENTS", "/tmp/x.%p"),
        ("SLIM_LOG", "debug"),
    ]);
    assert_eq!(
        config,
        Config {
            policy: Policy::Required,
            attempts: 5,
            attempt_timeouts: [50, 2000, 600_000].map(Duration::from_millis).to_vec(),
            deadline: Some(Duration::from_secs(90)),
            hold: Some(Duration::from_secs(86_400)),
            hello_timeout: Duration::from_millis(500),
            stall: Duration::ZERO,
            linger: Duration::from_secs(30),
            linger_memory: 8 << 20,
            job_key: JobKey::new(b"0123456789abcdef"),
            job_key_file: None,
            peers: Peers::parse("192.0.2.0/24").unwrap(),
            witness: ["192.0.2.1:40", "[2001:db8::1]:41"]
                .map(|at| at.parse().unwrap())
                .to_vec(),
            meet: vec!["192.0.2.9:42".parse().unwrap()],
            relay: false,
            lost_if: Some("RANK".into()),
            when_lost: Some(WhenLost::Exit),
            priority: Priority::RealTime,
            events: Some("/tmp/x.%p".into()),
            log: LogLevel::Debug,
        }
    );
    assert_eq!(good(&[("SLIM", "0")]).policy, Policy::Off);
    assert_eq!(good(&[("SLIM", "on")]).policy, Policy::Preferred);
    assert_eq!(good(&[("SLIM_DEADLINE", "0")]).deadline, None);
}

#[test]
fn a_bad_value_is_reported_with_the_allowed_values_and_the_default() {
    assert_eq!(
        bad("SLIM_ATTEMPTS", "99"),
        "SLIM_ATTEMPTS=\"99\": not allowed; it takes a whole number from 1 to 16; using 3"
    );
    for (name, values) in [
        ("SLIM", &["yes", "2", "offf"][..]),
        ("SLIM_ATTEMPTS", &["0", "17", "-1", "3.5", "three", " "]),
        (
            "SLIM_ATTEMPT_TIMEOUTS",
            &["0", "601", "3,,4", "3;4", "inf", "1e1", "NaN", ","],
        ),
        ("SLIM_DEADLINE", &["-1", "0.01", "86401", "1 minute"]),
        ("SLIM_HOLD", &["-1", "0.01", "2592001", "1 day"]),
        ("SLIM_HELLO_TIMEOUT", &["0", "61", "+1"]),
        ("SLIM_STALL", &["0.01", "3601", "off"]),
        ("SLIM_LINGER", &["0", "0.5", "3601", "off"]),
        ("SLIM_LINGER_MEMORY", &["0", "65537", "8M", "0.5"]),
        (
            "SLIM_WITNESS",
            &["192.0.2.1", "host:4000", "0.0.0.0:1", "192.0.2.1:0"],
        ),
        ("SLIM_MEET", &["192.0.2.1", "host:4000"]),
        ("SLIM_RELAY", &["1", "yes"]),
        ("SLIM_LOST_IF", &["A B", "RANK=1", "SLIM_JOB_KEY"]),
        ("SLIM_WHEN_LOST", &["die", "1"]),
        ("SLIM_PRIORITY", &["high", "-15"]),
        ("SLIM_LOG", &["verbose", "3"]),
    ] {
        let known = VARIABLES.iter().find(|v| v.name == name).unwrap();
        for value in values {
            let line = bad(name, value);
            for part in [name, value, known.allowed, known.default] {
                assert!(line.contains(part), "{line} does not say {part}");
            }
        }
    }
    assert!(bad("SLIM_ATTEMPT_TIMEOUTS", &["1"; 17].join(",")).contains("1 to 16"));
    assert!(bad("SLIM_LOG", &"x\n".repeat(1000)).len() < 300);
}

#[test]
fn a_witness_needs_a_job_key() {
    let witness = ("SLIM_WITNESS", "192.0.2.1:40");
    assert_eq!(
        bad(witness.0, witness.1),
        "SLIM_WITNESS: there is no job key, so anybody could speak for the witness; using no witness"
    );
    let file = good(&[witness, ("SLIM_JOB_KEY_FILE", "/etc/key")]);
    assert_eq!(file.witness.len(), 1);
}

#[test]
fn processes_meet_at_the_witness_unless_another_place_is_named() {
    let key = ("SLIM_JOB_KEY", "0123456789abcdef");
    let witness = ("SLIM_WITNESS", "192.0.2.1:40");
    let meet = ("SLIM_MEET", "192.0.2.9:42");
    let at = |vars: &[(&str, &str)]| {
        good(vars)
            .meet
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
    };
    assert_eq!(at(&[key, witness]), [witness.1]);
    assert_eq!(at(&[key, witness, meet]), [meet.1]);
    assert_eq!(at(&[key, meet]), [meet.1]);
    // A daemon, which cannot be lost, may be looked for.
    assert_eq!(at(&[key, witness, ("SLIM_LOST_IF", "RANK")]), [witness.1]);
    assert_eq!(
        bad(meet.0, meet.1),
        "SLIM_MEET: there is no job key, so anybody could say where processes are; processes whose addresses have both changed do not find each other"
    );
}

#[test]
fn a_process_without_the_variable_that_is_asked_for_cannot_be_lost() {
    let set = [
        ("SLIM_WHEN_LOST", "exit"),
        ("SLIM_LOST_IF", "RANK"),
        ("SLIM_WITNESS", "192.0.2.1:40"),
        ("SLIM_JOB_KEY", "0123456789abcdef"),
    ];
    for daemon in [good(&set), good(&[&set[..], &[("RANKS", "0")]].concat())] {
        assert_eq!((daemon.witness.len(), daemon.when_lost), (0, None));
    }
    let rank = good(&[&set[..], &[("RANK", "")]].concat());
    assert_eq!(
        (rank.witness.len(), rank.when_lost),
        (1, Some(WhenLost::Exit))
    );
}

#[test]
fn an_unknown_name_gets_a_hint() {
    assert_eq!(
        bad("SLIM_ATEMPTS", "3"),
        "SLIM_ATEMPTS: there is no such variable; did you mean SLIM_ATTEMPTS; it is ignored"
    );
    assert!(bad("SLIM_WHATEVER", "3").contains("slim run --help"));
    assert_eq!(
        good(&[
            ("SLIM_CACHE", "/x"),
            ("SLIM_PRELOAD", "/y"),
            ("SLIM_LAB_NODES", "z")
        ]),
        Config::default()
    );
}

#[test]
fn an_empty_value_is_not_set_and_the_first_of_two_values_counts() {
    assert_eq!(
        good(&[("SLIM_ATTEMPTS", ""), ("SLIM_EVENTS", "")]),
        Config::default()
    );
    assert_eq!(
        good(&[("SLIM_ATTEMPTS", "4"), ("SLIM_ATTEMPTS", "5")]).attempts,
        4
    );
    let (_, problems) = from(&[("SLIM_X", "4"), ("SLIM_X", "5")]);
    assert_eq!(problems.len(), 1);
}

#[test]
fn an_unusable_key_turns_slim_off_and_is_not_shown() {
    for name in ["SLIM_JOB_KEY", "SLIM_JOB_KEY_FILE"] {
        let (config, problems) = from(&[(name, "")]);
        assert_eq!(config.policy, Policy::Off);
        assert_eq!(problems.len(), 1);
    }
    let (config, problems) = from(&[("SLIM_JOB_KEY", "15 characters..")]);
    assert_eq!((config.policy, config.job_key), (Policy::Off, None));
    assert!(
        problems.len() == 1 && !problems[0].contains("characters"),
        "{problems:?}"
    );
    let mut config = good(&[("SLIM_JOB_KEY_FILE", "/key")]);
    assert_eq!(config.job_key_file, Some("/key".into()));
    assert_eq!(
        config.set_job_key(Ok((b"0123456789abcdef\n", 0o600))),
        Ok(())
    );
    assert_eq!(config.job_key, JobKey::new(b"0123456789abcdef"));
    assert_eq!(config.policy, Policy::Preferred);
    let long = &b"0123456789abcdef"[..];
    for contents in [
        Ok((&b" \n"[..], 0o600)),
        Ok((&b"0123456789abcde\n"[..], 0o600)),
        Ok((long, 0o640)),
        Ok((long, 0o604)),
        Ok((long, 0o620)),
        Err("permission denied"),
    ] {
        let mut config = good(&[("SLIM_JOB_KEY_FILE", "/key")]);
        assert!(config.set_job_key(contents).is_err());
        assert_eq!((config.policy, config.job_key), (Policy::Off, None));
    }
    let (config, problems) = from(&[
        ("SLIM_JOB_KEY_FILE", "/key"),
        ("SLIM_JOB_KEY", "hush, this is secret"),
    ]);
    assert_eq!(
        (config.job_key, config.job_key_file),
        (JobKey::new(b"hush, this is secret"), None)
    );
    assert!(
        problems.len() == 1 && !problems[0].contains("hush"),
        "{problems:?}"
    );
}

#[test]
fn the_last_timeout_counts_for_further_attempts() {
    let config = good(&[("SLIM_ATTEMPTS", "4"), ("SLIM_ATTEMPT_TIMEOUTS", "1,2")]);
    let seconds = [0, 1, 2, 3].map(|n| config.attempt_timeout(n).as_secs());
    assert_eq!(seconds, [1, 2, 2, 2]);
}

#[test]
fn the_event_log_is_named_after_process_and_host() {
    let path = |template: &str| {
        let config = good(&[("SLIM_EVENTS", template)]);
        config
            .events_path(42, "n1")
            .unwrap()
            .to_str()
            .unwrap()
            .to_owned()
    };
    assert_eq!(path("/tmp/e-%h-%p.jsonl"), "/tmp/e-n1-42.jsonl");
    assert_eq!(path("100%%p %q %"), "100%p %q %");
    assert_eq!(Config::default().events_path(1, "x"), None);
}

#[test]
fn the_documented_defaults_are_the_defaults() {
    for known in VARIABLES {
        // The other variables have no default value.
        if !known.default.starts_with("no ") {
            assert_eq!(
                good(&[(known.name, known.default)]),
                Config::default(),
                "{}",
                known.name
            );
        }
    }
}

proptest! {
    #[test]
    fn any_value_is_taken_or_reported_once(at in 0..VARIABLES.len(), value in "\\PC{0,20}|[0-9.,]{0,8}") {
        let (config, problems) = from(&[(VARIABLES[at].name, &value)]);
        prop_assert!(problems.len() <= 1);
        prop_assert!(problems.is_empty() || config == Config::default() || config.policy == Policy::Off);
        prop_assert!((1..=MAX_ATTEMPTS).contains(&config.attempts));
        prop_assert!(!config.attempt_timeouts.is_empty());
        prop_assert!(config.attempt_timeouts.iter().all(|t| !t.is_zero()));
    }
}
