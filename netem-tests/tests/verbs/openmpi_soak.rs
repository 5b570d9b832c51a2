//! Jobs of Open MPI whose queue pairs are killed at random moments, in each of several ways. All bytes must be right, the job must end well, and its flows
//! must be on queue pairs before and after each kill. `SLIM_SOAK=1`: fifty jobs of each Open MPI.

use std::{
    collections::BTreeSet,
    fmt, fs,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    path::PathBuf,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use slim_lab::{
    Netns,
    faults::{
        destroy::{self, Selector},
        diag, roce,
    },
    mpi::{Flavor, Mpi, component_arguments},
    skip::skip,
};

use super::{
    common::{
        rxe::{DEVICES, Rxe, shell},
        soak,
    },
    openmpi::{SOON, component},
    rxe,
};

const MS: Duration = Duration::from_millis(1);
/// How often the state of a job is looked at.
const TICK: Duration = Duration::from_millis(20);
/// The ranks work for as long as there is this file.
const GOES_ON: &str = "/run/tmp/goes-on";
const LOG: &str = "/run/tmp/job.log";
/// How long a packet is forged until the adapter takes it.
const FORGING: Duration = Duration::from_secs(5);
/// Kills in each job.
const KILLS: usize = 2;
const RANK: &str = "slim_kinds";
/// The ranks use the adapters by turns.
const BY_TURNS: &str =
    r#"export OMPI_MCA_btl_slim_verbs_ports=rx$((OMPI_COMM_WORLD_RANK % 2 + 1)); exec "$0" "$@""#;

/// What kills queue pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PairKiller {
    /// A forged packet makes both ends fail.
    Forged,
    /// The same, while the adapter of one side is being deleted. It is added again after the job.
    Deleted,
    /// The link of one side goes down, and comes up.
    Link,
    Silence,
    /// Silence, and TCP connections are killed until the flows are back.
    SilenceAndTcp,
}

impl PairKiller {
    /// Those of which the short version takes the first.
    const ALL: [Self; 5] = [
        Self::Forged,
        Self::Deleted,
        Self::Link,
        Self::Silence,
        Self::SilenceAndTcp,
    ];
}

impl fmt::Display for PairKiller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Forged => "queue pair fails, by a forged packet",
            Self::Deleted => "adapter deleted, queue pair fails",
            Self::Link => "link down and up",
            Self::Silence => "silence",
            Self::SilenceAndTcp => "silence, TCP connections killed",
        })
    }
}

/// The jobs of one kind.
#[derive(Default)]
struct KillTally {
    jobs: usize,
    right: usize,
    /// Queue pairs that kills have ended.
    killed: usize,
    /// From the end of a kill until all flows were back.
    back: Vec<Duration>,
}

struct SoakJobs<'a> {
    mpi: Mpi,
    component: PathBuf,
    program: PathBuf,
    rxe: &'a Rxe,
    net: Netns,
}

/// A job under way.
struct SoakJob<'a> {
    jobs: &'a SoakJobs<'a>,
    killer: PairKiller,
    mpirun: Child,
    random: fastrand::Rng,
    deletion: Option<(Child, usize)>,
}

type Pairs = BTreeSet<(String, u32)>;

impl SoakJobs<'_> {
    fn start(&self, ranks: usize, what: &str) -> Child {
        fs::write(GOES_ON, "").unwrap();
        let log = fs::File::create(LOG).unwrap();
        let mut mpirun = Command::new(self.mpi.mpirun());
        mpirun
            .args(["--allow-run-as-root", "--oversubscribe", "-np"])
            .arg(ranks.to_string())
            .args(["--bind-to", "none", "--mca", "pml", "ob1"])
            .args(["--mca", "btl", "slim,self"])
            .args(["--mca", "btl_slim_if_include", "127.0.0.0/8"])
            .args(["--mca", "btl_slim_transports", "verbs,tcp"])
            .args(component_arguments(&self.mpi, &self.component))
            .args(["sh", "-c", BY_TURNS])
            .arg(&self.program)
            .args([what, "1", GOES_ON])
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        mpirun.spawn().unwrap()
    }

    /// The working queue pairs, with their adapters. Those of an adapter that is being deleted are not among them.
    fn pairs(&self) -> Pairs {
        let all = roce::working_pairs(&self.net).unwrap();
        all.into_iter()
            .map(|pair| (pair.device, pair.number))
            .collect()
    }

    /// Kills the connections between ranks. The launcher of Open MPI 4.1 ends the job if its own connections to the ranks are killed.
    fn kill_tcp(&self) {
        if self.mpi.flavor() == Flavor::OpenMpi5Components {
            return shell("ss -KHtn src 127.0.0.1 > /dev/null || true");
        }
        let pick = Selector::between_hosts().and_local().process(RANK);
        let all = destroy::list(&self.net, &pick).unwrap();
        let between = all.iter().filter(|one| {
            let ends = (one.remote, one.local);
            all.iter().any(|other| (other.local, other.remote) == ends)
        });
        let between: Vec<_> = between.cloned().collect();
        diag::destroy(&self.net, &between).unwrap();
    }
}

