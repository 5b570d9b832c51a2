//! The hosts of a job, which become peers of each other whatever their addresses are.
//!
//! By default SLIM asks only hosts in private networks, and in networks that this host has an address in (`SLIM_PEERS`).
//! The user who starts a job on hosts with public addresses has named them: on the command line, in a file, or to the
//! batch system.

use std::collections::BTreeSet;
use std::env;
use std::ffi::OsStr;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, ToSocketAddrs, UdpSocket};

use slim_core::config::{Config, VARIABLES};

use super::line::{GivenLine, Item, OptionRole};
use crate::settings::Settings;

const PEERS: &str = "SLIM_PEERS";

/// Variables of batch systems that name a file with a list of hosts.
const FILE_VARIABLES: [&str; 4] = [
    "PBS_NODEFILE",
    "PE_HOSTFILE",
    "LSB_DJOB_HOSTFILE",
    "COBALT_NODEFILE",
];
/// Variables that list hosts in Slurm's notation.
const LIST_VARIABLES: [&str; 2] = ["SLURM_JOB_NODELIST", "SLURM_NODELIST"];
/// Most hosts of a list; a longer one is a mistake.
const MOST: usize = 1 << 16;

/// The hosts on which a launcher that is given this would start processes, as far as known. `variables` may name files with hosts.
pub fn of_job(given: &GivenLine<'_>, variables: &[&str]) -> BTreeSet<String> {
    let mut found = of_options(&given.line());
    found.append(&mut of_options(&given.file()));
    for name in variables.iter().chain(&FILE_VARIABLES) {
        found.extend(env::var_os(name).iter().flat_map(|file| in_file(file)));
    }
    for name in LIST_VARIABLES {
        found.extend(env::var(name).iter().flat_map(|list| of_slurm(list)));
    }
    found
}

fn of_options(items: &[Item<'_>]) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for item in items {
        match (item.role, item.values.first()) {
            (Some(OptionRole::Hosts), Some(list)) => {
                found.extend(list.to_string_lossy().split(',').filter_map(host));
            }
            (Some(OptionRole::HostRanges), Some(list)) => {
                found.extend(of_slurm(&list.to_string_lossy()));
            }
            (Some(OptionRole::HostFile), Some(file)) => found.extend(in_file(file)),
            _ => {}
        }
    }
    found
}

/// The hosts in a file: the first word of each line.
fn in_file(path: &OsStr) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap_or_default();
    let lines = text.lines().map(|line| line.split('#').next());
    lines
        .filter_map(|line| host(line?.split_whitespace().next()?))
        .collect()
}

/// The name of a host, without user and number of slots.
fn host(word: &str) -> Option<String> {
    let word = word.trim().rsplit('@').next()?;
    let name = match word.rsplit_once(':') {
        _ if word.parse::<Ipv6Addr>().is_ok() => word,
        Some((name, _)) => name,
        None => word,
    };
    let name = name.trim_matches(['[', ']']);
    // `+n0` is the first host of an allocation.
    (!name.is_empty() && !name.starts_with('+')).then(|| name.to_owned())
}

/// `a[1-3,07],b` as `a1`, `a2`, `a3`, `a07` and `b`. Names with several brackets are not supported.
fn of_slurm(list: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut rest = list;
    while !rest.is_empty() {
        let bracket = rest.find('[').unwrap_or(rest.len());
        let comma = rest.find(',').unwrap_or(rest.len());
        if comma <= bracket {
            found.extend(host(&rest[..comma]));
            rest = rest.get(comma + 1..).unwrap_or_default();
            continue;
        }
        let (front, inside) = (&rest[..bracket], &rest[bracket + 1..]);
        let Some((numbers, behind)) = inside.split_once(']') else {
            break;
        };
        let (back, behind) = behind.split_once(',').unwrap_or((behind, ""));
        for range in numbers.split(',') {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let (Ok(from), Ok(to)) = (first.parse::<usize>(), last.parse::<usize>()) else {
                continue;
            };
            let width = first.len();
            let room = MOST.saturating_sub(found.len());
            let names = (from..=to).map(|n| format!("{front}{n:0width$}{back}"));
            found.extend(names.take(room));
        }
        rest = behind;
    }
    found
}

/// Adds these hosts to `SLIM_PEERS`, and this host's addresses as they see them, unless they are peers already.
pub fn make_peers(settings: &mut Settings, hosts: impl IntoIterator<Item = String>) {
    let default = VARIABLES.iter().find(|known| known.name == PEERS);
    let default = default.map_or("", |known| known.default);
    let set = settings.get(PEERS).filter(|value| !value.is_empty());
    let value = set.unwrap_or(default).to_owned();
    if value.trim().eq_ignore_ascii_case("none") {
        return;
    }
    let (config, _) = Config::from_vars([(PEERS.to_owned(), value.clone())]);
    let is_new =
        |ip: &IpAddr| !(ip.is_loopback() || ip.is_unspecified() || config.peers.contains(*ip, &[]));
    let mut more = BTreeSet::new();
    for ip in hosts.into_iter().flat_map(|host| addresses(&host)) {
        if is_new(&ip) {
            more.insert(ip);
            more.extend(own_towards(ip).filter(is_new));
        }
    }
    if !more.is_empty() {
        let more = more.iter().map(IpAddr::to_string);
        let all: Vec<String> = [value].into_iter().chain(more).collect();
        settings.set(PEERS, all.join(","));
    }
}

