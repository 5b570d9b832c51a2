//! Connections of flows between two agents are broken: every byte arrives, once.

mod common;

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::thread;
use std::time::{Duration, Instant};

use common::{Kill, LIMIT, Pattern, Server, config, kills, read_pattern, write_pattern};
use slim_agent::Agent;
use slim_core::FinHow;
use slim_core::config::Config;
use slim_core::event::{Event, Record};
use slim_stream::Probe;

fn agents(config: Config) -> (Agent, Server) {
    let client = Agent::start(config.clone()).expect("the agent starts");
    (client, Server::start(config))
}

#[test]
fn a_flow_between_two_agents_becomes_live() {
    let (client, server) = agents(Config::default());
    let (near, far) = server.pair(&client);
    let (a, b) = (near.wait_live(), far.wait_live());
    assert!(a + b < Duration::from_millis(500), "took {a:?} and {b:?}");
    near.write(b"hello").unwrap();
    let mut buf = [0; 5];
    far.read_exact(&mut buf).unwrap();
    assert_eq!(&buf, b"hello");
}

#[test]
fn a_broken_connection_is_replaced() {
    for kill in kills() {
        let (client, server) = agents(Config::default());
        let (near, far) = server.pair(&client);
        near.wait_live();
        far.wait_live();
        near.write(b"before").unwrap();
        let begun = Instant::now();
        near.kill(kill);
        let mut buf = [0; 6];
        far.read_exact(&mut buf).unwrap();
        assert_eq!(&buf, b"before");
        // One direction after the other, so that data of one does not hide that the other is stuck.
        far.write(b"answer").unwrap();
        near.read_exact(&mut buf).unwrap();
        assert_eq!(&buf, b"answer");
        near.write(b"after!").unwrap();
        far.read_exact(&mut buf).unwrap();
        assert_eq!(&buf, b"after!");
        let took = begun.elapsed();
        println!("{kill:?}: there and back after {took:?}");
        assert!(took < Duration::from_secs(1), "{kill:?}: took {took:?}");
        assert!(near.state().resumed >= 1, "{kill:?}: was it broken at all?");
    }
}

#[test]
fn every_kind_of_address_can_be_resumed() {
    let has_v6 = TcpListener::bind("[::1]:0").is_ok();
    for (listen, connect) in [
        ("127.0.0.1:0", "127.0.0.1"),
        ("0.0.0.0:0", "127.0.0.1"),
        // The answer must come from the address that the question was sent to.
        ("0.0.0.0:0", "127.0.0.2"),
        ("[::1]:0", "::1"),
        ("[::]:0", "::1"),
        // One socket for both families.
        ("[::]:0", "127.0.0.1"),
        ("[::]:0", "127.0.0.3"),
    ] {
        if listen.starts_with('[') && !has_v6 {
            println!("without IPv6 nothing listens on {listen}");
            continue;
        }
        let client = Agent::start(Config::default()).unwrap();
        let server = Server::start_on(Config::default(), listen.parse().unwrap());
        let addr = SocketAddr::new(connect.parse().unwrap(), server.addr().port());
        let (near, far) = server.pair_by(&client, addr);
        near.wait_live();
        far.wait_live();
        near.kill(Kill::Fin);
        near.write(b"x").unwrap();
        far.read_exact(&mut [0]).unwrap();
        far.write(b"y").unwrap();
        near.read_exact(&mut [0]).unwrap();
        assert_eq!(near.state().resumed, 1, "{connect} at {listen}");
    }
}

#[test]
fn both_directions_stay_byte_exact_while_connections_are_killed() {
    const TOTAL: usize = 160 << 20;
    const PIECE: usize = 50_000;
    let kills = kills();
    let (client, server) = agents(Config::default());
    let (near, far) = server.pair(&client);
    near.wait_live();
    far.wait_live();
    let mut killed = 0;
    thread::scope(|scope| {
        let jobs = [
            scope.spawn(|| write_pattern(&near, 1, TOTAL, PIECE)),
            scope.spawn(|| read_pattern(&far, 1, TOTAL, PIECE)),
            scope.spawn(|| write_pattern(&far, 2, TOTAL, PIECE)),
            scope.spawn(|| read_pattern(&near, 2, TOTAL, PIECE)),
        ];
        let mut random = Pattern::new(3);
        while !jobs.iter().all(|j| j.is_finished()) {
            // Often enough to hit a resume that is under way now and then.
            thread::sleep(Duration::from_millis(random.next() % 30));
            let end = if random.next().is_multiple_of(2) {
                &near
            } else {
                &far
            };
            if killed < 40 {
                end.kill(kills[random.next() as usize % kills.len()]);
                killed += 1;
            }
        }
        for job in jobs {
            job.join().expect("no wrong bytes").expect("no error");
        }
    });
    let resumed = near.state().resumed;
    println!("{killed} kills, {resumed} resumes");
    assert!(resumed >= 5, "{killed} kills made only {resumed} resumes");
}

