//! Which kinds of transport a program's flows may use, as its settings say.

use slim_rdma::ibverbs::{AdapterError, PortSettings};

use crate::host::{HostPorts, PortNames};
use crate::settings::VerbsSettings;

/// The kinds of transport, the preferred one first. TCP is always among them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TransportKinds {
    /// Only TCP.
    #[default]
    Tcp,
    /// Queue pairs of verbs at these ports, where they can be made.
    VerbsAndTcp(PortNames),
}

/// A setting: its name, for messages, and its value.
pub type NamedSetting<'a> = (&'a str, &'a str);

impl TransportKinds {
    /// `tcp`, or `verbs,tcp`, and the ports of verbs. Flows begin on TCP, so there is no list without it.
    ///
    /// # Errors
    /// What is wrong, in one line.
    pub fn parse(kinds: NamedSetting<'_>, ports: NamedSetting<'_>) -> Result<Self, String> {
        let wrong_ports = |e| format!("{}: {e}", ports.0);
        let ports: PortNames = ports.1.parse().map_err(wrong_ports)?;
        let list: Vec<&str> = kinds.1.split(',').map(str::trim).collect();
        match &list[..] {
            ["tcp"] => Ok(Self::Tcp),
            ["verbs", "tcp"] => Ok(Self::VerbsAndTcp(ports)),
            _ => Err(format!(
                "{} is {:?}: it must be tcp, or verbs,tcp (flows begin on TCP, and fall back to it)",
                kinds.0, kinds.1
            )),
        }
    }

    /// Opens the ports of verbs, if they are wanted.
    pub fn open_verbs(&self) -> Option<Result<HostPorts, AdapterError>> {
        match self {
            Self::Tcp => None,
            Self::VerbsAndTcp(ports) => {
                let how = PortSettings::default();
                Some(HostPorts::open(ports, &how, VerbsSettings::default()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(kinds: &str, ports: &str) -> Result<TransportKinds, String> {
        TransportKinds::parse(("the kinds", kinds), ("the ports", ports))
    }

    #[test]
    fn lists_are_checked() {
        let all = || TransportKinds::VerbsAndTcp(PortNames::default());
        for (text, kinds) in [
            ("tcp", TransportKinds::Tcp),
            ("verbs,tcp", all()),
            (" verbs , tcp ", all()),
        ] {
            assert_eq!(parse(text, ""), Ok(kinds));
        }
        for text in [
            "",
            "verbs",
            "tcp,verbs",
            "rdma,tcp",
            "tcp,tcp",
            "verbs,tcp,",
        ] {
            let error = parse(text, "").unwrap_err();
            assert!(
                error.starts_with(&format!("the kinds is {text:?}")),
                "{error}"
            );
        }
        let error = parse("verbs,tcp", "mlx5_0:x").unwrap_err();
        assert!(error.starts_with("the ports: \"mlx5_0:x\""), "{error}");
    }
}