/// The addresses of a host; none if this host cannot resolve its name.
fn addresses(host: &str) -> Vec<IpAddr> {
    let found = (host, 0).to_socket_addrs();
    found.map_or(Vec::new(), |all| all.map(|addr| addr.ip()).collect())
}

/// The source address of connections to `ip`. Nothing is sent.
fn own_towards(ip: IpAddr) -> Option<IpAddr> {
    let any = match ip {
        IpAddr::V4(_) => IpAddr::from(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => IpAddr::from(Ipv6Addr::UNSPECIFIED),
    };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect((ip, 9)).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::super::mpis;
    use super::*;

    fn set<const N: usize>(names: [&str; N]) -> BTreeSet<String> {
        names.map(String::from).into()
    }

    fn of_with(version: &str, args: &[&str]) -> BTreeSet<String> {
        let syntax = &mpis::of_version("mpirun", version).unwrap().syntax;
        let args: Vec<OsString> = args.iter().map(OsString::from).collect();
        of_options(&syntax.read(&args))
    }

    fn of(args: &[&str]) -> BTreeSet<String> {
        of_with("(Open MPI) 4.1.4", args)
    }

    #[test]
    fn hosts_are_found_in_options_of_hydra() {
        let args = "-l -genv A b -ppn 1 -hosts a,b:2 prog -hosts x : -host c prog";
        let args: Vec<_> = args.split(' ').collect();
        assert_eq!(of_with("HYDRA build details:", &args), set(["a", "b", "c"]));
    }

    #[test]
    fn hosts_are_found_behind_every_option_of_hydra() {
        for before in [
            "-genv A=1",
            "-env A=1",
            "--verbose",
            "--prepend-rank",
            "--genvall",
            "-enable-hostname-propagation",
            "-hybrid-hosts",
            "-pmi_args 1 2 3 4",
            "-rankmap (vector,1)",
            "-order-nodes up",
        ] {
            let line = format!("{before} -hosts a,b prog -hosts x");
            let args: Vec<_> = line.split(' ').collect();
            assert_eq!(of_with("HYDRA build details:", &args), set(["a", "b"]));
        }
        for line in [
            "-hosts=a,b prog",
            "--HOSTS a,b prog",
            "-machinelist a,b prog",
        ] {
            let args: Vec<_> = line.split(' ').collect();
            assert_eq!(of_with("HYDRA build details:", &args), set(["a", "b"]));
        }
    }

    #[test]
    fn hosts_are_found_in_options_and_files_of_mpirun() {
        assert_eq!(of(&["-n", "2", "prog"]), set([]));
        // The program's own arguments do not count.
        let args = "--tag-output --mca a b --map-by node -H a prog --host x : -H b prog -H y";
        let args: Vec<_> = args.split(' ').collect();
        assert_eq!(of(&args), set(["a", "b"]));
        assert_eq!(of(&["-H", "a:2,me@b", "prog"]), set(["a", "b"]));
        assert_eq!(
            of(&["--host", "192.0.2.1:4,2001:db8::1,+n0"]),
            set(["192.0.2.1", "2001:db8::1"])
        );
        for host in ["--host=[2001:db8::1]:2", "-host=2001:db8::1"] {
            assert_eq!(of_with("(Open MPI) 5.0.11", &[host]), set(["2001:db8::1"]));
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        fs::write(path, "# all\na slots=2\n\n  b # not c\nme@d:3\n").unwrap();
        for option in ["-hostfile", "--machinefile", "--default-hostfile"] {
            assert_eq!(of(&[option, path]), set(["a", "b", "d"]), "{option}");
        }
        assert_eq!(of(&["--hostfile", "/no/such/file"]), set([]));
    }

    #[test]
    fn slurms_host_lists_are_expanded() {
        assert_eq!(
            of_slurm("a[1-3,07],b,c[09-11]x"),
            ["a1", "a2", "a3", "a07", "b", "c09x", "c10x", "c11x"]
        );
        assert_eq!(of_slurm("one"), ["one"]);
        assert!(of_slurm("a[1-").is_empty());
        assert_eq!(of_slurm("a[0-99999999]").len(), MOST);
    }

    #[test]
    fn only_hosts_that_are_not_peers_yet_are_added() {
        let with = |value: Option<&str>, hosts: &[&str]| {
            let mut settings = Settings::default();
            if let Some(value) = value {
                settings.set(PEERS, value);
            }
            make_peers(&mut settings, hosts.iter().map(ToString::to_string));
            settings.get(PEERS).map(ToOwned::to_owned)
        };
        assert_eq!(with(None, &["10.0.0.1", "127.0.0.1", "::1"]), None);
        assert_eq!(with(None, &["no.such.host.invalid"]), None);
        let told = with(None, &["192.0.2.7", "2001:db8::7"]).unwrap();
        assert!(told.starts_with("private,local,"), "{told}");
        for host in ["192.0.2.7", "2001:db8::7"] {
            assert!(told.split(',').any(|word| word == host), "{told}");
        }
        assert!(Config::from_vars([(PEERS.to_owned(), told)]).1.is_empty());
        let told = with(Some("10.0.0.0/8"), &["10.9.9.9", "192.0.2.7"]).unwrap();
        assert!(told.starts_with("10.0.0.0/8,"), "{told}");
        assert!(!told.contains("10.9.9.9"), "{told}");
        for as_wanted in ["none", "all"] {
            assert_eq!(with(Some(as_wanted), &["192.0.2.7"]).unwrap(), as_wanted);
        }
    }
}