#[test]
fn a_stalled_flow_moves_to_a_new_transport_and_loses_nothing() {
    let (client, server) = agents(config(&[("SLIM_STALL", "0.2")]));
    let (near, far) = server.pair(&client);
    near.wait_live();
    far.wait_live();
    near.state().pretence.probe = Some(Probe {
        unacked: 5,
        acked: 0,
        stuck: true,
        ..Probe::default()
    });
    near.write(b"hello").unwrap();
    let took = near.wait("resumed", Duration::from_secs(3), |s| s.resumed > 0);
    near.state().pretence.probe = None;
    assert!(took >= Duration::from_millis(200), "too early: {took:?}");
    let mut buf = [0; 10];
    near.write(b"again").unwrap();
    far.read_exact(&mut buf).unwrap();
    assert_eq!(&buf, b"helloagain");
}

#[test]
fn many_flows_broken_at_once_all_resume() {
    const FLOWS: usize = 60;
    let kills = kills();
    let (client, server) = agents(Config::default());
    let pairs: Vec<_> = (0..FLOWS).map(|_| server.pair(&client)).collect();
    for (near, far) in &pairs {
        near.wait_live();
        far.wait_live();
    }
    for (n, (near, _)) in pairs.iter().enumerate() {
        near.write(&(n as u64).to_be_bytes()).unwrap();
        near.kill(kills[0]);
    }
    thread::scope(|scope| {
        for (n, (near, far)) in pairs.iter().enumerate() {
            scope.spawn(move || {
                let mut buf = [0; 8];
                far.read_exact(&mut buf).unwrap();
                assert_eq!(u64::from_be_bytes(buf), n as u64);
                far.write(&buf).unwrap();
                near.read_exact(&mut buf).unwrap();
                assert_eq!(u64::from_be_bytes(buf), n as u64);
            });
        }
    });
}

#[test]
fn a_resume_waits_for_a_slow_data_call() {
    let (client, server) = agents(Config::default());
    let (near, far) = server.pair(&client);
    near.wait_live();
    far.wait_live();
    // The peer's request suspends the far end, and 50 checks find a call inside.
    far.state().pretence.busy = 50;
    near.kill(Kill::Fin);
    near.write(b"x").unwrap();
    far.wait("resumed", LIMIT, |s| s.resumed > 0 && s.pretence.busy == 0);
    let mut buf = [0; 1];
    far.read_exact(&mut buf).unwrap();
}

/// The front end has suspended the flow by itself, and a call is still inside. All other flows go on.
#[test]
fn a_call_that_never_returns_costs_its_own_flow_only() {
    let (client, server) = agents(Config::default());
    let (near, far) = server.pair(&client);
    let (other, other_far) = server.pair(&client);
    for end in [&near, &far, &other, &other_far] {
        end.wait_live();
    }
    near.state().pretence.busy = u32::MAX;
    let begun = Instant::now();
    near.kill(Kill::Fin);
    let error = thread::scope(|scope| {
        let write = scope.spawn(|| near.write(b"x").unwrap_err());
        near.wait("asked", LIMIT, |s| s.pretence.asked > 3);
        let killed = Instant::now();
        other.kill(Kill::Fin);
        other.write(b"y").unwrap();
        other_far.read_exact(&mut [0]).unwrap();
        let took = killed.elapsed();
        assert!(took < Duration::from_millis(500), "took {took:?}");
        write.join().unwrap()
    });
    assert_eq!(error.raw_os_error(), Some(libc::ETIMEDOUT));
    let took = begun.elapsed();
    assert!(took > Duration::from_secs(9), "took {took:?}");
    assert_eq!(near.state().resumed, 0);
}

#[test]
fn an_escalation_waits_for_data_calls() {
    let (client, server) = agents(Config::default());
    let (near, far) = server.pair(&client);
    near.wait_live();
    far.wait_live();
    far.state().pretence.busy = 60;
    near.reset();
    let error = far.read(&mut [0]).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ECONNRESET));
    assert_eq!(far.state().pretence.busy, 0);
}

