//! The handshake of two components when connections break in the middle of it. The test plays one of them by plain sockets, which a
//! session takes for a peer without SLIM: no broken connection is resumed.

use std::ffi::{c_char, c_int, c_void};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use slim::Config;
use slim_btl::endpoint::BtlEndpoint;
use slim_btl::frag::{ALWAYS_CALLBACK, BTL_OWNERSHIP, BtlDescriptor, FragRef};
use slim_btl::hdr::{BtlHello, FrameHeader, FrameKind, HEADER};
use slim_btl::module::{BtlModule, ModuleOptions, Upcalls};
use slim_btl::proc::{ProcAddress, ProcBlob, ProcName};

const LIMIT: Duration = Duration::from_secs(20);
const TAG: u8 = 0x41;
/// The module under test. The peer that the test plays has a lower or a higher name.
const ME: ProcName = ProcName(5);

/// What a module has called.
#[derive(Default)]
struct Heard {
    delivered: Vec<Vec<u8>>,
    lost: Vec<u64>,
}

/// One test at a time, since the functions that a module calls have no argument of the test.
static TURN: Mutex<()> = Mutex::new(());
static HEARD: Mutex<Heard> = Mutex::new(Heard {
    delivered: Vec::new(),
    lost: Vec::new(),
});

fn heard<T>(f: impl FnOnce(&mut Heard) -> T) -> T {
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

unsafe extern "C" fn has_failed(_: *mut c_void, _: u64) -> c_int {
    0
}

/// Opens a module on loopback that gives strangers this time for their hello.
fn module(hello_limit: Duration) -> BtlModule {
    let upcalls = Upcalls {
        module: ptr::null_mut(),
        verbose: 2,
        survives_losses: 0,
        deliver,
        lost,
        log,
        has_failed,
    };
    let options = ModuleOptions {
        me: ME,
        if_include: "127.0.0.0/8".into(),
        if_exclude: String::new(),
        config: Config {
            // The test's own end has no SLIM.
            hello_timeout: Duration::from_millis(50),
            ..Config::default()
        },
        hello_limit,
    };
    BtlModule::open(options, upcalls).unwrap()
}

fn address(module: &BtlModule) -> (SocketAddr, u64) {
    let blob = ProcBlob::parse(&module.blob()).unwrap();
    (blob.addresses[0].addr, blob.token)
}

/// Makes progress until `what` is there.
fn until<T>(module: &BtlModule, mut what: impl FnMut() -> Option<T>) -> T {
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
fn read(module: &BtlModule, from: &mut TcpStream, len: usize) -> Option<Vec<u8>> {
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
fn frame(module: &BtlModule, from: &mut TcpStream) -> Option<(FrameKind, Vec<u8>)> {
    let header = read(module, from, HEADER)?;
    let header = FrameHeader::parse(header.try_into().unwrap()).unwrap();
    let payload = read(module, from, header.frame_len() - HEADER)?;
    Some((header.kind, payload))
}

/// Ends a connection with a reset.
fn reset(stream: TcpStream) {
    let linger = nix::libc::linger {
        l_onoff: 1,
        l_linger: 0,
    };
    nix::sys::socket::setsockopt(&stream, nix::sys::socket::sockopt::Linger, &linger).unwrap();
}

/// Connects to the module and says hello.
fn hello(module: &BtlModule, name: ProcName) -> TcpStream {
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

fn control(kind: FrameKind) -> [u8; HEADER] {
    FrameHeader::control(kind).encode()
}

fn data(payload: &[u8; 8]) -> Vec<u8> {
    let header = FrameHeader {
        kind: FrameKind::Data,
        tag: TAG,
        len: payload.len(),
    };
    [&header.encode()[..], payload].concat()
}

/// A fragment of this length, all bytes 5. Like Open MPI, the test finds its memory by `des_segments`, which is at 56.
fn fragment(len: usize, flags: u32) -> FragRef {
    let frag = FragRef::allocate(len, flags, 255).unwrap().into_raw();
    // SAFETY: the descriptor was made above, and is the test's until it is sent. A segment begins with its address.
    unsafe {
        let segment = frag.byte_add(56).cast::<*const *mut u8>().read();
        ptr::write_bytes(*segment, 5, len);
        FragRef::from_raw(NonNull::new(frag).unwrap())
    }
}

/// A process that only listens.
struct Listening {
    listener: TcpListener,
    name: ProcName,
}

impl Listening {
    fn new(name: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let name = ProcName(name);
        Self { listener, name }
    }

    /// Sends a fragment of 8 bytes to it.
    fn send(&self, module: &BtlModule) -> Arc<BtlEndpoint> {
        let blob = ProcBlob {
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
    fn accept_and_get_data(&self, module: &BtlModule) -> TcpStream {
        let mut stream = self.accept(module);
        stream.write_all(&control(FrameKind::Accept)).unwrap();
        let kinds: Vec<_> = (0..2)
            .map(|_| frame(module, &mut stream).unwrap().0)
            .collect();
        assert_eq!(kinds, [FrameKind::Confirm, FrameKind::Data]);
        stream
    }

    /// Accepts a connection, and reads its hello.
    fn accept(&self, module: &BtlModule) -> TcpStream {
        let mut stream = until(module, || self.listener.accept().ok()).0;
        let (kind, _) = frame(module, &mut stream).expect("a hello");
        assert_eq!(kind, FrameKind::Hello);
        stream
    }
}

fn turn() -> std::sync::MutexGuard<'static, ()> {
    let turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
    heard(|heard| *heard = Heard::default());
    turn
}

fn nobody_is_lost() {
    let lost = heard(|heard| heard.lost.clone());
    assert!(lost.is_empty(), "{lost:?}");
}

#[test]
fn a_connection_that_breaks_before_it_is_accepted_is_made_anew() {
    let _turn = turn();
    let module = module(LIMIT);
    let peer = Listening::new(9);
    peer.send(&module);
    for _ in 0..5 {
        reset(peer.accept(&module));
    }
    let mut stream = peer.accept_and_get_data(&module);
    nobody_is_lost();
    stream.write_all(&control(FrameKind::Goodbye)).unwrap();
    module.close();
}

#[test]
fn a_peer_that_refuses_connections_is_lost() {
    let _turn = turn();
    let module = module(LIMIT);
    let peer = Listening::new(9);
    peer.send(&module);
    reset(peer.accept(&module));
    drop(peer);
    until(&module, || {
        heard(|heard| (!heard.lost.is_empty()).then_some(()))
    });
    assert_eq!(heard(|heard| heard.lost.clone()), [9]);
    module.close();
}

/// The connector has not heard of the acceptance, and connects anew.
#[test]
fn an_accepted_connection_that_breaks_before_it_is_used_is_replaced() {
    let _turn = turn();
    let module = module(LIMIT);
    for wait in [true, false] {
        let mut first = hello(&module, ProcName(3));
        if wait {
            assert_eq!(frame(&module, &mut first).unwrap().0, FrameKind::Accept);
        }
        let mut second = hello(&module, ProcName(3));
        reset(first);
        assert_eq!(frame(&module, &mut second).unwrap().0, FrameKind::Accept);
        if wait {
            reset(second);
            continue;
        }
        second.write_all(&control(FrameKind::Confirm)).unwrap();
        second.write_all(&data(b"whatever")).unwrap();
        until(&module, || heard(|heard| heard.delivered.pop()));
        second.write_all(&control(FrameKind::Goodbye)).unwrap();
    }
    nobody_is_lost();
    module.close();
}

/// Two connections cross, and the one that was chosen breaks before it is confirmed.
#[test]
fn a_crossing_connection_that_breaks_loses_no_fragment() {
    let _turn = turn();
    let module = module(LIMIT);
    // The lower name: its connection is the one that is used.
    let peer = Listening::new(3);
    peer.send(&module);
    let mut ours = peer.accept(&module);
    let mut theirs = hello(&module, peer.name);
    assert_eq!(frame(&module, &mut theirs).unwrap().0, FrameKind::Accept);
    ours.write_all(&control(FrameKind::Reject)).unwrap();
    assert_eq!(frame(&module, &mut ours), None);
    reset(theirs);
    let mut again = peer.accept_and_get_data(&module);
    nobody_is_lost();
    again.write_all(&control(FrameKind::Goodbye)).unwrap();
    module.close();
}

/// The peer has rejected the connection in favour of its own, which never comes.
#[test]
fn a_rejected_connector_does_not_wait_for_ever() {
    let _turn = turn();
    let module = module(LIMIT);
    let peer = Listening::new(3);
    peer.send(&module);
    let mut first = peer.accept(&module);
    first.write_all(&control(FrameKind::Reject)).unwrap();
    let mut second = peer.accept_and_get_data(&module);
    nobody_is_lost();
    second.write_all(&control(FrameKind::Goodbye)).unwrap();
    module.close();
}

/// A peer that has said goodbye, and connects again.
#[test]
fn a_peer_that_has_left_in_order_may_come_back() {
    let _turn = turn();
    let module = module(LIMIT);
    for _ in 0..2 {
        let mut stream = hello(&module, ProcName(3));
        assert_eq!(frame(&module, &mut stream).unwrap().0, FrameKind::Accept);
        stream.write_all(&control(FrameKind::Confirm)).unwrap();
        stream.write_all(&data(b"whatever")).unwrap();
        until(&module, || heard(|heard| heard.delivered.pop()));
        stream.write_all(&control(FrameKind::Goodbye)).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        while frame(&module, &mut stream).is_some() {}
    }
    nobody_is_lost();
    module.close();
}

#[test]
fn a_stranger_that_says_nothing_is_disconnected() {
    let _turn = turn();
    let module = module(Duration::from_millis(300));
    let mut stream = TcpStream::connect(address(&module).0).unwrap();
    let begun = Instant::now();
    assert_eq!(read(&module, &mut stream, 1), None);
    assert!(begun.elapsed() > Duration::from_millis(250));
    nobody_is_lost();
    module.close();
}

type Callback = unsafe extern "C" fn(*mut c_void, *mut c_void, *mut BtlDescriptor, c_int);

static COMPLETED: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" fn completed(
    _: *mut c_void,
    _: *mut c_void,
    _: *mut BtlDescriptor,
    status: c_int,
) {
    assert_eq!(status, 0);
    COMPLETED.fetch_add(1, Ordering::SeqCst);
}

/// The thread for deferred sends has sent a fragment, and the program makes no progress before it lets go of the peer.
#[test]
fn letting_go_of_a_peer_completes_what_the_thread_has_sent() {
    let _turn = turn();
    COMPLETED.store(0, Ordering::SeqCst);
    let module = module(LIMIT);
    let peer = Listening::new(9);
    let endpoint = peer.send(&module);
    let mut stream = peer.accept_and_get_data(&module);
    // The first send goes to the kernel at once; the second one, too long to be copied, is left to the thread.
    let lens = [8, 10_000];
    for len in lens {
        let flags = BTL_OWNERSHIP | ALWAYS_CALLBACK;
        let frag = fragment(len, flags).into_raw();
        let callback: Callback = completed;
        // SAFETY: the descriptor is the test's until it is sent. Like Open MPI, the test writes to `des_cbfunc`, which is at 72.
        unsafe { frag.byte_add(72).cast::<Callback>().write(callback) };
        // SAFETY: the descriptor was made above.
        let frag = unsafe { FragRef::from_raw(NonNull::new(frag).unwrap()) };
        assert!(module.send(&endpoint, frag, TAG) >= 0);
    }
    let whole = (8 + 8) + (8 + 10_000);
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.read_exact(&mut vec![0; whole]).unwrap();
    // The thread notes what it has sent just after the system call.
    thread::sleep(Duration::from_millis(20));
    assert_eq!(COMPLETED.load(Ordering::SeqCst), 1);
    module.remove(&endpoint);
    assert_eq!(COMPLETED.load(Ordering::SeqCst), 2);
    module.close();
}

/// The kernel refuses messages, and the program makes no progress when it would take them: it computes, or waits for something else.
#[test]
fn refused_messages_are_sent_although_the_program_makes_no_progress() {
    let _turn = turn();
    let module = module(LIMIT);
    let peer = Listening::new(9);
    let endpoint = peer.send(&module);
    let mut stream = peer.accept_and_get_data(&module);
    // More than the kernel takes; the last ones are short, so that they are copied and count as sent.
    let mut frames = 0;
    for len in [1 << 20; 16].into_iter().chain([8; 3]) {
        let frag = fragment(len, BTL_OWNERSHIP);
        assert!(module.send(&endpoint, frag, TAG) >= 0);
        frames += HEADER + len;
    }
    thread::sleep(Duration::from_millis(100));
    stream.set_nonblocking(false).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(5)))
        .unwrap();
    let mut bytes = vec![0; frames];
    stream.read_exact(&mut bytes).expect("all messages come");
    assert_eq!(&bytes[frames - 8..], &[5; 8]);
    stream.write_all(&control(FrameKind::Goodbye)).unwrap();
    module.close();
}
