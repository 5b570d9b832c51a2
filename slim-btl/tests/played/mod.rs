//! A module under test, and a peer that the test plays by plain sockets, which a session takes for a peer without SLIM: no broken
//! connection is resumed.
#![allow(dead_code, reason = "each test program uses only some of these items")]

use std::ffi::{c_char, c_int, c_void};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use slim::Config;
use slim_btl::endpoint::BtlEndpoint;
use slim_btl::frag::{BTL_OWNERSHIP, FragRef};
use slim_btl::hdr::{BtlHello, FrameHeader, FrameKind, HEADER};
use slim_btl::module::{BtlModule, ModuleOptions, Upcalls};
use slim_btl::proc::{ProcAddress, ProcBlob, ProcName};
use slim_verbs::TransportKinds;

pub const LIMIT: Duration = Duration::from_secs(20);
pub const TAG: u8 = 0x41;
/// The module under test. The peer that the test plays has a lower or a higher name.
const ME: ProcName = ProcName(5);

/// What a module has called.
#[derive(Default)]
pub struct Heard {
    pub delivered: Vec<Vec<u8>>,
    pub lost: Vec<u64>,
}

/// One test at a time, since the functions that a module calls have no argument of the test.
static TURN: Mutex<()> = Mutex::new(());
static HEARD: Mutex<Heard> = Mutex::new(Heard {
    delivered: Vec::new(),
    lost: Vec::new(),
});

pub fn heard<T>(f: impl FnOnce(&mut Heard) -> T) -> T {
    f(&mut HEARD.lock().unwrap_or_else(|e| e.into_inner()))
}

unsafe extern "C" fn deliver(_: *const c_void, tag: u8, data: *mut u8, len: usize) {
    assert_eq!(tag, TAG);
    // SAFETY: the module's promise.
    let bytes = unsafe { slice::from_raw_parts(data, len) }.to_vec();
    heard(|heard| heard.delivered.push(bytes));
}

unsafe extern "C" fn lost(_: *mut c_void, name: u64, _: *const c_char, _: usize) {
    heard(|heard| heard.lost.push(name));
}

unsafe extern "C" fn log(_: c_int, text: *const c_char, len: usize) {
    // SAFETY: the module's promise.
    let text = unsafe { slice::from_raw_parts(text.cast::<u8>(), len) };
    println!("{}", String::from_utf8_lossy(text));
}

/// Open MPI knows that the peers have failed.
pub static FAILED: AtomicBool = AtomicBool::new(false);

unsafe extern "C" fn has_failed(_: *mut c_void, _: u64) -> c_int {
    FAILED.load(Ordering::SeqCst).into()
}

/// Opens a module on loopback that gives strangers this time for their hello.
pub fn module(hello_limit: Duration) -> BtlModule {
    // The test's own end has no SLIM.
    open(Duration::from_millis(50), hello_limit, false)
}

/// The same, with the time for which a session asks a peer that does not answer. `survives_losses`: as with ULFM.
pub fn open(hello_timeout: Duration, hello_limit: Duration, survives_losses: bool) -> BtlModule {
    let upcalls = Upcalls {
        module: ptr::null_mut(),
        verbose: 2,
        survives_losses: survives_losses.into(),
        deliver,
        lost,
        log,
        has_failed,
    };
    let options = ModuleOptions {
        me: ME,
        if_include: "127.0.0.0/8".into(),
        if_exclude: String::new(),
        transports: TransportKinds::default(),
        config: Config {
            hello_timeout,
            ..Config::default()
        },
        hello_limit,
    };
    BtlModule::open(options, upcalls).unwrap()
}

pub fn address(module: &BtlModule) -> (SocketAddr, u64) {
    let blob = ProcBlob::parse(&module.blob(false)).unwrap();
    (blob.addresses[0].addr, blob.token)
}

/// Makes progress until `what` is there.
pub fn until<T>(module: &BtlModule, mut what: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        module.progress();
        if let Some(got) = what() {
            return got;
        }
        assert!(begun.elapsed() < LIMIT, "nothing came");
    }
}

/// Reads so many bytes while the module makes progress. `None`: the connection ends before.
pub fn read(module: &BtlModule, from: &mut TcpStream, len: usize) -> Option<Vec<u8>> {
    if len == 0 {
        return Some(Vec::new());
    }
    from.set_nonblocking(true).unwrap();
    let (mut bytes, mut at) = (vec![0; len], 0);
    until(module, || match from.read(&mut bytes[at..]) {
        Ok(0) => Some(false),
        Ok(n) => {
            at += n;
            (at == len).then_some(true)
        }
        Err(e) if e.kind() == ErrorKind::WouldBlock => None,
        Err(_) => Some(false),
    })
    .then_some(bytes)
}

