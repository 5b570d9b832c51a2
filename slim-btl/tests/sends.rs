//! Messages to and from a peer: all that Open MPI has sent goes out and is completed, and it hears of no peer that has failed.

mod played;

use std::ffi::{c_int, c_void};
use std::io::{Read, Write};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use played::{
    FAILED, LIMIT, Listening, TAG, control, data, fragment, heard, module, nobody_is_lost, open,
    turn, until,
};
use slim_btl::frag::{ALWAYS_CALLBACK, BTL_OWNERSHIP, BtlDescriptor, FragRef};
use slim_btl::hdr::{FrameKind, HEADER};

/// With ULFM, Open MPI may know of a death before it has heard all that the process has sent. It has ended the requests with that process
/// then, and uses their memory for others.
#[test]
fn nothing_is_delivered_of_a_peer_that_is_known_to_have_failed() {
    let _turn = turn();
    let module = open(Duration::from_millis(50), LIMIT, true);
    let peer = Listening::new(9);
    let endpoint = peer.send(&module);
    let mut stream = peer.accept_and_get_data(&module);
    stream.write_all(&data(b"in time.")).unwrap();
    let got = until(&module, || heard(|heard| heard.delivered.pop()));
    assert_eq!(got, b"in time.");
    FAILED.store(true, Ordering::SeqCst);
    stream.write_all(&data(b"too late")).unwrap();
    drop(stream);
    // Once the end of the stream is read, the peer is lost.
    until(&module, || {
        let text = format!("{endpoint:?}");
        text.contains("link: Over").then_some(())
    });
    FAILED.store(false, Ordering::SeqCst);
    let delivered = heard(|heard| heard.delivered.clone());
    assert!(delivered.is_empty(), "{delivered:?}");
    // The death is known.
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
