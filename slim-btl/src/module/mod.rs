//! The module: one session, its listeners, and all peers.

mod deferred;
mod doubt;
mod dump;
mod handshake;
mod link;
mod progress;
mod rails;

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use slim::{Config, Session, SessionError, SessionOptions};
use slim_rdma::ibverbs::ProgramAccess;
use slim_verbs::{MemoryAtPorts, MemoryPorts, TransportKinds};

use self::deferred::{Deferred, DeferredThread};
use self::doubt::Doubts;
use self::link::BtlLink;
use self::progress::ProgressState;
use crate::endpoint::{BtlEndpoint, SendEffects, SendOutcome};
use crate::frag::{FragRef, SUCCESS, UNREACHABLE};
use crate::gets::{GetBytes, GetCallback, Gets};
use crate::interfaces;
use crate::proc::{ProcAddress, ProcBlob, ProcName};

/// Time limit for sending a goodbye and the frames before it.
const GOODBYE: Duration = Duration::from_secs(2);
/// Time limit of a closing module for the goodbyes of its peers.
const GOODBYES: Duration = Duration::from_millis(300);
/// Time limit for the end of the session.
const END: Duration = Duration::from_secs(1);
/// Interval of the checks meanwhile.
const NAP: Duration = Duration::from_micros(100);

/// The shim's functions for this library.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Upcalls {
    /// Open MPI's module.
    pub module: *mut c_void,
    /// Messages up to this level are reported.
    pub verbose: c_int,
    /// Not 0: the job goes on without a lost peer (ULFM), so two ranks must not report each other.
    pub survives_losses: c_int,
    /// Delivers a fragment: endpoint, tag, data, length. The data belongs to the function until it returns.
    pub deliver: unsafe extern "C" fn(*const c_void, u8, *mut u8, usize),
    /// Reports a lost peer: proc or null, name, reason with its length. Called once for each peer.
    pub lost: unsafe extern "C" fn(*mut c_void, u64, *const c_char, usize),
    /// Reports a message of this level, with its length.
    pub log: unsafe extern "C" fn(c_int, *const c_char, usize),
    /// Whether Open MPI knows already that a peer has failed: proc or null, name. Never called unless `survives_losses`.
    pub has_failed: unsafe extern "C" fn(*mut c_void, u64) -> c_int,
}

// SAFETY: the functions may be called from any thread, and the module pointer is only passed on.
unsafe impl Send for Upcalls {}
// SAFETY: as above.
unsafe impl Sync for Upcalls {}

impl Upcalls {
    /// Reports a message, if it is of a level that is reported.
    pub(crate) fn say(&self, level: c_int, text: impl FnOnce() -> String) {
        if level > self.verbose {
            return;
        }
        let text = text();
        // SAFETY: the text lives until the function returns.
        unsafe { (self.log)(level, text.as_ptr().cast(), text.len()) };
    }
}

/// Options of a module.
#[derive(Debug)]
pub struct ModuleOptions {
    /// This process.
    pub me: ProcName,
    /// Interfaces and networks to use; empty: all.
    pub if_include: String,
    /// Those not to use.
    pub if_exclude: String,
    /// The kinds of transport that flows may use.
    pub transports: TransportKinds,
    /// Settings of the session.
    pub config: Config,
    /// How long a connection may last without a hello. Then it is closed; a connector that is late connects anew.
    pub hello_limit: Duration,
}

/// The module. Its methods may be called by several threads at the same time.
pub struct BtlModule {
    me: ProcName,
    upcalls: Upcalls,
    hello_limit: Duration,
    session: Session,
    blob: ProcBlob,
    peers: Mutex<HashMap<ProcName, Arc<BtlEndpoint>>>,
    /// Never waited for, because callbacks call progress while it is held.
    progress: Mutex<ProgressState>,
    /// New links, which progress does not know yet.
    fresh: Mutex<Vec<BtlLink>>,
    has_fresh: AtomicBool,
    doubts: Doubts,
    deferred: Arc<Deferred>,
    deferred_thread: DeferredThread,
    /// Where memory of the program can be registered.
    memory: MemoryPorts,
    gets: Gets,
}

