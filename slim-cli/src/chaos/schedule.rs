//! The times of faults, determined by the plan and its seed alone.

use std::time::Duration;

use slim_lab::SeededRng;

use super::plan::{Plan, PlannedFault};
use super::times::{Lasting, Lasts, Span};

/// How long after the end of the plan's duration a fault may still be made that was due before it.
const LATEST: Duration = Duration::from_secs(1);

/// One fault that is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Due {
    /// Time since the beginning.
    pub at: Duration,
    /// Index in [`Plan::faults`].
    pub fault: usize,
    /// Duration, for a kind of fault that lasts.
    pub lasts: Option<Lasting>,
}

/// Returns the faults of a plan in the order of their times.
#[derive(Debug)]
pub struct Schedule {
    lanes: Vec<FaultLane>,
    end: Option<Duration>,
}

/// One `[[fault]]` with its own random sequence, so that a change of one does not affect the others.
#[derive(Debug)]
struct FaultLane {
    fault: PlannedFault,
    rng: SeededRng,
    next: Option<Duration>,
    left: u32,
}

impl Schedule {
    /// The schedule of `plan` under `seed`.
    pub fn new(plan: &Plan, seed: u64) -> Self {
        let mut seeds = SeededRng::new(seed);
        let lanes = plan.faults.iter().map(|fault| {
            let mut rng = seeds.fork();
            let next = Some(choose(&mut rng, fault.start));
            let once = if fault.every.is_some() { u32::MAX } else { 1 };
            FaultLane {
                fault: fault.clone(),
                rng,
                next,
                left: fault.times.unwrap_or(once),
            }
        });
        Self {
            lanes: lanes.collect(),
            end: plan.duration.map(|d| d.duration()),
        }
    }

    /// Time of the next fault, without taking it.
    pub fn peek(&self) -> Option<Duration> {
        self.first().map(|(_, at)| at)
    }

    /// Leaves out the faults that are still due a second after the end of the duration. Returns their number.
    pub fn leave_out_late(&mut self, now: Duration) -> usize {
        match self.end {
            Some(end) if now > end + LATEST => self.by_ref().count(),
            _ => 0,
        }
    }

    fn first(&self) -> Option<(usize, Duration)> {
        let due = self
            .lanes
            .iter()
            .enumerate()
            .filter_map(|(n, lane)| lane.next.map(|at| (n, at)));
        due.min_by_key(|(_, at)| *at)
            .filter(|(_, at)| self.end.is_none_or(|end| *at < end))
    }
}

impl Iterator for Schedule {
    type Item = Due;

    fn next(&mut self) -> Option<Due> {
        let (n, at) = self.first()?;
        let lane = &mut self.lanes[n];
        let lasts = lane.fault.lasts().map(|lasts| match lasts {
            Lasts::Forever => Lasting::Forever,
            Lasts::Within(span) => Lasting::For(choose(&mut lane.rng, span)),
        });
        lane.left -= 1;
        lane.next = lane.fault.every.filter(|_| lane.left > 0).map(|every| {
            // A range may begin at 0. At least 1 ms, so that the schedule proceeds.
            at + choose(&mut lane.rng, every).max(Duration::from_millis(1))
        });
        Some(Due {
            at,
            fault: n,
            lasts,
        })
    }
}

fn choose(rng: &mut SeededRng, span: Span) -> Duration {
    rng.between(span.from, span.to)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(text: &str, seed: u64) -> Vec<Due> {
        Schedule::new(&Plan::parse(text).unwrap(), seed)
            .take(1000)
            .collect()
    }

    const TWO: &str = "duration = 20\n[[fault]]\nkind = \"kill\"\nstart = [0, 2]\nevery = [0.5, 2]\n\
                       [[fault]]\nkind = \"drop\"\nstart = 5\nevery = 5\ntimes = 2\nlasts = [1, 3]\n";

    #[test]
    fn the_same_seed_gives_the_same_schedule() {
        assert_eq!(times(TWO, 7), times(TWO, 7));
        assert_ne!(times(TWO, 7), times(TWO, 8));
    }

    #[test]
    fn faults_come_in_order_within_the_duration_and_their_ranges() {
        let due = times(TWO, 3);
        assert!(due.windows(2).all(|w| w[0].at <= w[1].at));
        assert!(due.iter().all(|d| d.at < Duration::from_secs(20)));
        let drops: Vec<_> = due.iter().filter(|d| d.fault == 1).collect();
        assert_eq!(
            drops.iter().map(|d| d.at.as_secs()).collect::<Vec<_>>(),
            [5, 10]
        );
        let in_range = |lasts| matches!(lasts, Some(Lasting::For(time)) if (1.0..=3.0).contains(&time.as_secs_f64()));
        assert!(drops.iter().all(|d| in_range(d.lasts)));
        let kills: Vec<_> = due.iter().filter(|d| d.fault == 0).collect();
        assert!(kills.len() >= 9, "{}", kills.len());
        assert!(kills.iter().all(|d| d.lasts.is_none()));
        for pair in kills.windows(2) {
            assert!((0.5..=2.0).contains(&(pair[1].at - pair[0].at).as_secs_f64()));
        }
    }

    #[test]
    fn what_is_late_when_the_duration_is_over_is_left_out() {
        let plan = Plan::parse(TWO).unwrap();
        let mut schedule = Schedule::new(&plan, 3);
        let all = times(TWO, 3).len();
        assert_eq!(schedule.leave_out_late(Duration::from_secs(21)), 0);
        schedule.next().unwrap();
        let late = Duration::from_millis(21_001);
        assert_eq!(schedule.leave_out_late(late), all - 1);
        assert_eq!(schedule.peek(), None);
        assert_eq!(schedule.leave_out_late(late), 0);
        let endless = "[[fault]]\nkind = \"kill\"\nevery = 1\n";
        let mut schedule = Schedule::new(&Plan::parse(endless).unwrap(), 3);
        assert_eq!(schedule.leave_out_late(Duration::from_secs(1000)), 0);
    }

    #[test]
    fn a_fault_without_every_comes_once() {
        let due = times("[[fault]]\nkind = \"kill\"\n", 1);
        assert_eq!(
            due,
            [Due {
                at: Duration::from_secs(1),
                fault: 0,
                lasts: None
            }]
        );
    }

    #[test]
    fn a_schedule_with_a_range_from_zero_ends() {
        let due = times(
            "duration = 1\n[[fault]]\nkind = \"kill\"\nstart = 0\nevery = [0, 0.001]\n",
            1,
        );
        assert_eq!(due.len(), 1000);
    }

    #[test]
    fn another_fault_does_not_change_the_times_of_the_first() {
        let alone = "[[fault]]\nkind = \"kill\"\nevery = [0.5, 2]\ntimes = 5\n";
        let both = format!("{alone}[[fault]]\nkind = \"rst\"\nevery = 1\ntimes = 3\n");
        let of_first = |due: Vec<Due>| due.into_iter().filter(|d| d.fault == 0).collect::<Vec<_>>();
        assert_eq!(times(alone, 4), of_first(times(&both, 4)));
    }
}
