//! Jobs with spawned processes that Open MPI itself hangs.

use std::fs;

use slim_lab::{
    Lab,
    mpi::{Job, JobVerdict, Outcome},
    standstill,
};

/// Makes libevent in `mpirun` use `poll`. With epoll, `mpirun` of 4.1.4 sometimes misses a spawned process (docs/OPENMPI.md).
pub fn with_poll(job: Job<'_>) -> Job<'_> {
    job.env("EVENT_NOEPOLL", "1")
}

/// The number of jobs of one test that Open MPI may hang.
const LIMIT: usize = 3;

/// Counts the jobs of one test that Open MPI itself has hung: `mpirun` of 4.1.4 sometimes leaves the first request of a spawned process
/// unread, with `btl/tcp` as well (docs/OPENMPI.md).
#[derive(Debug, Default)]
pub struct LauncherHangs(usize);

impl LauncherHangs {
    /// Runs a job of `program`, and a new one in place of one that Open MPI itself has hung: that one says nothing about SLIM.
    pub fn replace<T>(
        &mut self,
        program: &str,
        run: impl Fn() -> (Lab, Outcome, T),
    ) -> (Lab, Outcome, T) {
        loop {
            let job = run();
            if self.0 == LIMIT || !waits_for_launcher(&job.0, &job.1, program) {
                return job;
            }
            self.0 += 1;
            println!(
                "mpirun left a spawned process in PMIx_Init: a hang of Open MPI's own, not counted"
            );
        }
    }
}

fn waits_for_launcher(lab: &Lab, outcome: &Outcome, program: &str) -> bool {
    let hung = matches!(outcome.verdict(), JobVerdict::Hung);
    let record = fs::read_to_string(lab.dir().join(standstill::FILE));
    hung && record.is_ok_and(|record| standstill::waits_for_launcher(&record, program))
}
