//! A network in memory whose hosts have providers, for tests.
//!
//! A thread carries the packets while there are any, and sleeps otherwise. The faults are those of
//! [`slim_rdma::in_memory::Fabric`], and some of a whole network.

use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use slim_rdma::agreement::AgreementMessage;
use slim_rdma::in_memory::{Fabric, MemoryAdapter, Step};
use slim_sys::OwnFd;

use crate::port::VerbsPort;
use crate::provider::VerbsProvider;
use crate::settings::VerbsSettings;

/// What the thread is to do.
#[derive(Default)]
struct NetChores {
    /// Packets may be on their way.
    waits: bool,
    over: bool,
}

#[derive(Default)]
struct WorkBell {
    work: Mutex<NetChores>,
    rung: Condvar,
}

impl WorkBell {
    fn work(&self) -> MutexGuard<'_, NetChores> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ring(&self) {
        self.work().waits = true;
        self.rung.notify_one();
    }

    /// Waits until it has rung. Returns false at the end.
    fn wait(&self) -> bool {
        let idle = |work: &mut NetChores| !work.waits && !work.over;
        let waited = self.rung.wait_while(self.work(), idle);
        let mut work = waited.unwrap_or_else(PoisonError::into_inner);
        work.waits = false;
        !work.over
    }
}

/// A network. Dropping it ends its thread.
pub struct MemoryNet {
    /// The adapters, with their faults.
    pub fabric: Fabric,
    bell: Arc<WorkBell>,
}

impl Drop for MemoryNet {
    fn drop(&mut self) {
        self.bell.work().over = true;
        self.bell.rung.notify_one();
    }
}

impl MemoryNet {
    /// A network without queue pairs.
    pub fn start() -> Self {
        let (fabric, bell) = (Fabric::new(1), Arc::<WorkBell>::default());
        let rings = bell.clone();
        fabric.on_work(move || rings.ring());
        let (carried, waits) = (fabric.clone(), bell.clone());
        thread::spawn(move || {
            while waits.wait() {
                carried.run();
            }
        });
        MemoryNet { fabric, bell }
    }

    /// The provider of an agent that has the ports of these hosts, the preferred one first. To be called once for each host.
    pub fn provider(
        &self,
        hosts: &[usize],
        settings: VerbsSettings,
    ) -> VerbsProvider<MemoryAdapter> {
        let ports = hosts.iter().map(|host| self.port(*host)).collect();
        VerbsProvider::new(ports, settings).expect("random numbers")
    }

    pub(crate) fn port(&self, host: usize) -> VerbsPort<MemoryAdapter> {
        let event = Arc::new(slim_sys::eventfd().expect("a descriptor"));
        let same = OwnFd::make(|| event.as_fd().try_clone_to_owned()).expect("a descriptor");
        self.fabric
            .on_report(host, move || slim_sys::signal_eventfd(event.raw()));
        let verbs = self.fabric.adapter(host);
        VerbsPort {
            mail: Box::new(verbs.datagrams()),
            verbs,
            reports: vec![same],
        }
    }

    /// From now on no queue pair can be made, or they can be made again. Those that there are stay.
    pub fn set_refusing(&self, refuses: bool) {
        self.fabric
            .limit_pairs(if refuses { 0 } else { usize::MAX });
    }

    /// From now on those who ask for a queue pair never get the answer, or get it again. The other side has made one by then.
    pub fn set_mute(&self, mute: bool) {
        let is_answer = |bytes: &[u8]| {
            matches!(
                AgreementMessage::decode(bytes),
                Some(AgreementMessage::Answer(..))
            )
        };
        self.fabric
            .lose_datagrams_if(if mute { is_answer } else { |_| false });
    }

    /// From now on all packets are dropped, or carried again. Nothing is reported but failed attempts, which are used up at once.
    pub fn set_silent(&self, silent: bool) {
        self.fabric
            .silence(if silent { |_| true } else { |_| false });
    }

    /// The queue pairs of the hosts that `fails` picks fail. With `lost` their packets get lost, else they still arrive.
    pub fn fail_pairs(&self, lost: bool, fails: impl Fn(usize) -> bool) {
        for (host, number) in self.fabric.pairs() {
            if fails(host) {
                self.fabric.take(Step::Fail(number));
            }
        }
        while lost && self.fabric.steps().contains(&Step::ArriveLate) {
            self.fabric.take(Step::LoseLate);
        }
        self.bell.ring();
    }
}
