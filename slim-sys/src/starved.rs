//! Threads of this process that the kernel does not let run.
//!
//! A thread may be able to run, and not be let run for a long time, while others of its process are. So the time that passes for one of them says
//! nothing about another. The scheduler of a virtual machine that is paused, or of a kernel that runs as a program, may charge the pause to the thread that
//! happened to run: after 10 s beside three others that do not sleep, that thread waits for 30 s more.

use std::mem::MaybeUninit;
use std::time::{Duration, Instant};

use crate::open::for_each_thread;
use crate::{proc, tid};

/// A thread that gets less than one part in this many of a second or more was not let run.
const HARDLY: u32 = 50;

/// The threads of the process, without the calling one, that could run at some moment.
#[derive(Debug)]
pub struct RunnableThreads {
    at: Instant,
    threads: Vec<(i32, History)>,
}

/// What a thread had had by some moment.
#[derive(Debug)]
struct History {
    processor_time: Duration,
    /// How often it had gone to sleep. `None` where the kernel does not count that.
    sleeps: Option<u64>,
}

impl RunnableThreads {
    /// Those of this moment. There are none if the kernel does not tell: the process may have no descriptor left. Takes some microseconds for each
    /// thread of the process.
    pub fn now() -> Self {
        let (at, own) = (Instant::now(), tid());
        let mut others = Vec::new();
        for_each_thread(|thread| others.extend(Some(thread).filter(|thread| *thread != own)));
        let runnable = others.into_iter().filter(|thread| is_runnable(*thread));
        let threads = runnable
            .filter_map(|thread| Some((thread, History::of(thread)?)))
            .collect();
        Self { at, threads }
    }

    /// Whether one of them could run all the time since, but hardly has. To be asked after a second or more.
    pub fn are_starved(&self) -> bool {
        let passed = self.at.elapsed();
        let has_waited = |before: &History, now: History| {
            let has_run = now.processor_time.saturating_sub(before.processor_time);
            // One that sleeps and wakes up again and again may be seen only when it can run.
            has_run < passed / HARDLY && now.sleeps == before.sleeps
        };
        self.threads.iter().any(|(thread, before)| {
            is_runnable(*thread) && History::of(*thread).is_some_and(|now| has_waited(before, now))
        })
    }
}

impl History {
    fn of(thread: i32) -> Option<Self> {
        let status = proc::read(format_args!("self/task/{thread}/status"))?;
        let mut lines = status.split(|byte| *byte == b'\n');
        // The name, on the first line, has no line break: the kernel writes "\\n" for one.
        let count = lines.find_map(|line| line.strip_prefix(b"voluntary_ctxt_switches:"));
        let count = count.and_then(|count| str::from_utf8(count).ok()?.trim().parse().ok());
        Some(Self {
            processor_time: processor_time(thread)?,
            sleeps: count,
        })
    }
}

fn is_runnable(thread: i32) -> bool {
    let stat = proc::read(format_args!("self/task/{thread}/stat")).unwrap_or_default();
    // The state follows the name, which is in parentheses and may contain any byte.
    let name_end = stat.iter().rposition(|byte| *byte == b')');
    name_end.is_some_and(|at| stat[at..].starts_with(b") R"))
}

