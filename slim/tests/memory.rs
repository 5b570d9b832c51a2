//! The memory of idle flows.

mod common;

use std::thread;
use std::time::Duration;

use common::{LIMIT, listen, session};

const FLOWS: usize = 1000;
/// Bytes of the heap for one end of an idle flow, without the program's own.
const MOST: usize = 1280;

/// Bytes of the heap in use.
fn heap() -> usize {
    // SAFETY: no arguments, and no effect on the heap.
    unsafe { libc::mallinfo2() }.uordblks
}

/// Both ends of a flow are in this process.
#[test]
fn an_idle_flow_takes_little_memory() {
    let (near, far) = (session(), session());
    let endpoint = listen(&far);
    let blob = endpoint.blob().expect("a blob");
    let connect = |flows: usize| -> Vec<_> {
        let one = |_| {
            let ends = thread::scope(|scope| {
                let connecting = scope.spawn(|| near.connect_blob(&blob, LIMIT));
                let accepted = endpoint.accept(LIMIT).expect("a flow");
                [connecting.join().unwrap().expect("a flow"), accepted]
            });
            let mut byte = [0];
            ends[0].send(b"a", LIMIT).expect("sends");
            ends[1].recv(&mut byte, LIMIT).expect("receives");
            ends[1].send(b"b", LIMIT).expect("sends");
            ends[0].recv(&mut byte, LIMIT).expect("receives");
            ends
        };
        (0..flows).map(one).collect()
    };
    // What the first flows need for all.
    let first = connect(10);
    thread::sleep(Duration::from_secs(3));
    let before = heap();
    let flows = connect(FLOWS);
    // The agent probes flows until all bytes are acknowledged, and then forgets what it needs for that.
    thread::sleep(Duration::from_secs(3));
    let each = heap().saturating_sub(before) / (2 * FLOWS);
    println!("{each} B for one end of an idle flow");
    assert!(each <= MOST, "{each} B");
    drop((first, flows));
}
