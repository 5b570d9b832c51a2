//! A descriptor number is used again as soon as it is closed. A data call that has read the number of a flow's socket must not use it then.

mod common;

use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use common::*;
use rustix::io::fcntl_dupfd_cloexec;
use slim::TransferError;

/// Holds the interrupted thread where it is, for as long as another needs to close the flow and to use the number again.
extern "C" fn hold(_: libc::c_int) {
    // SAFETY: poll without descriptors touches no memory, and may be called in a handler.
    unsafe { libc::poll(std::ptr::null_mut(), 0, 4) };
}

/// Interrupts a thread that receives at a random moment, closes its flow, and looks whether it takes bytes from new descriptors.
fn no_foreign_bytes_are_taken(abort: bool) {
    // SAFETY: the handler may be called at any time.
    unsafe { libc::signal(libc::SIGUSR1, hold as extern "C" fn(libc::c_int) as usize) };
    for round in 0..300 {
        let (session, theirs) = (session(), session());
        let endpoint = listen(&theirs);
        let (near, _far) = pair(&session, &endpoint);
        let (tell, told) = mpsc::channel();
        thread::scope(|scope| {
            let receiver = scope.spawn(|| {
                // SAFETY: has no conditions.
                tell.send(unsafe { libc::pthread_self() }).unwrap();
                while near.try_recv(&mut [0; 10]) != Err(TransferError::Closed) {}
            });
            let thread = told.recv().unwrap();
            thread::sleep(Duration::from_micros(round % 100));
            // SAFETY: the thread is joined later.
            unsafe { libc::pthread_kill(thread, libc::SIGUSR1) };
            thread::sleep(Duration::from_micros(200));
            match abort {
                true => drop(session.abort(Duration::from_millis(1))),
                false => drop(session.close(Duration::from_millis(1))),
            }
            // SLIM's numbers are high, so these must be, too.
            let others: Vec<_> = (0..4)
                .map(|_| {
                    let (mut one, other) = UnixStream::pair().unwrap();
                    one.write_all(b"foreign").unwrap();
                    fcntl_dupfd_cloexec(&other, 4096).unwrap()
                })
                .collect();
            receiver.join().unwrap();
            for other in others {
                assert_eq!(slim_sys::readable(other.as_raw_fd()), 7, "{round}");
            }
        });
    }
}

#[test]
fn a_receive_takes_no_bytes_of_a_descriptor_opened_after_an_abort() {
    no_foreign_bytes_are_taken(true);
}

#[test]
fn a_receive_takes_no_bytes_of_a_descriptor_opened_after_a_close() {
    no_foreign_bytes_are_taken(false);
}