/// The processor time that a thread of this process has had.
fn processor_time(thread: i32) -> Option<Duration> {
    // The clock of a thread by its number (`MAKE_THREAD_CPUCLOCK` with `CPUCLOCK_SCHED`, as in pthread_getcpuclockid(3)).
    let clock = (!thread << 3) | 6;
    let mut time = MaybeUninit::<libc::timespec>::uninit();
    // SAFETY: valid for a write.
    if unsafe { libc::clock_gettime(clock, time.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: the call has succeeded, and has written it.
    let time = unsafe { time.assume_init() };
    Some(Duration::new(
        time.tv_sec.try_into().ok()?,
        time.tv_nsec.try_into().ok()?,
    ))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
    use std::thread;

    use super::*;

    const SECOND: Duration = Duration::from_millis(1100);

    fn spin(done: &AtomicBool) {
        while !done.load(Ordering::Relaxed) {
            std::hint::spin_loop();
        }
    }

    /// Binds the calling thread to one processor.
    fn bind(processor: usize) {
        let mut set = [0u64; 16];
        set[processor / 64] |= 1 << (processor % 64);
        // SAFETY: the kernel reads the set.
        let bound = unsafe { libc::syscall(libc::SYS_sched_setaffinity, 0, 128, set.as_ptr()) };
        assert_eq!(bound, 0);
    }

    /// Gives the calling thread the usual policy and nice value, if it may have them. Returns its nice value, 20 for another policy.
    fn be_usual() -> i32 {
        let none = 0;
        // SAFETY: the kernel reads one integer. The calls concern this thread.
        unsafe {
            libc::syscall(
                libc::SYS_sched_setscheduler,
                0,
                libc::SCHED_OTHER,
                &raw const none,
            );
            libc::setpriority(libc::PRIO_PROCESS, 0, 0);
            match libc::sched_getscheduler(0) {
                libc::SCHED_OTHER => libc::getpriority(libc::PRIO_PROCESS, 0),
                _ => 20,
            }
        }
    }

    /// The other tests of this program have threads, too: so each is asked about alone.
    fn only(thread: i32) -> RunnableThreads {
        let mut found = RunnableThreads::now();
        found.threads.retain(|(other, _)| *other == thread);
        found
    }

    #[test]
    fn a_thread_is_starved_if_it_could_run_and_is_not_let() {
        let done = AtomicBool::new(false);
        let numbers = [(); 3].map(|()| AtomicI32::new(0));
        let nice = AtomicI32::new(0);
        // SAFETY: no memory is passed.
        let processor = unsafe { libc::sched_getcpu() } as usize;
        thread::scope(|scope| {
            let (numbers, nice) = (&numbers, &nice);
            let enter = |at: usize| {
                numbers[at].store(tid(), Ordering::SeqCst);
                spin(&done);
            };
            // Two that spin on one processor: the first one gets 3 parts in 1027 of its time.
            scope.spawn(move || {
                bind(processor);
                let none = 0;
                // SAFETY: the kernel reads one integer.
                let idle = unsafe {
                    let policy = libc::SCHED_IDLE;
                    libc::syscall(libc::SYS_sched_setscheduler, 0, policy, &raw const none)
                };
                assert_eq!(idle, 0);
                enter(0);
            });
            scope.spawn(move || {
                bind(processor);
                nice.store(be_usual(), Ordering::SeqCst);
                enter(1);
            });
            // One that sleeps.
            let sleeps = scope.spawn(|| {
                numbers[2].store(tid(), Ordering::SeqCst);
                thread::park();
            });
            let number = |at: usize| numbers[at].load(Ordering::SeqCst);
            while (0..3).any(|at| number(at) == 0) || is_runnable(number(2)) {
                thread::sleep(Duration::from_millis(1));
            }
            thread::sleep(Duration::from_millis(10));
            let [starved, spins, asleep] = [0, 1, 2].map(|at| only(number(at)));
            assert!(!starved.threads.is_empty() && !spins.threads.is_empty());
            // With 4, a thread has 423 parts of the time beside 3 of the other one.
            let is_usual = nice.load(Ordering::SeqCst) <= 4;
            thread::sleep(if is_usual { SECOND } else { Duration::ZERO });
            let found = [&starved, &spins, &asleep].map(RunnableThreads::are_starved);
            done.store(true, Ordering::Relaxed);
            sleeps.thread().unpark();
            match is_usual {
                true => assert_eq!(found, [true, false, false]),
                false => println!("not tested: the priority of this process is low"),
            }
        });
    }

    #[test]
    fn a_thread_that_sleeps_is_not_starved_though_it_could_run_at_both_looks() {
        let (done, sleeps) = (AtomicBool::new(false), AtomicBool::new(false));
        let number = AtomicI32::new(0);
        thread::scope(|scope| {
            scope.spawn(|| {
                number.store(tid(), Ordering::SeqCst);
                spin(&sleeps);
                thread::sleep(SECOND);
                spin(&done);
            });
            let is_spinning = || match number.load(Ordering::SeqCst) {
                0 => false,
                thread => is_runnable(thread),
            };
            while !is_spinning() {
                thread::sleep(Duration::from_millis(1));
            }
            let found = only(number.load(Ordering::SeqCst));
            sleeps.store(true, Ordering::Relaxed);
            while is_spinning() {
                thread::yield_now();
            }
            while !is_spinning() {
                thread::sleep(Duration::from_millis(1));
            }
            let is_starved = found.are_starved();
            done.store(true, Ordering::Relaxed);
            assert!(!found.threads.is_empty() && !is_starved);
        });
    }
}