/// One end lacks bytes that the other asks for. Neither goes on, and the other end does not take what it has got for the whole stream.
#[test]
fn a_flow_that_lacks_bytes_ends_in_an_error_at_both_ends() {
    for kill in kills() {
        let (client, server) = agents(Config::default());
        // Most bytes stay with the sender's kernel.
        let listener = socket2::SockRef::from(&server.listener);
        listener.set_recv_buffer_size(4096).unwrap();
        let (near, far) = server.pair(&client);
        near.wait_live();
        far.wait_live();
        near.write(&[7; 200_000]).unwrap();
        near.stream.with_half(|half| half.trim_to(0));
        near.kill(kill);
        near.read(&mut [0]).unwrap_err();
        let mut buf = [0; 4096];
        let end = loop {
            match far.read(&mut buf) {
                Ok(n) if n > 0 => {}
                end => break end,
            }
        };
        let errno = end.map_err(|e| e.raw_os_error());
        assert_eq!(errno, Err(Some(libc::ECONNRESET)), "{kill:?}");
        assert!(far.state().legacy.is_none(), "{kill:?}: is plain TCP");
    }
}

#[test]
fn a_half_close_survives_a_broken_connection() {
    for kill in kills() {
        let (client, server) = agents(Config::default());
        let (near, far) = server.pair(&client);
        near.wait_live();
        far.wait_live();
        near.write(b"last words").unwrap();
        near.finish(FinHow::HalfClose);
        far.wait("told of the end", LIMIT, |_| far.stream.ends_at(10));
        near.kill(kill);
        let mut buf = [0; 10];
        far.read_exact(&mut buf).unwrap();
        assert_eq!(&buf, b"last words");
        assert_eq!(far.read(&mut buf).unwrap(), 0, "{kill:?}");
        far.write(b"0123456789").unwrap();
        near.read_exact(&mut buf).unwrap();
        assert_eq!(&buf, b"0123456789");
    }
}

#[test]
fn a_closed_flow_stays_until_it_is_delivered() {
    const TOTAL: usize = 3 << 20;
    for kill in kills() {
        let (client, server) = agents(Config::default());
        let (near, far) = server.pair(&client);
        near.wait_live();
        far.wait_live();
        thread::scope(|scope| {
            // Nothing is read yet, so most bytes are in the buffers of both kernels when the connection breaks.
            let writer = scope.spawn(|| write_pattern(&near, 7, TOTAL, 4096));
            thread::sleep(Duration::from_millis(100));
            far.kill(kill);
            read_pattern(&far, 7, TOTAL, 4096).unwrap();
            writer.join().unwrap().unwrap();
        });
        near.write(b"and this").unwrap();
        near.kill(kill);
        near.close();
        client.drain_exit(Duration::from_secs(5));
        let mut buf = [0; 8];
        far.read_exact(&mut buf).unwrap();
        assert_eq!(&buf, b"and this", "{kill:?}");
        assert_eq!(far.read(&mut buf).unwrap(), 0);
    }
}

#[test]
fn the_event_log_has_what_happened_to_a_flow() {
    let path = std::env::temp_dir().join(format!("slim-events-{}.json", std::process::id()));
    let (client, server) = agents(config(&[("SLIM_EVENTS", path.to_str().unwrap())]));
    let (near, far) = server.pair(&client);
    near.wait_live();
    far.wait_live();
    near.kill(Kill::Fin);
    near.write(b"x").unwrap();
    far.read_exact(&mut [0]).unwrap();
    assert!(client.flush(LIMIT) && server.agent.flush(LIMIT));
    let text = fs::read_to_string(&path).unwrap();
    fs::remove_file(&path).unwrap();
    let records: Vec<Record> = text
        .lines()
        .map(|line| serde_json::from_str(line).expect(line))
        .collect();
    let count = |f: fn(&Event) -> bool| records.iter().filter(|r| f(&r.event)).count();
    assert_eq!(count(|e| matches!(e, Event::Live)), 2, "{text}");
    assert_eq!(
        count(|e| matches!(e, Event::Resume { epoch: 1.., .. })),
        2,
        "{text}"
    );
    assert!(count(|e| matches!(e, Event::Suspend { .. })) >= 2, "{text}");
    // The same flow has the same name at both ends.
    assert!(records.iter().all(|r| r.flow == records[0].flow));
}

#[test]
fn a_reset_by_the_application_is_no_fault() {
    let (client, server) = agents(Config::default());
    let (near, far) = server.pair(&client);
    near.wait_live();
    far.wait_live();
    near.reset();
    let begun = Instant::now();
    let error = far.read(&mut [0]).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ECONNRESET));
    let took = begun.elapsed();
    assert!(took < Duration::from_millis(500), "took {took:?}");
}
