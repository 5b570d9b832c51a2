//! Processes that faults have stopped. Faults may overlap: a process goes on when the last fault that has stopped it is over.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use rustix::process::{Pid, Signal, kill_process};

/// The number of faults in force on each stopped process.
#[derive(Clone, Debug, Default)]
pub struct StopCounts(Rc<RefCell<HashMap<Pid, usize>>>);

/// The processes that one fault has stopped. It is over when this is dropped.
#[derive(Debug)]
pub struct StoppedProcesses {
    pids: Vec<Pid>,
    counts: StopCounts,
}

impl StopCounts {
    /// Stops those that still exist.
    pub fn stop(&self, pids: impl Iterator<Item = u32>) -> StoppedProcesses {
        let pids = pids.filter_map(|pid| Pid::from_raw(pid.cast_signed()));
        let stop = |pid: &Pid| kill_process(*pid, Signal::STOP).is_ok();
        let pids: Vec<Pid> = pids.filter(stop).collect();
        for pid in &pids {
            *self.0.borrow_mut().entry(*pid).or_default() += 1;
        }
        StoppedProcesses {
            pids,
            counts: self.clone(),
        }
    }

    /// One fault on the process is over. Says whether it was the last.
    fn release(&self, pid: Pid) -> bool {
        let mut counts = self.0.borrow_mut();
        let left = counts.get(&pid).map_or(0, |count| count - 1);
        match left {
            0 => counts.remove(&pid),
            _ => counts.insert(pid, left),
        };
        left == 0
    }
}

impl Drop for StoppedProcesses {
    fn drop(&mut self) {
        for pid in &self.pids {
            if self.counts.release(*pid) {
                // It may have ended.
                let _ = kill_process(*pid, Signal::CONT);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};
    use std::thread;
    use std::time::{Duration, Instant};

    use procfs::process::{ProcState, Process};

    use super::*;

    fn is_stopped(child: &Child) -> bool {
        let process = Process::new(child.id().cast_signed()).unwrap();
        process.stat().unwrap().state().unwrap() == ProcState::Stopped
    }

    /// Waits until the process is in this state: signals take a moment.
    fn becomes(child: &Child, stopped: bool) -> bool {
        let begin = Instant::now();
        while is_stopped(child) != stopped && begin.elapsed() < Duration::from_secs(5) {
            thread::sleep(Duration::from_millis(5));
        }
        is_stopped(child) == stopped
    }

    #[test]
    fn a_process_goes_on_when_its_last_stop_is_over() {
        let mut children = [(); 2].map(|()| Command::new("sleep").arg("20").spawn().unwrap());
        let pids = [children[0].id(), children[1].id()];
        let counts = StopCounts::default();
        let first = counts.stop(pids.into_iter());
        let second = counts.stop([pids[0]].into_iter());
        assert!(children.iter().all(|child| becomes(child, true)));
        drop(first);
        assert!(becomes(&children[1], false));
        assert!(is_stopped(&children[0]), "the second stop is in force");
        let third = counts.stop([pids[0]].into_iter());
        drop(second);
        thread::sleep(Duration::from_millis(50));
        assert!(is_stopped(&children[0]), "the third stop is in force");
        drop(third);
        assert!(becomes(&children[0], false));
        assert!(counts.0.borrow().is_empty());
        for child in &mut children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}
