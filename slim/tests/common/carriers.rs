//! Sessions whose flows go to pipes in memory, as carriers, and back to TCP.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::io::{IoSlice, IoSliceMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Wake, Waker};

use slim::{Endpoint, Flow, Session, SessionOptions};
use slim_agent::Transport;
use slim_agent::transport::{Connection, Provider};
use slim_core::transport::TransportKind;
use slim_stream::Carrier;
use slim_sys::{Errno, OwnFd};

use super::memory::{Handing, PipeEnd, PipeNet, Pipes};
use super::{LIMIT, listen, wait_until};

/// An eventfd that a pipe signals, once until it is reset.
struct Event {
    fd: OwnFd,
    signalled: AtomicBool,
}

impl Wake for Event {
    fn wake(self: Arc<Self>) {
        if !self.signalled.swap(true, Ordering::SeqCst) {
            slim_sys::signal_eventfd(self.fd.raw());
        }
    }
}

/// An end of a pipe as a carrier.
pub struct PipeCarrier {
    end: PipeEnd,
    event: Arc<Event>,
    waker: Waker,
    ended: AtomicBool,
    /// How often the event was reset.
    pub resets: AtomicU64,
    /// Called once, when the next receive has found nothing and not returned yet.
    pub on_dry: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl PipeCarrier {
    fn new(end: PipeEnd) -> Self {
        let event = Arc::new(Event {
            fd: slim_sys::eventfd().unwrap(),
            signalled: AtomicBool::new(false),
        });
        let carrier = PipeCarrier {
            end,
            waker: event.clone().into(),
            event,
            ended: AtomicBool::new(false),
            resets: AtomicU64::new(0),
            on_dry: Mutex::default(),
        };
        carrier.arm(false);
        carrier
    }

    /// Signals the event for no reason.
    pub fn signal(&self) {
        self.waker.wake_by_ref();
    }

    /// Has the event signalled when it is worth to try again.
    fn arm(&self, write: bool) {
        let mut context = Context::from_waker(&self.waker);
        let ready = match write {
            true => self.end.poll_writable(&mut context),
            false => self.end.poll_readable(&mut context),
        };
        if ready.is_ready() {
            self.waker.wake_by_ref();
        }
    }
}

fn errno(e: std::io::Error) -> Errno {
    match e.kind() {
        std::io::ErrorKind::WouldBlock => libc::EAGAIN,
        // Each number but one means that it is broken, also one that does not for a socket.
        _ => libc::EINVAL,
    }
}

impl Carrier for PipeCarrier {
    fn send(&self, data: &[IoSlice<'_>]) -> Result<usize, Errno> {
        if self.ended.load(Ordering::SeqCst) {
            return Err(libc::EPIPE);
        }
        let mut taken = 0;
        for piece in data.iter().filter(|piece| !piece.is_empty()) {
            let sent = self.end.send(piece).map_err(errno);
            let n = match sent {
                Ok(n) => n,
                Err(_) if taken > 0 => 0,
                Err(libc::EAGAIN) => {
                    self.arm(true);
                    return Err(libc::EAGAIN);
                }
                Err(e) => return Err(e),
            };
            taken += n;
            if n < piece.len() {
                self.arm(true);
                break;
            }
        }
        Ok(taken)
    }

    fn recv(&self, into: &mut [IoSliceMut<'_>]) -> Result<usize, Errno> {
        let mut taken = 0;
        for piece in into.iter_mut().filter(|piece| !piece.is_empty()) {
            let n = match self.end.recv(piece).map_err(errno) {
                Ok(n) => n,
                Err(_) if taken > 0 => 0,
                Err(e) => {
                    self.arm(false);
                    let dry = self.on_dry.lock().unwrap().take();
                    dry.into_iter().for_each(|f| f());
                    return Err(e);
                }
            };
            taken += n;
            if n < piece.len() {
                break;
            }
        }
        Ok(taken)
    }

    fn unread(&self) -> u64 {
        self.end.unread()
    }

    fn has_room(&self) -> bool {
        let room = self.end.has_room();
        if !room {
            self.arm(true);
        }
        room
    }

    fn unacked(&self) -> u64 {
        self.end.unacked()
    }

    fn is_over(&self) -> bool {
        self.end.is_broken()
    }

    fn end(&self) {
        self.ended.store(true, Ordering::SeqCst);
        self.end.shut_write();
    }

    fn suspend(&self) {
        self.end.shut_down();
        self.waker.wake_by_ref();
    }

    fn descriptor(&self) -> &OwnFd {
        &self.event.fd
    }

    fn reset(&self) {
        slim_sys::reset_eventfd(self.event.fd.raw());
        // In this order: what is not signalled because of this has happened before.
        self.event.signalled.store(false, Ordering::SeqCst);
        self.resets.fetch_add(1, Ordering::SeqCst);
    }
}

/// The carriers of all flows, at both ends.
#[derive(Clone, Default)]
pub struct Carriers(Arc<Mutex<Vec<Weak<PipeCarrier>>>>);

impl Carriers {
    /// Those that exist.
    pub fn all(&self) -> Vec<Arc<PipeCarrier>> {
        let all = self.0.lock().unwrap();
        all.iter().filter_map(Weak::upgrade).collect()
    }

    pub fn count(&self) -> usize {
        self.all().len()
    }
}

/// Two sessions that have TCP, and pipes, which they prefer.
pub struct TwoSessions {
    pub net: Arc<PipeNet>,
    pub client: Session,
    pub server: Session,
    pub endpoint: Endpoint,
    pub carriers: Carriers,
}

impl TwoSessions {
    pub fn open(options: &SessionOptions) -> Self {
        let net = Arc::<PipeNet>::default();
        let carriers = Carriers::default();
        let handing: Handing = {
            let carriers = carriers.clone();
            Arc::new(move |end| {
                let carrier = Arc::new(PipeCarrier::new(end));
                carriers.0.lock().unwrap().push(Arc::downgrade(&carrier));
                Transport::Other(Box::new(carrier as Arc<dyn Carrier>))
            })
        };
        let session = |side| {
            let pipes = Pipes::new(&net, side, TransportKind::TEST).handed(handing.clone());
            let kinds = vec![Box::new(pipes) as Box<dyn Provider + Send>];
            Session::open_with(options.clone(), kinds).expect("the session opens")
        };
        let (client, server) = (session(0), session(1));
        let endpoint = listen(&server);
        TwoSessions {
            net,
            client,
            server,
            endpoint,
            carriers,
        }
    }

    /// No pipe can be made, and those that there are break; or pipes can be made again.
    pub fn set_down(&self, down: bool) {
        self.net.down.store(down, Ordering::Relaxed);
        if down {
            self.break_pipes();
        }
    }

    /// Breaks all pipes. Bytes in flight are lost.
    pub fn break_pipes(&self) {
        for carrier in self.carriers.all() {
            carrier.end.shut_down();
        }
    }

    /// A flow that is carried by a pipe.
    pub fn carried_pair(&self) -> (Flow, Flow) {
        let (near, far) = self.pair();
        self.wait_carried([&near, &far]);
        (near, far)
    }

    /// A flow that begins on TCP.
    pub fn pair(&self) -> (Flow, Flow) {
        let near = self.client.connect(self.endpoint.local_addr(), LIMIT);
        let near = near.unwrap();
        let far = self.endpoint.accept(LIMIT).unwrap();
        for flow in [&near, &far] {
            flow.wait_negotiated(LIMIT);
        }
        (near, far)
    }

    /// Waits until a pipe carries the flow, which moves there by itself.
    pub fn wait_carried(&self, flow: [&Flow; 2]) {
        let [near, far] = flow;
        wait_until("carried by a pipe", || {
            near.send_all(b"?", LIMIT).unwrap();
            far.recv_exact(&mut [0], LIMIT).unwrap();
            far.send_all(b"!", LIMIT).unwrap();
            near.recv_exact(&mut [0], LIMIT).unwrap();
            near.connection().is_none() && far.connection().is_none()
        });
    }
}
