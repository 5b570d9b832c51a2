//! The fault plan: kinds, times and numbers of faults.
//!
//! ```toml
//! seed = 7            # the same seed gives the same times and choices
//! duration = 60       # seconds; without it, until the command ends
//!
//! [[fault]]
//! kind = "kill"       # see [`FaultKind`]
//! start = 2           # seconds after the beginning
//! every = [0.5, 2]    # seconds from one fault to the next: a number or a range
//! times = 20          # at most
//! ```

use std::fs;
use std::net::IpAddr;
use std::path::Path;

use serde::{Deserialize, Serialize};
use slim_lab::faults::netem::Netem;
use strum::IntoStaticStr;

use super::times::{Lasts, ONE_SECOND, Seconds, Span, one_second};
use super::{message, netem};
use crate::failure::CliError;

/// Largest value of `times`.
const MAX_TIMES: u32 = 1_000_000;

/// A checked plan.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Seed of all choices; chosen at random (and printed) when absent.
    pub seed: Option<u64>,
    /// When to stop making faults, in seconds after the beginning.
    pub duration: Option<Seconds>,
    /// The faults; their times are independent of each other.
    #[serde(default, rename = "fault")]
    pub faults: Vec<PlannedFault>,
}

/// One kind of fault, repeated.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct PlannedFault {
    /// The kind of the fault.
    pub kind: FaultKind,
    /// Time of the first fault (default: after 1 s).
    #[serde(default = "one_second")]
    pub start: Span,
    /// Time from one beginning to the next; without it the fault comes once.
    pub every: Option<Span>,
    /// Largest number of faults.
    pub times: Option<u32>,
    /// Duration of a fault that lasts (default: 1 s; `flush`: forever).
    pub lasts: Option<Lasts>,
    /// The name of a node, or `any` (the default): a node chosen anew each time.
    #[serde(default = "any_node")]
    pub node: String,
    /// The path between the nodes, for kinds that hit a path: 0 (the default) is the first.
    pub path: Option<usize>,
    /// How many of the selected connections or processes to hit: one at random (the default), or all.
    pub hit: Option<Hit>,
    /// Only processes with this name, or their connections.
    pub process: Option<String>,
    /// Not processes with these names, nor their connections.
    #[serde(default)]
    pub not_process: Vec<String>,
    /// Only connections with this address at the other end.
    pub peer: Option<IpAddr>,
    /// Only connections with this port at either end; for `syn-full`, only the listener with this port.
    pub port: Option<u16>,
    /// The adapter for RDMA that is hit (`pair-error`, `port-down`, `adapter-gone`), or whose line it is (`netem`).
    pub adapter: Option<String>,
    /// What the firewall does with packets of connections that it does not know (`flush`).
    pub answer: Option<FlushAnswer>,
    /// What a line does to packets (`netem`).
    #[serde(default, deserialize_with = "netem::read")]
    pub netem: Option<Netem>,
}

/// What can happen.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq, IntoStaticStr)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum FaultKind {
    /// A soft adapter for RDMA is deleted and added again.
    AdapterGone,
    /// The node loses its address on a path and gets it back.
    AddressGone,
    /// A firewall drops all packets that arrive.
    Drop,
    /// A forged FIN ends a connection.
    Fin,
    /// A firewall with a table of connections forgets them: their packets do not pass any more. New connections do.
    Flush,
    /// The kernel gives a connection up.
    Kill,
    /// A link goes down and comes up.
    LinkDown,
    /// A router drops all long packets, and tells nobody (an MTU black hole).
    MtuHole,
    /// Packets that a node sends on a path are delayed, lost, reordered, repeated or damaged.
    Netem,
    /// Packets from the node get lost, those to it arrive.
    OneWay,
    /// A forged packet puts a queue pair and its peer into their error states.
    PairError,
    /// The link of an adapter for RDMA goes down and comes up.
    PortDown,
    /// The node has another address on a path from now on.
    Renumber,
    /// A firewall answers with a reset.
    Reset,
    /// A forged RST ends a connection.
    Rst,
    /// Processes are stopped (SIGSTOP), and go on after a time.
    Stop,
    /// The queues of listeners are full: new connections are not made for a time.
    SynFull,
}

/// The answer of a firewall to packets of connections that it has forgotten.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum FlushAnswer {
    /// A reset.
    Reset,
    /// None: the packets are dropped.
    #[default]
    Silence,
}

