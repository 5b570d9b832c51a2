//! MPICH's launcher, hydra (4.0 to 5.0).
//!
//! It takes any number of dashes before an option, and no difference between capital and small letters; `-OPTION=VALUE` is the same
//! as `-OPTION VALUE`.

use super::entry::{AgentChoice, BatchSystem, MpiEntry, OptionFile, RankVariables, Starters};
use super::line::{OptionRole, Syntax};

/// Its entry in the table.
pub const MPICH: MpiEntry = MpiEntry {
    name: "MPICH",
    programs: &[],
    marks: &["HYDRA build details:"],
    majors: &[],
    open_mpi: None,
    syntax: Syntax {
        options: OPTIONS,
        ignores_case: true,
        abbreviates: false,
        has_letters: false,
        has_plugins: false,
    },
    variables: RankVariables::ByOption("-genv", OptionRole::Assign),
    agent: Some(AgentChoice {
        parameters: &[],
        variables: &["HYDRA_LAUNCHER_EXEC", "HYDRA_BOOTSTRAP_EXEC"],
        files: None,
        starters: Some(Starters {
            variables: &["HYDRA_LAUNCHER", "HYDRA_BOOTSTRAP"],
            by_agent: &["ssh", "rsh"],
            manager: "HYDRA_RMK",
            batch: BATCH,
        }),
        is_one_word: true,
        default: "ssh",
    }),
    host_files: &["HYDRA_HOST_FILE"],
    option_file: Some(OptionFile {
        variable: "HYDRA_CONFIG_FILE",
        user: ".mpiexec.hydra.conf",
        system: "/mpiexec.hydra.conf",
        agent: "-launcher-exec",
    }),
};

const OPTIONS: &[(OptionRole, &[&str])] = &[
    (OptionRole::Assign, &["genv", "env"]),
    (OptionRole::Agent, &["launcher-exec", "bootstrap-exec"]),
    (OptionRole::Starter, &["launcher", "bootstrap"]),
    (OptionRole::Manager, &["rmk"]),
    (
        OptionRole::Hosts,
        &[
            "host",
            "hosts",
            "hostlist",
            "machine",
            "machines",
            "machinelist",
        ],
    ),
    (OptionRole::HostFile, &["f", "hostfile", "machinefile"]),
    (OptionRole::OptionFile, &["configfile"]),
    (
        OptionRole::Values(1),
        &[
            "bind-to",
            "binding",
            "demux",
            "envlist",
            "errfile",
            "errfile-pattern",
            "g",
            "genvlist",
            "gpu-subdevs-per-proc",
            "gpus-per-proc",
            "iface",
            "localhost",
            "map-by",
            "membind",
            "memory-alloc-kinds",
            "n",
            "nameserver",
            "np",
            "order-nodes",
            "outfile",
            "outfile-pattern",
            "output-from",
            "ppn",
            "prepend-pattern",
            "rankmap",
            "topolib",
            "usize",
            "wdir",
        ],
    ),
    (OptionRole::Values(4), &["pmi_args"]),
    (
        OptionRole::Flag,
        &[
            "debug",
            "disable-auto-cleanup",
            "disable-hostname-propagation",
            "disable-x",
            "enable-auto-cleanup",
            "enable-hostname-propagation",
            "enable-x",
            "envall",
            "envnone",
            "genvall",
            "genvnone",
            "h",
            "help",
            "hybrid-hosts",
            "info",
            "l",
            "pmi-port",
            "prepend-rank",
            "print-all-exitcodes",
            "profile",
            "report-bindings",
            "skip-launch-node",
            "v",
            "verbose",
            "version",
        ],
    ),
];

/// The batch systems that start daemons themselves. Hydra uses the hosts of PBS and Cobalt, but starts daemons on them by ssh.
const BATCH: &[BatchSystem] = &[
    BatchSystem {
        name: "slurm",
        needs: &[
            &["SLURM_JOB_NODELIST", "SLURM_NODELIST"],
            &["SLURM_JOB_NUM_NODES", "SLURM_NNODES"],
            &["SLURM_TASKS_PER_NODE"],
        ],
    },
    BatchSystem {
        name: "ll",
        needs: &[&["LOADL_HOSTFILE"], &["MP_CHILD"]],
    },
    BatchSystem {
        name: "lsf",
        needs: &[&["LSF_BINDIR"], &["LSB_MCPU_HOSTS"]],
    },
    BatchSystem {
        name: "sge",
        needs: &[&["SGE_ROOT"], &["ARC"], &["PE_HOSTFILE"]],
    },
];
