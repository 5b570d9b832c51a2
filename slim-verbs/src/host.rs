//! The ports of this host.

use std::io;
use std::str::FromStr;

use slim_rdma::ibverbs::{AdapterError, PortSettings, VerbsAdapter, devices};
use slim_rdma::{HalfPair, PairSizes, VerbsError};

use crate::port::VerbsPort;
use crate::provider::VerbsProvider;
use crate::reads::MemoryPorts;
use crate::settings::VerbsSettings;

/// Which ports of a host are used. By default all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortNames(Vec<PortName>);

/// An adapter, or one of its ports.
type PortName = (String, Option<u8>);

fn is_port((name, port): &PortName, device: &str, number: u8) -> bool {
    name == device && port.is_none_or(|port| port == number)
}

impl PortNames {
    fn include(&self, device: &str, number: u8) -> bool {
        self.0.is_empty() || self.0.iter().any(|name| is_port(name, device, number))
    }
}

impl FromStr for PortNames {
    type Err = String;

    /// Adapters, or their ports, with commas between: `mlx5_0,mlx5_1:2`. Empty: all.
    fn from_str(text: &str) -> Result<Self, String> {
        let names = text
            .split(',')
            .map(str::trim)
            .filter(|name| !name.is_empty());
        let parse = |name: &str| match name.split_once(':') {
            None => Ok((name.to_owned(), None)),
            Some((device, port)) => match port.parse() {
                Ok(number @ 1..) if !device.is_empty() => Ok((device.to_owned(), Some(number))),
                _ => Err(format!(
                    "{name:?} is no port of an adapter, such as mlx5_0:1"
                )),
            },
        };
        Ok(PortNames(names.map(parse).collect::<Result<_, _>>()?))
    }
}

/// The ports of this host that can be used.
pub struct HostPorts {
    /// Makes queue pairs at them.
    pub provider: VerbsProvider<VerbsAdapter>,
    /// Those of the ports at which memory of the program can be registered.
    pub memory: MemoryPorts,
    /// Why an adapter or port that was named is not used. One line each.
    pub left_out: Vec<String>,
}

impl HostPorts {
    /// All ports of this host with these names that have a link and can be used, in the order in which libibverbs lists them. `how` says how
    /// they are used; its device and port do not count. libibverbs is loaded for this.
    ///
    /// # Errors
    /// There is none, libibverbs is missing, or no queue pair can be made: the process may lock too little memory. The text is one line that
    /// says what there is.
    pub fn open(
        names: &PortNames,
        how: &PortSettings,
        settings: VerbsSettings,
    ) -> Result<Self, AdapterError> {
        let mut ports = Vec::new();
        let mut failed = Vec::new();
        let mut used = Vec::new();
        for device in devices()? {
            let usable = device.ports.iter().filter(|port| port.active);
            for number in usable.map(|port| port.number) {
                if device.unfit.is_some() || !names.include(&device.name, number) {
                    continue;
                }
                let which = PortSettings {
                    device: Some(device.name.clone()),
                    port: Some(number),
                    ..how.clone()
                };
                let opened = VerbsAdapter::open(&which).and_then(|adapter| {
                    let port = VerbsPort::new(adapter);
                    let usable = port.and_then(|port| try_pair(port, settings.sizes));
                    usable.map_err(|e| AdapterError::Call(device.name.clone(), e))
                });
                match opened {
                    Ok(port) => {
                        ports.push(port);
                        used.push((device.name.clone(), number));
                    }
                    Err(e) => failed.push((device.name.clone(), number, e)),
                }
            }
        }
        if ports.is_empty() {
            let last = failed.pop().map(|(.., e)| e);
            return Err(last.unwrap_or_else(|| why_none(names.0.first(), how)));
        }
        let left_out = left_out(names, &used, &failed, |name| why_none(Some(name), how));
        let no_random = |e: io::Error| {
            let e = VerbsError::new("getrandom", e.raw_os_error().unwrap_or_default());
            AdapterError::Call("of this host".into(), e)
        };
        let memory = MemoryPorts::new(ports.iter().map(|port| &port.verbs));
        let provider = VerbsProvider::new(ports, settings).map_err(no_random)?;
        Ok(HostPorts {
            provider,
            memory,
            left_out,
        })
    }
}

/// Why the names that none of the `used` ports has are not used: ports that `failed`, or what `else_why` says.
fn left_out(
    names: &PortNames,
    used: &[(String, u8)],
    failed: &[(String, u8, AdapterError)],
    else_why: impl Fn(&PortName) -> AdapterError,
) -> Vec<String> {
    let text = |why: &AdapterError| match why {
        AdapterError::NoAdapter(what) => what.clone(),
        other => other.to_string(),
    };
    let why = |name: &PortName| {
        if used.iter().any(|(device, at)| is_port(name, device, *at)) {
            return None;
        }
        // Two names may be those of one port.
        let mut failures = failed.iter();
        let failure = failures.find(|(device, at, _)| is_port(name, device, *at));
        Some(failure.map_or_else(|| text(&else_why(name)), |(.., why)| text(why)))
    };
    names.0.iter().filter_map(why).collect()
}

/// Makes a queue pair and gives it up. Where that fails, each flow would find out by itself, and nobody would be told.
fn try_pair(
    port: VerbsPort<VerbsAdapter>,
    sizes: PairSizes,
) -> Result<VerbsPort<VerbsAdapter>, VerbsError> {
    let mut verbs = port.verbs.clone();
    HalfPair::open(&mut verbs, sizes)?.abandon(&mut verbs);
    Ok(port)
}

/// Opening this port fails with a text that says what there is.
fn why_none(name: Option<&PortName>, how: &PortSettings) -> AdapterError {
    let which = PortSettings {
        device: name.map(|(device, _)| device.clone()),
        port: name.and_then(|(_, port)| *port),
        ..how.clone()
    };
    match VerbsAdapter::open(&which) {
        Ok(_) => AdapterError::Setting("no port had a link a moment ago"),
        Err(e) => e,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_ports_are_checked() {
        let names: PortNames = "mlx5_0, mlx5_1:2,".parse().unwrap();
        for (device, number, included) in [
            ("mlx5_0", 1, true),
            ("mlx5_0", 2, true),
            ("mlx5_1", 1, false),
            ("mlx5_1", 2, true),
            ("mlx5_10", 2, false),
        ] {
            assert_eq!(names.include(device, number), included, "{device}:{number}");
        }
        assert!("".parse::<PortNames>().unwrap().include("rxe0", 1));
        for wrong in ["a:0", "a:x", ":1", "a:256", "a:1:2"] {
            assert!(wrong.parse::<PortNames>().unwrap_err().contains(wrong));
        }
    }

    #[test]
    fn names_that_are_not_used_are_told() {
        let names: PortNames = "used,a,a:2,used:2,gone,a:2".parse().unwrap();
        let used = [("used".to_owned(), 1)];
        let failed = [("a".to_owned(), 2, AdapterError::Setting("a reason"))];
        let why = |(device, port): &PortName| {
            AdapterError::NoAdapter(format!("there is no {device} {port:?}"))
        };
        let a = failed[0].2.to_string();
        assert_eq!(
            left_out(&names, &used, &failed, why),
            [
                a.clone(),
                a.clone(),
                "there is no used Some(2)".into(),
                "there is no gone None".into(),
                a
            ]
        );
    }
}