impl BtlModule {
    /// Opens a session and listens.
    ///
    /// # Errors
    /// Those of the session; [`SessionError::Kernel`] if there is no address to listen at.
    pub fn open(options: ModuleOptions, upcalls: Upcalls) -> Result<Self, SessionError> {
        let session_options = SessionOptions {
            config: options.config,
            ..SessionOptions::new(format!("mpi {}", options.me))
        };
        let mut memory = MemoryPorts::default();
        let session = match options.transports.open_verbs() {
            Some(Ok(ports)) => {
                for why in &ports.left_out {
                    upcalls.say(0, || format!("{why}; other ports are used"));
                }
                memory = ports.memory;
                Session::open_with(session_options, vec![Box::new(ports.provider)])?
            }
            Some(Err(e)) => {
                upcalls.say(0, || format!("{e}; messages go over TCP only"));
                Session::open(session_options)?
            }
            None => Session::open(session_options)?,
        };
        let host = interfaces::of_this_host();
        let (include, exclude) = (&options.if_include, &options.if_exclude);
        let mut listeners = Vec::new();
        let mut addresses = Vec::new();
        let mut failed = SessionError::Kernel("no interface", nix::libc::EADDRNOTAVAIL);
        let mut lines: Vec<String> = Vec::new();
        for address in interfaces::choose(&host, include, exclude) {
            match session.listen(SocketAddr::new(address.ip, 0)) {
                Ok(listener) => {
                    let known = lines.iter().position(|name| *name == address.interface);
                    let line = known.unwrap_or(lines.len());
                    if known.is_none() {
                        lines.push(address.interface);
                    }
                    addresses.push(ProcAddress {
                        addr: listener.local_addr(),
                        prefix: address.prefix,
                        line: line as u8,
                    });
                    listeners.push(listener);
                }
                Err(e) => failed = e,
            }
        }
        if listeners.is_empty() {
            return Err(failed);
        }
        let mut token = [0; 8];
        getrandom::fill(&mut token)
            .map_err(|e| SessionError::Agent(io::Error::other(e.to_string())))?;
        let module = Self {
            me: options.me,
            upcalls,
            hello_limit: options.hello_limit,
            session,
            blob: ProcBlob {
                token: u64::from_le_bytes(token),
                reads: false,
                addresses,
            },
            peers: Mutex::default(),
            progress: Mutex::new(ProgressState::new(listeners)),
            fresh: Mutex::default(),
            has_fresh: AtomicBool::new(false),
            doubts: Doubts::default(),
            deferred: Arc::default(),
            deferred_thread: DeferredThread::default(),
            memory,
            gets: Gets::default(),
        };
        module.log(1, || format!("listens at {:?}", module.blob.addresses));
        Ok(module)
    }

    /// The blob that other processes need to connect. `reads`: this process can read their memory.
    pub fn blob(&self, reads: bool) -> Vec<u8> {
        let blob = ProcBlob {
            reads,
            ..self.blob.clone()
        };
        blob.encode()
    }

    fn log(&self, level: c_int, text: impl FnOnce() -> String) {
        self.upcalls.say(level, text);
    }

    fn peers(&self) -> MutexGuard<'_, HashMap<ProcName, Arc<BtlEndpoint>>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The peer with this name; makes it if it is unknown.
    fn peer(&self, name: ProcName) -> Arc<BtlEndpoint> {
        let mut peers = self.peers();
        let new = || Arc::new(BtlEndpoint::new(name));
        peers.entry(name).or_insert_with(new).clone()
    }