/// How many of those selected to hit.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Hit {
    /// All at once.
    All,
    /// One, chosen at random.
    #[default]
    One,
}

fn any_node() -> String {
    "any".to_owned()
}

impl FaultKind {
    /// Whether the fault lasts for a time, rather than being over at once.
    pub fn lasts(self) -> bool {
        !self.hits_some() && self != Self::Renumber || self == Self::Stop
    }

    /// Whether the fault hits selected connections, queue pairs or processes, not the whole network of a host.
    pub fn hits_some(self) -> bool {
        matches!(
            self,
            Self::Fin | Self::Kill | Self::PairError | Self::Rst | Self::Stop
        )
    }

    /// Whether the fault hits an adapter for RDMA, or its queue pairs.
    pub fn hits_adapter(self) -> bool {
        matches!(self, Self::AdapterGone | Self::PairError | Self::PortDown)
    }

    /// Its name in plans and reports.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

impl Plan {
    /// Reads a plan. A mistake is bad input, reported in one line with its place.
    pub fn read(path: &Path) -> Result<Self, CliError> {
        let text = fs::read_to_string(path)
            .map_err(|e| CliError::input(format!("{}: {e}", path.display())))?;
        Self::parse(&text).map_err(|line| CliError::input(format!("{}: {line}", path.display())))
    }

    /// Parses a plan from text; the error is one line without the file's name.
    pub fn parse(text: &str) -> Result<Self, String> {
        check_tables(text)?;
        let plan: Self = toml::from_str(text).map_err(|e| {
            let line = e.span().map_or(1, |span| {
                text[..span.start.min(text.len())].lines().count().max(1)
            });
            format!("line {line}: {}", message::plain(e.message()))
        })?;
        plan.check()?;
        Ok(plan)
    }

    /// Nothing happens.
    pub fn without_faults() -> Self {
        Self {
            seed: None,
            duration: None,
            faults: Vec::new(),
        }
    }

    /// Index of the last path that a fault of the plan hits.
    pub fn last_path(&self) -> usize {
        let paths = self.faults.iter().map(PlannedFault::path);
        paths.max().unwrap_or(0)
    }

    fn check(&self) -> Result<(), String> {
        if self.faults.is_empty() {
            return Err("no [[fault]] in it: nothing would happen".into());
        }
        for (n, fault) in self.faults.iter().enumerate() {
            fault
                .check()
                .map_err(|what| format!("fault {} ({}): {what}", n + 1, fault.kind.name()))?;
        }
        Ok(())
    }

    /// Checks that this kernel can make the faults, without making any. The error is one line.
    pub fn check_kernel(&self) -> Result<(), String> {
        for (n, fault) in self.faults.iter().enumerate() {
            if let Some(netem) = &fault.netem {
                netem
                    .check()
                    .map_err(|e| format!("fault {} ({}): {e}", n + 1, fault.kind.name()))?;
            }
        }
        Ok(())
    }
}

/// serde takes an array for a table, its values in the order of the keys. A plan names its keys.
fn check_tables(text: &str) -> Result<(), String> {
    let Ok(plan) = toml::from_str::<toml::Table>(text) else {
        // The parser of plans says where the mistake is.
        return Ok(());
    };
    let faults = plan.get("fault").and_then(toml::Value::as_array);
    for (n, fault) in faults.into_iter().flatten().enumerate() {
        let Some(fault) = fault.as_table() else {
            return Err(format!("fault {} is not a table", n + 1));
        };
        if fault.get("netem").is_some_and(|netem| !netem.is_table()) {
            return Err(format!(
                "fault {}: `netem` is not a table, such as {{ delay = \"5ms\" }}",
                n + 1
            ));
        }
    }
    Ok(())
}

impl PlannedFault {
    /// The path that it hits.
    pub fn path(&self) -> usize {
        self.path.unwrap_or(0)
    }

    /// How many of those selected it hits.
    pub fn hit(&self) -> Hit {
        self.hit.unwrap_or_default()
    }

    /// How long it lasts; none if it is over at once.
    pub fn lasts(&self) -> Option<Lasts> {
        let default = match self.kind {
            FaultKind::Flush => Lasts::Forever,
            _ => Lasts::Within(ONE_SECOND),
        };
        self.kind.lasts().then(|| self.lasts.unwrap_or(default))
    }

