//! The witness as a relay: it connects two ranks that both reach it, but not each other (`docs/PROTOCOL.md`, section "The witness").
//!
//! It listens at the TCP port with the number of the witness's UDP port. A rank connects, names in RELAY the process that it wants to reach, and
//! from then on the bytes of both directions are passed on, whatever they are.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use slim_core::auth::{JobKey, verify_with_job};
use slim_core::wire::{self, Kind, Message, Relay};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncReadExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};

/// Most connections that are passed on at a time. Each takes two descriptors.
const MOST: usize = 400;
/// Most connections that have not said yet whom they want to reach. The oldest one is closed in favour of a new one: strangers that say
/// nothing keep nobody out.
const ASKING: usize = 128;
/// How long a connection may take to say whom it wants to reach.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a connection to one address of that process may take.
const REACH: Duration = Duration::from_secs(1);
/// When an end has said nothing for so long, its kernel is asked whether it still has the connection.
const QUIET: Duration = Duration::from_secs(60);
/// Pause after a failure to accept, for example for want of descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// Serves relayed connections on a thread of its own, at the TCP port with the number of `at`.
pub fn start(key: JobKey, at: SocketAddr) -> io::Result<()> {
    let listener = std::net::TcpListener::bind(at)?;
    listener.set_nonblocking(true)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let serve = move || runtime.block_on(serve(listener, key));
    thread::Builder::new().name("relay".into()).spawn(move || {
        if let Err(e) = serve() {
            eprintln!("slim: witness: no more connections through the witness: {e}");
        }
    })?;
    Ok(())
}

async fn serve(listener: std::net::TcpListener, key: JobKey) -> io::Result<()> {
    let listener = TcpListener::from_std(listener)?;
    let places = Arc::new(Semaphore::new(MOST));
    let mut asking = VecDeque::new();
    loop {
        match listener.accept().await {
            Ok((from, _)) => {
                asking.retain(|task: &AbortHandle| !task.is_finished());
                if asking.len() >= ASKING
                    && let Some(oldest) = asking.pop_front()
                {
                    oldest.abort();
                }
                let task = tokio::spawn(ask(from, key.clone(), places.clone()));
                asking.push_back(task.abort_handle());
            }
            Err(_) => sleep(PAUSE).await,
        }
    }
}

/// Both ends of a connection notice its end by themselves, so errors need no report.
async fn ask(mut from: TcpStream, key: JobKey, places: Arc<Semaphore>) {
    if let Ok(Ok(relay)) = timeout(PATIENCE, requested(&mut from, &key)).await {
        // From now on a task of its own, which makes no room for others.
        tokio::spawn(async move {
            if let Ok(_place) = places.acquire_owned().await {
                let _ = pass_on(from, &relay).await;
            }
        });
    }
}

async fn pass_on(mut from: TcpStream, relay: &Relay) -> io::Result<()> {
    let mut to = reach(relay).await?;
    for end in [&from, &to] {
        end.set_nodelay(true)?;
        SockRef::from(end).set_tcp_keepalive(&TcpKeepalive::new().with_time(QUIET))?;
    }
    let passed = copy_bidirectional(&mut from, &mut to).await;
    if passed.is_err() {
        // A reset tells the other end that the connection has broken: it need not ask whether the stream was ended.
        for end in [&from, &to] {
            SockRef::from(end).set_linger(Some(Duration::ZERO))?;
        }
    }
    passed.map(drop)
}

/// The process that a rank wants to reach.
async fn requested(from: &mut TcpStream, key: &JobKey) -> io::Result<Relay> {
    let mut message = vec![0; Kind::Relay.message_len()];
    from.read_exact(&mut message).await?;
    let parsed = wire::parse(&message).map_err(io::Error::other)?;
    match parsed.message {
        Message::Relay(relay) if verify_with_job(Some(key), &parsed) => Ok(relay),
        _ => Err(io::ErrorKind::PermissionDenied.into()),
    }
}