impl SoakJob<'_> {
    fn until<T>(&mut self, what: &str, mut found: impl FnMut(&SoakJobs<'_>) -> Option<T>) -> T {
        let begun = Instant::now();
        loop {
            if let Some(found) = found(self.jobs) {
                return found;
            }
            assert!(begun.elapsed() < SOON, "{what}: not after {SOON:?}");
            let status = self.mpirun.try_wait().unwrap();
            assert!(status.is_none(), "{what}: the job has ended: {status:?}");
            thread::sleep(TICK);
        }
    }

    /// Waits for a random time, up to this one.
    fn rest(&mut self, most: Duration) {
        thread::sleep(most.mul_f64(self.random.f64()));
    }

    /// Kills queue pairs. Returns how many, and how long the return took.
    fn kill_some(&mut self) -> (usize, Duration) {
        self.rest(500 * MS);
        if self.killer == PairKiller::Deleted && self.deletion.is_none() {
            self.delete();
        }
        let before = self.jobs.pairs();
        assert!(!before.is_empty(), "on queue pairs");
        let rxe = self.jobs.rxe;
        let all_are_back = |before: &Pairs| {
            let wanted = before.len();
            let old = before.clone();
            move |jobs: &SoakJobs<'_>| {
                let now = jobs.pairs();
                let killed = old.difference(&now).count();
                (killed > 0 && now.len() >= wanted).then_some(killed)
            }
        };
        let some_are_gone = |before: &Pairs| {
            let old = before.clone();
            move |jobs: &SoakJobs<'_>| (!old.is_subset(&jobs.pairs())).then_some(())
        };
        match self.killer {
            PairKiller::Forged | PairKiller::Deleted => self.forge(),
            PairKiller::Link => {
                let side = self.random.usize(0..2);
                rxe.down(side);
                self.until("failed", some_are_gone(&before));
                self.rest(1000 * MS);
                rxe.up(side);
            }
            PairKiller::Silence | PairKiller::SilenceAndTcp => {
                rxe.line("loss 100%");
                self.until("failed", some_are_gone(&before));
                if self.killer == PairKiller::SilenceAndTcp {
                    for _ in 0..self.random.usize(1..6) {
                        self.jobs.kill_tcp();
                        self.rest(300 * MS);
                    }
                } else {
                    self.rest(1500 * MS);
                }
                rxe.plain();
            }
        }
        let begun = Instant::now();
        let killed = if self.killer == PairKiller::SilenceAndTcp {
            let back = all_are_back(&before);
            let mut random = self.random.fork();
            self.until("back on queue pairs", |jobs| {
                jobs.kill_tcp();
                thread::sleep(random.u32(0..300) * MS);
                back(jobs)
            })
        } else {
            self.until("back on queue pairs", all_are_back(&before))
        };
        (killed, begun.elapsed())
    }

    /// Deletes an adapter. The kernel waits until the ranks have closed it.
    fn delete(&mut self) {
        let side = self.random.usize(0..2);
        let words = ["link", "delete", DEVICES[side]];
        let child = Command::new("rdma").args(words).spawn().unwrap();
        self.deletion = Some((child, side));
        self.until("being deleted", |jobs| {
            let gone = |pairs: Pairs| pairs.iter().all(|(device, _)| device != DEVICES[side]);
            gone(jobs.pairs()).then_some(())
        });
    }

    /// Makes a queue pair, and its peer, fail.
    fn forge(&mut self) {
        let net = self.jobs.net.clone();
        let mut all = roce::working_pairs(&net).unwrap();
        // Packets within an adapter do not pass the line.
        let numbers = |device: &str| -> BTreeSet<u32> {
            let of = all.iter().filter(|pair| pair.device == device);
            of.map(|pair| pair.number).collect()
        };
        let of_device = DEVICES.map(numbers);
        if self.deletion.is_none() {
            all.retain(|pair| {
                let other = usize::from(pair.device == DEVICES[0]);
                of_device[other].contains(&pair.peer)
            });
        }
        self.random.shuffle(&mut all);
        let interface = |device: &str| if device == DEVICES[0] { "v1" } else { "v2" };
        for pair in all {
            let broken = roce::break_pair(&net, interface(&pair.device), &pair, FORGING).unwrap();
            println!("    {broken}");
            if broken.accepted {
                return;
            }
        }
        panic!("no queue pair can be killed");
    }

    /// The job comes to its end.
    fn end(&mut self) {
        fs::remove_file(GOES_ON).unwrap();
        let begun = Instant::now();
        let status = loop {
            if let Some(status) = self.mpirun.try_wait().unwrap() {
                break status;
            }
            assert!(begun.elapsed() < SOON, "the job does not end");
            thread::sleep(TICK);
        };
        let text = fs::read_to_string(LOG).unwrap();
        let right = text.contains("DONE") && text.contains(" errs=0 ");
        assert!(status.success() && right, "{status:?}");
    }

    /// Puts right what is left.
    fn clean(mut self) {
        if self.mpirun.try_wait().unwrap().is_none() {
            // The launcher ends the ranks.
            let pid = Pid::from_raw(self.mpirun.id().cast_signed());
            kill(pid, Signal::SIGTERM).unwrap();
            self.mpirun.wait().unwrap();
        }
        if let Some((mut child, side)) = self.deletion.take() {
            assert!(child.wait().unwrap().success());
            self.jobs.rxe.add(side);
        }
        self.jobs.rxe.heal();
    }
}