/// The next frame; `None` at the end of the connection.
pub fn frame(module: &BtlModule, from: &mut TcpStream) -> Option<(FrameKind, Vec<u8>)> {
    let header = read(module, from, HEADER)?;
    let header = FrameHeader::parse(header.try_into().unwrap()).unwrap();
    let payload = read(module, from, header.frame_len() - HEADER)?;
    Some((header.kind, payload))
}

/// Ends a connection with a reset.
pub fn reset(stream: TcpStream) {
    let linger = nix::libc::linger {
        l_onoff: 1,
        l_linger: 0,
    };
    nix::sys::socket::setsockopt(&stream, nix::sys::socket::sockopt::Linger, &linger).unwrap();
}

/// Connects to the module and says hello.
pub fn hello(module: &BtlModule, name: ProcName) -> TcpStream {
    let (addr, token) = address(module);
    let mut stream = TcpStream::connect(addr).unwrap();
    let hello = BtlHello {
        name,
        token,
        is_rail: false,
    };
    stream.write_all(&hello.encode()).unwrap();
    stream
}

pub fn control(kind: FrameKind) -> [u8; HEADER] {
    FrameHeader::control(kind).encode()
}

pub fn data(payload: &[u8; 8]) -> Vec<u8> {
    let header = FrameHeader {
        kind: FrameKind::Data,
        tag: TAG,
        len: payload.len(),
    };
    [&header.encode()[..], payload].concat()
}

/// A fragment of this length, all bytes 5. Like Open MPI, the test finds its memory by `des_segments`, which is at 56.
pub fn fragment(len: usize, flags: u32) -> FragRef {
    let frag = FragRef::allocate(len, flags, 255).unwrap().into_raw();
    // SAFETY: the descriptor was made above, and is the test's until it is sent. A segment begins with its address.
    unsafe {
        let segment = frag.byte_add(56).cast::<*const *mut u8>().read();
        ptr::write_bytes(*segment, 5, len);
        FragRef::from_raw(NonNull::new(frag).unwrap())
    }
}

/// A process that only listens.
pub struct Listening {
    pub listener: TcpListener,
    pub name: ProcName,
}

impl Listening {
    pub fn new(name: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let name = ProcName(name);
        Self { listener, name }
    }

    /// A control socket that answers nothing. Without it the kernel refuses the session's question, and the flow is plain at once.
    pub fn control_socket(&self) -> UdpSocket {
        UdpSocket::bind(self.listener.local_addr().unwrap()).unwrap()
    }

    /// Sends a fragment of 8 bytes to it.
    pub fn send(&self, module: &BtlModule) -> Arc<BtlEndpoint> {
        let blob = ProcBlob {
            reads: false,
            token: 7,
            addresses: vec![ProcAddress {
                addr: self.listener.local_addr().unwrap(),
                prefix: 8,
                line: 0,
            }],
        };
        let proc = ptr::dangling_mut();
        let endpoint = module.add(self.name, proc, &blob.encode()).unwrap();
        let frag = fragment(8, BTL_OWNERSHIP);
        assert_eq!(module.send(&endpoint, frag, TAG), 0);
        endpoint
    }

    /// Accepts a connection of the module, and gets its confirmation and the fragment that has waited.
    pub fn accept_and_get_data(&self, module: &BtlModule) -> TcpStream {
        let mut stream = self.accept(module);
        stream.write_all(&control(FrameKind::Accept)).unwrap();
        let kinds: Vec<_> = (0..2)
            .map(|_| frame(module, &mut stream).unwrap().0)
            .collect();
        assert_eq!(kinds, [FrameKind::Confirm, FrameKind::Data]);
        stream
    }

    /// Accepts a connection, and reads its hello.
    pub fn accept(&self, module: &BtlModule) -> TcpStream {
        let mut stream = until(module, || self.listener.accept().ok()).0;
        let (kind, _) = frame(module, &mut stream).expect("a hello");
        assert_eq!(kind, FrameKind::Hello);
        stream
    }
}

pub fn turn() -> std::sync::MutexGuard<'static, ()> {
    let turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
    heard(|heard| *heard = Heard::default());
    turn
}

pub fn nobody_is_lost() {
    let lost = heard(|heard| heard.lost.clone());
    assert!(lost.is_empty(), "{lost:?}");
}