    /// Returns the endpoint of a process that Open MPI wants to reach; `None` if its blob cannot be used. The endpoint stays until
    /// [`remove`](Self::remove).
    pub fn add(&self, name: ProcName, proc: *mut c_void, blob: &[u8]) -> Option<Arc<BtlEndpoint>> {
        let blob = ProcBlob::parse(blob)?;
        let own = &self.blob.addresses;
        if blob.candidates(own).is_empty() {
            return None;
        }
        let peer = self.peer(name);
        if peer.proc().is_null() {
            peer.describe(proc, &blob, own);
            // Open MPI's pointer counts as an owner.
            std::mem::forget(peer.clone());
        }
        Some(peer)
    }

    /// Whether memory of the program can be registered, so that peers can read it.
    pub fn reads_memory(&self) -> bool {
        !self.memory.is_empty()
    }

    /// Registers memory of the program, for peers or for a [`get`](Self::get). `None` if that is impossible.
    ///
    /// # Safety
    /// As for [`MemoryPorts::register`].
    pub unsafe fn register(
        &self,
        at: *mut u8,
        len: usize,
        access: ProgramAccess,
    ) -> Option<MemoryAtPorts> {
        // SAFETY: the caller's promise.
        let memory = unsafe { self.memory.register(at, len, access) };
        memory.inspect_err(|e| self.log(1, || e.to_string())).ok()
    }

    /// Reads bytes of a peer's memory into memory of this process. The callback comes from [`progress`](Self::progress), with an error if they must be
    /// sent another way.
    pub fn get(&self, endpoint: &Arc<BtlEndpoint>, callback: GetCallback, bytes: &GetBytes<'_>) {
        self.gets.begin(endpoint, callback, bytes);
    }

    /// Open MPI lets go of this process: says goodbye.
    pub fn remove(&self, endpoint: &Arc<BtlEndpoint>) {
        self.peers().remove(&endpoint.name);
        self.gets.forget(endpoint);
        let flows = endpoint.say_goodbye();
        let begun = Instant::now();
        loop {
            let mut done = Vec::new();
            endpoint.flush(&mut done);
            self.complete(endpoint, done, SUCCESS);
            let tries = !flows.is_empty() && !endpoint.is_flushed() && begun.elapsed() < GOODBYE;
            if !tries {
                break;
            }
            thread::sleep(NAP);
        }
        self.deferred.forget(endpoint);
        // Callbacks for what the thread has sent, while Open MPI still knows the peer.
        self.complete_deferred();
        endpoint.end(true).into_iter().for_each(FragRef::free);
        for flow in flows {
            // Progress receives the rest, and closes the flow at the end of the peer's stream.
            let _ = flow.finish();
        }
    }

    /// Sends a fragment: 1 if it is sent, and completed; 0 if its callback was or will be called; negative if the peer is lost, and
    /// the fragment still belongs to the caller.
    pub fn send(&self, endpoint: &Arc<BtlEndpoint>, frag: FragRef, tag: u8) -> c_int {
        let mut effects = SendEffects::default();
        let round = self.round();
        let outcome = endpoint.send(frag, tag, round, &mut effects);
        self.take_effect(endpoint, effects);
        match outcome {
            SendOutcome::Sent(frag) => {
                self.complete(endpoint, [frag], SUCCESS);
                1
            }
            SendOutcome::Queued => 0,
            SendOutcome::Unconnected => {
                if self.connect(endpoint) == Some(false) {
                    // Open MPI cannot be told from here: progress does that.
                    self.announce(BtlLink::unreachable(endpoint.clone()));
                }
                0
            }
            SendOutcome::Unreachable(frag) => {
                // The caller has the descriptor.
                let _ = frag.into_raw();
                UNREACHABLE
            }
        }
    }

    /// Sends a payload of two parts. Returns false if that is not possible now.
    pub fn send_now(&self, endpoint: &Arc<BtlEndpoint>, tag: u8, payload: [&[u8]; 2]) -> bool {
        let mut effects = SendEffects::default();
        let round = self.round();
        let sent = endpoint.send_now(tag, payload, round, &mut effects);
        self.take_effect(endpoint, effects);
        sent
    }

