//! Open MPI: what its launchers are like, and its parameters (MCA), which the native component and the time budgets ask for.

use std::env;
use std::ffi::OsString;

use super::entry::{AgentChoice, MpiEntry, OpenMpi, RankVariables};
use super::line::{OptionRole, Syntax};

/// Open MPI 4.
pub const OPEN_MPI_4: MpiEntry = MpiEntry {
    name: "Open MPI 4",
    programs: &[],
    // It calls itself OpenRTE unless it is started under the name mpirun.
    marks: &["(Open MPI)", "(OpenRTE)"],
    majors: &[4],
    open_mpi: Some(OpenMpi::V4),
    syntax: Syntax {
        options: OPTIONS_4,
        ignores_case: false,
        abbreviates: false,
        has_letters: false,
        has_plugins: false,
    },
    variables: RankVariables::ByOption("-x", OptionRole::Export),
    agent: Some(AgentChoice {
        parameters: &["plm_rsh_agent", "orte_rsh_agent", "pls_rsh_agent"],
        variables: &[
            "OMPI_MCA_plm_rsh_agent",
            "OMPI_MCA_orte_rsh_agent",
            "OMPI_MCA_pls_rsh_agent",
        ],
        files: Some((".openmpi/mca-params.conf", "openmpi-mca-params.conf")),
        starters: None,
        is_one_word: false,
        default: "ssh : rsh",
    }),
    host_files: HOST_FILES,
    option_file: None,
};

/// Open MPI 5.
pub const OPEN_MPI_5: MpiEntry = MpiEntry {
    name: "Open MPI 5",
    majors: &[5],
    open_mpi: Some(OpenMpi::V5),
    syntax: Syntax {
        options: OPTIONS_5,
        ignores_case: false,
        abbreviates: true,
        has_letters: false,
        has_plugins: false,
    },
    agent: Some(AgentChoice {
        parameters: &["plm_ssh_agent", "plm_rsh_agent"],
        variables: &["PRTE_MCA_plm_ssh_agent"],
        files: Some((".prte/mca-params.conf", "prte-mca-params.conf")),
        starters: None,
        is_one_word: false,
        default: "ssh : rsh",
    }),
    ..OPEN_MPI_4
};

/// `prterun`, the launcher of Open MPI 5 under its own name.
pub const PRRTE: MpiEntry = MpiEntry {
    name: "PRRTE",
    marks: &["(PRRTE)"],
    majors: &[],
    ..OPEN_MPI_5
};

/// `prte`, which starts the daemons of a virtual machine (DVM), and no ranks.
pub const PRRTE_DVM: MpiEntry = MpiEntry {
    name: "PRRTE's prte",
    programs: &["prte"],
    open_mpi: None,
    variables: RankVariables::FromEnvironment,
    ..PRRTE
};

/// `prun`, which starts ranks on such a machine, and no daemons.
pub const PRRTE_RUN: MpiEntry = MpiEntry {
    name: "PRRTE's prun",
    programs: &["prun"],
    open_mpi: None,
    agent: None,
    ..PRRTE
};

const HOST_FILES: &[&str] = &[
    "OMPI_MCA_orte_default_hostfile",
    "PRTE_MCA_prte_default_hostfile",
];

/// A row of a table of options.
type OptionRow = (OptionRole, &'static [&'static str]);

const HOSTS: OptionRow = (OptionRole::Hosts, &["H", "host"]);
const LISTS_OF_HOSTS: OptionRow = (
    OptionRole::HostFile,
    &["hostfile", "machinefile", "default-hostfile"],
);

/// The options of `mpirun` 4.1.
const OPTIONS_4: &[OptionRow] = &[
    (OptionRole::Export, &["x"]),
    (OptionRole::Parameter, &["mca", "gmca"]),
    HOSTS,
    LISTS_OF_HOSTS,
    (
        OptionRole::Values(1),
        &[
            "am",
            "app",
            "bind-to",
            "c",
            "cartofile",
            "cf",
            "cpu-list",
            "cpu-set",
            "cpus-per-proc",
            "cpus-per-rank",
            "debugger",
            "h",
            "help",
            "hnp",
            "launch-agent",
            "map-by",
            "max-restarts",
            "max-vm-size",
            "N",
            "n",
            "np",
            "npernode",
            "npersocket",
            "ompi-server",
            "output-filename",
            "path",
            "personality",
            "ppr",
            "prefix",
            "preload-files",
            "rank-by",
            "rankfile",
            "report-events",
            "report-pid",
            "report-uri",
            "rf",
            "stdin",
            "timeout",
            "tune",
            "wd",
            "wdir",
            "xml-file",
            "xterm",
        ],
    ),
    (
        OptionRole::Flag,
        &[
            "allow-run-as-root",
            "bind-to-core",
            "bind-to-socket",
            "bycore",
            "bynode",
            "byslot",
            "continuous",
            "d",
            "debug",
            "debug-daemons",
            "debug-daemons-file",
            "debug-devel",
            "disable-recovery",
            "display-allocation",
            "display-devel-allocation",
            "display-devel-map",
            "display-diffable-map",
            "display-map",
            "display-topo",
            "do-not-launch",
            "do-not-resolve",
            "dvm",
            "enable-instant-on-support",
            "enable-recovery",
            "fwd-mpirun-port",
            "get-stack-traces",
            "index-argv-by-rank",
            "leave-session-attached",
            "merge-stderr-to-stdout",
            "nolocal",
            "nooversubscribe",
            "noprefix",
            "novm",
            "output-proctable",
            "oversubscribe",
            "pernode",
            "preload-binary",
            "q",
            "quiet",
            "report-bindings",
            "report-child-jobs-separately",
            "report-state-on-timeout",
            "s",
            "set-cwd-to-session-dir",
            "show-progress",
            "tag-output",
            "timestamp-output",
            "tv",
            "use-hwthread-cpus",
            "use-regexp",
            "v",
            "verbose",
            "V",
            "version",
            "xml",
        ],
    ),
];

