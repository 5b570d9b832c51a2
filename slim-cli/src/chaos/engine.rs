//! Makes the faults of a plan, each at its time, and ends those that last.

use std::time::{Duration, Instant};

use slim_lab::SeededRng;

use super::active::{ActiveFault, Ongoing};
use super::plan::Plan;
use super::report::{ChaosReport, FaultRow, seconds};
use super::scene::Scene;
use super::schedule::{Due, Schedule};
use super::times::Lasting;

/// How often to check whether the command or the job has ended.
const TICK: Duration = Duration::from_millis(20);

/// The faults of one run. Call [`step`](Self::step) again and again, at the latest after [`pause`](Self::pause), and
/// [`finish`](Self::finish) at the end.
pub struct Engine<'a> {
    plan: &'a Plan,
    scene: &'a Scene,
    schedule: Schedule,
    rng: SeededRng,
    ongoing: Ongoing,
    active: Vec<Active>,
    report: ChaosReport,
    begin: Instant,
}

/// A fault in force, and its row in the report.
struct Active {
    /// None: until the end of the run.
    until: Option<Duration>,
    row: usize,
    guard: ActiveFault,
}

impl<'a> Engine<'a> {
    /// Starts the clock.
    pub fn new(plan: &'a Plan, seed: u64, scene: &'a Scene) -> Self {
        Self {
            plan,
            scene,
            schedule: Schedule::new(plan, seed),
            rng: SeededRng::new(seed),
            ongoing: Ongoing::default(),
            active: Vec::new(),
            report: ChaosReport {
                seed,
                ..ChaosReport::default()
            },
            begin: Instant::now(),
        }
    }

    /// Ends the faults that are over, and makes one that is due. A fault that cannot be made is reported and does not stop the others.
    pub fn step(&mut self) {
        let now = self.begin.elapsed();
        let over = |a: &mut Active| a.until.is_some_and(|until| until <= now);
        for over in self.active.extract_if(.., over).collect::<Vec<_>>() {
            self.end(over);
        }
        self.report.late += self.schedule.leave_out_late(now);
        // The next one is for the next step, because this one may take long.
        if self.schedule.peek().is_some_and(|at| at <= now)
            && let Some(due) = self.schedule.next()
        {
            self.strike(due);
        }
    }

    fn strike(&mut self, due: Due) {
        let fault = &self.plan.faults[due.fault];
        let at = self.begin.elapsed();
        let mut row = FaultRow {
            at: seconds(at),
            kind: fault.kind.name(),
            node: "-".into(),
            lasted: None,
            hit: None,
            effect: false,
            detail: String::new(),
            failed: false,
            stays: false,
            planned: due.fault,
            lasting: due.lasts,
            victim: None,
        };
        match self.scene.strike(fault, &mut self.rng, &self.ongoing) {
            Ok(strike) => {
                row.node = strike.node;
                row.detail = strike.detail;
                row.effect = strike.hit > 0;
                row.victim = strike.victim;
                row.hit = (!fault.kind.lasts()).then_some(strike.hit);
                if let Some(guard) = strike.guard {
                    let until = match due.lasts {
                        Some(Lasting::For(time)) => Some(at + time),
                        Some(Lasting::Forever) => None,
                        None => Some(at),
                    };
                    self.active.push(Active {
                        until,
                        row: self.report.faults.len(),
                        guard,
                    });
                }
            }
            Err(error) => {
                row.failed = true;
                row.detail = error.to_string();
            }
        }
        self.report.faults.push(row);
    }

    fn end(&mut self, over: Active) {
        let now = self.begin.elapsed();
        let row = &mut self.report.faults[over.row];
        row.lasted = Some(seconds(now - Duration::from_secs_f64(row.at).min(now)));
        match over.guard.lift() {
            Ok(lifted) => {
                row.effect |= lifted.effect;
                row.detail = lifted.detail.unwrap_or(std::mem::take(&mut row.detail));
            }
            Err(error) => {
                row.stays = true;
                row.detail = format!("could not be ended: {error}");
            }
        }
    }

    /// How long the next step may wait.
    pub fn pause(&self) -> Duration {
        let ends = self.active.iter().filter_map(|a| a.until);
        let next = ends.chain(self.schedule.peek()).min();
        next.map_or(TICK, |at| at.saturating_sub(self.begin.elapsed()).min(TICK))
    }

    /// Whether no fault will begin or end any more, but for those that last to the end of the run.
    pub fn is_quiet(&self) -> bool {
        self.schedule.peek().is_none() && self.active.iter().all(|a| a.until.is_none())
    }

    /// Whether no fault is in force and none will begin.
    pub fn is_over(&self) -> bool {
        self.schedule.peek().is_none() && self.active.is_empty()
    }

    /// Ends all faults in force.
    pub fn finish(mut self) -> ChaosReport {
        self.report.seconds = seconds(self.begin.elapsed());
        for rest in std::mem::take(&mut self.active) {
            self.end(rest);
        }
        self.report
    }
}