fn one(job: &mut SoakJob<'_>, ranks: usize, tally: &mut KillTally) {
    let begun = Instant::now();
    // Of four ranks, some flows may take longer.
    let enough = if ranks == 2 { 2 } else { 6 };
    job.until("on queue pairs", |jobs| {
        (jobs.pairs().len() >= enough).then_some(())
    });
    let started = begun.elapsed();
    for _ in 0..KILLS {
        let (killed, back) = job.kill_some();
        println!("    {killed} queue pairs killed, back after {back:.2?}");
        tally.killed += killed;
        tally.back.push(back);
    }
    job.end();
    println!(
        "    on queue pairs after {started:.1?}, ended after {:.1?}",
        begun.elapsed()
    );
}

fn soak_jobs(test: &str, flavor: Flavor, few: usize) {
    let built = Mpi::find(flavor).and_then(|mpi| {
        let program = mpi.build_program("slim_kinds.c")?;
        Ok((component(&mpi)?, program, mpi))
    });
    let (component, program, mpi) = match built {
        Ok(built) => built,
        Err(error) => return skip(test, error),
    };
    let Some(rxe) = rxe(test) else {
        return;
    };
    // Open MPI 4.1 does not start on a host without a name.
    shell("hostname guest");
    let jobs = SoakJobs {
        mpi,
        component,
        program,
        rxe: &rxe,
        net: Netns::current().unwrap(),
    };
    let seed = std::env::var("SLIM_LAB_SEED").map_or(1, |seed| seed.parse::<u64>().unwrap());
    let count = if soak() { 50 } else { few };
    let kinds = PairKiller::ALL.len();
    let mut tallies = [(); 5].map(|()| KillTally::default());
    let mut first_wrong = None;
    for n in 0..count {
        let killer = PairKiller::ALL[n % kinds];
        let (ranks, what) = match n / kinds % 3 {
            0 => (2, "sizes"),
            1 => (4, "sizes"),
            _ => (2, "threads"),
        };
        let seed = seed * 1000 + n as u64;
        println!("{n}: {killer}; {ranks} ranks, {what}");
        let mut job = SoakJob {
            jobs: &jobs,
            killer,
            mpirun: jobs.start(ranks, what),
            random: fastrand::Rng::with_seed(seed),
            deletion: None,
        };
        let tally = &mut tallies[n % kinds];
        tally.jobs += 1;
        match catch_unwind(AssertUnwindSafe(|| one(&mut job, ranks, tally))) {
            Ok(()) => tally.right += 1,
            Err(why) => {
                let text = fs::read_to_string(LOG).unwrap();
                println!("{n}: wrong (seed {seed})\n{text}");
                first_wrong.get_or_insert(why);
            }
        }
        job.clean();
    }
    println!(
        "| {flavor}: what kills | jobs | right | queue pairs killed | back after s: median (largest) |"
    );
    for (killer, tally) in PairKiller::ALL.iter().zip(&mut tallies) {
        let KillTally {
            jobs,
            right,
            killed,
            back,
        } = tally;
        if *jobs == 0 {
            continue;
        }
        back.sort();
        let seconds = |at: usize| back.get(at).map_or(0.0, Duration::as_secs_f64);
        let [median, most] = [back.len() / 2, back.len().saturating_sub(1)].map(seconds);
        println!("| {killer} | {jobs} | {right} | {killed} | {median:.2} ({most:.2}) |");
        // `scripts/soak` makes a table of these lines.
        println!(
            "tally: verbs: {flavor}: {killer}: {right} of {jobs} jobs right, {killed} queue pairs killed"
        );
    }
    if let Some(why) = first_wrong {
        resume_unwind(why);
    }
}

#[test]
fn queue_pairs_of_open_mpi_4_are_killed() {
    let test = "openmpi_soak::queue_pairs_of_open_mpi_4_are_killed";
    soak_jobs(test, Flavor::OpenMpi4, 1);
}

#[test]
fn queue_pairs_of_open_mpi_5_are_killed() {
    let test = "openmpi_soak::queue_pairs_of_open_mpi_5_are_killed";
    soak_jobs(test, Flavor::OpenMpi5Components, 2);
}
