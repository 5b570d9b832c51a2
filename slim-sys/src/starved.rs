//! Threads of this process that the kernel does not let run.
//!
//! A thread may be able to run, and not be let run for a long time, while others of its process are. So the time that passes for one of them says
//! nothing about another. The scheduler of a virtual machine that is paused, or of a kernel that runs as a program, may charge the pause to the thread that
//! happened to run: after 10 s beside three others that do not sleep, that thread waits for 30 s more.

use std::fs;
use std::mem::MaybeUninit;
use std::time::Duration;

use crate::tid;

/// A thread with less processor time than this within a second or more was not let run.
const HARDLY: Duration = Duration::from_millis(20);

/// The threads of the process, without the calling one, that could run at some moment, and the processor time that they had had by then.
#[derive(Debug)]
pub struct RunnableThreads(Vec<(i32, Duration)>);

impl RunnableThreads {
    /// Those of this moment. There are none if the kernel does not tell: the process may have no descriptor left.
    pub fn now() -> Self {
        let own = tid();
        let entries = fs::read_dir("/proc/self/task").into_iter().flatten();
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let threads = names.filter_map(|name| name.parse().ok());
        let runnable = threads.filter(|thread| *thread != own && is_runnable(*thread));
        let with_time = runnable.filter_map(|thread| Some((thread, processor_time(thread)?)));
        Self(with_time.collect())
    }

    /// Whether one of them can run now, too, but hardly has since. To be asked after a second or more.
    pub fn are_starved(&self) -> bool {
        self.0.iter().any(|(thread, before)| {
            let has_run = processor_time(*thread).map(|now| now.saturating_sub(*before));
            has_run.is_some_and(|has_run| has_run < HARDLY) && is_runnable(*thread)
        })
    }
}

fn is_runnable(thread: i32) -> bool {
    let stat = fs::read(format!("/proc/self/task/{thread}/stat")).unwrap_or_default();
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

    /// The other tests of this program have threads, too: so each is asked about alone.
    fn only(thread: i32) -> RunnableThreads {
        let mut found = RunnableThreads::now();
        found.0.retain(|(other, _)| *other == thread);
        found
    }

    #[test]
    fn a_thread_is_starved_if_it_could_run_and_is_not_let() {
        let done = AtomicBool::new(false);
        let numbers = [(); 3].map(|()| AtomicI32::new(0));
        // SAFETY: no memory is passed.
        let processor = unsafe { libc::sched_getcpu() } as usize;
        thread::scope(|scope| {
            let numbers = &numbers;
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
                enter(1);
            });
            // One that sleeps.
            let sleeps = scope.spawn(|| {
                numbers[2].store(tid(), Ordering::SeqCst);
                thread::park();
            });
            let number = |at: usize| numbers[at].load(Ordering::SeqCst);
            while (0..3).any(|at| number(at) == 0) {
                thread::sleep(Duration::from_millis(1));
            }
            thread::sleep(Duration::from_millis(10));
            let [starved, spins, asleep] = [0, 1, 2].map(|at| only(number(at)));
            assert!(!starved.0.is_empty() && !spins.0.is_empty() && asleep.0.is_empty());
            thread::sleep(SECOND);
            let found = [&starved, &spins, &asleep].map(RunnableThreads::are_starved);
            done.store(true, Ordering::Relaxed);
            sleeps.thread().unpark();
            assert_eq!(found, [true, false, false]);
        });
    }
}
