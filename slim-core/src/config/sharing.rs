//! Which users of one process can share an agent.

use std::path::PathBuf;

use super::{Config, LogLevel};
use crate::auth::code_with_job;

/// Begins the digest of settings.
const LABEL: &[u8] = b"slim settings of an agent";

impl Config {
    /// A digest of the settings and of this crate's version, for users that may be of different builds and share an agent if their
    /// settings are equal. It covers everything but the level of messages on standard error, which is that of the agent's owner. It
    /// does not reveal the job key. Must be called after [`set_job_key`](Self::set_job_key).
    pub fn digest(&self) -> [u8; 32] {
        self.digest_with(self.events.clone())
    }

    /// Whether a user whose settings have this [digest](Self::digest) can use an agent that has these settings. A user without an event
    /// log of its own can: its flows are in the log of the agent's owner.
    pub fn serves(&self, digest: &[u8; 32]) -> bool {
        self.digest() == *digest || self.digest_with(None) == *digest
    }

    fn digest_with(&self, events: Option<PathBuf>) -> [u8; 32] {
        let alike = Self {
            events,
            log: LogLevel::Off,
            ..self.clone()
        };
        // The text says only whether there is a job key; the code is made under that key.
        let text = format!("{} {alike:?}", env!("CARGO_PKG_VERSION"));
        code_with_job(self.job_key.as_ref(), LABEL, &[text.as_bytes()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(vars: &[(&str, &str)]) -> Config {
        let vars = vars.iter().map(|(k, v)| ((*k).to_owned(), *v));
        let (config, problems) = Config::from_vars(vars);
        assert!(problems.is_empty(), "{problems:?}");
        config
    }

    #[test]
    fn each_setting_but_the_level_of_messages_counts() {
        let plain = config(&[]);
        assert!(plain.serves(&plain.digest()));
        assert!(plain.serves(&config(&[("SLIM_LOG", "trace")]).digest()));
        for other in [
            ("SLIM", "required"),
            ("SLIM_ATTEMPTS", "2"),
            ("SLIM_ATTEMPT_TIMEOUTS", "1"),
            ("SLIM_DEADLINE", "9"),
            ("SLIM_HELLO_TIMEOUT", "1"),
            ("SLIM_STALL", "0"),
            ("SLIM_LINGER", "7"),
            ("SLIM_LINGER_MEMORY", "1"),
            ("SLIM_JOB_KEY", "sixteen or more bytes"),
            ("SLIM_PEERS", "all"),
        ] {
            let other = config(&[other]);
            assert!(!plain.serves(&other.digest()), "{other:?}");
            assert!(!other.serves(&plain.digest()), "{other:?}");
        }
        let keys = ["one key of many bytes", "another key of bytes"];
        let [one, other] = keys.map(|key| config(&[("SLIM_JOB_KEY", key)]));
        assert!(!one.serves(&other.digest()));
    }

    #[test]
    fn a_user_with_an_event_log_of_its_own_is_not_served() {
        let logging = config(&[("SLIM_EVENTS", "/tmp/one")]);
        let elsewhere = config(&[("SLIM_EVENTS", "/tmp/other")]);
        let silent = config(&[]);
        assert!(logging.serves(&logging.digest()));
        assert!(logging.serves(&silent.digest()));
        assert!(!logging.serves(&elsewhere.digest()));
        assert!(!silent.serves(&logging.digest()));
    }
}
