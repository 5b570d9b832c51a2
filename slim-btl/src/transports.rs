//! The parameters `transports` and `verbs_ports`: the kinds of transport that flows may use.

use slim_rdma::ibverbs::{AdapterError, PortSettings};
use slim_verbs::{HostPorts, PortNames, VerbsSettings};

/// The kinds of transport, the preferred one first. TCP is always among them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum BtlTransports {
    /// Only TCP.
    #[default]
    Tcp,
    /// Queue pairs of verbs at these ports, where they can be made.
    VerbsAndTcp(PortNames),
}

impl BtlTransports {
    /// `tcp`, or `verbs,tcp`, and the ports of verbs. Flows begin on TCP, so there is no list without it.
    ///
    /// # Errors
    /// What is wrong, in one line.
    pub fn parse(kinds: &str, ports: &str) -> Result<Self, String> {
        let ports: PortNames = ports
            .parse()
            .map_err(|e| format!("btl_slim_verbs_ports: {e}"))?;
        let list: Vec<&str> = kinds.split(',').map(str::trim).collect();
        match &list[..] {
            ["tcp"] => Ok(Self::Tcp),
            ["verbs", "tcp"] => Ok(Self::VerbsAndTcp(ports)),
            _ => Err(format!(
                "btl_slim_transports is {kinds:?}: it must be tcp, or verbs,tcp (flows begin on TCP, and fall back to it)"
            )),
        }
    }

    /// The ports of verbs, if they are wanted.
    pub(crate) fn verbs(&self) -> Option<Result<HostPorts, AdapterError>> {
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

    #[test]
    fn lists_are_checked() {
        let all = || BtlTransports::VerbsAndTcp(PortNames::default());
        for (text, kinds) in [
            ("tcp", BtlTransports::Tcp),
            ("verbs,tcp", all()),
            (" verbs , tcp ", all()),
        ] {
            assert_eq!(BtlTransports::parse(text, ""), Ok(kinds));
        }
        for text in [
            "",
            "verbs",
            "tcp,verbs",
            "rdma,tcp",
            "tcp,tcp",
            "verbs,tcp,",
        ] {
            let error = BtlTransports::parse(text, "").unwrap_err();
            assert!(error.contains(&format!("{text:?}")), "{error}");
        }
        let error = BtlTransports::parse("verbs,tcp", "mlx5_0:x").unwrap_err();
        assert!(
            error.starts_with("btl_slim_verbs_ports: \"mlx5_0:x\""),
            "{error}"
        );
    }
}