/// The options of `mpirun` 5.0, and of `prterun`, `prte` and `prun` 3.
const OPTIONS_5: &[OptionRow] = &[
    (OptionRole::Export, &["x", "set-env"]),
    (
        OptionRole::Parameter,
        &[
            "mca", "gmca", "omca", "gomca", "prtemca", "pmixmca", "gpmixmca",
        ],
    ),
    HOSTS,
    LISTS_OF_HOSTS,
    (
        OptionRole::Values(1),
        &[
            "am",
            "amca",
            "app",
            "app-prefix",
            "arch",
            "bind-to",
            "bindto",
            "c",
            "cpu-list",
            "cpu-set",
            "cpus-per-proc",
            "cpus-per-rank",
            "display",
            "display-topo",
            "dvm",
            "dvm-uri",
            "exec-agent",
            "file",
            "forward-signals",
            "gpu-support",
            "initial-errhandler",
            "keepalive",
            "launch-agent",
            "map-by",
            "mapby",
            "max-restarts",
            "max-vm-size",
            "memory-alloc-kinds",
            "n",
            "N",
            "namespace",
            "np",
            "npernode",
            "npersocket",
            "num-connect-retries",
            "output",
            "output-directory",
            "output-filename",
            "path",
            "personality",
            "pid",
            "pmix-prefix",
            "ppr",
            "prefix",
            "preload-files",
            "pset",
            "rank-by",
            "rankby",
            "rankfile",
            "report-pid",
            "report-uri",
            "rtos",
            "runtime-options",
            "singleton",
            "spawn-timeout",
            "stdin",
            "stream-buffering",
            "timeout",
            "tmpdir",
            "tune",
            "unset-env",
            "wait-to-connect",
            "wd",
            "wdir",
            "with-ft",
            "xterm",
        ],
    ),
    (OptionRole::Values(2), &["prepend-env", "append-env"]),
    (
        OptionRole::Flag,
        &[
            "allow-run-as-root",
            "bind-to-core",
            "bycore",
            "bynode",
            "byslot",
            "continuous",
            "daemonize",
            "debug",
            "debug-daemons",
            "debug-daemons-file",
            "disable-recovery",
            "display-allocation",
            "display-comm",
            "display-comm-finalize",
            "display-devel-allocation",
            "display-devel-map",
            "display-map",
            "do-not-connect",
            "do-not-launch",
            "enable-recovery",
            "fwd-environment",
            "get-stack-traces",
            "h",
            "help",
            "hetero-nodes",
            "homo-nodes",
            "leave-session-attached",
            "merge-stderr-to-stdout",
            "no-aggregate-help",
            "no-app-prefix",
            "no-ready-msg",
            "nolocal",
            "nooversubscribe",
            "noprefix",
            "output-proctable",
            "oversubscribe",
            "p",
            "parsable",
            "parseable",
            "pernode",
            "preload-binary",
            "report-bindings",
            "report-child-jobs-separately",
            "report-state-on-timeout",
            "s",
            "set-cwd-to-session-dir",
            "set-sid",
            "show-progress",
            "soft",
            "stop-in-app",
            "stop-in-init",
            "stop-on-exec",
            "system-server",
            "system-server-first",
            "system-server-only",
            "tag-output",
            "timestamp-output",
            "use-hwthread-cpus",
            "v",
            "verbose",
            "V",
            "version",
            "xml",
        ],
    ),
];

/// Options of `mpirun` that set a parameter of MPI.
const MCA: [&str; 5] = ["--mca", "-mca", "--gmca", "-gmca", "--omca"];

/// The value of a parameter, if the user sets it on the command line of `mpirun` or in the environment.
pub fn parameter(args: &[OsString], name: &str) -> Option<String> {
    let in_env = || env::var_os(format!("OMPI_MCA_{name}"));
    on_line(args, name).or_else(|| Some(in_env()?.to_string_lossy().into_owned()))
}

/// The last value on the command line.
pub(super) fn on_line(args: &[OsString], name: &str) -> Option<String> {
    let mut set = args.windows(3).filter(|three| {
        let option = three[0].to_str().is_some_and(|word| MCA.contains(&word));
        option && three[1] == name
    });
    let last = set.next_back()?;
    Some(last[2].to_string_lossy().into_owned())
}