    fn check(&self) -> Result<(), String> {
        if self.every.is_some_and(|every| every.to.is_zero()) {
            return Err("`every` must be more than 0 seconds".into());
        }
        if self
            .times
            .is_some_and(|times| times == 0 || times > MAX_TIMES)
        {
            return Err(format!("`times` must be 1 to {MAX_TIMES}"));
        }
        if self.times.is_some_and(|times| times > 1) && self.every.is_none() {
            return Err("`times` needs `every`".into());
        }
        if self.lasts.is_some() && !self.kind.lasts() {
            return Err("`lasts` is not allowed: this fault is over at once".into());
        }
        match (self.kind == FaultKind::Netem, &self.netem) {
            (true, None) => {
                return Err("it needs options, such as netem = { delay = \"5ms\" }".into());
            }
            (false, Some(_)) => return Err("`netem` is for the kind netem only".into()),
            _ => {}
        }
        match (self.kind.hits_adapter(), &self.adapter) {
            (true, None) => {
                return Err("it needs the name of an adapter, such as adapter = \"rxe0\"".into());
            }
            (false, Some(_)) if self.kind != FaultKind::Netem => {
                return Err("`adapter` is for faults of adapters and for netem only".into());
            }
            _ => {}
        }
        if self.answer.is_some() && self.kind != FaultKind::Flush {
            return Err("`answer` is for the kind flush only".into());
        }
        if self.path.is_some() && self.kind.hits_some() {
            return Err("`path` is not allowed: this fault hits connections or processes".into());
        }
        if self.hit.is_some() && !self.kind.hits_some() {
            return Err("`hit` is not allowed: this fault hits the whole node".into());
        }
        let of_listener = self.port.is_some() && self.kind == FaultKind::SynFull;
        let picks_connections = self.peer.is_some() || self.port.is_some() && !of_listener;
        let picks = self.process.is_some() || !self.not_process.is_empty() || picks_connections;
        if picks && !self.kind.hits_some() {
            return Err("connections cannot be selected: this fault hits the whole node".into());
        }
        if picks_connections && matches!(self.kind, FaultKind::PairError | FaultKind::Stop) {
            return Err("only processes can be selected: this fault hits no TCP connection".into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_plan_is_read_with_its_defaults() {
        let plan = Plan::parse(
            "seed = 7\nduration = 60\n[[fault]]\nkind = \"kill\"\nevery = [0.5, 2]\nhit = \"all\"\n\
             [[fault]]\nkind = \"link-down\"\nstart = 3\nlasts = 2.5\nnode = \"nodeB\"\n",
        )
        .unwrap();
        assert_eq!(plan.seed, Some(7));
        assert_eq!(plan.duration.unwrap().duration(), Duration::from_secs(60));
        let [kill, link] = &plan.faults[..] else {
            panic!("{plan:?}")
        };
        assert_eq!(
            (kill.kind, kill.hit, kill.node.as_str()),
            (FaultKind::Kill, Some(Hit::All), "any")
        );
        assert_eq!(kill.start, one_second());
        assert_eq!(kill.every.unwrap().to, Duration::from_secs(2));
        let Some(Lasts::Within(lasts)) = link.lasts() else {
            panic!("{link:?}")
        };
        assert_eq!(lasts.from, Duration::from_millis(2500));
        assert_eq!((kill.lasts(), link.path()), (None, 0));
    }

    #[test]
    fn a_kind_has_the_same_name_in_plans_and_reports() {
        for name in [
            "address-gone",
            "drop",
            "fin",
            "flush",
            "kill",
            "link-down",
            "mtu-hole",
            "one-way",
            "renumber",
            "reset",
            "rst",
            "stop",
            "syn-full",
        ] {
            let plan = Plan::parse(&format!("[[fault]]\nkind = \"{name}\"\n")).unwrap();
            assert_eq!(plan.faults[0].kind.name(), name);
        }
        for name in ["adapter-gone", "pair-error", "port-down"] {
            let text = format!("[[fault]]\nkind = \"{name}\"\nadapter = \"rx1\"\n");
            let plan = Plan::parse(&text).unwrap();
            assert_eq!(plan.faults[0].kind.name(), name);
        }
    }

    #[test]
    fn a_fault_may_last_to_the_end_of_the_run() {
        let lasts = |fault: &str| {
            let plan = Plan::parse(&format!("[[fault]]\nkind = {fault}\n"));
            plan.map(|plan| plan.faults[0].lasts())
        };
        assert_eq!(
            lasts("\"link-down\"\nlasts = \"forever\""),
            Ok(Some(Lasts::Forever))
        );
        assert_eq!(lasts("\"flush\""), Ok(Some(Lasts::Forever)));
        assert_eq!(lasts("\"drop\""), Ok(Some(Lasts::Within(ONE_SECOND))));
        assert_eq!(lasts("\"renumber\""), Ok(None));
        let line = lasts("\"drop\"\nlasts = \"long\"").unwrap_err();
        assert!(
            line.contains("line 3") && line.contains("or \"forever\""),
            "{line}"
        );
    }

    /// Each bad plan with a word that its one line must contain.
    #[test]
    fn mistakes_are_reported_in_one_line_with_their_place() {
        let bad = [
            ("", "no [[fault]]"),
            ("[[fault]]\nkind = \"explode\"\n", "line 2"),
            ("[[fault]]\nkind = \"kill\"\nevrey = 1\n", "evrey"),
            ("[[fault]]\nkind = \"kill\"\nevery = 0\n", "more than 0"),
            (
                "[[fault]]\nkind = \"kill\"\nevery = -1\n",
                "between 0 and 86400",
            ),
            (
                "[[fault]]\nkind = \"kill\"\nevery = [2, 1]\n",
                "upside down",
            ),
            (
                "[[fault]]\nkind = \"kill\"\nevery = \"soon\"\n",
                "expected seconds",
            ),
            (
                "[[fault]]\nkind = \"kill\"\ntimes = 3\n",
                "`times` needs `every`",
            ),
            (
                "[[fault]]\nkind = \"kill\"\ntimes = 0\n",
                "`times` must be 1",
            ),
            ("[[fault]]\nkind = \"kill\"\nlasts = 1\n", "over at once"),
            ("[[fault]]\nkind = \"drop\"\nport = 80\n", "whole node"),
            ("[[fault]]\nkind = \"kill\"\npath = 1\n", "`path`"),
            ("[[fault]]\nkind = \"drop\"\nhit = \"all\"\n", "`hit`"),
            (
                "[[fault]]\nkind = \"drop\"\nanswer = \"reset\"\n",
                "flush only",
            ),
            (
                "[[fault]]\nkind = \"renumber\"\nlasts = 1\n",
                "over at once",
            ),
            ("fault = [[\"kill\"]]\n", "fault 1 is not a table"),
            (
                "[[fault]]\nkind = \"netem\"\nnetem = [\"5ms\"]\n",
                "`netem` is not a table",
            ),
            (
                "fault = 1\n",
                "line 1: invalid type: integer `1`, expected a list",
            ),
            (
                "[[fault]]\nkind = \"kill\"\nport = -1\n",
                "expected a whole number",
            ),
            (
                "[[fault]]\nkind = \"kill\"\n\"\\u001b[31m\" = 1\n",
                "\\u{1b}[31m",
            ),
            ("[[fault]]\nkind = \"stop\"\nport = 80\n", "only processes"),
            ("[[fault]]\nkind = \"port-down\"\n", "name of an adapter"),
            (
                "[[fault]]\nkind = \"kill\"\nadapter = \"rx1\"\n",
                "`adapter` is for",
            ),
            (
                "[[fault]]\nkind = \"pair-error\"\nadapter = \"rx1\"\nport = 80\n",
                "only processes",
            ),
            (
                "[[fault]]\nkind = \"pair-error\"\nadapter = \"rx1\"\nlasts = 1\n",
                "over at once",
            ),
            ("[[fault]]\nkind = \"kill\"\npeer = \"nodeB\"\n", "line 3"),
            ("duration = nan\n[[fault]]\nkind = \"kill\"\n", "line 1"),
            ("seed = \n", "line 1"),
        ];
        for (text, word) in bad {
            let line = Plan::parse(text).unwrap_err();
            assert!(
                line.contains(word) && !line.contains(char::is_control),
                "{text:?} gave {line:?}"
            );
        }
    }

    #[test]
    fn a_missing_file_is_bad_input() {
        let failure = Plan::read(Path::new("/no/such/plan.toml")).unwrap_err();
        assert_eq!(failure.status(), 2);
        assert!(failure.to_string().contains("/no/such/plan.toml"));
    }
}
