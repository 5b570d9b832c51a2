//! What the kernel's numbers say about connections that work.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use slim_sys::{cannot_send, tcp_info};

/// Fills a connection whose other end does not read, with writes of this many bytes. Returns whether the rest of the window was
/// smaller than a segment. The kernel then waits for about 0.2 s before it sends a part of one.
fn rest_is_small(write: usize) -> bool {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let _far = listener.accept().unwrap();
    near.set_nodelay(true).unwrap();
    near.set_nonblocking(true).unwrap();
    let data = vec![0; write];
    while near.write(&data).is_ok() {}
    let (filled, mut small) = (Instant::now(), false);
    while filled.elapsed() < Duration::from_millis(400) {
        let info = tcp_info(near.as_raw_fd()).unwrap();
        assert!(!cannot_send(&info), "window {}", info.tcpi_snd_wnd);
        small |= info.tcpi_unacked == 0 && info.tcpi_snd_wnd > 0;
        std::thread::sleep(Duration::from_millis(1));
    }
    small
}

#[test]
fn a_receiver_that_does_not_read_is_not_a_kernel_that_cannot_send() {
    let writes = [1000, 3000, 7000, 20_000, 40_000, 90_000];
    assert!(writes.iter().any(|n| rest_is_small(*n)), "no small rest");
}
