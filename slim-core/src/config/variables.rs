//! Every setting, with the texts that help and documents repeat.

/// A variable that SLIM reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variable {
    /// Its name.
    pub name: &'static str,
    /// The values that it takes.
    pub allowed: &'static str,
    /// The value that is used if it is not set, or set to a value that it does not take.
    pub default: &'static str,
    /// What it does, in one line.
    pub help: &'static str,
}

impl Variable {
    /// Whether it sets the job key. Going on without the key that was asked for would be less safe.
    pub(super) fn is_key(&self) -> bool {
        self.name.starts_with("SLIM_JOB_KEY")
    }
}

/// Every variable that SLIM reads, for help texts.
pub const VARIABLES: [Variable; 20] = [
    Variable {
        name: "SLIM",
        allowed: "off, preferred or required (also 0, 1, on)",
        default: "preferred",
        help: "off: connections get no session; preferred: they get one if the peer has SLIM; required: they fail without one",
    },
    Variable {
        name: "SLIM_ATTEMPTS",
        allowed: "a whole number from 1 to 16",
        default: "3",
        help: "how many attempts are made to replace a lost connection before the application gets the error",
    },
    Variable {
        name: "SLIM_ATTEMPT_TIMEOUTS",
        allowed: "1 to 16 numbers of seconds from 0.05 to 600, separated by commas",
        default: "3,12,45",
        help: "how long each attempt may take; the last one counts for all further attempts",
    },
    Variable {
        name: "SLIM_DEADLINE",
        allowed: "seconds from 0.05 to 86400, or 0 for none",
        default: "0",
        help: "how long all attempts together may take",
    },
    Variable {
        name: "SLIM_HOLD",
        allowed: "seconds from 0.05 to 2592000 (30 days), or 0 for off",
        default: "0",
        help: "how long to hold a lost connection after its attempts have failed, until the network is back",
    },
    Variable {
        name: "SLIM_HELLO_TIMEOUT",
        allowed: "seconds from 0.05 to 60",
        default: "3",
        help: "how long to ask the peer for SLIM before the connection stays plain TCP",
    },
    Variable {
        name: "SLIM_STALL",
        allowed: "seconds from 0.05 to 3600, or 0 for off",
        default: "1",
        help: "how long data may stay unacknowledged before a new connection is tried beside the old one",
    },
    Variable {
        name: "SLIM_LINGER",
        allowed: "seconds from 1 to 3600",
        default: "120",
        help: "how long a closed connection is kept for a resume while its peer takes nothing of what was sent",
    },
    Variable {
        name: "SLIM_LINGER_MEMORY",
        allowed: "a whole number of MiB from 1 to 65536",
        default: "64",
        help: "how much may be kept for all closed connections of a process",
    },
    Variable {
        name: "SLIM_JOB_KEY",
        allowed: "at least 16 characters",
        default: "no key",
        help: "a secret that only processes of this job know",
    },
    Variable {
        name: "SLIM_JOB_KEY_FILE",
        allowed: "a file of at least 16 bytes that only its owner can read, and SLIM_JOB_KEY not set",
        default: "no key",
        help: "a file that holds the secret",
    },
    Variable {
        name: "SLIM_PEERS",
        allowed: "all, none, or a list of private, local, networks (192.0.2.0/24) and addresses, separated by commas",
        default: "private,local",
        help: "which hosts are asked for SLIM, and answered",
    },
    Variable {
        name: "SLIM_WITNESS",
        allowed: "up to 8 addresses with a port (192.0.2.1:4000), separated by commas, and a job key",
        default: "no witness",
        help: "where the witness of the job is, which decides who is lost when two processes cannot reach each other",
    },
    Variable {
        name: "SLIM_MEET",
        allowed: "up to 8 addresses with a port (192.0.2.1:4000), separated by commas, and a job key",
        default: "no place but the witness",
        help: "where two processes whose addresses have both changed find each other: a witness (slim witness)",
    },
    Variable {
        name: "SLIM_RELAY",
        allowed: "on or off",
        default: "on",
        help: "whether two processes that both reach the witness, but not each other, go on through the witness",
    },
    Variable {
        name: "SLIM_LOST_IF",
        allowed: "the name of an environment variable",
        default: "no condition",
        help: "only processes that have this variable in their environment can be lost: SLIM_WITNESS and SLIM_WHEN_LOST count in them only",
    },
    Variable {
        name: "SLIM_WHEN_LOST",
        allowed: "error or exit",
        default: "no setting: error with a witness, and nobody is lost without one",
        help: "what a process does that is lost: all its connections end with an error, or it ends itself (SIGKILL)",
    },
    Variable {
        name: "SLIM_PRIORITY",
        allowed: "normal, raised or realtime",
        default: "raised",
        help: "the priority of SLIM's thread; raised: a lower nice value, where the process may set it",
    },
    Variable {
        name: "SLIM_EVENTS",
        allowed: "a path; %p is the process id, %h the host name, %% a percent sign",
        default: "no event log",
        help: "where to write the event log, one JSON object per line",
    },
    Variable {
        name: "SLIM_LOG",
        allowed: "off, error, warn, info, debug or trace",
        default: "warn",
        help: "how much to log on standard error",
    },
];
