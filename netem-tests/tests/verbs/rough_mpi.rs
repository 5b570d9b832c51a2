//! Rough treatment of jobs of Open MPI whose flows go over queue pairs of soft RoCE.

use std::{
    fs,
    path::PathBuf,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use slim_lab::{
    mpi::{Flavor, Mpi, component_arguments},
    skip::skip,
};

use super::{
    openmpi::{SOON, component, queue_pairs},
    rxe, shell, wait,
};

const GOES_ON: &str = "/run/tmp/goes-on";
struct JobOf {
    mpi: Mpi,
    component: PathBuf,
    program: PathBuf,
}

impl JobOf {
    fn new(test: &str, flavor: Flavor, program: &str) -> Option<Self> {
        let found = Mpi::find(flavor).and_then(|mpi| {
            let built = (component(&mpi)?, mpi.build_program(program)?);
            Ok((built, mpi))
        });
        match found {
            Ok(((component, program), mpi)) => Some(JobOf {
                mpi,
                component,
                program,
            }),
            Err(e) => {
                skip(test, e);
                None
            }
        }
    }

    fn start(&self, ranks: usize, before: &str, options: &[&str], arguments: &[&str]) -> Child {
        let mut mpirun = Command::new("sh");
        let ranks = ranks.to_string();
        mpirun
            .args(["-c", &format!("{before} exec \"$0\" \"$@\"")])
            .arg(self.mpi.mpirun())
            .args(["--allow-run-as-root", "--oversubscribe", "-np", &ranks])
            .args(["--bind-to", "none", "--mca", "pml", "ob1"])
            .args(["--mca", "btl", "slim,self"])
            .args(["--mca", "btl_slim_if_include", "127.0.0.0/8"])
            .args(options)
            .args(component_arguments(&self.mpi, &self.component))
            .arg(&self.program)
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        mpirun.spawn().unwrap()
    }
}

fn end(child: Child) -> (bool, String) {
    let output = child.wait_with_output().unwrap();
    let text =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    (output.status.success(), text.concat())
}

const VERBS: [&str; 3] = ["--mca", "btl_slim_transports", "verbs,tcp"];

/// Four ranks, all ports, links that go down and up, silences.
fn four_ranks(test: &str, flavor: Flavor, what: &str) {
    let Some(job) = JobOf::new(test, flavor, "slim_kinds.c") else {
        return;
    };
    let Some(rxe) = rxe(test) else {
        return;
    };
    shell("hostname guest");
    fs::write(GOES_ON, "").unwrap();
    let running = job.start(4, "", &VERBS, &[what, "1", GOES_ON]);
    let begun = Instant::now();
    wait("on queue pairs", SOON, || {
        (queue_pairs() >= 6).then_some(())
    });
    println!("{} queue pairs after {:?}", queue_pairs(), begun.elapsed());
    thread::sleep(Duration::from_secs(3));
    println!("{} queue pairs", queue_pairs());
    for n in 0..2 {
        rxe.down(n % 2);
        thread::sleep(Duration::from_millis(1500));
        rxe.up(n % 2);
        thread::sleep(Duration::from_millis(1500));
        println!("{n}: {} queue pairs", queue_pairs());
        // The launcher of Open MPI 4.1 ends the job if its own connections to the ranks are killed.
        if flavor == Flavor::OpenMpi5Components {
            shell("ss -KHtn src 127.0.0.1 >/dev/null || true");
        }
    }
    fs::remove_file(GOES_ON).unwrap();
    let (good, text) = end(running);
    println!("{text}");
    assert!(good && text.contains("DONE"));
}

#[test]
fn four_ranks_of_open_mpi_4() {
    four_ranks(
        "rough_mpi::four_ranks_of_open_mpi_4",
        Flavor::OpenMpi4,
        "sizes",
    );
}

#[test]
fn four_ranks_of_open_mpi_5() {
    four_ranks(
        "rough_mpi::four_ranks_of_open_mpi_5",
        Flavor::OpenMpi5Components,
        "sizes",
    );
}

#[test]
fn threads_of_open_mpi_5() {
    four_ranks(
        "rough_mpi::threads_of_open_mpi_5",
        Flavor::OpenMpi5Components,
        "threads",
    );
}

/// So little memory may be locked that there are no queue pairs: one line says so, and messages go over TCP.
#[test]
fn little_memory_may_be_locked() {
    let test = "rough_mpi::little_memory_may_be_locked";
    let Some(job) = JobOf::new(test, Flavor::OpenMpi5Components, "slim_kinds.c") else {
        return;
    };
    let Some(_rxe) = rxe(test) else {
        return;
    };
    shell("hostname guest");
    // With 64 KiB, there is a queue for datagrams.
    for limit in ["0", "64"] {
        let limited = format!(
            r#"exec setpriv --bounding-set -ipc_lock sh -c 'ulimit -l {limit}; exec "$0" "$@"' "$0" "$@";"#
        );
        let (good, text) = end(job.start(2, &limited, &VERBS, &["sizes", "2"]));
        println!("{limit} KiB:\n{text}");
        assert!(good && text.contains("DONE"));
        let told = text.matches("messages go over TCP only").count();
        assert_eq!(told, 2, "one line of each rank");
    }
}

/// A name that no port has is told, and does not keep the others from being used.
#[test]
fn a_port_that_is_missing_is_told() {
    let test = "rough_mpi::a_port_that_is_missing_is_told";
    let Some(job) = JobOf::new(test, Flavor::OpenMpi5Components, "slim_kinds.c") else {
        return;
    };
    let Some(_rxe) = rxe(test) else {
        return;
    };
    shell("hostname guest");
    fs::write(GOES_ON, "").unwrap();
    let named = "export OMPI_MCA_btl_slim_verbs_ports=rx1,rx2,rx9;";
    let running = job.start(2, named, &VERBS, &["sizes", "1", GOES_ON]);
    wait("on queue pairs", SOON, || {
        (queue_pairs() >= 2).then_some(())
    });
    fs::remove_file(GOES_ON).unwrap();
    let (good, text) = end(running);
    println!("{text}");
    assert!(good && text.contains("DONE"));
    let told = |line: &&str| line.contains("rx9") && line.ends_with("; other ports are used");
    assert_eq!(
        text.lines().filter(told).count(),
        2,
        "one line of each rank"
    );
}

/// Two jobs at once on the same adapters.
#[test]
fn two_jobs_at_once() {
    let test = "rough_mpi::two_jobs_at_once";
    let Some(job) = JobOf::new(test, Flavor::OpenMpi5Components, "slim_kinds.c") else {
        return;
    };
    let Some(rxe) = rxe(test) else {
        return;
    };
    shell("hostname guest");
    let first = job.start(2, "", &VERBS, &["sizes", "9"]);
    let second = job.start(3, "", &VERBS, &["sizes", "9"]);
    for _ in 0..2 {
        thread::sleep(Duration::from_secs(3));
        println!("{} queue pairs", queue_pairs());
        rxe.line("loss 100%");
        thread::sleep(Duration::from_secs(1));
        rxe.plain();
    }
    for job in [first, second] {
        let (good, text) = end(job);
        println!("{text}");
        assert!(good && text.contains("DONE"));
    }
    println!("{} queue pairs", queue_pairs());
}
