//! The process executes another program.
//!
//! If that program loads this library, too, it goes on with the connections that survive: the agent stops, and what it and the flows
//! know goes into a file in memory ([`slim_sys::handed`]), which the library of the next program takes when it is loaded. If the exec
//! fails, the agent goes on. Otherwise the connections become plain TCP first.

mod flows;
pub mod program;

use crate::flow::Flow;
use crate::ops::{closing, demoting};
use crate::transport::OTHER_EXEC;
use crate::{options, process, runtime, sys, table, transport};
use flows::Front;
use libc::c_int;
use program::{ExecOutcome, Program};
use slim_agent::Agent;
use slim_agent::exec::{HandedAgent, NotHanded, Stopped};
use slim_core::FlowToken;
use slim_core::saved::Saved;
use slim_sys::lock::Lock;
use slim_sys::{SignalsBlocked, handed};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The format of the file, and the version of the library. Another version cannot read it. tests/c/left.c has the same number.
const FORMAT: u32 = 2;
const VERSION: &str = env!("CARGO_PKG_VERSION");

const DAMAGED: &str = "what the program before has left is damaged";

/// How long the agent has for its answer.
const ANSWER: Duration = Duration::from_secs(1);
/// How often a flow that cannot be handed over yet, or another thread's exec, is looked at.
const LOOK: Duration = Duration::from_millis(2);
/// A flow that can be handed over soon is looked at so many times at least, as on a machine that is not busy: a busy one may not have
/// let the thread run that is sending on it.
const LOOKS: u32 = 25;

/// What was left for the next program. It is withdrawn when the exec fails.
struct LeftFlows {
    file: c_int,
    /// Descriptors of ours that survive the exec.
    kept: Vec<c_int>,
    _halted: Halted,
    _stopped: Stopped,
}