    /// Number of the present call of progress, or of the last one; from 1 on.
    fn round(&self) -> u64 {
        self.deferred.rounds.load(Ordering::Relaxed) + 1
    }

    fn take_effect(&self, endpoint: &Arc<BtlEndpoint>, effects: SendEffects) {
        if effects.deferred {
            self.deferred_thread.defer(&self.deferred, endpoint);
        }
        if effects.blocked {
            self.deferred_thread.watch(&self.deferred, endpoint);
        }
        self.complete(endpoint, effects.done, SUCCESS);
    }

    /// Sends the frames that wait for a system call, and completes what the thread has sent. Returns the number of fragments.
    fn flush_deferred(&self) -> usize {
        let mut sent = 0;
        for endpoint in self.deferred.take() {
            let mut done = Vec::new();
            endpoint.flush(&mut done);
            sent += done.len();
            self.complete(&endpoint, done, SUCCESS);
            if !endpoint.is_flushed() {
                self.deferred_thread.watch(&self.deferred, &endpoint);
            }
        }
        sent + self.complete_deferred()
    }

    /// Completes what the thread has sent. Returns the number of fragments.
    fn complete_deferred(&self) -> usize {
        let sent = self.deferred.take_sent();
        let count = sent.len();
        for (endpoint, frag) in sent {
            self.complete(&endpoint, [frag], SUCCESS);
        }
        count
    }

    /// Begins to connect to a peer, unless that is under way (`None`). Returns whether it has begun.
    fn connect(&self, endpoint: &Arc<BtlEndpoint>) -> Option<bool> {
        endpoint.connect(|addr, token| match self.session.try_connect(addr) {
            Ok(flow) => {
                self.log(2, || format!("connects to {} at {addr}", endpoint.name));
                let id = flow.id();
                self.announce(BtlLink::connecting(flow, endpoint.clone(), token, false));
                Some(id)
            }
            Err(e) => {
                self.log(1, || format!("{} at {addr}: {e}", endpoint.name));
                None
            }
        })
    }

    fn announce(&self, link: BtlLink) {
        let mut fresh = self.fresh.lock().unwrap_or_else(PoisonError::into_inner);
        fresh.push(link);
        self.has_fresh.store(true, Ordering::Release);
    }

    fn take_fresh(&self) -> Vec<BtlLink> {
        if !self.has_fresh.load(Ordering::Acquire) {
            return Vec::new();
        }
        let mut fresh = self.fresh.lock().unwrap_or_else(PoisonError::into_inner);
        self.has_fresh.store(false, Ordering::Release);
        std::mem::take(&mut *fresh)
    }

    fn complete(
        &self,
        endpoint: &Arc<BtlEndpoint>,
        done: impl IntoIterator<Item = FragRef>,
        status: c_int,
    ) {
        let at = Arc::as_ptr(endpoint).cast_mut().cast();
        for frag in done {
            // SAFETY: both are Open MPI's own pointers; the caller holds no lock of an endpoint.
            unsafe { frag.complete(self.upcalls.module, at, status) };
        }
    }

    /// Says goodbye to all peers, and waits a little for their goodbyes.
    pub fn close(self) {
        if self.reads_memory() {
            self.log(1, || self.gets.tallies().to_string());
        }
        let peers: Vec<_> = self.peers().values().cloned().collect();
        peers.iter().for_each(|peer| self.remove(peer));
        let begun = Instant::now();
        while begun.elapsed() < GOODBYES {
            self.progress();
            if self.is_alone() {
                break;
            }
            thread::sleep(NAP);
        }
        self.deferred_thread.end(&self.deferred);
        self.flush_deferred();
        let Self {
            session, progress, ..
        } = self;
        drop(progress);
        // At a timeout the agent still ends by itself.
        let _ = session.close(END);
    }
}

impl fmt::Debug for BtlModule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BtlModule")
            .field("me", &self.me)
            .field("round", &self.round())
            .finish_non_exhaustive()
    }
}