async fn reach(relay: &Relay) -> io::Result<TcpStream> {
    let mut last = io::ErrorKind::AddrNotAvailable.into();
    for ip in relay.addrs.iter() {
        let connected = timeout(REACH, TcpStream::connect((*ip, relay.port))).await;
        match connected.unwrap_or_else(|e| Err(e.into())) {
            Ok(to) => return Ok(to),
            Err(e) => last = e,
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use slim_core::auth::seal_with_job;
    use slim_core::wire::AddrList;
    use std::io::{Read, Write};
    use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
    use std::time::Instant;

    fn key() -> JobKey {
        JobKey::new(b"the key of this job").unwrap()
    }

    /// A relay that has begun to serve.
    fn relay() -> SocketAddr {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let at = listener.local_addr().unwrap();
        drop(listener);
        start(key(), at).unwrap();
        at
    }

    fn ask(relay: SocketAddr, key: &JobKey, target: SocketAddr) -> TcpStream {
        let request = Message::Relay(Relay {
            port: target.port(),
            addrs: AddrList::new([target.ip()]),
        });
        let mut conn = TcpStream::connect(relay).unwrap();
        conn.write_all(&seal_with_job(Some(key), &request)).unwrap();
        conn
    }

    #[test]
    fn bytes_and_ends_pass_in_both_directions() {
        let target = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut near = ask(relay(), &key(), target.local_addr().unwrap());
        let (mut far, _) = target.accept().unwrap();
        far.write_all(b"challenge").unwrap();
        let mut buf = [0; 9];
        near.read_exact(&mut buf).unwrap();
        assert_eq!(&buf, b"challenge");
        let data: Vec<u8> = (0..300_000u32).map(|n| n as u8).collect();
        let sender = {
            let (mut near, data) = (near.try_clone().unwrap(), data.clone());
            thread::spawn(move || {
                near.write_all(&data).unwrap();
                near.shutdown(Shutdown::Write).unwrap();
            })
        };
        let mut got = Vec::new();
        far.read_to_end(&mut got).unwrap();
        sender.join().unwrap();
        assert!(got == data, "{} bytes", got.len());
        far.write_all(b"after the end").unwrap();
        drop(far);
        let mut rest = String::new();
        near.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "after the end");
    }

    /// The other end must not take a broken connection for one that was closed.
    #[test]
    fn a_reset_is_passed_on_as_a_reset() {
        let target = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut near = ask(relay(), &key(), target.local_addr().unwrap());
        let (mut far, _) = target.accept().unwrap();
        // The relay has seen that it is connected. A connection that is reset before that could not be made, and such a one is closed.
        far.write_all(b"!").unwrap();
        near.read_exact(&mut [0]).unwrap();
        SockRef::from(&far)
            .set_linger(Some(Duration::ZERO))
            .unwrap();
        drop(far);
        let error = near.read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    }

    #[test]
    fn strangers_that_say_nothing_keep_nobody_out() {
        let target = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let at = relay();
        let silent: Vec<_> = (0..3 * ASKING)
            .map(|_| TcpStream::connect(at).unwrap())
            .collect();
        let begun = Instant::now();
        let mut near = ask(at, &key(), target.local_addr().unwrap());
        let (mut far, _) = target.accept().unwrap();
        far.write_all(b"!").unwrap();
        near.read_exact(&mut [0]).unwrap();
        assert!(begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
        drop(silent);
    }

    #[test]
    fn strangers_and_garbage_get_no_connection() {
        let target = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let to = target.local_addr().unwrap();
        target.set_nonblocking(true).unwrap();
        let at = relay();
        let other = JobKey::new(b"the key of another job").unwrap();
        let mut stranger = ask(at, &other, to);
        let mut garbage = TcpStream::connect(at).unwrap();
        garbage.write_all(&[7; 400]).unwrap();
        for conn in [&mut stranger, &mut garbage] {
            // The end, or a reset if there was more than one message to read.
            assert!(!matches!(conn.read(&mut [0]), Ok(1..)));
        }
        let none = target.accept().unwrap_err();
        assert_eq!(none.kind(), io::ErrorKind::WouldBlock);
        // Nobody listens there.
        drop(target);
        assert_eq!(ask(at, &key(), to).read(&mut [0]).unwrap(), 0);
    }
}
