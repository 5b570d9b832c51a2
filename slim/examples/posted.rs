//! Compares copied and posted sends over loopback: processor time of the sending thread per MiB.
//!
//! usage: `cargo run --release -p slim --example posted`

use std::time::Duration;

use bytes::Bytes;
use slim::{Flow, Session, SessionOptions};

const TOTAL: usize = 128 << 20;
/// Limit of bytes that are posted and not completed.
const AHEAD: usize = 4 << 20;

/// Processor time of the calling thread.
fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn copied(flow: &Flow, buffer: &Bytes) {
    for _ in 0..TOTAL / buffer.len() {
        flow.send_all(buffer, None).expect("the peer receives");
    }
}

fn posted(session: &Session, flow: &Flow, buffer: &Bytes) {
    let (mut posted, mut updates) = (flow.completed(), Vec::new());
    for _ in 0..TOTAL / buffer.len() {
        posted = flow.post(buffer.clone()).expect("the peer receives");
        let ahead = (AHEAD / buffer.len()) as u64;
        if posted - flow.completed() > ahead {
            while posted - flow.completed() > ahead / 2 {
                updates.clear();
                session.wait(&mut updates, None);
            }
        }
    }
    flow.wait_completed(None).expect("the peer receives");
    assert_eq!(flow.completed(), posted);
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limit = Some(Duration::from_secs(10));
    let session = Session::open(SessionOptions::new("posted"))?;
    let endpoint = session.listen("127.0.0.1:0".parse()?)?;
    let near = session.connect(endpoint.local_addr(), limit)?;
    let far = endpoint.accept(limit)?;
    near.wait_negotiated(limit);
    let reader = std::thread::spawn(move || {
        let mut buf = vec![0; 1 << 20];
        while far.recv(&mut buf, None).is_ok_and(|n| n > 0) {}
    });
    println!("{:>8} {:>12} {:>12}", "bytes", "copied/MiB", "posted/MiB");
    for size in [
        512,
        1024,
        2048,
        4096,
        16 << 10,
        64 << 10,
        256 << 10,
        1 << 20,
    ] {
        let buffer = Bytes::from(vec![1; size]);
        let mut best = [Duration::MAX; 2];
        // Alternate the two, so that changes of the machine's speed affect both.
        for _ in 0..3 {
            for (which, best) in best.iter_mut().enumerate() {
                let begun = processor_time();
                match which {
                    0 => copied(&near, &buffer),
                    _ => posted(&session, &near, &buffer),
                }
                *best = (*best).min(processor_time() - begun);
            }
        }
        let [copied, posted] = best.map(|time| time / (TOTAL >> 20) as u32);
        println!("{size:>8} {copied:>12.1?} {posted:>12.1?}");
    }
    near.close();
    session.close(Duration::from_secs(10))?;
    reader.join().expect("it has received everything");
    Ok(())
}