/// Flows that have been handed over, which other threads do not use any more.
#[derive(Default)]
struct Halted(Vec<&'static Flow>);

impl Drop for Halted {
    fn drop(&mut self) {
        self.0.iter().for_each(|flow| flows::take_back(flow));
    }
}

static LEFT: Lock<Option<LeftFlows>> = Lock::new(None);
/// The process and the thread that executes the next program; 0 if there is none.
static EXECUTING: AtomicU64 = AtomicU64::new(0);

impl Drop for LeftFlows {
    fn drop(&mut self) {
        handed::withdraw(self.file);
        for fd in &self.kept {
            handed::set_survives(*fd, false);
        }
    }
}

/// Flows that cannot be handed over now, and why.
type Refused = Vec<(FlowToken, NotHanded)>;

/// A flow with those of its numbers that survive the exec.
type KeptFlow = (&'static Flow, Vec<c_int>);

/// Makes a call that executes another program, and returns only if that fails.
pub fn exec<R>(program: &Program, real: impl FnOnce() -> R) -> R {
    if !runtime::in_use() {
        return real();
    }
    sys::keep_errno(|| before(program));
    let r = real();
    sys::keep_errno(withdraw);
    r
}

fn before(program: &Program) {
    if !runtime::in_own_process() {
        return process::before_exec_of_vforked();
    }
    let kept = surviving();
    match kept.is_empty() {
        true => announce(),
        false => match program.outcome() {
            ExecOutcome::Fails => {}
            ExecOutcome::Plain => make_plain(kept),
            ExecOutcome::Ours => hand_over(kept),
        },
    }
}

/// Makes this thread the one that executes the next program. False if another one is: the agent has stopped, and that thread has the flows.
fn take_turn() -> bool {
    let own = this_thread();
    let mut was = EXECUTING.load(Ordering::SeqCst);
    while was == 0 || is_of_parent(was) {
        match EXECUTING.compare_exchange(was, own, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(0) => return true,
            Ok(_) => {
                forget_parents();
                return true;
            }
            Err(now) => was = now,
        }
    }
    false
}

/// Whether the thread is one of the process that has forked this one.
fn is_of_parent(thread: u64) -> bool {
    thread >> 32 != this_thread() >> 32
}

/// What a thread of the parent has left is not for the program that this process executes.
fn forget_parents() {
    if let Some(left) = LEFT.with(Option::take) {
        handed::withdraw(left.file);
        // The parent has the flows, and its agent is not here.
        std::mem::forget(left);
    }
}

/// The calling thread, as in [`EXECUTING`].
fn this_thread() -> u64 {
    (sys::pid() as u64) << 32 | sys::tid() as u64
}

/// The exec has failed, or a handler has left it: the session goes on.
pub fn withdraw() {
    let is_own = || {
        let executing = EXECUTING.load(Ordering::SeqCst);
        executing != 0 && executing == this_thread()
    };
    if !is_own() {
        return;
    }
    // A handler that executes a program, or leaves the exec, must not find half of this done.
    let _signals = SignalsBlocked::new();
    if is_own() {
        drop(LEFT.with(Option::take));
        EXECUTING.store(0, Ordering::SeqCst);
    }
}

fn surviving() -> Vec<KeptFlow> {
    let mut all: Vec<KeptFlow> = Vec::new();
    table::for_each_flow(|fd, f| {
        if sys::survives_exec(fd) {
            match all.iter_mut().find(|(known, _)| std::ptr::eq(*known, f)) {
                Some((_, numbers)) => numbers.push(fd),
                None => all.push((f, vec![fd])),
            }
        }
    });
    all
}

/// Makes flows plain TCP, as soon as SLIM holds none of their bytes.
fn make_plain(all: Vec<KeptFlow>) {
    let limit = Instant::now() + demoting::PATIENCE;
    notice(&all);
    for (flow, numbers) in all {
        for fd in numbers {
            demoting::hand_over_until(flow, fd, limit);
        }
    }
    announce();
}

/// Finds out which transports have died: these flows are resumed at the same time, while the first of them is waited for.
fn notice(all: &[KeptFlow]) {
    for (flow, numbers) in all {
        if let Some(fd) = open_number(flow, numbers) {
            transport::notice(flow, fd);
        }
    }
}

/// One of these numbers that is still the flow's: another thread may have closed some.
fn open_number(flow: &'static Flow, numbers: &[c_int]) -> Option<c_int> {
    let open = |fd: &c_int| flow.ctl_of(*fd).is_some();
    numbers.iter().copied().find(open)
}

/// Waits until the flow's transport is there, or until `limit`. False if none of the numbers is the flow's any more.
fn await_transport((flow, numbers): &KeptFlow, limit: Instant) -> bool {
    while let Some(fd) = open_number(flow, numbers) {
        transport::notice(flow, fd);
        demoting::wait_while_away(flow, fd, limit, || false);
        // Otherwise the number was closed meanwhile, but another one may be there.
        if flow.ctl_of(fd).is_some() {
            return true;
        }
    }
    false
}

/// Sends what is still to be told to peers of other flows.
fn announce() {
    runtime::with_agent(|a| a.drain_exit(Duration::ZERO));
}

/// Leaves these flows for the next program. Those that have to wait too long, or cannot be handed over, become plain TCP.
fn hand_over(mut kept: Vec<KeptFlow>) {
    // A handler that executes a program may have interrupted an exec.
    withdraw();
    let started = Instant::now();
    notice(&kept);
    kept.retain(|flow| may_be_handed(flow) || demote(flow, started + demoting::PATIENCE));
    announce();
    // Execs of other threads take time, which is not the flows'.
    let mut begun = started;
    let mut looks = 0;
    while !kept.is_empty() {
        let limit = begun + demoting::PATIENCE;
        // A flow without a session is plain TCP by now.
        kept.retain(|flow| await_transport(flow, limit));
        let signals = SignalsBlocked::new();
        if !take_turn() {
            drop(signals);
            if started.elapsed() > OTHER_EXEC {
                return make_plain(kept);
            }
            sys::nap(LOOK);
            begun = Instant::now();
            continue;
        }
        let tokens = kept.iter().map(|(flow, _)| flow.token()).collect();
        let refused = match runtime::with_agent(|a| a.hand_over(tokens, ANSWER)) {
            Some(Ok((agent, stopped))) => match leave(&kept, &agent, stopped) {
                Ok(()) => return,
                Err(refused) => refused,
            },
            Some(Err(refused)) => refused,
            None => Vec::new(),
        };
        withdraw();
        drop(signals);
        looks += 1;
        kept.retain(|flow| {
            let token = flow.0.token();
            let why = refused.iter().find(|(refused, _)| *refused == token);
            let limit = match why {
                // Nothing is wrong with this one.
                None if !refused.is_empty() => return true,
                None | Some((_, NotHanded::Never)) => begun,
                Some((_, NotHanded::Soon)) if looks >= LOOKS => {
                    begun + runtime::time_to_answer(false)
                }
                Some((_, NotHanded::Soon | NotHanded::Busy)) => limit,
            };
            Instant::now() < limit || demote(flow, limit)
        });
        sys::nap(LOOK);
    }
    announce();
}

/// Makes the flow plain TCP. Returns false.
fn demote((flow, numbers): &KeptFlow, limit: Instant) -> bool {
    for fd in numbers {
        demoting::hand_over_until(flow, *fd, limit);
    }
    false
}

/// Whether the next program can go on with the flow by itself: no other process has it, and no epoll instance that survives the exec
/// has it registered, because only this program's library knows the registrations.
fn may_be_handed((flow, numbers): &KeptFlow) -> bool {
    let forked = flow.forked.load(Ordering::SeqCst);
    if forked && open_number(flow, numbers).is_none_or(|fd| closing::is_held_elsewhere(flow, fd)) {
        return false;
    }
    // Any number will do: another thread may close one at any moment.
    let Some(ctl) = numbers.iter().find_map(|fd| flow.ctl_of(*fd)) else {
        return false;
    };
    let mut instances = ctl.epolls.iter();
    !instances.any(|instance| instance.survives_exec()) && !crate::epoll::any_unseen()
}

/// Leaves the flows, of which the agent knows `agent`. The agent has stopped.
fn leave(kept: &[KeptFlow], agent: &HandedAgent, stopped: Stopped) -> Result<(), Refused> {
    let all = |why| {
        let tokens = kept.iter().map(|(flow, _)| flow.token());
        tokens.map(|token| (token, why)).collect::<Refused>()
    };
    let (mut fronts, mut refused, mut halted) = (Vec::new(), Vec::new(), Halted::default());
    for (flow, _) in kept {
        match Front::of(flow) {
            Some(front) => {
                halted.0.push(flow);
                fronts.push(front);
            }
            // A call has met a fault since.
            None if flow.stream.is_barred() => refused.push((flow.token(), NotHanded::Busy)),
            None => refused.push((flow.token(), NotHanded::Soon)),
        }
    }
    if !refused.is_empty() {
        return Err(refused);
    }
    let mut kept = agent.numbers();
    kept.extend(fronts.iter().filter_map(Front::waiting));
    let named = kept.iter().map(|fd| Some((*fd, sys::identity(*fd)?)));
    let Some(named) = named.collect::<Option<Vec<_>>>() else {
        // Another thread has closed one since, or a transport was replaced.
        return Err(all(NotHanded::Soon));
    };
    let mut bytes = Vec::new();
    named.save(&mut bytes);
    FORMAT.save(&mut bytes);
    VERSION.as_bytes().to_vec().save(&mut bytes);
    (sys::pid() as u32).save(&mut bytes);
    agent.save(&mut bytes);
    fronts.save(&mut bytes);
    let file = handed::leave(&bytes).map_err(|_| all(NotHanded::Never))?;
    for fd in &kept {
        handed::set_survives(*fd, true);
    }
    let left = LeftFlows {
        file,
        kept,
        _halted: halted,
        _stopped: stopped,
    };
    LEFT.with(|present| *present = Some(left));
    Ok(())
}

/// When the library is loaded: goes on with what the program before has left.
pub fn take_over() {
    let Some(bytes) = handed::take() else {
        return;
    };
    let mut from = &bytes[..];
    let Some(kept) = Vec::load(&mut from) else {
        return lost(DAMAGED);
    };
    take_over_all(from);
    close_untaken(kept);
}

/// Closes the descriptors that were left and that nobody has taken: peers that ask there get no answer any more.
fn close_untaken(kept: Vec<(c_int, u64)>) {
    for (fd, socket) in kept {
        if !slim_sys::fds::is_internal(fd) && sys::identity(fd) == Some(socket) {
            sys::close(fd);
        }
    }
}

fn take_over_all(mut from: &[u8]) {
    if <(u32, Vec<u8>)>::load(&mut from) != Some((FORMAT, VERSION.as_bytes().to_vec())) {
        return lost("another version of SLIM has executed this program");
    }
    if u32::load(&mut from) != Some(sys::pid() as u32) {
        // A child of that process, which has inherited the file. The session is not its own.
        return;
    }
    options::any();
    let (Some(mut agent), Some(fronts)) = (HandedAgent::load(&mut from), Vec::load(&mut from))
    else {
        return lost(DAMAGED);
    };
    let mut known = std::mem::take(&mut agent.flows);
    let started = runtime::start_handed(|config| {
        let _signals = SignalsBlocked::new();
        let flows = fronts.into_iter().filter_map(|front: Front| {
            let at = known.iter().position(|(token, _)| *token == front.token)?;
            front.open(known.swap_remove(at).1)
        });
        let flows = flows.collect();
        Agent::start_handed(config, agent, flows)
    });
    if !started {
        let mut opened: Vec<(c_int, &'static Flow)> = Vec::new();
        table::for_each_flow(|fd, f| opened.push((fd, f)));
        for (fd, flow) in opened {
            demoting::demote(flow, fd);
        }
        lost("SLIM does not work in this program");
    }
}

fn lost(why: &str) {
    runtime::say(&format!(
        "{why}; connections from before the exec end when they break"
    ));
}
