//! Calls on descriptors, bare and with the preload library: on a TCP connection, which it manages, and on
//! a pair of Unix sockets, which it does not manage.
//!
//! The program measures, then runs itself once more with the library loaded. Each call moves one byte that
//! is there already, so nothing waits. With the library a process has a second thread, and then the kernel
//! takes and drops a reference to the descriptor in each call. Programs with threads of their own, such as
//! Open MPI's, pay that without the library, too: the last measurements have a second thread in both runs.

use std::hint::black_box;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};
use std::{env, fs, ptr, thread};

use criterion::Criterion;

/// Set in the run that has the library.
const SECOND: &str = "_BENCH_WITH_LIBRARY";
/// Unmanaged descriptors in a large poll.
const MANY: usize = 64;

fn main() -> ExitCode {
    if env::var_os(SECOND).is_some() {
        measure("slim");
        return ExitCode::SUCCESS;
    }
    measure("bare");
    match with_library() {
        Ok(true) => {}
        Ok(false) => return ExitCode::FAILURE,
        Err(reason) => eprintln!("calls with the library are left out: {reason}"),
    }
    Criterion::default().configure_from_args().final_summary();
    ExitCode::SUCCESS
}

/// Runs this program again under the library.
fn with_library() -> Result<bool, String> {
    let library = slim_lab::artifacts::preload().map_err(|e| e.to_string())?;
    let program = env::current_exe().map_err(|e| e.to_string())?;
    let events = env::temp_dir().join(format!("slim-calls-{}.jsonl", std::process::id()));
    let status = Command::new(program)
        .args(env::args_os().skip(1))
        .env("LD_PRELOAD", library)
        .env("SLIM_EVENTS", &events)
        .env(SECOND, &events)
        .status();
    let _ = fs::remove_file(events);
    Ok(status.map_err(|e| e.to_string())?.success())
}

fn measure(name: &str) {
    let mut criterion = Criterion::default().configure_from_args();
    let listener = TcpListener::bind("127.0.0.1:0").expect("listen on the loopback");
    let at = listener.local_addr().expect("it was bound");
    let near = TcpStream::connect(at).expect("connect to our own listener");
    let (far, _) = listener.accept().expect("a connection was just made");
    near.set_nodelay(true)
        .expect("an option that every socket has");
    wait_live();
    let (left, right) = UnixStream::pair().expect("a pair of sockets");
    let (from, to) = (left.as_raw_fd(), right.as_raw_fd());
    calls(
        &mut criterion,
        "tcp",
        name,
        near.as_raw_fd(),
        far.as_raw_fd(),
    );
    calls(&mut criterion, "unix", name, from, to);
    poll_of_many(&mut criterion, "unix", name, to);
    // Sleeps until the process ends.
    thread::spawn(|| {
        loop {
            thread::park();
        }
    });
    calls(&mut criterion, "unix, two threads", name, from, to);
    poll_of_many(&mut criterion, "unix, two threads", name, to);
}

/// Calls on a connection from `from` to `to`.
fn calls(criterion: &mut Criterion, kind: &str, name: &str, from: RawFd, to: RawFd) {
    let mut group = criterion.benchmark_group(format!("calls/{kind}"));
    group.bench_function(format!("write and read/{name}"), |b| {
        b.iter(|| write_and_read(from, to));
    });
    group.bench_function(format!("send and recv/{name}"), |b| {
        b.iter(|| send_and_recv(from, to));
    });
    // From here on a byte waits to be read.
    write_only(from);
    let epoll = epoll_of(to);
    group.bench_function(format!("poll/{name}"), |b| b.iter(|| poll(&mut [to])));
    group.bench_function(format!("epoll_wait/{name}"), |b| {
        b.iter(|| epoll_wait(epoll))
    });
    group.finish();
}

/// A poll that names one ready descriptor many times.
fn poll_of_many(criterion: &mut Criterion, kind: &str, name: &str, fd: RawFd) {
    let mut group = criterion.benchmark_group(format!("calls/{kind}"));
    group.bench_function(format!("poll of {MANY}/{name}"), |b| {
        b.iter(|| poll(&mut [fd; MANY]));
    });
    group.finish();
}

/// With the library: waits until the connection can be resumed.
fn wait_live() {
    let Some(events) = env::var_os(SECOND) else {
        return;
    };
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(10) {
        let log = fs::read_to_string(&events).unwrap_or_default();
        if log.contains("\"kind\":\"live\"") {
            return;
        }
        thread::sleep(Duration::from_millis(10));
    }
    panic!("the connection was never live: there is nothing to measure");
}

fn write_and_read(from: RawFd, to: RawFd) {
    let mut byte = [1u8];
    // SAFETY: one byte is read from, and written to, a live array of one byte.
    let moved = unsafe {
        libc::write(from, byte.as_ptr().cast(), 1) + libc::read(to, byte.as_mut_ptr().cast(), 1)
    };
    assert_eq!(black_box(moved), 2);
}

fn send_and_recv(from: RawFd, to: RawFd) {
    let mut byte = [1u8];
    // SAFETY: as above.
    let moved = unsafe {
        libc::send(from, byte.as_ptr().cast(), 1, 0)
            + libc::recv(to, byte.as_mut_ptr().cast(), 1, 0)
    };
    assert_eq!(black_box(moved), 2);
}

fn write_only(from: RawFd) {
    // SAFETY: one byte of a live array.
    assert_eq!(unsafe { libc::write(from, [1u8].as_ptr().cast(), 1) }, 1);
}

/// A poll that finds all descriptors ready.
fn poll<const N: usize>(fds: &mut [RawFd; N]) {
    let mut entries = fds.map(|fd| libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    });
    // SAFETY: the pointer and the number are those of a live array.
    let ready = unsafe { libc::poll(entries.as_mut_ptr(), N as libc::nfds_t, 0) };
    assert_eq!(black_box(ready), N as i32);
}

fn epoll_of(fd: RawFd) -> RawFd {
    let mut event = libc::epoll_event {
        events: libc::EPOLLIN as u32,
        u64: 0,
    };
    // SAFETY: the event is live across the call that reads it; the descriptor stays open to the end.
    unsafe {
        let epoll = libc::epoll_create1(0);
        assert_eq!(
            libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, fd, ptr::from_mut(&mut event)),
            0
        );
        epoll
    }
}

fn epoll_wait(epoll: RawFd) {
    let mut event = libc::epoll_event { events: 0, u64: 0 };
    // SAFETY: `event` has room for the one event that the call is told to return at most.
    let ready = unsafe { libc::epoll_wait(epoll, &mut event, 1, 0) };
    assert_eq!(black_box(ready), 1);
}
