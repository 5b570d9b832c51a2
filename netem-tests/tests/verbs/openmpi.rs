//! Two ranks of Open MPI with the native component, one at each end of a line, whose flows go over queue pairs of soft RoCE.

use std::{
    fs,
    path::PathBuf,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use slim_lab::{
    Error,
    mpi::{Flavor, Mpi, component_arguments},
    skip::skip,
};

use super::{common::guest::is_guest, rxe, shell, succeeds, wait};

/// The ranks work for as long as there is this file.
const GOES_ON: &str = "/run/tmp/goes-on";
/// Far longer than the job takes to get to queue pairs, or to come back to them. The pauses between trials grow while the line is silent.
pub(super) const SOON: Duration = Duration::from_secs(60);

/// Each rank uses the adapter at its end of the line.
const OWN_ADAPTER: &str =
    r#"export OMPI_MCA_btl_slim_verbs_ports=rx$((OMPI_COMM_WORLD_RANK + 1)); exec "$0" "$@""#;

/// The component. It is built outside of the guest, which cannot write.
pub(super) fn component(mpi: &Mpi) -> slim_lab::Result<PathBuf> {
    match is_guest() {
        true => mpi.built_component(),
        false => mpi.component(),
    }
}

/// The component, and the program with data of many kinds.
fn built(mpi: &Mpi) -> slim_lab::Result<(PathBuf, PathBuf)> {
    Ok((component(mpi)?, mpi.build_program("slim_kinds.c")?))
}

/// Connected queue pairs in this kernel.
pub(super) fn queue_pairs() -> usize {
    let output = Command::new("rdma").args(["res", "show", "qp"]).output();
    let text = String::from_utf8(output.unwrap().stdout).unwrap();
    text.lines()
        .filter(|line| line.contains("type RC") && line.contains("state RTS"))
        .count()
}

/// What ranks say of their reads when they end.
#[derive(Debug, Default)]
struct Reads {
    done: u64,
    failed: u64,
}

impl Reads {
    fn of(text: &str) -> Self {
        let mut all = Reads::default();
        for line in text.lines() {
            let numbers = line.split_once("memory of peers: ").map(|(_, rest)| {
                let words = rest.split(|c: char| !c.is_ascii_digit());
                words
                    .filter_map(|word| word.parse().ok())
                    .collect::<Vec<u64>>()
            });
            if let Some([done, _bytes, failed]) = numbers.as_deref() {
                all.done += done;
                all.failed += failed;
            }
        }
        all
    }
}

/// Runs a job, and makes the line silent again and again: both queue pairs fail, and the flow gets new ones, at once or after some time on
/// TCP. All data must be right. Returns the long messages that the ranks have read.
fn survives_silences(test: &str, flavor: Flavor, kind: &str, arguments: &[&str]) -> Option<Reads> {
    let built = Mpi::find(flavor).and_then(|mpi| Ok((built(&mpi)?, mpi)));
    let ((component, program), mpi) = match built {
        Ok(built) => built,
        Err(error @ Error::Missing { .. }) => {
            skip(test, error);
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    let rxe = rxe(test)?;
    // Open MPI 4.1 does not start on a host without a name.
    shell("hostname guest");
    let mut mpirun = Command::new(mpi.mpirun());
    mpirun
        .args(["--allow-run-as-root", "--oversubscribe", "-np", "2"])
        .args(["--bind-to", "none", "--mca", "pml", "ob1"])
        .args(["--mca", "btl", "slim,self"])
        .args(["--mca", "btl_slim_if_include", "127.0.0.0/8"])
        .args(["--mca", "btl_slim_transports", "verbs,tcp"])
        .args(["--mca", "btl_slim_verbose", "1"])
        .args(arguments)
        .args(component_arguments(&mpi, &component))
        .args(["sh", "-c", OWN_ADAPTER])
        .arg(program)
        .args([kind, "1", GOES_ON])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    fs::write(GOES_ON, "").unwrap();
    let running = mpirun.spawn().unwrap();
    let both = || (queue_pairs() == 2).then_some(());
    wait("on queue pairs", SOON, both);
    for _ in 0..3 {
        // On a slow line a long message is on its way nearly all the time.
        rxe.line("delay 30ms");
        thread::sleep(Duration::from_millis(500));
        rxe.line("loss 100%");
        wait("both have failed", SOON, || {
            (queue_pairs() == 0).then_some(())
        });
        rxe.plain();
        let begun = Instant::now();
        wait("back on queue pairs", SOON, both);
        println!("back on queue pairs after {:?}", begun.elapsed());
    }
    fs::remove_file(GOES_ON).unwrap();
    let [out, err] = succeeds(running);
    assert!(out.contains("DONE"));
    Some(Reads::of(&err))
}

#[test]
fn a_job_of_open_mpi_4_survives_silences_on_queue_pairs() {
    let test = "openmpi::a_job_of_open_mpi_4_survives_silences_on_queue_pairs";
    survives_silences(test, Flavor::OpenMpi4, "sizes", &[]);
}

#[test]
fn a_job_of_open_mpi_5_survives_silences_on_queue_pairs() {
    let test = "openmpi::a_job_of_open_mpi_5_survives_silences_on_queue_pairs";
    survives_silences(test, Flavor::OpenMpi5Components, "sizes", &[]);
}

/// Long messages are read out of the sender's memory; those that are being read when the line goes silent are sent.
fn reads_long_messages(test: &str, flavor: Flavor) {
    let Some(reads) = survives_silences(test, flavor, "long", &[]) else {
        return;
    };
    assert!(reads.done >= 5, "{reads:?}");
    assert!(reads.failed >= 1, "{reads:?}");
}

#[test]
fn a_job_of_open_mpi_4_reads_long_messages() {
    let test = "openmpi::a_job_of_open_mpi_4_reads_long_messages";
    reads_long_messages(test, Flavor::OpenMpi4);
}

#[test]
fn a_job_of_open_mpi_5_reads_long_messages() {
    let test = "openmpi::a_job_of_open_mpi_5_reads_long_messages";
    reads_long_messages(test, Flavor::OpenMpi5Components);
}

#[test]
fn a_job_without_reads_sends_long_messages() {
    let test = "openmpi::a_job_without_reads_sends_long_messages";
    let off = ["--mca", "btl_slim_verbs_get_size", "0"];
    if let Some(reads) = survives_silences(test, Flavor::OpenMpi4, "long", &off) {
        assert_eq!((reads.done, reads.failed), (0, 0));
    }
}
